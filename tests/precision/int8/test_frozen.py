"""Frozen parameters: bit for bit what they were, and nothing computed for them."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from socflower import Int8Trainer, int8_
from socflower.precision import (
    NITI,
    REAL_SCALES,
    EngineSettings,
    Int8Model,
    NativeInt8Backend,
    int8_algorithm,
)
from socflower.precision.int8.network import INPUT
from socflower.precision.int8.operators.convolution import ConvolutionOperator
from socflower.precision.int8.parameters import export_velocities
from socflower.training.trainer import TrainingSpan
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
from tests.seeded import built


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


@pytest.mark.few_cells(2)
@pytest.mark.parametrize("algorithm", ALGORITHMS.values(), ids=ALGORITHMS)
@given(st.data())
@settings(max_examples=4)
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
    # The module has frozen weights; the model has them as int8 only.
    in_int8 = chosen & set(model.parameters.weights)
    expected = {key: before[key] if key in chosen else others[key] for key in others}
    assert_same(model.arrays(), {key: each for key, each in expected.items() if key not in in_int8})
    held = {key: np.array(model.parameters.weights[key].data) for key in in_int8}
    train(model, data[1:])
    after = model.arrays()
    for key in chosen - in_int8:
        np.testing.assert_array_equal(after[key].view(np.int32), before[key].view(np.int32), key)
    for key in in_int8:
        weight = model.parameters.weights[key]
        np.testing.assert_array_equal(weight.data, held[key])
        assert weight.master is None and weight.velocity is None
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


@pytest.mark.few_cells(2)
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
    held = np.array(model.parameters.weights["stem.weight"].data)
    model.load_state_dict(model.state_dict())
    assert model.parameters.weights["stem.weight"].data is not held
    np.testing.assert_array_equal(model.parameters.weights["stem.weight"].data, held)
    doubled = {key: 2.0 * each for key, each in module.state_dict().items()}
    model.load_state_dict(doubled)
    np.testing.assert_array_equal(model.parameters.weights["stem.weight"].data, held)
    assert (
        model.parameters.exponents["stem.weight"] == loaded.parameters.exponents["stem.weight"] + 1
    )


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


class LowRank(nn.Module):
    """LoRA: a frozen linear layer beside two small ones, of which the second starts at zero."""

    def __init__(self, ins, outs, rank=8):
        super().__init__()
        self.base = nn.Linear(ins, outs)
        self.down = nn.Linear(ins, rank, bias=False)
        self.up = nn.Linear(rank, outs, bias=False)
        nn.init.zeros_(self.up.weight)
        self.base.requires_grad_(False)

    def forward(self, inputs):
        return self.base(inputs) + self.up(self.down(inputs))


def low_rank_case():
    random = np.random.default_rng(0)
    images = random.normal(size=(128, 192, 1, 1)).astype(np.float32)
    labels = images[:, :10, 0, 0].argmax(axis=1).astype(np.int32)
    layers = built(
        lambda: nn.Sequential(nn.Flatten(), LowRank(192, 256), nn.ReLU(), LowRank(256, 10)), 0
    )
    return layers, images, labels


def test_a_frozen_base_takes_a_quarter_of_its_fp32_bytes():
    module, _, _ = low_rank_case()
    model = int8(module, REAL_SCALES, shape=(192, 1, 1))
    of_base = [weight for name, weight in model.parameters.weights.items() if ".base." in name]
    held = sum(weight.data.nbytes for weight in of_base)
    in_fp32 = sum(4 * part.numel() for name, part in module.named_parameters() if ".base.w" in name)
    assert held <= 0.3 * in_fp32
    assert all(weight.master is None for weight in of_base)


RATE = 0.1
COUNT = 60


def losses_of_steps(module, images, labels, algorithm):
    model = int8(module, algorithm, shape=(192, 1, 1))
    return [
        model.train_step(images, labels, learning_rate=RATE, progress=step / COUNT).loss
        for step in range(COUNT)
    ]


def losses_of_trainer(module, images, labels, algorithm):
    trainer = Int8Trainer(algorithm=algorithm, learning_rate=RATE, schedule="constant")
    session = trainer.start(module, TrainingSpan(total_steps=COUNT, steps_per_epoch=COUNT))
    pair = torch.from_numpy(images), torch.from_numpy(labels)
    losses = [float(session.step([pair])) for _ in range(COUNT)]
    session.finish()
    return losses


def losses_of_torch(module, images, labels):
    trained = [part for part in module.parameters() if part.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=RATE, momentum=0.9)
    losses = []
    for _ in range(COUNT):
        made = module(torch.from_numpy(images))
        loss = nn.functional.cross_entropy(made, torch.from_numpy(labels).long())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def adapters(train, *settings):
    """Train adapters of a fresh network; return the losses. The base keeps its bits."""
    module, images, labels = low_rank_case()
    before = {name: part.clone() for name, part in module.named_parameters() if ".base." in name}
    losses = train(module, images, labels, *settings)
    for name, part in before.items():
        assert torch.equal(module.get_parameter(name), part)
    return losses


@pytest.mark.few_cells(2)
@pytest.mark.parametrize("name", ["real-scales", "adaptive-fixed-point", "int8_"])
@pytest.mark.parametrize("train", [losses_of_steps, losses_of_trainer])
def test_low_rank_adapters_that_start_at_zero_train_as_in_torch(name, train):
    """All along within 5 hundredths of the loss at the start, and within one of them at the end."""
    if name != "int8_":
        got = adapters(train, int8_algorithm(name, momentum=0.9))
    elif train is losses_of_steps:
        got = adapters(lambda module, *data: losses_of_torch(int8_(module), *data))
    else:
        # Every layer by itself: gradients of the values between them cross in FP32.
        got = adapters(lambda module, *data: losses_of_torch(layerwise(module), *data))
    expected = adapters(losses_of_torch)
    assert expected[-1] < 0.1 * expected[0]
    assert np.abs(np.subtract(got, expected)).max() < 0.05 * expected[0]
    assert abs(got[-1] - expected[-1]) < 0.01 * expected[0]


def layerwise(module):
    """Compute each adapted layer in int8."""
    for layer in (module[1], module[3]):
        int8_(layer)
    return module


@pytest.mark.parametrize("train", [losses_of_steps, losses_of_trainer])
def test_low_rank_adapters_that_start_at_zero_end_by_niti_no_higher_than_in_torch(train):
    """Its step is not torch's, so neither is the way there."""
    got = adapters(train, NITI)
    expected = adapters(losses_of_torch)
    assert max(got[-5:]) < expected[-1] + 0.01 * expected[0]


def test_an_all_zero_weight_gets_the_quantum_of_torchs_initial_values():
    """With that of a weight of 1, the first integer step would be as large as any weight."""
    module, _, _ = low_rank_case()
    exponents = int8(module, shape=(192, 1, 1)).parameters.exponents
    assert exponents["1.up.weight"] == exponents["3.up.weight"] == -8
