"""What `compare --front` predicts of every method, and what it trains."""

import json
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from socflower.errors import ConfigError
from socflower.report.quality import ACCURACY
from socflower.scenario.expectations import claims_without
from socflower.scenario.predicted_epochs import mean_epoch, samples_a_step
from socflower.scenario.predicted_methods import (
    front_of,
    judge,
    predicted_methods,
    require_front,
)
from socflower.scenario.predicted_training import predicted_training
from socflower.scenario.runner import run_scenario
from socflower.scenario.schema.config import CompareConfig
from socflower.scenario.schema.file import load_scenario, parse_scenario, scenario_cluster
from socflower.scenario.schema.scenario_file import Scenario
from socflower.strategies.presets import STRATEGIES, family_of
from tests.command_line import Socflower, is_mistake
from tests.one_line import refused
from tests.scenario.small_runs import small

ROOT = Path(__file__).parents[2]
SHIPPED = load_scenario(ROOT / "scenarios" / "digits_demo.toml")
ALL = family_of("socflow")
whole = st.integers(1, 5)


def searched(**epochs_to_target: float) -> Scenario:
    compared = CompareConfig(
        strategies=("socflow", *(name for name in epochs_to_target if name != "socflow")),
        target_accuracy=0.5,
        epochs_to_target=epochs_to_target,
    )
    return small(boards=(2, 2)).replaced(compare=compared)


def test_every_method_of_the_family_is_predicted_or_refused_with_a_reason() -> None:
    scenario = searched(socflow=2.0, sgd=1.0)
    found = predicted_methods(scenario, scenario.compare.strategies)
    assert {row["strategy"] for row in found.rows} | set(found.refused) == set(ALL)
    assert all(len(why.splitlines()) == 1 for why in found.refused.values())
    for row in found.rows:
        assert row["equal_epoch_s"] >= row["best_epoch_s"] > 0.0 < row["equal_epoch_energy_j"]


@given(costs=st.dictionaries(st.sampled_from(ALL), st.none() | st.tuples(whole, whole)))
def test_on_the_front_is_what_no_other_method_dominates(
    costs: dict[str, tuple[int, int] | None],
) -> None:
    rows = [
        {"strategy": name, "time_s": own and own[0], "energy_j": own and own[1]}
        for name, own in costs.items()
    ]
    known = [own for own in costs.values() if own is not None]
    for row in judge(rows):
        own = costs[row["strategy"]]
        dominated = own is not None and any(
            each != own and each[0] <= own[0] and each[1] <= own[1] for each in known
        )
        first = own is not None and next(name for name, each in costs.items() if each == own)
        assert row["on_front"] == (first == row["strategy"] and not dominated)


def test_what_trains_is_the_front_of_epochs_times_their_cost_beside_one_soc() -> None:
    needed = {"socflow": 90.0, "sgd": 90.0, "ring": 0.1, "fedavg": 80.0}
    scenario = searched(**needed)
    found = predicted_methods(scenario, list(needed), others=())
    assert found.trained == ("socflow", "sgd", "ring") and found.left_out == ("fedavg",)
    for row in found.rows:
        under = scenario.under(row["strategy"])
        epochs, own = needed[row["strategy"]], mean_epoch(under, scenario_cluster(under))
        costs = (epochs * own.duration_s, epochs * own.energy_j)
        assert (row["time_s"], row["energy_j"]) == pytest.approx(costs)
        assert row["on_front"] == (row["strategy"] == "ring")


def test_methods_without_earlier_trainings_are_predicted_and_never_trained() -> None:
    scenario = searched(socflow=2.0, sgd=1.0)
    found = predicted_methods(scenario, ["socflow", "sgd", "ring"], others=["fedavg"])
    assert found.trained == ("socflow", "sgd") and found.left_out == ("ring",)
    for row in found.rows:
        if row["strategy"] not in ("socflow", "sgd"):
            assert row["time_s"] is row["energy_j"] is None and not row["on_front"]


@pytest.mark.usefixtures("on_few_digits")
@pytest.mark.parametrize("changes", [{}, {"fusion": "per-tensor"}])
def test_fedavg_is_predicted_as_it_runs(changes: dict[str, Any]) -> None:
    """Flower's arrays have heads of some bytes, which the prediction has not."""
    scenario = small("fedavg", groups="auto", epochs=2, **changes)
    ran = run_scenario(scenario, num_workers=0)
    planned = predicted_training(scenario, scenario_cluster(scenario))
    assert ran["virtual_s"] == pytest.approx(planned.duration_s, rel=0.01)
    assert ran["energy_j"] == pytest.approx(planned.energy_j, rel=0.01)


def test_samples_a_step_are_those_of_all_batches_at_once() -> None:
    scenario = small(boards=(2, 2), batch_size=8)
    expected = {"socflow": 16, "ring": 8, "sgd": 8, "local-sgd": 32, "fedavg": 32, "2d": 8}
    assert {name: samples_a_step(scenario.under(name)) for name in expected} == expected


def test_only_claims_against_what_is_left_out_are_dropped() -> None:
    expect = {
        "min_accuracy": 0.9,
        "min_time_to_accuracy_gain_over_ring": 1.0,
        "min_time_to_accuracy_gain_over_fedavg": 1.0,
        "max_accuracy_gap_to_fedavg": 0.1,
        "min_energy_gain_over_tree-fedavg": 1.0,
    }
    kept = claims_without(expect, ["fedavg"])
    assert list(kept) == [*list(expect)[:2], "min_energy_gain_over_tree-fedavg"]
    for other in STRATEGIES:
        assert claims_without({f"min_energy_gain_over_{other}": 1.0}, [other]) == {}


def test_the_front_of_trainings_is_that_of_means_of_strategies_that_always_arrive() -> None:
    def result(strategy: str, time_s: float | None, energy_j: float | None) -> dict[str, Any]:
        return {
            "strategy": strategy,
            ACCURACY.time_key: time_s,
            ACCURACY.energy_key: energy_j,
        }

    rows = front_of(
        [
            result("socflow", 1.0, 10.0),
            result("socflow", 3.0, 14.0),
            result("ring", 4.0, 20.0),
            result("ring", 2.0, 6.0),
            result("sgd", 8.0, 1.0),
            result("sgd", None, None),
            result("fedavg", 2.5, 13.0),
        ],
        ACCURACY,
    )
    assert [(row["strategy"], row["time_s"], row["energy_j"], row["on_front"]) for row in rows] == [
        ("socflow", 2.0, 12.0, True),
        ("ring", 3.0, 13.0, False),
        ("fedavg", 2.5, 13.0, False),
    ]
    assert rows[0]["runs"] == [(1.0, 10.0), (3.0, 14.0)] and "runs" not in rows[2]
    assert front_of([], ACCURACY) == []


def test_epochs_of_the_demonstration_are_those_of_its_stored_seeds() -> None:
    """So the front that is predicted is that of the README's picture."""
    stored = json.loads((ROOT / "docs" / "results" / "digits_seeds.json").read_text("utf-8"))
    front = {row["strategy"]: row for row in front_of(stored["rows"], ACCURACY)}
    assert set(SHIPPED.compare.epochs_to_target) == set(front) == set(SHIPPED.compare.strategies)
    for name, epochs in SHIPPED.compare.epochs_to_target.items():
        under = SHIPPED.under(name)
        own = mean_epoch(under, scenario_cluster(under))
        assert epochs * own.duration_s == pytest.approx(front[name]["time_s"], rel=0.01)
        assert epochs * own.energy_j == pytest.approx(front[name]["energy_j"], rel=0.01)
    found = predicted_methods(SHIPPED, SHIPPED.compare.strategies, others=())
    assert {row["strategy"] for row in found.rows if row["on_front"]} == {
        name for name, row in front.items() if row["on_front"]
    }
    assert found.trained == ("socflow", "sgd", "ring", "local-sgd")


@pytest.mark.parametrize(
    ("epochs", "named"),
    [
        ({"adam": 1.0}, "no such strategy"),
        ({"ring": 0.0}, "[compare.epochs_to_target] ring = 0"),
        ({"ps": 1.0}, "does not run 'ps'"),
    ],
)
def test_epochs_to_the_target_are_refused_in_a_line(epochs: dict[str, float], named: str) -> None:
    tables = {"compare": {"target_accuracy": 0.5, "epochs_to_target": epochs}}
    refused(lambda: parse_scenario(tables, name="x", question="", where="x.toml"), named)


def test_epochs_without_a_target_are_refused() -> None:
    tables = {"compare": {"epochs_to_target": {"ring": 1.0}}}
    refused(
        lambda: parse_scenario(tables, name="x", question="", where="x.toml"), "target_accuracy"
    )


def test_a_front_that_cannot_be_predicted_is_refused(socflower: Socflower) -> None:
    refused(lambda: require_front(small()), "epochs_to_target", error=ConfigError)
    is_mistake(socflower("compare auto_groups --front"), "epochs_to_target")
    is_mistake(socflower("compare split_against_edge --front"), "--front")
    is_mistake(socflower("compare digits_demo --front --search 4"), "--search")
    is_mistake(socflower("compare digits_demo --front --tune learning_rate=1,2"), "--tune")
    is_mistake(socflower("compare digits_demo --front --strategies socflow,none"), "none")
    is_mistake(socflower("compare digits_demo --front --seeds x"), "--seeds x")
    app = ROOT / "scenarios" / "quickstart_app"
    is_mistake(socflower(f"compare {app} --cluster none.toml --front"), "--front")


@pytest.mark.slow
@pytest.mark.usefixtures("on_few_digits")
def test_a_comparison_of_the_front_has_predictions_and_the_front_as_trained(
    socflower: Socflower, tmp_path: Path
) -> None:
    (tmp_path / "front.toml").write_text(
        """# Which?
[cluster]
boards = [2, 2]
[train]
epochs = 1
learning_rate = 0.05
[strategy]
groups = 2
sync_interval_epochs = 0.5
[compare]
strategies = ["socflow", "sgd", "fedavg"]
target_accuracy = 0.1
[compare.epochs_to_target]
socflow = 1.0
sgd = 1.0
fedavg = 90.0
[expect]
min_accuracy = 0.05
min_energy_gain_over_fedavg = 99.0
"""
    )
    out = tmp_path / "out"
    ran = socflower(f"compare front.toml --front --until-target --workers 0 --out {out}")
    assert ran.status == 0
    shown = ran.out
    assert (
        shown.index("predicted")
        < shown.index("training socflow, sgd")
        < shown.index("on the front as")
    )
    document = json.loads((out / "comparison.json").read_text("utf-8"))
    assert [row["strategy"] for row in document["rows"]] == ["socflow", "sgd"]
    methods = document["methods"]
    assert methods["left_out"] == ["fedavg"]
    assert [row["strategy"] for row in methods["front"]] == ["socflow", "sgd"]
    assert [claim["name"] for claim in document["expectations"]] == ["min_accuracy"]
    page = (out / "report.html").read_text("utf-8")
    assert "Every method, predicted before training" in page and "not searched" in page
    assert fmean(row["time_s"] for row in methods["front"]) > 0.0
