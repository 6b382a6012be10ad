"""HetPipe's waves in virtual time: bounds of staleness, pace, and the repetition of what was simulated."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from socflower.paper.asteroid.wave_synchronous import Kind, Moment, waves_of
from socflower.pipeline.plan import Sync, TwoDPlan
from socflower.pipeline.planner.baselines import hetpipe
from socflower.pipeline.problem import PipelineProblem
from tests.one_line import refused
from tests.pipeline.problems import layer, linear_seconds, problem, random_problem, straight_plan

PER_WAVE = {Kind.ENTER: 3, Kind.LEAVE: 3, Kind.PUSH: 1}


def two_workers(
    factor: float = 1.0,
    *,
    server: int | str = "hub",
    link: float = 1e6,
) -> tuple[PipelineProblem, TwoDPlan]:
    """Return two pipelines of two stages of 1 s a micro-batch each, the second one `factor` times as slow."""
    fast, slow = (linear_seconds([0.1 * by] * 2, [0.4 * by] * 2) for by in (1.0, factor))
    case = problem(
        [layer(weight=100.0, output=1.0) for _ in range(2)],
        [fast, fast, slow, slow],
        link=link,
        micro_batch_size=4,
        num_micro_batches=6,
    )
    groups = (straight_plan([0, 1], [[2], [2]], 6, first_soc=soc) for soc in (0, 2))
    return case, TwoDPlan(groups=tuple(groups), sync=Sync.SERVER, server=server)


def most_lacking(
    moments: Sequence[Moment], num_workers: int, num_minibatches: int
) -> tuple[int, int]:
    """Return the most minibatches before it that one lacks of its own worker, and of another one.

    By definition: those whose updates are not in the weights that it enters with.
    """
    own = [0] * num_workers  # minibatches in the worker's weights
    pushed = [0] * num_workers  # waves at the server
    pulled: dict[int, list[int]] = {}
    seen = [[0] * num_workers for _ in range(num_workers)]  # waves of others in a worker's weights
    most_own = most_other = 0
    for _, kind, worker, number in moments:
        if kind == Kind.LEAVE:
            assert number == own[worker]
            own[worker] += 1
        elif kind == Kind.PUSH:
            assert number == pushed[worker] and own[worker] >= (number + 1) * num_minibatches
            pushed[worker] += 1
        elif kind == Kind.PULL:
            pulled[worker] = list(pushed)
        elif kind == Kind.TAKE:
            seen[worker] = pulled.pop(worker)
            # No own update is lost or doubled.
            assert seen[worker][worker] == own[worker] // num_minibatches
        else:
            most_own = max(most_own, number - own[worker])
            others = [waves for other, waves in enumerate(seen[worker]) if other != worker]
            most_other = max(most_other, *(number - waves * num_minibatches for waves in others), 0)
    return most_own, most_other


@settings(max_examples=10)
@given(seed=st.integers(0, 2**32 - 1), minibatches=st.integers(1, 4), max_ahead=st.integers(0, 2))
def test_no_minibatch_lacks_more_than_the_bounds_of_wsp_allow(
    seed: int, minibatches: int, max_ahead: int
) -> None:
    """Local staleness Nm − 1, global staleness (D + 1)·Nm + Nm − 2 (Park et al., §4 and §5)."""
    case = random_problem(
        np.random.default_rng(seed), 4, 5, micro_batch_size=4, num_micro_batches=4
    )
    plan = hetpipe(case)
    found = waves_of(case, plan, 12, num_minibatches=minibatches, max_ahead=max_ahead)
    own, other = most_lacking(found.moments, len(plan.groups), minibatches)
    assert own <= minibatches - 1
    assert len(plan.groups) == 1 or other <= (max_ahead + 1) * minibatches + minibatches - 2
    assert sum(found.parts) == pytest.approx(1.0)


def test_the_bounds_are_reached() -> None:
    case, plan = two_workers(3.0)
    for max_ahead in (0, 1):
        found = waves_of(case, plan, 12, num_minibatches=3, max_ahead=max_ahead)
        assert most_lacking(found.moments, 2, 3) == (2, (max_ahead + 1) * 3 + 3 - 2)


def test_every_minibatch_enters_and_leaves_and_every_wave_is_pushed_once_and_in_order() -> None:
    moments = waves_of(*two_workers(1.7), 100, num_minibatches=3).moments
    for worker, (kind, per_wave) in product((0, 1), PER_WAVE.items()):
        numbers = [number for _, *own, number in moments if own == [kind, worker]]
        assert numbers == list(range(len(numbers))) and len(numbers) >= 99 * per_wave
    assert sum(each.kind == Kind.PULL for each in moments) >= 198
    assert list(moments) == sorted(moments, key=lambda each: each.time_s)


@pytest.mark.parametrize("factor", [1.0, 1.7, 3.0])
def test_repeated_waves_are_those_of_a_longer_simulation(
    factor: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    case, plan = two_workers(factor, link=50.0)
    short = waves_of(case, plan, 60)
    monkeypatch.setattr("socflower.paper.asteroid.wave_synchronous._SIMULATED", 60)
    long = waves_of(case, plan, 60)
    count = sum(each.time_s < 50 * long.wave_s for each in long.moments)
    assert count > 300
    for ours, theirs in zip(short.moments[:count], long.moments[:count], strict=True):
        assert ours[1:] == theirs[1:] and ours.time_s == pytest.approx(theirs.time_s)
    assert short.wave_s == pytest.approx(long.wave_s)


def test_waves_without_a_cycle_are_repeated_between_equal_states(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Without looking for cycles, what is repeated keeps order, bounds and pace."""
    case, plan = two_workers(1.7, link=50.0)
    expected = waves_of(case, plan, 300, num_minibatches=3)
    monkeypatch.setattr("socflower.paper.asteroid.wave_synchronous._cycle", lambda *_: 0)
    found = waves_of(case, plan, 300, num_minibatches=3)
    own, other = most_lacking(found.moments, 2, 3)  # which checks that numbers follow each other
    assert own <= 2 and other <= 4
    assert found.wave_s == pytest.approx(expected.wave_s, rel=0.01)
    assert sum(each.kind == Kind.PUSH for each in found.moments) >= 600


def test_a_wave_takes_the_slowest_workers_passes_alone() -> None:
    """Six micro-batches of 1 s: the pipeline never drains, and what is exchanged is hidden behind it."""
    assert waves_of(*two_workers(), 30).wave_s == pytest.approx(6.0, rel=1e-3)
    assert waves_of(*two_workers(2.0), 30).wave_s == pytest.approx(12.0, rel=1e-3)
    alone = replace(two_workers()[1], groups=two_workers()[1].groups[:1])
    assert waves_of(two_workers()[0], alone, 30).wave_s == pytest.approx(6.0, rel=1e-3)


def test_an_exchange_that_cannot_be_hidden_bounds_the_pace() -> None:
    """400 bytes each way through a hub of 10 B/s, up and down after each other: 40 s and more a wave."""
    found = waves_of(*two_workers(link=10.0), 30)
    assert found.wave_s > 40.0
    one_of_them = waves_of(*two_workers(link=10.0, server=0), 30)
    assert one_of_them.wave_s < found.wave_s * 1.5


def test_plans_that_are_no_hetpipe_are_refused() -> None:
    case, plan = two_workers()
    refused(lambda: waves_of(case, plan, 4, num_minibatches=7), "num_minibatches", "7")
    shared = TwoDPlan(groups=(straight_plan([0, 1], [[2, 2], [4]], 6),), sync=Sync.SERVER)
    refused(lambda: waves_of(case, shared, 4), "device")
