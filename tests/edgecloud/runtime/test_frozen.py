"""Frozen first layers: no gradient comes back, statistics stay, and the rest trains as it does undivided."""

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from socflower.model_graph.cut_points import capture_split
from socflower.training.model_state import frozen_parameters
from tests.edgecloud.runtime.split_training import (
    Source,
    adam,
    assert_same,
    assert_together,
    chain,
    halves,
    image_model,
    move,
    one_batch,
    train_locally,
)
from tests.one_line import refused


def test_training_behind_frozen_layers_is_local_training_at_every_cut() -> None:
    split = capture_split(chain(), (6,), frozen="4")
    losses, expected = train_locally(split, 5, adam, evaluating=LAYERS)
    first = split.model.state_dict()
    same = {name for name in first if torch.equal(expected[name], first[name])}
    assert {name for name in first if name.partition(".")[0] in LAYERS} <= same
    assert "8.weight" not in same
    for cut in range(split.num_cuts + 1):
        pair = halves(split, cut, adam)
        assert [one_batch(*pair, batch) for batch in range(5)] == losses
        assert_together(pair, expected)
    trains = [split.front_trains(cut) for cut in range(split.num_cuts + 1)]
    assert True in trains and False in trains and trains == sorted(trains)


LAYERS = [str(layer) for layer in range(5)]


def test_the_cut_may_move_over_the_end_of_the_frozen_layers() -> None:
    model, shape = image_model("resnet8")
    split, source = capture_split(model, shape, frozen="3"), Source(shape, 10)
    evaluating = ["0", "1", "2", "3.residual.1", "3.residual.4"]
    losses, expected = train_locally(split, 4, adam, source=source, evaluating=evaluating)
    pair = halves(split, 4, adam, source)
    for batch, cut in enumerate((4, 1, 3, 2)):
        move(*pair, cut)
        assert one_batch(*pair, batch) == losses[batch]
    assert_together(pair, expected)


def test_no_gradient_is_made_for_frozen_layers_and_none_is_taken() -> None:
    front, back = halves(capture_split(chain(), (6,), frozen=2), 2, adam)
    features, before = front.forward(0, keep_graph=True), front.weights()
    assert back.step(0, [features], front.labels(0))[0] == [None]
    refused(lambda: front.apply(0, np.zeros_like(features)), "batch 0", "cut 2", "frozen")
    front.apply(0, None)
    assert_same(front.weights(), {name: torch.from_numpy(each) for name, each in before.items()})
    front.save()  # nothing is under way any more


class FunctionalDropout(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = functional.dropout(torch.relu(self.first(inputs)), 0.5, self.training)
        hidden = functional.dropout(torch.tanh(self.middle(hidden)), 0.5, training=self.training)
        return self.last(hidden)


def test_frozen_functions_do_what_they_do_in_evaluation() -> None:
    split = capture_split(FunctionalDropout(), (6,), frozen="tanh")
    inputs = Source()(0)[0]
    whole = split.front(split.num_cuts)
    model = split.model.eval()
    hidden = model.middle(torch.relu(model.first(inputs)))
    assert torch.equal(split.front(1)(inputs), torch.tanh(hidden))
    assert len(split.random_layers) == 1  # the dropout behind
    assert not torch.equal(whole(inputs), whole(inputs))


class OnlyInTraining(nn.Module):
    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return inputs + torch.randn_like(inputs) if self.training else inputs


def test_layers_that_are_others_in_training_cannot_be_frozen() -> None:
    layers = [nn.Linear(6, 6), OnlyInTraining(), nn.ReLU(), nn.Linear(6, 3), nn.ReLU()]
    model = nn.Sequential(*layers, nn.Linear(3, 3))
    assert capture_split(model, (6,)).random_layers
    refused(lambda: capture_split(model, (6,), frozen=0), "training", "evaluation")


def test_without_frozen_parameters_halves_send_less_and_train_alike() -> None:
    split = capture_split(chain(), (6,), frozen="4")
    losses, expected = train_locally(split, 4, adam, evaluating=LAYERS)
    frozen = frozen_parameters(split.model)
    pair = front, back = halves(split, 1, adam)
    for half in pair:
        half.load({name: array for name, array in half.weights().items() if name not in frozen})
    for batch, cut in enumerate((1, 5, 0, 4)):
        giver, taker = (front, back) if cut < front.cut else (back, front)
        moved = giver.export_layers(cut)
        taker.import_layers(cut, moved)
        assert one_batch(front, back, batch) == losses[batch]
        saved = [front.save(), back.save()]
        assert not frozen & moved.keys() and not any(b"4.first.weight" in each for each in saved)
        # As in new processes.
        pair = front, back = halves(split, 2, adam)
        for half, content in zip(pair, saved, strict=True):
            half.restore(content)
    assert_together(pair, {name: each for name, each in expected.items() if name not in frozen})
    other, _ = halves(capture_split(chain(1), (6,), frozen="4"), 2, adam)
    refused(lambda: other.restore(saved[0]), "frozen parameters")


def test_only_frozen_parameters_may_be_left_out() -> None:
    front, _ = halves(capture_split(chain(), (6,), frozen="4"), 4, adam)
    weights = dict(front.weights())
    mean = weights.pop("1.running_mean")
    refused(lambda: front.load(weights), "front half", "'1.running_mean'")
    kept = ("running", "batches", "5.", "8.")
    weights = {name: each for name, each in weights.items() if any(part in name for part in kept)}
    front.load({**weights, "1.running_mean": mean})
    assert front.keeps_frozen
