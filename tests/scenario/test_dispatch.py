"""`[strategy] dispatch`: nodes train on the samples that the hub sends, to the same weights."""

from collections.abc import Callable
from typing import Any

import pytest

from socflower.cluster import parse_cluster
from socflower.scenario.app import main as app
from socflower.scenario.runner import run_scenario
from socflower.scenario.schema.config import PrecisionConfig, StrategyConfig
from socflower.scenario.schema.scenario_file import Scenario
from socflower.scenario.workload import scenario_data
from socflower.strategies.settings import TrainingSchedule
from socflower.strategies.socflow import SoCFlow
from tests.hierarchy.toy_trainings import interval_costs
from tests.one_line import refused
from tests.scenario.small_runs import small
from tests.workloads.test_dispatched import some_data

pytestmark = pytest.mark.usefixtures("on_few_digits")


@pytest.fixture
def without_data(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """No node has data: loading them fails, until this is called."""

    def none_here(*_: object) -> None:
        raise AssertionError("a node loads data")

    monkeypatch.setattr(app, "training_data", none_here)
    return monkeypatch.undo


@pytest.mark.parametrize(
    "name", ["socflow", "local-sgd", pytest.param("ring", marks=pytest.mark.slow)]
)
def test_nodes_without_data_train_to_the_same_weights(
    name: str, without_data: Callable[[], None]
) -> None:
    scenario = small(epochs=2, interval=0.5)
    if name == "local-sgd":
        scenario = scenario.replaced(strategy=scenario.strategy.replaced(groups="auto"))
    scenario = scenario.under(name)
    strategy = scenario.strategy.replaced(dispatch=True)
    sent = run_scenario(scenario.replaced(strategy=strategy), num_workers=0)
    without_data()
    held = run_scenario(scenario, num_workers=0)
    assert sent["weights_sha256"] == held["weights_sha256"]
    # The samples of each epoch pass the hub.
    num_samples = 2 * len(scenario_data(scenario).train)
    extra = sent["bytes"]["hub"] - held["bytes"]["hub"]
    assert extra == pytest.approx(num_samples * 4 * 28 * 28, rel=1e-6)
    assert sent["virtual_s"] > held["virtual_s"]


def test_int8_trains_on_what_was_sent(without_data: Callable[[], None]) -> None:
    precision = PrecisionConfig(arithmetic="int8")
    sent = run_scenario(small(dispatch=True).replaced(precision=precision), num_workers=0)
    assert sent["final_accuracy"] > 0.1


def test_every_epoch_is_priced_as_the_others_are() -> None:
    """One distribution an epoch; without dispatch the first is part of setup, and one group keeps its data."""
    cluster = parse_cluster({"boards": [2, 2]})
    for num_groups in (1, 2):
        held, sent = (
            interval_costs(
                cluster, num_groups, steps_per_epoch=20 // num_groups, dispatches=dispatches
            )
            for dispatches in (False, True)
        )
        schedule = TrainingSchedule(num_samples=640, batch_size=32, num_epochs=3, interval_epochs=1)
        intervals = SoCFlow(
            cluster=cluster, schedule=schedule, groups=num_groups
        ).method.sync.intervals
        begins = [[each.begins_with_deal(part) for part in intervals] for each in (held, sent)]
        assert begins[1] == [True] * 3
        assert begins[0] == ([False] * 3 if num_groups == 1 else [False, True, True])


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"name": "fedavg"}, "'fedavg'"),
        ({"name": "tree-fedavg"}, "'tree-fedavg'"),
        ({"name": "hybrid-pipeline"}, "'hybrid-pipeline'"),
        ({"reshuffle": False}, "reshuffle = False"),
    ],
)
def test_what_it_does_not_go_with_is_one_line(changes: dict[str, Any], named: str) -> None:
    strategy = StrategyConfig(dispatch=True, **changes)
    refused(lambda: Scenario().replaced(strategy=strategy), "dispatch", named)


def test_mixed_training_and_data_of_other_forms_are_one_line() -> None:
    mixed = PrecisionConfig(arithmetic="mixed")
    strategy = StrategyConfig(dispatch=True)
    refused(lambda: Scenario().replaced(strategy=strategy, precision=mixed), "dispatch", "'mixed'")
    cluster = parse_cluster({"boards": [2]})
    schedule = TrainingSchedule(num_samples=8, batch_size=2, num_epochs=1)
    refused(
        lambda: SoCFlow(cluster=cluster, schedule=schedule, dispatch=some_data(9)),
        "9 samples",
        "num_samples = 8",
    )
    stays = TrainingSchedule(num_samples=9, batch_size=2, num_epochs=1, reshuffle=False)
    refused(
        lambda: SoCFlow(cluster=cluster, schedule=stays, dispatch=some_data(9)), "reshuffle = False"
    )


def test_other_methods_of_a_comparison_keep_their_data() -> None:
    assert not small(dispatch=True).under("fedavg").strategy.dispatch
    assert small(dispatch=True).under("ring").strategy.dispatch
