"""Comparisons: side by side, resumed where they stopped, trained anew where the scenario changed."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from socflower.errors import ConfigError, TrainingFailed
from socflower.scenario import comparison
from socflower.scenario.comparison import common_target, compare
from socflower.scenario.prepared_run import PreparedRun
from socflower.scenario.schema.config import CompareConfig, Scenario
from socflower.scenario.schema.file import to_document
from tests.scenario.small_runs import small, small_result

pytestmark = pytest.mark.usefixtures("on_few_digits")

TrainedBy = list[str]


@pytest.fixture
def trained(monkeypatch: pytest.MonkeyPatch) -> TrainedBy:
    """Names of the strategies that were trained: results come from the process's cache, pages are not drawn."""
    names: TrainedBy = []

    def train(run: PreparedRun, out: Path, engine: str, **_: object) -> dict[str, Any]:
        scenario = run.scenario
        names.append(scenario.strategy.name)
        result = small_result(scenario.strategy.name) | {"scenario": to_document(scenario), "engine": engine}
        out.mkdir(parents=True, exist_ok=True)
        (out / "result.json").write_text(json.dumps(result))
        return result

    monkeypatch.setattr(comparison, "run_to_folder", train)
    monkeypatch.setattr(comparison, "write_report", lambda path, *_, **__: path.write_text("page"))
    return names


def test_rows_carry_the_totals_of_each_strategy(tmp_path: Path) -> None:
    scenario = small().replaced(expect={"max_accuracy_gap_to_fedavg": 0.5, "min_speedup_over_fedavg": 1e9,
                                        "min_accuracy": 0.5, "min_energy_gain_over_sgd": 1.0})
    document = compare(scenario, ["socflow", "fedavg"], tmp_path, num_workers=0)
    assert document == json.loads((tmp_path / "comparison.json").read_text())
    assert [row["strategy"] for row in document["rows"]] == ["socflow", "fedavg"]
    for row in document["rows"]:
        alone = small_result(row["strategy"])
        for key in ("seed", "final_accuracy", "virtual_s", "energy_j", "bytes", "weights_sha256"):
            assert row[key] == alone[key]
        assert 0.0 < row["time_to_accuracy_s"] <= row["virtual_s"]
        assert {path.name for path in (tmp_path / row["strategy"]).iterdir()} == {
            "result.json", "trace.json", "report.html"}
    assert (tmp_path / "report.html").stat().st_size > 0
    assert {claim["name"]: claim["holds"] for claim in document["expectations"]} == {
        "max_accuracy_gap_to_fedavg": True, "min_speedup_over_fedavg": False, "min_accuracy": True,
        "min_energy_gain_over_sgd": None}


def test_a_second_call_trains_nothing_and_says_the_same(trained: TrainedBy, tmp_path: Path) -> None:
    first = compare(small(), ["socflow", "sgd"], tmp_path)
    assert trained == ["socflow", "sgd"]
    (tmp_path / ".report.html.99999999-1.part").write_text("of a killed comparison")
    assert compare(small(), ["socflow", "sgd"], tmp_path) == first
    assert not list(tmp_path.glob(".*"))
    more = compare(small(), ["sgd", "ring"], tmp_path)
    assert trained == ["socflow", "sgd", "ring"]
    assert more["rows"][0]["weights_sha256"] == first["rows"][1]["weights_sha256"]


@pytest.mark.parametrize("change", [
    lambda s: s.replaced(seed=2),
    lambda s: s.replaced(train=s.train.replaced(learning_rate=0.01)),
    lambda s: s.replaced(cluster={"boards": (4,)}),
])
def test_a_changed_scenario_trains_anew(
    change: Callable[[Scenario], Scenario], trained: TrainedBy, tmp_path: Path,
) -> None:
    compare(small(), ["sgd"], tmp_path)
    compare(change(small()), ["sgd"], tmp_path)
    assert trained == ["sgd", "sgd"]
    compare(change(small()), ["sgd"], tmp_path)
    assert trained == ["sgd", "sgd"]


def test_a_result_of_another_engine_is_not_taken(trained: TrainedBy, tmp_path: Path) -> None:
    compare(small(), ["sgd"], tmp_path)
    compare(small(), ["sgd"], tmp_path, engine="simulation")
    assert trained == ["sgd", "sgd"]


def test_an_interrupted_comparison_goes_on_where_it_stopped(
    trained: TrainedBy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:
    train = comparison.run_to_folder

    def stop(*_: object, **__: object) -> dict[str, Any]:
        raise TrainingFailed("power cut")

    monkeypatch.setattr(comparison, "run_to_folder",
                        lambda run, *rest, **more: (stop if run.scenario.strategy.name == "ring" else train)(
                            run, *rest, **more))
    with pytest.raises(TrainingFailed) as caught:
        compare(small(), ["socflow", "ring", "sgd"], tmp_path)
    assert str(caught.value) == f"ring: power cut; finished and kept in {tmp_path}: socflow"
    assert not (tmp_path / "comparison.json").exists()
    monkeypatch.setattr(comparison, "run_to_folder", train)
    compare(small(), ["socflow", "ring", "sgd"], tmp_path)
    assert trained == ["socflow", "ring", "sgd"]


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"{}", b"3", b"\xff\xfe", b'{"scenario": {}}'])
def test_a_result_that_is_cut_short_or_somebody_elses_is_trained_again(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    path.write_bytes(content)
    assert comparison._finished(path, small(), "local") is None
    assert comparison._finished(tmp_path / "none.json", small(), "local") is None


def test_the_common_target_is_reached_by_all(trained: TrainedBy, tmp_path: Path) -> None:
    document = compare(small(), ["socflow", "ring", "fedavg"], tmp_path)
    lowest = min(row["final_accuracy"] for row in document["rows"])
    assert document["target_accuracy"] == pytest.approx(lowest - 0.01)
    assert all(row["time_to_accuracy_s"] is not None for row in document["rows"])
    assert common_target([{"final_accuracy": 0.001}]) == 0.0


def test_a_target_of_the_scenario_may_be_out_of_reach(trained: TrainedBy, tmp_path: Path) -> None:
    scenario = small().replaced(compare=CompareConfig(target_accuracy=0.999))
    document = compare(scenario, ["ring"], tmp_path)
    assert document["target_accuracy"] == 0.999
    assert document["rows"][0]["time_to_accuracy_s"] is None


def test_an_unknown_strategy_is_refused_before_anything_trains(trained: TrainedBy, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--strategies star: unknown; use some of socflow, ring"):
        compare(small(), ["sgd", "star"], tmp_path)
    assert trained == []
