"""Frozen first layers: no gradient comes back, statistics stay, and the rest trains as it does undivided."""

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from socflower.errors import ConfigError
from socflower.model_graph.cut_points import capture_split
from socflower.training.model_state import frozen_parameters
from tests.edgecloud.runtime.split_training import (
    Source,
    adam,
    assert_same,
    chain,
    halves,
    image_model,
    move,
    one_batch,
    train_locally,
)


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def test_training_behind_frozen_layers_is_local_training_at_every_cut() -> None:
    split = capture_split(chain(), (6,), frozen="4")
    losses, expected = train_locally(split, 5, adam, evaluating=[str(layer) for layer in range(5)])
    first = split.model.state_dict()
    assert all(
        torch.equal(expected[name], first[name])
        for name in first
        if int(name.partition(".")[0]) <= 4
    )
    assert not torch.equal(expected["8.weight"], first["8.weight"])
    trains = []
    for cut in range(split.num_cuts + 1):
        front, back = halves(split, cut, adam)
        assert [one_batch(front, back, batch) for batch in range(5)] == losses
        assert_same({**front.weights(), **back.weights()}, expected)
        trains.append(split.front_trains(cut))
    assert True in trains and False in trains and trains == sorted(trains)


def test_the_cut_may_move_over_the_end_of_the_frozen_layers() -> None:
    model, shape = image_model("resnet8")
    split = capture_split(model, shape, frozen="3")
    source = Source(shape, 10)
    losses, expected = train_locally(
        split, 4, adam, source=source, evaluating=["0", "1", "2", "3.residual.1", "3.residual.4"]
    )
    front, back = halves(split, 4, adam, source)
    found = []
    for batch, cut in enumerate((4, 1, 3, 2)):
        move(front, back, cut)
        found.append(one_batch(front, back, batch))
    assert found == losses
    assert_same({**front.weights(), **back.weights()}, expected)


def test_no_gradient_is_made_for_frozen_layers_and_none_is_taken() -> None:
    split = capture_split(chain(), (6,), frozen=2)
    front, back = halves(split, 2, adam)
    features = front.forward(0, keep_graph=True)
    gradients, _ = back.step(0, [features], front.labels(0))
    assert gradients == [None]
    with pytest.raises(
        ConfigError, match="a gradient came for batch 0, but everything before cut 2 is frozen"
    ):
        front.apply(0, np.zeros_like(features))
    before = front.weights()
    front.apply(0, None)
    assert_same(front.weights(), {name: torch.from_numpy(value) for name, value in before.items()})
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
    model = nn.Sequential(
        nn.Linear(6, 6), OnlyInTraining(), nn.ReLU(), nn.Linear(6, 3), nn.ReLU(), nn.Linear(3, 3)
    )
    assert capture_split(model, (6,)).random_layers
    with pytest.raises(
        ConfigError, match="runs other operations in training than in evaluation, so no part of"
    ):
        capture_split(model, (6,), frozen=0)


@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2))]
)
def test_without_frozen_parameters_halves_send_less_and_train_alike(seed: int) -> None:
    split = capture_split(chain(seed), (6,), frozen="4")
    losses, expected = train_locally(split, 4, adam, evaluating=[str(layer) for layer in range(5)])
    frozen = frozen_parameters(split.model)
    front, back = halves(split, 1, adam)
    for half in (front, back):
        half.load({name: array for name, array in half.weights().items() if name not in frozen})
    found = []
    for batch, cut in enumerate((1, 5, 0, 4)):
        if cut < front.cut:
            moved = front.export_layers(cut)
            back.import_layers(cut, moved)
        else:
            moved = back.export_layers(cut)
            front.import_layers(cut, moved)
        found.append(one_batch(front, back, batch))
        saved = [front.save(), back.save()]
        assert not any(name in frozen for name in moved) and not any(
            b"4.first.weight" in half for half in saved
        )
        front, back = halves(split, 2, adam)  # as in new processes
        front.restore(saved[0])
        back.restore(saved[1])
    assert found == losses
    assert_same(
        {**front.weights(), **back.weights()},
        {name: value for name, value in expected.items() if name not in frozen},
    )
    with pytest.raises(
        ConfigError,
        match="its frozen parameters are not those that it was saved with; load the same",
    ):
        halves(capture_split(chain(seed + 1), (6,), frozen="4"), 2, adam)[0].restore(saved[0])


def test_only_frozen_parameters_may_be_left_out() -> None:
    front, _ = halves(capture_split(chain(), (6,), frozen="4"), 4, adam)
    with pytest.raises(ConfigError, match=r"the front half needs .* tensors; '.*' is missing"):
        front.load(
            {name: array for name, array in front.weights().items() if name != "1.running_mean"}
        )
    front.load(
        {
            name: array
            for name, array in front.weights().items()
            if "running" in name or "batches" in name or name.startswith(("5.", "8."))
        }
    )
    assert front.keeps_frozen
