"""Layers of a model, seconds measured on this machine, and estimates of devices that are not at hand."""

import copy
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import count

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from socflower.cluster import device
from socflower.cluster.cost_model import LayerProfile
from socflower.cluster.device_catalog import usable_memory_bytes
from socflower.model_graph.layer_profile import profile_module, profile_operations
from socflower.paper.asteroid.settings import EPOCH_SAMPLES, cluster_of, model_of
from socflower.pipeline.problem import PipelineModel
from socflower.pipeline.profiler.estimates import estimate_seconds, estimated_problem
from socflower.pipeline.profiler.layers import Granularity, read_model
from socflower.pipeline.profiler.measuring import measure_layers
from socflower.workloads.models.classifiers import build_model
from socflower.workloads.models.language_models import gpt_small
from tests.one_line import refused

RESNET8 = (3, 8, 8)
EPOCHS = {  # Table 1: seconds of an epoch
    "efficientnet-b1": (10.0, 672.0, 1602.0),
    "mobilenet-v2": (9.4, 510.0, 1320.0),
    "resnet50": (65.0, 4104.0, 12528.0),
}


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def resnet8() -> nn.Module:
    return build_model("resnet8", in_channels=3, image_size=8, num_classes=10, seed=1)


def ticking() -> Callable[[], float]:
    """Return a clock that is a second later at each reading."""
    ticks = count()
    return lambda: float(next(ticks))


@pytest.mark.parametrize("granularity", Granularity)
def test_layers_add_up_to_the_models_profile_at_any_granularity(granularity: Granularity) -> None:
    module = resnet8()
    read = read_model(module, RESNET8, "resnet8", granularity=granularity)
    profile, layers = profile_module(module, RESNET8, "resnet8"), read.model.layers
    forward = sum(layer.forward_flops for layer in layers)
    backward = sum(layer.backward_flops for layer in layers)
    assert forward == pytest.approx(profile.forward_flops)
    assert forward + backward == pytest.approx(profile.training_flops)
    assert sum(layer.weight_bytes for layer in layers) == profile.weight_bytes
    assert sum(layer.num_tensors for layer in layers) == profile.num_tensors
    assert read.model.kept_bytes(0, len(layers) - 1) == pytest.approx(profile.activation_bytes)
    assert read.model.input_bytes == 4 * 3 * 8 * 8 and layers[-1].crossing_bytes == 40.0
    assert len({layer.name for layer in layers}) == len(layers) == len(read.chain.pieces)


@pytest.mark.few_cells(3)
@pytest.mark.parametrize("granularity", Granularity)
@pytest.mark.parametrize("num_frozen", [0, 1, 5, 9, 16])
def test_layers_keep_the_results_of_the_operations_that_gradients_pass_through(
    granularity: Granularity, num_frozen: int
) -> None:
    """Also a layer of which some operations come before the first trained weight."""
    module = resnet8()
    for weight in [*module.parameters()][:num_frozen]:
        weight.requires_grad_(False)
    read = read_model(module, RESNET8, "resnet8", granularity=granularity)
    costs = profile_operations(module, read.chain.graph, RESNET8)
    for layer, piece in zip(read.model.layers, read.chain.pieces, strict=True):
        own = [costs[operation] for operation in piece.operations]
        assert layer.kept_bytes == sum(cost.output_bytes for cost in own if cost.in_backward)
        flops = [sum(cost.forward_flops for cost in own), sum(cost.backward_flops for cost in own)]
        assert [layer.forward_flops, layer.backward_flops] == pytest.approx(flops)


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


@pytest.mark.parametrize(
    ("call", "named"),
    [
        (lambda: read_model(resnet8().requires_grad_(False), RESNET8, "resnet8"), "requires_grad"),
        (lambda: read_model(nn.Sequential(nn.Linear(4, 2), nn.ReLU()), (4,), "flat"), "flat"),
        (lambda: measure_layers(resnet8(), RESNET8, ()), "batches []"),
        (lambda: measure_layers(resnet8(), RESNET8, (0, 1)), "batches [0, 1]"),
        (lambda: measure_layers(resnet8(), RESNET8, (2, 2)), "batches [2, 2]"),
        (lambda: measure_layers(resnet8(), RESNET8, (1,), repeats=0), "repeats 0"),
    ],
)
def test_what_cannot_be_read_or_measured_is_refused_in_one_line(
    call: Callable[[], object], named: str
) -> None:
    refused(call, *named.split(" ", 1))


@pytest.mark.parametrize("kind", ["resnet8", "gpt"])
def test_measuring_gives_each_layers_seconds_and_leaves_the_model_unchanged(kind: str) -> None:
    module: nn.Module = resnet8()
    example = torch.randn(1, *RESNET8)
    if kind == "gpt":
        module = gpt_small(length=8, vocabulary=16, width=64, num_blocks=1, seed=1)
        example = torch.zeros(1, 8, dtype=torch.int64)
    module.eval()
    state, random_state = copy.deepcopy(module.state_dict()), torch.get_rng_state()
    seconds = measure_layers(module, example, (1, 3), repeats=2, clock=ticking())
    layers = read_model(module, example, kind).model.num_layers
    assert seconds.num_layers == layers and seconds.batches == (1, 3) and not seconds.estimated
    # Two readings of the clock are around each pass.
    assert np.array_equal(seconds.forward_s, np.ones((layers, 2)))
    assert np.array_equal(seconds.backward_s, np.ones((layers, 2)))
    assert not module.training and torch.equal(torch.get_rng_state(), random_state)
    assert all(torch.equal(value, state[key]) for key, value in module.state_dict().items())
    assert all(weight.grad is None for weight in module.parameters())


def test_no_gradient_of_the_input_is_measured() -> None:
    """A frozen first layer has no backward pass at all."""
    module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    module[0].requires_grad_(False)
    seconds = measure_layers(module, (4,), (2,), repeats=1, clock=ticking())
    assert seconds.backward_s.tolist() == [[0.0], [1.0]]


@pytest.mark.parametrize("name", EPOCHS)
def test_calibrated_devices_take_the_epoch_times_of_table_1(name: str) -> None:
    """By construction: these cells are the calibration, and no result is scored with them."""
    model = model_of(name)
    for kind, epoch_s in zip(("gpu-a100", "jetson-tx2", "jetson-nano"), EPOCHS[name], strict=True):
        seconds = estimate_seconds(model, replace(device(kind), layer_overhead_s=0.0))
        whole = (0, model.num_layers - 1, 64)
        step_s = seconds.forward(*whole) + seconds.backward(*whole)
        assert step_s * EPOCH_SAMPLES[name] / 64 == pytest.approx(epoch_s, rel=0.01)
        assert seconds.estimated and seconds.device == kind


@settings(max_examples=40)
@given(
    layers=st.lists(
        st.tuples(st.floats(0, 1e9), st.floats(0, 2), st.floats(0, 1e6), st.integers(0, 9)),
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
    own = tuple(
        LayerProfile(
            name="any",
            forward_flops=forward,
            backward_to_forward=ratio,
            output_bytes=kept,
            crossing_bytes=1.0,
            num_operations=operations,
        )
        for forward, ratio, kept, operations in layers
    )
    flops = sum(forward * (1 + ratio) for forward, ratio, _, _ in layers)
    seconds = estimate_seconds(PipelineModel(name="any", input_bytes=1.0, layers=own), kind)

    def total_s(num_samples: int) -> float:
        whole = (0, len(layers) - 1, num_samples)
        return seconds.forward(*whole) + seconds.backward(*whole)

    fixed_s = kind.layer_overhead_s * sum(operations for *_, operations in layers)
    expected_s = samples * flops / kind.processor("gpu").rate("any") + fixed_s
    assert total_s(samples) == pytest.approx(expected_s, rel=1e-9)
    # A sample of a large batch never takes more.
    assert total_s(samples) <= samples * total_s(1) * (1 + 1e-9)


def test_devices_of_a_kind_share_their_seconds_and_have_the_usable_memory() -> None:
    nano, cluster = (
        device("jetson-nano"),
        cluster_of(("jetson-tx2", "jetson-nano", "jetson-nano"), 100),
    )
    model = read_model(resnet8(), RESNET8, "resnet8").model
    make = partial(estimated_problem, model, cluster, micro_batch_size=8, num_micro_batches=4)
    first, second, third = make().devices
    assert second.seconds is third.seconds is not first.seconds
    assert [each.memory_bytes for each in (first, second)] == [6.5e9, 2.5e9]
    for memory_bytes, usable_bytes in ((4e9, 2.5e9), (3e9, 1.5e9), (1e9, 0.5e9), (1.0, 0.5)):
        assert usable_memory_bytes(replace(nano, memory_bytes=memory_bytes)) == usable_bytes
    refused(lambda: make(socs=()), "boards")
