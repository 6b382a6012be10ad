"""From torch modules to graphs: what is understood, and errors that name module and operator."""

import numpy as np
import pytest
import torch
from torch import nn

from socflower import _int8
from socflower.errors import ConfigError
from socflower.precision import Int8Model
from socflower.precision.int8 import network as ir
from socflower.precision.int8.from_torch import (
    MAX_EXACT_DEPTH,
    UnsupportedOperator,
    capture_network,
)
from socflower.workloads.models import build_model, model_names
from tests.precision.networks import CLASSES, IMAGE, NETWORKS, Residual, batches, build

WITHOUT_INT8 = ("mobilenet-v2", "efficientnet-b1")


@pytest.mark.parametrize("name", WITHOUT_INT8)
def test_models_with_other_activations_are_refused(name):
    module = build_model(name, in_channels=3, image_size=32, num_classes=10, seed=1)
    with pytest.raises(UnsupportedOperator, match=r"int8 training has no (ReLU6|SiLU)"):
        Int8Model.from_module(module, input_shape=(3, 32, 32))


@pytest.mark.parametrize("name", [name for name in model_names() if name not in WITHOUT_INT8])
def test_every_other_model_of_the_workloads_trains_a_step(name):
    module = build_model(name, in_channels=3, image_size=32, num_classes=10, seed=1)
    before = {key: value.clone() for key, value in module.state_dict().items()}
    model = Int8Model.from_module(module, input_shape=(3, 32, 32))
    images, labels = batches(1, size=2, image=(3, 32, 32), classes=10)[0]
    result = model.train_step(images, labels, learning_rate=0.01, progress=0.0)
    assert np.isfinite(result.loss)
    state = model.state_dict()
    assert list(state) == list(before)
    for key, value in module.state_dict().items():
        assert torch.equal(value, before[key])  # the module is only read
        assert state[key].shape == value.shape
        assert state[key].dtype == value.dtype
    module.load_state_dict(state)
    changed = [key for key in before if not torch.equal(state[key], before[key])]
    assert len(changed) > len(before) // 2


def test_a_custom_module_with_functions_is_understood():
    nodes = {node.name: node for node in capture_network(Residual(), IMAGE).graph.nodes}
    assert nodes["stem"].relu
    assert isinstance(nodes["add"], ir.Add)
    assert nodes["add"].relu
    assert nodes["add"].inputs == ("stem", "norm")
    assert nodes["project"].stride == (2, 2)
    assert nodes["project"].kernel == (1, 1)
    assert isinstance(nodes["add_1"], ir.Add)
    assert not nodes["add_1"].relu  # read as it is, and through a ReLU
    assert nodes["head"].linear
    assert nodes["mean"].kernel == (5, 5)


def test_tracing_leaves_the_mode_of_every_submodule_as_it_was():
    """A BatchNorm that is frozen by eval() stays so."""
    module = build("normalised").train()
    module[1].eval()
    capture_network(module, IMAGE)
    assert [child.training for child in module] == [index != 1 for index in range(len(module))]


@pytest.mark.parametrize("training", [True, False])
def test_tracing_leaves_the_module_as_it_was(training):
    module = build("normalised").train(training)
    before = {key: value.clone() for key, value in module.state_dict().items()}
    capture_network(module, IMAGE)
    assert module.training is training
    assert all(child.training is training for child in module.modules())
    for key, value in module.state_dict().items():
        assert torch.equal(value, before[key])


class Wrapped(nn.Module):
    """A convolution, an operator under test, and a head."""

    def __init__(self, operator, head=None):
        super().__init__()
        self.first = nn.Conv2d(3, 8, 3, padding=1)
        self.odd = operator
        self.head = head or nn.Sequential(
            nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, CLASSES)
        )

    def forward(self, x):
        return self.head(self.odd(self.first(x)))


@pytest.mark.parametrize(
    ("operator", "message"),
    [
        (nn.Conv2d(8, 8, 3, dilation=2, padding=2), r"odd: .*Conv2d with dilation"),
        (
            nn.Conv2d(8, 8, 3, padding=1, padding_mode="reflect"),
            r"odd: .*Conv2d with .*other padding than zeros",
        ),
        (nn.Conv2d(8, 8, 3, padding="same"), r"odd: .*Conv2d with .*padding by name"),
        (nn.GELU(), r"odd: .*GELU"),
        (nn.Sigmoid(), r"odd: .*Sigmoid"),
        (nn.LayerNorm([8, 10, 10]), r"odd: .*LayerNorm"),
        (nn.GroupNorm(2, 8), r"odd: .*GroupNorm"),
        (nn.BatchNorm2d(8, affine=False), r"odd: .*BatchNorm2d without"),
        (nn.BatchNorm2d(8, track_running_stats=False), r"odd: .*BatchNorm2d without"),
        (nn.BatchNorm2d(8, momentum=None), r"odd: .*BatchNorm2d without .*momentum"),
        (nn.Dropout3d(0.5), r"odd: .*Dropout3d"),
        (nn.AlphaDropout(0.5), r"odd: .*AlphaDropout"),
        (nn.MaxPool2d(2, ceil_mode=True), r"odd: .*MaxPool2d with .*ceil_mode"),
        (nn.MaxPool2d(2, dilation=2), r"odd: .*MaxPool2d with dilation"),
        (nn.AvgPool2d(2, divisor_override=3), r"odd: .*AvgPool2d with .*divisor"),
        (
            nn.AvgPool2d(3, padding=1, count_include_pad=False),
            r"odd: .*AvgPool2d with .*padding that does not count",
        ),
        (
            nn.AdaptiveAvgPool2d(3),
            r"odd: .*AdaptiveAvgPool2d from 10x10 to 3x3, whose windows differ",
        ),
        (nn.AdaptiveMaxPool2d(5), r"odd: .*AdaptiveMaxPool2d"),
        (nn.Linear(10, 10), r"odd: .*Linear over the last dimension"),
        (nn.ConvTranspose2d(8, 8, 1), r"odd: .*ConvTranspose2d"),
    ],
)
def test_an_operator_that_int8_has_not_is_named(operator, message):
    with pytest.raises(ConfigError, match=message) as caught:
        Int8Model.from_module(Wrapped(operator), input_shape=IMAGE)
    assert "fp32_operators" in str(caught.value)


class Function(nn.Module):
    """A network whose forward is a function of (module, x)."""

    def __init__(self, function):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.head, self.scale = nn.Linear(8, CLASSES), nn.Parameter(torch.ones(1))
        self.mean = nn.AdaptiveAvgPool2d(1)
        self.function = function

    def forward(self, x):
        return self.function(self, x)


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (
            lambda m, x: m.head(m.mean(torch.sigmoid(m.conv(x))).flatten(1)),
            r"sigmoid: .*no operator 'sigmoid'",
        ),
        (lambda m, x: m.head(m.conv(x).mean((2, 3))), r"mean.*: .*no operator 'mean'"),
        (lambda m, x: m.head(m.mean(m.conv(x) + 1.0).flatten(1)), r"no operator 'add'"),
        (
            lambda m, x: m.head(m.mean(torch.add(m.conv(x), m.conv(x), alpha=2)).flatten(1)),
            r"no operator 'add'",
        ),
        (
            lambda m, x: m.head(m.mean(m.conv(x) * m.scale).flatten(1)),
            r"cannot read the tensor scale",
        ),
        (lambda m, x: (m.head(m.mean(m.conv(x)).flatten(1)), x), r"returns several values"),
        (
            lambda m, x: torch.flatten(m.conv(x)),
            r"flatten: int8 training flattens \(n, c, h, w\) to",
        ),
        (lambda m, x: m.conv(x).flatten(2), r"flattens \(n, c, h, w\) to \(n, c\*h\*w\) only"),
        (
            lambda m, x: m.head(m.mean(m.conv(x)).flatten(1)) if x.sum() > 0 else x,
            r"torch.fx cannot follow Function",
        ),
        (lambda m, x: x, r"computes nothing after its logits"),
    ],
)
def test_a_function_that_int8_has_not_is_named(function, message):
    with pytest.raises(ConfigError, match=message):
        Int8Model.from_module(Function(function), input_shape=IMAGE)


def test_a_network_that_makes_no_logits_is_refused():
    with pytest.raises(ConfigError, match=r"0: the last operator makes \(8, 8, 8\), not logits"):
        Int8Model.from_module(nn.Sequential(nn.Conv2d(3, 8, 3)), input_shape=IMAGE)


def test_a_module_that_yields_several_values_is_refused():
    class Recurrent(nn.Module):
        def __init__(self):
            super().__init__()
            self.states, self.head = nn.LSTM(4, 4, batch_first=True), nn.Linear(4, 3)

        def forward(self, inputs):
            return self.head(self.states(inputs)[0])

    message = "states: int8 training has no LSTM; move it into a module of its own, of one tensor in and one out"
    with pytest.raises(ConfigError, match=message):
        capture_network(Recurrent(), (5, 4), unsupported="fp32")
    listed = r"states: in FP32 runs what makes one tensor .*, which LSTM does not; put it into a module that does"
    with pytest.raises(ConfigError, match=listed):
        capture_network(Recurrent(), (5, 4), fp32_operators=["states"])


def test_a_second_input_is_named():
    class Two(nn.Module):
        def forward(self, images, extra):
            return images + extra

    with pytest.raises(
        ConfigError, match=r"model Two: takes 2 inputs \(images, extra\); it must take one tensor"
    ):
        capture_network(Two(), IMAGE)


def test_images_that_the_module_does_not_take_are_an_error():
    message = r"model Sequential: does not take 3 samples of shape \(1, 10, 10\): .*channels"
    with pytest.raises(ConfigError, match=message) as caught:
        capture_network(build("plain"), (1, 10, 10))
    assert "\n" not in str(caught.value)


def test_unknown_fp32_operators_are_named():
    with pytest.raises(ConfigError, match="the network calls no nose, tail; it calls 0, 1, 2"):
        capture_network(build("plain"), IMAGE, fp32_operators=["tail", "nose"])


def test_sums_of_unequal_shapes_are_refused():
    with pytest.raises(ConfigError, match=r"adds equal shapes, got \(8, 10, 10\) and \(8, 1, 1\)"):
        capture_network(
            Function(lambda m, x: m.head(m.mean(m.norm(m.conv(x)) + m.mean(m.conv(x))).flatten(1))),
            IMAGE,
        )


# ------------------------------------------------------------------- what ordinary torch modules look like


class SharedRelu(nn.Module):
    """A ReLU and a pool without parameters, each used twice, as in torchvision's ResNet."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.relu, self.pool = (
            nn.Conv2d(3, 8, 3),
            nn.Conv2d(8, 8, 3),
            nn.ReLU(),
            nn.MaxPool2d(2),
        )
        self.head = nn.Linear(8, CLASSES)

    def forward(self, x):
        return self.head(self.pool(self.relu(self.b(self.pool(self.relu(self.a(x)))))).flatten(1))


def test_a_module_without_parameters_may_be_used_twice():
    module = SharedRelu()
    graph = capture_network(module, IMAGE).graph
    assert [node.name for node in graph.nodes] == ["a", "pool", "b", "pool_1", "head"]
    model = Int8Model.from_module(module, input_shape=IMAGE)
    model.train_step(*batches(1)[0], progress=0.0)
    module.load_state_dict(model.state_dict())


def test_a_module_with_parameters_used_twice_is_refused():
    with pytest.raises(
        ConfigError,
        match="conv: runs twice; int8 training has no operators that share their weights",
    ):
        capture_network(
            Function(lambda m, x: m.head(m.mean(m.conv(x) + m.conv(x)).flatten(1))), IMAGE
        )


def test_a_function_and_a_module_with_parameters_may_share_a_name():
    class Both(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.add = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 1)
            self.mean, self.head = nn.AdaptiveAvgPool2d(1), nn.Linear(8, CLASSES)

        def forward(self, x):
            x = self.a(x)
            return self.head(self.mean(self.add(x + torch.relu(x))).flatten(1))

    capture_network(Both(), IMAGE)


def test_a_function_and_a_module_may_share_a_name():
    class Both(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.pool, self.relu, self.head = (
                nn.Conv2d(3, 8, 3),
                nn.MaxPool2d(8),
                nn.ReLU(),
                nn.Linear(8, 5),
            )

        def forward(self, x):
            x = self.a(x)
            return self.head((self.pool(torch.relu(x)) + self.relu(self.pool(x))).flatten(1))

    capture_network(Both(), IMAGE)


def test_addition_in_place_is_an_addition():
    def function(m, x):
        out = m.norm(m.conv(x))
        out += out
        return m.head(m.mean(out).flatten(1))

    graph = capture_network(Function(function), IMAGE).graph
    assert any(isinstance(node, ir.Add) for node in graph.nodes)


def test_a_value_that_nobody_reads_is_left_out():
    def function(m, x):
        x = m.conv(x)
        torch.relu(x + x)
        return m.head(m.mean(x).flatten(1))

    module = Function(function)
    del module.scale, module.norm
    model = Int8Model.from_module(module, input_shape=IMAGE)
    assert [node.name for node in model.graph.nodes] == ["conv", "mean", "head"]
    model.train_step(*batches(1)[0], progress=0.0)
    module.load_state_dict(model.state_dict())


def test_what_overwrites_a_value_is_not_left_out_though_nobody_reads_its_result():
    def function(m, x):
        x = m.conv(x)
        x.mul_(2.0)
        return m.head(m.mean(x).flatten(1))

    with pytest.raises(ConfigError, match="mul_: int8 training has no operator 'mul_'"):
        capture_network(Function(function), IMAGE)


def test_parameters_of_what_nobody_reads_are_refused_by_name():
    """They could neither train nor come back in a state_dict."""

    def function(m, x):
        m.norm(m.conv(x))
        return m.head(m.mean(m.other(x)).flatten(1))

    module = Function(function)
    del module.scale
    module.other = nn.Conv2d(3, 8, 1)
    assert [node.name for node in capture_network(module, IMAGE).graph.nodes] == [
        "other",
        "mean",
        "head",
    ]
    with pytest.raises(
        ConfigError,
        match=r"state: the network does not use conv\.bias, conv\.weight, norm\.bias, .*",
    ):
        Int8Model.from_module(module, input_shape=IMAGE)


class Flattened(nn.Module):
    """A convolution and a head with a function between them."""

    def __init__(self, function):
        super().__init__()
        self.a, self.head, self.function = nn.Conv2d(3, 8, 3), nn.Linear(8 * 64, CLASSES), function

    def forward(self, x):
        return self.head(self.function(self.a(x)))


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x.view(x.size(0), -1),
        lambda x: x.view(x.shape[0], -1),
        lambda x: x.view(-1, 512),
        lambda x: x.reshape(x.size(0), -1),
        lambda x: x.reshape((x.size(0), -1)),
        lambda x: torch.reshape(x, (x.size(0), -1)),
        lambda x: torch.flatten(x, start_dim=1),
        lambda x: x.flatten(1),
    ],
)
def test_every_way_to_flatten_images_is_understood(function):
    graph = capture_network(Flattened(function), IMAGE).graph
    assert [node.name for node in graph.nodes] == ["a", "head"]
    assert graph.node("head").kernel == (8, 8)


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda x: x.view(x.size(0), 1, 512), r"view: int8 training flattens \(n, c, h, w\) to"),
        (
            lambda x: x.permute(0, 2, 3, 1).reshape(x.size(0), -1),
            r"permute: int8 training has no operator 'permute'",
        ),
        (lambda x: x[:, :8].flatten(1), r"getitem: int8 training has no operator 'getitem'"),
    ],
)
def test_other_shapes_and_orders_of_values_are_refused(function, message):
    with pytest.raises(ConfigError, match=message):
        capture_network(Flattened(function), IMAGE)


@pytest.mark.parametrize("pool", [nn.AdaptiveAvgPool2d(1), nn.AvgPool2d(17), nn.MaxPool2d(17)])
def test_a_window_of_more_than_256_pixels_is_refused_by_name_and_runs_in_fp32(pool):
    module = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), pool, nn.Flatten(), nn.Linear(8, CLASSES))
    message = rf"2: int8 training has no {type(pool).__name__} with windows of \d+x\d+, more than 256 pixels;"
    with pytest.raises(UnsupportedOperator, match=message):
        Int8Model.from_module(module, input_shape=(3, 20, 20))
    model = Int8Model.from_module(module, input_shape=(3, 20, 20), unsupported="fp32")
    model.train_step(*batches(1, image=(3, 20, 20))[0], progress=0.0)


@pytest.mark.parametrize("size", [(1, 16, 16), (16, 16, 16)])
def test_a_window_of_256_pixels_trains(size):
    module = nn.Sequential(nn.AvgPool2d(16), nn.Flatten(), nn.Linear(size[0], CLASSES))
    Int8Model.from_module(module, input_shape=size).train_step(
        np.ones((2, *size), np.float32), np.zeros(2, np.int32), progress=0.0
    )


def test_a_layer_that_is_too_deep_is_refused_by_name_and_runs_in_fp32():
    module = nn.Sequential(nn.Flatten(), nn.Linear(2 * 256 * 256, 2))
    message = "1: int8 training has no Linear with sums of 131072 products, where int32 surely holds 131071;"
    with pytest.raises(UnsupportedOperator, match=message):
        Int8Model.from_module(module, input_shape=(2, 256, 256))
    model = Int8Model.from_module(module, input_shape=(2, 256, 256), unsupported="fp32")
    model.train_step(np.ones((1, 2, 256, 256), np.float32), np.zeros(1, np.int32), progress=0.0)


def test_the_deepest_exact_sum_trains_and_its_bound_is_that_of_the_kernels():
    assert MAX_EXACT_DEPTH == _int8.MAX_EXACT_DEPTH
    module = nn.Sequential(nn.Flatten(), nn.Linear(MAX_EXACT_DEPTH, 3))
    shape = (MAX_EXACT_DEPTH, 1, 1)
    model = Int8Model.from_module(module, input_shape=shape)
    model.train_step(np.ones((1, *shape), np.float32), np.zeros(1, np.int32), progress=0.0)


def test_gradients_count_among_the_sums_too():
    module = nn.Sequential(nn.Conv2d(1, 8, 8), nn.Flatten(), nn.Linear(8 * 9, CLASSES))
    capture_network(module, (1, 10, 10))
    module = nn.Sequential(
        nn.Conv2d(1, 2048, 8), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(2048, CLASSES)
    )
    with pytest.raises(
        UnsupportedOperator, match="0: int8 training has no Conv2d with sums of 131072 products"
    ):
        capture_network(module, (1, 10, 10))


@pytest.mark.parametrize("name", NETWORKS)
def test_predictions_agree_with_torch_on_the_exported_weights(name):
    module = build(name)
    model = Int8Model.from_module(module, input_shape=IMAGE)
    for images, labels in batches(12, size=16):
        model.train_step(images, labels, learning_rate=0.05, progress=0.0)
    module.load_state_dict(model.state_dict())
    module.eval()
    images, _ = batches(1, size=64, seed=9)[0]
    with torch.no_grad():
        expected = module(torch.from_numpy(images)).numpy()
    got = model.predict(images)
    assert got.shape == expected.shape
    error = np.sqrt(np.mean((got - expected) ** 2)) / np.sqrt(np.mean(expected**2))
    assert error < 0.1
