"""The search for settings of `compare --search`, and trainings that end at a target."""

import json
import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from socflower.engines.ending import Ending
from socflower.report import report
from socflower.scenario.comparison import compare, finished
from socflower.scenario.predicted_epochs import mean_epoch
from socflower.scenario.runner import run_to_folder
from socflower.scenario.schema.config import CompareConfig, StrategyConfig, TrainConfig
from socflower.scenario.schema.file import load_scenario, scenario_cluster
from socflower.scenario.search import (
    Choice,
    Cost,
    Search,
    first_choice,
    moves_of,
    pattern_search,
    searched_keys,
    start_of,
    value_of,
)
from socflower.strategies.presets import CLUSTER_STRATEGIES, STRATEGIES, family_of
from tests.command_line import Socflower, is_mistake
from tests.one_line import refused
from tests.scenario.small_runs import Reference, small, without_drawing

pytestmark = pytest.mark.usefixtures("on_few_digits")

SCENARIOS = Path(__file__).resolve().parents[2] / "scenarios"
AXES = ("a", "b", "c")
points = st.lists(st.integers(-4, 4), min_size=3, max_size=3)


def moves(choice: Choice) -> Iterator[Choice]:
    for key in choice:
        for factor in (2, 0.5):
            yield {**choice, key: choice[key] * factor}


@given(optimum=points, start=points, budget=st.integers(2, 60))
def test_a_search_ends_where_no_move_is_better_or_its_trainings_are_used_up(
    optimum: list[int], start: list[int], budget: int
) -> None:
    calls: list[Choice] = []

    def cost_of(choice: Choice, best: Cost) -> Cost:
        calls.append(choice)
        assert best == min((distance(each) for each in calls[:-1]), default=(math.inf, math.inf))
        return distance(choice)

    def distance(choice: Choice) -> Cost:
        return (
            sum(abs(math.log2(choice[key]) - at) for key, at in zip(AXES, optimum, strict=True)),
            0.0,
        )

    first = {key: 2.0**at for key, at in zip(AXES, start, strict=True)}
    found = pattern_search(first, moves, cost_of, budget)
    assert len(calls) == len(found.trials) == len({tuple(each.items()) for each in calls}) <= budget
    assert calls[0] == first and found.best.cost == min(distance(each) for each in calls)
    if found.is_done:
        # Every key by itself can reach its optimum, so that the best is that of all.
        assert found.best.cost[0] == 0.0
        assert all(distance(move) >= found.best.cost for move in moves(found.best.choice))
    else:
        assert len(calls) == budget


def test_a_choice_that_cannot_run_costs_no_training() -> None:
    def cost_of(choice: Choice, best: Cost) -> Cost | None:
        return None if choice["a"] > 1 else (choice["a"], 0.0)

    found = pattern_search({"a": 1.0}, moves, cost_of, 4)
    assert [trial.choice["a"] for trial in found.trials] == [1.0, 0.5, 0.25, 0.125]
    assert not found.is_done


def test_each_strategy_is_searched_over_all_keys_that_it_reads() -> None:
    scenario = small()
    keys = {name: searched_keys(scenario.under(name)) for name in CLUSTER_STRATEGIES}
    common = ("batch_size", "learning_rate", "epochs")
    assert keys["sgd"] == common
    assert keys["ring"] == keys["fedavg"] == (*common, "socs")
    assert set(common) | {"socs", "groups"} <= set(keys["socflow"])


def test_moves_stay_inside_the_cluster_and_rates_follow_batches() -> None:
    scenario = small()
    start = start_of(scenario)
    made = list(moves_of(scenario)(start))
    assert all(1 <= each["groups"] <= each["socs"] <= start["socs"] for each in made)
    both = {"batch_size": start["batch_size"] * 2, "learning_rate": start["learning_rate"] * 2}
    assert {**start, **both} in made and {**start, "batch_size": start["batch_size"] * 2} in made


# Why a method of this family has no use for a key that others read.
OF_PRINCIPLE = {
    "groups": "the method decides its number of groups",
    "socs": "one SoC is the method",
    "local_epochs": "a round is an interval, not local epochs",
    "sync_interval_epochs": "a round is local epochs",
    "exchange": "with whom gradients meet is the method",
    "compression": "what gradients are sent as is the method",
    "doubling_epochs": "the interval does not decay, or one group only evaluates after it",
    "preemption": "there are no several groups of several SoCs",
    "dispatch": "nodes pass over data of their own, or hold a stage",
    "use_spares": "nodes pass over data of their own, or a plan of stages replaces who is gone",
}


@pytest.mark.parametrize("name", family_of("socflow"))
def test_a_strategy_may_have_every_setting_that_another_may_have(name: str) -> None:
    """Keys of [train] and [strategy] are settings of every strategy, unless it does not read them, for a reason."""
    kind, tables = STRATEGIES[name], (TrainConfig, StrategyConfig)
    for key in {key for table in tables for key in table.model_fields} - {"name"}:
        scenario = small(epochs=2)
        own: dict[str, Any] = {name: {key: value_of(scenario, key)}}
        if own[name][key] is None:
            continue
        asked = CompareConfig(strategies=("socflow", name), train=own)
        if key in kind.unread_keys:
            assert key in OF_PRINCIPLE
            refused(
                lambda scenario=scenario, asked=asked: scenario.replaced(compare=asked),
                key,
                "does not read it",
            )
        else:
            assert value_of(scenario.replaced(compare=asked).under(name), key) == own[name][key]


@pytest.mark.parametrize(
    ("own", "named"),
    [
        ({"socs": 0}, "socs = 0"),
        ({"sokcs": 4}, "did you mean 'socs'?"),
        ({"name": "sgd"}, "unknown key 'name'"),
        ({"learning_rate": -1}, "learning_rate = -1"),
    ],
)
def test_own_settings_that_do_not_fit_are_refused(own: dict[str, Any], named: str) -> None:
    asked = CompareConfig(train={"ring": own})
    refused(lambda: small().replaced(compare=asked), "[compare.train.ring]", named)


@pytest.mark.slow
@pytest.mark.parametrize("most_virtual_s", [None, 1e-9])
def test_a_run_ends_at_its_target_or_its_time_with_the_rounds_of_the_whole_run(
    most_virtual_s: float | None, reference: Reference, tmp_path: Path
) -> None:
    scenario = small(epochs=3)
    whole = json.loads((reference(scenario) / "result.json").read_text())
    target = whole["rounds"][1]["accuracy"] if most_virtual_s is None else 2.0
    ending = Ending(quality="accuracy", target=target, most_virtual_s=most_virtual_s)
    ended = without_drawing(scenario, tmp_path / "ended", ending=ending)
    first = next(
        each["round"]
        for each in whole["rounds"]
        if each["accuracy"] >= target or (each["round"] and most_virtual_s)
    )
    assert ended["ended_after"] == first and whole["ended_after"] is None
    assert ended["rounds"] == whole["rounds"][: first + 1]
    assert ended["virtual_s"] == whole["rounds"][first]["virtual_s"]


def test_a_ring_begins_with_the_socs_of_its_quickest_epoch_and_groups_with_the_scenarios() -> None:
    scenario = load_scenario(SCENARIOS / "digits_demo.toml", ["model.name=lenet5"])
    ring = scenario.under("ring")
    found = first_choice(ring)
    epochs_s = {
        number: mean_epoch(
            ring.replaced(strategy=ring.strategy.replaced(socs=number)), scenario_cluster(ring)
        ).duration_s
        for number in (1, 2, 4, 8, 16)
    }
    assert start_of(ring)["socs"] == 16 and found == {**start_of(ring), "socs": found["socs"]}
    assert epochs_s[found["socs"]] == min(epochs_s.values()) < epochs_s[16]
    for name in ("socflow", "local-sgd", "fedavg", "sgd"):
        assert first_choice(scenario.under(name)) == start_of(scenario.under(name))


def test_a_move_that_is_made_again_leaves_alone_what_did_not_move() -> None:
    """0.1 * 0.1 / 0.1 is not 0.1: the same training was counted twice."""
    tried: list[dict[str, float]] = []

    def cost_of(choice: Choice, best: Cost) -> Cost:
        tried.append(dict(choice))
        return 1.0 / choice["a"], 0.0

    def doubled(choice: Choice) -> Iterator[Choice]:
        yield {**choice, "a": choice["a"] * 2}

    pattern_search({"a": 1.0, "b": 0.1}, doubled, cost_of, 6)
    assert tried == [{"a": 2.0**power, "b": 0.1} for power in range(6)]


@pytest.mark.slow
def test_a_search_finds_settings_for_each_and_goes_on_where_it_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(report, "write_report", lambda path, *_, **__: path.write_text("page"))
    scenario = small().replaced(compare=CompareConfig(target_accuracy=0.3))
    document = compare(
        scenario, ["socflow", "sgd"], tmp_path, tuning=Search(budget=3), num_workers=0
    )
    found = document["tuning"]["strategies"]
    assert [len(found[name]["tried"]) for name in ("socflow", "sgd")] == [3, 3]
    for name in ("socflow", "sgd"):
        reached = [
            math.inf if (at := each["time_to_accuracy_s"]) is None else at
            for each in found[name]["tried"]
        ]
        assert found[name]["chosen"] == found[name]["tried"][reached.index(min(reached))]["value"]
    times = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("result.json")}
    again = compare(scenario, ["socflow", "sgd"], tmp_path, tuning=Search(budget=3), num_workers=0)
    assert again == document
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("result.json")} == times


def test_a_search_needs_a_target_and_virtual_time(socflower: Socflower) -> None:
    is_mistake(socflower("compare auto_groups --search 5"), "target_accuracy")
    is_mistake(socflower("compare digits_demo --search 1"), "2 or more")
    is_mistake(socflower("compare digits_demo --search 5 --engine deployment"), "virtual time")
    is_mistake(socflower("compare digits_demo --search 5 --tune epochs=1,2"), "give one of them")


@pytest.mark.slow
def test_runs_until_the_target_end_there_and_cost_what_whole_ones_cost_to_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(report, "write_report", lambda path, *_, **__: path.write_text("page"))
    scenario = small().replaced(
        train=small().train.replaced(epochs=3), compare=CompareConfig(target_accuracy=0.2)
    )
    whole = compare(scenario, ["socflow"], tmp_path / "whole", num_workers=0)
    until = compare(scenario, ["socflow"], tmp_path / "until", num_workers=0, until_target=True)
    for key in ("time_to_accuracy_s", "energy_to_accuracy_j"):
        assert until["rows"][0][key] == whole["rows"][0][key] is not None
    assert until["rows"][0]["virtual_s"] == until["rows"][0]["time_to_accuracy_s"]
    assert whole["rows"][0]["virtual_s"] > until["rows"][0]["virtual_s"]


def test_runs_that_end_at_a_target_need_one_and_virtual_time(socflower: Socflower) -> None:
    is_mistake(socflower("compare auto_groups --until-target"), "target_accuracy")
    is_mistake(
        socflower("compare digits_demo --until-target --engine deployment"), "trains to the end"
    )


def test_a_training_that_ended_early_is_reused_only_as_far_as_it_went(tmp_path: Path) -> None:
    scenario, path = small(), tmp_path / "result.json"
    ending = Ending(quality="accuracy", target=2.0, most_virtual_s=1e-9)
    run_to_folder(scenario, tmp_path, num_workers=0, ending=ending)
    later = replace(ending, most_virtual_s=1e9)
    easier = replace(later, target=0.0)
    kept = [finished(path, scenario, "local", asked) for asked in (ending, easier, later, None)]
    assert [each is not None for each in kept] == [True, True, False, False]
