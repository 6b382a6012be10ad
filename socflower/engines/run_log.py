"""Metrics of a run by round, while it runs: TensorBoard, MLflow, Weights & Biases, CSV, JSON lines, or one's own."""

import csv
import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TextIO, TypeAlias

from socflower.errors import ConfigError
from socflower.plain_numbers import plain_numbers
from socflower.wire.status_port import StatusPort

# The command line checks `--log` before anything needs Flower, whose import takes long.
if TYPE_CHECKING:
    from flwr.app import ArrayRecord, MetricRecord
    from flwr.serverapp import Grid

    from socflower.strategies.planned_rounds import EvaluateFn

OnRound: TypeAlias = Callable[[dict[str, Any]], None]


class RunLogger(Protocol):
    """Writes the metrics of rounds, in ascending order and each round once."""

    def log(self, server_round: int, values: Mapping[str, float]) -> None:
        """Write the metrics of one round, by name, such as accuracy, loss, virtual_s, energy_j and bytes."""
        ...

    def close(self) -> None:
        """End the log; nothing is logged afterwards."""
        ...


class JsonLinesLogger:
    """Writes one JSON object per round, with null for NaN and infinities; `path` is replaced."""

    def __init__(self, path: Path) -> None:
        self._stream = _new_file(path)

    @plain_numbers
    def log(self, server_round: int, values: Mapping[str, float]) -> None:
        """Append the round's line."""
        finite = {name: value if math.isfinite(value) else None for name, value in values.items()}
        self._stream.write(json.dumps({"round": server_round, **finite}) + "\n")
        self._stream.flush()

    def close(self) -> None:
        """Close the file."""
        self._stream.close()


class CsvLogger:
    """Writes one row per round; `path` is replaced. A metric that appears late gets a column, empty before it."""

    def __init__(self, path: Path) -> None:
        self._stream = _new_file(path)
        self._columns = ["round"]
        self._rows: list[dict[str, float]] = []

    @plain_numbers
    def log(self, server_round: int, values: Mapping[str, float]) -> None:
        """Append the round's row."""
        row = {"round": server_round, **values}
        self._rows.append(row)
        new_columns = [name for name in row if name not in self._columns]
        if not new_columns and len(self._rows) > 1:
            self._write([row])
            return
        self._columns += new_columns
        self._stream.seek(0)
        self._stream.truncate()
        self._write([dict(zip(self._columns, self._columns, strict=True)), *self._rows])

    def _write(self, rows: Sequence[Mapping[str, Any]]) -> None:
        csv.DictWriter(self._stream, self._columns, lineterminator="\n").writerows(rows)
        self._stream.flush()

    def close(self) -> None:
        """Close the file."""
        self._stream.close()


class TensorBoardLogger:
    """Writes scalars to an event file in `folder`, in place of earlier ones there; needs the package tensorboard."""

    def __init__(self, folder: Path) -> None:
        _require_package("TensorBoardLogger", "tensorboard")
        from torch.utils.tensorboard import SummaryWriter

        for earlier in folder.glob("events.out.tfevents.*"):
            earlier.unlink()
        # Purging tells a TensorBoard that has read the earlier file to forget its rounds.
        self._writer = SummaryWriter(str(folder), purge_step=0)

    @plain_numbers
    def log(self, server_round: int, values: Mapping[str, float]) -> None:
        """Add a scalar for each metric at the step of the round."""
        for name, value in values.items():
            self._writer.add_scalar(name, value, server_round)
        self._writer.flush()

    def close(self) -> None:
        """Close the event file."""
        self._writer.close()


class MlflowLogger:
    """Writes metrics to a run of MLflow: of the server in MLFLOW_TRACKING_URI, else of a file store in `folder`.

    The step is the round. Needs the package mlflow or mlflow-skinny.
    """

    def __init__(self, folder: Path, experiment: str = "socflower") -> None:
        _require_package("MlflowLogger", "mlflow")
        # Read when MLflow makes a store; newer ones ask for a database instead.
        os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
        from mlflow.tracking import MlflowClient

        uri = os.environ.get("MLFLOW_TRACKING_URI", (folder / "mlruns").absolute().as_uri())
        self._client = MlflowClient(tracking_uri=uri)
        found = self._client.get_experiment_by_name(experiment)
        number = found.experiment_id if found else self._client.create_experiment(experiment)
        self._run = self._client.create_run(number, run_name=folder.name).info.run_id

    @plain_numbers
    def log(self, server_round: int, values: Mapping[str, float]) -> None:
        """Log each metric at the step of the round."""
        for name, value in values.items():
            self._client.log_metric(self._run, name, value, step=server_round)

    def close(self) -> None:
        """End the run."""
        self._client.set_terminated(self._run)


class WandbLogger:
    """Writes metrics to a run of Weights & Biases, with the round as step; needs the package wandb.

    The run is offline, in `folder`, unless WANDB_MODE or WANDB_API_KEY is set; `wandb sync` uploads it later.
    """

    def __init__(self, folder: Path, project: str = "socflower") -> None:
        _require_package("WandbLogger", "wandb")
        import wandb

        is_online = "WANDB_API_KEY" in os.environ
        mode = os.environ.get("WANDB_MODE", "online" if is_online else "offline")
        folder.mkdir(parents=True, exist_ok=True)
        self._run = wandb.init(project=project, name=folder.name, dir=folder, mode=mode)

    @plain_numbers
    def log(self, server_round: int, values: Mapping[str, float]) -> None:
        """Log all metrics at the step of the round."""
        self._run.log(dict(values), step=server_round)

    def close(self) -> None:
        """End the run."""
        self._run.finish()


_LOGGERS: Mapping[str, Callable[[Path], RunLogger]] = {
    "tensorboard": lambda out: TensorBoardLogger(out / "tensorboard"),
    "csv": lambda out: CsvLogger(out / "metrics.csv"),
    "jsonl": lambda out: JsonLinesLogger(out / "metrics.jsonl"),
    "mlflow": MlflowLogger,
    "wandb": WandbLogger,
}
"""The logger of each name of `--log`, in a run's folder."""


_PACKAGES = ("tensorboard", "mlflow", "wandb")
"""The loggers that need a package of their name, which is an extra, too."""


def _require_package(who: str, package: str) -> None:
    if find_spec(package) is None:
        raise ConfigError(f"{who}: needs the package {package}: pip install 'socflower[{package}]'")


@dataclass(frozen=True)
class RoundLogging:
    """How runs are seen: the names of loggers, who is told about one that cannot write, and the port of `--metrics`."""

    names: tuple[str, ...] = ()
    on_notice: Callable[[str], None] = print
    # As host:port; empty: none.
    metrics: str = ""

    def __post_init__(self) -> None:
        for name in self.names:
            if name not in _LOGGERS:
                raise ConfigError(f"--log {name}: is unknown; use some of {', '.join(_LOGGERS)}")
            if self.names.count(name) > 1:
                raise ConfigError(f"--log {name}: is named twice; name each once")
        if self.metrics:
            StatusPort.check(self.metrics)
        for name in self.names:
            if name in _PACKAGES:
                _require_package(f"--log {name}", name)

    @contextmanager
    def into(self, out: Path) -> Iterator[OnRound]:
        """Yield a function that logs a round's entry in `out`.

        Files of an earlier run are replaced when the first round arrives: a resumed run reports its earlier rounds
        again. A round that was reported already, as after a restart, is skipped. A logger that cannot write is dropped
        with a notice, and the run continues.
        """
        log = _RunLog(self, out)
        try:
            yield log.add_round
        finally:
            log.close()

    def write(self, out: Path, rounds: Iterable[dict[str, Any]]) -> None:
        """Log the rounds of a finished run in `out`."""
        with self.into(out) as log_round:
            for entry in rounds:
                log_round(entry)


NO_LOGGING = RoundLogging()


class _RunLog:
    """The open loggers of one run."""

    def __init__(self, logging: RoundLogging, out: Path) -> None:
        self._out, self._on_notice = out, logging.on_notice
        self._to_open = list(logging.names)
        self._open: dict[str, RunLogger] = {}
        self._last_round = -1

    def add_round(self, entry: dict[str, Any]) -> None:
        number = int(entry["round"])
        if number <= self._last_round:
            return
        self._last_round = number
        while self._to_open:
            name = self._to_open.pop(0)
            with self._dropped_if_unwritable(name):
                self._open[name] = _LOGGERS[name](self._out)
        for name, logger in list(self._open.items()):
            with self._dropped_if_unwritable(name):
                logger.log(number, scalars(entry))

    def close(self) -> None:
        for name, logger in list(self._open.items()):
            with self._dropped_if_unwritable(name):
                logger.close()

    @contextmanager
    def _dropped_if_unwritable(self, name: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self._open.pop(name, None)
            self._on_notice(
                f"--log {name}: cannot be written in {self._out} ({error.strerror}); the run continues "
                "without it"
            )


def scalars(entry: Mapping[str, Any]) -> dict[str, float]:
    """Return the numbers of a round's entry, the bytes of all tiers and of each, and an app's own metrics.

    The app's own metrics are named after their source, as in "train/loss".
    """
    values = {
        name: value
        for name, value in _numbers(entry).items()
        if name not in ("round", "num_rounds")
    }
    # An app without prices has no such value.
    if (by_tier := entry["bytes"]) is not None:
        values["bytes"] = float(sum(by_tier.values()))
        values |= {f"bytes_{tier}": float(num_bytes) for tier, num_bytes in by_tier.items()}
    for source in ("server", "evaluate", "train"):
        own = entry.get(source)
        if isinstance(own, Mapping):
            values |= {f"{source}/{name}": value for name, value in _numbers(own).items()}
    return values


def logged_evaluation(
    evaluate_fn: "EvaluateFn", *loggers: RunLogger, grid: "Grid | None" = None
) -> "EvaluateFn":
    """Return `evaluate_fn` of `Strategy.start` that also logs its metrics after every round.

    With a `grid` that has a clock, as the `local` engine's, virtual time, energy and bytes are logged too. The caller
    closes the loggers.
    """

    def evaluate(server_round: int, arrays: "ArrayRecord") -> "MetricRecord | None":
        metrics = evaluate_fn(server_round, arrays)
        values = _numbers(metrics or {})
        if (clock := getattr(grid, "clock", None)) is not None:
            usage = clock.usage
            values |= {
                "virtual_s": clock.now_s,
                "energy_j": usage.total_energy_j,
                "bytes": float(sum(usage.num_bytes.values())),
            }
        if metrics is not None:
            for logger in loggers:
                logger.log(server_round, values)
        return metrics

    return evaluate


def _numbers(metrics: Mapping[str, Any]) -> dict[str, float]:
    return {
        name: float(value)
        for name, value in metrics.items()
        if isinstance(value, int | float) and not isinstance(value, bool)
    }


def _new_file(path: Path) -> TextIO:
    path.parent.mkdir(parents=True, exist_ok=True)
    # A link's target stays as it is.
    with suppress(FileNotFoundError):
        path.unlink()
    return path.open("w", encoding="utf-8", newline="")
