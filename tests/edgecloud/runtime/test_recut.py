"""A cut that moves while a model is trained changes nothing in its weights."""

from collections.abc import Callable, Iterable, Iterator

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from socflower.errors import ConfigError
from socflower.model_graph.cut_points import capture_split
from tests.edgecloud.runtime.split_training import (
    adam,
    assert_same,
    chain_split,
    halves,
    move,
    one_batch,
    sgd,
    train_locally,
)

NUM_BATCHES = 7
SPLIT = chain_split()
OPTIMIZERS = {
    "sgd": sgd,
    "adam": adam,
    "adamw": lambda weights: torch.optim.AdamW(weights, lr=0.01, amsgrad=True),
    "adagrad": lambda weights: torch.optim.Adagrad(weights, lr=0.01),
    "rmsprop": lambda weights: torch.optim.RMSprop(weights, lr=0.01, momentum=0.5, centered=True),
}


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@settings(max_examples=8)
@given(
    name=st.sampled_from(sorted(OPTIMIZERS)),
    cuts=st.lists(st.integers(0, SPLIT.num_cuts), min_size=NUM_BATCHES, max_size=NUM_BATCHES),
)
def test_any_moves_of_the_cut_at_any_batches_leave_local_training(
    name: str, cuts: list[int]
) -> None:
    """Bit for bit, with momentum and moments, masks and batch statistics; all layers at the edge is one of the cuts."""
    optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer] = OPTIMIZERS[name]
    losses, expected = train_locally(SPLIT, NUM_BATCHES, optimizer)
    front, back = halves(SPLIT, cuts[0], optimizer)
    found = []
    for batch, cut in enumerate(cuts):
        move(front, back, cut)
        assert front.cut == back.cut == cut
        found.append(one_batch(front, back, batch))
    assert found == losses
    assert_same({**front.weights(), **back.weights()}, expected)


def test_what_moves_is_named_by_the_model_and_is_given_away() -> None:
    front, back = halves(SPLIT, 0, adam)
    one_batch(front, back, 0)
    given_by_back = back.export_layers(2)
    names = set(SPLIT.front_names(2)) - set(SPLIT.front_names(0))
    assert {key for key in given_by_back if "::" not in key} == names
    trained = {name for name in names if name in dict(SPLIT.model.named_parameters())}
    assert {key for key in given_by_back if "::" in key} == {
        f"{name}::{entry}" for name in trained for entry in ("step", "exp_avg", "exp_avg_sq")
    }
    assert not names & set(back.weights())
    front.import_layers(2, given_by_back)
    assert all(np.array_equal(front.weights()[name], given_by_back[name]) for name in names)
    assert back.export_layers(2) == {} == front.export_layers(2)  # nothing moves, nothing is given


def test_layers_that_do_not_fit_are_refused_and_change_nothing() -> None:
    front, back = halves(SPLIT, 1, adam)
    one_batch(front, back, 0)
    given_by_back = dict(back.export_layers(2))
    saved = front.save()
    name = next(key for key in given_by_back if "::" not in key)
    for weights, match in (
        (
            {key: value for key, value in given_by_back.items() if key != name},
            f"{name}' is missing",
        ),
        ({**given_by_back, "0.bias": np.zeros(8, np.float32)}, "'0.bias' is of other layers"),
        (
            {**given_by_back, "0.bias::exp_avg": np.zeros(8, np.float32)},
            "'0.bias::exp_avg' is of no layer that moves",
        ),
        (
            {**given_by_back, name: np.zeros((1, 1), np.float32)},
            rf"{name} is float32 of shape \(1, 1\), it should be",
        ),
    ):
        with pytest.raises(ConfigError, match=match) as error:
            front.import_layers(2, weights)
        assert "\n" not in str(error.value)
    assert front.save() == saved
    for call, match in (
        (
            lambda: front.export_layers(3),
            "the front half, cut at 1, cannot give away layers by moving to 3",
        ),
        (lambda: front.import_layers(0, {}), "cannot take layers by moving to 0"),
        (lambda: back.export_layers(0), "the back half, cut at 2, cannot give away"),
        (lambda: front.export_layers(17), "cut = 17 does not exist"),
    ):
        with pytest.raises(ConfigError, match=match):
            call()


def test_a_tied_weight_moves_with_both_its_names() -> None:
    model = nn.Sequential(
        nn.Linear(6, 8),
        nn.ReLU(),
        nn.Linear(8, 8),
        nn.Tanh(),
        nn.Linear(8, 8),
        nn.ReLU(),
        nn.Linear(8, 3),
    )
    model[4].weight = model[2].weight
    split = capture_split(model, (6,))
    assert [point.name for point in split.cuts] == ["1", "5"]
    _, expected = train_locally(split, 4, sgd)
    front, back = halves(split, 0, sgd)
    for batch, cut in enumerate((0, 1, 0, 1)):
        move(front, back, cut)
        one_batch(front, back, batch)
    assert_same({**front.weights(), **back.weights()}, expected)
