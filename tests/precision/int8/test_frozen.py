"""Frozen parameters: bit for bit what they were, and nothing computed for them."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from socflower.precision import EngineSettings, Int8Model, NativeInt8Backend
from socflower.precision.int8.network import INPUT
from socflower.precision.int8.operators import ConvolutionOperator
from socflower.precision.int8.parameters import export_velocities
from tests.one_line import refused
from tests.precision.networks import (
    ALGORITHMS,
    ALWAYS,
    IMAGE,
    NETWORKS,
    STATISTICS,
    assert_same,
    batches,
    build,
    int8,
    state_of,
    train,
)


def frozen(name, names):
    """Return a network of which these parameters are frozen, and its state."""
    module = build(name)
    for parameter in names:
        module.get_parameter(parameter).requires_grad_(False)
    return module, state_of(name)


def changed(model, before):
    """Return the names of what differs from a state."""
    return [key for key, array in model.arrays().items() if (array != before[key]).any()]


def parameters_of(name):
    return [parameter for parameter, _ in build(name).named_parameters()]


@pytest.mark.parametrize("algorithm", ALGORITHMS.values(), ids=ALGORITHMS)
@given(st.data())
@settings(max_examples=8)
def test_any_frozen_parameters_keep_every_bit_and_the_others_go_the_way_they_would(algorithm, draw):
    """One step of the others is that of a network without frozen ones: the forward pass is the same, so is theirs."""
    name = draw.draw(st.sampled_from(sorted(NETWORKS)))
    names = parameters_of(name)
    chosen = draw.draw(st.sets(st.sampled_from(names), max_size=len(names) - 1))
    module, before = frozen(name, chosen)
    model = int8(module, algorithm)
    free = int8(name, algorithm)
    data = batches(3)
    exponents = {key: value for key, value in model.parameters.exponents.items() if key in chosen}
    for each in (model, free):
        train(each, data[:1])
    others = free.arrays()
    assert_same(
        model.arrays(), {key: before[key] if key in chosen else others[key] for key in others}
    )
    train(model, data[1:])
    after = model.arrays()
    for key in chosen:
        np.testing.assert_array_equal(after[key].view(np.int32), before[key].view(np.int32), key)
    assert exponents.items() <= model.parameters.exponents.items()
    assert not set(export_velocities(model.graph, model.parameters)) & set(chosen)


@pytest.mark.parametrize("kept", ["weight", "bias"])
def test_batch_norm_with_frozen_parameters_goes_on_with_its_statistics_as_in_torch(kept):
    names = [f"{layer}.{kept}" for layer in (1, 4)]
    module, before = frozen("normalised", names)
    model = int8(module)
    train(model, batches(2))
    assert set(changed(model, before)) == set(before) - set(names)


class Noted:
    """A convolution of the engine that notes which gradients are computed."""

    def __init__(self, plan, name, calls):
        self._plan = plan
        self._name = name
        self._calls = calls

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

    def noted(self, node, x, output, plan_of, engine):
        init(self, node, x, output, lambda batch: Noted(plan_of(batch), node.name, calls), engine)

    monkeypatch.setattr(ConvolutionOperator, "__init__", noted)
    train(int8(all_but("3.weight"), algorithm), batches(2))
    assert calls == {("3", "weight_gradient"), ("6", "input_gradient"), ("8", "input_gradient")}


def all_but(trained):
    return frozen("plain", [name for name in parameters_of("plain") if name != trained])[0]


@pytest.mark.parametrize("algorithm", ALGORITHMS.values(), ids=ALGORITHMS)
def test_a_bias_that_alone_trains(algorithm):
    for trained in ("3.bias", "0.bias"):
        model = int8(all_but(trained), algorithm)
        train(model, batches(2))
        assert changed(model, state_of("plain")) == [trained]


@pytest.mark.parametrize("make", [nn.GELU, lambda: nn.BatchNorm2d(8), lambda: nn.Conv2d(8, 8, 3)])
@pytest.mark.parametrize("below", [False, True])
def test_operators_in_fp32_keep_frozen_parameters_and_statistics_move(make, below):
    """Also where everything up to the operator is frozen (`below`), so that nothing goes backward through it."""
    layers = [nn.Conv2d(3, 8, 3), nn.ReLU(), make(), nn.AdaptiveAvgPool2d(2), nn.Flatten()]
    module = nn.Sequential(*layers, nn.Linear(32, 5))
    for name, parameter in module.named_parameters():
        parameter.requires_grad_(name.startswith("5.") or (not below and name.startswith("0.")))
    before = {key: value.numpy().copy() for key, value in module.state_dict().items()}
    moving = {name for name, each in module.named_parameters() if each.requires_grad}
    model = int8(module, options={"fp32_operators": ["2"]})
    train(model, batches(2))
    assert set(changed(model, before)) == moving | {
        key for key in before if key.endswith(STATISTICS)
    }


def test_a_frozen_network_is_refused_and_still_predicts():
    model, (images, labels) = int8(all_but("")), batches(1)[0]
    np.testing.assert_array_equal(model.predict(images), int8("plain").predict(images))
    refused(lambda: train(model, [(images, labels)]), "frozen", "requires_grad")


@pytest.mark.parametrize("algorithm", ALGORITHMS.values(), ids=ALGORITHMS)
def test_a_saved_model_keeps_what_is_frozen(tmp_path, algorithm):
    chosen = ["stem.weight", "a.weight", "norm.weight", "b.bias", "head.weight"]
    (module, state), data = frozen("residual", chosen), batches(4)
    model = int8(module, algorithm)
    train(model, data[:2])
    model.save(tmp_path / "model.npz")
    loaded = Int8Model.load(tmp_path / "model.npz", settings=EngineSettings(rescaling=ALWAYS))
    for each in (model, loaded):
        train(each, data[2:])
    assert_same(loaded.arrays(), model.arrays())
    assert not set(changed(loaded, state)) & set(chosen)
    model.load_state_dict(module.state_dict())
    np.testing.assert_array_equal(model.arrays()["stem.weight"], state["stem.weight"])


@pytest.mark.parametrize("name", NETWORKS)
def test_the_native_backend_hands_out_gradients_of_trained_parameters_alone(name):
    chosen = parameters_of(name)[1::2]
    weights = state_of(name)
    seen = []
    for module in (frozen(name, chosen)[0], build(name)):
        backend = NativeInt8Backend()
        backend.build(module, IMAGE)
        backend.load_weights(weights, seed=3)
        backend.train_step(*batches(1)[0], learning_rate=0.1, progress=0.0)
        seen.append(backend.pseudo_gradient(weights, learning_rate=0.1))
    some, everything = seen
    assert set(some) == set(everything) - set(chosen)
    assert_same(some, {key: everything[key] for key in some})


def test_only_values_behind_a_trained_parameter_have_a_gradient():
    module, _ = frozen("residual", ["stem.weight", "stem.bias", "a.weight"])
    graph = int8(module).graph
    assert INPUT not in graph.differentiated
    assert "stem" not in graph.differentiated and "a" not in graph.differentiated
    assert {"norm", "add", "b", "project", "head"} <= graph.differentiated
