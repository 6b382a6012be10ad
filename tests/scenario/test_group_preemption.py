"""Users that end whole groups, through scenarios: events, background load, plans and refusals."""

from typing import Any

import pytest

from socflower.scenario.heat import predicted_heat
from socflower.scenario.runner import run_scenario
from socflower.scenario.schema.config import EventConfig, StrategyConfig
from socflower.scenario.schema.file import scenario_cluster
from socflower.scenario.schema.scenario_file import Scenario
from socflower.scenario.schema.thermal import BackgroundLoadConfig
from tests.one_line import refused
from tests.scenario.small_runs import small, small_result

pytestmark = pytest.mark.usefixtures("on_few_digits")


def preempt(soc: int, server_round: int, rounds: int = 1) -> EventConfig:
    return EventConfig(kind="preempt", soc=soc, round=server_round, rounds=rounds)


def kinds(result: dict[str, Any]) -> list[list[str]]:
    return [[event["kind"] for event in entry["events"]] for entry in result["rounds"]]


@pytest.mark.slow
def test_a_group_ends_with_its_soc_and_comes_back_with_it() -> None:
    result = small_result(
        boards=(4, 4), epochs=3, events=(preempt(1, 2, rounds=2),), preemption="groups"
    )
    assert kinds(result) == [
        [],
        [],
        ["preempted", "terminated"],
        ["replanned"],
        ["returned"],
        ["replanned"],
        [],
    ]
    texts = [event["text"] for entry in result["rounds"] for event in entry["events"]]
    assert "group 0: terminated" in texts[1]
    assert texts[2] == "new plan: 1 group of 4 SoCs, without 0, 1, 2, 3"
    assert texts[-1] == "new plan: 2 groups of 8 SoCs"


def test_a_group_that_ended_does_not_count() -> None:
    """The round's model is that of the other group: as if only its interval were averaged."""
    ended = small_result(boards=(4, 4), interval=1.0, events=(preempt(1, 1),), preemption="groups")
    went_on = small_result(boards=(4, 4), interval=1.0, events=(preempt(1, 1),))
    other = small_result(boards=(4, 4), interval=1.0, events=(preempt(5, 1),), preemption="groups")
    losses = [result["rounds"][1]["loss"] for result in (ended, went_on, other)]
    assert len(set(losses)) == 3


def test_one_group_always_stays() -> None:
    """Both lose a SoC: one goes on without it, and while no group is whole the SoCs that are left share the work."""
    result = small_result(
        boards=(4, 4),
        epochs=2,
        events=(preempt(1, 1, rounds=2), preempt(5, 1, rounds=2)),
        preemption="groups",
    )
    assert kinds(result)[1].count("terminated") == 1
    assert "new plan: 2 groups of 6 SoCs, without 1, 5" in str(result["rounds"][2]["events"])
    assert result["final_accuracy"] > 0


def with_games(preemption: str, part_busy: float) -> Scenario:
    scenario = small(boards=(2, 2), groups=2, epochs=2, preemption=preemption)
    load = BackgroundLoadConfig(games=(part_busy,), takes_soc=True)
    # So slow that games come and go within a round.
    return scenario.replaced(background_load=load)


@pytest.mark.slow
def test_without_users_both_ways_are_the_same() -> None:
    results = [
        run_scenario(with_games(preemption, part_busy=0.0), num_workers=0)
        for preemption in ("socs", "groups")
    ]
    for key in ("weights_sha256", "virtual_s", "energy_j"):
        assert results[0][key] == results[1][key]


def test_the_prediction_of_whole_groups_takes_no_longer() -> None:
    times = {
        preemption: predicted_heat(scenario, scenario_cluster(scenario))["virtual_s"]
        for preemption in ("socs", "groups")
        if (scenario := with_games(preemption, part_busy=0.3))
    }
    assert times["groups"] <= times["socs"]


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"groups": 1}, "groups = 1"),
        ({"groups": 2, "rebalance": "both"}, "rebalance = 'both'"),
        ({"groups": 2, "rebalance": "groups"}, "rebalance = 'groups'"),
        ({"groups": 2, "quorum": 0.5}, "quorum = 0.5"),
        ({"name": "ring"}, "'ring'"),
        ({"name": "local-sgd"}, "'local-sgd'"),
        ({"name": "fedavg"}, "'fedavg'"),
        ({"name": "hybrid-pipeline"}, "'hybrid-pipeline'"),
    ],
)
def test_what_whole_groups_do_not_go_with_is_one_line(changes: dict[str, Any], named: str) -> None:
    strategy = StrategyConfig(preemption="groups", **changes)
    refused(lambda: Scenario().replaced(strategy=strategy), "preemption", named)


def test_other_methods_of_a_comparison_do_not_read_it() -> None:
    scenario = small(preemption="groups")
    assert scenario.under("ring").strategy.preemption == "socs"
    assert scenario.under("fedavg").strategy.preemption == "socs"
    assert scenario.under("socflow").strategy.preemption == "groups"
