"""The leaders of groups sum their models in a ring or a tree, weighted by samples (F8).

Any member may lead: the one that answers for a group brings its model, and a replacement brings the same bits. So an
exchange can restart at any time, and a group that is late adopts the sum of the others.
"""

import hashlib
import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from socflower.hierarchy.averaging import first_non_finite
from socflower.peers.collective import (
    Collective,
    Poll,
    exchange_over,
    gather_json,
    no_poll,
)
from socflower.peers.leaders.leader_port import LeaderPort
from socflower.peers.leaders.model_changes import ChangeCompression, Floats, reals
from socflower.peers.membership import (
    LEAVE,
    Generation,
    LeaderMembership,
    LeftOut,
    MemberState,
)
from socflower.peers.session import ElasticSession, Role
from socflower.peers.transports.grpc import GrpcRing
from socflower.peers.transports.in_process import in_process_rings
from socflower.peers.transports.port import CALL_LIMIT_BYTES, Caller, RingPort
from socflower.peers.transports.tree import Place, grpc_tree, in_process_trees
from socflower.wire.arrays import MalformedBytes, array_to_bytes, pack_arrays, unpack_arrays
from socflower.wire.message_keys import RingTask
from socflower.wire.secure_channel import PeerFailed

_Array = NDArray[Any]
_RESULT = "result"
# A name that no tensor has.
_STEPS = "/steps"


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupsModel:
    """A model and the groups whose training is in it."""

    arrays: Mapping[str, _Array]
    # The samples of those groups.
    samples: float
    # In the order of the plan; empty if the model is of no use.
    groups: tuple[int, ...]
    # Of the blocks of a sum in eight bits, which this is; see `feedback_after`.
    steps: Floats | None = None
    # Of the model before the training, the tensors with values that are not finite: if these stay,
    # they are constants.
    began_with: Mapping[str, _Array] = field(default_factory=dict)


def exchange_models(
    ring: Collective,
    own: GroupsModel,
    poll: Poll = no_poll,
    changes: ChangeCompression | None = None,
) -> GroupsModel:
    """Return the mean of the models of all members of a ring, by samples; all of them get the same bits (F8).

        w[i] = sum_k float32(p_k * w_k[i]),    p_k = samples_k / sum(samples)

    Sums are in float32, for float64 tensors in float64. The order of a sum follows from the ring (each part begins at
    another member, `rings.all_reduce`) or from a tree (`rings.tree`), so it depends on the order of members alone. With
    `changes`, the tensors that it compresses are its sum; a member that is alone keeps its model and its feedback. Of
    integer tensors, which are counters, the largest values are taken. A model without samples, or with NaN or infinite
    values that it did not have in `began_with`, is left out, and `groups` does not have its group. If models differ in
    their tensors, every member gets its own model back. Raises what the ring and `poll` raise.
    """
    if ring.size == 1:
        changes = None
    usable = _is_usable(own, changes, ring.size)
    heads = _gather_heads(ring, own, usable, changes, poll)
    total = math.fsum(head["samples"] for head in heads)
    if len({head["layout"] for head in heads}) > 1 or not total:
        return own
    share = own.samples / total if usable else 0.0
    averaged: dict[str, _Array] = {}
    steps: Floats | None = None
    if changes is not None:
        change = changes.change(own.arrays, share)
        own_change = change if usable else np.zeros_like(change)
        change, steps = exchange_over(ring, changes.sum(own_change, ring.size), poll)
        averaged |= changes.model(own.arrays, change)
    left = {name: array for name, array in own.arrays.items() if name not in averaged}
    for dtype in (np.float32, np.float64):
        summed = {name: array for name, array in left.items() if _sum_type(array) == dtype}
        if summed:
            averaged |= _sum(ring, summed, share, dtype, poll)
    counters = {name: array for name, array in own.arrays.items() if _sum_type(array) is None}
    if counters:
        averaged |= _largest(ring, counters, poll, [bool(head["groups"]) for head in heads])
    return GroupsModel(
        arrays={name: averaged[name] for name in own.arrays},
        samples=total,
        steps=steps,
        groups=tuple(group for head in heads for group in head["groups"]),
    )


def _is_usable(own: GroupsModel, changes: ChangeCompression | None, size: int) -> bool:
    """Return whether a model has samples and finite values, also in the sums of `changes`."""
    if not own.groups or not 0 < own.samples < math.inf:
        return False
    if first_non_finite(own.arrays, own.began_with) is not None:
        return False
    return changes is None or _can_be_summed(changes.change(own.arrays, 1.0), size)


def _gather_heads(
    ring: Collective,
    own: GroupsModel,
    usable: bool,
    changes: ChangeCompression | None,
    poll: Poll,
) -> list[dict[str, Any]]:
    """Return groups, samples and layout of every member's model; unusable models have neither groups nor samples."""
    layout = _layout_digest(own.arrays)
    if changes is not None:
        layout += changes.layout(own.arrays)
    head = {
        "groups": own.groups if usable else (),
        "samples": own.samples if usable else 0.0,
        "layout": layout,
    }
    return gather_json(ring, head, poll)


def feedback_after(
    own: GroupsModel, mean: GroupsModel, changes: ChangeCompression
) -> Floats | None:
    """Return a group's unsent changes after an exchange; they change only if the group is in the mean."""
    if mean.steps is None or not {*own.groups} <= {*mean.groups}:
        return changes.feedback
    return changes.unsent(own.arrays, own.samples / mean.samples, mean.steps)


def _can_be_summed(change: Floats, size: int) -> bool:
    return not change.size or float(np.abs(change).max()) < float(np.finfo(np.float32).max) / size


def exchange_in_process(
    models: Sequence[GroupsModel],
    changes: Sequence[ChangeCompression | None] | None = None,
    places: Sequence[Place] = (),
) -> GroupsModel:
    """Return the results of `exchange_models` for members with these models, in ring order or in a tree of `places`."""
    rings = in_process_trees(places) if places else in_process_rings(len(models))
    polls = [no_poll] * len(models)
    with ThreadPoolExecutor(len(models)) as threads:
        try:
            first, *_ = threads.map(
                exchange_models, rings, models, polls, changes or [None] * len(models)
            )
        finally:
            for ring in rings:
                ring.close()
    return first


def _sum(
    ring: Collective, arrays: Mapping[str, _Array], share: float, dtype: type, poll: Poll
) -> dict[str, _Array]:
    flat: _Array = np.empty(sum(reals(array).size for array in arrays.values()), dtype)
    start = 0
    for array in arrays.values():
        row = reals(array)
        flat[start : start + row.size] = row.astype(np.float64) * share if share else 0.0
        start += row.size
    ring.all_reduce(torch.from_numpy(flat)).wait(poll)
    summed: dict[str, _Array] = {}
    start = 0
    for name, array in arrays.items():
        row = reals(array)
        part = flat[start : start + row.size].astype(row.dtype)
        summed[name] = part.view(array.dtype).reshape(array.shape)
        start += row.size
    return summed


def _largest(
    ring: Collective, counters: Mapping[str, _Array], poll: Poll, usable: Sequence[bool]
) -> dict[str, _Array]:
    parts = ring.all_gather(b"".join(array_to_bytes(array) for array in counters.values()), poll)
    parts = [part for part, counts in zip(parts, usable, strict=True) if counts]
    largest: dict[str, _Array] = {}
    start = 0
    for name, array in counters.items():
        stored = array.dtype.newbyteorder("<")
        each = [
            np.frombuffer(part, stored, array.size, start).astype(array.dtype) for part in parts
        ]
        largest[name] = np.maximum.reduce(each).reshape(array.shape)
        start += array.nbytes
    return largest


def _sum_type(array: _Array) -> type | None:
    """Return the type in which an array is summed; None for counters."""
    if not np.issubdtype(array.dtype, np.inexact):
        return None
    return (
        np.float64 if array.dtype in (np.dtype(np.float64), np.dtype(np.complex128)) else np.float32
    )


def _layout_digest(arrays: Mapping[str, _Array]) -> str:
    layout = [(name, array.dtype.name, array.shape) for name, array in arrays.items()]
    return hashlib.sha256(json.dumps(layout).encode()).hexdigest()


class LeaderMeeting(Role[GroupsModel]):
    """One group's part in an exchange among the groups of a plan, on its own machine; used once."""

    what = "leaders"

    def __init__(
        self,
        port: LeaderPort,
        groups: Sequence[int],
        *,
        heartbeat_s: float,
        rendezvous_until_s: float,
        places: Mapping[int, Place] | None = None,
        ended: set[int] | None = None,
    ) -> None:
        self._port, self._groups, self._places = port, tuple(groups), places or {}
        self._ended = set() if ended is None else ended
        self._heartbeat_s, self._rendezvous_until_s = heartbeat_s, rendezvous_until_s
        self._result: GroupsModel | None = None
        self._packed = b""
        self._ring: Collective | None = None
        self.log_lines: list[str] = []
        port.handle(_RESULT, self._on_result)

    def exchange(
        self, own: GroupsModel, poll: Poll, changes: ChangeCompression | None = None
    ) -> GroupsModel:
        """Return the mean with the models of all groups that can be reached; raise what `poll` raises.

        The wait for a group lasts as long as any of its members lives. If the others have a mean without this group,
        its own model is returned.
        """
        self._own, self._changes, self._poll = own, changes, poll
        membership = LeaderMembership(
            self._port,
            self._port.rank,
            self._groups,
            heartbeat_s=self._heartbeat_s,
            rendezvous_s=max(0.0, self._rendezvous_until_s - time.monotonic()),
            departed=self._ended,
        )
        self._session = ElasticSession(membership, poll)
        try:
            return self._session.run(self)
        finally:
            self.release()
            self.log_lines += membership.log_lines
            membership.close()

    def kept(self) -> MemberState:
        """Return whether this leader has the result."""
        return MemberState(num_steps=int(self._result is not None), has_model=True, optimizer="")

    def form(self, generation: Generation) -> None:
        """Open a ring or a tree of the leaders."""
        self._generation, self._ring = generation, self._open(generation)

    def work(self) -> None:
        """Sum the models, unless a leader has the result; then all get it."""
        generation, ring, poll = self._generation, self._ring, self._session.poll
        assert ring is not None
        if not generation.num_steps:
            self._result = exchange_models(ring, self._own, poll, self._changes)
            return
        source = generation.members.index(generation.source)
        payload = ring.broadcast(self._pack() if ring.rank == source else None, source, poll)
        self._result = self._result or unpack_model(payload)

    def finish(self) -> GroupsModel:
        """Announce the result, and return it; this group's own model if the others have summed without it."""
        self.release()
        self._session.membership.finish()
        assert self._result is not None
        # The others may have reached none of its members.
        is_in = {*self._own.groups} <= {*self._result.groups}
        return self._result if is_in or not self._generation.num_steps else self._own

    def release(self) -> None:
        """Close the ring."""
        if self._ring is not None:
            self._ring.close()

    def without_model(self, outcome: str) -> GroupsModel:
        """Return the group's own model: its leader met no other."""
        why = self._session.why_left_out
        self.log_lines.append(f"its leader met no other leader: {why}")
        return self._own

    def ask_for_result(self, other: int) -> None:
        """Ask a leader that has finished for the result, and continue without it."""
        self._result = self._result or self._fetch_result(other)
        assert isinstance(self._session.membership, LeaderMembership)
        self._session.membership.go_on_without(other)

    def _open(self, generation: Generation) -> Collective:
        members = generation.members
        if len(members) == 1:
            return in_process_rings(1)[0]
        if not self._places:
            return GrpcRing(self._port, members, generation.number, self._heartbeat_s)
        return grpc_tree(
            self._port,
            members,
            [self._places[group] for group in members],
            generation.number,
            self._heartbeat_s,
        )

    def _fetch_result(self, group: int) -> GroupsModel | None:
        """Return the result of a leader that has finished; None if it is no longer available."""
        payload = bytearray()
        with suppress(PeerFailed, MalformedBytes):
            while part := self._port.call(
                group, _RESULT, str(len(payload)).encode(), timeout_s=self._heartbeat_s
            ):
                self._poll()
                payload += part
            return unpack_model(bytes(payload))
        return None

    def _on_result(self, caller: Caller, body: bytes) -> bytes:
        start = int(body)
        return b"" if self._result is None else self._pack()[start : start + CALL_LIMIT_BYTES]

    def _pack(self) -> bytes:
        assert self._result is not None
        self._packed = self._packed or pack_model(self._result)
        return self._packed


class GroupLeader:
    """A group's part in an exchange, run by the member that answers for it; `ring` lists the others that may.

    It runs in its own thread, since other groups may take long, and continues while the group's ring forms again.
    """

    def __init__(self, port: RingPort, group: int, ring: RingTask) -> None:
        self._group, self._ring = group, ring
        self._members: dict[int, list[int]] = {}
        for text in ring.leaders:
            ident, participant, _ = text.split(" ")
            self._members.setdefault(int(ident), []).append(int(participant))
        # Otherwise other leaders could not reach this one.
        meets = len(self._members) > 1 and ring.participant in self._members[group]
        self._port = LeaderPort(port, group, self._members) if meets else None
        # Groups that have no model in this interval.
        self._ended: set[int] = set()
        if self._port is not None:
            self._port.handle(LEAVE, self._on_leave)
        self._rendezvous_until_s = time.monotonic() + ring.rendezvous_s
        self._meeting: Future[GroupsModel] | None = None
        self._left = False
        self.log_lines: list[str] = []

    def mean(
        self,
        own: Callable[[], GroupsModel],
        timeout_s: float,
        changes: ChangeCompression | None = None,
    ) -> GroupsModel | None:
        """Return the mean of all groups, or None if it takes longer; the first call begins with the group's `own`."""
        if self._meeting is None:
            self._meeting = self._begin(own(), changes)
        wait([self._meeting], timeout=timeout_s)
        return self._meeting.result() if self._meeting.done() else None

    def withdraw(self) -> None:
        """Tell the other groups' leaders that this group has no model in this interval, so that none waits for it."""
        for other in self._members.keys() - {self._group}:
            if self._port is not None:
                with suppress(PeerFailed):
                    self._port.call(other, LEAVE, timeout_s=self._ring.heartbeat_s)

    def _on_leave(self, caller: Caller, body: bytes) -> bytes:
        self._ended.add(caller.rank)
        return b""

    def close(self) -> None:
        """Leave the others, if they still meet."""
        self._left = True
        if self._meeting is not None:
            wait([self._meeting])

    def _begin(self, own: GroupsModel, changes: ChangeCompression | None) -> "Future[GroupsModel]":
        if self._port is None:
            alone = Future[GroupsModel]()
            alone.set_result(own)
            return alone
        meeting = LeaderMeeting(
            self._port,
            tuple(self._members),
            heartbeat_s=self._ring.heartbeat_s,
            rendezvous_until_s=self._rendezvous_until_s,
            places=_places(self._ring),
            ended=self._ended,
        )
        self.log_lines = meeting.log_lines
        thread = ThreadPoolExecutor(1, thread_name_prefix="ring-leaders")
        begun = thread.submit(meeting.exchange, own, self._require_present, changes)
        thread.shutdown(wait=False)
        return begun

    def _require_present(self) -> None:
        if self._left:
            raise LeftOut("this member has left its own group")


def _places(ring: RingTask) -> dict[int, Place]:
    places = (tuple(map(int, text.split(" "))) for text in ring.leader_places)
    return {group: tuple(place) for group, *place in places}


def pack_model(model: GroupsModel) -> bytes:
    """Return a model as bytes, for `unpack_model`."""
    head = np.array([model.samples, *model.groups], np.float64)
    steps = {} if model.steps is None else {_STEPS: model.steps}
    return b"".join(pack_arrays({"": head, **steps, **model.arrays}))


def unpack_model(payload: bytes) -> GroupsModel:
    """Return what `pack_model` packed; `MalformedBytes` for anything else."""
    arrays = unpack_arrays(memoryview(payload))
    samples, *groups = arrays.pop("").tolist()
    steps = arrays.pop(_STEPS, None)
    return GroupsModel(arrays=arrays, samples=samples, groups=tuple(map(int, groups)), steps=steps)
