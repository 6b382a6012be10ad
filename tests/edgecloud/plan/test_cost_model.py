"""The cost model of split training against simulations of what it describes."""

import math
from collections.abc import Callable, Sequence
from itertools import product
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from socflower.edgecloud.links.bandwidth_profile import LinkRates
from socflower.edgecloud.plan.cost_model import (
    drain_s,
    migration_s,
    period_s,
    predicted_s,
    training_s,
)
from socflower.edgecloud.plan.cuts import CutCost, SplitCosts, SplitPlan
from socflower.edgecloud.plan.phases import Phases, batch_times, phases, window_limit
from tests.edgecloud.plan.tables import costs as table
from tests.edgecloud.plan.tables import cut as cut_cost
from tests.edgecloud.plan.tables import link
from tests.one_line import refused

SECONDS = st.floats(0.0, 10.0)
ANY_PHASES = st.builds(
    Phases,
    edge_s=st.floats(0.01, 10.0),
    up_s=SECONDS,
    cloud_s=SECONDS,
    down_s=SECONDS,
    latency_s=SECONDS,
)


def servers_s(times: Phases, num_batches: int, window: int) -> float:
    """Four first-come first-served servers, a sliding window: batch t begins when t − K − 1 has come back."""
    free_s = [0.0] * 4
    back_s: list[float] = []
    for batch in range(num_batches):
        now_s = back_s[batch - window - 1] if batch > window else 0.0
        for server, work_s in enumerate((times.edge_s, times.up_s, times.cloud_s, times.down_s)):
            free_s[server] = now_s = max(now_s, free_s[server]) + work_s
        back_s.append(now_s + times.latency_s)
    return back_s[-1]


def one_edge_s(
    forward_s: float,
    backward_s: float,
    beyond: Sequence[float],
    latency_s: float,
    num_batches: int,
    window: int,
) -> float:
    """The edge as one processor for both passes, between which it alternates."""
    now_s, free_s, back_s, done, was_forward = 0.0, [0.0] * 3, [], 0, False
    while done < num_batches:
        may_backward = done < len(back_s) and back_s[done] <= now_s
        may_forward = len(back_s) < num_batches and len(back_s) - done <= window
        if may_backward and (was_forward or not may_forward):
            now_s, done, was_forward = now_s + backward_s, done + 1, False
        elif may_forward:
            now_s, was_forward = now_s + forward_s, True
            at_s = now_s
            for server, work_s in enumerate(beyond):
                free_s[server] = at_s = max(at_s, free_s[server]) + work_s
            back_s.append(at_s + latency_s)
        else:
            now_s = back_s[done]
    return now_s


@given(times=ANY_PHASES, num_batches=st.integers(1, 60), window=st.integers(0, 8))
def test_groups_take_at_least_eq_12_and_k_0_is_sequential(
    times: Phases, num_batches: int, window: int
) -> None:
    seconds = training_s(times, num_batches, window, grouped=True)
    sizes = [min(window + 1, num_batches - first) for first in range(0, num_batches, window + 1)]
    eq_12_s = sum(max(times.total_s, size * times.longest_s) for size in sizes)
    assert seconds >= eq_12_s * (1 - 1e-9)
    assert training_s(times, num_batches, 0, grouped=True) == pytest.approx(
        num_batches * times.total_s
    )
    full = training_s(times, 7 * (window + 1), window, grouped=True)
    assert full == pytest.approx(7 * (window + 1) * period_s(times, window, grouped=True))
    # Without a limit there is one group, and no barrier.
    assert training_s(times, num_batches, math.inf, grouped=True) == training_s(
        times, num_batches, math.inf
    )


@given(times=ANY_PHASES, window=st.integers(0, 8), num_batches=st.floats(1, 60))
def test_a_group_that_is_divided_takes_longer_by_its_drain(
    times: Phases, window: int, num_batches: float
) -> None:
    drained = drain_s(times, window, grouped=True)
    assert 0.0 <= drained <= times.total_s
    whole = training_s(times, window + 1, window, grouped=True)
    for first in range(1, window + 1):
        parts = [first, window + 1 - first]
        divided = sum(training_s(times, part, window, grouped=True) for part in parts)
        assert -1e-9 <= divided - whole <= times.total_s + 1e-9
    # τ is a mean, so it need not be a whole number of batches.
    longer = training_s(times, num_batches + 0.5, window, grouped=True)
    assert longer >= training_s(times, num_batches, window, grouped=True)


@given(times=ANY_PHASES, num_batches=st.integers(1, 60), window=st.integers(0, 8))
def test_training_time_bounds_a_sliding_window_and_is_exact_where_it_says(
    times: Phases,
    num_batches: int,
    window: int,
) -> None:
    exact_s, said_s = servers_s(times, num_batches, window), training_s(times, num_batches, window)
    wait_s = max(0.0, times.total_s - (window + 1) * times.longest_s)
    assert exact_s <= said_s * (1 + 1e-9)
    assert said_s - exact_s <= wait_s * (1 + 1e-9) + 1e-9
    if not wait_s or (num_batches - 1) % (window + 1) == 0:
        assert said_s == pytest.approx(exact_s, rel=1e-9)


@given(
    split=st.floats(0.1, 0.9),
    times=ANY_PHASES,
    num_batches=st.integers(1, 60),
    window=st.integers(0, 8),
)
def test_an_edge_that_alternates_between_its_passes_keeps_the_pace_of_four_servers(
    split: float,
    times: Phases,
    num_batches: int,
    window: int,
) -> None:
    """To within one period and one batch, however long the training."""
    passes_s = (split * times.edge_s, (1 - split) * times.edge_s)
    beyond_s = (times.up_s, times.cloud_s, times.down_s)
    exact_s = one_edge_s(*passes_s, beyond_s, times.latency_s, num_batches, window)
    said_s = training_s(times, num_batches, window)
    assert exact_s <= said_s * (1 + 1e-9)
    assert exact_s >= said_s - 2 * times.total_s - 1e-9


@given(times=ANY_PHASES, num_batches=st.integers(1, 50), window=st.integers(0, 8))
def test_a_wider_window_never_takes_longer_and_none_is_sequential(
    times: Phases,
    num_batches: int,
    window: int,
) -> None:
    assert training_s(times, num_batches, 0) == pytest.approx(num_batches * times.total_s)
    assert training_s(times, num_batches, window + 1) <= training_s(times, num_batches, window)
    endless_s = training_s(times, num_batches, math.inf)
    assert endless_s == pytest.approx((num_batches - 1) * times.longest_s + times.total_s)
    assert training_s(times, num_batches, 10**9) == pytest.approx(endless_s)


def cut(weight_bytes: float = 400.0, backward_s: float = 2.0, **changes: Any) -> CutCost:
    return cut_cost(1.0, backward_s, 0.3, 1000, weight_bytes, **changes)


def costs(*cuts: CutCost, **changes: Any) -> SplitCosts:
    values = {
        "label_bytes": 32.0,
        "codec_s_per_element": {8: 1e-3},
        "edge_s_per_byte": 1e-4,
        "header_bytes": 100.0,
        "model_weight_bytes": 1000.0,
    }
    return table(*(cuts or (cut(),)), **values | changes)


RATES = link(100.0, 400.0, 0.25)
LATE = SplitPlan(cut=0, bits=8, window=2)
SIZES = 1132 + 4100


def edge_s(one: SplitCosts, split_plan: SplitPlan = LATE) -> float:
    return phases(one, split_plan, RATES).edge_s


def test_phases_are_those_of_the_paper() -> None:
    times = phases(costs(), LATE, RATES)
    layers_s = 1.0 + 1.0 + 2.0 + 1000 * 1e-3
    assert times.edge_s == pytest.approx(layers_s + SIZES * 1e-4)
    assert (times.up_s, times.cloud_s, times.down_s) == pytest.approx((11.32, 0.3, 10.25))
    assert times.latency_s == 0.5 and times.longest_s == pytest.approx(11.32)
    # Waiting for the link is longer than what the edge does for the bytes meanwhile.
    assert times.hidden_s == pytest.approx(SIZES * 1e-4)
    assert times.total_s == pytest.approx(layers_s + 11.32 + 0.3 + 10.25 + 0.5)
    slowed = phases(costs(edge_s_per_batch=0.25), LATE, link(1e9))
    assert slowed.edge_s == pytest.approx(times.edge_s + 0.25)
    assert slowed.total_s == pytest.approx(slowed.edge_s + 0.3)


def test_no_replay_without_a_window_and_no_codec_at_32_bits() -> None:
    times = phases(costs(edge_s_per_byte=0.0), SplitPlan(cut=0, bits=32), RATES)
    assert times.edge_s == 3.0 and times.up_s == pytest.approx(41.32)


def test_a_gradient_is_decoded_and_a_replay_costs_what_it_was_measured_to() -> None:
    replayed, decodes = cut(edge_replay_s=1.5), {8: 2e-3, 4: 1.0}
    after_s = edge_s(costs(replayed, gradient_bits=8, decode_s_per_element=decodes))
    assert after_s == pytest.approx(edge_s(costs(gradient_bits=8)) + 0.5 + 1000 * 2e-3)
    # No replay without a window, no codec at 32 bits.
    for split_plan, more_s in ((SplitPlan(cut=0), 0.0), (LATE, 0.5)):
        at_32 = costs(replayed, decode_s_per_element={8: 1.0})
        assert edge_s(at_32, split_plan) == pytest.approx(edge_s(costs(), split_plan) + more_s)
    frozen = costs(cut(front_trains=False), gradient_bits=8, decode_s_per_element={8: 1.0})
    assert edge_s(frozen, SplitPlan(cut=0)) < 2.0


@pytest.mark.parametrize("reverse", [False, True])
def test_messages_cost_the_cloud_too(reverse: bool) -> None:
    messages = costs(cloud_s_per_byte=1e-3, cloud_s_per_batch=0.5)
    before, after = (phases(one, LATE, RATES, reverse=reverse) for one in (costs(), messages))
    more_s = 0.5 + SIZES * 1e-3
    assert after.cloud_s == pytest.approx(before.cloud_s + more_s)
    assert after.total_s == pytest.approx(before.total_s + more_s) and after.edge_s == before.edge_s


def test_a_slow_edge_slows_all_that_it_does_and_nothing_else() -> None:
    whole = costs(
        cut(edge_replay_s=1.5),
        gradient_bits=8,
        decode_s_per_element={8: 1e-3},
        edge_s_per_batch=0.5,
        cloud_s_per_byte=1e-3,
        cloud_s_per_batch=0.5,
    )
    fast, slow = (phases(each, LATE, RATES) for each in (whole, whole.at_edge_speed(0.5)))
    assert slow.edge_s == pytest.approx(2 * fast.edge_s)
    assert (slow.up_s, slow.cloud_s, slow.down_s) == (fast.up_s, fast.cloud_s, fast.down_s)


def test_a_frozen_front_half_only_goes_forward_and_keeps_to_its_window() -> None:
    frozen = costs(cut(backward_s=0.0, front_trains=False), edge_s_per_byte=0.0)
    split_plan = SplitPlan(cut=0, window=3)
    times = phases(frozen, split_plan, RATES)
    assert times.edge_s == 1.0 and times.down_s == pytest.approx(100 / 400)
    assert window_limit(frozen, split_plan) == 3
    wanted_s = training_s(times, 10, 3)
    assert predicted_s(frozen, split_plan, RATES, 10) == pytest.approx(wanted_s)


def test_a_reverse_split_sends_features_down_and_replays_in_the_cloud() -> None:
    split_plan = SplitPlan(cut=0, bits=8, window=1)
    times = phases(costs(edge_s_per_byte=0.0), split_plan, RATES, reverse=True)
    found = (times.edge_s, times.up_s, times.down_s, times.cloud_s)
    assert found == pytest.approx((1.0 + 2.0 + 1.0, 41.0, 2.83, 0.4))
    assert phases(costs(), SplitPlan(cut=0), RATES, reverse=True).cloud_s == 0.3


def test_a_frozen_front_half_in_the_cloud_has_no_backward_pass() -> None:
    frozen = costs(cut(front_trains=False))
    times = batch_times(frozen, SplitPlan(cut=0, window=2), reverse=True)
    assert (times.forward_s, times.apply_s) == (0.3, 0.0)


def test_an_edge_alone_needs_no_link() -> None:
    alone = SplitPlan(cut=None, window=5)
    assert phases(costs(), alone, link(0.0)) == Phases(edge_s=5.0)
    assert predicted_s(costs(), alone, link(0.0), 7) == pytest.approx(35.0)


def test_over_a_dead_link_nothing_ends() -> None:
    times = phases(costs(), SplitPlan(cut=0, window=1), link(0.0, 1.0))
    never = [times.up_s, training_s(times, 1, 1), training_s(times, 5, math.inf)]
    assert {*never, drain_s(times, 1), period_s(times, 3)} == {math.inf}
    assert training_s(times, 0, 1) == 0.0


@given(
    sizes=st.lists(st.floats(0, 1e6), min_size=3, max_size=3),
    rates=st.builds(link, st.floats(1, 1e6), st.floats(1, 1e6), st.floats(0, 1)),
    reverse=st.booleans(),
)
def test_a_detour_never_migrates_cheaper(
    sizes: list[float], rates: LinkRates, reverse: bool
) -> None:
    one = costs(*map(cut, sorted(sizes)), model_weight_bytes=1e6)

    def seconds(old: int | None, new: int | None) -> float:
        return migration_s(one, old, new, rates, reverse=reverse)

    for a, b, c in product((0, 1, 2, None), repeat=3):
        assert seconds(a, a) == 0.0
        assert seconds(a, c) <= (seconds(a, b) + seconds(b, c)) * (1 + 1e-9) + 1e-9


@pytest.mark.parametrize(
    ("old", "new", "reverse", "wanted_s"),
    [
        (1, 0, False, 400 / 100 + 0.25),
        (0, 1, False, 400 / 400 + 0.25),
        (None, 1, False, 200 / 100 + 0.25),
        # The edge's half shrinks.
        (0, 1, True, 400 / 100 + 0.25),
        (1, None, True, 800 / 400 + 0.25),
    ],
)
def test_layers_move_at_the_rate_of_their_direction(
    old: int | None, new: int | None, reverse: bool, wanted_s: float
) -> None:
    moved_s = migration_s(costs(cut(), cut(800.0)), old, new, RATES, reverse=reverse)
    assert moved_s == pytest.approx(wanted_s)


def test_a_change_costs_the_drain_and_the_migration_at_the_rates_of_now() -> None:
    two, now = costs(cut(), cut(800.0)), link(50.0, 10.0)
    old, new = SplitPlan(cut=0, window=2), SplitPlan(cut=1, bits=8, window=2)
    leaving_s = 2 * period_s(phases(two, old, now), 2) + migration_s(two, 0, 1, now)
    wanted_s = predicted_s(two, new, RATES, 20) + leaving_s
    assert predicted_s(two, new, RATES, 20, old, now=now) == pytest.approx(wanted_s)
    assert predicted_s(two, old, RATES, 20, old, now=now) == predicted_s(two, old, RATES, 20)
    # Nothing is out, nothing moves.
    narrow, plain = SplitPlan(cut=0, bits=8), SplitPlan(cut=0)
    assert predicted_s(two, narrow, RATES, 20, plain) == predicted_s(two, narrow, RATES, 20)


@pytest.mark.parametrize(
    ("call", "named"),
    [
        (lambda: phases(costs(), SplitPlan(cut=1), RATES), ["cut 1", "0 to 0"]),
        (
            lambda: migration_s(costs(model_weight_bytes=0.0), 0, None, RATES),
            ["model_weight_bytes"],
        ),
        (lambda: costs(model_weight_bytes=399.0), ["model_weight_bytes = 399", "400"]),
        (lambda: costs(gradient_bits=3), ["gradient_bits = 3"]),
        (lambda: cut(edge_replay_s=-1.0), ["edge_replay_s = -1"]),
    ],
)
def test_what_cannot_be_is_refused(call: Callable[[], object], named: list[str]) -> None:
    refused(call, *named)
