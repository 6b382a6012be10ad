"""Costs from catalogue devices: they add up to what the cost model says of the whole."""

import contextlib
import dataclasses
import math
import random
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from socflower.cluster.cost_model import LayerProfile, ModelProfile, step_cost
from socflower.cluster.device import StepTimings
from socflower.cluster.device_catalog import device, usable_memory_bytes
from socflower.edgecloud.links.bandwidth_profile import constant
from socflower.edgecloud.plan.baselines import BASELINES, plan_baseline
from socflower.edgecloud.plan.cuts import SplitCosts, SplitPlan
from socflower.edgecloud.plan.decision import adaptive_party
from socflower.edgecloud.plan.device_costs import (
    CODEC_PASSES,
    CutShape,
    edge_energy_j,
    split_costs,
    training_energy_j,
)
from socflower.edgecloud.plan.phases import Phases
from socflower.errors import InfeasiblePlan
from tests.one_line import refused

PI, TX2, V100 = device("raspberry-pi-4b"), device("jetson-tx2"), device("gpu-v100")


def model(num_layers: int = 6) -> ModelProfile:
    return ModelProfile(
        name="net",
        input_bytes=4096.0,
        layers=tuple(
            LayerProfile(
                name=f"conv{i}",
                kind="Conv2d",
                forward_flops=1e7 * (i + 1),
                output_bytes=4.0 * 8192 / 2**i,
                weight_bytes=1e4 * 2**i,
                num_tensors=1,
            )
            for i in range(num_layers)
        ),
    )


def cuts(num_layers: int = 6) -> tuple[CutShape, ...]:
    return tuple(
        CutShape(name=f"conv{i}", num_layers=i + 1, feature_elements_per_sample=8192 // 2**i)
        for i in range(num_layers - 1)
    )


@given(
    batch=st.integers(1, 256),
    num_layers=st.integers(2, 8),
    reverse=st.booleans(),
    measured=st.booleans(),
)
def test_the_two_halves_on_one_device_are_the_whole(
    batch: int, num_layers: int, reverse: bool, measured: bool
) -> None:
    """Seconds, as step_cost has them; bytes of weights and optimiser state."""
    edge, net = PI, model(num_layers)
    if measured:
        timed = {"net": StepTimings(batches=(8, 64), step_s=(0.9, 5.0))}
        cpu = dataclasses.replace(PI.processors["cpu"], timings=timed)
        edge = dataclasses.replace(PI, processors={"cpu": cpu})
    costs = split_costs(net, cuts(num_layers), edge, edge, batch, reverse=reverse)
    whole = step_cost(net, edge, batch)
    assert costs.edge_only_s == pytest.approx(whole.compute_s + whole.update_s)
    for cut in costs.cuts:
        both_s = cut.edge_forward_s + cut.edge_backward_s + cut.cloud_s
        assert both_s == pytest.approx(costs.edge_only_s)
    assert costs.model_weight_bytes == pytest.approx(2 * net.weight_bytes)
    forwards_s = [cut.edge_forward_s for cut in costs.cuts]
    assert forwards_s == sorted(set(forwards_s), reverse=reverse)
    weights = [cut.front_weight_bytes for cut in costs.cuts]
    assert weights == sorted(weights)


def test_memory_at_the_edge_is_that_of_its_layers() -> None:
    net, batch = model(), 32

    def memory_bytes(layers: Sequence[LayerProfile], input_bytes: float) -> float:
        activations = input_bytes + sum(layer.output_bytes for layer in layers)
        return 3 * sum(layer.weight_bytes for layer in layers) + batch * activations

    costs, turned = (
        split_costs(net, cuts(), PI, V100, batch, reverse=reverse) for reverse in (False, True)
    )
    wanted = memory_bytes(net.layers[:3], net.input_bytes)
    assert costs.cuts[2].edge_memory_bytes == pytest.approx(wanted)
    assert costs.cuts[-1].edge_memory_bytes < net.training_memory_bytes(batch)
    wanted = memory_bytes(net.layers[3:], 4 * 2048)
    assert turned.cuts[2].edge_memory_bytes == pytest.approx(wanted)
    assert turned.label_bytes == 0.0 and costs.label_bytes == 8.0 * batch


def test_frozen_weights_of_a_layer_take_memory_and_do_not_travel() -> None:
    net, batch = model(), 32
    base = tuple(
        dataclasses.replace(
            layer,
            weight_bytes=0.0,
            num_tensors=0,
            frozen_bytes=layer.weight_bytes,
            backward_to_forward=0.0,
        )
        for layer in net.layers[:2]
    )
    adapted = dataclasses.replace(net, layers=(*base, *net.layers[2:]))
    full, costs = (split_costs(each, cuts(), PI, V100, batch) for each in (net, adapted))
    saved_bytes = sum(layer.frozen_bytes for layer in base)
    for cut, whole in list(zip(costs.cuts, full.cuts, strict=True))[1:]:
        assert whole.front_weight_bytes - cut.front_weight_bytes == pytest.approx(2 * saved_bytes)
        assert whole.edge_memory_bytes - cut.edge_memory_bytes == pytest.approx(2 * saved_bytes)
        assert cut.edge_forward_s == pytest.approx(whole.edge_forward_s, rel=0.05)
    # The formula's seconds of a layer, with its overhead, are those of its forward pass.
    assert costs.cuts[1].edge_backward_s == 0.0 < costs.cuts[2].edge_backward_s
    assert costs.edge_only_s < full.edge_only_s


def test_a_frozen_prefix_has_no_backward_pass_no_state_and_no_gradient() -> None:
    trained, frozen = (
        split_costs(model(), cuts(), PI, V100, 32),
        split_costs(model(), cuts(), PI, V100, 32, frozen_layers=3),
    )
    for index, (all_of_it, part) in enumerate(zip(trained.cuts, frozen.cuts, strict=True)):
        assert part.front_trains == (index >= 3)
        assert (part.edge_backward_s == 0.0) == (index < 3)
        assert part.edge_forward_s == all_of_it.edge_forward_s
        assert part.edge_memory_bytes < all_of_it.edge_memory_bytes
        assert part.front_weight_bytes < all_of_it.front_weight_bytes
    assert frozen.gradient_bytes(2) == frozen.header_bytes
    assert frozen.edge_only_s < trained.edge_only_s


def test_the_codec_is_as_slow_as_the_paper_measured_it() -> None:
    """Fig. 11: 26.4 ms for each MB of features on a Raspberry Pi, 4.15 ms on a TX2; the fit is within a fifth."""
    for edge, seconds in ((PI, 0.02636), (TX2, 0.00415)):
        costs = split_costs(model(), cuts(), edge, V100, 32)
        assert costs.codec_s_per_element[8] * 1e6 / 4 == pytest.approx(seconds, rel=0.2)
        assert 32 not in costs.codec_s_per_element
    free = split_costs(model(), cuts(), PI, V100, 32, codec_passes=0.0)
    assert free.codec_s_per_element[8] == 0.0 and CODEC_PASSES > 0


def test_buffers_and_kept_weights_move_too() -> None:
    shapes = []
    for cut in cuts():
        weights_bytes = sum(layer.weight_bytes for layer in model().layers[: cut.num_layers])
        shapes.append(dataclasses.replace(cut, front_state_bytes=weights_bytes + 100.0))
    plain, more = (split_costs(model(), some, PI, V100, 8) for some in (cuts(), shapes))
    for before, after in zip(plain.cuts, more.cuts, strict=True):
        assert after.front_weight_bytes == pytest.approx(before.front_weight_bytes + 100.0)
    assert more.model_weight_bytes == pytest.approx(plain.model_weight_bytes + 100.0)


def test_energy_is_watts_by_seconds() -> None:
    joules = edge_energy_j(PI, compute_s=10.0, network_s=5.0, duration_s=30.0)
    assert joules == pytest.approx(6.4 * 10 + 2.7 * 20 + 0.4 * 5)
    times = Phases(edge_s=1.0, up_s=2.0, cloud_s=0.5, down_s=0.5)
    assert training_energy_j(PI, times, 10, 0) == pytest.approx(6.4 * 10 + 2.7 * 30 + 0.4 * 25)
    pipelined_s = 9 * 2.0 + 4.0
    assert training_energy_j(PI, times, 10, 9) == pytest.approx(
        6.4 * 10 + 2.7 * (pipelined_s - 10) + 0.4 * pipelined_s
    )


@given(
    window=st.integers(0, 8),
    num_batches=st.integers(1, 50),
    edge_s=st.floats(0.01, 5),
    up_s=st.floats(0, 5),
)
def test_a_pipeline_never_needs_more_joules_than_a_sequence(
    window: int, num_batches: int, edge_s: float, up_s: float
) -> None:
    times = Phases(edge_s=edge_s, up_s=up_s, cloud_s=0.1, down_s=0.2)
    piped_j, sequential_j = (training_energy_j(TX2, times, num_batches, k) for k in (window, 0))
    assert piped_j <= sequential_j + 1e-9


def made(**changes: Any) -> SplitCosts:
    given = {"model": model(), "cuts": cuts(), "edge": PI, "cloud": V100, "batch_size": 1}
    return split_costs(**{**given, **changes})


SHAPE = {"name": "a", "num_layers": 1, "feature_elements_per_sample": 1}


@pytest.mark.parametrize(
    ("call", "key", "value"),
    [
        (made, "batch_size", 0),
        (made, "frozen_layers", 6),
        (made, "optimizer_copies", -1.0),
        (made, "codec_passes", math.inf),
        (lambda **changes: CutShape(**SHAPE | changes), "num_layers", 0),
        (lambda **changes: CutShape(**SHAPE | changes), "feature_elements_per_sample", 0),
        (lambda **changes: CutShape(**SHAPE | changes), "front_state_bytes", -1.0),
    ],
)
def test_values_that_cannot_be_are_refused(call: Any, key: str, value: float) -> None:
    refused(lambda: call(**{key: value}), key, f"{value:g}")


def test_cuts_that_do_not_follow_each_other_are_refused() -> None:
    refused(lambda: made(cuts=cuts()[::-1]), "cut conv3", "cut conv4", "5", "4")
    refused(lambda: made(model=model(5), cuts=cuts(6)), "cut conv4", "5 layers")
    refused(lambda: made(cuts=()), "net", "cut")
    refused(lambda: made(edge_processor="npu"), "'npu'")


def edge_of_any_size(draw: random.Random) -> tuple[SplitCosts, float]:
    """Return the costs of a made-up model on an edge, and the edge's bytes for training."""
    layers = tuple(
        LayerProfile(
            name=f"conv{i}",
            forward_flops=10 ** draw.uniform(5, 9),
            output_bytes=4.0 * draw.randint(64, 65536),
            weight_bytes=4.0 * 10 ** draw.uniform(2, 6),
            num_tensors=1,
        )
        for i in range(draw.randint(2, 8))
    )
    shapes = tuple(
        CutShape(
            name=layer.name,
            num_layers=i + 1,
            feature_elements_per_sample=int(layer.output_bytes / 4),
        )
        for i, layer in enumerate(layers[:-1])
    )
    edge = dataclasses.replace(PI, memory_bytes=10 ** draw.uniform(5.5, 9))
    net = ModelProfile(name="net", input_bytes=4.0 * draw.randint(64, 20000), layers=layers)
    reverse = draw.random() < 0.25
    costs = split_costs(net, shapes, edge, V100, draw.choice([4, 16, 32]), reverse=reverse)
    return costs, usable_memory_bytes(edge)


def test_no_plan_exceeds_the_memory_of_1000_edges() -> None:
    """At the beginning, after any move, and for every method; refused only if none of its choices fits."""
    planned = refusals = 0
    for seed in range(1000):
        draw = random.Random(seed)
        costs, budget_bytes = edge_of_any_size(draw)
        link = constant(10 ** draw.uniform(4, 8), 10 ** draw.uniform(4, 8))

        def needed_bytes(plan: SplitPlan, costs: SplitCosts = costs) -> float:
            whole = costs.edge_only_memory_bytes
            return whole if plan.cut is None else costs.cuts[plan.cut].edge_memory_bytes

        try:
            party = adaptive_party(costs, link, num_batches=200, allow_edge_only=seed % 2 == 0)
        except InfeasiblePlan:
            refusals += 1
            assert min(cut.edge_memory_bytes for cut in costs.cuts) > budget_bytes
        else:
            planned += 1
            assert party.decider is not None
            reachable = [party.split_plan, *party.decider.choices(5)]
            assert max(map(needed_bytes, reachable)) <= budget_bytes
        for method in BASELINES:
            with contextlib.suppress(InfeasiblePlan):
                plan = plan_baseline(method, costs, link.rates(0.0), window=4)
                assert needed_bytes(plan) <= budget_bytes
    assert planned > 300 and refusals > 100
