"""Dropout in int8: the mean that it keeps, the gradient that it passes, and what its random numbers follow from."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from socflower import _int8
from socflower.errors import ConfigError
from socflower.precision import (
    ADAPTIVE_FIXED_POINT,
    NITI,
    EngineSettings,
    Int8Model,
    RescalingPolicy,
)
from socflower.precision.int8 import network as ir
from socflower.precision.int8.from_torch import capture_network
from socflower.precision.operator_costs import profile_operators
from tests.precision.networks import CLASSES, IMAGE, batches, build

ALWAYS = RescalingPolicy(adaptive=False)
DROPOUTS = (nn.Dropout, nn.Dropout2d)


def model_of(module, algorithm=NITI, **changes):
    engine = EngineSettings(**{"rescaling": ALWAYS, **changes})
    return Int8Model.from_module(module, input_shape=IMAGE, algorithm=algorithm, settings=engine)


def first(module):
    """Return a network that does this to the images, and then nothing but make logits."""
    head = nn.Linear(int(np.prod(IMAGE)), CLASSES)
    with torch.no_grad():
        head.weight.copy_(torch.linspace(-0.1, 0.1, head.weight.numel()).reshape(head.weight.shape))
        head.bias.zero_()
    return nn.Sequential(module, nn.Flatten(), head)


def drawn(p, seed, images, *, channelwise=False):
    """Return (input, output) of a step's dropout as real numbers, (height, width, batch, channels)."""
    model = model_of(first(nn.Dropout2d(p) if channelwise else nn.Dropout(p)))
    model.train_step(images, np.zeros(len(images), np.int32), progress=0.0, seed=seed)
    tensors = model._programs[len(images)].tensors
    return [
        np.ldexp(tensors[name].data[..., : IMAGE[0]].astype(np.float64), tensors[name].exponent)
        for name in (ir.INPUT, "0")
    ]


@pytest.mark.parametrize("p", [0.1, 0.3, 0.5, 0.9])
@pytest.mark.parametrize("channelwise", [False, True])
def test_the_mean_over_masks_is_the_value_but_for_the_rounding_of_its_multiple(p, channelwise):
    """Of 3 channels of 100 pixels of 64 images in 12 steps; kept values differ from x / (1 - p) by half a quantum."""
    images = np.random.default_rng(5).standard_normal((64, *IMAGE)).astype(np.float32)
    kept, total = [], 0.0
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
    """A dropout in FP32 that keeps what it is told to."""

    def __init__(self, dropout, place, seed):
        super().__init__()
        self.dropout, self.place, self.seed = dropout, place, seed

    def forward(self, x):
        channelwise = isinstance(self.dropout, nn.Dropout2d)
        shape = x.shape[:2] if channelwise or x.dim() == 2 else (*x.shape[2:], *x.shape[:2])
        draws = np.random.Generator(
            np.random.Philox(np.random.SeedSequence([self.seed, self.place]))
        )
        kept = torch.from_numpy(
            draws.integers(0, 2**32, shape, dtype=np.uint32) >= round(self.dropout.p * 2**32)
        )
        kept = (
            kept.permute(2, 3, 0, 1)
            if kept.dim() == 4
            else kept[:, :, None, None]
            if channelwise
            else kept
        )
        return x * kept / (1 - self.dropout.p)


def test_gradients_are_those_of_autograd_with_the_same_masks():
    """Summed over batches, since rounding errors are unbiased."""
    sums = {}
    for seed in range(16):
        module = build("dropped", seed=1)
        images, labels = batches(1, size=48, seed=seed)[0]
        model = model_of(module, ADAPTIVE_FIXED_POINT)
        for (
            weight
        ) in model.parameters.weights.values():  # torch at the weights that int8 computes with
            weight.master[...] = np.ldexp(weight.data.astype(np.float32), weight.exponent)
        before = model.state_dict()
        module.load_state_dict(before)
        places = {node.name: place for place, node in enumerate(model.graph.nodes)}
        reference = nn.Sequential(
            *(
                Given(part, places[name], seed) if isinstance(part, DROPOUTS) else part
                for name, part in module.named_children()
            )
        ).train()
        nn.functional.cross_entropy(
            reference(torch.from_numpy(images)), torch.from_numpy(labels).long()
        ).backward()
        model.train_step(images, labels, learning_rate=1e-3, seed=seed)
        after = model.state_dict()
        for name, parameter in module.named_parameters():
            pair = np.stack(
                [
                    ((before[name] - after[name]).double() / 1e-3).numpy(),
                    parameter.grad.double().numpy(),
                ]
            )
            sums[name] = sums.get(name, 0.0) + pair
    for name, (got, expected) in sums.items():
        if np.abs(expected).max() < 1e-4:  # a bias before a BatchNorm
            continue
        cosine = (got * expected).sum() / np.sqrt((got * got).sum() * (expected * expected).sum())
        assert cosine > 0.97, name
        assert np.linalg.norm(got) == pytest.approx(np.linalg.norm(expected), rel=0.15), name


def test_evaluation_is_that_of_the_network_without_dropout():
    module, images = build("dropped"), batches(1)[0][0]
    without = nn.Sequential(
        *(nn.Identity() if isinstance(part, DROPOUTS) else part for part in module)
    )
    np.testing.assert_array_equal(
        model_of(module).predict(images), model_of(without).predict(images)
    )


@given(st.integers(0, 2**62), st.integers(0, 2**62))
@settings(max_examples=15)
def test_masks_follow_from_the_seed_alone(one, other):
    images = np.ones((2, *IMAGE), np.float32)
    first_time, again = drawn(0.5, one, images)[1], drawn(0.5, one, images)[1]
    np.testing.assert_array_equal(first_time, again)
    assert one == other or (first_time != drawn(0.5, other, images)[1]).any()


def test_steps_without_a_seed_drop_differently_and_a_loaded_model_goes_on(tmp_path):
    whole, data = model_of(build("dropped")), batches(1) * 4
    results = [whole.train_step(*batch, learning_rate=0.0, progress=0.0) for batch in data[:2]]
    assert results[0] != results[1]
    whole.save(tmp_path / "model.npz")
    other = Int8Model.load(tmp_path / "model.npz", settings=EngineSettings(rescaling=ALWAYS))
    for batch in data[2:]:
        assert whole.train_step(*batch, progress=0.0) == other.train_step(*batch, progress=0.0)
    for name, array in whole.arrays().items():
        np.testing.assert_array_equal(array, other.arrays()[name])


@pytest.mark.parametrize(
    "changes",
    [
        *({"kernel": kernel} for kernel in _int8.available_kernels()),
        {"num_threads": 2},
        {"reuse_graph": False},
    ],
    ids=str,
)
def test_no_setting_of_the_machine_changes_what_is_dropped(changes):
    expected, model = model_of(build("dropped")), model_of(build("dropped"), **changes)
    for index, batch in enumerate(batches(3)):
        assert model.train_step(*batch, progress=index / 3) == expected.train_step(
            *batch, progress=index / 3
        )


def test_with_p_0_nothing_is_there_and_with_p_1_nothing_is_left():
    assert [node.name for node in capture_network(first(nn.Dropout2d(0.0)), IMAGE).graph.nodes] == [
        "2"
    ]
    module = nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Dropout(1.0), nn.Flatten(), nn.Linear(4 * 64, CLASSES)
    )
    model = model_of(module, ADAPTIVE_FIXED_POINT)
    before = model.state_dict()
    model.train_step(*batches(1)[0], learning_rate=0.1)
    after = model.state_dict()
    assert [name for name in before if not torch.equal(before[name], after[name])] == ["4.bias"]


def test_a_dropout_of_a_frozen_part_still_drops():
    module = build("dropped")
    for name, parameter in module.named_parameters():
        parameter.requires_grad_(name.startswith("13."))
    model = model_of(module)
    one, other = (
        model.train_step(*batches(1)[0], learning_rate=0.0, progress=0.0, seed=seed).loss
        for seed in (1, 2)
    )
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
        nodes = capture_network(Functional(function).train(training), IMAGE).graph.nodes
        assert [(node.kind, getattr(node, "p", 0.3)) for node in nodes] == [
            ("convolution", 0.3),
            ("dropout", 0.3),
            ("convolution", 0.3),
        ]


def test_a_function_that_drops_in_evaluation_too_is_refused_and_one_that_never_does_is_left_out():
    with pytest.raises(
        ConfigError, match=r"dropout: .* goes on in evaluation: give it training=self.training"
    ):
        capture_network(Functional(lambda m, x: nn.functional.dropout(x, 0.3)), IMAGE)
    never = Functional(lambda m, x: nn.functional.dropout(x, 0.3, False))
    assert [node.kind for node in capture_network(never, IMAGE).graph.nodes] == [
        "convolution",
        "convolution",
    ]


def test_a_dropout_in_evaluation_mode_rests_in_a_network_that_trains():
    module = first(nn.Dropout(0.5))
    module[0].eval()
    assert [node.kind for node in capture_network(module, IMAGE).graph.nodes] == ["convolution"]
    assert not module[0].training
    assert [node.kind for node in capture_network(module.eval(), IMAGE).graph.nodes] == [
        "dropout",
        "convolution",
    ]


def test_one_dropout_may_be_called_twice_and_drops_differently():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.drop, self.head = nn.Dropout(0.5), nn.Linear(300, CLASSES)

        def forward(self, x):
            return self.head(self.drop(self.drop(x)).flatten(1))

    model = model_of(Twice())
    images = np.ones((4, *IMAGE), np.float32)
    model.train_step(images, np.zeros(4, np.int32), progress=0.0)
    tensors = model._programs[4].tensors
    one, both = (tensors[node.name].data[..., :3] for node in model.graph.nodes[:2])
    assert one.any() and both.any() and (one != 0).sum() > (both != 0).sum()


def test_a_network_with_dropout_can_be_profiled():
    profile = profile_operators(first(nn.Dropout2d(0.5)), IMAGE, 4, repeats=1)
    assert [entry.name for entry in profile.latencies] == ["0", "2"]


def test_tracing_draws_nothing_from_torchs_generator():
    module = Functional(lambda m, x: nn.functional.dropout(x, 0.3, m.training))
    before = torch.get_rng_state()
    capture_network(module, IMAGE)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_probability_lies_in_0_to_1():
    with pytest.raises(ConfigError, match=r"graph: d has p = 1.5; it must lie in \[0, 1\]"):
        ir.Graph(
            input_shape=IMAGE, nodes=(ir.Dropout(name="d", inputs=(ir.INPUT,), shape=IMAGE, p=1.5),)
        )
