"""Comparisons over seeds, and the search of a key of [train]."""

import json
from itertools import product
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from socflower.errors import TrainingFailed
from socflower.report import report
from socflower.report.quality import ACCURACY
from socflower.scenario import runner
from socflower.scenario.comparison import compare, parse_seeds
from socflower.scenario.prepared_run import PreparedRun
from socflower.scenario.schema.config import CompareConfig
from socflower.scenario.schema.file import to_document
from socflower.scenario.schema.scenario_file import Scenario
from socflower.scenario.tuning import Tuning, best_of, parse_tuning, search_seed
from tests.command_line import Socflower, is_mistake
from tests.one_line import refused
from tests.scenario.small_runs import small, small_result

pytestmark = pytest.mark.usefixtures("on_few_digits")

Runs = list[tuple[str, int, float]]


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> Runs:
    """What was trained: strategy, seed, learning rate. Accuracy is highest at a rate of 0.2."""
    made: Runs = []

    def train(run: PreparedRun, out: Path, engine: str, **_: object) -> dict[str, Any]:
        scenario = run.scenario
        rate = scenario.train.learning_rate
        made.append((scenario.strategy.name, scenario.seed, rate))
        accuracy = 0.5 - abs(rate - 0.2) + 0.01 * scenario.seed
        result = small_result(scenario.strategy.name) | {
            "scenario": to_document(scenario),
            "engine": engine,
            "seed": scenario.seed,
            "final_accuracy": accuracy,
        }
        result["rounds"][-1]["accuracy"] = accuracy
        out.mkdir(parents=True, exist_ok=True)
        (out / "result.json").write_text(json.dumps(result))
        return result

    monkeypatch.setattr(runner, "run_to_folder", train)
    monkeypatch.setattr(report, "write_report", lambda path, *_, **__: path.write_text("page"))
    return made


def test_each_strategy_runs_under_each_seed_in_a_folder_of_its_own(
    runs: Runs, tmp_path: Path
) -> None:
    scenario = small().replaced(expect={"min_accuracy": 0.375})
    document = compare(scenario, ["socflow", "sgd"], tmp_path, seeds=(1, 2, 5))
    assert [(row["strategy"], row["seed"]) for row in document["rows"]] == [
        (name, seed) for seed in (1, 2, 5) for name in ("socflow", "sgd")
    ]
    assert sorted(
        path.parent.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("result.json")
    ) == sorted(f"{name}/seed-{seed}" for seed in (1, 2, 5) for name in ("socflow", "sgd"))
    # A rate of 0.05: 0.35 + 0.01 * seed.
    assert [(claim["seed"], claim["holds"]) for claim in document["expectations"]] == [
        (1, False),
        (2, False),
        (5, True),
    ]
    ours, _ = document["means"]
    assert ours["final_accuracy"] == pytest.approx(np.mean([0.36, 0.37, 0.40]))
    assert ours["spread"]["final_accuracy"] == pytest.approx(np.std([0.36, 0.37, 0.40], ddof=1))
    assert compare(scenario, ["socflow", "sgd"], tmp_path, seeds=(1, 2, 5)) == document
    assert len(runs) == 6  # the second call trains nothing
    compare(scenario, ["socflow", "sgd"], tmp_path, seeds=(1, 2, 5, 7))
    assert runs[6:] == [("socflow", 7, 0.05), ("sgd", 7, 0.05)]


def test_a_search_takes_an_unreported_seed_and_reports_the_best_value_only(
    runs: Runs, tmp_path: Path
) -> None:
    document = compare(
        small(),
        ["socflow", "sgd"],
        tmp_path,
        seeds=(1, 2),
        tuning=Tuning(axes=(("learning_rate", (0.1, 0.2, 0.4)),)),
    )
    assert {seed for _, seed, _ in runs[:6]} == {3} == {document["tuning"]["seed"]}
    assert runs[6:] == [(name, seed, 0.2) for seed in (1, 2) for name in ("socflow", "sgd")]
    found = document["tuning"]["strategies"]["sgd"]
    assert found["chosen"] == 0.2
    assert [each["value"] for each in found["tried"]] == [0.1, 0.2, 0.4]
    assert {row["seed"] for row in document["rows"]} == {1, 2}
    assert document == json.loads((tmp_path / "comparison.json").read_text())


@given(sizes=st.lists(st.integers(2, 4), min_size=1, max_size=3))
def test_a_search_of_several_keys_tries_every_combination_once(sizes: list[int]) -> None:
    keys = ("learning_rate", "batch_size", "weight_decay")[: len(sizes)]
    tuning = parse_tuning(
        [
            f"{key}={','.join(map(str, range(1, size + 1)))}"
            for key, size in zip(keys, sizes, strict=True)
        ]
    )
    tried = [tuple(choice[key] for key in keys) for choice in tuning.choices("sgd")]
    assert sorted(tried) == sorted(product(*(range(1, size + 1) for size in sizes)))
    assert len({str(tuning.value(choice)) for choice in tuning.choices("sgd")}) == prod(sizes)


def test_a_search_of_two_keys_reports_the_best_combination(runs: Runs, tmp_path: Path) -> None:
    tuning = parse_tuning(["learning_rate=0.1,0.2", "batch_size=16,32"])
    document = compare(small(), ["sgd"], tmp_path, tuning=tuning)
    assert [rate for _, _, rate in runs] == [0.1, 0.1, 0.2, 0.2, 0.2]
    assert document["tuning"]["key"] == "learning_rate, batch_size"
    found = document["tuning"]["strategies"]["sgd"]
    assert found["settings"] == {"learning_rate": 0.2, "batch_size": 16}
    assert found["chosen"] == "learning_rate=0.2, batch_size=16" and len(found["tried"]) == 4
    assert compare(small(), ["sgd"], tmp_path, tuning=tuning) == document
    assert len(runs) == 5  # the second call trains nothing


def test_one_key_is_searched_once_and_the_command_reads_every_search(socflower: Socflower) -> None:
    refused(lambda: parse_tuning(["epochs=1,2", "epochs=3,4"]), "--tune epochs=3,4", "twice")
    for searches in ("--tune rate=1,2 --tune epochs=1,2", "--tune epochs=1,2 --tune rate=1,2"):
        is_mistake(socflower(f"compare digits_demo {searches}"), "unknown key 'rate'")


def test_an_interrupted_search_goes_on_where_it_stopped(
    runs: Runs,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tuning, train = Tuning(axes=(("learning_rate", (0.1, 0.2)),)), runner.run_to_folder

    def fail(run: PreparedRun, *rest: Any, **more: Any) -> dict[str, Any]:
        if run.scenario.train.learning_rate == 0.2:
            raise TrainingFailed("the loss is NaN")
        return train(run, *rest, **more)

    monkeypatch.setattr(runner, "run_to_folder", fail)
    said = refused(lambda: compare(small(), ["sgd"], tmp_path, tuning=tuning), error=TrainingFailed)
    assert said.startswith("sgd, learning_rate 0.2: the loss is NaN; finished and kept in ")
    assert said.endswith(": sgd, learning_rate 0.1")
    monkeypatch.setattr(runner, "run_to_folder", train)
    compare(small(), ["sgd"], tmp_path, tuning=tuning)
    assert runs == [("sgd", 2, 0.1), ("sgd", 2, 0.2), ("sgd", 1, 0.2)]


def test_the_quickest_to_the_target_is_best_and_without_one_the_most_accurate() -> None:
    def result(accuracy: float | None, reached_s: float | None) -> dict[str, Any]:
        return {"final_accuracy": accuracy, "time_to_accuracy_s": reached_s}

    assert best_of([result(0.9, None), result(0.7, 5.0), result(0.8, 4.0)], ACCURACY) == 2
    assert best_of([result(0.7, None), result(0.9, None), result(None, None)], ACCURACY) == 1
    assert best_of([result(0.7, 4.0), result(0.9, 4.0)], ACCURACY) == 1


def test_the_search_seed_is_reported_by_none() -> None:
    scenario = Scenario(seed=3)
    assert [search_seed(scenario, seeds) for seeds in ((3,), (1, 2), (3, 4, 6))] == [4, 3, 5]


@pytest.mark.parametrize("text", ["", "1,", "a", "1,1", "-1", "1.5", "4294967296", "01,1"])
def test_seeds_are_different_whole_numbers(text: str) -> None:
    refused(lambda: parse_seeds(text), "--seeds")


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("learning_rate", "KEY=VALUE"),
        ("learning_rate=0.1", "different values"),
        ("epochs=1,", "KEY=VALUE"),
        ("learning_rate=0.1,0.1", "different values"),
        ("rate=1,2", "unknown key 'rate'"),
        ("learning_rat=0.1,0.2", "did you mean 'learning_rate'?"),
    ],
)
def test_a_search_is_written_as_a_key_and_values(text: str, named: str) -> None:
    refused(lambda: parse_tuning([text]), named)


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("learning_rate=0.1,-1", "learning_rate = -1"),
        ("learning_rate=0.1,high", "learning_rate = 'high'"),
        ("optimizer=sgd,rprop", "optimizer = 'rprop'"),
    ],
)
def test_a_value_that_does_not_fit_is_refused_before_any_training(
    text: str, named: str, runs: Runs, tmp_path: Path
) -> None:
    tuning = parse_tuning([text])
    refused(lambda: compare(small(), ["sgd"], tmp_path, tuning=tuning), "--tune", named)
    assert runs == []


def test_the_search_is_judged_by_the_target_of_the_scenario(runs: Runs, tmp_path: Path) -> None:
    scenario = small().replaced(compare=CompareConfig(target_accuracy=0.3))
    tried = compare(
        scenario, ["sgd"], tmp_path, tuning=Tuning(axes=(("learning_rate", (0.1, 0.2)),))
    )
    assert all(
        each["time_to_accuracy_s"] is not None
        for each in tried["tuning"]["strategies"]["sgd"]["tried"]
    )
