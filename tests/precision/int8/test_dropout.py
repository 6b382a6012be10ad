"""Dropout in int8: the mean that it keeps, the gradient that it passes, and what its random numbers follow from."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from socflower.precision import ADAPTIVE_FIXED_POINT, EngineSettings, Int8Model
from socflower.precision.int8 import network as ir
from socflower.precision.int8.from_torch import capture_network
from tests.one_line import refused
from tests.precision.int8.test_gradients import cosine, gradients
from tests.precision.networks import (
    ALWAYS,
    CLASSES,
    IMAGE,
    assert_same,
    batches,
    build,
    int8,
    train,
)

DROPOUTS = (nn.Dropout, nn.Dropout2d)


def first(module):
    """Return a network that does this to the images, and then nothing but make logits."""
    return nn.Sequential(module, nn.Flatten(), nn.Linear(int(np.prod(IMAGE)), CLASSES))


def kinds(module):
    return [node.kind for node in capture_network(module, IMAGE).graph.nodes]


def drawn(p, seed, images, *, channelwise=False):
    """Return (input, output) of a step's dropout as real numbers, (height, width, batch, channels)."""
    model = int8(first(nn.Dropout2d(p) if channelwise else nn.Dropout(p)))
    model.train_step(images, np.zeros(len(images), np.int32), progress=0.0, seed=seed)
    tensors = [model._programs[len(images)].tensors[name] for name in (ir.INPUT, "0")]
    return [np.ldexp(each.data[..., : IMAGE[0]].astype(float), each.exponent) for each in tensors]


@pytest.mark.few_cells(2)
@pytest.mark.parametrize("p", [0.1, 0.3, 0.5, 0.9])
@pytest.mark.parametrize("channelwise", [False, True])
def test_the_mean_over_masks_is_the_value_but_for_the_rounding_of_its_multiple(p, channelwise):
    """Of 3 channels of 100 pixels of 64 images in 12 steps; kept values differ from x / (1 - p) by half a quantum."""
    images = np.random.default_rng(5).standard_normal((64, *IMAGE)).astype(np.float32)
    kept = []
    total = 0.0
    for seed in range(12):
        x, y = drawn(p, seed, images, channelwise=channelwise)
        mask = y != 0
        quantum = np.abs(y[mask]).min()
        away = np.abs(y - x / (1 - p))[mask]
        assert away.max() <= (0.5 + 1e-4) * quantum
        # Values that round to zero would pass for dropped ones.
        large = np.abs(x) > 2 * quantum
        kept.append(mask[large].mean())
        total = total + y
    draws = 12 * 64 * 3 * (1 if channelwise else 100)
    assert abs(np.mean(kept) - (1 - p)) < 4 * np.sqrt(p * (1 - p) / draws) + 1e-3
    slope = (total / 12 * x).sum() / (x * x).sum()
    assert slope == pytest.approx(1.0, abs=5 * np.sqrt(p / (1 - p) / draws) + 1e-3)


def test_where_1_minus_p_is_a_power_of_two_kept_values_are_exact():
    images = batches(1)[0][0]
    for p in (0.5, 0.75, 0.875):
        x, y = drawn(p, 3, images)
        assert set(np.unique(y[x != 0] / x[x != 0])) == {0.0, 1 / (1 - p)}


def test_channels_are_dropped_as_a_whole_and_each_image_for_itself():
    images = np.ones((8, *IMAGE), np.float32)
    _, y = drawn(0.5, 1, images, channelwise=True)
    assert (y == y[:1, :1]).all()
    assert 0 < (y[0, 0] == 0).sum() < y[0, 0].size


class Given(nn.Module):
    """A dropout in FP32 that keeps what the engine's generator says."""

    def __init__(self, dropout, place, seed):
        super().__init__()
        self.dropout = dropout
        self.place = place
        self.seed = seed

    def forward(self, x):
        p = self.dropout.p
        channelwise = isinstance(self.dropout, nn.Dropout2d)
        shape = x.shape[:2] if channelwise else (*x.shape[2:], *x.shape[:2])
        seeds = np.random.SeedSequence([self.seed, self.place])
        draws = np.random.Generator(np.random.Philox(seeds)).integers(0, 2**32, shape, np.uint32)
        kept = torch.from_numpy(draws >= round(p * 2**32))
        if x.dim() == 4:
            kept = kept[:, :, None, None] if channelwise else kept.permute(2, 3, 0, 1)
        return x * kept / (1 - p)


def test_gradients_are_those_of_autograd_with_the_same_masks():
    """Summed over batches, since rounding errors are unbiased."""
    module = build("dropped", seed=1)
    sums = {}
    places = {node.name: place for place, node in enumerate(int8(module).graph.nodes)}
    for seed in range(16):
        parts = [
            Given(part, places[name], seed) if isinstance(part, DROPOUTS) else part
            for name, part in module.named_children()
        ]
        pairs = gradients(module, nn.Sequential(*parts), seed=seed)
        for name, pair in pairs.items():
            sums[name] = sums.get(name, 0.0) + np.stack(pair)
    for name, (got, expected) in sums.items():
        # Not a bias before a BatchNorm.
        if np.abs(expected).max() >= 1e-4:
            assert cosine(got, expected) > 0.97, name
            assert np.linalg.norm(got) == pytest.approx(np.linalg.norm(expected), rel=0.15), name


def test_evaluation_is_that_of_the_network_without_dropout():
    module = build("dropped")
    images = batches(1)[0][0]
    parts = [nn.Identity() if isinstance(part, DROPOUTS) else part for part in module]
    np.testing.assert_array_equal(
        int8(module).predict(images), int8(nn.Sequential(*parts)).predict(images)
    )


@given(st.integers(0, 2**62), st.integers(0, 2**62))
@settings(max_examples=15)
def test_masks_follow_from_the_seed_alone(one, other):
    images = np.ones((2, *IMAGE), np.float32)
    first_time = drawn(0.5, one, images)[1]
    again = drawn(0.5, one, images)[1]
    np.testing.assert_array_equal(first_time, again)
    assert one == other or (first_time != drawn(0.5, other, images)[1]).any()


def test_steps_without_a_seed_drop_differently_and_a_loaded_model_goes_on(tmp_path):
    whole = int8("dropped")
    data = batches(1) * 4
    first_loss, second_loss = train(whole, data[:2], rate=0.0)
    assert first_loss != second_loss
    whole.save(tmp_path / "model.npz")
    other = Int8Model.load(tmp_path / "model.npz", settings=EngineSettings(rescaling=ALWAYS))
    assert train(whole, data[2:]) == train(other, data[2:])
    assert_same(whole.arrays(), other.arrays())


def test_with_p_0_nothing_is_there_and_with_p_1_nothing_is_left():
    assert kinds(first(nn.Dropout2d(0.0))) == ["convolution"]
    layers = [nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Dropout(1.0), nn.Flatten()]
    model = int8(nn.Sequential(*layers, nn.Linear(4 * 64, CLASSES)), ADAPTIVE_FIXED_POINT)
    before = model.arrays()
    train(model, batches(1), rate=0.1)
    after = model.arrays()
    assert [name for name in before if (before[name] != after[name]).any()] == ["4.bias"]


def test_a_dropout_of_a_frozen_part_still_drops():
    module, (batch,) = build("dropped"), batches(1)
    module[:13].requires_grad_(False)
    model = int8(module, ADAPTIVE_FIXED_POINT)
    one, other = (model.train_step(*batch, learning_rate=0.0, seed=seed).loss for seed in (1, 2))
    assert one != other


class Functional(nn.Module):
    """Dropout by a function, as older networks have it."""

    def __init__(self, dropout):
        super().__init__()
        self.conv, self.head, self.dropout = nn.Conv2d(3, 8, 3), nn.Linear(8 * 64, CLASSES), dropout

    def forward(self, x):
        return self.head(self.dropout(self, torch.relu(self.conv(x))).flatten(1))


@pytest.mark.parametrize("function", [
    lambda m, x: nn.functional.dropout(x, 0.3, m.training),
    lambda m, x: nn.functional.dropout(x, training=m.training, p=0.3),
    lambda m, x: nn.functional.dropout2d(x, 0.3, m.training),
])  # fmt: skip
def test_functions_that_drop_in_training_are_understood_in_either_mode(function):
    for training in (True, False):
        _, dropout, _ = capture_network(Functional(function).train(training), IMAGE).graph.nodes
        assert (dropout.kind, dropout.p) == ("dropout", 0.3)


def test_a_function_that_drops_in_evaluation_too_is_refused_and_one_that_never_does_is_left_out():
    always, never = (
        Functional(lambda m, x, on=on: nn.functional.dropout(x, 0.3, on)) for on in (True, False)
    )
    refused(lambda: kinds(always), "dropout", "evaluation", "training=self.training")
    assert kinds(never) == ["convolution", "convolution"]


def test_a_dropout_in_evaluation_mode_rests_in_a_network_that_trains():
    module = first(nn.Dropout(0.5))
    module[0].eval()
    assert kinds(module) == ["convolution"]
    assert not module[0].training
    assert kinds(module.eval()) == ["dropout", "convolution"]


def test_one_dropout_may_be_called_twice_and_drops_differently():
    drop = nn.Dropout(0.5)
    model = int8(first(nn.Sequential(drop, drop)))
    images = np.ones((4, *IMAGE), np.float32)
    model.train_step(images, np.zeros(4, np.int32), progress=0.0)
    tensors = model._programs[4].tensors
    one, both = (tensors[node.name].data[..., :3] for node in model.graph.nodes[:2])
    assert one.any() and both.any() and (one != 0).sum() > (both != 0).sum()


def test_tracing_draws_nothing_from_torchs_generator():
    module = Functional(lambda m, x: nn.functional.dropout(x, 0.3, m.training))
    before = torch.get_rng_state()
    capture_network(module, IMAGE)
    assert torch.equal(torch.get_rng_state(), before)
