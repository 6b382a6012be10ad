"""Logs of a run say what its result says, each round once, also after an interruption."""

import csv
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from flwr.app import ArrayRecord, MetricRecord
from hypothesis import given
from hypothesis import strategies as st

from socflower import logged_evaluation, parse_cluster
from socflower.engines.checkpoint import Checkpoint, CheckpointFolder
from socflower.engines.run_log import (
    CsvLogger,
    JsonLinesLogger,
    MlflowLogger,
    RoundLogging,
    WandbLogger,
    scalars,
)
from socflower.errors import ConfigError
from socflower.report import report
from socflower.scenario import comparison, jobs
from socflower.scenario.runner import run_to_folder
from socflower.sim import EventClock
from tests.command_line import Socflower
from tests.scenario.small_runs import small, without_drawing

ALL = RoundLogging(("tensorboard", "csv", "jsonl"))
Rounds = dict[int, dict[str, float]]


def in_lines(folder: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text("utf-8").splitlines()]


def in_table(folder: Path) -> list[dict[str, float]]:
    with (folder / "metrics.csv").open(newline="") as stream:
        return [
            {name: float(value) for name, value in row.items() if value}
            for row in csv.DictReader(stream)
        ]


def in_events(folder: Path) -> Rounds:
    """Return the scalars by round as TensorBoard reads them, which keeps 32 bits of each."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder / "tensorboard"))
    events.Reload()
    found: Rounds = {}
    for name in events.Tags()["scalars"]:
        for scalar in events.Scalars(name):
            assert name not in found.setdefault(scalar.step, {}), f"round {scalar.step} twice"
            found[scalar.step][name] = scalar.value
    return found


def assert_logged(folder: Path, rounds: list[dict[str, Any]]) -> None:
    """All three logs have the accuracy, loss, time, energy and bytes of these rounds, and no other rounds."""
    lines, events = in_lines(folder), in_events(folder)
    assert in_table(folder) == lines
    assert [line["round"] for line in lines] == list(events) == [entry["round"] for entry in rounds]
    for line, entry in zip(lines, rounds, strict=True):
        for key in ("accuracy", "loss", "epoch", "virtual_s", "energy_j"):
            assert line[key] == entry[key]
        assert line["bytes"] == sum(entry["bytes"].values())
        assert line["bytes_hub"] == entry["bytes"]["hub"]
        assert events[entry["round"]] == pytest.approx(
            {name: value for name, value in line.items() if name != "round"}, rel=1e-6
        )


@pytest.mark.usefixtures("on_few_digits")
@pytest.mark.parametrize("strategy", ["socflow", "fedavg"])
def test_the_logs_are_those_of_the_result(strategy: str, tmp_path: Path) -> None:
    result = without_drawing(small(strategy, epochs=2), tmp_path, logging=ALL)
    assert_logged(tmp_path, result["rounds"])


@pytest.mark.usefixtures("on_few_digits")
def test_a_resumed_run_continues_its_logs_without_doubled_rounds(tmp_path: Path) -> None:
    class Stopped(BaseException):
        pass

    write = CheckpointFolder.write

    def write_and_stop(self: CheckpointFolder, checkpoint: Checkpoint, *arguments: Any) -> None:
        write(self, checkpoint, *arguments)
        if checkpoint.server_round == 2:
            raise Stopped

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CheckpointFolder, "write", write_and_stop)
        with pytest.raises(Stopped):
            run_to_folder(small(epochs=2), tmp_path, num_workers=0, resumable=True, logging=ALL)
    assert [line["round"] for line in in_lines(tmp_path)] == [0, 1]  # the run ended within round 2
    # What cannot be resumed leaves the logs as they are.
    with pytest.raises(ConfigError):
        run_to_folder(small(epochs=3), tmp_path, num_workers=0, resumable=True, logging=ALL)
    assert len(in_lines(tmp_path)) == 2
    result = without_drawing(small(epochs=2), tmp_path, resumable=True, logging=ALL)
    assert result["resumed_from"] == [2] and len(result["rounds"]) == 5
    assert_logged(tmp_path, result["rounds"])


@pytest.mark.usefixtures("on_few_digits")
def test_a_comparison_logs_each_strategy_and_what_it_reuses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (report, jobs):
        monkeypatch.setattr(module, "write_report", lambda path, *_, **__: path.touch())
    comparison.compare(small(), ["socflow"], tmp_path, num_workers=0)
    assert not (tmp_path / "socflow" / "metrics.csv").exists()
    comparison.compare(small(), ["socflow", "sgd"], tmp_path, num_workers=0, logging=ALL)
    for name in ("socflow", "sgd"):
        assert_logged(
            tmp_path / name, json.loads((tmp_path / name / "result.json").read_text())["rounds"]
        )


FIGURES = st.dictionaries(
    st.sampled_from(["accuracy", "loss", "alpha", 'a, "b"']),
    st.floats(allow_nan=False, allow_infinity=False),
    max_size=4,
)


@given(st.lists(st.tuples(st.integers(0, 5), FIGURES), max_size=12))
def test_rounds_are_logged_once_in_order_whatever_is_reported_again(
    tmp_path_factory: pytest.TempPathFactory,
    reported: list[tuple[int, dict[str, float]]],
) -> None:
    folder = tmp_path_factory.mktemp("log")
    first: Rounds = {}
    with RoundLogging(("csv", "jsonl")).into(folder) as log_round:
        for number, figures in reported:
            log_round(
                {
                    "round": number,
                    "num_rounds": 5,
                    "bytes": {"hub": 2.0, "wan": 1.0},
                    "events": [],
                    **figures,
                }
            )
            if number > max(first, default=-1):
                first[number] = {**figures, "bytes": 3.0, "bytes_hub": 2.0, "bytes_wan": 1.0}
            assert {
                line.pop("round"): line for line in in_lines(folder)
            } == first  # as soon as it is reported
    if first:
        assert {row.pop("round"): row for row in in_table(folder)} == first


def test_what_is_no_number_is_not_logged() -> None:
    entry = {
        "round": 3,
        "accuracy": None,
        "loss": 0.5,
        "events": ["x"],
        "resumed": True,
        "bytes": {"hub": 1},
        "train": {"loss": 2, "per_class": [1, 2]},
        "server": {"acc": 0.25},
    }
    assert scalars(entry) == {
        "loss": 0.5,
        "bytes": 1.0,
        "bytes_hub": 1.0,
        "train/loss": 2.0,
        "server/acc": 0.25,
    }


def test_a_logger_that_cannot_write_is_dropped_with_a_line(tmp_path: Path) -> None:
    (tmp_path / "metrics.csv").mkdir()
    notices: list[str] = []
    with RoundLogging(("csv", "jsonl"), notices.append).into(tmp_path) as log_round:
        for number in range(2):
            log_round({"round": number, "bytes": {}})
    assert len(in_lines(tmp_path)) == 2
    assert len(notices) == 1 and notices[0].startswith("--log csv: cannot be written in ")


class Remembering:
    """A logger of a user's own."""

    def __init__(self) -> None:
        self.rounds: Rounds = {}

    def log(self, server_round: int, values: Mapping[str, float]) -> None:
        self.rounds[server_round] = dict(values)

    def close(self) -> None:
        pass


def test_an_apps_own_evaluation_goes_to_a_logger_of_its_own(tmp_path: Path) -> None:
    class Clocked:
        clock = EventClock(parse_cluster({"boards": 1, "socs_per_board": 1}))

    def evaluate(server_round: int, arrays: ArrayRecord) -> MetricRecord | None:
        return (
            MetricRecord({"accuracy": server_round / 4, "per-class": [0.5, 1.0]})
            if server_round != 1
            else None
        )

    own, lines = Remembering(), JsonLinesLogger(tmp_path / "deep" / "metrics.jsonl")
    logged = logged_evaluation(evaluate, own, lines, grid=Clocked())  # type: ignore[arg-type]
    for server_round in range(3):
        assert logged(server_round, ArrayRecord()) == evaluate(server_round, ArrayRecord())
    lines.close()
    assert own.rounds == {
        number: {"accuracy": number / 4, "virtual_s": 0.0, "energy_j": 0.0, "bytes": 0.0}
        for number in (0, 2)
    }
    assert {line.pop("round"): line for line in in_lines(tmp_path / "deep")} == own.rounds


def test_a_metric_that_appears_late_gets_a_column_and_json_has_no_nan(tmp_path: Path) -> None:
    for log in (CsvLogger(tmp_path / "metrics.csv"), JsonLinesLogger(tmp_path / "metrics.jsonl")):
        log.log(0, {"loss": 2.0})
        log.log(1, {"loss": 1.0, "accuracy": 0.5})
        log.log(2, {"accuracy": math.nan})
        log.close()
    assert in_lines(tmp_path)[2] == {"round": 2, "accuracy": None}
    assert (
        tmp_path / "metrics.csv"
    ).read_text() == "round,loss,accuracy\n0,2.0,\n1,1.0,0.5\n2,,nan\n"


@pytest.mark.parametrize(
    ("log", "says"),
    [
        ("visdom", "--log visdom: is unknown; use some of tensorboard, csv, jsonl"),
        ("csv, csv", "named twice"),
        ("csv,", "--log : is unknown"),
        ("", "--log is empty"),
    ],
)
@pytest.mark.parametrize("command", ["run", "compare"])
def test_what_cannot_log_is_refused_before_anything_starts(
    command: str,
    log: str,
    says: str,
    socflower: Socflower,
    tmp_path: Path,
) -> None:
    ran = socflower(command, "digits_demo", "--log", log)
    assert (ran.status, ran.out, ran.err.count("\n")) == (2, "", 1)
    assert says in ran.err
    assert not list(tmp_path.iterdir())


def test_tensorboard_that_is_not_installed_is_one_line(
    socflower: Socflower,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from socflower.engines import run_log

    monkeypatch.setattr(run_log, "find_spec", lambda name: None)
    ran = socflower("run", "digits_demo", "--log", "jsonl,tensorboard")
    assert (ran.status, ran.out, ran.err.count("\n")) == (2, "", 1)
    assert (
        "--log tensorboard: needs the package tensorboard: pip install 'socflower[tensorboard]'"
        in ran.err
    )


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("engine", ["simulation", "deployment"])
def test_flowers_own_engines_are_logged_too(engine: str, tmp_path: Path) -> None:
    result = without_drawing(
        small(epochs=2),
        tmp_path,
        engine=engine,
        num_workers=None,
        logging=RoundLogging(("csv", "jsonl")),
    )
    lines = in_lines(tmp_path)
    assert in_table(tmp_path) == lines
    assert [(line["round"], line["accuracy"]) for line in lines] == [
        (entry["round"], entry["accuracy"]) for entry in result["rounds"]
    ]
    times = ("predicted_s", "wall_s") if engine == "deployment" else ("virtual_s",)
    assert [
        [line.get(key) for key in ("virtual_s", "predicted_s", "wall_s")] for line in lines
    ] == [
        [entry.get(key) if key in times else None for key in ("virtual_s", "predicted_s", "wall_s")]
        for entry in result["rounds"]
    ]


def test_mlflow_keeps_each_round_in_a_file_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("mlflow", reason="--log mlflow needs socflower[mlflow]")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    logger = MlflowLogger(tmp_path / "run")
    for number in (1, 2):
        logger.log(number, {"accuracy": number / 4})
    logger.close()
    (file,) = (tmp_path / "run" / "mlruns").glob("*/*/metrics/accuracy")
    kept = [line.split()[1:] for line in file.read_text().splitlines()]
    assert kept == [["0.25", "1"], ["0.5", "2"]]


def test_wandb_keeps_an_offline_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wandb = pytest.importorskip("wandb", reason="--log wandb needs socflower[wandb]")
    for name in ("WANDB_MODE", "WANDB_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    logger = WandbLogger(tmp_path / "run")
    logger.log(1, {"accuracy": 0.25})
    logger.close()
    # As at the end of a process, which flushes the file.
    wandb.teardown()
    (file,) = (tmp_path / "run" / "wandb").glob("offline-run-*/*.wandb")
    assert b"accuracy" in file.read_bytes()
