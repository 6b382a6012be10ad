"""Every strategy and every mod that Flower exports: it trains, or it is refused in one line before a client trains.

The rows are those of the tables in docs/guides/groups.md. A name that a new version of Flower exports has no row, and
fails here.
"""

import gc
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord, Context, Message
from flwr.clientapp import mod as flower_mods
from flwr.clientapp.mod import LocalDpMod, adaptiveclipping_mod, fixedclipping_mod
from flwr.clientapp.typing import ClientAppCallable
from flwr.serverapp import strategy as flower
from flwr.serverapp.exception import InconsistentMessageReplies
from flwr.serverapp.strategy import FedAvg, Result, Strategy
from torch import nn

from socflower.clients.app import make_client_app
from socflower.cluster import parse_cluster
from socflower.engines.local.grid import LocalGrid
from socflower.errors import TrainingFailed
from socflower.strategies.settings import TrainingSchedule
from socflower.strategies.socflow import SoCFlow
from socflower.training.fp32 import FP32Trainer, sgd
from socflower.workloads.dataset import LabelledData
from tests.one_line import refused

PAGE = Path(__file__).parents[2] / "docs" / "guides" / "groups.md"
NUM_SAMPLES, NUM_GROUPS, NUM_ROUNDS = 96, 3, 2


@pytest.fixture(autouse=True)
def no_collections(monkeypatch: pytest.MonkeyPatch) -> None:
    """Flower's QFedAvg and Bulyan collect garbage for each model, which takes longer than all else here."""
    monkeypatch.setattr(gc, "collect", lambda: 0)


def network(*, norm: bool = False) -> nn.Module:
    torch.manual_seed(2)
    return nn.Sequential(*([nn.BatchNorm2d(1)] if norm else []), nn.Flatten(), nn.Linear(16, 3))


def part(context: Context, partition: int, num_partitions: int) -> LabelledData:
    generator = torch.Generator().manual_seed(5)
    inputs = torch.rand((NUM_SAMPLES, 1, 4, 4), generator=generator)
    labels = inputs.flatten(1)[:, :3].argmax(1)
    data = LabelledData(inputs=inputs, labels=labels, mean=(0.0,), std=(1.0,), num_classes=3)
    return data.select(torch.arange(partition, NUM_SAMPLES, num_partitions))


class Asked(NamedTuple):
    """What a training has come to, and how often clients were asked to train."""

    result: Result
    num_trained: int


def train(
    outer: Strategy | None = None,
    around: Callable[[SoCFlow], Strategy] = lambda strategy: strategy,
    *,
    plain: Strategy | None = None,
    mods: tuple[Any, ...] = (),
    norm: bool = False,
    asked: list[int] | None = None,
    **schedule: Any,
) -> Asked:
    """Train three groups of one, or with a `plain` strategy three clients."""
    trained: list[int] = [] if asked is None else asked

    def counting(message: Message, context: Context, call_next: ClientAppCallable) -> Message:
        if message.metadata.message_type == "train":
            trained.append(1)
        return call_next(message, context)

    app = make_client_app(
        lambda context: network(norm=norm),
        part,
        FP32Trainer(optimizer=sgd(0.1)),
        evaluate_data_fn=part,
        mods=[*mods, counting],
    )
    arrays = ArrayRecord(network(norm=norm).state_dict())
    with LocalGrid(app, NUM_GROUPS, num_workers=0) as grid:
        if plain is not None:
            return Asked(plain.start(grid, arrays, num_rounds=NUM_ROUNDS), len(trained))
        strategy = SoCFlow(
            cluster=parse_cluster({"boards": [1] * NUM_GROUPS}),
            groups=NUM_GROUPS,
            outer=outer,
            schedule=TrainingSchedule(
                **{
                    "num_samples": NUM_SAMPLES,
                    "batch_size": 8,
                    "num_epochs": NUM_ROUNDS,
                    "interval_epochs": 1,
                    **schedule,
                }
            ),
        )
        return Asked(
            around(strategy).start(grid, arrays, num_rounds=strategy.num_rounds), len(trained)
        )


def change(result: Result) -> float:
    first = network().state_dict()
    return max(
        float(np.abs(array.numpy() - first[name].numpy()).max())
        for name, array in result.arrays.items()
    )


OUTER: dict[str, Callable[[], Strategy]] = {
    "FedAvg": FedAvg,
    "FedAvgM": lambda: flower.FedAvgM(server_momentum=0.5),
    "FedAdam": flower.FedAdam,
    "FedAdagrad": flower.FedAdagrad,
    "FedYogi": flower.FedYogi,
    "FedProx": lambda: flower.FedProx(proximal_mu=0.5),
    "FedMedian": flower.FedMedian,
    "FedTrimmedAvg": lambda: flower.FedTrimmedAvg(beta=0.4),
    "Krum": flower.Krum,
    "MultiKrum": lambda: flower.MultiKrum(num_nodes_to_select=2),
    "Bulyan": flower.Bulyan,
    "QFedAvg": lambda: flower.QFedAvg(0.1, train_loss_key="train-loss"),
}
AROUND: dict[str, tuple[Callable[[Strategy], Strategy], tuple[Any, ...]]] = {
    "DifferentialPrivacyServerSideFixedClipping": (
        lambda inside: flower.DifferentialPrivacyServerSideFixedClipping(
            inside, 0.01, 1.0, NUM_GROUPS
        ),
        (),
    ),
    "DifferentialPrivacyServerSideAdaptiveClipping": (
        lambda inside: flower.DifferentialPrivacyServerSideAdaptiveClipping(
            inside, 0.01, NUM_GROUPS
        ),
        (),
    ),
    "DifferentialPrivacyClientSideFixedClipping": (
        lambda inside: flower.DifferentialPrivacyClientSideFixedClipping(
            inside, 0.01, 1.0, NUM_GROUPS
        ),
        (fixedclipping_mod,),
    ),
    "DifferentialPrivacyClientSideAdaptiveClipping": (
        lambda inside: flower.DifferentialPrivacyClientSideAdaptiveClipping(
            inside, 0.01, NUM_GROUPS
        ),
        (adaptiveclipping_mod,),
    ),
}
TREES = {"FedXgbBagging": flower.FedXgbBagging, "FedXgbCyclic": flower.FedXgbCyclic}
NO_STRATEGIES = {"Strategy", "Result"}
MODS: dict[str, Callable[[], tuple[Any, Callable[[SoCFlow], Strategy]]]] = {
    "message_size_mod": lambda: (flower_mods.message_size_mod, lambda inside: inside),
    "arrays_size_mod": lambda: (flower_mods.arrays_size_mod, lambda inside: inside),
    "LocalDpMod": lambda: (LocalDpMod(1.0, 0.1, 100.0, 0.1), lambda inside: inside),
    "fixedclipping_mod": lambda: (
        fixedclipping_mod,
        AROUND["DifferentialPrivacyClientSideFixedClipping"][0],
    ),
    "adaptiveclipping_mod": lambda: (
        adaptiveclipping_mod,
        AROUND["DifferentialPrivacyClientSideAdaptiveClipping"][0],
    ),
}


def test_every_export_of_flower_has_a_row_and_a_test() -> None:
    assert {*OUTER, *AROUND, *TREES, *NO_STRATEGIES} == set(flower.__all__)
    assert set(MODS) == set(flower_mods.__all__)
    rows = {
        name
        for line in PAGE.read_text("utf-8").splitlines()
        if line.startswith("|")
        for name in re.findall(r"`(\w+)`", line.split("|")[1])
    }
    assert {*OUTER, *AROUND, *TREES, *MODS} <= rows


@pytest.mark.few_cells(3)
@pytest.mark.parametrize("name", OUTER)
def test_as_outer_strategy_it_trains_and_evaluates_and_its_clients_are_groups(name: str) -> None:
    trained = train(OUTER[name]())
    assert trained.num_trained == NUM_ROUNDS * NUM_GROUPS and 1e-3 < change(trained.result) < 2.0
    assert {
        key: set(metrics) for key, metrics in trained.result.evaluate_metrics_clientapp.items()
    } == {1: {"accuracy", "loss"}, 2: {"accuracy", "loss"}}


@pytest.mark.few_cells(3)
@pytest.mark.parametrize("name", OUTER)
def test_without_groups_it_trains_over_the_same_clients(name: str) -> None:
    trained = train(plain=OUTER[name]())
    assert trained.num_trained >= NUM_ROUNDS and 1e-3 < change(trained.result) < 2.0
    assert set(trained.result.evaluate_metrics_clientapp) == {1, 2}


@pytest.mark.few_cells(2)
@pytest.mark.parametrize("name", AROUND)
@pytest.mark.parametrize("outer", [None, lambda: flower.FedAvgM(server_momentum=0.5)])
def test_around_groups_it_trains_and_clips_the_update_of_a_group(name: str, outer: Any) -> None:
    around, mods = AROUND[name]
    trained = train(outer and outer(), around, mods=mods)
    assert trained.num_trained == NUM_ROUNDS * NUM_GROUPS and 1e-3 < change(trained.result) < 2.0


@pytest.mark.parametrize("name", AROUND)
def test_as_outer_strategy_a_wrapper_is_refused(name: str) -> None:
    refused(lambda: train(AROUND[name][0](FedAvg())), name, name)


@pytest.mark.parametrize("name", AROUND)
def test_around_a_model_with_counters_it_is_refused_before_a_client_trains(name: str) -> None:
    around, mods = AROUND[name]
    asked: list[int] = []
    refused(
        lambda: train(None, around, mods=mods, norm=True, asked=asked),
        "0.num_batches_tracked",
        "GroupNorm",
    )
    assert not asked


@pytest.mark.parametrize("name", TREES)
def test_strategies_for_trees_are_refused_as_outer_strategy(name: str) -> None:
    asked: list[int] = []
    refused(lambda: train(TREES[name](), asked=asked), name)
    assert not asked


def test_flower_refuses_networks_in_its_bagging_of_trees() -> None:
    asked: list[int] = []
    with pytest.raises(InconsistentMessageReplies, match="Expected exactly one Array"):
        train(plain=flower.FedXgbBagging(), asked=asked)
    assert not asked


def test_the_cyclic_strategy_trains_one_client_after_the_other() -> None:
    trained = train(plain=flower.FedXgbCyclic())
    assert trained.num_trained == NUM_ROUNDS and 1e-3 < change(trained.result) < 2.0


@pytest.mark.few_cells(2)
@pytest.mark.parametrize("name", MODS)
def test_with_the_mod_groups_train(name: str) -> None:
    mod, around = MODS[name]()
    trained = train(None, around, mods=(mod,))
    assert trained.num_trained == NUM_ROUNDS * NUM_GROUPS and 1e-3 < change(trained.result) < 2.0


def test_local_privacy_of_a_model_with_counters_is_refused_by_the_client() -> None:
    asked: list[int] = []
    refused(
        lambda: train(mods=(LocalDpMod(1.0, 0.1, 100.0, 0.1),), norm=True, asked=asked),
        "LocalDpMod",
        "0.num_batches_tracked",
        error=TrainingFailed,
    )
    assert not asked


def test_fedproxs_groups_stay_nearer_to_the_model_that_they_received() -> None:
    assert change(train(flower.FedProx(proximal_mu=5.0)).result) < 0.9 * change(
        train(FedAvg()).result
    )


def test_without_a_proximal_term_fedprox_is_fedavg() -> None:
    ours, mean = train(flower.FedProx(proximal_mu=0.0)).result.arrays, train(None).result.arrays
    assert {name: array.data for name, array in ours.items()} == {
        name: array.data for name, array in mean.items()
    }


def test_fedproxs_term_is_mu_times_the_way_from_the_received_weights() -> None:
    """Three groups of one, two steps on all of their own data a round: against a loop that is written by hand."""
    ours = train(
        flower.FedProx(proximal_mu=2.0),
        batch_size=NUM_SAMPLES // NUM_GROUPS,
        interval_epochs=2,
        reshuffle=False,
    ).result.arrays
    ends = []
    for group in range(NUM_GROUPS):
        model, received, data = network(), network(), part(None, group, NUM_GROUPS)  # type: ignore[arg-type]
        moving = [torch.zeros_like(own) for own in model.parameters()]
        for _ in range(2):
            loss = nn.functional.cross_entropy(model(data.inputs), data.labels)
            for own, first in zip(model.parameters(), received.parameters(), strict=True):
                loss = loss + (own - first.detach()).square().sum()  # mu / 2 = 1
            loss.backward()
            with torch.no_grad():
                for own, velocity in zip(model.parameters(), moving, strict=True):
                    own -= 0.1 * velocity.mul_(0.9).add_(own.grad)
                    own.grad = None
        ends.append(model.state_dict())
    for name, array in ours.items():
        np.testing.assert_allclose(
            array.numpy(), np.mean([end[name].numpy() for end in ends], axis=0), atol=1e-5
        )
