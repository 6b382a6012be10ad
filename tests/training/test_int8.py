"""Int8 training inside a Flower client: groups, sessions, and what crosses between them."""

from itertools import pairwise

import pytest
import torch
from torch import nn

from socflower.model_graph.random_state import forked_generator
from socflower.precision import (
    EngineSettings,
    RescalingPolicy,
    int8_algorithm,
)
from socflower.precision.int8 import model as int8_model
from socflower.precision.int8.batch_splitting import BlockProfile
from socflower.training.int8 import Int8Trainer
from socflower.training.trainer import Part, TrainingSpan
from tests.seeded import built
from tests.training.by_torch import assert_equal


def network(*, drops: bool = False) -> nn.Module:
    def layers() -> nn.Module:
        norm = nn.Dropout2d(0.2) if drops else nn.BatchNorm2d(8)
        first = [nn.Conv2d(1, 8, 3, bias=drops), norm, nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()]
        return nn.Sequential(*first, *([nn.Dropout(0.3)] if drops else []), nn.Linear(72, 4))

    return built(layers, 0)


def batches(num: int, size: int = 12) -> list[Part]:
    generator = torch.Generator().manual_seed(5)
    labels = torch.randint(0, 4, (num, size), generator=generator)
    noise = 0.3 * torch.randn(num, size, 1, 8, 8, generator=generator)
    return list(zip(noise + labels.float()[..., None, None, None], labels, strict=True))


def in_three(batch: Part) -> list[Part]:
    """Return the parts of three members, of which one has nothing to do."""
    inputs, labels = batch
    return list(zip(inputs.split([5, 0, 7]), labels.split([5, 0, 7]), strict=True))


def train(
    trainer: Int8Trainer,
    splits: list[list[Part]],
    state: bytes | None = None,
    first_step: int = 0,
    model: nn.Module | None = None,
    total_steps: int = 8,
) -> tuple[nn.Module, bytes, list[float]]:
    model = model or network()
    span = TrainingSpan(
        num_members=len(splits[0]) if splits else 1, first_step=first_step, total_steps=total_steps
    )
    session = trainer.start(model, span, state)
    losses = [float(session.step(parts)) for parts in splits]
    return model, session.finish().state, losses


def test_a_group_of_three_trains_as_one_device_bit_for_bit() -> None:
    data = batches(4)
    alone, _, _ = train(Int8Trainer(), [[batch] for batch in data])
    group, _, _ = train(Int8Trainer(), [in_three(batch) for batch in data])
    assert_equal(alone, group)


def test_a_long_training_splits_batches_where_it_pays_and_trains_the_same_bits(monkeypatch) -> None:
    data = [[batch] for batch in batches(3)]
    found = []

    def profiled(graph, batch, engine):
        found.append(batch)
        return [BlockProfile(name="0", seconds={0: 1.0, 8: 0.5})]

    monkeypatch.setattr(int8_model, "profile_batch_blocks", profiled)
    long, _, losses = train(Int8Trainer(schedule="constant"), data, total_steps=10_000)
    assert found == [12]
    whole = Int8Trainer(schedule="constant", settings=EngineSettings(batch_blocks={}))
    for trainer, steps in ((whole, 10_000), (Int8Trainer(schedule="constant"), 100)):
        other, _, same = train(trainer, data, total_steps=steps)
        assert same == losses
        assert_equal(long, other)
    assert found == [12]


def test_the_model_that_comes_back_holds_int8_values() -> None:
    niti = Int8Trainer(algorithm=int8_algorithm("niti"))
    model, _, _ = train(niti, [[batch] for batch in batches(2)])
    weight = model.state_dict()["0.weight"]
    grids = [weight * 2.0**-exponent for exponent in range(-20, 1)]
    assert any(torch.equal(grid, grid.round()) and grid.abs().max() <= 127 for grid in grids)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_two_sessions_continue_as_one(momentum: float) -> None:
    """What is frozen stays bit for bit what it was."""
    trainer = Int8Trainer(
        algorithm=int8_algorithm("adaptive-fixed-point", momentum),
        settings=EngineSettings(rescaling=RescalingPolicy(warm_up_batches=2)),
    )
    data = [[batch] for batch in batches(6)]
    ends = []
    for cuts in ([0, 6], [0, 3, 6]):
        model = network()
        state = None
        model[0].weight.requires_grad_(False)
        for first, end in pairwise(cuts):
            model, state, _ = train(trainer, data[first:end], state, first, model)
        assert torch.equal(model[0].weight, network()[0].weight)
        ends.append(model)
    assert_equal(*ends)


@pytest.mark.parametrize("name", ["niti", "adaptive-fixed-point"])
def test_the_loss_falls(name: str) -> None:
    trainer = Int8Trainer(algorithm=int8_algorithm(name), learning_rate=0.05)
    _, _, losses = train(trainer, [[batch] for batch in batches(40)], total_steps=40)
    assert sum(losses[-5:]) < 0.7 * sum(losses[:5])


def test_an_epoch_without_batches_changes_nothing() -> None:
    model, state, _ = train(Int8Trainer(), [], model=network())
    assert state == b""
    assert_equal(model, network())


def test_a_group_drops_as_one_device_bit_for_bit_and_as_torchs_generator_says() -> None:
    ends = []
    data = batches(4)
    whole = [[batch] for batch in data]
    shares = [in_three(batch) for batch in data]
    for seed, splits in ((1, whole), (1, shares), (2, shares)):
        with forked_generator(seed):
            ends.append(train(Int8Trainer(), splits, model=network(drops=True))[0])
    assert_equal(ends[0], ends[1])
    assert not torch.equal(ends[1][0].weight, ends[2][0].weight)
