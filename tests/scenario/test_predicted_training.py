"""Predictions of whole trainings against what runs are charged."""

import pytest

from socflower.errors import ConfigError
from socflower.scenario.predicted_training import predicted_training
from socflower.scenario.runner import run_scenario
from socflower.scenario.schema.config import DataConfig
from socflower.scenario.schema.file import scenario_cluster
from socflower.scenario.schema.scenario_file import Scenario
from tests.one_line import refused
from tests.scenario.small_runs import small

pytestmark = pytest.mark.usefixtures("on_few_digits")


def own(name: str, **changes: object) -> Scenario:
    return small().under(name, {"batch_size": 16, **changes})


@pytest.mark.parametrize(
    "scenario",
    [
        own("fedavg", socs=3),
        own("fedavg").replaced(data=DataConfig(partition="dirichlet", alpha=0.3)),
        pytest.param(own("2d"), marks=pytest.mark.slow),
        pytest.param(own("hybrid-pipeline"), marks=pytest.mark.slow),
        own("ring"),
    ],
    ids=lambda scenario: f"{scenario.strategy.name}-{scenario.data.partition}",
)
def test_a_prediction_is_what_the_run_is_charged(scenario: Scenario) -> None:
    predicted = predicted_training(scenario, scenario_cluster(scenario))
    result = run_scenario(scenario, num_workers=0)
    # Messages of Flower's have a few bytes more than the arrays.
    assert predicted.duration_s == pytest.approx(result["virtual_s"], rel=2e-3)
    assert predicted.energy_j == pytest.approx(result["energy_j"], rel=2e-3)


def test_local_epochs_make_rounds_longer_and_fewer() -> None:
    often = own("fedavg", epochs=2)
    rarely = own("fedavg", epochs=2, local_epochs=2)
    cluster = scenario_cluster(often)
    shorter = predicted_training(rarely, cluster).duration_s
    assert shorter < predicted_training(often, cluster).duration_s


def test_more_parts_than_samples_are_refused() -> None:
    scenario = own("fedavg").replaced(boards=(), cluster={"boards": 1000, "socs_per_board": 5})
    refused(
        lambda: predicted_training(scenario, scenario_cluster(scenario)), "socs", error=ConfigError
    )
