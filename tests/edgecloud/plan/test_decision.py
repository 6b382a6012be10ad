"""The decision engine against all deployments, and against links that would have it thrash."""

import dataclasses
import json
import math
from collections.abc import Sequence
from itertools import pairwise, permutations
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from socflower.edgecloud.links.bandwidth_profile import LinkRates
from socflower.edgecloud.plan.cost_model import migration_s, period_s, predicted_s
from socflower.edgecloud.plan.cuts import SplitCosts, SplitPlan
from socflower.edgecloud.plan.decision import DecisionEngine, WindowSchedule
from socflower.edgecloud.plan.phases import phases
from socflower.errors import InfeasiblePlan
from tests.edgecloud.plan.tables import costs as table
from tests.edgecloud.plan.tables import cut as cut_cost
from tests.edgecloud.plan.tables import link
from tests.one_line import refused

BITS = (2, 4, 8, 16, 32)


@st.composite
def tables(draw: st.DrawFn, frozen: bool = True) -> SplitCosts:
    num_cuts = draw(st.integers(1, 5))
    weights = sorted(draw(st.lists(st.floats(1e3, 1e7), min_size=num_cuts, max_size=num_cuts)))
    num_frozen = draw(st.integers(0, num_cuts)) if frozen else 0
    cuts = []
    for i, weight_bytes in enumerate(weights):
        forward_s = draw(st.floats(0.01, 2)) * (i + 1)
        backward_s = 0.0 if i < num_frozen else draw(st.floats(0.01, 2))
        cloud_s, elements = draw(st.floats(0.001, 1)), draw(st.integers(100, 10**6))
        sizes = (elements, weight_bytes)
        cuts.append(cut_cost(forward_s, backward_s, cloud_s, *sizes, front_trains=i >= num_frozen))
    return table(
        *cuts,
        edge_only_s=draw(st.floats(1, 20)),
        label_bytes=64,
        codec_s_per_element={bits: draw(st.floats(0, 1e-6)) for bits in (2, 4, 8, 16)},
        model_weight_bytes=2e7,
    )


RATES = st.builds(link, st.floats(1e3, 1e8), st.floats(1e3, 1e8), st.floats(0, 0.2))


def fields(rates: LinkRates) -> tuple[float, float, float]:
    return dataclasses.astuple(rates)


def follow(
    engine: DecisionEngine,
    rates: Sequence[LinkRates],
    current: SplitPlan,
    window: int,
    first: int = 0,
) -> SplitPlan:
    for batch, now in enumerate(rates, first):
        current = engine.decide(batch, now, current, window) or current
    return current


@settings(max_examples=50)
@given(
    costs=tables(),
    rates=st.lists(RATES, min_size=1, max_size=20),
    speed=st.floats(0.2, 1.0),
    reverse=st.booleans(),
    window=st.integers(0, 4),
)
def test_a_slower_edge_is_an_edge_with_higher_costs(
    costs: SplitCosts,
    rates: list[LinkRates],
    speed: float,
    reverse: bool,
    window: int,
) -> None:
    start = SplitPlan(cut=0, bits=8, window=window)
    slow = DecisionEngine(costs, (8,), reverse=reverse)
    other = DecisionEngine(costs.at_edge_speed(speed), (8,), reverse=reverse)
    assert [slow.decide(batch, now, start, window, speed) for batch, now in enumerate(rates)] == [
        other.decide(batch, now, start, window) for batch, now in enumerate(rates)
    ]
    choice = SplitPlan(cut=None, window=window)
    assert predicted_s(costs.at_edge_speed(speed), choice, rates[0], 10) == pytest.approx(
        predicted_s(costs, choice, rates[0], 10) / speed
    )


@settings(max_examples=50)
@given(
    costs=tables(),
    rates=RATES,
    window=st.integers(0, 6),
    start=st.integers(0, 4),
    bits=st.sampled_from(BITS),
    allowed=st.sets(st.sampled_from(BITS), min_size=1),
    edge_only=st.booleans(),
    gap=st.floats(1, 500),
)
def test_a_decision_is_the_best_of_all_deployments(
    costs: SplitCosts,
    rates: LinkRates,
    window: int,
    start: int,
    bits: int,
    allowed: set[int],
    edge_only: bool,
    gap: float,
) -> None:
    assume(start < len(costs.cuts))
    current = SplitPlan(cut=start, bits=bits, window=window)
    engine = DecisionEngine(
        costs, sorted(allowed), allow_edge_only=edge_only, min_gain=0.0, first_gap_batches=gap
    )
    everything = [
        SplitPlan(cut=cut, bits=width, window=window)
        for cut in range(len(costs.cuts))
        for width in allowed
    ]
    everything += [SplitPlan(cut=None, window=window)] if edge_only else []

    def seconds(split_plan: SplitPlan) -> float:
        return predicted_s(costs, split_plan, rates, gap, current)

    least_s = min(seconds(split_plan) for split_plan in (*everything, current))
    chosen = engine.decide(3, rates, current, window)
    if chosen is None:
        assert seconds(current) == least_s
    else:
        assert chosen in everything and seconds(chosen) == least_s < seconds(current)
        [decision] = engine.log
        assert (decision.old, decision.new, decision.batch) == (current, chosen, 3)
        assert (decision.predicted_s_move, decision.predicted_s_stay) == (least_s, seconds(current))
    assert predicted_s(costs, engine.best(rates, window), rates, gap) == min(
        predicted_s(costs, split_plan, rates, gap) for split_plan in everything
    )


@settings(max_examples=8)
@given(
    costs=tables(),
    rates=RATES,
    window=st.integers(0, 6),
    bits=st.sampled_from(BITS),
    min_gain=st.floats(0, 0.3),
    edge_only=st.booleans(),
)
def test_on_a_constant_link_one_move_is_all(
    costs: SplitCosts,
    rates: LinkRates,
    window: int,
    bits: int,
    min_gain: float,
    edge_only: bool,
) -> None:
    engine = DecisionEngine(
        costs, BITS, min_gain=min_gain, allow_edge_only=edge_only, num_batches=150
    )
    start = SplitPlan(cut=0, bits=bits, window=window)
    follow(engine, [rates] * 150, start, window)
    assert len(engine.log) <= 1
    assert not engine.log or engine.log[0].batch == 0
    settled = DecisionEngine(costs, BITS, min_gain=min_gain, allow_edge_only=edge_only)
    follow(settled, [rates] * 100, settled.best(rates, window), window)
    assert settled.log == ()


@settings(max_examples=5)
@given(
    costs=tables(frozen=False),
    rates=st.tuples(RATES, RATES),
    half=st.integers(1, 60),
    window=st.integers(0, 5),
    random=st.randoms(use_true_random=False),
)
def test_no_link_makes_it_thrash(
    costs: SplitCosts, rates: tuple[LinkRates, LinkRates], half: int, window: int, random: Any
) -> None:
    """Whatever two rates alternate, and however: every move of the cut must pay within the mean gap between moves."""
    num_batches, first_gap, beta, rest = 400, 100.0, 0.5, 5
    ups, downs, latencies = zip(*map(fields, rates), strict=True)
    low = link(min(ups), min(downs), max(latencies))
    high = link(max(ups), max(downs), min(latencies))
    settings_ = {"beta": beta, "first_gap_batches": first_gap, "rest_batches": rest}
    engine = DecisionEngine(costs, BITS, **settings_, min_gain=0.0)
    regular = [high if (batch // half) % 2 else low for batch in range(num_batches)]
    seen = regular if half % 2 else [random.choice((low, high)) for _ in regular]
    follow(engine, seen, SplitPlan(cut=0, bits=32, window=window), window)
    assert len(engine.log) <= 1 + num_batches / rest
    assert all(after.batch - before.batch >= rest for before, after in pairwise(engine.log))
    moves = sum(decision.old.cut != decision.new.cut for decision in engine.log)
    periods_s = [
        [period_s(phases(costs, choice, now), window) for choice in engine.choices(window)]
        for now in (low, high)
    ]
    spread_s = max(periods_s[0]) - min(periods_s[1])
    pairs = permutations(range(len(costs.cuts)), 2)
    cheapest_s = min((migration_s(costs, *pair, high) for pair in pairs), default=0.0)
    pays_after = cheapest_s / spread_s - window if spread_s > 0 else 0.0
    if pays_after > 0:
        assert moves <= 2 * (num_batches + first_gap / (1 - beta)) / pays_after


@settings(max_examples=40)
@given(
    costs=tables(),
    rates=st.lists(RATES, min_size=1, max_size=12),
    window=st.integers(0, 5),
    power=st.integers(-6, 6),
)
def test_the_unit_of_time_does_not_matter(
    costs: SplitCosts, rates: list[LinkRates], window: int, power: int
) -> None:
    """Powers of two, so that rounding is the same."""
    c = 2.0**power
    slow = costs.at_edge_speed(1 / c)
    cuts = [dataclasses.replace(cut, cloud_s=cut.cloud_s * c) for cut in slow.cuts]
    scaled = dataclasses.replace(slow, cuts=tuple(cuts))
    slower = [link(up / c, down / c, late_s * c) for up, down, late_s in map(fields, rates)]
    logs = []
    for table_, seen in ((costs, rates), (scaled, slower)):
        engine = DecisionEngine(table_, BITS, allow_edge_only=True, rest_batches=1)
        follow(engine, seen, SplitPlan(cut=0, bits=32, window=window), window)
        logs.append([(decision.batch, decision.new) for decision in engine.log])
    assert logs[0] == logs[1]


# A thin edge and a model whose features shrink and whose weights grow with depth, as ResNet-50's do.
RESNET = table(
    *(
        cut_cost(0.12 * (i + 1), 0.24 * (i + 1), 0.02 * (6 - i), 4_000_000 // 2**i, 1e6 * 2**i)
        for i in range(6)
    ),
    model="resnet",
    batch_size=32,
    edge_only_s=12.0,
    model_weight_bytes=94e6,
)


def megabits(up: float, down: float | None = None) -> LinkRates:
    return link(up * 125e3, (down or up) * 125e3, 0.01)


SLOW, FAST = megabits(10), megabits(800)


def engine_of(
    costs: SplitCosts = RESNET, bits: Sequence[int] = (8,), **more: Any
) -> DecisionEngine:
    return DecisionEngine(costs, bits, **more)


def stays(engine: DecisionEngine, rates: LinkRates, batches: range, start: SplitPlan) -> None:
    assert follow(engine, [rates] * len(batches), start, 5, batches.start) == start
    assert engine.log == ()


def cut_of(split_plan: SplitPlan) -> int:
    assert split_plan.cut is not None
    return split_plan.cut


def test_a_surge_is_seized_and_moves_the_cut_towards_the_input() -> None:
    engine = engine_of()
    start = engine.best(megabits(20), 5)
    stays(engine, megabits(20), range(50), start)
    current = follow(engine, [FAST] * 60, start, 5, 50)
    assert engine.log[0].batch < 110 and cut_of(current) < cut_of(start)


def test_a_sudden_drop_moves_nothing_at_once_but_a_lasting_one_does() -> None:
    engine = engine_of()
    start = engine.best(FAST, 5)
    stays(engine, FAST, range(50), start)
    stays(engine, SLOW, range(50, 53), start)
    # It was an episode.
    stays(engine, FAST, range(53, 83), start)
    current = follow(engine, [SLOW] * 40, start, 5, 83)
    assert engine.log[0].batch > 83 and cut_of(current) > cut_of(start)


def test_nothing_moves_over_a_dead_link_and_training_continues_after_it() -> None:
    engine, dead = engine_of(bits=(2, 8), allow_edge_only=True), link(0.0)
    start = engine.best(FAST, 5)
    stays(engine, FAST, range(20), start)
    stays(engine, dead, range(20, 220), start)
    follow(engine, [FAST] * 200, start, 5, 220)
    assert all(decision.rates != dead for decision in engine.log)
    never = engine_of(allow_edge_only=True)
    stays(never, dead, range(50), SplitPlan(cut=2, bits=8, window=5))
    assert never.best(dead, 5).cut is None  # no layers are anywhere yet


def test_the_edge_trains_alone_only_if_it_may() -> None:
    slow = megabits(0.2)
    assert engine_of(bits=(2, 8), allow_edge_only=True).best(slow, 5).cut is None
    assert engine_of(bits=(2, 8)).best(slow, 5).cut is not None
    # It returns to the cloud as well.
    engine = engine_of(allow_edge_only=True)
    assert follow(engine, [megabits(50)] * 60, SplitPlan(cut=None), 5).cut is not None


def test_what_does_not_fit_into_the_edge_is_not_chosen() -> None:
    cuts = enumerate(RESNET.cuts, 1)
    heavy = tuple(dataclasses.replace(cut, edge_memory_bytes=1e6 * i) for i, cut in cuts)
    engine = engine_of(dataclasses.replace(RESNET, cuts=heavy, edge_budget_bytes=2.5e6))
    assert {choice.cut for choice in engine.choices(5)} == {0, 1}
    assert engine.best(megabits(1), 5).cut == 1
    alone = dataclasses.replace(RESNET, edge_only_memory_bytes=2e6)
    for budget, allowed in ((2e6, True), (2e6 - 1.0, False)):
        within = dataclasses.replace(alone, edge_budget_bytes=budget)
        engine = engine_of(within, allow_edge_only=True)
        assert any(choice.cut is None for choice in engine.choices(5)) is allowed


def test_ties_go_to_the_smaller_cut_and_the_wider_features() -> None:
    flat = table(*[cut_cost(1.0, 0.0, 1.0, 8, 1.0)] * 3, edge_only_s=9.0)
    best = engine_of(flat, (8, 16)).best(megabits(math.inf), 5)
    assert best == SplitPlan(cut=0, bits=16, window=5)


def test_near_its_end_a_training_moves_nothing_any_more() -> None:
    start = SplitPlan(cut=4, bits=8, window=5)
    moves = [
        engine_of(num_batches=500).decide(batch, FAST, start, 5) is not None
        for batch in (0, 498, 500)
    ]
    assert moves == [True, False, False]


def test_a_move_must_gain_its_share_of_the_time_of_staying() -> None:
    start = SplitPlan(cut=4, bits=8, window=5)
    free = engine_of(min_gain=0.0)
    assert free.decide(0, FAST, start, 5) is not None
    (decision,) = free.log
    gain = 1 - decision.predicted_s_move / decision.predicted_s_stay
    for min_gain, moves in ((gain - 0.01, True), (gain + 0.01, False)):
        chosen = engine_of(min_gain=min_gain).decide(0, FAST, start, 5)
        assert (chosen is not None) is moves


def test_an_engine_that_became_shy_recovers() -> None:
    """τ falls with every change soon undone, and grows again with the batches in which nothing changes."""
    engine = engine_of(min_gain=0.0, rest_batches=1, patience=0.0)
    rates = [FAST if batch % 20 < 10 else SLOW for batch in range(60)]
    follow(engine, rates, engine.best(FAST, 5), 5)
    assert len(engine.log) >= 2 and engine.expected_batches(engine.log[-1].batch) < 200.0
    assert engine.expected_batches(1000) == 200.0


def test_a_change_of_bits_drains_but_moves_no_weights() -> None:
    engine = engine_of(bits=BITS, first_gap_batches=50)
    wide = SplitPlan(cut=5, bits=32, window=5)
    narrow = SplitPlan(cut=5, bits=2, window=5)
    assert engine.decide(0, megabits(0.5, 500), wide, 5) == narrow
    (decision,) = engine.log
    assert decision.predicted_s_move > predicted_s(RESNET, narrow, decision.rates, 50)


@given(
    fractions=st.lists(st.floats(0.01, 0.99), max_size=4, unique=True),
    num_batches=st.integers(1, 1000),
    windows=st.lists(st.integers(0, 9), min_size=5, max_size=5),
)
def test_a_schedule_gives_the_window_of_the_last_fraction_reached(
    fractions: list[float], num_batches: int, windows: list[int]
) -> None:
    steps = tuple(zip((0.0, *sorted(fractions)), windows, strict=False))
    schedule = WindowSchedule(steps=steps)
    for batch in range(0, num_batches, max(1, num_batches // 20)):
        reached = [window for fraction, window in steps if fraction * num_batches <= batch]
        assert schedule.window(batch, num_batches) == reached[-1]
    assert WindowSchedule().window(499, 1000) == 4 and WindowSchedule().window(500, 1000) == 5
    # A group has K + 1 batches, or those until the next step; the first waits for all before it.
    grouped = WindowSchedule(steps=steps, grouped=True)
    size, step = 0, -1
    for batch in range(num_batches):
        reached_step = sum(fraction * num_batches <= batch for fraction, _ in steps)
        if reached_step != step or size > steps[step - 1][1]:
            size, step = 0, reached_step
        assert grouped.limit(batch, num_batches) == size <= grouped.window(batch, num_batches)
        assert schedule.limit(batch, num_batches) == schedule.window(batch, num_batches)
        size += 1


@pytest.mark.parametrize(
    "fractions", [(), (0.1,), (0.0, 0.5, 0.5), (0.0, 1.0)], ids=lambda each: str(each)
)
def test_schedules_begin_with_0_and_rise_below_1(fractions: tuple[float, ...]) -> None:
    steps = tuple((fraction, 4) for fraction in fractions)
    refused(lambda: WindowSchedule(steps=steps), "fractions", str([*fractions]))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("beta", 1.0),
        ("min_gain", -0.1),
        ("patience", 1.5),
        ("first_gap_batches", 0.0),
        ("rest_batches", 0),
        ("num_batches", 0),
    ],
)
def test_settings_that_cannot_be_are_refused(key: str, value: Any) -> None:
    refused(lambda: engine_of(**{key: value}), f"{key} = {value}")


def test_what_an_engine_cannot_choose_from_is_refused() -> None:
    refused(lambda: engine_of(bits=()), "bits")
    refused(lambda: engine_of(bits=(8, 3)), "bits = 3")
    unknown = dataclasses.replace(RESNET, model_weight_bytes=0.0)
    refused(lambda: engine_of(unknown, allow_edge_only=True), "resnet", "model_weight_bytes")
    cuts = tuple(dataclasses.replace(cut, edge_memory_bytes=2e6) for cut in RESNET.cuts)
    small = dataclasses.replace(RESNET, cuts=cuts, edge_budget_bytes=1e6)
    refused(lambda: engine_of(small), "resnet", "2.00 MB", "1.00 MB", error=InfeasiblePlan)
    refused(lambda: WindowSchedule(steps=((0.0, -1),)), "steps", "-1")


def test_a_lead_that_the_link_takes_back_moves_nothing() -> None:
    """Two slow batches of forty."""
    rates = [FAST if batch % 40 < 38 else SLOW for batch in range(1000)]
    engine = engine_of()
    start = engine.best(FAST, 5)
    assert follow(engine, rates, start, 5) == start and engine.log == ()


def test_an_estimate_that_still_changes_moves_nothing() -> None:
    engine = engine_of(patience=0.0)
    start = engine.best(FAST, 5)
    stays(engine, FAST, range(5), start)
    # Each of these rates has another best cut.
    for batch, rates in enumerate((megabits(200), megabits(60), megabits(20)), 5):
        stays(engine, rates, range(batch, batch + 1), start)
    last = megabits(20)
    assert follow(engine, [last] * 3, start, 5, 8) == engine.best(last, 5)
    assert len(engine.log) == 1


def test_a_restored_engine_decides_like_the_first() -> None:
    first = engine_of()
    start = first.best(FAST, 5)
    follow(first, [FAST] * 20 + [SLOW] * 3, start, 5)
    second = engine_of()
    second.restore(json.loads(json.dumps(first.state())))
    ends = [follow(engine, [SLOW] * 40, start, 5, 23) for engine in (first, second)]
    assert ends[0] == ends[1] != start and first.log == second.log
