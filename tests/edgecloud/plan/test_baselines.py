"""The baselines: each is planned with the best of all that its own paper allows, by brute force."""

import dataclasses
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from socflower.edgecloud.links.bandwidth_profile import LinkRates
from socflower.edgecloud.plan.baselines import (
    BASELINES,
    TECHNIQUES,
    ablation,
    choices,
    plan_baseline,
)
from socflower.edgecloud.plan.cost_model import predicted_s, training_s
from socflower.edgecloud.plan.cuts import SplitCosts, SplitPlan
from socflower.edgecloud.plan.phases import phases, transfer_s, window_limit
from tests.edgecloud.plan.tables import costs as table
from tests.edgecloud.plan.tables import cut as cut_cost
from tests.edgecloud.plan.tables import link
from tests.one_line import refused


@st.composite
def tables(draw: st.DrawFn, slowest: float) -> SplitCosts:
    """Segments for which the cloud needs up to `slowest` times the edge's time."""
    num_cuts = draw(st.integers(1, 5))
    edge = [draw(st.floats(0.1, 5)) for _ in range(num_cuts + 1)]
    cloud = [seconds * draw(st.floats(0, slowest)) for seconds in edge]
    weights = sorted(draw(st.sampled_from([1.0, 2.0, 3.0])) for _ in range(num_cuts))
    cuts = []
    for i, weight_bytes in enumerate(weights):
        edge_s, cloud_s = sum(edge[: i + 1]), sum(cloud[i + 1 :])
        elements = draw(st.integers(1, 10**6))
        cuts.append(cut_cost(edge_s / 3, edge_s * 2 / 3, cloud_s, elements, weight_bytes))
    return table(
        *cuts,
        edge_only_s=sum(edge),
        label_bytes=draw(st.floats(0, 1e3)),
        edge_s_per_byte=draw(st.floats(0, 1e-7)),
        edge_s_per_batch=draw(st.floats(0, 0.1)),
    )


RATES = st.builds(link, st.floats(1e3, 1e9), st.floats(1e3, 1e9), st.floats(0, 0.2))


def seconds_of(costs: SplitCosts, rates: LinkRates, in_cloud: tuple[bool, ...]) -> float:
    """Any placement, from the definition: segments by differences, transfers at every change."""
    edge_s = [0.0, *(cut.edge_forward_s + cut.edge_backward_s for cut in costs.cuts)]
    cloud_s = [*(cut.cloud_s for cut in costs.cuts), 0.0]
    total_s = 0.0
    for i, place in enumerate(in_cloud):
        here_s = [*edge_s, costs.edge_only_s][i + 1] - edge_s[i]
        total_s += cloud_s[i - 1] - cloud_s[i] if place else here_s
        if i and place != in_cloud[i - 1]:
            features = costs.feature_bytes(i - 1, 32) - (0.0 if place else costs.label_bytes)
            gradients = costs.gradient_bytes(i - 1)
            up, down = (features, gradients) if place else (gradients, features)
            for num_bytes, rate in ((up, rates.up_bytes_per_s), (down, rates.down_bytes_per_s)):
                carried_s = transfer_s(num_bytes, rate) + rates.latency_s
                total_s += max(carried_s, num_bytes * costs.edge_s_per_byte)
            total_s += costs.edge_s_per_batch
    return total_s


@given(costs=tables(3.0), rates=RATES)
def test_joint_dnn_is_the_best_of_all_placements_that_cross_once_at_most(
    costs: SplitCosts, rates: LinkRates
) -> None:
    """The edge alone among them."""
    num_cuts = len(costs.cuts)
    once = [(*[False] * (cut + 1), *[True] * (num_cuts - cut)) for cut in range(num_cuts + 1)]
    chosen = plan_baseline("joint-dnn", costs, rates)
    assert (chosen.bits, chosen.window) == (32, 0)
    taken = once[num_cuts if chosen.cut is None else chosen.cut]
    least_s = min(seconds_of(costs, rates, each) for each in once)
    assert seconds_of(costs, rates, taken) == pytest.approx(least_s)


@given(costs=tables(1.0), rates=RATES)
def test_one_cut_is_enough_if_the_cloud_is_nowhere_slower(
    costs: SplitCosts, rates: LinkRates
) -> None:
    """So nothing is kept from JointDNN, whose paths may cross back: they never pay."""
    placements = [(False, *rest) for rest in product((False, True), repeat=len(costs.cuts))]
    least_s = min(seconds_of(costs, rates, placement) for placement in placements)
    chosen = plan_baseline("joint-dnn", costs, rates)
    assert phases(costs, chosen, rates).total_s == pytest.approx(least_s)


@given(
    costs=tables(2.0),
    rates=RATES,
    peer=st.sampled_from(sorted(BASELINES)),
    window=st.integers(0, 5),
    allowed=st.booleans(),
    reverse=st.booleans(),
    bits=st.sampled_from([4, 32]),
    batches=st.integers(1, 300),
    given_cut=st.none() | st.integers(0, 0),
)
def test_a_method_is_planned_with_the_best_that_its_terms_allow(
    costs: SplitCosts,
    rates: LinkRates,
    peer: str,
    window: int,
    allowed: bool,
    reverse: bool,
    bits: int,
    batches: int,
    given_cut: int | None,
) -> None:
    terms, num_cuts = BASELINES[peer], len(costs.cuts)
    weights = [cut.front_weight_bytes for cut in costs.cuts]
    # The pooling behind a layer belongs to it.
    middle = max(i for i in range(num_cuts) if weights[i] == weights[num_cuts // 2])
    best: set[int | None] = {*range(num_cuts)}
    cuts = {
        "best": best,
        "none": set(),
        "given or best": best if given_cut is None else {given_cut},
        "given or middle": {middle if given_cut is None else given_cut},
    }[terms.cut]
    free = given_cut is None or terms.cut == "best"
    if terms.edge_alone in ("always", "only") or (
        terms.edge_alone == "if allowed" and allowed and free
    ):
        cuts = cuts | {None}
    limit = 0 if terms.waits else window

    costs = dataclasses.replace(costs, gradient_bits=bits)

    def seconds(cut: int | None, width: int) -> float:
        split_plan = SplitPlan(cut=cut, bits=width, window=limit)
        times = phases(costs, split_plan, rates, reverse=reverse)
        return training_s(times, batches, window_limit(costs, split_plan))

    chosen = plan_baseline(
        peer,
        costs,
        rates,
        bits=(8, bits),
        num_batches=batches,
        window=window,
        cut=given_cut,
        allow_edge_only=allowed,
        reverse=reverse,
    )
    assert chosen.cut in cuts and chosen.bits in (8, bits) and chosen.window == limit
    assert seconds(chosen.cut, chosen.bits) == pytest.approx(
        min(seconds(cut, width) for cut in cuts for width in (8, bits))
    )


EXAMPLE = table(
    *(cut_cost(1.0 + i, 0.0, 9.0 - 5.0 * i, 1, 1.0) for i in range(2)),
    edge_only_s=90.0,
    header_bytes=1.0,
)


def test_the_middle_is_behind_a_layers_pooling() -> None:
    """Or plain split learning would send four times what it has to, and be beaten for that."""
    sizes = ((64, 1.0), (16, 1.0), (32, 2.0), (8, 2.0), (4, 3.0))
    costs = table(*(cut_cost(1.0, 1.0, 1.0, *size) for size in sizes))
    assert [each.cut for each in choices("split", costs)] == [3]


def test_over_a_dead_link_all_that_may_stay_at_the_edge_do() -> None:
    alone = {
        peer
        for peer in BASELINES
        if plan_baseline(peer, EXAMPLE, link(0.0), window=3, allow_edge_only=True).cut is None
    }
    assert alone == {"joint-dnn", "pipelined", "edge-only"}
    assert plan_baseline("pipelined", EXAMPLE, link(0.0), window=3).cut == 0


def test_a_cut_or_a_method_that_is_not_there_is_refused() -> None:
    for peer in ("split", "splitfed", "pipelined"):
        refused(lambda peer=peer: choices(peer, EXAMPLE, cut=2), "cut 2", "0 to 1")  # type: ignore[misc]
    refused(lambda: choices("ours", EXAMPLE), "'ours'", *BASELINES)


@given(costs=tables(2.0), rates=RATES, window=st.integers(1, 5))
def test_an_ablation_is_from_joint_dnn_to_ours_and_each_subset_has_its_best_cut(
    costs: SplitCosts, rates: LinkRates, window: int
) -> None:
    costs = dataclasses.replace(costs, gradient_bits=8)
    times = ablation(costs, rates, num_batches=50, window=window, bits=(8, 32))
    assert len(times) == 2 ** len(TECHNIQUES)
    full = dataclasses.replace(costs, gradient_bits=32)
    joint = plan_baseline("joint-dnn", full, rates, num_batches=50)
    assert times[frozenset()] == pytest.approx(predicted_s(full, joint, rates, 50))
    plans = [
        *(
            SplitPlan(cut=cut, bits=width, window=window)
            for cut in range(len(costs.cuts))
            for width in (8, 32)
        ),
        SplitPlan(cut=None),
    ]
    best_s = min(predicted_s(costs, plan, rates, 50) for plan in plans)
    assert times[frozenset(TECHNIQUES)] == pytest.approx(best_s)
    # A width is chosen among others, so it never costs time.
    assert times[frozenset({"window", "features"})] <= times[frozenset({"window"})]
