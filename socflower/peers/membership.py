"""Ring membership: forming a ring, detecting lost members, and re-forming it with the others.

Every member runs the same protocol over its ring port. The first live member in ring order coordinates: the others
*join* it with their state (steps done, whether they have a model), it waits for all live members, and its *decision* is
the next generation of the ring. Members that join too late, or that counted as dead, get the answer that they are
left out. There is no election, and any member may die at any point of the protocol.

If a network partition splits a group, each part continues alone; the strategy uses one answer per group.
"""

import json
import math
import random
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from logging import INFO, WARNING
from typing import Any, TypeVar

from socflower.peers.collective import PeerLost, Poll
from socflower.peers.transports.port import Caller, PortView
from socflower.wire.logs import log
from socflower.wire.secure_channel import (
    PeerFailed,
    PeerNotReady,
    PeerOfOtherVersion,
    PeerRefused,
    PeerSilent,
    PeerUnreachable,
)

# The time of one attempt; then the coordinator is determined again.
_ATTEMPT_S = 1.0
_POLL_INTERVAL_S = 0.05
# While others start, or train; frequent calls would slow them down.
_START_POLL_INTERVAL_S = 0.25
# The status of answers to joins and probes.
_DONE = "done"
LEAVE = "leave"
"""The method by which a participant announces that it leaves."""
# Why a member leaves that no user has preempted.
_WITH_GROUP = b"with its group"
# A silent peer is called again before it counts as lost: a loaded machine answers late.
_MAX_SILENT_CALLS = 2

_Answer = TypeVar("_Answer")


@dataclass(frozen=True, kw_only=True, slots=True)
class MemberState:
    """The state with which a member joins a ring."""

    # The steps that were applied in this interval.
    num_steps: int
    has_model: bool
    # The digest of the optimiser's state; empty if there is none.
    optimizer: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Generation:
    """A ring that its members agreed on."""

    number: int
    # The participants, in ring order.
    members: tuple[int, ...]
    # The member whose model and step count the others adopt.
    source: int
    # The steps that the source has applied.
    num_steps: int
    # Whether all members already have that model at that step.
    same_model: bool
    # The member whose optimiser is adopted; a leader that is new to its group has none.
    optimizer_source: int
    same_optimizer: bool


def agree(number: int, members: Sequence[int], states: Mapping[int, MemberState]) -> Generation:
    """Return the generation of these members, in ring order: all adopt the state of the one with most steps.

    Of several, the one with the lowest number is the source; without any model the source is -1.
    """
    with_model = [member for member in members if states[member].has_model]
    source, best = -1, MemberState(num_steps=0, has_model=False, optimizer="")
    if with_model:
        source = max(with_model, key=lambda member: (states[member].num_steps, -member))
        best = states[source]
    # Before the first step all optimisers are unchanged, so any will do; a node that returns has lost its own.
    optimizer_source = source
    with_optimizer = [member for member in members if states[member].optimizer]
    if not best.num_steps and not best.optimizer and with_optimizer:
        optimizer_source = with_optimizer[0]
    optimizer = states[optimizer_source].optimizer if optimizer_source >= 0 else ""
    own = [states[member] for member in members]
    return Generation(
        number=number,
        members=tuple(members),
        source=source,
        num_steps=best.num_steps,
        same_model=all(one.has_model and one.num_steps == best.num_steps for one in own),
        optimizer_source=optimizer_source,
        same_optimizer=all(one.optimizer == optimizer for one in own),
    )


@dataclass(slots=True)
class _Peers:
    """What a member knows of the others."""

    # Forming members that called since this one last looked for a coordinator.
    callers: set[int] = field(default_factory=set)
    # Members that announced that they leave, and those that leave for a user.
    departed: set[int] = field(default_factory=set)
    preempted: set[int] = field(default_factory=set)
    # Members that announced that they have the interval's result.
    done: set[int] = field(default_factory=set)
    # Members that were reached before: if unreachable later, they are lost.
    reached: set[int] = field(default_factory=set)
    # Why members are refused that have another version of the protocol.
    refused: dict[int, str] = field(default_factory=dict)


class LeftOut(Exception):
    """The others continued without this member."""


class OthersDone(Exception):
    """A leader has the result of an exchange already, and can be asked for it."""

    def __init__(self, group: int) -> None:
        super().__init__(f"group {group} has it already")
        self.group = group


class NoModel(Exception):
    """None of the members has the model: its holder did not join."""


class Membership:
    """One member's view of its group in one interval.

    Parameters
    ----------
    port : PortView
        The port for calls among members; its ranks are participants.
    participant, members : int, sequence of int
        This member, and all planned members in ring order.
    heartbeat_s, rendezvous_s : float
        A member that is silent for `heartbeat_s` counts as hung, one that has not joined by `rendezvous_s` as absent.
    reach_s : float, optional
        So does one that nobody here has reached by then: its port is not open, so no process is about to join.
    departed : set of int, optional
        Members that have announced that they leave; later ones are added.
    """

    # Names of participants in events.
    _whom = "participant"

    def __init__(
        self,
        port: PortView,
        participant: int,
        members: Sequence[int],
        *,
        heartbeat_s: float,
        rendezvous_s: float,
        reach_s: float = math.inf,
        departed: set[int] | None = None,
    ) -> None:
        self._port, self._own = port, participant
        # The time of one call: a hung member must cost less than a heartbeat.
        self._call_timeout_s = heartbeat_s / 4
        self._deadline_s = time.monotonic() + rendezvous_s
        self._reach_until_s = time.monotonic() + reach_s
        # Each of two runs may wait for a node that has a member of the other. The moment at which a member gives its
        # place up is random, so that only one of them does.
        self._yield_from_s = time.monotonic() + reach_s * random.uniform(1.0, 3.0)
        self._planned = tuple(members)
        # The members of the latest decision, at first those of the plan.
        self._members = self._planned
        self._changed = threading.Condition()
        # Calls that wait, by generation and participant.
        self._joins: dict[int, dict[int, MemberState]] = {}
        self._decision: Generation | None = None
        # The highest generation that any member asks for.
        self._requested = 0
        self._peers = _Peers(departed=set() if departed is None else departed)
        # Whether this member has announced its result.
        self._finished = False
        # Generations that this member has asked to join.
        self._asked: set[int] = set()
        # The member that the watchdog found to be silent.
        self._suspect: int | None = None
        self._forming = True
        self._closed = False
        # The events of the ring.
        self.log_lines: list[str] = []
        port.handle("join", self._on_join)
        port.handle("probe", self._on_probe)
        port.handle(LEAVE, self._on_leave)
        port.handle("done", self._on_done)
        self._watchdog = threading.Thread(target=self._watch, name="ring-watchdog", daemon=True)
        self._watchdog.start()

    @property
    def preempted(self) -> tuple[int, ...]:
        """Participants that announced that they leave for a user."""
        return tuple(sorted(self._peers.preempted))

    @property
    def departed(self) -> bool:
        """Whether any participant announced that it leaves."""
        return bool(self._peers.departed)

    @property
    def finished(self) -> tuple[int, ...]:
        """Participants of the current ring, and those that finished the interval before this member."""
        return tuple(sorted({*self._members, *self._peers.done}, key=self._planned.index))

    def form(self, own_state: MemberState, poll: Poll) -> Generation:
        """Agree on the next generation with all live members.

        Raises `LeftOut` if the others have continued without this member, `NoModel` if no member has a model, and what
        `poll` raises.
        """
        with self._changed:
            number = max(
                self._requested, 0 if self._decision is None else self._decision.number + 1
            )
            self._requested, self._forming = number, True
            # The watchdog's result counts as one silent call, so that a hung member costs little
            # more than a heartbeat.
            silent = {} if self._suspect is None else {self._suspect: 1}
            self._suspect = None
        while True:
            decision = self._try_candidates(number, own_state, silent, poll)
            if decision is None:
                with self._changed:
                    number = max(number, self._requested)
                continue
            with self._changed:
                absent = [
                    member
                    for member in self._members
                    if member not in {*decision.members, *self._peers.done}
                ]
                self._decision, self._members, self._forming = decision, decision.members, False
                self._changed.notify_all()
            if absent:
                self._log_absent(absent, number)
            if decision.source < 0:
                # The others get the decision from this port, which must stay open until they have.
                self.finish()
                raise NoModel
            return decision

    def require_complete(self) -> None:
        """Raise `PeerLost` if a member asks for a new generation, since another one is lost."""
        if self._decision is not None and self._requested > self._decision.number:
            raise PeerLost("the ring is being re-formed")

    def leave(self, *, for_user: bool = True) -> None:
        """Announce to the others that this member leaves, so that they need not detect it."""
        reason = b"" if for_user else _WITH_GROUP
        self._to_all(
            self._others(),
            lambda member: self._port.call(member, LEAVE, reason, timeout_s=_ATTEMPT_S),
        )

    def finish(self) -> None:
        """Announce that this member has the interval's result, and wait briefly until the others have it too.

        All are in the same last operation; if one member left, the ring could break for the others and be re-formed
        without need. The wait does not include members that are lost or hang.
        """
        self._finished = True
        answers = self._to_all(
            self._others(),
            lambda member: self._port.call(member, "done", timeout_s=self._call_timeout_s),
        )
        reached = {
            member for member, answer in answers.items() if not isinstance(answer, Exception)
        }
        with self._changed:
            self._changed.wait_for(
                lambda: reached <= {*self._peers.done, *self._peers.departed}, self._call_timeout_s
            )

    def close(self) -> None:
        """Stop the watchdog; the caller closes the port."""
        self._closed = True
        with self._changed:
            self._changed.notify_all()

    def _others(self) -> list[int]:
        return [member for member in self._members if member != self._own]

    # ------------------------------------------------------------------------------------------------ forming

    def _try_candidates(
        self,
        number: int,
        own_state: MemberState,
        silent: dict[int, int],
        poll: Poll,
    ) -> Generation | None:
        """Join the first live member in order, or coordinate; return None if there is no decision yet."""
        with self._changed:
            self._peers.callers.clear()
        for candidate in self._members:
            if candidate != self._own and (
                candidate in self._peers.departed or candidate in self._peers.done
            ):
                continue
            poll()
            if candidate == self._own:
                return self._coordinate(number, own_state, silent, poll)
            try:
                # A probe first: it detects a hung member sooner than a join, whose answer may be delayed.
                probed = json.loads(
                    self._port.call(
                        candidate, "probe", str(number).encode(), timeout_s=self._call_timeout_s
                    )
                )
                self._peers.reached.add(candidate)
                if _DONE not in probed:
                    if probed and _parse_decision(probed).number >= number:
                        return self._accept_decision(probed)
                    self._asked.add(number)
                    answer = json.loads(
                        self._port.call(
                            candidate,
                            "join",
                            json.dumps({"generation": number, **asdict(own_state)}).encode(),
                            timeout_s=_ATTEMPT_S + self._call_timeout_s,
                        )
                    )
            except PeerOfOtherVersion as other:
                # The first member in order continues with those of its own version.
                raise LeftOut(str(other)) from None
            except PeerFailed as failure:
                if not self._is_lost(candidate, failure, number, silent):
                    # Once ready, it probes those that it misses.
                    if isinstance(failure, PeerNotReady):
                        with self._changed:
                            self._changed.wait_for(
                                lambda: self._peers.callers, _START_POLL_INTERVAL_S
                            )
                    return None
                continue
            silent.pop(candidate, None)
            if _DONE in probed or _DONE in answer:
                self._skip_done(candidate)
                continue
            return None if "wait" in answer else self._accept_decision(answer)
        raise AssertionError("a member is among its own ring's members")

    def _is_lost(
        self, member: int, failure: Exception, number: int, silent: dict[int, int]
    ) -> bool:
        """Return whether a member whose call failed is lost; a silent member is called again first.

        Raises `LeftOut` if a member that refuses this one's token must be in a later interval. At the beginning, a
        process of the previous interval may still be ending. Later that is impossible, since the next interval starts
        only after this one has ended. So a member that hung for an interval does not count the others as dead, and
        does not do the rest of that interval's work alone.
        """
        if isinstance(failure, PeerSilent):
            silent[member] = silent.get(member, 0) + 1
            return silent[member] >= _MAX_SILENT_CALLS
        if isinstance(failure, PeerRefused) and (number or time.monotonic() > self._deadline_s):
            raise LeftOut("the others are in another interval")
        return True

    def _skip_done(self, member: int) -> None:
        """Continue without a member that has the interval's result and will not join again."""
        with self._changed:
            self._peers.done.add(member)
            self._changed.notify_all()

    def _accept_decision(self, answer: dict[str, Any]) -> Generation | None:
        decision = _parse_decision(answer)
        if self._own not in decision.members:
            raise LeftOut(
                f"the ring continued with {self._whom}s {', '.join(map(str, decision.members))}"
            )
        if decision.number in self._asked:
            return decision
        # The decision was made with the member whose place this one has taken.
        with self._changed:
            self._requested = max(self._requested, decision.number + 1)
        return None

    def _coordinate(
        self, number: int, own_state: MemberState, silent: dict[int, int], poll: Poll
    ) -> Generation | None:
        """Wait for all live members and decide; return None after a while, to check for an earlier coordinator."""
        until_s = time.monotonic() + _ATTEMPT_S
        while True:
            poll()
            with self._changed:
                if self._requested > number or self._earlier_callers(silent):
                    return None
                seen = self._seen(number, silent)
                joined = {
                    member: theirs
                    for member, theirs in self._joins.get(number, {}).items()
                    if member not in self._peers.departed
                }
            missing = [
                member
                for member in self._others()
                if member not in {*joined, *self._peers.departed, *self._peers.done}
            ]
            absent = self._absent(missing, number, silent) if missing else set()
            if isinstance(absent, Generation):
                return self._accept_decision(asdict(absent))
            if len(absent) == len(missing):
                return self._decide(number, {**joined, self._own: own_state})
            if time.monotonic() > until_s:
                return None
            self._wait_for_change(
                number, silent, seen, _POLL_INTERVAL_S if number else _START_POLL_INTERVAL_S
            )

    def _wait_for_change(
        self, number: int, silent: dict[int, int], seen: tuple[int, ...], timeout_s: float
    ) -> None:
        """Wait until another member calls, or return at once if one has called since `seen` was read."""
        with self._changed:
            self._changed.wait_for(lambda: self._seen(number, silent) != seen, timeout_s)

    def _seen(self, number: int, silent: dict[int, int]) -> tuple[int, ...]:
        """Return a value that changes with every call of a member that a coordinator waits for."""
        return (
            self._requested,
            len(self._joins.get(number, {})),
            len(self._peers.departed),
            len(self._peers.done),
            self._earlier_callers(silent),
        )

    def _earlier_callers(self, silent: dict[int, int]) -> int:
        """Return how many members that could coordinate in place of this one have called.

        A member that calls but does not answer cannot coordinate: waiting for it would never end.
        """
        earlier = self._members[: self._members.index(self._own)]
        return sum(
            member in self._peers.callers and silent.get(member, 0) < _MAX_SILENT_CALLS
            for member in earlier
        )

    def _absent(
        self, missing: Sequence[int], number: int, silent: dict[int, int]
    ) -> set[int] | Generation:
        """Return the members that will not join, or a decision that was made without this member."""
        waiting_for_start = number == 0 and time.monotonic() < self._deadline_s
        # Members that were silent while this one looked for a coordinator are not waited for again.
        absent = (
            set()
            if waiting_for_start
            else {member for member in missing if silent.get(member, 0) >= _MAX_SILENT_CALLS}
        )
        answers = self._probe([member for member in missing if member not in absent])
        if waiting_for_start and self._is_blocked(answers.values()):
            raise LeftOut("the nodes of the others work for another run")
        for member, answer in answers.items():
            if isinstance(answer, dict):
                self._peers.reached.add(member)
                silent.pop(member, None)
                if _DONE in answer:
                    self._skip_done(member)
                    continue
                decision = _parse_decision(answer) if answer else None
                if decision is not None and decision.number >= number:
                    return decision
            elif isinstance(answer, PeerOfOtherVersion):
                self._peers.refused[member] = str(answer)
                absent.add(member)
            elif waiting_for_start and self._may_join(member, answer):
                continue
            elif self._is_lost(member, answer, number, silent):
                absent.add(member)
        return absent

    def _may_join(self, member: int, failure: Exception) -> bool:
        """Return whether a member whose call failed may still be about to join its first ring."""
        if isinstance(failure, PeerNotReady):
            # It listens, and prepares its part.
            self._peers.reached.add(member)
            return True
        if member in self._peers.reached:
            return not isinstance(failure, PeerUnreachable)
        return isinstance(failure, PeerRefused) or time.monotonic() < self._reach_until_s

    def _is_blocked(self, answers: Collection[object]) -> bool:
        """Return whether all others have refused this ring's token for so long that its node makes room.

        A node works for one run at a time. So two runs could wait for each other's nodes, each on one that it has.
        """
        return (
            time.monotonic() >= self._yield_from_s
            and not self._joins.get(0)
            and all(
                isinstance(answer, PeerRefused) and not isinstance(answer, PeerOfOtherVersion)
                for answer in answers
            )
        )

    def _decide(self, number: int, member_states: dict[int, MemberState]) -> Generation:
        members = [member for member in self._members if member in member_states]
        decision = agree(number, members, member_states)
        with self._changed:
            self._decision = decision
            self._changed.notify_all()
        return decision

    def _log_absent(self, absent: Sequence[int], number: int) -> None:
        for member in absent:
            if member in self._peers.departed:
                log(
                    INFO,
                    "ring: %s %d has left; the ring continues with %d",
                    self._whom,
                    member,
                    len(self._members),
                )
                continue
            why = "did not come to the rendezvous" if number == 0 else "is gone or hangs"
            if member in self._peers.refused:
                why = f"is refused ({self._peers.refused[member]})"
            self.log_lines.append(
                f"{self._whom} {member} {why}; the ring continues with {len(self._members)}"
            )
            log(WARNING, "ring: %s", self.log_lines[-1])

    # ------------------------------------------------------------------------------------- what peers ask of us

    def _on_join(self, caller: Caller, body: bytes) -> bytes:
        """Record a join and answer it with the decision as soon as there is one; with "wait" after a while."""
        asked = json.loads(body)
        number = int(asked["generation"])
        until_s = time.monotonic() + _ATTEMPT_S * 0.8
        with self._changed:
            if number > self._requested:
                self._requested = number
                self._changed.notify_all()
            self._peers.reached.add(caller.rank)
            self._joins.setdefault(number, {})[caller.rank] = MemberState(
                num_steps=int(asked["num_steps"]),
                has_model=bool(asked["has_model"]),
                optimizer=str(asked["optimizer"]),
            )
            self._changed.notify_all()
            while True:
                if self._decision is not None and self._decision.number >= number:
                    return json.dumps(asdict(self._decision)).encode()
                if self._finished or self._closed:
                    return json.dumps({_DONE: True}).encode()
                if not caller.is_active():
                    self._joins[number].pop(caller.rank, None)
                    break
                if time.monotonic() > until_s:
                    break
                self._changed.wait(_POLL_INTERVAL_S)
        return b'{"wait": true}'

    def _on_probe(self, caller: Caller, body: bytes) -> bytes:
        """Answer with this member's decision, if any; record the generation that the caller asks for."""
        with self._changed:
            # A watchdog names no generation: its member does not form a ring.
            if body:
                self._peers.callers.add(caller.rank)
                self._changed.notify_all()
                self._requested = max(self._requested, int(body))
            if (
                self._finished
                and self._decision is not None
                and self._requested > self._decision.number
            ):
                return json.dumps({_DONE: True}).encode()
            return json.dumps({} if self._decision is None else asdict(self._decision)).encode()

    def _on_leave(self, caller: Caller, body: bytes) -> bytes:
        with self._changed:
            self._peers.departed.add(caller.rank)
            if body != _WITH_GROUP:
                self._peers.preempted.add(caller.rank)
            if self._decision is not None and caller.rank in self._decision.members:
                self._requested = max(self._requested, self._decision.number + 1)
            self._changed.notify_all()
        return b""

    def _on_done(self, caller: Caller, body: bytes) -> bytes:
        with self._changed:
            self._peers.done.add(caller.rank)
            self._changed.notify_all()
        return b""

    # ------------------------------------------------------------------------------------------------ watching

    def _watch(self) -> None:
        """Probe the next member periodically: a process that hangs does not break its connections."""
        failures = 0
        while not self._closed:
            if not failures:
                time.sleep(self._call_timeout_s)
            with self._changed:
                decision, forming = self._decision, self._forming
                ring = (
                    ()
                    if decision is None
                    else tuple(
                        member
                        for member in decision.members
                        if member not in self._peers.done or member == self._own
                    )
                )
            if decision is None or forming or len(ring) < 2:
                failures = 0
                time.sleep(_POLL_INTERVAL_S)
                continue
            following = ring[(ring.index(self._own) + 1) % len(ring)]
            try:
                self._port.call(following, "probe", timeout_s=self._call_timeout_s)
                failures = 0
            except PeerSilent:
                failures += 1
            except PeerFailed:
                # The member is dead or in another interval, so this interval is over.
                failures = _MAX_SILENT_CALLS
            if failures >= _MAX_SILENT_CALLS:
                with self._changed:
                    if (
                        self._decision is decision
                        and not self._forming
                        and following not in self._peers.done
                    ):
                        self._requested = max(self._requested, decision.number + 1)
                        self._suspect = following
                        self._changed.notify_all()
                failures = 0

    def _probe(self, members: Sequence[int]) -> dict[int, dict[str, Any] | Exception]:
        """Probe several members at once, with the generation that is asked for."""
        wanted = str(self._requested).encode()

        def ask(member: int) -> dict[str, Any]:
            return dict(
                json.loads(self._port.call(member, "probe", wanted, timeout_s=self._call_timeout_s))
            )

        return self._to_all(members, ask)

    @staticmethod
    def _to_all(
        members: Sequence[int], ask: Callable[[int], _Answer]
    ) -> dict[int, _Answer | Exception]:
        def safely(member: int) -> _Answer | Exception:
            try:
                return ask(member)
            except PeerFailed as error:
                return error

        with ThreadPoolExecutor(max(1, len(members))) as threads:
            return dict(zip(members, threads.map(safely, members), strict=True))


class LeaderMembership(Membership):
    """A group's view of the groups whose leaders exchange models; participants are groups, over a `LeaderPort`.

    The others wait for a group whose leader is lost or still trains as long as any of its members lives.
    """

    _whom = "group"
    _asked_for_result: frozenset[int] = frozenset()

    def form(self, own_state: MemberState, poll: Poll) -> Generation:
        """Agree as `Membership` does; raise `OthersDone` if a leader has a result that was not requested yet."""

        def check() -> None:
            poll()
            if done := self._peers.done - self._asked_for_result:
                raise OthersDone(min(done))

        return super().form(own_state, check)

    def go_on_without(self, group: int) -> None:
        """Form without a group that is done, and has been asked for its result."""
        self._asked_for_result |= {group}
        super()._skip_done(group)

    def _skip_done(self, member: int) -> None:
        raise OthersDone(member)

    def _is_lost(
        self, member: int, failure: Exception, number: int, silent: dict[int, int]
    ) -> bool:
        if isinstance(failure, PeerNotReady):
            return False
        # One that refuses the interval's token has been asked again, alone, and answers for itself.
        return isinstance(failure, PeerRefused) or super()._is_lost(member, failure, number, silent)


def _parse_decision(answer: dict[str, Any]) -> Generation:
    return Generation(**{**answer, "members": tuple(answer["members"])})
