"""From torch modules to graphs: what is understood, and errors that name module and operator."""

from functools import partial

import numpy as np
import pytest
import torch
from torch import nn

from socflower import _int8
from socflower.precision.int8 import network as ir
from socflower.precision.int8.from_torch import (
    MAX_EXACT_DEPTH,
    UnsupportedOperator,
    capture_network,
)
from socflower.workloads.models.built_in import model_names
from socflower.workloads.models.classifiers import build_model
from tests.one_line import refused
from tests.precision.networks import (
    CLASSES,
    IMAGE,
    NETWORKS,
    Residual,
    assert_same,
    batches,
    build,
    int8,
    state_of,
    train,
)

WITHOUT_INT8 = ("mobilenet-v2", "efficientnet-b1")


def test_a_model_with_other_activations_is_refused():
    module = build_model("mobilenet-v2", in_channels=3, image_size=32, num_classes=10, seed=1)
    refused(lambda: int8(module, shape=(3, 32, 32)), "ReLU6", error=UnsupportedOperator)


@pytest.mark.parametrize("name", [name for name in model_names() if name not in WITHOUT_INT8])
def test_every_other_model_of_the_workloads_trains_a_step(name):
    module = build_model(name, in_channels=3, image_size=32, num_classes=10, seed=1)
    before = {key: value.clone() for key, value in module.state_dict().items()}
    model = int8(module, shape=(3, 32, 32))
    (loss,) = train(model, batches(1, size=2, image=(3, 32, 32), classes=10))
    assert np.isfinite(loss)
    state = model.state_dict()
    assert list(state) == list(before)
    for key, value in module.state_dict().items():
        assert torch.equal(value, before[key])  # the module is only read
        assert (state[key].shape, state[key].dtype) == (value.shape, value.dtype)
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


@pytest.mark.parametrize("training", [True, False])
def test_capturing_leaves_the_module_and_torchs_generator_as_they_were(training):
    """Also a BatchNorm that is frozen by eval()."""
    module = build("normalised").train(training)
    module[1].eval()
    state = state_of("normalised")
    random_state = torch.get_rng_state()
    capture_network(module, IMAGE)
    assert [child.training for child in module] == [
        training and index != 1 for index in range(len(module))
    ]
    assert_same({key: value.numpy() for key, value in module.state_dict().items()}, state)
    assert torch.equal(torch.get_rng_state(), random_state)


@pytest.mark.parametrize(
    ("operator", "how"),
    [
        (nn.Conv2d(8, 8, 3, dilation=2, padding=2), "dilation"),
        (nn.Conv2d(8, 8, 3, padding=1, padding_mode="reflect"), "padding_mode = 'reflect'"),
        (nn.Conv2d(8, 8, 3, padding="same"), "padding by name"),
        (nn.GELU(), ""),
        (nn.BatchNorm2d(8, affine=False), "affine"),
        (nn.BatchNorm2d(8, track_running_stats=False), "track_running_stats = False"),
        (nn.BatchNorm2d(8, momentum=None), "momentum"),
        (nn.AlphaDropout(0.5), ""),
        (nn.MaxPool2d(2, ceil_mode=True), "ceil_mode"),
        (nn.MaxPool2d(2, dilation=2), "dilation"),
        (nn.AvgPool2d(2, ceil_mode=True), "ceil_mode"),
        (nn.AvgPool2d(2, divisor_override=3), "divisor_override = 3"),
        (nn.AvgPool2d(3, padding=1, count_include_pad=False), "padding that does not count"),
        (nn.AdaptiveAvgPool2d(3), "from 10x10 to 3x3"),
        (nn.Linear(10, 10), "over the last dimension"),
        (nn.ConvTranspose2d(8, 8, 1), ""),
    ],
)
def test_an_operator_that_int8_has_not_is_named(operator, how):
    front = [nn.Conv2d(3, 8, 3, padding=1), operator]
    back = [nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    module = nn.Sequential(*front, *back, nn.Linear(8, CLASSES))
    refused(lambda: int8(module), "1: ", type(operator).__name__, how, "fp32_operators")


class Function(nn.Module):
    """A network whose forward is a function of (module, x), with more layers by name."""

    def __init__(self, function, **layers):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.head, self.scale = nn.Linear(8, CLASSES), nn.Parameter(torch.ones(1))
        self.mean = nn.AdaptiveAvgPool2d(1)
        self.function = function
        for name, layer in layers.items():
            setattr(self, name, layer)

    def forward(self, x):
        return self.function(self, x)


def names_of(function, **layers):
    return [node.name for node in capture_network(Function(function, **layers), IMAGE).graph.nodes]


def head(m, x):
    return m.head(m.mean(x).flatten(1))


@pytest.mark.parametrize(
    ("function", "named"),
    [
        (lambda m, x: head(m, torch.sigmoid(m.conv(x))), "'sigmoid'"),
        (lambda m, x: m.head(m.conv(x).mean((2, 3))), "'mean'"),
        (lambda m, x: head(m, m.conv(x) + 1.0), "'add'"),
        (lambda m, x: head(m, torch.add(m.conv(x), m.conv(x), alpha=2)), "'add'"),
        (lambda m, x: head(m, m.norm(m.conv(x)) + m.mean(m.conv(x))), "(8, 1, 1)"),
        (lambda m, x: head(m, m.conv(x) * m.scale), "tensor scale"),
        (lambda m, x: (head(m, m.conv(x)), x), "several values"),
        (lambda m, x: torch.flatten(m.conv(x)), "flatten: "),
        (lambda m, x: m.conv(x).flatten(2), "flattens"),
        (lambda m, x: m.conv(x).view(x.size(0), 1, 800), "view: "),
        (lambda m, x: m.conv(x).permute(0, 2, 3, 1).reshape(x.size(0), -1), "'permute'"),
        (lambda m, x: m.conv(x)[:, :8].flatten(1), "'getitem'"),
        (lambda m, x: head(m, m.conv(x)) if x.sum() > 0 else x, "cannot follow Function"),
        (lambda m, x: x, "nothing after its logits"),
        (lambda m, x: head(m, m.conv(x) + m.conv(x)), "conv: runs twice"),
        (lambda m, x: head(m, overwritten(m.conv(x))), "'mul_'"),
    ],
)
def test_a_function_that_int8_has_not_is_named(function, named):
    refused(lambda: int8(Function(function)), named)


def overwritten(x):
    """Overwrite a value by an operation whose result nobody reads."""
    x.mul_(2.0)
    return x


def test_a_module_that_yields_several_values_is_refused():
    module = Function(lambda m, x: m.head(m.states(x)[0]))
    module.states, module.head = nn.LSTM(4, 4, batch_first=True), nn.Linear(4, 3)
    for options, remedy in (
        ({"unsupported": "fp32"}, "move it into a module"),
        ({"fp32_operators": ["states"]}, "put it into a module"),
    ):
        call = partial(capture_network, module, (5, 4), **options)
        refused(call, "states: ", "LSTM", remedy)


def test_inputs_that_the_module_does_not_take_are_named():
    class Two(nn.Module):
        def forward(self, images, extra):
            return images + extra

    refused(lambda: capture_network(Two(), IMAGE), "model Two", "(images, extra)")
    call = partial(capture_network, build("plain"))
    refused(lambda: call((1, 10, 10)), "model Sequential", "(1, 10, 10)", "channels")
    refused(lambda: call(IMAGE, fp32_operators=["tail", "nose"]), "nose, tail", "0, 1, 2")


# ------------------------------------------------------------------- what ordinary torch modules look like


def test_a_module_without_parameters_may_be_used_twice():
    """As the ReLU of torchvision's ResNet."""

    def function(m, x):
        return m.head(m.pool(m.relu(m.b(m.pool(m.relu(m.conv(x)))))).flatten(1))

    layers = {"b": nn.Conv2d(8, 8, 1), "relu": nn.ReLU(), "pool": nn.MaxPool2d(3)}
    assert names_of(function, **layers) == ["conv", "pool", "b", "pool_1", "head"]
    module = Function(function, **layers)
    del module.scale, module.norm
    model = int8(module)
    train(model, batches(1))
    module.load_state_dict(model.state_dict())


def add_and_module(m, x):
    x = m.conv(x)
    return head(m, m.add(x + torch.relu(x)))


def relu_and_module(m, x):
    x = m.conv(x)
    return head(m, m.pool(torch.relu(x)) + m.relu(m.pool(x)))


def in_place(m, x):
    x = m.norm(m.conv(x))
    x += x
    return head(m, x)


@pytest.mark.parametrize("function", [add_and_module, relu_and_module, in_place])
def test_a_function_and_a_module_may_share_a_name(function):
    layers = {"add": nn.Conv2d(8, 8, 1), "pool": nn.MaxPool2d(5), "relu": nn.ReLU()}
    nodes = capture_network(Function(function, **layers), IMAGE).graph.nodes
    assert any(isinstance(node, ir.Add) for node in nodes)


def test_a_value_that_nobody_reads_is_left_out():
    def function(m, x):
        x = m.conv(x)
        torch.relu(x + x)
        return head(m, x)

    module = Function(function)
    del module.scale, module.norm
    model = int8(module)
    assert [node.name for node in model.graph.nodes] == ["conv", "mean", "head"]
    train(model, batches(1))
    module.load_state_dict(model.state_dict())


def test_parameters_of_what_nobody_reads_are_refused_by_name():
    """They could neither train nor come back in a state_dict."""

    def function(m, x):
        m.norm(m.conv(x))
        return head(m, m.other(x))

    other = nn.Conv2d(3, 8, 1)
    assert names_of(function, other=other) == ["other", "mean", "head"]
    refused(lambda: int8(Function(function, other=other)), "conv.bias, conv.weight, norm.bias")


@pytest.mark.parametrize(
    "flat",
    [
        lambda x: x.view(x.size(0), -1),
        lambda x: x.view(-1, 800),
        lambda x: x.reshape((x.shape[0], -1)),
        lambda x: torch.reshape(x, (x.size(0), -1)),
        lambda x: torch.flatten(x, start_dim=1),
    ],
)
def test_every_way_to_flatten_images_is_understood(flat):
    module = Function(lambda m, x: m.head(flat(m.conv(x))), head=nn.Linear(800, CLASSES))
    conv, last = capture_network(module, IMAGE).graph.nodes
    assert (conv.name, last.name, last.kernel) == ("conv", "head", (10, 10))


def pooled(pool, channels=3):
    return nn.Sequential(pool, nn.Flatten(), nn.Linear(channels, CLASSES))


DEEP = nn.Sequential(nn.Flatten(), nn.Linear(MAX_EXACT_DEPTH + 1, 2))


@pytest.mark.parametrize(
    ("module", "shape", "named"),
    [
        (
            pooled(nn.AdaptiveAvgPool2d(1)),
            (3, 17, 17),
            ("0: ", "AdaptiveAvgPool2d", "17x17", "256"),
        ),
        (pooled(nn.AvgPool2d(17)), (3, 20, 20), ("0: ", "AvgPool2d", "17x17", "256")),
        (pooled(nn.MaxPool2d(17)), (3, 20, 20), ("0: ", "MaxPool2d", "17x17", "256")),
        (DEEP, (MAX_EXACT_DEPTH + 1, 1, 1), ("1: ", "Linear", "131072", "131071")),
        (
            nn.Sequential(nn.Conv2d(1, 2048, 8), *pooled(nn.AdaptiveAvgPool2d(1), 2048)),
            (1, 10, 10),
            ("0: ", "Conv2d", "131072"),  # of the gradient of the input
        ),
    ],
)
def test_what_is_too_wide_or_too_deep_is_refused_by_name_and_runs_in_fp32(module, shape, named):
    refused(lambda: int8(module, shape=shape), *named, error=UnsupportedOperator)
    train(int8(module, shape=shape, options={"unsupported": "fp32"}), ones(shape))


def ones(shape):
    return [(np.ones((1, *shape), np.float32), np.zeros(1, np.int32))]


@pytest.mark.parametrize("size", [1, 16])
def test_a_window_of_256_pixels_and_the_deepest_exact_sum_train(size):
    train(int8(pooled(nn.AvgPool2d(16), size), shape=(size, 16, 16)), ones((size, 16, 16)))
    assert MAX_EXACT_DEPTH == _int8.MAX_EXACT_DEPTH
    shape = (MAX_EXACT_DEPTH, 1, 1)
    train(
        int8(nn.Sequential(nn.Flatten(), nn.Linear(MAX_EXACT_DEPTH, 3)), shape=shape), ones(shape)
    )


@pytest.mark.parametrize("name", NETWORKS)
def test_predictions_agree_with_torch_on_the_exported_weights(name):
    module = build(name)
    model = int8(name)
    train(model, batches(12, size=16))
    module.load_state_dict(model.state_dict())
    images, _ = batches(1, size=64, seed=9)[0]
    with torch.no_grad():
        expected = module.eval()(torch.from_numpy(images)).numpy()
    got = model.predict(images)
    assert got.shape == expected.shape
    assert np.linalg.norm(got - expected) < 0.1 * np.linalg.norm(expected)
