"""Layers of a model, seconds measured on this machine, and estimates of devices that are not at hand."""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from socflower.cluster import Board, Cluster, device
from socflower.cluster.device_catalog import usable_memory_bytes
from socflower.errors import ConfigError
from socflower.model_graph.layer_profile import profile_module
from socflower.pipeline.problem import PipelineLayer, PipelineModel
from socflower.pipeline.profiler.estimates import estimate_seconds, estimated_problem
from socflower.pipeline.profiler.layers import Granularity, read_model
from socflower.pipeline.profiler.measuring import measure_layers
from socflower.workloads.models import build_model
from socflower.workloads.models.language_models import gpt_small
from tests.seeded import built

RESNET8 = (3, 8, 8)
EPOCHS = {  # Table 1: seconds of an epoch and its samples
    "efficientnet-b1": ((10.0, 672.0, 1602.0), 50_000, 32, 10),
    "mobilenet-v2": ((9.4, 510.0, 1320.0), 50_000, 32, 10),
    "resnet50": ((65.0, 4104.0, 12528.0), 48_000, 224, 100),
}


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def resnet8() -> nn.Module:
    return build_model("resnet8", in_channels=3, image_size=8, num_classes=10, seed=1)


@pytest.mark.parametrize("granularity", Granularity)
def test_layers_add_up_to_the_models_profile_at_any_granularity(granularity: Granularity) -> None:
    module = resnet8()
    read, profile = (
        read_model(module, RESNET8, "resnet8", granularity=granularity),
        profile_module(module, RESNET8, "resnet8"),
    )
    layers = read.model.layers
    assert sum(layer.forward_flops for layer in layers) == pytest.approx(profile.forward_flops)
    assert sum(layer.forward_flops + layer.backward_flops for layer in layers) == pytest.approx(
        profile.training_flops
    )
    assert sum(layer.weight_bytes for layer in layers) == profile.weight_bytes
    assert sum(layer.num_tensors for layer in layers) == profile.num_tensors
    assert read.model.kept_bytes(0, len(layers) - 1) == pytest.approx(profile.activation_bytes)
    assert read.model.input_bytes == 4 * 3 * 8 * 8 and layers[-1].output_bytes == 40.0
    assert len({layer.name for layer in layers}) == len(layers) == len(read.chain.pieces)


def test_coarser_layers_are_fewer_and_blocks_are_crossed_by_one_tensor() -> None:
    reads = [
        read_model(resnet8(), RESNET8, "resnet8", granularity=granularity)
        for granularity in Granularity
    ]
    assert [read.model.num_layers for read in reads] == [31, 10, 5]
    assert all(len(piece.leaving) == 1 for piece in reads[2].chain.pieces[:-1])
    assert any(len(piece.leaving) == 2 for piece in reads[1].chain.pieces)


def test_stages_of_layers_compute_what_the_model_does() -> None:
    module = resnet8().eval()
    read, inputs = read_model(module, RESNET8, "resnet8"), torch.randn(2, 3, 8, 8)
    crossing = read.stage(module, 0, 4)(inputs)
    assert torch.equal(read.stage(module, 5, 9)(*crossing), module(inputs))


def test_frozen_weights_are_counted_apart_and_their_gradients_not_computed() -> None:
    module = resnet8()
    for weight in module[0].parameters():
        weight.requires_grad_(False)
    layers = read_model(module, RESNET8, "resnet8").model.layers
    assert (layers[0].weight_bytes, layers[0].frozen_bytes) == (2 * 16 * 4, 27 * 16 * 4)
    assert layers[0].backward_flops < 2 * layers[0].forward_flops


def test_a_model_without_trained_parameters_is_refused_in_one_line() -> None:
    with pytest.raises(
        ConfigError, match=r"has all of its parameters frozen .* leave at least one"
    ) as caught:
        read_model(resnet8().requires_grad_(False), RESNET8, "resnet8")
    assert "\n" not in str(caught.value)


def test_a_model_that_cannot_be_cut_is_refused_in_one_line() -> None:
    module = built(lambda: nn.Sequential(nn.Linear(4, 2), nn.ReLU(), nn.Softmax(1)), seed=1)
    with pytest.raises(ConfigError, match="model flat: cannot be cut into layers") as caught:
        read_model(module, (4,), "flat")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("kind", ["resnet8", "gpt"])
def test_measuring_gives_each_layers_seconds_and_leaves_the_model_unchanged(kind: str) -> None:
    if kind == "gpt":
        module, example = (
            gpt_small(length=8, vocabulary=16, width=64, num_blocks=1, seed=1),
            torch.zeros(1, 8, dtype=torch.int64),
        )
    else:
        module, example = resnet8(), torch.randn(1, *RESNET8)
    module.eval()
    state = {key: value.clone() for key, value in module.state_dict().items()}
    random_state, ticks = torch.get_rng_state(), iter(range(10**6))
    seconds = measure_layers(module, example, (1, 3), repeats=2, clock=lambda: float(next(ticks)))
    layers = read_model(module, example, kind).model.num_layers
    assert seconds.num_layers == layers and seconds.batches == (1, 3) and not seconds.estimated
    assert np.array_equal(
        seconds.forward_s, np.ones((layers, 2))
    )  # two readings of the clock around each pass
    assert np.array_equal(seconds.backward_s, np.ones((layers, 2)))
    assert not module.training and torch.equal(torch.get_rng_state(), random_state)
    assert all(torch.equal(value, state[key]) for key, value in module.state_dict().items())
    assert all(weight.grad is None for weight in module.parameters())


def test_no_gradient_of_the_input_is_measured() -> None:
    """A frozen first layer has no backward pass at all."""
    module, ticks = (
        torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 2)),
        iter(range(10**6)),
    )
    module[0].requires_grad_(False)
    seconds = measure_layers(module, (4,), (2,), repeats=1, clock=lambda: float(next(ticks)))
    assert seconds.backward_s.tolist() == [[0.0], [1.0]]


def test_batches_that_do_not_rise_are_refused() -> None:
    for batches in ((), (0, 1), (2, 2)):
        with pytest.raises(ConfigError, match="batches must rise from 1 or more"):
            measure_layers(resnet8(), RESNET8, batches)
    with pytest.raises(ConfigError, match="repeats"):
        measure_layers(resnet8(), RESNET8, (1,), repeats=0)


@pytest.mark.parametrize("name", EPOCHS)
def test_calibrated_devices_take_the_epoch_times_of_table_1(name: str) -> None:
    """By construction: these cells are the calibration, and no result is scored with them."""
    epoch_s, num_samples, size, num_classes = EPOCHS[name]
    module = build_model(name, in_channels=3, image_size=size, num_classes=num_classes, seed=1)
    model = read_model(module, (3, size, size), name, granularity=Granularity.BLOCKS).model
    for kind, expected_s in zip(("gpu-a100", "jetson-tx2", "jetson-nano"), epoch_s, strict=True):
        seconds = estimate_seconds(model, replace(device(kind), layer_overhead_s=0.0))
        whole = (0, model.num_layers - 1, 64)
        step_s = seconds.forward(*whole) + seconds.backward(*whole)
        assert step_s * num_samples / 64 == pytest.approx(expected_s, rel=0.01)
        assert seconds.estimated and seconds.device == kind


@settings(max_examples=40)
@given(
    layers=st.lists(
        st.tuples(st.floats(0, 1e9), st.floats(0, 2e9), st.floats(0, 1e6), st.integers(0, 9)),
        min_size=2,
        max_size=6,
    ),
    samples=st.integers(1, 40),
)
def test_estimates_add_up_to_the_devices_rate_and_a_fixed_cost(
    layers: list[tuple[float, float, float, int]],
    samples: int,
) -> None:
    kind = device("jetson-tx2")
    model = PipelineModel(
        name="any",
        input_bytes=1.0,
        layers=tuple(
            PipelineLayer(
                name=str(number),
                forward_flops=forward,
                backward_flops=backward,
                weight_bytes=0.0,
                activation_bytes=kept,
                output_bytes=1.0,
                num_operations=operations,
            )
            for number, (forward, backward, kept, operations) in enumerate(layers)
        ),
    )
    flops = sum(forward + backward for forward, backward, _, _ in layers)
    seconds, last = estimate_seconds(model, kind), model.num_layers - 1
    total_s = seconds.forward(0, last, samples) + seconds.backward(0, last, samples)
    fixed_s = kind.layer_overhead_s * sum(operations for *_, operations in layers)
    assert total_s == pytest.approx(
        samples * flops / kind.processor("gpu").rate("any") + fixed_s, rel=1e-9
    )
    one_s = seconds.forward(0, last, 1) + seconds.backward(0, last, 1)
    assert total_s <= samples * one_s * (1 + 1e-9)  # a sample of a large batch never takes more


def test_devices_of_a_kind_share_their_seconds_and_have_the_usable_memory() -> None:
    nano, tx2 = device("jetson-nano"), device("jetson-tx2")
    boards = tuple(
        Board(num_slots=1, device=kind, soc_bytes_per_s=12.5e6, uplink_bytes_per_s=12.5e6)
        for kind in (tx2, nano, nano)
    )
    cluster = Cluster(name="d", boards=boards, hub_bytes_per_s=12.5e6, message_s=0.0)
    model = read_model(resnet8(), RESNET8, "resnet8").model
    problem = estimated_problem(model, cluster, micro_batch_size=8, num_micro_batches=4)
    assert (
        problem.devices[1].seconds is problem.devices[2].seconds is not problem.devices[0].seconds
    )
    assert [each.memory_bytes for each in problem.devices] == [6.5e9, 2.5e9, 2.5e9]
    assert [
        usable_memory_bytes(replace(nano, memory_bytes=each)) for each in (4e9, 3e9, 1e9, 32e6, 1.0)
    ] == [2.5e9, 1.5e9, 0.5e9, 16e6, 0.5]
    with pytest.raises(ConfigError, match="name at least one"):
        estimated_problem(model, cluster, micro_batch_size=8, num_micro_batches=4, socs=())
