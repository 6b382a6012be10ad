"""The one cost model: proportional to work, dearer per sample in small batches, nothing for nothing."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from socflower.cluster import Device, LayerProfile, ModelProfile, Processor, step_cost
from socflower.errors import ConfigError

MODEL = ModelProfile(name="m", input_bytes=100.0, layers=(
    LayerProfile(name="a", kind="Conv2d", forward_flops=2e6, output_bytes=400.0, weight_bytes=40.0, num_tensors=2),
    LayerProfile(name="b", kind="Linear", forward_flops=1e6, output_bytes=40.0, weight_bytes=60.0, num_tensors=1),
))


def machine(**changes: object) -> Device:
    values: dict[str, object] = {
        "name": "d", "idle_w": 1.0, "network_w": 0.5, "memory_bytes": 1e9, "memory_bytes_per_s": 500.0,
        "layer_overhead_s": 0.01,
        "processors": {"cpu": Processor(name="cpu", flops_per_s=9e6, active_w=5.0, flops_per_s_by_model={"n": 18e6})},
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
    one, two = step_cost(MODEL, machine(), batch).compute_s, step_cost(MODEL, machine(), 2 * batch).compute_s
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


@pytest.mark.parametrize(("changes", "says"), [
    ({"processors": {}}, "has no processor"), ({"memory_bytes": 0.0}, "memory_bytes must be above 0, got 0"),
    ({"idle_w": -1.0}, "idle_w must not be negative, got -1"),
])
def test_impossible_devices_are_refused(changes: dict[str, object], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        machine(**changes)


def test_impossible_processors_and_models_are_refused() -> None:
    with pytest.raises(ConfigError, match="flops_per_s must be above 0, got 0"):
        Processor(name="cpu", flops_per_s=0.0, active_w=1.0)
    with pytest.raises(ConfigError, match="no processor 'npu'; it has cpu"):
        machine().processor("npu")
    with pytest.raises(ConfigError, match="no layers"):
        ModelProfile(name="empty", layers=(), input_bytes=1.0)
