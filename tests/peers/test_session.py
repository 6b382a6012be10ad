"""The states of a member among peers: a model of three members walks all of them, with any one loss at any point."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, cast

import pytest

from socflower.peers.collective import PeerLost
from socflower.peers.membership import Generation, LeftOut, MemberState, NoModel, OthersDone, agree
from socflower.peers.owner_preemption import Preempted
from socflower.peers.session import (
    TRANSITIONS,
    ElasticSession,
    Role,
    State,
    StateOutcome,
    Terminated,
    answering,
    counts_pending,
)

STEPS = 2
ACTIVE = (State.FORMING, State.WORKING, State.FINISHING)


@dataclass(frozen=True, slots=True)
class Member:
    """One member of the model. Its model is the history of sums: who gave a gradient to each step."""

    has_model: bool
    state: State = State.FORMING
    is_dead: bool = False
    generation: int = -1
    history: tuple[frozenset[int], ...] = ()
    # The steps that it has counted.
    counted: tuple[int, ...] = ()
    # Whether it has given its gradient of the next step.
    has_given: bool = False
    # The state that it joined the latest decision with is its own until it has adopted another.
    adopts: bool = False

    @property
    def is_active(self) -> bool:
        return not self.is_dead and self.state in ACTIVE

    @property
    def steps(self) -> int:
        """The place in the training: a member that finishes has all steps and its statistics."""
        return len(self.history)


@dataclass(frozen=True, slots=True)
class World:
    """All members, the latest decision, and the state of its source."""

    members: tuple[Member, ...]
    decision: Generation | None = None
    common: tuple[frozenset[int], ...] = ()
    num_lost: int = 0


Move = tuple[str, World]


class Walk:
    """All states that can be reached from a first one; `used` has the transitions of the table that were taken."""

    def __init__(self, first: World) -> None:
        self.used: set[tuple[State, StateOutcome]] = set()
        self.followers: dict[World, list[World]] = {}
        waiting = [first]
        while waiting:
            world = waiting.pop()
            if world not in self.followers:
                self.followers[world] = [after for _, after in self.moves(world)]
                waiting += self.followers[world]

    def after(self, member: Member, event: StateOutcome) -> Member:
        self.used.add((member.state, event))
        return replace(member, state=TRANSITIONS[member.state, event])

    def moves(self, world: World) -> Iterator[Move]:
        """Yield what may happen next."""
        yield from self._forming(world)
        for rank, member in enumerate(world.members):
            for what, changed in self._own_moves(world, rank, member):
                members = (*world.members[:rank], changed, *world.members[rank + 1 :])
                lost = what in ("dies", "is preempted")
                yield what, replace(world, members=members, num_lost=world.num_lost + lost)

    def _forming(self, world: World) -> Iterator[Move]:
        """All that are left join, and one decides; nobody that still adopts has left the generation before."""
        active = {rank: one for rank, one in enumerate(world.members) if one.is_active}
        if not active or any(
            one.state is not State.FORMING or one.adopts for one in active.values()
        ):
            return
        states = {
            rank: MemberState(
                num_steps=one.steps, has_model=one.has_model, optimizer=str(one.history)
            )
            for rank, one in active.items()
        }
        number = 0 if world.decision is None else world.decision.number + 1
        decision = agree(number, sorted(states), states)
        common = world.members[decision.source].history if decision.source >= 0 else ()
        members = tuple(
            replace(one, adopts=one.is_active, generation=number if one.is_active else -1)
            for one in world.members
        )
        yield "decide", replace(world, members=members, decision=decision, common=common)

    def _own_moves(self, world: World, rank: int, own: Member) -> Iterator[tuple[str, Member]]:
        if not own.is_active:
            return
        if not world.num_lost:
            yield "dies", replace(own, is_dead=True)
            yield "is preempted", self.after(own, StateOutcome.PREEMPTED)
            yield "is preempted", self.after(own, StateOutcome.TERMINATED)
        decision = world.decision
        if decision is None or own.generation != decision.number:
            return
        in_generation = [world.members[other] for other in decision.members]
        if own.adopts or own.state is not State.FORMING:
            gone = [
                one
                for one in in_generation
                if one.is_dead
                or one.state in (State.PREEMPTED, State.TERMINATED)
                or one.generation != decision.number
                or (one.state is State.FORMING and not one.adopts)
            ]
            if gone:
                yield "loses a member", replace(self.after(own, StateOutcome.LOST), adopts=False)
        if own.adopts:
            yield from self._adopt(world, rank, own, decision)
        elif own.state is State.WORKING:
            yield from self._work(own, in_generation, decision)
        elif own.state is State.FINISHING and all(
            one.state in (State.FINISHING, State.COMPLETED) for one in in_generation
        ):
            yield "finishes", self.after(own, StateOutcome.DONE)

    def _adopt(
        self, world: World, rank: int, own: Member, decision: Generation
    ) -> Iterator[tuple[str, Member]]:
        if decision.source < 0:
            yield "has no model", replace(self.after(own, StateOutcome.NO_MODEL), adopts=False)
            return
        # A broadcast needs its source; one that has died in it may have reached some.
        counted = own.counted
        if own.has_given and counts_pending(own.steps, decision.num_steps):
            counted = (*counted, own.steps)
        if not own.has_model:
            counted = tuple(range(decision.num_steps))
        joined = self.after(own, StateOutcome.DONE)
        yield (
            "adopts",
            replace(
                joined,
                adopts=False,
                has_model=True,
                history=world.common,
                counted=counted,
                has_given=False,
            ),
        )

    def _work(
        self, own: Member, in_generation: list[Member], decision: Generation
    ) -> Iterator[tuple[str, Member]]:
        if own.steps == STEPS:
            yield "has done all", self.after(own, StateOutcome.DONE)
        elif not own.has_given:
            # The ring works step by step: nobody gives before all have adopted.
            yield "gives", replace(own, has_given=True)
        elif all(
            one.generation == decision.number
            and not one.adopts
            and (one.has_given or one.steps > own.steps)
            and one.steps >= own.steps
            for one in in_generation
        ):
            yield (
                "applies",
                replace(
                    own,
                    history=(*own.history, frozenset(decision.members)),
                    counted=(*own.counted, own.steps),
                    has_given=False,
                ),
            )


@pytest.fixture(scope="module")
def walks() -> list[Walk]:
    """Return the walks of three members that have the model, and of three of which the first has it."""
    return [
        Walk(World(tuple(map(Member, models)))) for models in ((True,) * 3, (True, False, False))
    ]


def test_from_every_state_all_that_are_left_reach_an_end(walks: list[Walk]) -> None:
    for walk in walks:
        before: dict[World, list[World]] = {world: [] for world in walk.followers}
        for world, followers in walk.followers.items():
            for follower in followers:
                before[follower].append(world)
        ends = [world for world, followers in walk.followers.items() if not followers]
        reached, waiting = set(ends), list(ends)
        while waiting:
            new = set(before[waiting.pop()]) - reached
            reached |= new
            waiting += new
        assert reached == walk.followers.keys() and len(reached) > 1000
        assert not any(member.is_active for world in ends for member in world.members)


def test_no_step_is_counted_twice_or_left_out(walks: list[Walk]) -> None:
    for world in (world for walk in walks for world in walk.followers):
        for member in world.members:
            assert member.counted == tuple(range(member.steps)), world
            # A sum has the gradients of all that were present.
            assert all(len(givers) >= 3 - world.num_lost for givers in member.history)
        done = {member.history for member in world.members if member.state is State.COMPLETED}
        assert len(done) <= 1 and all(len(history) == STEPS for history in done)


def test_the_walks_take_every_transition_of_one_loss(walks: list[Walk]) -> None:
    used = set().union(*(walk.used for walk in walks))
    others = {StateOutcome.LEFT_OUT, StateOutcome.OTHERS_DONE}
    assert used == {entry for entry in TRANSITIONS if entry[1] not in others}


class Scripted(Role[str]):
    """Raises what is written for it, call by call."""

    what = "test"

    def __init__(self, *script: Exception | None) -> None:
        self.script, self.calls = list(script), []

    def _call(self, name: str) -> None:
        self.calls.append(name)
        if self.script and (error := self.script.pop(0)) is not None:
            raise error

    def kept(self) -> MemberState:
        return MemberState(num_steps=0, has_model=True, optimizer="")

    def form(self, generation: Generation) -> None:
        self._call("form")

    def work(self) -> None:
        self._call("work")

    def finish(self) -> str:
        self._call("finish")
        return "completed"

    def release(self) -> None:
        self.calls.append("release")

    def without_model(self, outcome: str) -> str:
        return outcome

    def ask_for_result(self, other: int) -> None:
        self.calls.append(f"ask {other}")


class OneMember:
    """A membership of one, which others may have done without."""

    def __init__(self, *raised: Exception) -> None:
        self.raised, self.has_left = list(raised), False

    def form(self, state: MemberState, poll: Any) -> Generation:
        if self.raised:
            raise self.raised.pop(0)
        return agree(0, [0], {0: state})

    def require_complete(self) -> None:
        pass

    def leave(self, *, for_user: bool = True) -> None:
        self.has_left = True


def run(role: Scripted, *raised: Exception) -> tuple[str, ElasticSession]:
    return run_with(OneMember(*raised), role)


def run_with(membership: OneMember, role: Scripted) -> tuple[str, ElasticSession]:
    # It has what a session calls, and no network.
    session = ElasticSession(cast(Any, membership), lambda: None)
    return session.run(role), session


def test_a_loss_in_any_state_releases_and_forms_again() -> None:
    role = Scripted(PeerLost(), None, PeerLost(), None, None, PeerLost())
    outcome, session = run(role)
    assert outcome == "completed" and len(session.recoveries_s) == 3
    again = ["form", "work", "finish"]
    assert role.calls == ["form", "release", "form", "work", "release", *again, "release", *again]
    assert not session.is_recovering


@pytest.mark.parametrize(
    ("error", "outcome"),
    [
        (Preempted(), "preempted"),
        (Terminated(), "terminated"),
        (LeftOut("late"), "left-out"),
        (NoModel(), "no-model"),
    ],
)
def test_what_ends_a_member_is_its_outcome(error: Exception, outcome: str) -> None:
    membership = OneMember()
    found, _ = run_with(membership, Scripted(error))
    assert found.replace("_", "-") == outcome
    assert membership.has_left == isinstance(error, Preempted | Terminated)


def test_others_that_are_done_are_asked_before_it_forms_again() -> None:
    role = Scripted()
    outcome, _ = run(role, OthersDone(4))
    assert outcome == "completed" and role.calls == ["ask 4", "form", "work", "finish"]


def test_the_preferred_member_answers_and_then_its_deputies() -> None:
    assert answering(2, [0, 1, 2]) == [2, 0, 1]
    assert answering(5, [3, 1]) == [3, 1]
