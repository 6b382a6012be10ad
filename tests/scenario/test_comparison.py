"""Comparisons: side by side, resumed where they stopped, trained anew where the scenario changed."""

import json
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from socflower.errors import TrainingFailed
from socflower.quantities import human_ratio
from socflower.report import report
from socflower.report.summary import prediction_table
from socflower.scenario import comparison, runner
from socflower.scenario.comparison import compare
from socflower.scenario.planning import plan_scenario
from socflower.scenario.predicted_epochs import predicted_epochs
from socflower.scenario.prepared_run import PreparedRun
from socflower.scenario.schema.config import (
    CompareConfig,
    ModelConfig,
    PrecisionConfig,
    PredictedEpoch,
)
from socflower.scenario.schema.file import parse_scenario, to_document
from socflower.scenario.schema.scenario_file import Scenario
from tests.one_line import refused
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
        result = small_result(scenario.strategy.name) | {
            "scenario": to_document(scenario),
            "engine": engine,
        }
        out.mkdir(parents=True, exist_ok=True)
        (out / "result.json").write_text(json.dumps(result))
        return result

    monkeypatch.setattr(runner, "run_to_folder", train)
    monkeypatch.setattr(report, "write_report", lambda path, *_, **__: path.write_text("page"))
    return names


@pytest.mark.slow
def test_rows_carry_the_totals_of_each_strategy(tmp_path: Path) -> None:
    scenario = small().replaced(
        expect={
            "max_accuracy_gap_to_fedavg": 0.5,
            "min_speedup_over_fedavg": 1e9,
            "min_accuracy": 0.5,
            "min_energy_gain_over_sgd": 1.0,
        }
    )
    document = compare(scenario, ["socflow", "fedavg"], tmp_path, num_workers=0)
    assert document == json.loads((tmp_path / "comparison.json").read_text())
    assert [row["strategy"] for row in document["rows"]] == ["socflow", "fedavg"]
    for row in document["rows"]:
        alone = small_result(row["strategy"])
        for key in ("seed", "final_accuracy", "virtual_s", "energy_j", "bytes", "weights_sha256"):
            assert row[key] == alone[key]
        assert 0.0 < row["time_to_accuracy_s"] <= row["virtual_s"]
        files = {path.name for path in (tmp_path / row["strategy"]).iterdir()}
        assert files == {"result.json", "trace.json", "report.html"}
    assert (tmp_path / "report.html").stat().st_size > 0
    assert {claim["name"]: claim["holds"] for claim in document["expectations"]} == {
        "max_accuracy_gap_to_fedavg": True,
        "min_speedup_over_fedavg": False,
        "min_accuracy": True,
        "min_energy_gain_over_sgd": None,
    }


def test_a_second_call_trains_nothing_and_says_the_same(trained: TrainedBy, tmp_path: Path) -> None:
    first = compare(small(), ["socflow", "sgd"], tmp_path)
    assert trained == ["socflow", "sgd"]
    (tmp_path / ".report.html.99999999-1.part").write_text("of a killed comparison")
    assert compare(small(), ["socflow", "sgd"], tmp_path) == first
    assert not list(tmp_path.glob(".*"))
    more = compare(small(), ["sgd", "ring"], tmp_path)
    assert trained == ["socflow", "sgd", "ring"]
    assert more["rows"][0]["weights_sha256"] == first["rows"][1]["weights_sha256"]


@pytest.mark.parametrize(
    "change",
    [
        lambda s: s.replaced(seed=2),
        lambda s: s.replaced(train=s.train.replaced(learning_rate=0.01)),
        lambda s: s.replaced(cluster={"boards": (4,)}),
    ],
)
def test_a_changed_scenario_trains_anew(
    change: Callable[[Scenario], Scenario],
    trained: TrainedBy,
    tmp_path: Path,
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
    trained: TrainedBy,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    train = runner.run_to_folder

    def stop_at_ring(run: PreparedRun, *rest: Any, **more: Any) -> dict[str, Any]:
        if run.scenario.strategy.name == "ring":
            raise TrainingFailed("power cut")
        return train(run, *rest, **more)

    monkeypatch.setattr(runner, "run_to_folder", stop_at_ring)
    three = ["socflow", "ring", "sgd"]
    said = refused(lambda: compare(small(), three, tmp_path), error=TrainingFailed)
    assert said == f"ring: power cut; finished and kept in {tmp_path}: socflow"
    assert not (tmp_path / "comparison.json").exists()
    monkeypatch.setattr(runner, "run_to_folder", train)
    compare(small(), three, tmp_path)
    assert trained == three


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[]", b"{}", b"3", b"\xff\xfe", b'{"scenario": {}}']
)
def test_a_result_that_is_cut_short_or_somebody_elses_is_trained_again(
    content: bytes, tmp_path: Path
) -> None:
    path = tmp_path / "result.json"
    path.write_bytes(content)
    assert comparison.finished(path, small(), "local", None) is None
    assert comparison.finished(tmp_path / "none.json", small(), "local", None) is None


def test_the_common_target_is_reached_by_all(trained: TrainedBy, tmp_path: Path) -> None:
    document = compare(small(), ["socflow", "ring", "fedavg"], tmp_path)
    lowest = min(row["final_accuracy"] for row in document["rows"])
    assert document["target_accuracy"] == pytest.approx(lowest - 0.01)
    assert all(row["time_to_accuracy_s"] is not None for row in document["rows"])


def test_a_target_of_the_scenario_may_be_out_of_reach(trained: TrainedBy, tmp_path: Path) -> None:
    scenario = small().replaced(compare=CompareConfig(target_accuracy=0.999))
    document = compare(scenario, ["ring"], tmp_path)
    assert document["target_accuracy"] == 0.999
    assert document["rows"][0]["time_to_accuracy_s"] is None


def test_an_unknown_strategy_is_refused_before_anything_trains(
    trained: TrainedBy, tmp_path: Path
) -> None:
    unknown = ["sgd", "star"]
    refused(lambda: compare(small(), unknown, tmp_path), "--strategies star", "socflow, ring")
    assert trained == []


def test_a_strategy_trains_with_settings_of_its_own(trained: TrainedBy, tmp_path: Path) -> None:
    own = {"sgd": dict(epochs=3, learning_rate=0.125, sync_interval_epochs=0.25)}
    scenario = small().replaced(compare=CompareConfig(train=own, strategies=("socflow", "sgd")))
    compare(scenario, ["socflow", "sgd"], tmp_path)
    socflow, sgd = (
        json.loads((tmp_path / name / "result.json").read_text())["scenario"]
        for name in ("socflow", "sgd")
    )
    assert sgd["strategy"]["sync_interval_epochs"] == 0.25
    assert socflow["train"] == to_document(scenario)["train"]  # the same as without `own`
    assert sgd["train"] == {**socflow["train"], "epochs": 3, "learning_rate": 0.125}


@pytest.mark.parametrize(
    ("table", "named"),
    [
        ({"train": {"adam": {"epochs": 1}}}, "no such strategy"),
        ({"train": {"sgd": {"epochs": 0}}}, "train.sgd] epochs = 0"),
        ({"train": {"sgd": {"momentun": 0.5}}}, "unknown key 'momentun'"),
        ({"strategies": ["socflow"], "train": {"sgd": {"epochs": 1}}}, "'sgd'"),
        ({"predict": [{"model": "vgg11", "arithmetic": "int4"}]}, "arithmetic = 'int4'"),
        ({"predict": [{"data": "cifar10"}]}, "model is missing"),
    ],
)
def test_settings_of_a_comparison_are_refused_in_a_line(table: dict[str, Any], named: str) -> None:
    refused(lambda: parsed(compare=table), named)


def parsed(**tables: Any) -> Scenario:
    return parse_scenario(tables, name="x", question="", where="x.toml")


def test_predictions_are_those_of_plan_and_nothing_is_trained_for_them(
    trained: TrainedBy, tmp_path: Path
) -> None:
    asked = (
        PredictedEpoch(model="resnet8", data="digits", batch_size=16),
        PredictedEpoch(model="resnet8", data="digits", batch_size=16, arithmetic="int8"),
    )
    scenario = small().replaced(compare=CompareConfig(predict=asked))
    document = compare(scenario, ["socflow", "fedavg", "sgd"], tmp_path)
    assert trained == ["socflow", "fedavg", "sgd"]
    rows = {(row["arithmetic"], row["strategy"]): row["epoch_s"] for row in document["predictions"]}
    assert list(rows) == [
        ("fp32", "socflow"),
        ("fp32", "sgd"),
        ("int8", "socflow"),
        ("int8", "sgd"),
    ]
    for (arithmetic, name), epoch_s in rows.items():
        assert epoch_s == epoch_of(scenario, name, arithmetic=arithmetic)
    assert rows["int8", "sgd"] < rows["fp32", "sgd"]


def test_predicted_epochs_are_also_compared_at_equal_samples_a_step(
    trained: TrainedBy, tmp_path: Path
) -> None:
    """An epoch of two groups has half the steps, each of two batches; one SoC takes both batches at once."""
    scenario = small().replaced(
        compare=CompareConfig(
            predict=(PredictedEpoch(model="resnet8", data="digits", batch_size=16),)
        )
    )
    groups, alone = compare(scenario, ["socflow", "sgd"], tmp_path)["predictions"]
    assert (groups["step_samples"], alone["step_samples"]) == (32, 16)
    assert groups["equal_epoch_s"] == groups["epoch_s"]
    assert alone["equal_epoch_s"] == epoch_of(scenario, "sgd", batch_size=32)
    assert alone["equal_epoch_s"] != alone["epoch_s"]


def test_predicted_epochs_are_also_those_of_each_strategys_best_number_of_socs(
    trained: TrainedBy, tmp_path: Path
) -> None:
    entry = PredictedEpoch(model="resnet8", data="digits", batch_size=16)
    scenario = small(boards=(4, 4)).replaced(compare=CompareConfig(predict=(entry,)))
    for row in compare(scenario, ["socflow", "ring", "sgd"], tmp_path)["predictions"]:
        counts = {"socflow": (2, 4, 8), "ring": (1, 2, 4, 8), "sgd": (8,)}[row["strategy"]]
        batch_size = 16 if row["strategy"] == "socflow" else 32
        seconds = {}
        for socs, buckets in product(counts, (1, 8)):
            settings = scenario.strategy.replaced(socs=socs, overlap_buckets=buckets)
            tried = scenario.replaced(strategy=settings)
            seconds[socs, buckets] = epoch_of(tried, row["strategy"], batch_size=batch_size)
        assert row["best_epoch_s"] == pytest.approx(min(seconds.values()), rel=1e-12)
        if row["best"]:
            best = (row["best"]["socs"], row["best"].get("overlap_buckets", 1))
            assert seconds[best] == row["best_epoch_s"]


def test_a_strategy_whose_batches_fit_no_device_has_no_best_epoch() -> None:
    entry = PredictedEpoch(model="vgg11", data="cifar10", batch_size=6_000)
    scenario = small(boards=(8,), groups=8).replaced(compare=CompareConfig(predict=(entry,)))
    ours, alone = predicted_epochs(scenario, ["socflow", "sgd"])
    assert ours["best_epoch_s"] > 0.0
    assert alone["equal_epoch_s"] is alone["best_epoch_s"] is alone["best_epoch_energy_j"] is None
    (row,) = prediction_table([ours, alone])["rows"]
    assert row["best_gain"] is None


def epoch_of(
    scenario: Scenario, strategy: str, *, batch_size: int = 16, arithmetic: str = "fp32"
) -> float:
    """Return the predicted epoch of resnet8 under a strategy."""
    changed = scenario.replaced(
        strategy=scenario.strategy.replaced(name=strategy),
        model=ModelConfig(name="resnet8"),
        train=scenario.train.replaced(batch_size=batch_size),
        precision=PrecisionConfig(arithmetic=arithmetic),
    )
    return float(plan_scenario(changed)["predicted"]["epoch_s"])


def test_a_plan_says_whether_one_soc_is_quicker() -> None:
    def planned(model: str) -> dict[str, Any]:
        return plan_scenario(
            parsed(
                cluster={"boards": 2, "socs_per_board": 4},
                model={"name": model},
                train={"batch_size": 16},
                strategy={"name": "socflow", "groups": 2},
            )
        )

    small_model, large_model = planned("lenet5"), planned("vgg-small")
    for document in (small_model, large_model):
        step, own = document["predicted"]["step_s"], document["predicted"]["exchange_fraction"]
        assert 0.0 < own < 1.0 and step > 0.0
    assert small_model["one_soc"]["epoch_s"] < small_model["predicted"]["epoch_s"]
    assert small_model["verdict"].startswith("one SoC is quicker: ")
    ratio = large_model["one_soc"]["epoch_s"] / large_model["predicted"]["epoch_s"]
    assert ratio > 1.0 and large_model["verdict"].startswith(human_ratio(ratio))


def test_one_soc_is_compared_with_nothing() -> None:
    document = plan_scenario(small("sgd"))
    assert document["one_soc"] is None and document["verdict"] is None
