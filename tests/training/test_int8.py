"""Int8 training inside a Flower client: groups, sessions, and what crosses between them."""

import pytest
import torch
from flwr.app import ArrayRecord, ConfigRecord, Context
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from torch import nn

from socflower.clients.app import make_client_app
from socflower.cluster import parse_cluster
from socflower.engines.local.run_app import run_app
from socflower.errors import ConfigError
from socflower.model_graph.random_state import forked_generator
from socflower.precision import (
    ADAPTIVE_FIXED_POINT,
    EngineSettings,
    RescalingPolicy,
    int8_algorithm,
)
from socflower.training.int8 import Int8Trainer
from socflower.training.trainer import Part, TrainingSpan
from socflower.workloads import LabelledData
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


def train(
    trainer: Int8Trainer,
    splits: list[list[Part]],
    state: bytes | None = None,
    first_step: int = 0,
    model: nn.Module | None = None,
    total_steps: int = 8,
) -> tuple[nn.Module, bytes, list[float]]:
    model = model or network()
    span = TrainingSpan(num_members=len(splits[0]), first_step=first_step, total_steps=total_steps)
    session = trainer.start(model, span, state)
    losses = [float(session.step(parts)) for parts in splits]
    return model, session.finish().state, losses


def same(a: nn.Module, b: nn.Module) -> bool:
    return all(
        torch.equal(x, y)
        for x, y in zip(a.state_dict().values(), b.state_dict().values(), strict=True)
    )


def test_a_group_of_three_trains_as_one_device_bit_for_bit() -> None:
    data = batches(4)
    alone, _, _ = train(Int8Trainer(), [[batch] for batch in data])
    shares = [
        [(x[:5], y[:5]), (x[5:5], y[5:5]), (x[5:], y[5:])] for x, y in data
    ]  # one member has nothing to do
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
    trainer = Int8Trainer(
        algorithm=int8_algorithm(ADAPTIVE_FIXED_POINT.name, momentum), settings=settings
    )
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
    with pytest.raises(
        ConfigError, match=r"'octo' is unknown, known are niti, adaptive-fixed-point"
    ):
        int8_algorithm("octo")


FROZEN = ("0.weight", "1.bias", "5.weight")


def partly_frozen() -> nn.Module:
    model = network()
    for name in FROZEN:
        model.get_parameter(name).requires_grad_(False)
    return model


@pytest.mark.parametrize(("name", "momentum"), [("niti", 0.0), ("adaptive-fixed-point", 0.9)])
@pytest.mark.parametrize("members", [1, 3])
def test_frozen_parameters_are_bit_for_bit_what_they_were_across_sessions(
    name: str,
    momentum: float,
    members: int,
) -> None:
    trainer = Int8Trainer(algorithm=int8_algorithm(name, momentum), learning_rate=0.05)
    before = {key: value.clone() for key, value in partly_frozen().state_dict().items()}
    model, state = partly_frozen(), None
    for first_step in (0, 3):
        parts = [
            [(x[member::members], y[member::members]) for member in range(members)]
            for x, y in batches(3)
        ]
        model, state, _ = train(trainer, parts, state, first_step, model)
        for key, value in model.state_dict().items():
            if key in FROZEN:
                assert torch.equal(value.view(torch.int32), before[key].view(torch.int32)), key
            else:
                assert not torch.equal(value, before[key]), key


def test_a_model_of_which_nothing_is_trained_is_refused_before_a_step() -> None:
    with pytest.raises(
        ConfigError,
        match=r"Sequential has all of its parameters frozen .*: there is nothing to train",
    ):
        Int8Trainer().start(network().requires_grad_(False), TrainingSpan())


def test_inputs_that_are_no_images_are_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"takes images \(n, channels, height, width\), got .*; use FP32Trainer"
    ):
        Int8Trainer().start(nn.Linear(3, 2), TrainingSpan()).step(
            [(torch.zeros(4, 3), torch.zeros(4).long())]
        )


def dropping() -> nn.Module:
    return built(
        lambda: nn.Sequential(
            nn.Conv2d(1, 8, 3),
            nn.ReLU(),
            nn.Dropout2d(0.2),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Dropout(0.3),
            nn.Linear(72, 4),
        ),
        0,
    )


def test_a_group_drops_as_one_device_bit_for_bit_and_as_torchs_generator_says() -> None:
    data, trained = batches(4), []
    shares = [[(x[:5], y[:5]), (x[5:5], y[5:5]), (x[5:], y[5:])] for x, y in data]
    for seed, splits in ((1, [[batch] for batch in data]), (1, shares), (2, shares)):
        model = dropping()
        with forked_generator(seed):
            trained.append(train(Int8Trainer(), splits, model=model)[0])
    assert same(trained[0], trained[1])
    assert not same(trained[1], trained[2])


@pytest.mark.parametrize("name", ["niti", "adaptive-fixed-point"])
def test_fedavg_trains_a_network_with_dropout(name: str) -> None:
    """Through Flower's strategy and the ClientApp of a user, whose accuracy was that of the first weights before."""
    inputs, labels = (torch.cat(each) for each in zip(*batches(40), strict=True))

    def data(context: Context, partition_id: int, num_partitions: int) -> LabelledData:
        own = slice(partition_id, None, num_partitions)
        return LabelledData(inputs[own], labels[own], mean=(0.0,), std=(1.0,), num_classes=4)

    def model(context: Context) -> nn.Module:
        return dropping()

    trainer = Int8Trainer(algorithm=int8_algorithm(name), learning_rate=0.1)
    client, server, accuracies = (
        make_client_app(model, data, trainer, evaluate_data_fn=data),
        ServerApp(),
        [],
    )

    @server.main()
    def main(grid: Grid, context: Context) -> None:
        result = FedAvg().start(
            grid,
            ArrayRecord(model(context).state_dict()),
            num_rounds=4,
            train_config=ConfigRecord({"local-epochs": 10, "batch-size": 16, "num-rounds": 4}),
        )
        accuracies.extend(
            float(each["accuracy"]) for each in result.evaluate_metrics_clientapp.values()
        )

    run_app(server, client, cluster=parse_cluster({"boards": [2]}), num_workers=0)
    assert len(accuracies) == 4
    assert accuracies[-1] > 0.8, accuracies
