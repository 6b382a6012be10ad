"""The one cost model: proportional to work, dearer per sample in small batches, nothing for nothing."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from socflower.cluster import (
    FP32,
    Board,
    Cluster,
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
from socflower.errors import ConfigError

MODEL = ModelProfile(
    name="m",
    input_bytes=100.0,
    layers=(
        LayerProfile(
            name="a",
            kind="Conv2d",
            forward_flops=2e6,
            output_bytes=400.0,
            weight_bytes=40.0,
            num_tensors=2,
        ),
        LayerProfile(
            name="b",
            kind="Linear",
            forward_flops=1e6,
            output_bytes=40.0,
            weight_bytes=60.0,
            num_tensors=1,
        ),
    ),
)


def machine(**changes: object) -> Device:
    values: dict[str, object] = {
        "name": "d",
        "idle_w": 1.0,
        "network_w": 0.5,
        "memory_bytes": 1e9,
        "memory_bytes_per_s": 500.0,
        "layer_overhead_s": 0.01,
        "processors": {
            "cpu": Processor(
                name="cpu", flops_per_s=9e6, active_w=5.0, flops_per_s_by_model={"n": 18e6}
            )
        },
    }
    return Device(**(values | changes))


def test_a_step_by_hand() -> None:
    """10 samples x 9 MFLOP / 9 MFLOP/s + 2 layers x 10 ms; update: 5 passes over 100 bytes at 500 bytes/s."""
    cost = step_cost(MODEL, machine(), 10)
    assert cost.compute_s == pytest.approx(10.02)
    assert cost.backward_s == pytest.approx(2 * cost.forward_s)
    assert cost.update_s == pytest.approx(1.0)
    assert cost.processor == "cpu"


@given(st.integers(1, 500))
def test_small_batches_are_less_efficient(batch: int) -> None:
    one, two = (
        step_cost(MODEL, machine(), batch).compute_s,
        step_cost(MODEL, machine(), 2 * batch).compute_s,
    )
    assert one < two < 2 * one


def test_no_samples_cost_no_computing_but_the_update() -> None:
    cost = step_cost(MODEL, machine(), 0)
    assert cost.compute_s == 0.0
    assert cost.update_s > 0.0


def test_a_measured_rate_wins_over_the_general_one() -> None:
    named = ModelProfile(name="n", input_bytes=100.0, layers=MODEL.layers)
    assert step_cost(named, machine(layer_overhead_s=0.0), 10).compute_s == pytest.approx(5.0)


def test_sums_of_a_profile() -> None:
    assert (MODEL.forward_flops, MODEL.training_flops) == (3e6, 9e6)
    assert (MODEL.weight_bytes, MODEL.num_tensors, MODEL.activation_bytes) == (100.0, 3, 540.0)
    assert MODEL.training_memory_bytes(10) == 100.0 * 3 + 5400.0


FROZEN = ModelProfile(
    name="m",
    input_bytes=100.0,
    layers=(
        LayerProfile(
            name="base",
            kind="Linear",
            forward_flops=2e6,
            output_bytes=400.0,
            weight_bytes=0.0,
            num_tensors=0,
            frozen_bytes=1000.0,
            backward_to_forward=0.0,
            in_backward=False,
        ),
        LayerProfile(
            name="head",
            kind="Linear",
            forward_flops=1e6,
            output_bytes=40.0,
            weight_bytes=60.0,
            num_tensors=1,
            backward_to_forward=1.0,
        ),
    ),
)


def test_frozen_weights_take_memory_but_neither_gradients_nor_updates_nor_a_backward_pass() -> None:
    assert (FROZEN.weight_bytes, FROZEN.frozen_bytes, FROZEN.parameter_bytes) == (
        60.0,
        1000.0,
        1060.0,
    )
    assert (FROZEN.forward_flops, FROZEN.training_flops) == (3e6, 4e6)
    assert (
        FROZEN.activation_bytes == 100.0 + 40.0 + 400.0
    )  # input, what is kept, and what is there while it is made
    assert FROZEN.training_memory_bytes(10, optimizer_copies=2.0) == 1000.0 + 60.0 * 4 + 5400.0
    cost = step_cost(FROZEN, machine(layer_overhead_s=0.0), 9)
    assert (cost.forward_s, cost.backward_s) == pytest.approx(
        (3.0, 1.0)
    )  # of 4 MFLOP a sample at 9 MFLOP/s
    assert cost.update_s == pytest.approx(5 * 60 / 500)
    measured = with_npu(cpu=StepTimings(batches=(1, 9), step_s=(1.0, 9.0)))  # of 9 MFLOP a sample
    assert step_cost(FROZEN, measured, 9).compute_s == pytest.approx(4.0)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"processors": {}}, "has no processor"),
        ({"memory_bytes": 0.0}, "memory_bytes = 0.0 must be above 0"),
        ({"idle_w": -1.0}, "idle_w = -1.0 must be 0 or more"),
    ],
)
def test_impossible_devices_are_refused(changes: dict[str, object], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        machine(**changes)


def test_impossible_processors_and_models_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"flops_per_s = 0.0 must be above 0"):
        Processor(name="cpu", flops_per_s=0.0, active_w=1.0)
    with pytest.raises(ConfigError, match="no processor 'npu'; it has cpu"):
        machine().processor("npu")
    with pytest.raises(ConfigError, match="no layers"):
        ModelProfile(name="empty", layers=(), input_bytes=1.0)


def with_npu(**timings: StepTimings) -> Device:
    """Return a device of a CPU of 9 MFLOP/s, 18 on model n, and an NPU of 36, with timings of model m."""
    processors = {
        "cpu": Processor(
            name="cpu", flops_per_s=9e6, active_w=5.0, flops_per_s_by_model={"n": 18e6}
        ),
        "npu": Processor(name="npu", flops_per_s=36e6, active_w=3.0, number_format="int8"),
    }
    return machine(
        processors={
            name: dataclasses.replace(
                processor, timings={"m": timings[name]} if name in timings else {}
            )
            for name, processor in processors.items()
        }
    )


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
    assert [npu.rate("m", with_npu()), npu.rate("m", machine()), FP32.rate("m", with_npu())] == [
        36e6,
        9e6,
        9e6,
    ]
    assert [npu.rate("n", with_npu()), FP32.rate("n", with_npu())] == [36e6, 18e6]
    assert [npu.on(with_npu()), npu.on(machine()), FP32.on(with_npu())] == ["npu", "cpu", "cpu"]
    with pytest.raises(ConfigError, match="no processor 'npu'; it has cpu"):
        step_cost(MODEL, machine(), 1, "npu")


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
    other = dataclasses.replace(MODEL, name="n")
    assert step_cost(other, timed, count, "npu") == step_cost(other, with_npu(), count, "npu")


def test_capacities_go_by_the_pricing_in_the_order_of_the_socs() -> None:
    boards = tuple(
        Board(num_slots=slots, device=soc, soc_bytes_per_s=1e8, uplink_bytes_per_s=1e8)
        for slots, soc in ((2, machine()), (1, with_npu()))
    )
    cluster = Cluster(name="c", boards=boards, hub_bytes_per_s=1e8, message_s=0.0)
    assert sustained_rates(cluster, "m") == (9e6, 9e6, 9e6)
    assert sustained_rates(cluster, "m", OneProcessor(processor="npu")) == (9e6, 9e6, 36e6)
    assert sustained_rates(cluster, "n", OneProcessor(processor="npu")) == (18e6, 18e6, 36e6)
