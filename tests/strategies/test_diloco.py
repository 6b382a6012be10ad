"""DiLoCo: its outer step against torch's SGD with Nesterov momentum, and what it refuses."""

from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord, ConfigRecord

from socflower.cluster import parse_cluster
from socflower.errors import ConfigError
from socflower.hierarchy.exchange.models import STAR
from socflower.scenario.planning import plan_scenario
from socflower.strategies.diloco import OUTER_LEARNING_RATE, OUTER_MOMENTUM, DiLoCo
from socflower.strategies.settings import ExchangeSettings, Grouping, TrainingSchedule
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


def test_each_soc_is_a_group_and_models_pass_the_hub() -> None:
    strategy = diloco()
    assert [group.members for group in strategy.plan.groups] == [(0,), (1,), (2,), (3,)]
    assert strategy.method.exchanges.leaders.kind == STAR
    assert len(diloco(groups=Grouping(num_socs=3)).plan.groups) == 3


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
        ({"outer_learning_rate": 0}, "outer_learning_rate"),
        ({"outer_learning_rate": "fast"}, "outer_learning_rate"),
        ({"outer_momentum": 1}, "outer_momentum"),
        ({"outer_momentum": float("nan")}, "outer_momentum"),
        ({"outer": object()}, "outer"),
        ({"average": max}, "average"),
        ({"groups": 4}, "groups"),
        ({"groups": Grouping(num_groups=2)}, "groups"),
        ({"exchange": ExchangeSettings(leaders="ring")}, "star"),
    ],
)
def test_what_does_not_fit_is_refused(settings: dict[str, Any], named: str) -> None:
    refused(lambda: diloco(**settings), named, error=ConfigError)


def test_a_scenario_is_planned_as_it_runs() -> None:
    scenario = small("diloco", groups="auto", epochs=2, interval=1.0)
    planned, ran = plan_scenario(scenario), small_result("diloco", epochs=2, interval=1.0)
    assert planned["leaders"] == ran["plan"]["leaders"] == STAR
    assert len(planned["groups"]) == len(ran["plan"]["groups"]) == sum(BOARDS)
    assert ran["weights_sha256"] != small_result(groups=4, epochs=2, interval=1.0)["weights_sha256"]
