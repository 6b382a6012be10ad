"""Two halves with window 0 are the undivided model, bit for bit; replays are by present weights, and once only."""

import copy
import threading
from collections.abc import Callable, Iterable, Iterator

import numpy as np
import pytest
import torch
from torch import nn

from socflower.edgecloud.runtime.back import TorchBack
from socflower.edgecloud.runtime.front import TorchFront
from socflower.errors import ConfigError
from socflower.model_graph.cut_points import capture_split
from socflower.model_graph.parts import random_streams
from socflower.model_graph.random_state import forked_generator
from tests.edgecloud.runtime.split_training import (
    LOSS,
    Source,
    adam,
    assert_same,
    chain_split,
    halves,
    image_model,
    one_batch,
    sgd,
    train_locally,
)


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("optimizer", "keep_graph", "inplace"),
    [
        (sgd, True, True),
        (sgd, False, False),
        (adam, True, False),
        (adam, False, True),
    ],
)  # every two of them in every combination
def test_window_0_is_local_training_with_dropout_norms_and_schedule(
    optimizer: Callable[..., torch.optim.Optimizer],
    keep_graph: bool,
    inplace: bool,
) -> None:
    """Also by replay, since the weights are the same, the masks are drawn again, and statistics are left alone."""
    split = chain_split(inplace=inplace)
    losses, expected = train_locally(split, 6, optimizer)
    assert any(not torch.equal(expected[name], split.model.state_dict()[name]) for name in expected)
    for cut in range(split.num_cuts + 1):
        front, back = halves(split, cut, optimizer)
        assert [
            one_batch(front, back, batch, keep_graph=keep_graph) for batch in range(6)
        ] == losses
        assert_same({**front.weights(), **back.weights()}, expected)


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


@pytest.mark.parametrize("name", ["lenet5", "resnet8", "vgg-tiny", "functions"])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_window_0_is_local_training_of_image_models(name: str, layout: torch.memory_format) -> None:
    """At every cut: after convolutions' activations and norms, after pooling, and where one pixel is left."""
    model, shape = (PooledByFunctions(), (3, 16, 16)) if name == "functions" else image_model(name)
    split = capture_split(model.to(memory_format=layout), shape)
    source = Source(shape, 10)
    losses, expected = train_locally(split, 3, sgd, source=source)
    for cut in range(split.num_cuts):
        front, back = halves(split, cut, sgd, source)
        assert [one_batch(front, back, batch) for batch in range(3)] == losses
        assert_same({**front.weights(), **back.weights()}, expected)


def test_a_late_gradient_is_applied_to_the_features_of_its_batch_by_present_weights() -> None:
    """F22 against autograd on a copy of the front half: the vector-Jacobian product of the replayed features."""
    split = chain_split(dropout=0.0)
    front, _ = halves(split, 2, lambda weights: torch.optim.SGD(weights, lr=0.1))
    rng = np.random.default_rng(0)
    gradients = {
        batch: rng.normal(size=front.forward(batch).shape).astype(np.float32) for batch in range(3)
    }
    for batch in range(3):
        now = copy.deepcopy(split.model)
        now.load_state_dict(
            {**now.state_dict(), **{k: torch.from_numpy(v) for k, v in front.weights().items()}}
        )
        now.train()
        names = [name for name in split.front_names(2) if name in dict(now.named_parameters())]
        features = capture_split(now, (6,)).front(2)(Source()(batch)[0])
        expected = torch.autograd.grad(
            features,
            [dict(now.named_parameters())[name] for name in names],
            torch.from_numpy(gradients[batch]),
        )
        before = front.weights()
        front.apply(batch, gradients[batch])
        after = front.weights()
        rate = 0.1 / (1 + 0.3 * batch)
        for name, gradient in zip(names, expected, strict=True):
            np.testing.assert_allclose(
                after[name], before[name] - rate * gradient.numpy(), atol=1e-6
            )
        assert all(
            np.array_equal(after[name], before[name]) for name in after if name not in names
        )  # statistics


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
    threads = [
        threading.Thread(target=lambda pair=pair: [one_batch(*pair, batch) for batch in range(12)])
        for pair in pairs
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    for front, back in pairs:
        assert_same({**front.weights(), **back.weights()}, expected)
    assert torch.equal(torch.get_rng_state(), state)
    with pytest.raises(ZeroDivisionError), random_streams(0, 0):
        _ = 1 / 0
    assert torch.equal(torch.get_rng_state(), state)


def test_each_half_holds_its_own_layers_only() -> None:
    split = chain_split()
    front, back = halves(split, 1, sgd)
    for half, names in ((front, split.front_names(1)), (back, split.back_names(1))):
        held = half.split.tensors()
        assert {
            name for name, tensor in held.items() if tensor.shape == split.specs[name].shape
        } == set(names)
        assert all(not tensor.numel() for name, tensor in held.items() if name not in names)
        with pytest.raises(
            ConfigError, match=r"is another half's already; give each half a copy\(\)"
        ):
            TorchFront(half.split, 0, Source(), sgd)
        with pytest.raises(
            ConfigError, match="belongs to a half, which has released some layers; copy it before"
        ):
            half.split.copy()


def test_saved_halves_go_on_as_if_nothing_had_happened() -> None:
    """With another cut before the restoring, optimiser state, and a batch in flight."""
    split = chain_split()
    losses, expected = train_locally(split, 6, adam)
    first = halves(split, 2, adam)
    assert [one_batch(*first, batch) for batch in range(3)] == losses[:3]
    saved = [half.save() for half in first]
    second = halves(split, 0, adam)
    one_batch(*second, 0)
    for half, content in zip(second, saved, strict=True):
        half.restore(content)
        assert half.cut == 2 and half.save() == content
    assert [one_batch(*second, batch) for batch in range(3, 6)] == losses[3:]
    assert_same({**second[0].weights(), **second[1].weights()}, expected)


def test_a_front_half_saved_with_a_batch_under_way_can_still_apply_its_gradient() -> None:
    split = chain_split()
    results = []
    for restores in (False, True):
        front, _ = halves(split, 2, sgd)
        shape = front.forward(0).shape
        if restores:
            saved = front.save()
            front, _ = halves(split, 1, sgd)
            front.restore(saved)
        front.apply(0, np.full(shape, 0.5, np.float32))
        results.append(front.weights())
    assert_same(results[0], {name: torch.from_numpy(value) for name, value in results[1].items()})


def test_what_was_not_saved_by_this_half_of_this_model_is_refused_and_changes_nothing() -> None:
    split = chain_split()
    front, back = halves(split, 1, sgd)
    other, _ = halves(
        capture_split(nn.Sequential(nn.Linear(6, 4), nn.ReLU(), nn.Linear(4, 3)), (6,)), 0, sgd
    )
    saved = front.save()
    for content, match in (
        (b"", "is damaged"),
        (saved[:-40], "is damaged"),
        (b"junk", "is damaged"),
        (back.save(), "saved is the back half of model"),
        (other.save(), "saved is the front half"),
    ):
        with pytest.raises(ConfigError, match=match) as error:
            front.restore(content)
        assert "\n" not in str(error.value)
    assert front.save() == saved
    front.forward(0, keep_graph=True)
    with pytest.raises(
        ConfigError, match=r"cannot be saved while the graphs of batches \[0\] are kept"
    ):
        front.save()


def test_loading_sets_own_weights_only() -> None:
    split, other = chain_split(), capture_split(chain_split(seed=9).model, (6,))
    front, _ = halves(split, 2, sgd)
    whole = {name: value.numpy() for name, value in other.model.state_dict().items()}
    front.load(whole)
    assert_same(
        front.weights(), {name: torch.from_numpy(whole[name]) for name in split.front_names(2)}
    )
    for wrong, match in (
        ({k: v for k, v in whole.items() if k != "0.bias"}, "'0.bias' is missing"),
        ({**whole, "0.bias": np.zeros(3, np.float32)}, r"0.bias is float32 of shape \(3,\), it"),
        ({**whole, "0.bias": np.zeros(8)}, "0.bias is float64"),
    ):
        with pytest.raises(ConfigError, match=match):
            front.load(wrong)


def test_gradients_that_do_not_fit_are_refused_and_change_nothing() -> None:
    front, _ = halves(chain_split(), 1, sgd)
    shape = front.forward(3).shape
    before = front.save()
    for call, match in (
        (
            lambda: front.apply(4, np.zeros(shape, np.float32)),
            r"batch 4, which is not under way; those are \[3\]",
        ),
        (
            lambda: front.apply(3, np.zeros((2, 2), np.float32)),
            r"the gradient for batch 3 has shape \(2, 2\)",
        ),
        (lambda: front.forward(3), "batch 3 went forward already"),
        (lambda: front.export_layers(0), r"cannot move while batches \[3\] wait"),
        (lambda: front.train_alone(4), "cannot be trained by the front half alone: it is cut at 1"),
    ):
        with pytest.raises(ConfigError, match=match):
            call()
    assert front.save() == before


def test_a_kept_graph_is_not_used_after_an_update() -> None:
    front, _ = halves(chain_split(), 1, sgd)
    zeros = np.zeros_like(front.forward(0, keep_graph=True))
    front.forward(1, keep_graph=True)
    front.apply(0, zeros)
    with pytest.raises(
        ConfigError, match="the graph of batch 1 was kept, but weights were updated since"
    ):
        front.apply(1, zeros)


def test_a_source_that_does_not_repeat_itself_is_noticed() -> None:
    sizes = iter((4, 3))
    front = TorchFront(
        chain_split(),
        1,
        lambda batch: (torch.zeros(next(sizes), 6), np.zeros(4), np.zeros(4, np.int64)),
        sgd,
    )
    zeros = np.zeros_like(front.forward(0))
    front._latest = None  # as after another batch
    with pytest.raises(ConfigError, match="batch 0 is another one in its replay"):
        front.apply(0, zeros)


@pytest.mark.parametrize(
    ("features", "labels", "match"),
    [
        ([], np.zeros(4), "batch 0 came without features"),
        ([np.zeros((4, 8))], np.zeros(4), "are float64 of shape"),
        (
            [np.zeros((4, 7), np.float32)],
            np.zeros(4),
            r"shape \(4, 7\); at cut 1 they are float32 of shape \(samples, 8\)",
        ),
        ([np.zeros((4, 8), np.float32)], np.zeros(5), "different numbers of samples: 4, 5"),
    ],
)
def test_features_that_do_not_fit_are_refused(
    features: list[np.ndarray], labels: np.ndarray, match: str
) -> None:
    _, back = halves(chain_split(), 1, sgd)
    before = back.save()
    with pytest.raises(ConfigError, match=match):
        back.step(0, features, labels)
    assert back.save() == before


def test_losses_schedules_and_optimisers_that_cannot_be_are_refused() -> None:
    split = chain_split()
    features, labels = [np.ones((4, 8), np.float32)], np.zeros(4, np.int64)
    for loss, match in (
        (lambda outputs, targets: outputs.sum(1), r"the loss is a tensor of shape \(4,\);"),
        (lambda outputs, targets: torch.tensor(1.0), "without a gradient"),
    ):
        with pytest.raises(ConfigError, match=match):
            TorchBack(split.copy(), 1, sgd, loss).step(0, features, labels)
    with pytest.raises(ConfigError, match=r"schedule: batch 0: factor = -1\.0 must be 0 or more"):
        TorchBack(split.copy(), 1, sgd, LOSS, schedule=lambda batch: -1.0).step(0, features, labels)
    for factory in (
        lambda weights: torch.optim.SGD(list(weights)[:1], lr=0.1),
        lambda weights: torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1),
    ):
        with pytest.raises(
            ConfigError, match="optimizer: SGD does not hold just the weights that it is made for"
        ):
            TorchBack(split.copy(), 1, factory, LOSS).step(0, features, labels)
    with pytest.raises(ConfigError, match="Odd keeps note as str, which cannot move with a layer"):
        back = TorchBack(split.copy(), 1, Odd, LOSS)
        back.step(0, features, labels)
        back.save()


class Odd(torch.optim.SGD):
    """An optimiser with state that is no tensor."""

    def __init__(self, weights: Iterable[nn.Parameter]) -> None:
        super().__init__(weights, lr=0.1)

    def step(self, closure: object = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for weight in group["params"]:
                self.state[weight]["note"] = "seen"
