"""From torch modules to graphs: what is understood, and errors that name module and operator."""

import warnings
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn

from socflower import _int8
from socflower.model_graph.graph import capture
from socflower.precision.int8 import from_torch
from socflower.precision.int8 import network as ir
from socflower.precision.int8.from_torch import (
    UnsupportedOperator,
    capture_network,
)
from socflower.precision.operator_costs import island_share
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

REFUSE = {"unsupported": "refuse"}
MAX_EXACT_DEPTH = _int8.MAX_EXACT_DEPTH


# Others of their families have the same operators.
DEEP = ("vgg16", "vgg19", "resnet34", "resnet50", "efficientnet-b1")


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.slow if name in DEEP else ()) for name in model_names()],
)
def test_every_model_of_the_workloads_trains_a_step_in_int8_alone(name):
    module = build_model(name, in_channels=3, image_size=32, num_classes=10, seed=1)
    before = {key: value.clone() for key, value in module.state_dict().items()}
    model = int8(module, shape=(3, 32, 32), options=REFUSE)
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
        (nn.Tanhshrink(), ""),
        (nn.BatchNorm2d(8, affine=False), "affine"),
        (nn.BatchNorm2d(8, track_running_stats=False), "track_running_stats = False"),
        (nn.BatchNorm2d(8, momentum=None), "momentum"),
        (nn.AlphaDropout(0.5), ""),
        (nn.MaxPool2d(2, dilation=2), "dilation"),
        (nn.AdaptiveMaxPool2d(3), "from 10x10 to 3x3"),
        (nn.InstanceNorm2d(8, track_running_stats=True), "track_running_stats"),
        (nn.ConstantPad2d(1, 3.0), "value of 3.0"),
        (nn.Upsample(scale_factor=2, mode="bilinear"), "mode = 'bilinear'"),
        (nn.utils.parametrizations.weight_norm(nn.Conv2d(8, 8, 1)), "whose weight is computed"),
    ],
)
def test_an_operator_that_int8_has_not_is_named_or_runs_in_fp32(operator, how):
    front = [nn.Conv2d(3, 8, 3, padding=1), operator]
    back = [nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    module = nn.Sequential(*front, *back, nn.Linear(8, CLASSES))
    named = ("1: ", type(operator).__name__, how, "fp32_operators")
    refused(lambda: int8(module, options=REFUSE), *named, error=UnsupportedOperator)
    model = int8(module)
    assert [node.kind for node in model.graph.nodes].count("fp32") == 1
    train(model, batches(1))
    module.load_state_dict(model.state_dict())


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
        (lambda m, x: head(m, m.norm(torch.erf(m.conv(x)))), "'erf'"),
        (lambda m, x: head(m, m.norm(m.conv(x).cumsum(1))), "'cumsum'"),
        (lambda m, x: head(m, torch.add(m.norm(m.conv(x)), x[:, :1], alpha=2)), "'add'"),
        (lambda m, x: head(m, m.norm(m.conv(x)).pow(3)), "power of 3"),
        (lambda m, x: head(m, m.norm(m.conv(x)) * x.size(0)), "reads the value size"),
    ],
)  # fmt: skip
def test_a_function_that_int8_has_not_is_named_or_runs_in_fp32(function, named):
    module = Function(function)
    del module.scale
    refused(lambda: int8(module, options=REFUSE), named, error=UnsupportedOperator)
    train(int8(module), batches(1))


@pytest.mark.parametrize(
    ("function", "named"),
    [
        (lambda m, x: (head(m, m.conv(x)), x), "several values"),
        (lambda m, x: head(m, m.conv(x)) if x.sum() > 0 else x, "cannot follow Function"),
        (lambda m, x: x, "returns its input"),
        (lambda m, x: head(m, m.conv(x) + m.conv(x)), "conv: runs twice"),
        (lambda m, x: torch.flatten(m.conv(x)), "flatten: "),
    ],
)
def test_what_cannot_train_is_refused(function, named):
    refused(lambda: int8(Function(function)), named)


def test_what_runs_in_fp32_unasked_is_reported():
    layers = [nn.Conv2d(3, 8, 3), nn.Tanhshrink(), nn.Flatten(), nn.Linear(512, CLASSES)]
    with pytest.warns(UserWarning, match=r"1 \(Tanhshrink\)") as caught:
        model = int8(nn.Sequential(*layers))
    assert len(caught) == 1
    assert model.islands == {"1": "Tanhshrink"}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        named = int8(nn.Sequential(*layers), options={"fp32_operators": ["1"]})
        assert named.islands == model.islands
        assert int8(nn.Sequential(layers[0], *layers[2:])).islands == {}
    assert 0.0 < island_share(model, 8) < 1.0


def test_neighbouring_functions_without_a_kernel_are_one_island():
    def function(m, x):
        x = torch.erf(m.conv(x))
        return head(m, torch.sinh(x * 0.5) * m.scale)

    module = Function(function)
    del module.norm
    model = int8(module)
    islands = [node for node in model.graph.nodes if node.kind == "fp32"]
    assert [node.operator for node in islands] == ["erf", "sinh"]

    def longer(m, x):
        x = torch.erf(m.conv(x))
        return head(m, torch.sinh(x).cos() * m.scale)

    module = Function(longer)
    del module.norm
    model = int8(module)
    islands = [node for node in model.graph.nodes if node.kind == "fp32"]
    assert [node.operator for node in islands] == ["erf, sinh, cos"]
    train(model, batches(1))
    module.load_state_dict(model.state_dict())


def test_an_island_of_several_inputs_trains_the_parameters_in_it():
    def function(m, x):
        x = m.conv(x)
        return head(m, torch.atan2(x, m.other(x)) * torch.sinh(m.scale))

    module = Function(function, other=nn.Conv2d(8, 8, 1))
    del module.norm
    model = int8(module)
    (island,) = [node for node in model.graph.nodes if node.kind == "fp32"]
    assert island.inputs == ("conv", "other")
    train(model, batches(3), rate=0.5)
    state = model.state_dict()
    assert not torch.equal(state["scale"], module.scale)
    module.load_state_dict(state)
    train(model, batches(1))


def test_a_module_that_torch_cannot_follow_is_an_island_and_the_network_is_captured_once(
    monkeypatch,
):
    class Branching(nn.Module):
        def forward(self, x):
            return x * 2 if x.sum() > 0 else x

    captures = []

    def counted(*given, **more):
        captures.append(given)
        return capture(*given, **more)

    monkeypatch.setattr(from_torch, "capture", counted)
    module = nn.Sequential(nn.Conv2d(3, 8, 3), *(Branching() for _ in range(5)), nn.Flatten(),
                           nn.Linear(8 * 64, CLASSES))  # fmt: skip
    model = int8(module)
    assert [node.kind for node in model.graph.nodes].count("fp32") == 1
    assert len(captures) == 1
    refused(
        lambda: int8(module, options=REFUSE), "1: torch.fx cannot follow", error=UnsupportedOperator
    )


def test_modules_that_differ_in_evaluation_are_found_together(monkeypatch):
    class Identity(nn.Module):
        def forward(self, x):
            return x + torch.erf(x) if self.training else x

    captures = []

    def counted(*given, **more):
        captures.append(given)
        return capture(*given, **more)

    monkeypatch.setattr(from_torch, "capture", counted)
    layers = [nn.Sequential(nn.Conv2d(8, 8, 1), Identity()) for _ in range(6)]
    module = nn.Sequential(nn.Conv2d(3, 8, 3), *layers, nn.Flatten(), nn.Linear(8 * 64, CLASSES))
    model = int8(module)
    assert [node.kind for node in model.graph.nodes].count("fp32") == 6
    assert len(captures) == 2
    train(model, batches(1))


def test_a_module_that_yields_several_values_runs_in_fp32_with_what_reads_it():
    module = Function(lambda m, x: m.head(m.states(x)[0].mean(1)))
    module.states, module.head = nn.LSTM(4, 4, batch_first=True), nn.Linear(4, 3)
    del module.scale, module.conv, module.norm
    model = int8(module, shape=(5, 4))
    kinds = [node.kind for node in model.graph.nodes]
    assert kinds.count("fp32") == 1
    images = np.ones((6, 5, 1, 4), np.float32)
    train(model, [(images, np.zeros(6, np.int32))])
    module.load_state_dict(model.state_dict())
    call = partial(capture_network, module, (5, 4), unsupported="refuse")
    refused(call, "getitem: ", "LSTM", error=UnsupportedOperator)


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


@pytest.mark.parametrize(
    ("pool", "size"),
    [
        (nn.AdaptiveAvgPool2d(1), 17), (nn.AvgPool2d(17), 20), (nn.MaxPool2d(17), 20),
        (nn.AvgPool2d(300), 300), (nn.MaxPool2d(200), 200),
    ],
)  # fmt: skip
def test_pooling_of_any_size_trains(pool, size):
    shape = (3, size, size)
    train(int8(pooled(pool), shape=shape, options=REFUSE), ones(shape))


@pytest.mark.parametrize("depth", [MAX_EXACT_DEPTH, MAX_EXACT_DEPTH + 1, 150_528])
def test_linear_layers_of_any_width_train(depth):
    """Also where their sums leave int32 and are split."""
    module = nn.Sequential(nn.Flatten(), nn.Linear(depth, 3))
    train(int8(module, shape=(depth, 1, 1), options=REFUSE), ones((depth, 1, 1)))


def test_the_bound_of_a_layer_counts_the_products_that_meet():
    """The gradient of an input pixel of a linear layer is a sum over the outputs, not over pixels times outputs."""
    module = nn.Sequential(
        nn.Flatten(), nn.Linear(64 * 7 * 7, 4096), nn.ReLU(), nn.Linear(4096, 10)
    )
    train(int8(module, shape=(64, 7, 7), options=REFUSE), ones((64, 7, 7)))
    deep = nn.Sequential(nn.Conv2d(1024, 1, 12), *pooled(nn.AdaptiveAvgPool2d(1), 1))
    shape = (1024, 13, 13)
    named = ("0: ", "Conv2d", "147456", "131071")
    refused(lambda: int8(deep, shape=shape, options=REFUSE), *named, error=UnsupportedOperator)
    train(int8(deep, shape=shape), ones(shape))


def ones(shape):
    return [(np.ones((1, *shape), np.float32), np.zeros(1, np.int32))]


@pytest.mark.parametrize("name", [*NETWORKS, "squeezed", "decoded", "sequence"])
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
