"""What a ring's members know of each other's speed: measured without waiting, equal in all, and used in shares."""

import json
import math
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from socflower.peers.collective import Collective, no_poll
from socflower.peers.ring import balance as ring_balance
from socflower.peers.ring.balance import RingBalance, StepTimer
from socflower.peers.transports.in_process import in_process_rings
from socflower.training.batches import BatchSchedule, ensure_one_sample
from socflower.wire.message_keys import GroupTask, RingOutcome, RingTask, decode, encode
from tests.one_line import refused
from tests.training.test_batches import task

WAIT_S = 60.0


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def passes(work: StepTimer, clock: Clock, num_samples: int, seconds: float) -> None:
    work.begin_step()
    with work.timed():
        clock.now_s += seconds
    work.end_step(num_samples)


def group_of(size: int, **changes: object) -> GroupTask:
    return task(
        0,
        1,
        members=tuple(range(size)),
        partitions=tuple(range(size)),
        capacities=(1.0,) * size,
        **changes,
    )


class Ends:
    """The balances of a group's members, in this process."""

    def __init__(self, size: int) -> None:
        self.clocks = [Clock() for _ in range(size)]
        self.works = [StepTimer(clock) for clock in self.clocks]
        self.balances = [RingBalance(group_of(size), work) for work in self.works]

    def all(self, act: Callable[[RingBalance, Collective], object], members: Sequence[int]) -> None:
        """Let `members` do the same over a ring of theirs."""
        with ThreadPoolExecutor(len(members)) as threads:
            for done in [
                threads.submit(act, self.balances[member], ring)
                for member, ring in zip(members, in_process_rings(len(members)), strict=True)
            ]:
                done.result(WAIT_S)

    def exchange(self, members: Sequence[int]) -> None:
        self.all(lambda balance, ring: balance.exchange(ring, members, no_poll), members)

    def step(self, rates: Sequence[float], members: Sequence[int]) -> None:
        for member in members:
            passes(self.works[member], self.clocks[member], 10, 10 / rates[member])


# ------------------------------------------------------------------------------------------------ measuring


def test_only_a_members_own_work_counts() -> None:
    clock = Clock()
    work = StepTimer(clock)
    work.begin_step()
    with work.timed():
        clock.now_s += 2.0
    clock.now_s += 100.0  # waits for the others
    with work.timed():
        clock.now_s += 3.0
    work.end_step(10)
    assert work.unreported == (10, 5.0)
    assert work.rate == 2.0


def test_waits_within_the_work_do_not_count() -> None:
    clock = Clock()
    work = StepTimer(clock)
    work.begin_step()
    with work.timed():
        clock.now_s += 2.0
        with work.paused():
            clock.now_s += 5.0
    work.end_step(4)
    assert (work.step_s, work.rate) == (2.0, 2.0)


def test_a_step_that_was_broken_off_does_not_count_and_neither_does_one_without_samples() -> None:
    clock = Clock()
    work = StepTimer(clock)
    work.begin_step()
    with pytest.raises(KeyError), work.timed():
        clock.now_s += 50.0
        raise KeyError
    passes(work, clock, 8, 2.0)
    passes(work, clock, 0, 1.0)
    assert work.unreported == (8, 2.0)
    work.mark_reported()
    assert work.unreported == (0, 0.0)
    assert work.rate == 4.0


def test_the_rate_of_an_interval_is_deaf_to_its_slow_first_step() -> None:
    clock = Clock()
    work = StepTimer(clock)
    assert work.rate == 0.0
    for seconds in (30.0, 2.0, 2.0, 2.0):
        passes(work, clock, 8, seconds)
    assert work.rate == 4.0


# ------------------------------------------------------------------------------------------------ agreeing


def test_all_members_go_by_the_same_capacities() -> None:
    ends = Ends(3)
    for _ in range(5):
        ends.step([40.0, 20.0, 10.0], range(3))
        ends.exchange(range(3))
    assert [balance.capacities(range(3)) for balance in ends.balances] == [[40.0, 20.0, 10.0]] * 3
    assert ends.balances[0].capacities([0, 2]) == [40.0, 10.0]


@pytest.mark.parametrize("missed_by", [(0,), (1,), (0, 2)])
def test_members_stand_where_the_one_stands_that_knows_most(missed_by: tuple[int, ...]) -> None:
    ends = Ends(3)
    for _ in range(3):
        ends.step([40.0, 20.0, 10.0], range(3))
        ends.exchange(range(3))
    ends.step([40.0, 20.0, 10.0], range(3))
    before = {member: json.dumps(ends.balances[member]._filter.state()) for member in missed_by}
    unreported = {member: ends.works[member].unreported for member in missed_by}
    ends.exchange(range(3))
    # As if the ring had broken before the others' words arrived there.
    for member in missed_by:
        ends.balances[member]._filter.restore(json.loads(before[member]))
        ends.works[member]._num_samples, ends.works[member]._seconds = unreported[member]
    ends.all(lambda balance, ring: balance.synchronise(ring, no_poll), range(3))
    assert [balance.capacities(range(3)) for balance in ends.balances] == [[40.0, 20.0, 10.0]] * 3
    assert all(work.unreported == (0, 0.0) for work in ends.works), "passes would be reported twice"


def test_passes_of_an_exchange_that_failed_everywhere_are_told_in_the_next() -> None:
    ends = Ends(2)
    ends.step([40.0, 20.0], range(2))
    ring = in_process_rings(2)[0]
    ring.close()
    with pytest.raises(Exception, match="left"):
        ends.balances[0].exchange(ring, range(2), no_poll)
    ends.all(lambda balance, ring: balance.synchronise(ring, no_poll), range(2))
    assert ends.works[0].unreported == (10, 0.25)


# -------------------------------------------------------------------------------------------------- limits


class _Guard:
    """A heat mod's guard, as far as a ring looks at it."""

    def __init__(self, share: float) -> None:
        self._share, self.num_taken_over = share, 0

    def share(self) -> float:
        return self._share

    def take_over_pacing(self) -> None:
        self.num_taken_over += 1


@pytest.mark.parametrize(
    ("share", "counts_as"), [(0.75, 0.75), (0.0, 0.0), (math.nan, 1.0), (-1.0, 1.0), (7.0, 1.0)]
)
def test_a_member_that_may_do_less_gets_less_at_once_and_its_measured_speed_stays(
    monkeypatch: pytest.MonkeyPatch, share: float, counts_as: float
) -> None:
    ends, here = Ends(2), threading.local()
    monkeypatch.setattr(ring_balance, "current_guard", lambda: getattr(here, "guard", None))

    def exchange(balance: RingBalance, ring: Collective) -> None:
        here.guard = _Guard(share) if balance is ends.balances[1] else None
        balance.exchange(ring, range(2), no_poll)

    for _ in range(5):
        ends.step([40.0, 20.0], range(2))
        ends.all(exchange, range(2))
    assert [balance.capacities([0, 1]) for balance in ends.balances] == [
        [40.0, counts_as * 20.0]
    ] * 2
    ends.exchange(range(2))  # it has cooled, or nobody looks any more
    assert ends.balances[0].capacities([0, 1]) == [40.0, 20.0]


def test_a_guard_need_not_let_the_device_rest_where_shares_do(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    guard = _Guard(0.5)
    monkeypatch.setattr(ring_balance, "current_guard", lambda: guard)
    RingBalance(group_of(1), StepTimer(Clock()))
    assert guard.num_taken_over == 1


def test_where_nobody_may_do_anything_all_share_as_if_they_might(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ends = Ends(2)
    monkeypatch.setattr(ring_balance, "_power_share", lambda: 0.0)
    for _ in range(12):
        ends.step([40.0, 20.0], range(2))
        ends.exchange(range(2))
    assert ends.balances[0].capacities([0, 1]) == [40.0, 20.0]


def test_a_member_that_may_do_nothing_is_not_probed() -> None:
    ends = Ends(2)
    for _ in range(20):
        ends.step([40.0, 20.0], [0])
        ends.exchange([0, 1])
    assert ends.balances[0].due([0, 1]) == [1]
    ends.balances[0]._limits[1] = 0.0
    assert ends.balances[0].due([0, 1]) == []


# -------------------------------------------------------------------------------------------------- shares


@given(sizes=st.lists(st.integers(0, 20), min_size=1, max_size=8), data=st.data())
def test_those_due_get_a_sample_and_none_is_lost(sizes: list[int], data: st.DataObject) -> None:
    due = data.draw(st.sets(st.integers(0, len(sizes) - 1)))
    given_out = ensure_one_sample(sizes, due)
    assert sum(given_out) == sum(sizes)
    for member, (before, after) in enumerate(zip(sizes, given_out, strict=True)):
        assert after >= min(before, 1)
        assert after <= before or (member in due and (before, after) == (0, 1))
    if sum(max(size - 1, 0) for size in sizes) >= sum(not sizes[member] for member in due):
        assert all(given_out[member] for member in due)
    if not due:
        assert given_out == tuple(sizes)


@given(
    capacities=st.lists(st.floats(0.0, 1e6), min_size=3, max_size=3).filter(any),
    step=st.integers(0, 9),
    due=st.sets(st.integers(0, 2)),
)
def test_whatever_the_capacities_a_step_uses_its_batch_once(
    capacities: list[float], step: int, due: set[int]
) -> None:
    schedule = BatchSchedule(group_of(3, steps_per_epoch=5), [100])
    shares = schedule.shares(step, [0, 1, 2], capacities, due)
    assert np.concatenate(shares).tolist() == schedule.batch(step)[0].tolist()


def test_the_tasks_own_capacities_count_where_none_are_measured() -> None:
    planned = task(
        0, 1, members=(0, 1), partitions=(0, 1), capacities=(3.0, 1.0), steps_per_epoch=5
    )
    schedule = BatchSchedule(planned, [100])
    assert [len(share) for share in schedule.shares(0, [0, 1])] == [15, 5]
    assert [len(share) for share in schedule.shares(0, [0, 1], [1.0, 1.0])] == [10, 10]


def test_data_that_stay_where_they_are_cannot_be_balanced() -> None:
    schedule = BatchSchedule(group_of(2, steps_per_epoch=5, reshuffle=False), [50, 50])
    assert [len(share) for share in schedule.shares(0, [0, 1], [9.0, 1.0], {1})] == [10, 10]


# ------------------------------------------------------------------------------------------------ messages


RING = {
    "participant": 0,
    "leader": 0,
    "addresses": ("127.0.0.1:1",),
    "token": "00",
    "transport": "grpc",
    "heartbeat_s": 1.0,
    "rendezvous_s": 1.0,
}


def test_messages_carry_rates_and_how_often_to_balance() -> None:
    outcome = RingOutcome(
        outcome="completed", members=(4, 7), num_steps=3, answers=True, rates=(12.5, 0.0)
    )
    assert decode(RingOutcome, encode(outcome), "outcome") == outcome
    ring = RingTask(**RING, rebalance_steps=5)
    assert decode(RingTask, encode(ring), "ring") == ring
    assert RingTask(**RING).rebalance_steps == 0


def test_a_negative_number_of_steps_is_refused() -> None:
    refused(lambda: RingTask(**RING, rebalance_steps=-1), "rebalance_steps", "-1")
