"""The baselines: each is planned with the best of all that its own paper allows, by brute force."""

import dataclasses
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from socflower.edgecloud.links.bandwidth_profile import LinkRates
from socflower.edgecloud.plan.baselines import BASELINES, choices, gradient_bits, plan_baseline
from socflower.edgecloud.plan.cost_model import training_s
from socflower.edgecloud.plan.cuts import CutCost, SplitCosts, SplitPlan
from socflower.edgecloud.plan.phases import phases, transfer_s, window_limit
from socflower.errors import ConfigError


@st.composite
def tables(draw: st.DrawFn, slowest: float) -> SplitCosts:
    """Segments of which the cloud needs up to `slowest` times the edge's time."""
    num_cuts = draw(st.integers(1, 5))
    edge = [draw(st.floats(0.1, 5)) for _ in range(num_cuts + 1)]
    cloud = [seconds * draw(st.floats(0, slowest)) for seconds in edge]
    cuts = tuple(
        CutCost(
            name=str(i),
            edge_forward_s=sum(edge[: i + 1]) / 3,
            edge_backward_s=sum(edge[: i + 1]) * 2 / 3,
            cloud_s=sum(cloud[i + 1 :]),
            feature_elements=draw(st.integers(1, 10**6)),
            front_weight_bytes=weights,
        )
        for i, weights in enumerate(
            sorted(
                draw(
                    st.lists(st.sampled_from([1.0, 2.0, 3.0]), min_size=num_cuts, max_size=num_cuts)
                )
            )
        )
    )
    return SplitCosts(
        model="m",
        batch_size=2,
        cuts=cuts,
        edge_only_s=sum(edge),
        label_bytes=draw(st.floats(0, 1e3)),
        edge_s_per_byte=draw(st.floats(0, 1e-7)),
        edge_s_per_batch=draw(st.floats(0, 0.1)),
    )


RATES = st.builds(
    lambda up, down, latency_s: LinkRates(
        up_bytes_per_s=up, down_bytes_per_s=down, latency_s=latency_s
    ),
    st.floats(1e3, 1e9),
    st.floats(1e3, 1e9),
    st.floats(0, 0.2),
)


def seconds_of(costs: SplitCosts, rates: LinkRates, in_cloud: tuple[bool, ...]) -> float:
    """Any placement, from the definition: segments by differences, transfers at every change."""
    total_s = 0.0
    edge_s = [cut.edge_forward_s + cut.edge_backward_s for cut in costs.cuts] + [costs.edge_only_s]
    cloud_s = [cut.cloud_s for cut in costs.cuts] + [0.0]
    for i, place in enumerate(in_cloud):
        total_s += (
            cloud_s[i - 1] - cloud_s[i] if place else edge_s[i] - (edge_s[i - 1] if i else 0.0)
        )
        if i and place != in_cloud[i - 1]:
            features = costs.feature_bytes(i - 1, 32) - (0.0 if place else costs.label_bytes)
            gradients = costs.gradient_bytes(i - 1)
            up, down = (features, gradients) if place else (gradients, features)
            total_s += (
                max(
                    transfer_s(up, rates.up_bytes_per_s) + rates.latency_s,
                    up * costs.edge_s_per_byte,
                )
                + max(
                    transfer_s(down, rates.down_bytes_per_s) + rates.latency_s,
                    down * costs.edge_s_per_byte,
                )
                + costs.edge_s_per_batch
            )
    return total_s


@given(costs=tables(3.0), rates=RATES, bits=st.sampled_from([2, 8, 32]))
def test_joint_dnn_is_the_best_of_all_placements_that_cross_once_at_most(
    costs: SplitCosts,
    rates: LinkRates,
    bits: int,
) -> None:
    """The edge alone among them, and whatever width our own gradients have."""
    num_cuts = len(costs.cuts)
    once = [(*[False] * (cut + 1), *[True] * (num_cuts - cut)) for cut in range(num_cuts + 1)]
    chosen = plan_baseline("joint-dnn", dataclasses.replace(costs, gradient_bits=bits), rates)
    assert (chosen.bits, chosen.window) == (32, 0)
    taken = once[num_cuts if chosen.cut is None else chosen.cut]
    assert seconds_of(costs, rates, taken) == pytest.approx(
        min(seconds_of(costs, rates, each) for each in once)
    )


@given(costs=tables(1.0), rates=RATES)
def test_one_cut_is_enough_where_the_cloud_is_nowhere_slower(
    costs: SplitCosts, rates: LinkRates
) -> None:
    """So nothing is kept from JointDNN, whose paths may cross back: they never pay."""
    placements = [(False, *rest) for rest in product((False, True), repeat=len(costs.cuts))]
    assert phases(costs, plan_baseline("joint-dnn", costs, rates), rates).total_s == pytest.approx(
        min(seconds_of(costs, rates, placement) for placement in placements)
    )


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
    middle = num_cuts // 2
    while (
        middle + 1 < num_cuts
        and costs.cuts[middle + 1].front_weight_bytes == costs.cuts[middle].front_weight_bytes
    ):
        middle += 1  # the pooling behind a layer belongs to it
    cuts: set[int | None] = {
        "best": {*range(num_cuts)},
        "none": set(),
        "given or best": {*range(num_cuts)} if given_cut is None else {given_cut},
        "given or middle": {middle if given_cut is None else given_cut},
    }[terms.cut]
    if terms.edge_alone in ("always", "only") or (
        terms.edge_alone == "if allowed" and allowed and (given_cut is None or terms.cut == "best")
    ):
        cuts.add(None)
    limit = 0 if terms.waits else window

    def seconds(cut: int | None) -> float:
        split_plan = SplitPlan(cut=cut, bits=32, window=limit)
        return training_s(
            phases(costs, split_plan, rates, reverse=reverse),
            batches,
            window_limit(costs, split_plan),
        )

    chosen = plan_baseline(
        peer,
        dataclasses.replace(costs, gradient_bits=bits),
        rates,
        num_batches=batches,
        window=window,
        cut=given_cut,
        allow_edge_only=allowed,
        reverse=reverse,
    )
    assert chosen.cut in cuts and (chosen.bits, chosen.window) == (32, limit)
    assert seconds(chosen.cut) == pytest.approx(min(map(seconds, cuts)))


def example() -> SplitCosts:
    cuts = tuple(
        CutCost(
            name=str(i),
            edge_forward_s=1.0 + i,
            edge_backward_s=0.0,
            cloud_s=9.0 - 5.0 * i,
            feature_elements=1,
            front_weight_bytes=1.0,
        )
        for i in range(2)
    )
    return SplitCosts(model="m", batch_size=2, cuts=cuts, edge_only_s=90.0, header_bytes=1.0)


def test_the_middle_is_behind_a_layers_pooling() -> None:
    """Or plain split learning would send four times what it has to, and be beaten for that."""
    cuts = [
        CutCost(
            name=name,
            edge_forward_s=1.0,
            edge_backward_s=1.0,
            cloud_s=1.0,
            feature_elements=elements,
            front_weight_bytes=weights,
        )
        for name, elements, weights in (
            ("relu1", 64, 1.0),
            ("pool1", 16, 1.0),
            ("relu2", 32, 2.0),
            ("pool2", 8, 2.0),
            ("relu3", 4, 3.0),
        )
    ]
    costs = dataclasses.replace(example(), cuts=tuple(cuts))
    assert [each.cut for each in choices("split", costs)] == [3]


def test_over_a_dead_link_all_that_may_stay_at_the_edge_do() -> None:
    dead = LinkRates(up_bytes_per_s=0.0, down_bytes_per_s=0.0)
    alone = {
        peer
        for peer in BASELINES
        if plan_baseline(peer, example(), dead, window=3, allow_edge_only=True).cut is None
    }
    assert alone == {"joint-dnn", "pipelined", "edge-only"}
    assert plan_baseline("pipelined", example(), dead, window=3).cut == 0


def test_a_cut_or_a_method_that_is_not_there_is_refused() -> None:
    for peer in ("split", "splitfed", "pipelined"):
        with pytest.raises(ConfigError, match="its cuts are 0 to 1"):
            choices(peer, example(), cut=2)
    with pytest.raises(
        ConfigError, match="baseline 'ours' is unknown; use one of pipelined, joint-dnn"
    ):
        choices("ours", example())


def test_only_ours_narrows_gradients() -> None:
    assert gradient_bits("split-replay", 8) == 8
    assert {gradient_bits(peer, 8) for peer in BASELINES} == {32}
