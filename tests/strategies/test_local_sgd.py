"""Local SGD and DiLoCo: the outer step against torch's SGD with Nesterov momentum, how models meet, what is refused."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord, ConfigRecord

from socflower.cluster import parse_cluster
from socflower.errors import ConfigError
from socflower.hierarchy.exchange.models import TREE
from socflower.scenario.planning import plan_scenario
from socflower.scenario.runner import run_scenario
from socflower.scenario.schema.file import load_scenario
from socflower.scenario.schema.outer import OuterConfig
from socflower.strategies.local_sgd import DiLoCo
from socflower.strategies.outer_sgd import OUTER_LEARNING_RATE, OUTER_MOMENTUM, OuterSGD, nesterov
from socflower.strategies.settings import ExchangeSettings, Grouping, TrainingSchedule
from tests.few_digits import few_digits
from tests.one_line import refused
from tests.scenario.small_runs import BOARDS, small, small_result
from tests.strategies.fake_messages import FakeGrid, answer, model, values

NUM_ROUNDS = 4


def diloco(**settings: Any) -> DiLoCo:
    cluster = parse_cluster({"boards": 2, "socs_per_board": 2})
    schedule = TrainingSchedule(
        num_samples=32, batch_size=4, num_epochs=NUM_ROUNDS, interval_epochs=1
    )
    return DiLoCo(**{"cluster": cluster, "schedule": schedule, **settings})


def train(strategy: DiLoCo, first: int, last: int, arrays: ArrayRecord) -> list[list[float]]:
    """Return the model after each round; each SoC answers with the model it got plus its place."""
    made = []
    for server_round in range(first, last + 1):
        messages = strategy.configure_train(server_round, arrays, ConfigRecord({}), FakeGrid())
        replies = [answer(each, values(arrays)[0] + k) for k, each in enumerate(messages)]
        merged, _ = strategy.aggregate_train(server_round, replies)
        assert merged is not None
        arrays = merged
        made.append(values(arrays))
    return made


def test_the_outer_step_is_torchs_nesterov_step_on_the_mean_change() -> None:
    weight = torch.nn.Parameter(torch.zeros(3))
    step = torch.optim.SGD([weight], lr=OUTER_LEARNING_RATE, momentum=OUTER_MOMENTUM, nesterov=True)
    expected = []
    for _ in range(NUM_ROUNDS):
        # The mean of changes 0, 1, 2, 3, as a gradient.
        weight.grad = torch.full((3,), -1.5)
        step.step()
        expected.append(weight.tolist())
    np.testing.assert_allclose(train(diloco(), 1, NUM_ROUNDS, model()), expected, rtol=1e-5)


def test_each_soc_is_a_group_unless_groups_are_given_and_leaders_may_meet() -> None:
    strategy = diloco(exchange=ExchangeSettings(leaders=TREE))
    assert [group.members for group in strategy.plan.groups] == [(0,), (1,), (2,), (3,)]
    assert strategy.method.exchanges.leaders.kind == TREE
    assert len(diloco(groups=Grouping(num_groups=3, num_socs=3)).plan.groups) == 3
    assert [group.members for group in diloco(groups=2).plan.groups] == [(0, 1), (2, 3)]


def test_a_resumed_training_has_the_moments() -> None:
    whole, begun, resumed = (diloco() for _ in range(3))
    expected = train(whole, 1, NUM_ROUNDS, model())
    halfway = train(begun, 1, 2, model())
    resumed.resume_from(2, **begun.state)
    assert train(resumed, 3, NUM_ROUNDS, model(halfway[-1][0])) == expected[2:]


def test_a_state_has_the_moments_alone() -> None:
    strategy = diloco()
    train(strategy, 1, 1, model())
    assert {key.partition("/")[0] for key in strategy.state["outer"]} == {"moments"}


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"outer": object()}, "outer"),
        ({"average": max}, "average"),
    ],
)
def test_what_does_not_fit_is_refused(settings: dict[str, Any], named: str) -> None:
    refused(lambda: diloco(**settings), named, error=ConfigError)


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"learning_rate": 0}, "learning_rate"),
        ({"learning_rate": "fast"}, "learning_rate"),
        ({"momentum": 1}, "momentum"),
        ({"momentum": float("nan")}, "momentum"),
    ],
)
def test_a_step_that_cannot_be_is_refused(settings: dict[str, Any], named: str) -> None:
    for make in (OuterSGD, nesterov):
        refused(lambda make=make: make(**settings), named)  # type: ignore[misc]


RUN: dict[str, Any] = {"groups": "auto", "epochs": 2, "interval": 1.0}


@pytest.mark.parametrize("name", ["local-sgd", "diloco", "muloco"])
def test_a_scenario_is_planned_as_it_runs(name: str) -> None:
    ran = small_result(name, **RUN)
    with few_digits():
        planned = plan_scenario(small(name, **RUN))
    assert planned["leaders"] == ran["plan"]["leaders"]
    assert len(planned["groups"]) == len(ran["plan"]["groups"]) == sum(BOARDS)
    predicted = planned["predicted"]["epoch_s"] * 2
    assert ran["virtual_s"] == pytest.approx(predicted, rel=0.02)


def test_the_presets_are_what_they_are_made_of() -> None:
    """Local SGD is groups of one, DiLoCo local SGD with AdamW and an outer step, a whole step is none."""
    weights = {
        name: small_result(name, **RUN)["weights_sha256"] for name in ("local-sgd", "diloco")
    }
    assert weights["local-sgd"] == small_result(**{**RUN, "groups": 4})["weights_sha256"]
    whole = OuterConfig(name="sgd", learning_rate=1.0)
    assert weights["local-sgd"] == small_result("local-sgd", **RUN, outer=whole)["weights_sha256"]
    adamw = small("local-sgd", **RUN, outer=OuterConfig(name="nesterov"))
    adamw = adamw.replaced(train=adamw.train.replaced(optimizer="adamw"))
    with few_digits():
        assert run_scenario(adamw, num_workers=0)["weights_sha256"] == weights["diloco"]


def test_a_comparison_trains_each_method_as_published() -> None:
    scenario = small(compression="int8", outer=OuterConfig(name="fedadam"))
    scenario = scenario.replaced(train=scenario.train.replaced(optimizer="sgd", momentum=0.5))
    other = scenario.under("muloco")
    assert (other.optimizer, other.momentum, other.strategy.groups) == ("muon", 0.0, "auto")
    assert other.strategy.compression == "none" and other.strategy.outer_step == OuterConfig(
        name="nesterov"
    )
    assert scenario.under("local-sgd").momentum == 0.5


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ('[train]\noptimizer = "adamw"\n[strategy]\nname = "muloco"', "'diloco'"),
        ('[train]\nmomentum = 0.9\n[strategy]\nname = "diloco"', "'adamw'"),
        ('[strategy]\nname = "diloco"\n[strategy.outer]\nname = "momentum"', "momentum"),
        ('[strategy.outer]\nname = "sgd"\nmomentum = 0.9', "momentum = 0.9"),
        ('[strategy]\nname = "ring"\n[strategy.outer]\nname = "sgd"', "one group"),
    ],
)
def test_settings_that_a_method_does_not_read_are_refused(
    text: str, named: str, tmp_path: Path
) -> None:
    (tmp_path / "case.toml").write_text(text)
    refused(lambda: load_scenario(tmp_path / "case.toml"), named)
