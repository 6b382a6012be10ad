"""Who is in a ring, with the ports of all members in this process."""

import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import pytest

from socflower.peers.collective import PeerLost
from socflower.peers.membership import Generation, LeftOut, Membership, MemberState, NoModel
from socflower.peers.transports.port import PROTOCOL_VERSION, Caller, RingPort
from tests.one_line import one_line
from tests.peers.peers import TOKEN, free_addresses

WAIT_S = 60.0
Outcome = Generation | Exception


class Died(Exception):
    """What a member does instead of going on."""


class Group:
    """Members of one group, each with its port."""

    def __init__(self, size: int = 3) -> None:
        self.addresses = free_addresses(size)
        self.ports: dict[int, RingPort] = {}
        self.memberships: dict[int, Membership] = {}
        self._dead: set[int] = set()
        self._closing: list[Any] = []
        self._threads = ThreadPoolExecutor(16)

    def open(
        self,
        *ranks: int,
        heartbeat_s: float = 4.0,
        rendezvous_s: float = WAIT_S,
        reach_s: float = math.inf,
        token: bytes = TOKEN,
        addresses: Sequence[str] = (),
        members: Sequence[int] = (),
        port: RingPort | None = None,
    ) -> None:
        for rank in ranks or range(len(self.addresses)):
            self._dead.discard(rank)
            own = port or self.open_port(
                rank, heartbeat_s=heartbeat_s, token=token, addresses=addresses
            )
            self.memberships[rank] = Membership(
                own,
                rank,
                members or range(len(self.addresses)),
                heartbeat_s=heartbeat_s,
                rendezvous_s=rendezvous_s,
                reach_s=reach_s,
            )
            self._closing.insert(0, self.memberships[rank])

    def open_port(
        self,
        rank: int,
        *,
        heartbeat_s: float = 4.0,
        token: bytes = TOKEN,
        addresses: Sequence[str] = (),
    ) -> RingPort:
        port = RingPort(
            self.addresses[rank],
            rank=rank,
            addresses=addresses or self.addresses,
            token=token,
            tls=None,
            heartbeat_s=heartbeat_s,
        )
        self.ports[rank] = port
        self._closing.append(port)
        return port

    def form(self, member_states: Mapping[int, MemberState]) -> dict[int, Outcome]:
        """Let members form a ring, at the same time; return what each is told."""

        def safely(rank: int) -> Outcome:
            def alive() -> None:
                if rank in self._dead:
                    raise Died

            try:
                return self.memberships[rank].form(member_states[rank], alive)
            except (LeftOut, NoModel, Died) as outcome:
                return outcome

        return dict(zip(member_states, self._threads.map(safely, member_states), strict=True))

    def begin_to_form(self, rank: int, state: MemberState) -> Callable[[], Outcome]:
        future = self._threads.submit(self.form, {rank: state})
        return lambda: future.result(timeout=WAIT_S)[rank]

    def die(self, rank: int) -> None:
        self._dead.add(rank)
        self.memberships[rank].close()
        self.ports[rank].close()

    def close(self) -> None:
        self._dead |= set(range(len(self.addresses)))
        for each in self._closing:
            each.close()
        self._threads.shutdown(wait=False, cancel_futures=True)


@pytest.fixture
def group() -> Iterator[Group]:
    made = Group()
    yield made
    made.close()


def state(num_steps: int = 0, *, has_model: bool = True, optimizer: str = "") -> MemberState:
    return MemberState(num_steps=num_steps, has_model=has_model, optimizer=optimizer)


FIRST = {0: state(), 1: state(has_model=False), 2: state(has_model=False)}


def wait_until(condition: Callable[[], bool], what: str) -> None:
    until_s = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < until_s, f"has not come: {what}"
        time.sleep(0.02)


def is_broken(membership: Membership) -> bool:
    try:
        membership.require_complete()
    except PeerLost:
        return True
    return False


def the_only(outcomes: Mapping[int, Outcome]) -> Generation:
    """Return what all were told, if all were told the same."""
    decisions = set(outcomes.values())
    assert len(decisions) == 1, outcomes
    decision = decisions.pop()
    assert isinstance(decision, Generation)
    return decision


def test_all_agree_and_the_model_is_the_leaders(group: Group) -> None:
    group.open()
    decision = the_only(group.form(FIRST))
    assert (decision.number, decision.members, decision.source, decision.same_model) == (
        0,
        (0, 1, 2),
        0,
        False,
    )
    assert not any(is_broken(membership) for membership in group.memberships.values())


def test_a_member_of_another_version_is_refused_with_both_versions(group: Group) -> None:
    """The first in order continues with those of its version; nobody waits for the rendezvous to be over."""
    group.open()
    newer = PROTOCOL_VERSION + 1
    group.ports[2].version = newer
    outcomes = group.form(FIRST)
    refused = outcomes.pop(2)
    assert isinstance(refused, LeftOut)
    assert the_only(outcomes).members == (0, 1)
    for text in (str(refused), *group.memberships[0].log_lines):
        one_line(text, f"version {newer}", f"version {PROTOCOL_VERSION}", "socflower")


def test_members_may_come_one_after_the_other(group: Group) -> None:
    group.open(2)
    second = group.begin_to_form(2, FIRST[2])
    time.sleep(0.3)
    group.open(1)
    first = group.begin_to_form(1, FIRST[1])
    time.sleep(0.3)
    group.open(0)
    assert the_only({0: group.begin_to_form(0, FIRST[0])(), 1: first(), 2: second()}).members == (
        0,
        1,
        2,
    )


def test_a_coordinator_that_comes_is_joined_at_once(
    group: Group, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("socflower.peers.membership._START_POLL_INTERVAL_S", 2 * WAIT_S)
    port = group.open_port(0)
    group.open(1, members=(0, 1))
    joined = group.begin_to_form(1, FIRST[1])
    time.sleep(0.3)
    group.open(0, members=(0, 1), port=port)
    assert the_only({0: group.begin_to_form(0, FIRST[0])(), 1: joined()}).members == (0, 1)


def test_a_coordinator_that_never_comes_is_not_waited_for(group: Group) -> None:
    group.open(1, 2, rendezvous_s=0.6)
    decision = the_only(group.form({1: state(), 2: state(has_model=False)}))
    assert (decision.members, decision.source) == ((1, 2), 1)
    assert "participant 0 did not come" in group.memberships[1].log_lines[0]


@pytest.mark.parametrize("absent", [0, 2])
def test_who_can_be_reached_by_nobody_is_not_waited_for_until_the_rendezvous(
    group: Group, absent: int
) -> None:
    here = [rank for rank in range(3) if rank != absent]
    group.open(*here, rendezvous_s=1e6, reach_s=0.6)
    assert the_only(group.form({rank: state() for rank in here})).members == tuple(here)


def test_who_listens_is_waited_for_while_it_prepares_its_part(group: Group) -> None:
    port = group.open_port(2)
    group.open(0, 1, reach_s=0.3)
    joined = [group.begin_to_form(rank, FIRST[rank]) for rank in (0, 1)]
    time.sleep(1.5)
    group.open(2, port=port)
    decision = the_only({2: group.begin_to_form(2, FIRST[2])(), 0: joined[0](), 1: joined[1]()})
    assert decision.members == (0, 1, 2)


def test_who_listened_and_died_before_it_joined_is_not_waited_for(group: Group) -> None:
    port = group.open_port(2)
    group.open(0, 1, rendezvous_s=1e6)
    joined = [group.begin_to_form(rank, FIRST[rank]) for rank in (0, 1)]
    wait_until(lambda: 2 in group.memberships[0]._peers.reached, "member 2 at the leader")
    port.close()
    assert the_only({0: joined[0](), 1: joined[1]()}).members == (0, 1)


def test_of_two_runs_whose_members_wait_for_each_other_s_nodes_one_makes_room(
    group: Group,
) -> None:
    """Each node works for one run at a time: the first node began with one run, the second with the other."""
    other, token = Group(), bytes(reversed(TOKEN))
    other.addresses = group.addresses
    try:
        group.open(0, members=(0, 1), rendezvous_s=1e6, reach_s=0.3)
        other.open(1, members=(0, 1), token=token)
        waits = other.begin_to_form(1, state())
        assert isinstance(group.begin_to_form(0, state())(), LeftOut)
        group.die(0)
        other.open(0, members=(0, 1), token=token)
        decision = the_only({0: other.begin_to_form(0, state())(), 1: waits()})
        assert decision.members == (0, 1)
    finally:
        other.close()


def test_without_the_member_that_has_the_model_there_is_no_ring(group: Group) -> None:
    group.open(1, 2, rendezvous_s=0.6)
    assert all(
        isinstance(outcome, NoModel) for outcome in group.form({1: FIRST[1], 2: FIRST[2]}).values()
    )


def test_who_was_there_and_is_gone_is_not_waited_for_at_the_rendezvous(group: Group) -> None:
    """Member 2 is late and the rendezvous lasts; member 1 joins the leader and dies."""
    group.open(0, 1)
    first = group.begin_to_form(0, FIRST[0])
    group.begin_to_form(1, FIRST[1])
    joins = group.memberships[0]._joins
    wait_until(lambda: 1 in joins.get(0, {}), "member 1 at the leader")
    group.die(1)
    wait_until(lambda: 1 not in joins[0], "the leader to miss member 1")
    group.open(2)
    assert the_only({2: group.begin_to_form(2, FIRST[2])(), 0: first()}).members == (0, 2)


def test_who_comes_late_is_left_out(group: Group) -> None:
    group.open(0, 1, rendezvous_s=0.6)
    assert the_only(group.form({0: FIRST[0], 1: FIRST[1]})).members == (0, 1)
    group.open(2)
    assert isinstance(group.begin_to_form(2, FIRST[2])(), LeftOut)
    assert not is_broken(group.memberships[0])


def test_a_late_leader_is_left_out_too(group: Group) -> None:
    group.open(1, 2, rendezvous_s=0.6)
    the_only(group.form({1: state(), 2: state()}))
    group.open(0)
    assert isinstance(group.begin_to_form(0, FIRST[0])(), LeftOut)


@pytest.mark.parametrize("dead", [0, 1, 2])
def test_survivors_form_anew_from_who_is_farthest(group: Group, dead: int) -> None:
    group.open()
    the_only(group.form(FIRST))
    group.die(dead)
    first, second = (rank for rank in range(3) if rank != dead)
    decision = the_only(
        group.form({first: state(4, optimizer="a"), second: state(5, optimizer="b")})
    )
    assert (decision.number, decision.members) == (1, (first, second))
    assert (decision.source, decision.optimizer_source, decision.num_steps) == (second, second, 5)
    assert not decision.same_model
    assert not decision.same_optimizer


def test_the_watchdog_notices_a_death_and_all_hear_of_it(group: Group) -> None:
    group.open()
    the_only(group.form(FIRST))
    group.die(2)
    wait_until(lambda: is_broken(group.memberships[1]), "member 1 to miss member 2")
    again = group.begin_to_form(1, state(1))
    wait_until(lambda: is_broken(group.memberships[0]), "member 0 to hear of it")
    assert the_only({0: group.begin_to_form(0, state(1))(), 1: again()}).members == (0, 1)


@pytest.mark.parametrize("calls", [False, True])
def test_a_member_that_does_not_answer_is_left_behind_and_told_so(calls: bool) -> None:
    """Also if it calls the others itself, all the while."""
    group = Group(4)
    awake = threading.Event()
    try:
        group.open(heartbeat_s=2.0)
        everybody = {rank: state() for rank in range(4)}
        the_only(group.form(everybody))
        port, original = group.ports[0], dict(group.ports[0]._handlers)

        def hang(method: str) -> Callable[[Caller, bytes], bytes]:
            def answer(caller: Caller, body: bytes) -> bytes:
                awake.wait(WAIT_S)
                return original[method](caller, body)

            return answer

        for method in ("probe", "join"):
            port.handle(method, hang(method))
        wait_until(lambda: is_broken(group.memberships[3]), "member 3 to miss member 0")
        hung = group.begin_to_form(0, state(1)) if calls else None
        others = {rank: group.begin_to_form(rank, state(1)) for rank in (1, 2, 3)}
        assert the_only({rank: outcome() for rank, outcome in others.items()}).members == (1, 2, 3)
        awake.set()
        assert isinstance((hung or group.begin_to_form(0, state(1)))(), LeftOut)
        assert not is_broken(group.memberships[1])
    finally:
        awake.set()
        group.close()


def test_forming_again_and_again_keeps_all_that_live() -> None:
    """All members call for a new ring, at moments that differ: nobody gets lost, and all have the same one."""
    group = Group(4)
    try:
        group.open(heartbeat_s=20.0)
        numbers = []
        for attempt in range(8):
            order = [(attempt + offset) % 4 for offset in range(4)]
            waiting = {}
            for rank in order:
                waiting[rank] = group.begin_to_form(rank, state(attempt))
                time.sleep(0.01 * (attempt % 3))
            decision = the_only({rank: outcome() for rank, outcome in waiting.items()})
            assert decision.members == (0, 1, 2, 3)
            numbers.append(decision.number)
        assert numbers == sorted(set(numbers))
    finally:
        group.close()


def test_who_leaves_need_not_be_found_out(group: Group) -> None:
    group.open(heartbeat_s=60.0)
    the_only(group.form(FIRST))
    group.memberships[2].leave()
    group.die(2)
    assert is_broken(group.memberships[0])
    assert is_broken(group.memberships[1])
    assert the_only(group.form({0: state(3), 1: state(3)})).members == (0, 1)
    assert group.memberships[0].preempted == (2,)
    assert group.memberships[0].log_lines == []


def test_who_leaves_while_others_are_still_to_come_is_not_in_the_ring(group: Group) -> None:
    group.open(0, 1)
    first = group.begin_to_form(0, FIRST[0])
    second = group.begin_to_form(1, FIRST[1])
    wait_until(lambda: 1 in group.memberships[0]._joins.get(0, {}), "member 1 at the leader")
    group.memberships[1].leave()
    group.open(2)
    third = group.begin_to_form(2, FIRST[2])
    assert the_only({0: first(), 2: third()}).members == (0, 2)
    assert isinstance(second(), LeftOut)


def test_members_that_finish_wait_for_each_other(group: Group) -> None:
    group.open(heartbeat_s=4 * WAIT_S)
    the_only(group.form(FIRST))
    with ThreadPoolExecutor(3) as threads:
        first = [threads.submit(group.memberships[rank].finish) for rank in (0, 1)]
        time.sleep(0.3)
        assert not any(future.done() for future in first)
        group.memberships[2].finish()
        for future in first:
            future.result(timeout=WAIT_S)


def test_who_has_finished_is_not_missed(group: Group) -> None:
    group.open(heartbeat_s=2.0)
    the_only(group.form(FIRST))
    group.memberships[1].finish()
    group.die(1)
    # Its watchdog would miss member 1 at once, and passes over it instead; twice, since one look may be under way.
    called, call = list[int](), group.ports[0].call
    group.ports[0].call = lambda rank, *rest, **options: (
        called.append(rank),
        call(rank, *rest, **options),
    )[1]
    wait_until(lambda: len(called) >= 2, "member 0 to look twice")
    assert set(called) == {2} and not is_broken(group.memberships[0])
    # Should the others have to form again, it counts as one of those that got the result.
    assert the_only(group.form({0: state(3), 2: state(3)})).members == (0, 2)
    assert group.memberships[0].finished == (0, 1, 2)
    assert group.memberships[0].log_lines == []


def test_both_parts_of_a_split_group_go_on() -> None:
    group, elsewhere = Group(4), free_addresses(4)
    try:
        group.open(0, 1, rendezvous_s=0.6, addresses=[*group.addresses[:2], *elsewhere[2:]])
        group.open(2, 3, rendezvous_s=0.6, addresses=[*elsewhere[:2], *group.addresses[2:]])
        outcomes = group.form({0: state(), 1: state(has_model=False), 2: state(), 3: state()})
        assert the_only({rank: outcomes[rank] for rank in (0, 1)}).members == (0, 1)
        assert the_only({rank: outcomes[rank] for rank in (2, 3)}).members == (2, 3)
    finally:
        group.close()


def test_who_wakes_in_a_later_interval_does_not_go_on_alone(group: Group) -> None:
    """Its peers refuse its token: they are in another interval. It must not take them for dead."""
    group.open()
    the_only(group.form(FIRST))
    for rank in (0, 1):
        group.die(rank)
    group.open(0, 1, token=bytes(32))
    assert isinstance(group.begin_to_form(2, state(3))(), LeftOut)


def test_at_the_beginning_a_refusal_is_waited_out(group: Group) -> None:
    """The process of the interval before still has the port; the one that is meant comes later."""
    group.open(1, token=bytes(32))
    group.open(0, 2)
    first, third = group.begin_to_form(0, FIRST[0]), group.begin_to_form(2, FIRST[2])
    time.sleep(0.4)
    group.die(1)
    group.open(1)
    assert the_only({1: group.begin_to_form(1, FIRST[1])(), 0: first(), 2: third()}).members == (
        0,
        1,
        2,
    )


def test_an_optimiser_survives_a_leader_that_is_new(group: Group) -> None:
    group.open()
    decision = the_only(
        group.form(
            {
                0: state(),
                1: state(has_model=False, optimizer="kept"),
                2: state(has_model=False, optimizer="kept"),
            }
        )
    )
    assert (decision.source, decision.optimizer_source, decision.same_optimizer) == (0, 1, False)


def test_what_the_caller_wants_looked_at_ends_the_wait(group: Group) -> None:
    class Wanted(Exception):
        pass

    def poll() -> None:
        raise Wanted

    group.open(0)
    with pytest.raises(Wanted):
        group.memberships[0].form(FIRST[0], poll)


def test_a_watchdog_ends_with_its_membership(group: Group) -> None:
    group.open(heartbeat_s=1.0)
    the_only(group.form(FIRST))
    watchdogs = [membership._watchdog for membership in group.memberships.values()]
    for rank in range(3):
        with suppress(PeerLost):
            group.die(rank)
    wait_until(
        lambda: not any(watchdog.is_alive() for watchdog in watchdogs), "the watchdogs to end"
    )
