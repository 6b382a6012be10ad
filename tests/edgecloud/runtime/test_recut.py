"""A cut that moves while a model is trained changes nothing in its weights."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from socflower.model_graph.cut_points import capture_split
from socflower.model_graph.exported_module import exported_module
from tests.edgecloud.runtime.split_training import (
    Source,
    adam,
    assert_together,
    chain_split,
    halves,
    move,
    one_batch,
    sgd,
    train_locally,
)
from tests.one_line import refused
from tests.seeded import built

NUM_BATCHES = 7
SPLIT = chain_split()
OPTIMIZERS = {
    "sgd": sgd,
    "adam": adam,
    "adamw": lambda weights: torch.optim.AdamW(weights, lr=0.01, amsgrad=True),
    "adagrad": lambda weights: torch.optim.Adagrad(weights, lr=0.01),
    "rmsprop": lambda weights: torch.optim.RMSprop(weights, lr=0.01, momentum=0.5, centered=True),
}


@settings(max_examples=8)
@given(
    name=st.sampled_from(sorted(OPTIMIZERS)),
    cuts=st.lists(st.integers(0, SPLIT.num_cuts), min_size=NUM_BATCHES, max_size=NUM_BATCHES),
)
def test_any_moves_of_the_cut_at_any_batches_leave_local_training(
    name: str, cuts: list[int]
) -> None:
    """Bit for bit, with momentum and moments, masks and batch statistics; all layers at the edge is one of the cuts."""
    losses, expected = train_locally(SPLIT, NUM_BATCHES, OPTIMIZERS[name])
    pair = front, back = halves(SPLIT, cuts[0], OPTIMIZERS[name])
    for batch, cut in enumerate(cuts):
        move(front, back, cut)
        assert front.cut == back.cut == cut
        assert one_batch(front, back, batch) == losses[batch]
    assert_together(pair, expected)


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
    moving, saved = dict(back.export_layers(2)), front.save()
    name = next(key for key in moving if "::" not in key)
    fewer = {key: value for key, value in moving.items() if key != name}
    eight = np.zeros(8, np.float32)
    for weights, named in (
        (fewer, [f"{name}'"]),
        ({**moving, "0.bias": eight}, ["'0.bias'"]),
        ({**moving, "0.bias::exp_avg": eight}, ["'0.bias::exp_avg'"]),
        ({**moving, name: np.zeros((1, 1), np.float32)}, [name, "(1, 1)"]),
    ):
        refused(lambda weights=weights: front.import_layers(2, weights), *named)  # type: ignore[misc]
    assert front.save() == saved
    refused(lambda: front.export_layers(3), "front half", "1", "3")
    refused(lambda: front.import_layers(0, {}), "front half", "1", "0")
    refused(lambda: back.export_layers(0), "back half", "2", "0")
    refused(lambda: front.export_layers(17), "cut = 17")


def test_a_tied_weight_moves_with_both_its_names() -> None:
    first, middle, last = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 8)
    last.weight = middle.weight
    model = nn.Sequential(first, nn.ReLU(), middle, nn.Tanh(), last, nn.ReLU(), nn.Linear(8, 3))
    split = capture_split(model, (6,))
    assert [point.name for point in split.cuts] == ["1", "5"]
    _, expected = train_locally(split, 4, sgd)
    pair = halves(split, 0, sgd)
    for batch in range(4):
        move(*pair, batch % 2)
        one_batch(*pair, batch)
    assert_together(pair, expected)


class Encoder(nn.Module):
    """A small transformer, which torch.fx takes for one layer."""

    def __init__(self) -> None:
        super().__init__()
        block = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.2, batch_first=True)
        self.embed, self.blocks = nn.Linear(4, 8), nn.TransformerEncoder(block, 2)
        self.head = nn.Linear(8, 3)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(self.embed(words)).mean(1))


@pytest.mark.slow
def test_a_transformer_is_cut_between_its_blocks_and_the_cut_moves() -> None:
    """Bit for bit as the graph of the whole, which computes what the user's model does."""
    source = Source(shape=(5, 4))
    inputs, _, _ = source(0)
    model = built(Encoder, 3)
    split = capture_split(exported_module(model, inputs), (5, 4))
    names = [point.name for point in split.cuts]
    # Two normalisations end each of two blocks; the mean over words comes last.
    assert len(names) == 5 and names[-1].startswith("mean")
    assert [point.feature_shape for point in split.cuts] == [(5, 8)] * 4 + [(8,)]
    torch.testing.assert_close(split.model.eval()(inputs), model.eval()(inputs))
    split.model.train()
    losses, expected = train_locally(split, NUM_BATCHES, adam, source=source)
    pair = halves(split, 1, adam, source)
    for batch, cut in enumerate((1, 3, 0, 4, 2, 5, 1)):
        move(*pair, cut)
        assert one_batch(*pair, batch) == losses[batch]
    assert_together(pair, expected)
