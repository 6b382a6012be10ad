"""The one cost model: proportional to work, dearer per sample in small batches, nothing for nothing."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from socflower.cluster import (
    FP32,
    Device,
    LayerProfile,
    ModelProfile,
    OneProcessor,
    Processor,
    ProcessorCost,
    StepCost,
    StepTimings,
    step_cost,
    sustained_rates,
)
from tests.one_line import refused
from tests.toy_clusters import TOY, toy_cluster


def layer(name: str, flops: float, out: float, weights: float, **options: Any) -> LayerProfile:
    options = {"kind": "Linear", "num_tensors": 1} | options
    return LayerProfile(
        name=name, forward_flops=flops, output_bytes=out, weight_bytes=weights, **options
    )


MODEL = ModelProfile(
    name="m",
    input_bytes=100.0,
    layers=(layer("a", 2e6, 400.0, 40.0, num_tensors=2), layer("b", 1e6, 40.0, 60.0)),
)
FROZEN = replace(
    MODEL,
    layers=(
        layer(
            "base",
            2e6,
            400.0,
            0.0,
            num_tensors=0,
            frozen_bytes=1000.0,
            backward_to_forward=0.0,
            in_backward=False,
        ),
        layer("head", 1e6, 40.0, 60.0, backward_to_forward=1.0),
    ),
)


def machine(**changes: object) -> Device:
    cpu = Processor(name="cpu", flops_per_s=9e6, active_w=5.0, flops_per_s_by_model={"n": 18e6})
    values = {"memory_bytes_per_s": 500.0, "layer_overhead_s": 0.01, "processors": {"cpu": cpu}}
    return replace(TOY, **values | changes)


def test_a_step_by_hand() -> None:
    """10 samples x 9 MFLOP / 9 MFLOP/s + 2 layers x 10 ms; update: 5 passes over 100 bytes at 500 bytes/s."""
    cost = step_cost(MODEL, machine(), 10)
    assert cost.compute_s == pytest.approx(10.02)
    assert cost.backward_s == pytest.approx(2 * cost.forward_s)
    assert cost.update_s == pytest.approx(1.0)
    assert cost.processor == "cpu"


@given(st.integers(1, 500))
def test_small_batches_are_less_efficient(batch: int) -> None:
    one, two = (step_cost(MODEL, machine(), count).compute_s for count in (batch, 2 * batch))
    assert one < two < 2 * one


def test_no_samples_cost_no_computing_but_the_update() -> None:
    cost = step_cost(MODEL, machine(), 0)
    assert cost.compute_s == 0.0
    assert cost.update_s > 0.0


def test_a_measured_rate_wins_over_the_general_one() -> None:
    named = replace(MODEL, name="n")
    assert step_cost(named, machine(layer_overhead_s=0.0), 10).compute_s == pytest.approx(5.0)


def test_sums_of_a_profile() -> None:
    assert (MODEL.forward_flops, MODEL.training_flops) == (3e6, 9e6)
    assert (MODEL.weight_bytes, MODEL.num_tensors, MODEL.activation_bytes) == (100.0, 3, 540.0)
    assert MODEL.training_memory_bytes(10) == 100.0 * 3 + 5400.0


def test_frozen_weights_take_memory_but_neither_gradients_nor_updates_nor_a_backward_pass() -> None:
    assert (FROZEN.weight_bytes, FROZEN.parameter_bytes) == (60.0, 1060.0)
    assert (FROZEN.forward_flops, FROZEN.training_flops) == (3e6, 4e6)
    # The input, what is kept, and what is there while it is made.
    assert FROZEN.activation_bytes == 100.0 + 40.0 + 400.0
    assert FROZEN.training_memory_bytes(10, optimizer_copies=2.0) == 1000.0 + 60.0 * 4 + 5400.0
    cost = step_cost(FROZEN, machine(layer_overhead_s=0.0), 9)
    # Of 4 MFLOP a sample at 9 MFLOP/s.
    assert (cost.forward_s, cost.backward_s) == pytest.approx((3.0, 1.0))
    assert cost.update_s == pytest.approx(5 * 60 / 500)
    # Of 9 MFLOP a sample.
    measured = with_npu(cpu=StepTimings(batches=(1, 9), step_s=(1.0, 9.0)))
    assert step_cost(FROZEN, measured, 9).compute_s == pytest.approx(4.0)


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (lambda: machine(processors={}), "processor"),
        (lambda: machine(memory_bytes=0.0), "memory_bytes = 0.0"),
        (lambda: machine(idle_w=-1.0), "idle_w = -1.0"),
        (lambda: Processor(name="cpu", flops_per_s=0.0, active_w=1.0), "flops_per_s = 0.0"),
        (lambda: machine().processor("npu"), "'npu'"),
        (lambda: step_cost(MODEL, machine(), 1, "npu"), "'npu'"),
        (lambda: ModelProfile(name="empty", layers=(), input_bytes=1.0), "layers"),
    ],
)
def test_what_cannot_be_is_refused(make: Callable[[], object], named: str) -> None:
    refused(make, named)


def with_npu(**timings: StepTimings) -> Device:
    """Return a device of a CPU of 9 MFLOP/s, 18 on model n, and an NPU of 36, with timings of model m."""
    npu = Processor(name="npu", flops_per_s=36e6, active_w=3.0, number_format="int8")
    processors = {"cpu": machine().processor("cpu"), "npu": npu}
    for name, measured in timings.items():
        processors[name] = replace(processors[name], timings={"m": measured})
    return machine(processors=processors)


def parts(*seconds: float) -> tuple[ProcessorCost, ...]:
    return tuple(
        ProcessorCost(processor=f"p{index}", forward_s=part, backward_s=2 * part)
        for index, part in enumerate(seconds)
    )


@given(st.lists(st.sampled_from([0.0, 0.5, 2.0]), min_size=1, max_size=4))
def test_the_processors_of_a_step_are_those_with_work_in_order_and_the_first_if_none_has(
    seconds: list[float],
) -> None:
    own, *beside = parts(*seconds)
    cost = StepCost(
        forward_s=own.forward_s,
        backward_s=own.backward_s,
        update_s=1.0,
        processor=own.processor,
        concurrent=tuple(beside),
    )
    assert cost.processors == (tuple(part for part in (own, *beside) if part.compute_s) or (own,))
    assert sum(part.compute_s for part in cost.processors) == pytest.approx(3 * sum(seconds))
    assert cost.compute_s == own.compute_s


def test_a_step_on_one_processor_has_that_one() -> None:
    assert [part.processor for part in step_cost(MODEL, with_npu(), 10, "npu").processors] == [
        "npu"
    ]
    assert [part.processor for part in step_cost(MODEL, with_npu(), 0).processors] == ["cpu"]
    assert step_cost(MODEL, with_npu(), 10).merge_s == 0.0


@given(st.integers(0, 500))
def test_one_processor_costs_what_it_costs_where_a_device_has_it_and_what_the_default_one_does_elsewhere(
    count: int,
) -> None:
    npu = OneProcessor(processor="npu")
    assert npu.step_cost(MODEL, with_npu(), count) == step_cost(MODEL, with_npu(), count, "npu")
    assert npu.step_cost(MODEL, machine(), count) == step_cost(MODEL, machine(), count)
    assert FP32.step_cost(MODEL, with_npu(), count) == step_cost(MODEL, with_npu(), count)


def test_a_rate_is_that_of_the_processor_on_the_model() -> None:
    npu = OneProcessor(processor="npu")
    for pricing, device, processor, of_m, of_n in (
        (npu, with_npu(), "npu", 36e6, 36e6),
        (npu, machine(), "cpu", 9e6, 18e6),
        (FP32, with_npu(), "cpu", 9e6, 18e6),
    ):
        assert pricing.on(device) == processor
        assert (pricing.rate("m", device), pricing.rate("n", device)) == (of_m, of_n)


@given(st.integers(0, 300), st.floats(1e-3, 1e3))
def test_timings_win_over_rates_and_overheads_of_that_processor_and_model_alone(
    count: int, second_s: float
) -> None:
    """Twice the samples were measured to take 1.5 times as long, which no rate and overhead here gives."""
    measured = StepTimings(batches=(8, 16), step_s=(second_s, 1.5 * second_s))
    timed = with_npu(npu=measured)
    cost = step_cost(MODEL, timed, count, "npu")
    assert cost.compute_s == pytest.approx(measured.seconds(count))
    assert cost.backward_s == pytest.approx(2 * cost.forward_s)
    assert cost.update_s == step_cost(MODEL, with_npu(), count, "npu").update_s
    assert step_cost(MODEL, timed, count) == step_cost(MODEL, with_npu(), count)
    other = replace(MODEL, name="n")
    assert step_cost(other, timed, count, "npu") == step_cost(other, with_npu(), count, "npu")


def test_capacities_go_by_the_pricing_in_the_order_of_the_socs() -> None:
    cluster = toy_cluster((2, 1))
    first, second = cluster.boards
    boards = (replace(first, device=machine()), replace(second, device=with_npu()))
    cluster = replace(cluster, boards=boards)
    assert sustained_rates(cluster, "m") == (9e6, 9e6, 9e6)
    assert sustained_rates(cluster, "m", OneProcessor(processor="npu")) == (9e6, 9e6, 36e6)
    assert sustained_rates(cluster, "n", OneProcessor(processor="npu")) == (18e6, 18e6, 36e6)
