"""Int8 training inside a Flower client: groups, sessions, and what crosses between them."""

import pytest
import torch
from torch import nn

from socflower.clients import Int8Trainer
from socflower.clients.trainer import Part, TrainingSpan
from socflower.errors import ConfigError
from socflower.precision import ADAPTIVE_FIXED_POINT, EngineSettings, RescalingPolicy, int8_algorithm
from tests.seeded import built


def network() -> nn.Module:
    return built(
        lambda: nn.Sequential(
            nn.Conv2d(1, 8, 3, bias=False), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(),
            nn.Linear(72, 4)
        ),
        0,
    )  # fmt: skip


def batches(num: int, size: int = 12) -> list[Part]:
    generator = torch.Generator().manual_seed(5)
    made = []
    for _ in range(num):
        labels = torch.randint(0, 4, (size,), generator=generator)
        noise = 0.3 * torch.randn(size, 1, 8, 8, generator=generator)
        made.append((noise + labels.float().reshape(-1, 1, 1, 1), labels))
    return made


def train(trainer: Int8Trainer, splits: list[list[Part]], state: bytes | None = None, first_step: int = 0,
          model: nn.Module | None = None, total_steps: int = 8) -> tuple[nn.Module, bytes, list[float]]:
    model = model or network()
    span = TrainingSpan(num_members=len(splits[0]), first_step=first_step, total_steps=total_steps)
    session = trainer.start(model, span, state)
    losses = [float(session.step(parts)) for parts in splits]
    return model, session.finish().state, losses


def same(a: nn.Module, b: nn.Module) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a.state_dict().values(), b.state_dict().values(), strict=True))


def test_a_group_of_three_trains_as_one_device_bit_for_bit() -> None:
    data = batches(4)
    alone, _, _ = train(Int8Trainer(), [[batch] for batch in data])
    shares = [[(x[:5], y[:5]), (x[5:5], y[5:5]), (x[5:], y[5:])] for x, y in data]  # one member has nothing to do
    group, _, _ = train(Int8Trainer(), shares)
    assert same(alone, group)


def test_the_model_that_comes_back_holds_int8_values() -> None:
    model, _, _ = train(Int8Trainer(), [[batch] for batch in batches(2)])
    weight = model.state_dict()["0.weight"]
    grids = [weight * 2.0**-exponent for exponent in range(-20, 1)]
    assert any(torch.equal(grid, grid.round()) and grid.abs().max() <= 127 for grid in grids)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_two_sessions_continue_as_one(momentum: float) -> None:
    settings = EngineSettings(rescaling=RescalingPolicy(warm_up_batches=2))
    trainer = Int8Trainer(algorithm=int8_algorithm(ADAPTIVE_FIXED_POINT.name, momentum), settings=settings)
    data = [[batch] for batch in batches(6)]
    whole, _, _ = train(trainer, data)
    half, state, _ = train(trainer, data[:3])
    half, _, _ = train(trainer, data[3:], state=state, first_step=3, model=half)
    assert same(whole, half)


@pytest.mark.parametrize("name", ["niti", "adaptive-fixed-point"])
def test_the_loss_falls(name: str) -> None:
    trainer = Int8Trainer(algorithm=int8_algorithm(name), learning_rate=0.05)
    _, _, losses = train(trainer, [[batch] for batch in batches(40)], total_steps=40)
    assert sum(losses[-5:]) < 0.7 * sum(losses[:5])


def test_an_epoch_without_batches_changes_nothing() -> None:
    model = network()
    session = Int8Trainer().start(model, TrainingSpan())
    assert session.finish().state == b""
    assert same(model, network())


def test_bad_settings_are_refused_with_their_value() -> None:
    with pytest.raises(ConfigError, match="schedule = 'linear'; use one of cosine, constant"):
        Int8Trainer(schedule="linear")
    with pytest.raises(ConfigError, match=r"learning_rate = 0\.0 must be above 0"):
        Int8Trainer(learning_rate=0.0)
    with pytest.raises(ConfigError, match=r"'octo' is unknown, known are niti, adaptive-fixed-point"):
        int8_algorithm("octo")
