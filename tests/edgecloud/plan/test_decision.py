"""The decision engine against all deployments, and against links that would have it thrash."""

import dataclasses
import math
from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from socflower.edgecloud.links.bandwidth_profile import LinkRates
from socflower.edgecloud.plan.cost_model import migration_s, period_s, predicted_s
from socflower.edgecloud.plan.cuts import CutCost, SplitCosts, SplitPlan
from socflower.edgecloud.plan.decision import DecisionEngine, WindowSchedule
from socflower.edgecloud.plan.phases import phases
from socflower.errors import ConfigError, InfeasiblePlan

BITS = (2, 4, 8, 16, 32)


@st.composite
def tables(draw: st.DrawFn, frozen: bool = True) -> SplitCosts:
    num_cuts = draw(st.integers(1, 5))
    weights = sorted(draw(st.lists(st.floats(1e3, 1e7), min_size=num_cuts, max_size=num_cuts)))
    num_frozen = draw(st.integers(0, num_cuts)) if frozen else 0
    cuts = tuple(
        CutCost(
            name=f"relu{i}",
            edge_forward_s=draw(st.floats(0.01, 2)) * (i + 1),
            edge_backward_s=0.0 if i < num_frozen else draw(st.floats(0.01, 2)),
            cloud_s=draw(st.floats(0.001, 1)),
            feature_elements=draw(st.integers(100, 10**6)),
            front_weight_bytes=weights[i],
            front_trains=i >= num_frozen,
        )
        for i in range(num_cuts)
    )
    return SplitCosts(
        model="m",
        batch_size=8,
        cuts=cuts,
        edge_only_s=draw(st.floats(1, 20)),
        label_bytes=64,
        codec_s_per_element={bits: draw(st.floats(0, 1e-6)) for bits in (2, 4, 8, 16)},
        model_weight_bytes=2e7,
    )


RATES = st.builds(
    lambda up, down, latency_s: LinkRates(
        up_bytes_per_s=up, down_bytes_per_s=down, latency_s=latency_s
    ),
    st.floats(1e3, 1e8),
    st.floats(1e3, 1e8),
    st.floats(0, 0.2),
)


def follow(
    engine: DecisionEngine, rates: Sequence[LinkRates], start: SplitPlan, window: int
) -> SplitPlan:
    current = start
    for batch, now in enumerate(rates):
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


@settings(max_examples=15)
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


@settings(max_examples=10)
@given(
    costs=tables(frozen=False),
    low=RATES,
    high=RATES,
    half=st.integers(1, 60),
    window=st.integers(0, 5),
    random=st.randoms(use_true_random=False),
)
def test_no_link_makes_it_thrash(
    costs: SplitCosts,
    low: LinkRates,
    high: LinkRates,
    half: int,
    window: int,
    random: object,
) -> None:
    """Whatever two rates alternate, and however: every move of the cut must pay within the mean gap between moves."""
    num_batches, first_gap, beta, rest = 400, 100.0, 0.5, 5
    low, high = (
        LinkRates(
            up_bytes_per_s=rate(low.up_bytes_per_s, high.up_bytes_per_s),
            down_bytes_per_s=rate(low.down_bytes_per_s, high.down_bytes_per_s),
            latency_s=latency(low.latency_s, high.latency_s),
        )
        for rate, latency in ((min, max), (max, min))
    )
    engine = DecisionEngine(
        costs, BITS, beta=beta, first_gap_batches=first_gap, rest_batches=rest, min_gain=0.0
    )
    regular = [high if (batch // half) % 2 else low for batch in range(num_batches)]
    rates = regular if half % 2 else [random.choice((low, high)) for _ in regular]  # type: ignore[attr-defined]
    follow(engine, rates, SplitPlan(cut=0, bits=32, window=window), window)
    assert len(engine.log) <= 1 + num_batches / rest
    assert all(after.batch - before.batch >= rest for before, after in pairwise(engine.log))
    moves = sum(decision.old.cut != decision.new.cut for decision in engine.log)
    choices = list(engine.choices(window))
    spread_s = max(period_s(phases(costs, choice, low), window) for choice in choices) - min(
        period_s(phases(costs, choice, high), window) for choice in choices
    )
    cheapest_s = min(
        (
            migration_s(costs, a, b, high)
            for a in range(len(costs.cuts))
            for b in range(len(costs.cuts))
            if a != b
        ),
        default=0.0,
    )
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
    costs: SplitCosts,
    rates: list[LinkRates],
    window: int,
    power: int,
) -> None:
    """Powers of two, so that rounding is the same."""
    c = 2.0**power
    scaled = dataclasses.replace(
        costs,
        edge_only_s=costs.edge_only_s * c,
        edge_s_per_byte=costs.edge_s_per_byte * c,
        codec_s_per_element={
            bits: seconds * c for bits, seconds in costs.codec_s_per_element.items()
        },
        cuts=tuple(
            dataclasses.replace(
                cut,
                edge_forward_s=cut.edge_forward_s * c,
                cloud_s=cut.cloud_s * c,
                edge_backward_s=cut.edge_backward_s * c,
            )
            for cut in costs.cuts
        ),
    )
    slower = [
        LinkRates(
            up_bytes_per_s=now.up_bytes_per_s / c,
            down_bytes_per_s=now.down_bytes_per_s / c,
            latency_s=now.latency_s * c,
        )
        for now in rates
    ]
    start = SplitPlan(cut=0, bits=32, window=window)
    logs = []
    for table, seen in ((costs, rates), (scaled, slower)):
        engine = DecisionEngine(table, BITS, allow_edge_only=True, rest_batches=1)
        follow(engine, seen, start, window)
        logs.append([(decision.batch, decision.new) for decision in engine.log])
    assert logs[0] == logs[1]


# A thin edge and a model whose features shrink and whose weights grow with depth, as ResNet-50's do.
RESNET = SplitCosts(
    model="resnet",
    batch_size=32,
    edge_only_s=12.0,
    model_weight_bytes=94e6,
    cuts=tuple(
        CutCost(
            name=f"block{i}",
            edge_forward_s=0.12 * (i + 1),
            edge_backward_s=0.24 * (i + 1),
            cloud_s=0.02 * (6 - i),
            feature_elements=4_000_000 // 2**i,
            front_weight_bytes=1e6 * 2**i,
        )
        for i in range(6)
    ),
)


def link(up: float, down: float | None = None) -> LinkRates:
    """Megabits per second."""
    return LinkRates(
        up_bytes_per_s=up * 125e3, down_bytes_per_s=(down or up) * 125e3, latency_s=0.01
    )


def moves(
    engine: DecisionEngine, rates: Sequence[LinkRates], first: int, current: SplitPlan
) -> SplitPlan:
    for batch, now in enumerate(rates, first):
        current = engine.decide(batch, now, current, 5) or current
    return current


def test_a_surge_is_seized_and_moves_the_cut_towards_the_input() -> None:
    engine = DecisionEngine(RESNET, (8,))
    start = engine.best(link(20), 5)
    current = moves(engine, [link(20)] * 50, 0, start)
    assert current == start and engine.log == ()
    current = moves(engine, [link(800)] * 20, 50, current)
    assert engine.log and engine.log[0].batch < 60
    assert current.cut is not None and start.cut is not None and current.cut < start.cut


def test_a_sudden_drop_moves_nothing_at_once_but_a_lasting_one_does() -> None:
    engine = DecisionEngine(RESNET, (8,))
    start = engine.best(link(800), 5)
    current = moves(engine, [link(800)] * 50, 0, start)
    current = moves(engine, [link(10)] * 3, 50, current)
    assert current == start and engine.log == ()
    current = moves(engine, [link(800)] * 30, 53, current)  # it was an episode
    assert current == start and engine.log == ()
    current = moves(engine, [link(10)] * 40, 83, current)
    assert engine.log and engine.log[0].batch > 83
    assert current.cut is not None and start.cut is not None and current.cut > start.cut


def test_nothing_moves_over_a_dead_link_and_things_go_on_after_it() -> None:
    engine = DecisionEngine(RESNET, (2, 8), allow_edge_only=True)
    dead = LinkRates(up_bytes_per_s=0.0, down_bytes_per_s=0.0)
    start = engine.best(link(800), 5)
    current = moves(engine, [link(800)] * 20 + [dead] * 200, 0, start)
    assert current == start and engine.log == ()
    moves(engine, [link(800)] * 200, 220, current)
    assert all(decision.rates != dead for decision in engine.log)
    never = DecisionEngine(RESNET, (8,), allow_edge_only=True)
    assert moves(never, [dead] * 50, 0, SplitPlan(cut=2, bits=8, window=5)).cut == 2
    assert never.best(dead, 5).cut is None  # nothing stands anywhere yet


def test_the_edge_trains_alone_only_where_it_may() -> None:
    slow = link(0.2)
    assert DecisionEngine(RESNET, (2, 8), allow_edge_only=True).best(slow, 5).cut is None
    assert DecisionEngine(RESNET, (2, 8)).best(slow, 5).cut is not None
    engine = DecisionEngine(RESNET, (8,), allow_edge_only=True)
    current = moves(engine, [link(50)] * 60, 0, SplitPlan(cut=None))
    assert current.cut is not None  # it comes back to the cloud as well


def test_what_does_not_fit_into_the_edge_is_not_chosen() -> None:
    heavy = dataclasses.replace(
        RESNET,
        cuts=tuple(
            dataclasses.replace(cut, edge_memory_bytes=1e6 * (i + 1))
            for i, cut in enumerate(RESNET.cuts)
        ),
    )
    engine = DecisionEngine(heavy, (8,), edge_memory_bytes=2.5e6)
    assert {choice.cut for choice in engine.choices(5)} == {0, 1}
    assert engine.best(link(1), 5).cut == 1


def test_ties_go_to_the_smaller_cut_and_the_wider_features() -> None:
    same = CutCost(
        name="a",
        edge_forward_s=1.0,
        edge_backward_s=0.0,
        cloud_s=1.0,
        feature_elements=8,
        front_weight_bytes=1.0,
    )
    flat = SplitCosts(model="flat", batch_size=1, cuts=(same, same, same), edge_only_s=9.0)
    assert DecisionEngine(flat, (8, 16)).best(link(math.inf), 5) == SplitPlan(
        cut=0, bits=16, window=5
    )


def test_near_its_end_a_training_moves_nothing_any_more() -> None:
    start = SplitPlan(cut=4, bits=8, window=5)
    assert DecisionEngine(RESNET, (8,), num_batches=500).decide(0, link(800), start, 5) is not None
    assert DecisionEngine(RESNET, (8,), num_batches=500).decide(498, link(800), start, 5) is None
    assert DecisionEngine(RESNET, (8,), num_batches=500).decide(500, link(800), start, 5) is None


def test_an_engine_that_became_shy_recovers() -> None:
    """τ falls with every change soon undone, and grows again with the batches in which nothing changes."""
    engine = DecisionEngine(RESNET, (8,), min_gain=0.0, rest_batches=1, smoothing=0.0)
    current = engine.best(link(800), 5)
    for batch in range(60):
        now = link(800) if batch % 20 < 10 else link(10)
        current = engine.decide(batch, now, current, 5) or current
    shy = engine.expected_batches(engine.log[-1].batch)
    assert len(engine.log) >= 2 and shy < 200.0
    assert engine.expected_batches(1000) == 200.0


def test_a_change_of_bits_drains_but_moves_no_weights() -> None:
    engine = DecisionEngine(RESNET, BITS, first_gap_batches=50)
    wide = SplitPlan(cut=5, bits=32, window=5)
    assert engine.decide(0, link(0.5, 500), wide, 5) == SplitPlan(cut=5, bits=2, window=5)
    [decision] = engine.log
    assert decision.predicted_s_move > predicted_s(RESNET, decision.new, decision.rates, 50)


@given(
    fractions=st.lists(st.floats(0.01, 0.99), max_size=4, unique=True),
    num_batches=st.integers(1, 1000),
    windows=st.lists(st.integers(0, 9), min_size=5, max_size=5),
)
def test_a_schedule_gives_the_window_of_the_last_fraction_reached(
    fractions: list[float],
    num_batches: int,
    windows: list[int],
) -> None:
    steps = tuple(zip((0.0, *sorted(fractions)), windows, strict=False))
    schedule = WindowSchedule(steps=steps)
    for batch in range(0, num_batches, max(1, num_batches // 20)):
        reached = [window for fraction, window in steps if fraction * num_batches <= batch]
        assert schedule.window(batch, num_batches) == reached[-1]
    assert WindowSchedule().window(499, 1000) == 4 and WindowSchedule().window(500, 1000) == 5


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: WindowSchedule(steps=()), "must begin with 0"),
        (lambda: WindowSchedule(steps=((0.1, 4),)), "must begin with 0"),
        (lambda: WindowSchedule(steps=((0.0, 4), (0.5, 5), (0.5, 6))), "rise below 1"),
        (lambda: WindowSchedule(steps=((0.0, 4), (1.0, 5))), "rise below 1"),
        (lambda: WindowSchedule(steps=((0.0, -1),)), "window = -1"),
        (lambda: DecisionEngine(RESNET, ()), r"bits = \[\] must be some of 2, 4"),
        (lambda: DecisionEngine(RESNET, (8, 3)), r"bits = \[8, 3\]"),
        (lambda: DecisionEngine(RESNET, (8,), beta=1.0), "beta = 1.0"),
        (lambda: DecisionEngine(RESNET, (8,), min_gain=-0.1), "min_gain = -0.1"),
        (lambda: DecisionEngine(RESNET, (8,), smoothing=1.5), "smoothing = 1.5"),
        (lambda: DecisionEngine(RESNET, (8,), first_gap_batches=0.0), "first_gap_batches = 0.0"),
        (lambda: DecisionEngine(RESNET, (8,), rest_batches=0), "rest_batches = 0"),
        (lambda: DecisionEngine(RESNET, (8,), num_batches=0), "num_batches = 0"),
        (
            lambda: DecisionEngine(
                dataclasses.replace(RESNET, model_weight_bytes=0.0), (8,), allow_edge_only=True
            ),
            "needs model_weight_bytes",
        ),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(call: object, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        call()  # type: ignore[operator]
    assert "\n" not in str(caught.value)


def test_an_edge_with_too_little_memory_for_any_cut_is_refused_in_one_line() -> None:
    with pytest.raises(InfeasiblePlan, match="no cut of model resnet fits into -1 bytes") as caught:
        DecisionEngine(RESNET, (8,), edge_memory_bytes=-1.0)
    assert "\n" not in str(caught.value)


def test_the_edge_alone_is_no_choice_beyond_its_memory() -> None:
    costs = dataclasses.replace(RESNET, edge_only_memory_bytes=2e6)
    for budget, allowed in ((2e6, True), (2e6 - 1.0, False)):
        engine = DecisionEngine(costs, (8,), allow_edge_only=True, edge_memory_bytes=budget)
        assert any(choice.cut is None for choice in engine.choices(5)) is allowed
