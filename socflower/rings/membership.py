"""Who is in a ring: forming it, noticing that a member is gone, forming it again with those that are left.

Every member runs the same protocol over its ring port. The first member of the ring's order that lives coordinates:
the others *join* at it with what they have (steps done, a model or none), it waits for all that live, and its
*decision* is the next generation of the ring. Members that come too late, or that the others took for dead, are told
that they are left out. Nobody needs to be elected, and any member may die at any point of this.

If the network parts a group in two, each part goes on alone; the strategy averages in one answer of a group.
"""

import json
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from logging import INFO, WARNING
from typing import Any, TypeVar

from socflower.rings.collective import PeerLost, Poll
from socflower.rings.transports.port import Caller, PeerRefused, PeerSilent, PeerUnreachable, RingPort
from socflower.wire.logs import log

_SLICE_S = 1.0  # after so long a member looks anew who might coordinate
_PAUSE_S = 0.05
_START_PAUSE_S = 0.25  # while processes start, which takes seconds, asking more often only slows them down
_TIMES_SILENT = 2  # a silent peer is asked again before it is given up: a loaded machine answers late

_Answer = TypeVar("_Answer")


@dataclass(frozen=True, kw_only=True, slots=True)
class Standing:
    """What a member brings to a ring."""

    num_steps: int  # it has applied in this interval
    has_model: bool
    optimizer: str  # digest of its optimiser's state; empty without one


@dataclass(frozen=True, kw_only=True, slots=True)
class Generation:
    """A ring that was agreed on."""

    number: int
    members: tuple[int, ...]  # participants, in ring order
    source: int  # the member whose model and steps count; the others take them over
    num_steps: int  # that the source has applied
    same_model: bool  # whether all members have that model, at that step, already
    optimizer_source: int  # the member whose optimiser counts: a leader that is new to its group has none
    same_optimizer: bool


class LeftOut(Exception):
    """The others went on without this member."""


class NoModel(Exception):
    """None of the members that came has the model: its holder never did."""


class Membership:
    """One member's view of its group, for one interval.

    Parameters
    ----------
    port : RingPort
        Where peers ask this member; its ranks are participants.
    participant, members : int, sequence of int
        This member, and all that should be there, in ring order.
    heartbeat_s, rendezvous_s : float
        A member silent for so long is hung; one that has not come after so long at the beginning is absent.
    """

    def __init__(
        self, port: RingPort, participant: int, members: Sequence[int], *, heartbeat_s: float, rendezvous_s: float,
    ) -> None:
        self._port, self._me = port, participant
        self._patience_s = heartbeat_s / 4  # with one question; so that a hung member costs less than a heartbeat
        self._deadline_s = time.monotonic() + rendezvous_s
        self._planned = tuple(members)
        self._members = self._planned  # of the newest decision; at first, of the plan
        self._changed = threading.Condition()
        self._joins: dict[int, dict[int, Standing]] = {}  # by generation and participant
        self._decision: Generation | None = None
        self._wanted = 0  # the highest generation that anybody asks for
        self._gone: set[int] = set()  # members that said that they leave
        self._done: set[int] = set()  # members that said that they have all that the interval came to
        self._seen: set[int] = set()  # members that have been there; one that no longer is has not yet to start
        self._suspect: int | None = None  # the member that the watchdog found silent
        self._forming = True
        self._closed = False
        self._log: list[str] = []
        port.handle("join", self._on_join)
        port.handle("probe", self._on_probe)
        port.handle("leave", self._on_leave)
        port.handle("done", self._on_done)
        self._watchdog = threading.Thread(target=self._watch, name="ring-watchdog", daemon=True)
        self._watchdog.start()

    @property
    def members(self) -> tuple[int, ...]:
        """Participants of the ring as it stands."""
        return self._members

    @property
    def preempted(self) -> tuple[int, ...]:
        """Participants that said that they leave."""
        return tuple(sorted(self._gone))

    @property
    def finished(self) -> tuple[int, ...]:
        """Participants of the ring as it stands, and those that ended with it before this member did."""
        return tuple(sorted({*self._members, *self._done}, key=self._planned.index))

    @property
    def log_lines(self) -> tuple[str, ...]:
        """What happened to the ring, a line each."""
        return tuple(self._log)

    def form(self, standing: Standing, poll: Poll) -> Generation:
        """Agree on the next generation with all members that live.

        Raises `LeftOut` if the others have gone on, `NoModel` if nobody has one, and whatever `poll` raises.
        """
        with self._changed:
            number = max(self._wanted, 0 if self._decision is None else self._decision.number + 1)
            self._wanted, self._forming = number, True
            # The watchdog's verdict counts for one question, so that a hung member costs little more than a heartbeat.
            silent = {} if self._suspect is None else {self._suspect: 1}
            self._suspect = None
        while True:
            decision = self._try_candidates(number, standing, silent, poll)
            if decision is None:
                with self._changed:
                    number = max(number, self._wanted)
                continue
            with self._changed:
                absent = [member for member in self._members if member not in {*decision.members, *self._done}]
                self._decision, self._members, self._forming = decision, decision.members, False
                self._changed.notify_all()
            if absent:
                self._note(absent, number)
            if decision.source < 0:
                self.finish()  # the others hear the decision from this port, which must not close before they have
                raise NoModel
            return decision

    def require_whole(self) -> None:
        """Raise `PeerLost` if somebody wants the ring to form again: a member is gone."""
        if self._decision is not None and self._wanted > self._decision.number:
            raise PeerLost("the ring is forming again")

    def leave(self) -> None:
        """Tell the others that this member goes, so that they need not find out."""
        others = [member for member in self._members if member != self._me]
        self._to_all(others, lambda member: self._port.call(member, "leave", timeout_s=_SLICE_S))

    def finish(self) -> None:
        """Tell the others that this member has the interval's result, and wait a moment until they have it, too.

        They are in the same last operation, and a ring that one member leaves may break for those still in it: it would
        form again for nothing. Who is gone, or hangs, is not waited for any longer than that.
        """
        others = [member for member in self._members if member != self._me]
        told = self._to_all(others, lambda member: self._port.call(member, "done", timeout_s=self._patience_s))
        there = {member for member, answer in told.items() if not isinstance(answer, Exception)}
        with self._changed:
            self._changed.wait_for(lambda: there <= {*self._done, *self._gone}, self._patience_s)

    def close(self) -> None:
        """End the watching; the port is its owner's."""
        self._closed = True
        with self._changed:
            self._changed.notify_all()

    # ------------------------------------------------------------------------------------------------ forming

    def _try_candidates(
        self, number: int, standing: Standing, silent: dict[int, int], poll: Poll,
    ) -> Generation | None:
        """Ask whoever may coordinate, in order, or coordinate; None where the outcome is still open."""
        for candidate in self._members:
            if candidate != self._me and (candidate in self._gone or candidate in self._done):
                continue
            poll()
            if candidate == self._me:
                return self._coordinate(number, standing, silent, poll)
            try:
                # A probe first: who hangs is found out by a short question, and not by one that may be held.
                told = json.loads(self._port.call(candidate, "probe", str(number).encode(),
                                                  timeout_s=self._patience_s))
                self._seen.add(candidate)
                if told and _decision_of(told).number >= number:
                    return self._taken_in(told)
                answer = json.loads(self._port.call(
                    candidate, "join", json.dumps({"generation": number, **asdict(standing)}).encode(),
                    timeout_s=_SLICE_S + self._patience_s))
            except PeerUnreachable:
                continue
            except PeerRefused:
                self._require_same_interval(number)
                continue
            except PeerSilent:
                silent[candidate] = silent.get(candidate, 0) + 1
                if silent[candidate] < _TIMES_SILENT:
                    return None
                continue
            silent.pop(candidate, None)
            return None if "wait" in answer else self._taken_in(answer)
        raise AssertionError("a member is among its own ring's members")

    def _require_same_interval(self, number: int) -> None:
        """Raise `LeftOut` if a member that refuses this one's token must be in an interval after this one.

        At the beginning it may be a process of the interval before, which is ending. Later it cannot: nobody is asked
        for the next interval before this one has ended. So a member that hung for an interval, and wakes, does not
        take the others for dead and do the rest of that interval's work alone.
        """
        if number or time.monotonic() > self._deadline_s:
            raise LeftOut("the others have gone on to another interval")

    def _taken_in(self, answer: dict[str, Any]) -> Generation:
        decision = _decision_of(answer)
        if self._me not in decision.members:
            raise LeftOut(f"the ring has gone on with participants {', '.join(map(str, decision.members))}")
        return decision

    def _coordinate(self, number: int, standing: Standing, silent: dict[int, int], poll: Poll) -> Generation | None:
        """Wait for all that live; None after a while, to look whether a member before this one has come."""
        until_s = time.monotonic() + _SLICE_S
        others = [member for member in self._members if member != self._me]
        while True:
            poll()
            with self._changed:
                if self._wanted > number:
                    return None
                joined = {member: theirs for member, theirs in self._joins.get(number, {}).items()
                          if member not in self._gone}
            missing = [member for member in others if member not in {*joined, *self._gone, *self._done}]
            absent = self._absent(missing, number, silent) if missing else set()
            if isinstance(absent, Generation):
                return self._taken_in(asdict(absent))
            if len(absent) == len(missing):
                return self._decide(number, {**joined, self._me: standing})
            if time.monotonic() > until_s:
                return None
            with self._changed:
                self._changed.wait(_PAUSE_S if number else _START_PAUSE_S)

    def _absent(self, missing: Sequence[int], number: int, silent: dict[int, int]) -> set[int] | Generation:
        """Return which members will not come; or the decision that was made without this one."""
        waiting_for_start = number == 0 and time.monotonic() < self._deadline_s
        # Who did not answer while this member looked for a coordinator need not be waited for once more.
        absent = set() if waiting_for_start else {
            member for member in missing if silent.get(member, 0) >= _TIMES_SILENT}
        for member, answer in self._probe([member for member in missing if member not in absent]).items():
            if isinstance(answer, dict):
                self._seen.add(member)
                silent.pop(member, None)
                decision = _decision_of(answer) if answer else None
                if decision is not None and decision.number >= number:
                    return decision
            elif waiting_for_start and not (isinstance(answer, PeerUnreachable) and member in self._seen):
                continue
            elif isinstance(answer, PeerSilent):
                silent[member] = silent.get(member, 0) + 1
                if silent[member] >= _TIMES_SILENT:
                    absent.add(member)
            else:
                if isinstance(answer, PeerRefused):
                    self._require_same_interval(number)
                absent.add(member)
        return absent

    def _decide(self, number: int, standings: dict[int, Standing]) -> Generation:
        members = tuple(member for member in self._members if member in standings)
        with_model = [member for member in members if standings[member].has_model]
        source = max(with_model, key=lambda member: (standings[member].num_steps, -member), default=-1)
        best = standings[source] if source >= 0 else Standing(num_steps=0, has_model=False, optimizer="")
        # Before the first step nobody's optimiser has moved, so any will do; a node that comes back has lost its own.
        optimizer_source = source
        if not best.num_steps and not best.optimizer:
            optimizer_source = next((member for member in members if standings[member].optimizer), source)
        optimizer = standings[optimizer_source].optimizer if optimizer_source >= 0 else ""
        decision = Generation(
            number=number, members=members, source=source, num_steps=best.num_steps,
            same_model=all((standings[member].num_steps, standings[member].has_model) == (best.num_steps, True)
                           for member in members),
            optimizer_source=optimizer_source,
            same_optimizer=all(standings[member].optimizer == optimizer for member in members))
        with self._changed:
            self._decision = decision
            self._changed.notify_all()
        return decision

    def _note(self, absent: Sequence[int], number: int) -> None:
        for member in absent:
            if member in self._gone:
                log(INFO, "ring: participant %d has left; the ring goes on with %d", member, len(self._members))
                continue
            why = "did not come to the rendezvous" if number == 0 else "is gone or hangs"
            self._log.append(f"participant {member} {why}; the ring goes on with {len(self._members)}")
            log(WARNING, "ring: %s", self._log[-1])

    # ------------------------------------------------------------------------------------- what peers ask of us

    def _on_join(self, caller: Caller, body: bytes) -> bytes:
        """Keep a join and answer it with the decision, as soon as there is one; "wait" after a while."""
        asked = json.loads(body)
        number = int(asked["generation"])
        until_s = time.monotonic() + _SLICE_S * 0.8
        with self._changed:
            if number > self._wanted:
                self._wanted = number
                self._changed.notify_all()
            self._seen.add(caller.rank)
            self._joins.setdefault(number, {})[caller.rank] = Standing(
                num_steps=int(asked["num_steps"]), has_model=bool(asked["has_model"]),
                optimizer=str(asked["optimizer"]))
            self._changed.notify_all()
            while not self._closed:
                if self._decision is not None and self._decision.number >= number:
                    return json.dumps(asdict(self._decision)).encode()
                if not caller.is_active():
                    self._joins[number].pop(caller.rank, None)
                    break
                if time.monotonic() > until_s:
                    break
                self._changed.wait(_PAUSE_S)
        return b'{"wait": true}'

    def _on_probe(self, caller: Caller, body: bytes) -> bytes:
        """Say that this member lives, and which ring it is in; hear that another one is wanted."""
        with self._changed:
            if body:
                self._wanted = max(self._wanted, int(body))
            return json.dumps({} if self._decision is None else asdict(self._decision)).encode()

    def _on_leave(self, caller: Caller, body: bytes) -> bytes:
        with self._changed:
            self._gone.add(caller.rank)
            if self._decision is not None and caller.rank in self._decision.members:
                self._wanted = max(self._wanted, self._decision.number + 1)
            self._changed.notify_all()
        return b""

    def _on_done(self, caller: Caller, body: bytes) -> bytes:
        with self._changed:
            self._done.add(caller.rank)
            self._changed.notify_all()
        return b""

    # ------------------------------------------------------------------------------------------------ watching

    def _watch(self) -> None:
        """Ask the next member for a sign of life, all the time: a process that hangs breaks no connection."""
        failures = 0
        while not self._closed:
            if not failures:
                time.sleep(self._patience_s)
            with self._changed:
                decision, forming = self._decision, self._forming
                ring = () if decision is None else tuple(
                    member for member in decision.members if member not in self._done or member == self._me)
            if decision is None or forming or len(ring) < 2:
                failures = 0
                time.sleep(_PAUSE_S)
                continue
            following = ring[(ring.index(self._me) + 1) % len(ring)]
            try:
                self._port.call(following, "probe", timeout_s=self._patience_s)
                failures = 0
            except PeerUnreachable:
                failures = _TIMES_SILENT
            except PeerSilent:
                failures += 1
            except PeerRefused:  # it is in another interval, so this one is over
                failures = _TIMES_SILENT
            if failures >= _TIMES_SILENT:
                with self._changed:
                    if self._decision is decision and not self._forming and following not in self._done:
                        self._wanted = max(self._wanted, decision.number + 1)
                        self._suspect = following
                        self._changed.notify_all()
                failures = 0

    def _probe(self, members: Sequence[int]) -> dict[int, dict[str, Any] | Exception]:
        """Ask several members at once whether they live, and let them know which generation is wanted."""
        wanted = str(self._wanted).encode()

        def ask(member: int) -> dict[str, Any]:
            answer: dict[str, Any] = json.loads(self._port.call(
                member, "probe", wanted, timeout_s=self._patience_s))
            return answer

        return self._to_all(members, ask)

    @staticmethod
    def _to_all(members: Sequence[int], ask: Callable[[int], _Answer]) -> dict[int, _Answer | Exception]:
        def safely(member: int) -> _Answer | Exception:
            try:
                return ask(member)
            except (PeerSilent, PeerRefused, PeerUnreachable) as error:
                return error

        with ThreadPoolExecutor(max(1, len(members))) as threads:
            return dict(zip(members, threads.map(safely, members), strict=True))


def _decision_of(answer: dict[str, Any]) -> Generation:
    return Generation(**{**answer, "members": tuple(answer["members"])})
