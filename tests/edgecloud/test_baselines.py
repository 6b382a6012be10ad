"""The baselines: JointDNN's shortest path against every placement there is."""

import dataclasses
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from socflower.edgecloud.baselines import edge_only, joint_dnn, pipelined, plain_split, shortest_path, splitfed
from socflower.edgecloud.deployment import CutCost, Deployment, LinkRates, SplitCosts
from socflower.edgecloud.phases import phases, transfer_s
from socflower.errors import ConfigError


@st.composite
def tables(draw: st.DrawFn, slowest: float) -> SplitCosts:
    """Segments of which the cloud needs up to `slowest` times the edge's time."""
    num_cuts = draw(st.integers(1, 5))
    edge = [draw(st.floats(0.1, 5)) for _ in range(num_cuts + 1)]
    cloud = [seconds * draw(st.floats(0, slowest)) for seconds in edge]
    cuts = tuple(CutCost(
        name=str(i), edge_forward_s=sum(edge[:i + 1]) / 3, edge_backward_s=sum(edge[:i + 1]) * 2 / 3,
        cloud_s=sum(cloud[i + 1:]), feature_elements=draw(st.integers(1, 10**6)), front_weight_bytes=1.0)
        for i in range(num_cuts))
    return SplitCosts(model="m", batch_size=2, cuts=cuts, edge_only_s=sum(edge), label_bytes=draw(st.floats(0, 1e3)),
                      edge_s_per_byte=draw(st.floats(0, 1e-7)), edge_s_per_batch=draw(st.floats(0, 0.1)))


RATES = st.builds(lambda up, down, latency_s: LinkRates(up_bytes_per_s=up, down_bytes_per_s=down, latency_s=latency_s),
                  st.floats(1e3, 1e9), st.floats(1e3, 1e9), st.floats(0, 0.2))


def seconds_of(costs: SplitCosts, rates: LinkRates, in_cloud: tuple[bool, ...]) -> float:
    """Any placement, from the definition: segments by differences, transfers at every change."""
    total_s = 0.0
    edge_s = [cut.edge_forward_s + cut.edge_backward_s for cut in costs.cuts] + [costs.edge_only_s]
    cloud_s = [cut.cloud_s for cut in costs.cuts] + [0.0]
    for i, place in enumerate(in_cloud):
        total_s += cloud_s[i - 1] - cloud_s[i] if place else edge_s[i] - (edge_s[i - 1] if i else 0.0)
        if i and place != in_cloud[i - 1]:
            features = costs.feature_bytes(i - 1, 32) - (0.0 if place else costs.label_bytes)
            gradients = costs.gradient_bytes(i - 1)
            up, down = (features, gradients) if place else (gradients, features)
            total_s += (max(transfer_s(up, rates.up_bytes_per_s) + rates.latency_s, up * costs.edge_s_per_byte)
                        + max(transfer_s(down, rates.down_bytes_per_s) + rates.latency_s, down * costs.edge_s_per_byte)
                        + costs.edge_s_per_batch)
    return total_s


@given(costs=tables(3.0), rates=RATES)
def test_the_shortest_path_is_the_best_of_all_placements(costs: SplitCosts, rates: LinkRates) -> None:
    placements = [(False, *rest) for rest in product((False, True), repeat=len(costs.cuts))]
    path = shortest_path(costs, rates)
    assert path.in_cloud in placements
    assert path.seconds == pytest.approx(seconds_of(costs, rates, path.in_cloud))
    assert path.seconds == pytest.approx(min(seconds_of(costs, rates, placement) for placement in placements))


@given(costs=tables(1.0), rates=RATES)
def test_one_cut_is_enough_where_the_cloud_is_nowhere_slower(costs: SplitCosts, rates: LinkRates) -> None:
    anywhere = shortest_path(costs, rates)
    single = shortest_path(costs, rates, allow_return=False)
    assert single.seconds == pytest.approx(anywhere.seconds)
    assert len(single.cuts) <= 1


@given(costs=tables(3.0), rates=RATES, allow=st.booleans())
def test_joint_dnn_is_the_best_fixed_sequential_deployment(costs: SplitCosts, rates: LinkRates, allow: bool) -> None:
    fixed = [plain_split(costs, cut) for cut in range(len(costs.cuts))] + ([edge_only()] if allow else [])
    chosen = joint_dnn(costs, rates, allow_edge_only=allow)
    assert chosen in fixed
    assert phases(costs, chosen, rates).total_s == pytest.approx(
        min(phases(costs, deployment, rates).total_s for deployment in fixed))


def example() -> SplitCosts:
    cuts = tuple(CutCost(name=str(i), edge_forward_s=1.0 + i, edge_backward_s=0.0, cloud_s=9.0 - 5.0 * i,
                         feature_elements=1, front_weight_bytes=1.0) for i in range(2))
    return SplitCosts(model="m", batch_size=2, cuts=cuts, edge_only_s=90.0, header_bytes=1.0)


def test_a_cloud_that_is_slow_at_some_layers_is_left_and_entered_again() -> None:
    """Why joint_dnn forbids the way back: no deployment could say it."""
    quick = LinkRates(up_bytes_per_s=1e9, down_bytes_per_s=1e9)
    costs = example()
    assert shortest_path(costs, quick).cuts == (1,)
    slow_middle = dataclasses.replace(costs, cuts=(
        dataclasses.replace(costs.cuts[0], edge_forward_s=50.0, cloud_s=9.0),
        dataclasses.replace(costs.cuts[1], edge_forward_s=51.0),
        dataclasses.replace(costs.cuts[1], name="2", edge_forward_s=80.0, cloud_s=3.0),
        dataclasses.replace(costs.cuts[1], name="3", edge_forward_s=80.5, cloud_s=0.5)))
    path = shortest_path(slow_middle, quick)
    assert path.in_cloud == (False, False, True, False, True)
    assert joint_dnn(slow_middle, quick).cut == 1


def test_over_a_dead_link_joint_dnn_has_a_cut_or_the_edge() -> None:
    dead = LinkRates(up_bytes_per_s=0.0, down_bytes_per_s=0.0)
    assert joint_dnn(example(), dead).cut is not None
    assert joint_dnn(example(), dead, allow_edge_only=True) == edge_only()


def test_deployments_say_what_the_baselines_do() -> None:
    costs = example()
    assert edge_only() == Deployment(cut=None)
    assert plain_split(costs, 1) == splitfed(costs, 1) == Deployment(cut=1, bits=32, window=0)
    assert pipelined(costs, 0, 5) == Deployment(cut=0, bits=32, window=5)
    for call in (lambda: plain_split(costs, 2), lambda: splitfed(costs, -1), lambda: pipelined(costs, 9, 5)):
        with pytest.raises(ConfigError, match="its cuts are 0 to 1"):
            call()
