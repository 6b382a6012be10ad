"""The search of `socflower tune`: candidates, fronts, and trainings that go farther and farther."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from socflower.engines.ending import Ending
from socflower.errors import TrainingFailed
from socflower.scenario.candidates import PredictedCosts, by_fronts, candidates_of, front
from socflower.scenario.planning import planned_training
from socflower.scenario.runner import run_to_folder
from socflower.scenario.schema.config import CompareConfig, ModelConfig, PrecisionConfig
from socflower.scenario.schema.file import load_scenario, scenario_cluster
from socflower.scenario.schema.scenario_file import Scenario
from socflower.scenario.tune import runner, tune
from tests.command_line import Socflower, is_mistake
from tests.one_line import refused
from tests.scenario.small_runs import small

pytestmark = pytest.mark.usefixtures("on_few_digits")

METHODS = ("socflow", "ring", "sgd")
FP32 = ("fp32",)
ROOT = Path(__file__).parents[2]
costs = st.lists(
    st.builds(
        lambda time_s, energy_j: PredictedCosts(time_s=float(time_s), energy_j=float(energy_j)),
        st.integers(1, 5),
        st.integers(1, 5),
    ),
    min_size=1,
    max_size=12,
)


def beats(one: PredictedCosts, other: PredictedCosts) -> bool:
    no_worse = one.time_s <= other.time_s and one.energy_j <= other.energy_j
    return no_worse and (one.time_s < other.time_s or one.energy_j < other.energy_j)


@given(all_costs=costs)
def test_the_front_is_what_nothing_beats(all_costs: list[PredictedCosts]) -> None:
    best = front(all_costs)
    brute = {each for each in all_costs if not any(beats(other, each) for other in all_costs)}
    assert {all_costs[index] for index in best} == brute
    assert len(best) == len(brute)
    assert [all_costs[index].time_s for index in best] == sorted({each.time_s for each in brute})


@given(all_costs=costs)
def test_fronts_follow_each_other_and_leave_nobody_out(all_costs: list[PredictedCosts]) -> None:
    order = by_fronts(all_costs)
    assert sorted(order) == list(range(len(all_costs)))
    for position, index in enumerate(order):
        assert not any(beats(all_costs[later], all_costs[index]) for later in order[position + 1 :])


@pytest.fixture(scope="module")
def scenario() -> Scenario:
    return small(boards=(2, 2), epochs=4).replaced(compare=CompareConfig(target_accuracy=0.5))


@pytest.mark.slow
def test_settings_of_a_candidate_have_equal_steps_and_their_predicted_costs(
    scenario: Scenario,
) -> None:
    found, refused_strategies = candidates_of(scenario, METHODS, FP32)
    assert refused_strategies == {}
    for candidate in found:
        assert len({setting.scenario.train.learning_rate for setting in candidate.settings}) == 1
        for setting in candidate.settings:
            own = setting.scenario
            planned = planned_training(own, scenario_cluster(own))
            assert setting.epoch.time_s == pytest.approx(planned.duration_s / own.train.epochs)
            assert not setting.epoch.is_dominated(other.epoch for other in candidate.settings)
    assert len(
        {
            (each.step, each.arithmetic, each.settings[0].scenario.train.learning_rate)
            for each in found
        }
    ) == len(found)


def test_methods_that_bring_another_optimiser_share_no_training(scenario: Scenario) -> None:
    found, _ = candidates_of(scenario, ("diloco", "muloco"), FP32)
    for candidate in found:
        assert len({setting.strategy for setting in candidate.settings}) == 1
    assert {each.settings[0].strategy for each in found} == {"diloco", "muloco"}


def test_a_strategy_that_cannot_train_so_is_named_with_the_reason(scenario: Scenario) -> None:
    in_int8 = scenario.replaced(precision=PrecisionConfig(arithmetic="int8"))
    found, why = candidates_of(in_int8, ("sgd", "muloco"))
    assert found and {"muloco in int8", "muloco in mixed"} == set(why)
    assert "'muon'" in why["muloco in int8"]


def test_each_arithmetic_that_fits_has_candidates_of_its_own(scenario: Scenario) -> None:
    found, why = candidates_of(scenario, ("sgd",))
    assert why == {}
    kinds = [
        {setting.choice["arithmetic"] for setting in candidate.settings} for candidate in found
    ]
    assert all(len(kind) == 1 for kind in kinds)
    assert set.union(*kinds) == {"fp32", "int8", "mixed"}


def test_a_model_with_an_operator_that_int8_lacks_has_candidates_in_both(
    scenario: Scenario,
) -> None:
    recurrent = scenario.replaced(
        model=ModelConfig(factory="models_for_tests:with_tanh"),
        folder=str(Path(__file__).parent),
    )
    # What int8 lacks runs in FP32 beside it, so that both arithmetics have candidates.
    found, why = candidates_of(recurrent, ("sgd",), ("fp32", "int8"))
    assert {each.settings[0].choice["arithmetic"] for each in found} == {"fp32", "int8"}
    assert why == {}


def test_pipelines_are_settings_of_the_candidate_whose_steps_they_compute() -> None:
    # Steps that take long enough for stages to pay.
    scenario = small(boards=(2,), batch_size=64).replaced(
        model=ModelConfig(name="vgg-tiny"), compare=CompareConfig(target_accuracy=0.5)
    )
    found, _ = candidates_of(scenario, ("sgd", "hybrid-pipeline"), FP32)
    alone, _ = candidates_of(scenario, ("sgd",), FP32)
    assert [each.key for each in found] == [each.key for each in alone]
    names = {setting.strategy for each in found for setting in each.settings}
    assert names == {"sgd", "hybrid-pipeline"}
    assert {each.trained.strategy for each in found} == {"sgd"}


def test_clients_of_fedavg_change_what_is_learned(scenario: Scenario) -> None:
    found, _ = candidates_of(scenario, ("fedavg",), FP32)
    counts = {each.step[1] for each in found}
    assert counts == {1, 2, 4}
    assert all(len(each.settings) == 1 for each in found)


def curves(scenario: Scenario, label: str, ending: Ending) -> Mapping[str, Any]:
    """Return a made-up training: its error is 1 over epochs, and halves with half the groups."""
    groups = scenario.strategy.groups if scenario.strategy.name == "socflow" else 1
    rate = 0.05 / scenario.train.learning_rate
    assert isinstance(groups, int)
    planned = planned_training(scenario, scenario_cluster(scenario))
    epoch_s = planned.duration_s / scenario.train.epochs
    rounds: list[dict[str, Any]] = []
    interval = scenario.interval_epochs
    assert isinstance(interval, float)
    for number in range(int(scenario.train.epochs / interval) + 1):
        epoch = number * interval
        error = min(0.9, 0.12 * groups * max(rate, 1 / rate) / max(epoch, 0.1))
        rounds.append({"epoch": epoch, "accuracy": 1.0 - error, "virtual_s": epoch * epoch_s})
        if rounds[-1]["accuracy"] >= ending.target or epoch >= (ending.most_epochs or 1e9):
            break
    last = rounds[-1]
    energy_j = planned.energy_j / scenario.train.epochs * last["epoch"]
    return {
        "rounds": rounds,
        "final_accuracy": last["accuracy"],
        "virtual_s": last["virtual_s"],
        "energy_j": energy_j,
    }


@pytest.mark.slow
@pytest.mark.parametrize("prefer", ["time", "energy"])
def test_the_chosen_setting_is_the_best_of_all_on_known_curves(
    scenario: Scenario, prefer: str, tmp_path: Path
) -> None:
    hard = scenario.replaced(compare=CompareConfig(target_accuracy=0.85))
    document = tune(hard, METHODS, tmp_path, curves, budget=40, prefer=prefer, arithmetics=FP32)
    exhaustive = []
    for candidate in candidates_of(hard, METHODS, FP32)[0]:
        for setting in candidate.settings:
            ending = Ending(quality="accuracy", target=0.85)
            whole = curves(setting.scenario, "", ending)
            if whole["final_accuracy"] >= 0.85:
                exhaustive.append(whole["virtual_s" if prefer == "time" else "energy_j"])
    chosen = document["chosen"]["time_s" if prefer == "time" else "energy_j"]
    assert chosen <= 1.05 * min(exhaustive)
    shown = ("epochs", "value", "reached", "projected_epochs")
    farthest = {
        tuple(value for key, value in each.items() if key not in shown): each["epochs"]
        for each in document["trainings"]
    }
    assert sum(farthest.values()) <= 40 / 4 * scenario.train.epochs
    assert json.loads((tmp_path / "tune.json").read_text()) == document


@pytest.mark.slow
def test_a_target_that_nobody_reaches_ends_in_a_line(scenario: Scenario, tmp_path: Path) -> None:
    hard = scenario.replaced(compare=CompareConfig(target_accuracy=0.999))
    refused(
        lambda: tune(hard, METHODS, tmp_path, curves, budget=4, arithmetics=FP32),
        "99.9",
        error=TrainingFailed,
    )
    assert not (tmp_path / "chosen.toml").exists()


@pytest.mark.slow
def test_the_chosen_scenario_is_a_file_that_costs_what_was_said(
    scenario: Scenario, tmp_path: Path
) -> None:
    target = CompareConfig(target_accuracy=0.15)
    easy = scenario.replaced(compare=target, train=scenario.train.replaced(epochs=1))
    run = runner(tmp_path, "local", 0, lambda label: lambda entry: None)
    document = tune(easy, ("socflow", "sgd"), tmp_path, run, budget=2, arithmetics=FP32)
    chosen = load_scenario(tmp_path / "chosen.toml")
    assert chosen.strategy.name == document["chosen"]["strategy"]
    ending = Ending(quality="accuracy", target=0.15)
    again = run_to_folder(chosen, tmp_path / "again", num_workers=0, ending=ending)
    assert again["virtual_s"] == document["chosen"]["time_s"]
    assert "chosen" in (tmp_path / "report.html").read_text().lower()
    # Nothing is trained twice.
    again = tune(easy, ("socflow", "sgd"), tmp_path, run, budget=2, arithmetics=FP32)
    assert again == document


def test_what_cannot_be_tuned_is_refused(socflower: Socflower) -> None:
    is_mistake(socflower("tune auto_groups"), "target_accuracy")
    is_mistake(socflower("tune digits_demo --prefer both"), "--prefer both")
    is_mistake(socflower("tune digits_demo --budget 1"), "budget")
    is_mistake(socflower("tune digits_demo --strategies split-replay"), "--strategies split-replay")
    is_mistake(socflower("tune digits_demo --arithmetics int4"), "--arithmetics int4")
    is_mistake(socflower("tune digits_demo --vary lr=1,2"), "--vary", "Flower app")
    shelf = ROOT / "scenarios" / "clusters" / "shelf_of_eight.toml"
    app = f"tune {ROOT / 'scenarios' / 'quickstart_app'} --cluster {shelf}"
    is_mistake(socflower(f"{app} --target-accuracy 0.9"), "--vary")
    is_mistake(socflower(f"{app} --vary batch-size=8,16"), "--target-accuracy")
    accurate = f"{app} --target-accuracy 0.9"
    is_mistake(socflower(f"{accurate} --vary batch-size=8,16"), "--rounds-key num-server-rounds")
    own = f"{accurate} --rounds-key num-epochs"
    is_mistake(socflower(f"{own} --vary num-epochs=1,2"), "--vary num-epochs")
    is_mistake(socflower(f"{own} --vary nobody=1,2"), "'nobody'")
    is_mistake(socflower(f"{own} --vary batch-size=8,16 --strategies sgd"), "--strategies")
