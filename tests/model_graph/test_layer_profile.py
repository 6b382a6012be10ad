import math
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional
from torch.utils.flop_counter import FlopCounterMode

from socflower.model_graph.layer_profile import profile_module
from socflower.model_graph.random_state import forked_generator
from socflower.workloads.models.classifiers import build_model
from tests.one_line import refused


def build(name: str, in_channels: int = 3, image_size: int = 32) -> nn.Module:
    return build_model(name, in_channels=in_channels, image_size=image_size, num_classes=10, seed=1)


# ------------------------------------------------------------------------------------ against hand formulas


@settings(max_examples=30)
@given(
    groups=st.integers(1, 4),
    in_per_group=st.integers(1, 4),
    out_per_group=st.integers(1, 4),
    kernel=st.tuples(st.integers(1, 4), st.integers(1, 4)),
    stride=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    padding=st.tuples(st.integers(0, 2), st.integers(0, 2)),
    size=st.tuples(st.integers(4, 9), st.integers(4, 9)),
    bias=st.booleans(),
    batch_size=st.integers(1, 3),
)
def test_convolution_costs_two_operations_per_weight_and_output_pixel(
    groups: int,
    in_per_group: int,
    out_per_group: int,
    kernel: tuple[int, int],
    stride: tuple[int, int],
    padding: tuple[int, int],
    size: tuple[int, int],
    bias: bool,
    batch_size: int,
) -> None:
    in_channels, out_channels = groups * in_per_group, groups * out_per_group
    convolution = nn.Conv2d(
        in_channels, out_channels, kernel, stride=stride, padding=padding, groups=groups, bias=bias
    )
    (layer,) = profile_module(
        convolution, torch.empty(batch_size, in_channels, *size), "conv"
    ).layers
    out_pixels = math.prod((size[d] + 2 * padding[d] - kernel[d]) // stride[d] + 1 for d in (0, 1))
    num_weights = out_channels * in_per_group * math.prod(kernel)
    assert layer.forward_flops == 2 * num_weights * out_pixels
    assert layer.output_bytes == 4 * out_channels * out_pixels
    assert layer.weight_bytes == 4 * (num_weights + bias * out_channels)
    assert layer.num_tensors == 1 + bias
    assert (layer.name, layer.kind) == ("Conv2d", "Conv2d")


@settings(max_examples=30)
@given(
    features=st.tuples(st.integers(1, 50), st.integers(1, 50)),
    batch_size=st.integers(1, 5),
    bias=st.booleans(),
)
def test_linear_costs_two_operations_per_weight(
    features: tuple[int, int], batch_size: int, bias: bool
) -> None:
    profile = profile_module(
        nn.Linear(*features, bias=bias), torch.empty(batch_size, features[0]), "linear"
    )
    (layer,) = profile.layers
    assert layer.forward_flops == 2 * features[0] * features[1]
    assert layer.output_bytes == 4 * features[1]
    assert profile.input_bytes == 4 * features[0]


@pytest.mark.parametrize("name", ["lenet5", "mobilenet-v1"])
def test_layers_add_up_to_the_model(name: str) -> None:
    model = build(name, in_channels=1, image_size=28)
    profile = profile_module(model, (1, 28, 28), name)
    # The batch size of an example does not matter.
    assert profile == profile_module(model, torch.empty(5, 1, 28, 28), name)
    weights = list(model.parameters())
    assert profile.name == name
    assert profile.weight_bytes == 4 * sum(weight.numel() for weight in weights)
    assert profile.num_tensors == len(weights)
    assert len({layer.name for layer in profile.layers}) == len(profile.layers)
    for layer in profile.layers:
        assert layer.kind == type(model.get_submodule(layer.name)).__name__
        assert layer.output_bytes > 0
        assert (layer.forward_flops > 0) == (layer.kind in {"Conv2d", "Linear"})


def test_layers_come_in_the_order_in_which_they_run() -> None:
    class Backwards(nn.Sequential):
        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            output: torch.Tensor = self[0](self[1](inputs))
            return output

    layers = profile_module(Backwards(nn.Linear(4, 2), nn.Linear(3, 4)), (3,), "backwards").layers
    assert [layer.name for layer in layers] == ["1", "0"]


# -------------------------------------------------------------------------- weights in unusual places


def test_a_module_that_runs_twice_counts_twice_but_weighs_once() -> None:
    shared = nn.Linear(8, 8)
    (layer,) = profile_module(nn.Sequential(shared, shared), (8,), "twice").layers
    assert layer.forward_flops == 2 * (2 * 64)
    assert layer.output_bytes == 2 * (4 * 8)
    assert (layer.weight_bytes, layer.num_tensors) == (4 * 72, 2)


def test_tied_weights_weigh_once() -> None:
    model = nn.Sequential(nn.Linear(8, 8, bias=False), nn.ReLU(), nn.Linear(8, 8, bias=False))
    model[2].weight = model[0].weight
    profile = profile_module(model, (8,), "tied")
    assert [layer.num_tensors for layer in profile.layers] == [1, 0, 0]
    assert profile.weight_bytes == 4 * 64 and profile.forward_flops == 2 * 2 * 64


def test_weights_and_products_outside_leaves_get_a_layer_of_their_own() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mixing = nn.Parameter(torch.zeros(6, 6))
            self.inner = nn.Linear(6, 5)

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            output: torch.Tensor = self.inner(inputs @ self.mixing)
            return output

    outer, inner = profile_module(nn.Sequential(Scaled()), (6,), "scaled").layers
    assert (outer.name, outer.kind, inner.name) == ("0", "Scaled", "0.inner")
    assert (outer.forward_flops, outer.weight_bytes, outer.num_tensors) == (2 * 36, 4 * 36, 1)
    assert outer.output_bytes == 4 * 6
    assert inner.forward_flops == 2 * 30


def test_weights_that_never_run_are_still_exchanged() -> None:
    """Attention uses the weights of its projection, and does not call it."""
    attention = SelfAttention(8, 2)
    profile = profile_module(attention, (4, 8), "attention")
    assert profile.weight_bytes == 4 * sum(weight.numel() for weight in attention.parameters())
    assert profile.num_tensors == 4
    assert profile.layers[-1].name == "attention.out_proj" and profile.layers[-1].forward_flops == 0


def test_frozen_weights_are_not_exchanged_and_identities_are_no_layers() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Identity(), nn.Linear(4, 2), nn.Sequential())
    model[0].requires_grad_(False)
    profile = profile_module(model, (4,), "frozen")
    assert [(layer.name, layer.num_tensors) for layer in profile.layers] == [("0", 0), ("2", 2)]
    assert profile.layers[0].forward_flops == 2 * 16


# ---------------------------------------------------------- attention, recurrence, functions and containers


class SelfAttention(nn.Module):
    def __init__(self, width: int, heads: int, *, bias: bool = True) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(width, heads, batch_first=True, bias=bias)

    def forward(self, inputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        outputs: tuple[torch.Tensor, torch.Tensor] = self.attention(inputs, inputs, inputs)
        return outputs


@given(
    heads=st.integers(1, 4),
    head_width=st.integers(1, 5),
    length=st.integers(1, 7),
    batch=st.integers(1, 3),
)
def test_attention_multiplies_projections_and_scores_and_keeps_both(
    heads: int,
    head_width: int,
    length: int,
    batch: int,
) -> None:
    """Four projections of n tokens, and two products of n x n scores for each head."""
    width = heads * head_width
    model = SelfAttention(width, heads)
    attention = profile_module(model, torch.empty(batch, length, width), "attention").layers[0]
    assert attention.kind == "MultiheadAttention"
    assert attention.forward_flops == 4 * 2 * length * width**2 + 2 * 2 * length**2 * width
    # Projections of queries, keys and values, the weighted values and the output; scores and their softmax. Besides,
    # torch copies tokens into other orders, adds the bias anew, and takes the mean of the scores over the heads.
    least, most = (
        num * length * width + scores * heads * length**2 for num, scores in ((5, 2), (14, 3))
    )
    assert 4 * least <= attention.output_bytes <= 4 * most


@pytest.mark.parametrize(
    ("model", "shape"),
    [
        (SelfAttention(8, 2), (5, 8)),
        (nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 4, 16, batch_first=True), 2), (5, 8)),
        (nn.GRU(8, 7, batch_first=True), (5, 8)),
        (build("resnet8"), (3, 32, 32)),
    ],
    ids=lambda value: type(value).__name__,
)
def test_flops_are_those_that_torch_counts_while_the_model_trains(
    model: nn.Module, shape: tuple[int, ...]
) -> None:
    """Also where evaluation takes a fused path, such as a transformer's, whose operations nobody counts."""
    profile = profile_module(model.eval(), shape, "model")
    model.train()
    with FlopCounterMode(display=False) as counter, forked_generator(0):
        model(torch.zeros(2, *shape))
    assert profile.forward_flops == counter.get_total_flops() / 2
    assert all(layer.output_bytes > 0 for layer in profile.layers if layer.forward_flops)


class Packed(nn.Module):
    """Returns what was packed, in a container of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.recurrent = nn.LSTM(8, 7, batch_first=True)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        lengths = [inputs.shape[1]] * inputs.shape[0]
        packed = nn.utils.rnn.pack_padded_sequence(inputs, lengths, batch_first=True)
        states, _ = self.recurrent(packed)
        output: torch.Tensor = nn.utils.rnn.pad_packed_sequence(states, batch_first=True)[0]
        return output


def test_recurrent_layers_return_states_with_their_sequence_packed_or_not() -> None:
    (plain,) = profile_module(nn.LSTM(8, 7, batch_first=True), (5, 8), "lstm").layers
    assert plain.forward_flops == 5 * 2 * 4 * 7 * (8 + 7)
    assert plain.output_bytes == 4 * (5 * 7 + 7 + 7)
    (packed,) = profile_module(Packed(), (5, 8), "packed").layers
    assert packed.forward_flops == plain.forward_flops and packed.output_bytes > plain.output_bytes


@dataclass
class Result:
    logits: torch.Tensor
    hidden: dict[str, list[torch.Tensor]]


class Returning(nn.Module):
    """A leaf with weights of its own, which returns the same three tensors in one container or another."""

    def __init__(self, container: str) -> None:
        super().__init__()
        self.container, self.weight = container, nn.Parameter(torch.zeros(8, 4))

    def forward(self, inputs: torch.Tensor) -> Any:
        product = inputs @ self.weight
        active, more = functional.relu(product), product + 1
        return {
            "tuple": (product, active, more),
            "dict": {"a": product, "b": [active, (more,)], "c": product},
            "object": Result(product, {"all": [active, more]}),
            "order": OrderedDict(a=active, b=product, c=more),
            "one": more,
        }[self.container]


@pytest.mark.parametrize("container", ["tuple", "dict", "object", "order", "one"])
def test_whatever_a_module_returns_its_tensors_count_once(container: str) -> None:
    (layer,) = profile_module(Returning(container), (8,), "returning").layers
    assert layer.output_bytes == 3 * 4 * 4 and layer.forward_flops == 2 * 8 * 4


def test_what_functions_make_counts_with_the_layer_before_them() -> None:
    class Functional(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Conv2d(1, 4, 3, padding=1), nn.Linear(4 * 16, 3)

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            hidden = functional.max_pool2d(functional.relu(self.first(inputs * 2)), 2)
            # A view, and in place.
            output: torch.Tensor = self.last(torch.flatten(hidden, 1).add_(1.0))
            return output

    first, last = profile_module(Functional(), (1, 8, 8), "functional").layers
    # What is made before the first layer is counted with it; 2x2 pooling leaves a quarter.
    assert first.output_bytes == 4 * (64 + 4 * 64 + 4 * 64 + 4 * 16) and last.output_bytes == 4 * 3
    modules = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2))
    assert profile_module(modules, (1, 8, 8), "modules").activation_bytes == 4 * (
        64 + 4 * 64 + 4 * 64 + 4 * 16
    )


# ------------------------------------------------------------------------------------- leaving no trace


def test_the_module_its_mode_its_buffers_and_the_random_state_stay() -> None:
    class Noisy(nn.Sequential):
        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            output: torch.Tensor = super().forward(inputs + torch.randn(inputs.shape))
            return output

    model = Noisy(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Dropout(0.5), nn.Flatten()).train()
    model[1].eval()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    random_state = torch.get_rng_state()
    profile_module(model, (3, 8, 8), "noisy")
    assert torch.equal(torch.get_rng_state(), random_state)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert [module.training for module in model.modules()] == [True, True, False, True, True]
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_nothing_is_computed() -> None:
    """Two thousand billion operations would be noticed, and so would a copy of the weights' values."""
    with torch.device("meta"):
        model = nn.Sequential(nn.Conv2d(3, 4096, 3, padding=1), nn.Conv2d(4096, 4096, 3, padding=1))
    assert profile_module(model, (3, 80, 80), "huge").forward_flops > 1.9e12


# ----------------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("model", "example", "named"),
    [
        (build("resnet8"), (1, 32, 32), "(1, 1, 32, 32)"),
        (nn.Linear(3, 3), torch.tensor(1.0), "batch dimension"),
        (nn.Linear(3, 3), torch.empty(0, 3), "batch dimension"),
        (nn.Sequential(), (3,), "no layers"),
    ],
)
def test_what_cannot_be_profiled_is_refused(model: nn.Module, example: Any, named: str) -> None:
    refused(lambda: profile_module(model, example, "mine"), "mine", named)
    assert not any(module._forward_hooks for module in model.modules())
