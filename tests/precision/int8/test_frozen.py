"""Frozen parameters: bit for bit what they were, and nothing computed for them."""

import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from socflower.errors import ConfigError
from socflower.model_graph.random_state import forked_generator
from socflower.precision import (
    ADAPTIVE_FIXED_POINT,
    NITI,
    EngineSettings,
    Int8Model,
    NativeInt8Backend,
    RescalingPolicy,
)
from socflower.precision.algorithm import Fp32Update
from socflower.precision.int8.network import INPUT
from socflower.precision.int8.operators import ConvolutionOperator
from tests.precision.networks import IMAGE, NETWORKS, batches, build

MOMENTUM = dataclasses.replace(ADAPTIVE_FIXED_POINT, update=Fp32Update(momentum=0.9))
ALGORITHMS = {"niti": NITI, "adaptive-fixed-point": ADAPTIVE_FIXED_POINT, "momentum": MOMENTUM}
STATISTICS = ("running_mean", "running_var", "num_batches_tracked")


def frozen(name, names):
    """Return a network of which these parameters are frozen."""
    module = build(name)
    for parameter in names:
        module.get_parameter(parameter).requires_grad_(False)
    return module


def parameters_of(name):
    return [parameter for parameter, _ in build(name).named_parameters()]


def model_of(module, algorithm=NITI, **more):
    policy = EngineSettings(rescaling=RescalingPolicy(adaptive=False))
    return Int8Model.from_module(
        module, input_shape=IMAGE, algorithm=algorithm, settings=policy, **more
    )


def train(model, data):
    for index, (images, labels) in enumerate(data):
        model.train_step(images, labels, learning_rate=0.05, progress=index / len(data))


@pytest.mark.parametrize("algorithm", ALGORITHMS.values(), ids=ALGORITHMS)
@given(st.data())
@settings(max_examples=12)
def test_any_frozen_parameters_keep_every_bit_and_the_others_go_the_way_they_would(algorithm, draw):
    """One step of the others is that of a network without frozen ones: the forward pass is the same, so is theirs."""
    name = draw.draw(st.sampled_from(sorted(NETWORKS)))
    names = parameters_of(name)
    chosen = draw.draw(st.sets(st.sampled_from(names), max_size=len(names) - 1))
    module, data = frozen(name, chosen), batches(3)
    before = {key: value.clone() for key, value in module.state_dict().items()}
    model, free = model_of(module, algorithm), model_of(build(name), algorithm)
    exponents = {key: value for key, value in model.weight_exponents().items() if key in chosen}
    train(model, data[:1])
    train(free, data[:1])
    one, other = model.state_dict(), free.state_dict()
    for key, value in before.items():
        assert torch.equal(one[key], value if key in chosen else other[key]), key
    train(model, data[1:])
    after = model.state_dict()
    for key in chosen:
        assert torch.equal(after[key].view(torch.int32), before[key].view(torch.int32)), key
    assert exponents.items() <= model.weight_exponents().items()
    assert not set(model.velocities()) & set(chosen)


@pytest.mark.parametrize("kept", ["weight", "bias"])
def test_batch_norm_with_frozen_parameters_goes_on_with_its_statistics_as_in_torch(kept):
    names = [
        name
        for name in parameters_of("normalised")
        if name.startswith(("1.", "4.")) and not name.endswith(kept)
    ]
    module = frozen("normalised", names)
    before = {key: value.clone() for key, value in module.state_dict().items()}
    model = model_of(module)
    train(model, batches(2))
    for key, value in model.state_dict().items():
        assert torch.equal(value, before[key]) == (key in names), key


class Noted:
    """A convolution of the engine, of which it is noted which gradients are computed."""

    def __init__(self, plan, name, calls):
        self._plan, self._name, self._calls = plan, name, calls

    def __getattr__(self, function):
        if function.endswith("_gradient"):
            self._calls.add((self._name, function))
        return getattr(self._plan, function)


@pytest.mark.parametrize("algorithm", ALGORITHMS.values(), ids=ALGORITHMS)
def test_nothing_is_computed_for_what_is_frozen_nor_below_the_lowest_that_trains(
    monkeypatch, algorithm
):
    """Of the four layers of "plain" the second trains: below it there is no gradient, above it only the inputs'."""
    calls = set()
    init = ConvolutionOperator.__init__

    def noted(self, node, x, output, plan, workspace_bytes):
        init(self, node, x, output, Noted(plan, node.name, calls), workspace_bytes)

    monkeypatch.setattr(ConvolutionOperator, "__init__", noted)
    model = model_of(
        frozen("plain", [name for name in parameters_of("plain") if name != "3.weight"]), algorithm
    )
    train(model, batches(2))
    assert calls == {("3", "weight_gradient"), ("6", "input_gradient"), ("8", "input_gradient")}


@pytest.mark.parametrize("algorithm", ALGORITHMS.values(), ids=ALGORITHMS)
def test_a_frozen_bias_alone_and_a_bias_that_alone_trains(algorithm):
    for trained in ("3.bias", "0.bias"):
        module = frozen("plain", [name for name in parameters_of("plain") if name != trained])
        before = {key: value.clone() for key, value in module.state_dict().items()}
        model = model_of(module, algorithm)
        train(model, batches(2))
        assert [
            key for key, value in model.state_dict().items() if not torch.equal(value, before[key])
        ] == [trained]


@pytest.mark.parametrize("make", [nn.GELU, lambda: nn.BatchNorm2d(8), lambda: nn.Conv2d(8, 8, 3)])
@pytest.mark.parametrize("below", [False, True])
def test_operators_in_fp32_keep_frozen_parameters_and_statistics_move(make, below):
    """Also where everything up to the operator is frozen (`below`), so that nothing goes backward through it."""
    with forked_generator(2):
        module = nn.Sequential(
            nn.Conv2d(3, 8, 3), nn.ReLU(), make(), nn.Flatten(), nn.LazyLinear(5)
        )
        module(torch.zeros(2, *IMAGE))
    for name, parameter in module.named_parameters():
        parameter.requires_grad_(name.startswith("4.") or (not below and name.startswith("0.")))
    before = {key: value.clone() for key, value in module.state_dict().items()}
    model = model_of(module, fp32_operators=["2"])
    train(model, batches(2))
    for key, value in model.state_dict().items():
        moves = key.endswith(STATISTICS) or module.state_dict(keep_vars=True)[key].requires_grad
        assert torch.equal(value, before[key]) != moves, key


def test_a_frozen_network_is_refused_and_still_predicts():
    module = frozen("plain", parameters_of("plain"))
    model = model_of(module)
    images, labels = batches(1)[0]
    np.testing.assert_array_equal(model.predict(images), model_of(build("plain")).predict(images))
    with pytest.raises(ConfigError, match=r"every parameter is frozen \(requires_grad is False\)"):
        model.train_step(images, labels, progress=0.0)


@pytest.mark.parametrize("algorithm", ALGORITHMS.values(), ids=ALGORITHMS)
def test_a_saved_model_keeps_what_is_frozen(tmp_path, algorithm):
    chosen = ["stem.weight", "a.weight", "norm.weight", "b.bias", "head.weight"]
    module, data = frozen("residual", chosen), batches(4)
    model = model_of(module, algorithm)
    train(model, data[:2])
    model.save(tmp_path / "model.npz")
    policy = EngineSettings(rescaling=RescalingPolicy(adaptive=False))
    loaded = Int8Model.load(tmp_path / "model.npz", settings=policy)
    for each in (model, loaded):
        train(each, data[2:])
    for key, value in loaded.arrays().items():
        np.testing.assert_array_equal(value, model.arrays()[key])
        if key in chosen:
            np.testing.assert_array_equal(value, module.state_dict()[key])
    model.load_state_dict(module.state_dict())
    np.testing.assert_array_equal(model.arrays()["stem.weight"], module.state_dict()["stem.weight"])


@pytest.mark.parametrize("name", NETWORKS)
def test_the_native_backend_hands_out_gradients_of_trained_parameters_alone(name):
    chosen = parameters_of(name)[1::2]
    seen = []
    for module in (frozen(name, chosen), build(name)):
        backend = NativeInt8Backend()
        backend.build(module, IMAGE)
        weights = {key: value.numpy() for key, value in module.state_dict().items()}
        backend.load_weights(weights, seed=3)
        backend.train_step(*batches(1)[0], learning_rate=0.1, progress=0.0)
        seen.append(
            {
                key: np.array(value)
                for key, value in backend.pseudo_gradient(weights, learning_rate=0.1).items()
            }
        )
    some, everything = seen
    assert set(some) == set(everything) - set(chosen)
    for key, value in some.items():
        np.testing.assert_array_equal(value, everything[key])


def test_only_values_behind_a_trained_parameter_have_a_gradient():
    graph = model_of(frozen("residual", ["stem.weight", "stem.bias", "a.weight"])).graph
    assert INPUT not in graph.differentiated
    assert "stem" not in graph.differentiated and "a" not in graph.differentiated
    assert {"norm", "add", "b", "project", "head"} <= graph.differentiated
