"""One member's part of an interval among peers that may be lost: form, work, finish, and form again after each loss.

`TRANSITIONS` has all states and transitions. What members do in a state is a `Role`: a ring's member, a device of a
pipeline, a leader that meets other leaders.
"""

import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from enum import Enum
from logging import INFO
from typing import Generic, TypeVar

from socflower.peers.collective import PeerLost, Poll
from socflower.peers.membership import (
    Generation,
    LeftOut,
    Membership,
    MemberState,
    NoModel,
    OthersDone,
)
from socflower.peers.owner_preemption import Preempted
from socflower.wire.logs import log
from socflower.wire.message_keys import COMPLETED, LEFT_OUT, NO_MODEL, PREEMPTED, TERMINATED

_Result = TypeVar("_Result")


class State(Enum):
    """Where a member is; the value of a final state is its outcome."""

    FORMING = "forming"
    WORKING = "working"
    FINISHING = "finishing"
    COMPLETED = COMPLETED
    PREEMPTED = PREEMPTED
    TERMINATED = TERMINATED
    LEFT_OUT = LEFT_OUT
    NO_MODEL = NO_MODEL


class StateOutcome(Enum):
    """How what a member did in a state has ended."""

    DONE = "done"
    # Another member is lost, or asks for a new generation.
    LOST = "lost"
    # This member's device is preempted.
    PREEMPTED = "preempted"
    # Another member's device is preempted, which ends the interval for all.
    TERMINATED = "terminated"
    # The others have continued without this member.
    LEFT_OUT = "left out"
    # No member has the model.
    NO_MODEL = "no model"
    # Others have the result already, and were asked for it.
    OTHERS_DONE = "others done"


_ACTIVE = (State.FORMING, State.WORKING, State.FINISHING)

TRANSITIONS = {
    (State.FORMING, StateOutcome.DONE): State.WORKING,
    (State.WORKING, StateOutcome.DONE): State.FINISHING,
    (State.FINISHING, StateOutcome.DONE): State.COMPLETED,
    (State.FORMING, StateOutcome.NO_MODEL): State.NO_MODEL,
    (State.FORMING, StateOutcome.OTHERS_DONE): State.FORMING,
    **{(state, StateOutcome.LOST): State.FORMING for state in _ACTIVE},
    **{(state, StateOutcome.PREEMPTED): State.PREEMPTED for state in _ACTIVE},
    **{(state, StateOutcome.TERMINATED): State.TERMINATED for state in _ACTIVE},
    **{(state, StateOutcome.LEFT_OUT): State.LEFT_OUT for state in _ACTIVE},
}
"""The state after an event. States without events are final."""


class Terminated(Exception):
    """The group's interval has ended for all members, since one of them is preempted."""


class Role(ABC, Generic[_Result]):
    """What a member does in each state. Methods raise `PeerLost` after a loss, and what the session's `poll` raises."""

    # The name in logs.
    what: str

    @abstractmethod
    def kept(self) -> MemberState:
        """Return the state that this member can bring into a generation."""

    @abstractmethod
    def form(self, generation: Generation) -> None:
        """Open what the generation uses, and adopt the newest common state."""

    @abstractmethod
    def work(self) -> None:
        """Do all steps that are left."""

    @abstractmethod
    def finish(self) -> _Result:
        """Let the members that answer have the result, announce it by `Membership.finish`, and return this member's."""

    @abstractmethod
    def release(self) -> None:
        """Release what the generation used; keep what the next one may continue from."""

    @abstractmethod
    def without_model(self, outcome: str) -> _Result:
        """Return the result of a member that ends with another outcome than `COMPLETED`."""

    def ask_for_result(self, other: int) -> None:
        """Ask another member for the result that it has; only leaders are told so."""
        raise AssertionError(f"{self.what}: nobody is asked for a result")


class ElasticSession:
    """Runs a member's part among the others; `interrupt` raises what ends this member's own part.

    After a loss the members that are left continue from the newest common state. `recoveries_s` has the seconds from
    each loss to the next generation, as this member saw them.
    """

    def __init__(self, membership: Membership, interrupt: Poll) -> None:
        self.membership = membership
        self.recoveries_s: list[float] = []
        self.why_left_out = ""
        self._interrupt = interrupt
        self._lost_at_s: float | None = None

    @property
    def is_recovering(self) -> bool:
        """Whether a generation forms after a loss."""
        return self._lost_at_s is not None

    def poll(self) -> None:
        """Raise `PeerLost` if a new generation is asked for, and what `interrupt` raises."""
        self._interrupt()
        self.membership.require_complete()

    def run(self, role: Role[_Result]) -> _Result:
        """Go through the states until a final one; return the result. Raises what the part raises beyond its events."""
        state, result = State.FORMING, None
        while (state, StateOutcome.LOST) in TRANSITIONS:
            event = StateOutcome.DONE
            try:
                if state is State.FORMING:
                    event = self._form(role)
                elif state is State.WORKING:
                    role.work()
                else:
                    result = role.finish()
            except PeerLost as lost:
                event = StateOutcome.LOST
                log(INFO, "%s: %s; forming again", role.what, lost)
                self._lost_at_s = self._lost_at_s or time.monotonic()
                role.release()
            except Preempted:
                event = StateOutcome.PREEMPTED
                self.membership.leave()
            except Terminated:
                event = StateOutcome.TERMINATED
                self.membership.leave(for_user=False)
            except LeftOut as left:
                event = StateOutcome.LEFT_OUT
                self.why_left_out = str(left)
                log(INFO, "%s: %s", role.what, left)
            except NoModel:
                event = StateOutcome.NO_MODEL
            state = TRANSITIONS[state, event]
        if state is State.COMPLETED:
            assert result is not None
            return result
        return role.without_model(state.value)

    def _form(self, role: Role[_Result]) -> StateOutcome:
        try:
            generation = self.membership.form(role.kept(), self._interrupt)
        except OthersDone as done:
            role.ask_for_result(done.group)
            return StateOutcome.OTHERS_DONE
        role.form(generation)
        if self._lost_at_s is not None:
            self.recoveries_s.append(time.monotonic() - self._lost_at_s)
            self._lost_at_s = None
        return StateOutcome.DONE


def answering(preferred: int, members: Sequence[int]) -> list[int]:
    """Return the members in the order in which they answer for their group: the preferred one, then its deputies."""
    return sorted(members, key=lambda member: member != preferred)


def counts_pending(own_steps: int, common_steps: int) -> bool:
    """Return whether a step that this member has begun and not applied is in the newest common state.

    `own_steps` were applied here, `common_steps` by the member whose state is adopted. If that member is ahead, its sum
    includes this member's gradient: otherwise it could not have received the sum. So the step counts and is not
    repeated. If not, nobody has applied the step, and all repeat it.
    """
    return common_steps > own_steps
