"""Two halves with window 0 are the undivided model, bit for bit; replays are by present weights, and once only."""

import copy
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from socflower.edgecloud.half_protocols import Weights
from socflower.edgecloud.runtime.back import TorchBack
from socflower.edgecloud.runtime.front import TorchFront
from socflower.model_graph.cut_points import capture_split
from socflower.model_graph.parts import random_streams
from socflower.model_graph.random_state import forked_generator
from tests.edgecloud.runtime.split_training import (
    LOSS,
    Optimizer,
    Source,
    adam,
    assert_same,
    assert_together,
    chain_split,
    halves,
    image_model,
    one_batch,
    sgd,
    train_locally,
)
from tests.one_line import refused


# Every two of them in every combination.
@pytest.mark.few_cells(2)
@pytest.mark.parametrize(
    ("optimizer", "keep_graph", "inplace"),
    [(sgd, True, True), (sgd, False, False), (adam, True, False), (adam, False, True)],
)
def test_window_0_is_local_training_with_dropout_norms_and_schedule(
    optimizer: Optimizer, keep_graph: bool, inplace: bool
) -> None:
    """Also by replay, since the weights are the same, the masks are drawn again, and statistics are left alone."""
    split = chain_split(inplace=inplace)
    before = split.model.state_dict()
    losses, expected = train_locally(split, 6, optimizer)
    assert any(not torch.equal(expected[name], before[name]) for name in expected)
    for cut in range(split.num_cuts + 1):
        pair = halves(split, cut, optimizer)
        assert [one_batch(*pair, batch, keep_graph=keep_graph) for batch in range(6)] == losses
        assert_together(pair, expected)


class PooledByFunctions(nn.Module):
    """A network whose pooling and activations are functions, with dropout as a module."""

    def __init__(self) -> None:
        super().__init__()
        with forked_generator(6):
            self.first, self.second = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 8, 3, padding=1)
            self.norm, self.drop, self.last = nn.BatchNorm2d(8), nn.Dropout(0.3), nn.Linear(8, 10)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = nn.functional.avg_pool2d(torch.relu(self.first(inputs)), 2)
        hidden = self.norm(self.second(hidden)) + hidden.repeat(1, 2, 1, 1)
        hidden = nn.functional.max_pool2d(nn.functional.relu_(hidden), 2)
        return self.last(self.drop(nn.functional.adaptive_avg_pool2d(hidden, 1).flatten(1)))


@pytest.mark.few_cells(2)
@pytest.mark.parametrize("name", ["lenet5", "resnet8", "vgg-tiny", "functions"])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_window_0_is_local_training_of_image_models(name: str, layout: torch.memory_format) -> None:
    """At every cut: after convolutions' activations and norms, after pooling, and where one pixel is left."""
    model, shape = (PooledByFunctions(), (3, 16, 16)) if name == "functions" else image_model(name)
    split = capture_split(model.to(memory_format=layout), shape)
    source = Source(shape, 10)
    losses, expected = train_locally(split, 3, sgd, source=source)
    for cut in range(split.num_cuts):
        pair = halves(split, cut, sgd, source)
        assert [one_batch(*pair, batch) for batch in range(3)] == losses
        assert_together(pair, expected)


def test_a_late_gradient_is_applied_to_the_features_of_its_batch_by_present_weights() -> None:
    """F22 against autograd on a copy of the front half: the vector-Jacobian product of the replayed features."""
    split, rng = chain_split(dropout=0.0), np.random.default_rng(0)
    front, _ = halves(split, 2, lambda weights: torch.optim.SGD(weights, lr=0.1))
    shapes = [front.forward(batch).shape for batch in range(3)]
    for batch, shape in enumerate(shapes):
        gradient, before = rng.normal(size=shape).astype(np.float32), front.weights()
        now = copy.deepcopy(split.model)
        now.load_state_dict(now.state_dict() | as_tensors(before))
        now.train()
        parameters = dict(now.named_parameters())
        names = [name for name in split.front_names(2) if name in parameters]
        features = capture_split(now, (6,)).front(2)(Source()(batch)[0])
        weights = [parameters[name] for name in names]
        expected = torch.autograd.grad(features, weights, torch.from_numpy(gradient))
        front.apply(batch, gradient)
        after, rate = front.weights(), 0.1 / (1 + 0.3 * batch)
        for name, change in zip(names, expected, strict=True):
            wanted = before[name] - rate * change.numpy()
            np.testing.assert_allclose(after[name], wanted, atol=1e-6)
        statistics = set(after) - set(names)
        assert all(np.array_equal(after[name], before[name]) for name in statistics)


def as_tensors(weights: Weights) -> dict[str, torch.Tensor]:
    return {name: torch.from_numpy(value) for name, value in weights.items()}


def test_a_replay_draws_the_masks_of_its_forward_pass() -> None:
    split = chain_split(dropout=0.5)
    front, _ = halves(split, split.num_cuts - 1, lambda weights: torch.optim.SGD(weights, lr=0.0))
    features = [front.forward(0), front.forward(1)]
    front.apply(0, None)
    front.apply(1, np.zeros_like(features[1]))
    assert np.array_equal(front.forward(0), features[0]) and not np.array_equal(
        features[0], features[1]
    )


def test_random_state_and_threads_of_others_are_undisturbed() -> None:
    split = chain_split(dropout=0.5)
    _, expected = train_locally(split, 12, sgd)
    pairs = [halves(split, cut, sgd) for cut in (1, 3)]
    state = torch.get_rng_state()
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda pair: [one_batch(*pair, batch) for batch in range(12)], pairs))
    for pair in pairs:
        assert_together(pair, expected)
    assert torch.equal(torch.get_rng_state(), state)
    with pytest.raises(ZeroDivisionError), random_streams(0, 0):
        _ = 1 / 0
    assert torch.equal(torch.get_rng_state(), state)


def test_each_half_holds_its_own_layers_only() -> None:
    split = chain_split()
    front, back = halves(split, 1, sgd)
    for half, names in ((front, split.front_names(1)), (back, split.back_names(1))):
        held = half.split.tensors()
        whole = {name for name, each in held.items() if each.shape == split.specs[name].shape}
        assert whole == set(names)
        assert not any(each.numel() for name, each in held.items() if name not in whole)
        refused(lambda used=half.split: TorchFront(used, 0, Source(), sgd), "copy()")  # type: ignore[misc]
        refused(half.split.copy, "copy")


def test_saved_halves_continue_as_if_nothing_had_happened() -> None:
    """With another cut before the restoring, and optimiser state."""
    split = chain_split()
    losses, expected = train_locally(split, 6, adam)
    first, second = halves(split, 2, adam), halves(split, 0, adam)
    assert [one_batch(*first, batch) for batch in range(3)] == losses[:3]
    one_batch(*second, 0)
    for half, content in zip(second, [half.save() for half in first], strict=True):
        half.restore(content)
        assert half.cut == 2 and half.save() == content
    assert [one_batch(*second, batch) for batch in range(3, 6)] == losses[3:]
    assert_together(second, expected)


def test_a_front_half_saved_with_a_batch_under_way_can_still_apply_its_gradient() -> None:
    (one, _), (other, _) = halves(chain_split(), 2, sgd), halves(chain_split(), 1, sgd)
    gradient = np.full(one.forward(0).shape, 0.5, np.float32)
    other.restore(one.save())
    for front in (one, other):
        front.apply(0, gradient)
    assert_same(one.weights(), as_tensors(other.weights()))


def test_what_was_not_saved_by_this_half_of_this_model_is_refused_and_changes_nothing() -> None:
    front, back = halves(chain_split(), 1, sgd)
    small = nn.Sequential(nn.Linear(6, 4), nn.ReLU(), nn.Linear(4, 3))
    other, _ = halves(capture_split(small, (6,)), 0, sgd)
    saved = front.save()
    for content, named in (
        (b"", "damaged"),
        (saved[:-40], "damaged"),
        (b"junk", "damaged"),
        (back.save(), "back half"),
        (other.save(), "front half"),
    ):
        refused(lambda content=content: front.restore(content), named)  # type: ignore[misc]
    assert front.save() == saved
    front.forward(0, keep_graph=True)
    refused(front.save, "[0]")


def test_loading_sets_own_weights_only() -> None:
    split, other = chain_split(), chain_split(seed=9).model.state_dict()
    front, _ = halves(split, 2, sgd)
    whole = {name: value.numpy() for name, value in other.items()}
    front.load(whole)
    assert_same(front.weights(), {name: other[name] for name in split.front_names(2)})
    for wrong, named in (
        ({name: each for name, each in whole.items() if name != "0.bias"}, "'0.bias'"),
        (whole | {"0.bias": np.zeros(3, np.float32)}, "(3,)"),
        (whole | {"0.bias": np.zeros(8)}, "float64"),
    ):
        refused(lambda wrong=wrong: front.load(wrong), "0.bias", named)  # type: ignore[misc]


def test_calls_that_do_not_fit_are_refused_and_change_nothing() -> None:
    front, back = halves(chain_split(), 1, sgd)
    front.forward(3)
    before = front.save()
    strange = np.zeros((2, 2), np.float32)
    refused(lambda: front.apply(3, strange), "batch 3", "(2, 2)")
    refused(lambda: front.export_layers(0), "[3]")
    assert front.save() == before
    back.export_layers(back.split.num_cuts)
    refused(lambda: back.step(4, [strange], np.zeros(2, np.int64)), "no layers", "batch 4")


def test_a_kept_graph_is_not_used_after_an_update() -> None:
    front, _ = halves(chain_split(), 1, sgd)
    zeros = np.zeros_like(front.forward(0, keep_graph=True))
    front.forward(1, keep_graph=True)
    front.apply(0, zeros)
    refused(lambda: front.apply(1, zeros), "graph", "batch 1")


def test_a_source_that_does_not_repeat_itself_is_noticed() -> None:
    sizes = iter((4, 3))

    def source(batch: int) -> Any:
        return torch.zeros(next(sizes), 6), np.zeros(4), np.zeros(4, np.int64)

    front = TorchFront(chain_split(), 1, source, sgd)
    zeros = np.zeros_like(front.forward(0))
    front._latest = None  # as after another batch
    refused(lambda: front.apply(0, zeros), "batch 0")


@pytest.mark.parametrize(
    ("features", "num_labels", "named"),
    [
        ([np.zeros((4, 8))], 4, ["float64"]),
        ([np.zeros((4, 7), np.float32)], 4, ["(4, 7)", "cut 1", "8"]),
        ([np.zeros((4, 8), np.float32)], 5, ["4, 5"]),
    ],
)
def test_features_that_do_not_fit_are_refused(
    features: list[np.ndarray], num_labels: int, named: list[str]
) -> None:
    _, back = halves(chain_split(), 1, sgd)
    before = back.save()
    refused(lambda: back.step(0, features, np.zeros(num_labels)), *named)
    assert back.save() == before


STRANGE = torch.zeros(1, requires_grad=True)


@pytest.mark.parametrize(
    ("optimizer", "loss", "factor", "named"),
    [
        (sgd, lambda outputs, targets: outputs.sum(1), 1.0, ["loss", "(4,)"]),
        (sgd, lambda outputs, targets: torch.tensor(1.0), 1.0, ["loss", "gradient"]),
        (sgd, LOSS, -1.0, ["schedule", "batch 0", "-1"]),
        (
            lambda weights: torch.optim.SGD([*weights][:1], lr=0.1),
            LOSS,
            1.0,
            ["SGD", "norm.weight"],
        ),
        (lambda weights: torch.optim.SGD([STRANGE], lr=0.1), LOSS, 1.0, ["SGD", "parameters"]),
    ],
)
def test_losses_schedules_and_optimisers_that_cannot_be_are_refused(
    optimizer: Optimizer, loss: Any, factor: float, named: list[str]
) -> None:
    features, labels = [np.ones((4, 8), np.float32)], np.zeros(4, np.int64)

    def step() -> None:
        back = TorchBack(chain_split(), 1, optimizer, loss, schedule=lambda batch: factor)
        back.step(0, features, labels)

    refused(step, *named)


def test_an_optimiser_with_state_that_is_no_tensor_is_refused() -> None:
    back = TorchBack(chain_split(), 1, Odd, LOSS)
    back.step(0, [np.ones((4, 8), np.float32)], np.zeros(4, np.int64))
    refused(back.save, "Odd", "note", "str")


class Odd(torch.optim.SGD):
    """An optimiser with state that is no tensor."""

    def __init__(self, weights: Iterable[nn.Parameter]) -> None:
        super().__init__(weights, lr=0.1)

    def step(self, closure: object = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for weight in group["params"]:
                self.state[weight]["note"] = "seen"
