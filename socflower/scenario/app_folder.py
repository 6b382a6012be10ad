"""Runs any Flower app folder: its unmodified ServerApp and ClientApp, with its metrics and their virtual time."""

import hashlib
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any, TypeAlias

from socflower.cluster import Cluster
from socflower.cluster.cluster_file import load_cluster
from socflower.cluster.task_graph import Activity
from socflower.engines.app_metrics import OnRound, RoundLog
from socflower.engines.deployment.options import DeployedApp, DeploymentOptions
from socflower.engines.deployment.run import run_in_deployment
from socflower.engines.local.exchange_record import ExchangeRecord
from socflower.engines.local.message_log import MessageLog
from socflower.engines.local.run_app import FlowerApp, load_flower_app, require_server_app, run_app
from socflower.engines.local.workers import resolve_client_app
from socflower.engines.names import num_cores
from socflower.engines.run_folder import RunFolder
from socflower.engines.run_log import NO_LOGGING, RoundLogging
from socflower.engines.simulation import run_in_flower_simulation
from socflower.errors import ConfigError
from socflower.report.report import write_report
from socflower.scenario.app.own_app import app_outcome, own_app_files, training_profile
from socflower.scenario.app.round_record import versions
from socflower.scenario.expectations import check_app_claims, parse_claims, refuse_unknown_metrics
from socflower.scenario.priced_processors import cluster_gpu_notes
from socflower.scenario.runner import (
    DEFAULT_DEPLOYMENT,
    WARNING_OF_SIMULATION,
    failure,
    following,
    kept_for_resume,
    with_prediction,
    with_predictions,
)
from socflower.sim import EventClock, Trace
from socflower.toml_file import parse_value
from socflower.user_code import forgotten_modules, own_sources
from socflower.wire.folders import exclusive_folder, new_folder, temporary_folder
from socflower.wire.saved_state import write_atomically

RunConfigValue: TypeAlias = bool | int | float | str
OnNotice: TypeAlias = Callable[[str], None]

_PRICED_BY = {
    "fp32": "leave the pricing out of Costs",
    "int8": "SoCFlow(…, costs=Costs(model_profile=…, pricing=Int8Pricing())) has those of int8",
    "mixed": "SoCFlow(…, costs=Costs(model_profile=…, pricing=MixedPricing())) has those of both processors",
}
RESULT_FILES = ("result.json", "trace.json", "report.html", "comparison.json")


@dataclass(frozen=True, kw_only=True, slots=True)
class AppRun:
    """An app folder and how it is run; a node is a SoC of the cluster (default: all).

    `training_flops` is the cost of one example in training; without it only messages take virtual time, training does
    not. `overrides` set keys of the run config; `claims` are those of `--expect`.
    """

    folder: Path
    cluster_file: Path
    engine: str = "local"
    num_nodes: int | None = None
    training_flops: float | None = None
    overrides: tuple[str, ...] = ()
    num_workers: int | None = None
    claims: tuple[str, ...] = ()
    deployment: DeploymentOptions = DEFAULT_DEPLOYMENT
    # The name in tables; by default that of the folder.
    label: str = ""

    @property
    def title(self) -> str:
        """The run's name in tables."""
        return self.label or self.folder.resolve().name

    def check(self) -> None:
        """Raise `ConfigError` for what can be known before the app starts, such as an app that cannot be imported."""
        training_profile(self.training_flops)
        parse_claims(self.claims)
        app = load_flower_app(self.folder)
        run_config(app, self.overrides)
        cluster = load_cluster(self.cluster_file)
        if self.num_nodes is not None and self.num_nodes > cluster.num_socs:
            raise ConfigError(
                f"--nodes {self.num_nodes}: {self.cluster_file} has {cluster.num_socs} SoCs"
            )
        with forgotten_modules(self.folder):
            require_server_app(app.server_app)
            resolve_client_app(app.client_app)
        refuse_unknown_metrics(
            parse_claims(self.claims),
            (file.read_text("utf-8", "replace") for file in self._sources(app).values()),
        )

    def inputs(self) -> dict[str, Any]:
        """Return what determines the weights and the virtual time, as plain values: those of an interrupted run."""
        app = load_flower_app(self.folder)
        return {
            "app": str(self.folder.resolve()),
            "server_app": app.server_app.target,
            "client_app": app.client_app.target,
            "run_config": run_config(app, self.overrides),
            "code": {name: _digest(file) for name, file in self._sources(app).items()},
            "cluster_file": str(self.cluster_file.resolve()),
            "cluster": _digest(self.cluster_file),
            "num_nodes": self.num_nodes,
            "training_flops": self.training_flops,
            "versions": versions(),
        }

    def _sources(self, app: FlowerApp) -> dict[str, Path]:
        return own_sources(self.folder.resolve(), [app.server_app.target, app.client_app.target])


def run_app_folder(
    run: AppRun,
    out: Path,
    *,
    fresh: bool = False,
    on_notice: OnNotice = lambda line: None,
    logging: RoundLogging = NO_LOGGING,
) -> dict[str, Any]:
    """Run the app and write `result.json`, `trace.json` and `report.html`; return the result.

    Results of other runs in `out` are removed; `logging` writes the rounds there while the app runs. On engine `local`
    the run keeps its exchanges of messages in `out/exchanges` until it succeeds, and resumes from them unless `fresh`
    is set; `on_notice` gets a line about that. Raises `TrainingFailed`, and changes nothing else, if no client
    succeeded, or none of those that trained last; `ConfigError` for the exchanges of another run.
    """
    with exclusive_folder(out, f"--out {out}"):
        run.check()
        if run.engine != "local":
            return _run_to_folder(run, out, None, on_notice, logging)
        record = run_record(out, run.inputs(), on_notice)
        with kept_for_resume(record, out, fresh):
            result = _run_to_folder(run, out, record, on_notice, logging)
            record.remove()
    return result


def run_record(
    out: Path,
    inputs: Mapping[str, Any] | None = None,
    on_notice: OnNotice = lambda line: None,
) -> ExchangeRecord:
    """Return the record of the exchanges of an app that runs into `out`."""
    return ExchangeRecord(out / "exchanges", inputs or {}, on_notice=on_notice)


def _run_to_folder(
    run: AppRun,
    out: Path,
    record: ExchangeRecord | None,
    on_notice: OnNotice,
    logging: RoundLogging,
) -> dict[str, Any]:
    with new_folder(out) as new, logging.into(out) as log_round:
        result = _run(run, new, on_notice, log_round, record)
        write_atomically(new / "result.json", json.dumps(result, indent=1))
        write_app_report(new / "report.html", [result], run.title)
        # Files of another kind of run would otherwise stay beside the new result.
        for name in RESULT_FILES:
            (out / name).unlink(missing_ok=True)
    return result


def _digest(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


def write_app_report(path: Path, results: Sequence[Mapping[str, Any]], title: str) -> None:
    """Write the report of one or several apps."""
    write_report(
        path,
        [
            {
                **result,
                "strategy": result["label"],
                "scenario": {
                    key: result[key]
                    for key in ("app", "strategy", "cluster_file", "num_nodes", "run_config")
                },
            }
            for result in results
        ],
        title=title,
    )


def _run(
    run: AppRun,
    new: Path,
    on_notice: OnNotice,
    on_round: OnRound,
    record: ExchangeRecord | None = None,
) -> dict[str, Any]:
    app, cluster = load_flower_app(run.folder), load_cluster(run.cluster_file)
    config, started_s = run_config(app, run.overrides), perf_counter()
    if run.engine == "local":
        # Another app may have modules of the same names.
        with forgotten_modules(run.folder):
            outcome = _run_locally(run, app, cluster, config, new, on_round, record)
    else:
        outcome = _run_in_flower(run, cluster, config, new, on_notice, on_round)
    result = {
        "schema": 1,
        "app": str(run.folder),
        "label": run.title,
        "engine": run.engine,
        "run_config": config,
        "cluster_file": str(run.cluster_file),
        "num_nodes": run.num_nodes or cluster.num_socs,
        "wall_s": perf_counter() - started_s,
        **outcome,
    }
    result["expectations"], missed = check_app_claims(parse_claims(run.claims), result)
    if run.engine == "deployment":
        result = with_predictions(result)
    result["notes"] += [
        *cluster_gpu_notes(cluster, run.engine, result["trained_on"]),
        *_pricing_notes(result, run.training_flops),
        *missed,
    ]
    return result


def _run_locally(
    run: AppRun,
    app: FlowerApp,
    cluster: Cluster,
    config: dict[str, RunConfigValue],
    new: Path,
    on_round: OnRound,
    record: ExchangeRecord | None,
) -> dict[str, Any]:
    trace, messages = Trace(), MessageLog()
    clock = EventClock(cluster, trace=trace)
    rounds = RoundLog(clock, on_round)
    run_app(
        app.server_app,
        app.client_app,
        cluster=cluster,
        num_nodes=run.num_nodes,
        run_config=config,
        num_workers=run.num_workers,
        model_profile=training_profile(run.training_flops),
        clock=clock,
        messages=messages,
        rounds=rounds,
        record=record,
    )
    trace.write(new / "trace.json")
    return {
        **app_outcome(clock, messages, rounds),
        "resumed_from": [] if record is None else record.resumed_from,
    }


def _run_in_flower(
    run: AppRun,
    cluster: Cluster,
    config: dict[str, RunConfigValue],
    new: Path,
    on_notice: OnNotice,
    on_round: OnRound,
) -> dict[str, Any]:
    """Run the app in Flower's processes, which read from a temporary folder what they run."""
    num_nodes = run.num_nodes or cluster.num_socs
    document = {
        "app": str(run.folder.resolve()),
        "cluster_file": str(run.cluster_file.resolve()),
        "run_config": config,
        "training_flops": run.training_flops,
    }
    with temporary_folder() as temporary:
        folder = RunFolder(temporary)
        folder.write_scenario(document)
        if run.engine == "simulation":
            on_notice(WARNING_OF_SIMULATION)
            with following(folder, on_round):
                run_in_flower_simulation(
                    folder, own_app_files(), num_nodes, min(num_cores(), num_nodes)
                )
        else:
            deployed = DeployedApp(
                document=document,
                local_files=own_app_files(),
                bundle_files=own_app_files(),
                node_configs=_node_configs(cluster, num_nodes),
            )
            with following(folder, lambda entry: on_round(with_prediction(entry))):
                run_in_deployment(deployed, folder, run.deployment, on_notice)
        outcome = folder.read_outcome()
        assert outcome is not None
        if "error" in outcome:
            raise failure(outcome)
        folder.trace.replace(new / "trace.json")
    return outcome


def _node_configs(cluster: Cluster, num_nodes: int) -> tuple[str, ...]:
    """Return `--node-config` of the SuperNodes of the first SoCs: partition, and position in the rack."""
    boards = [cluster.board_of(soc) for soc in range(num_nodes)]
    return tuple(
        f"partition-id={soc} num-partitions={num_nodes} board={board} "
        f"slot={soc - cluster.socs_of(board).start}"
        for soc, board in enumerate(boards)
    )


def _pricing_notes(result: Mapping[str, Any], training_flops: float | None) -> list[str]:
    """Return a line if no training cost any virtual time, or if it cost that of another arithmetic."""
    if result["breakdown"]["soc_seconds"].get(Activity.COMPUTE.value, 0.0):
        others = [each for each in result["trained_in"] if each != result["priced_in"]]
        return [
            f"clients trained in {each}, but time and energy are those of {result['priced_in']}: {_PRICED_BY[each]}"
            for each in others
        ]
    # The result already says why.
    if "energy_j" in result["unknown"]:
        return []
    if training_flops is not None:
        return [
            "training took no virtual time, since no reply of training says how many examples it used, as "
            "num-examples in its metrics"
        ]
    return [
        "training took no virtual time, since nothing tells what it costs: give --training-flops, the operations "
        "of one example's forward and backward pass"
    ]


def run_config(app: FlowerApp, overrides: Sequence[str]) -> dict[str, RunConfigValue]:
    """Return an app's run config with `--set key=value`; `ConfigError` for an unknown key or a value of another type"""
    config: dict[str, RunConfigValue] = dict(app.run_config)
    for override in overrides:
        key, value = _override(override, app.run_config)
        config[key] = value
    return config


def _override(override: str, config: Mapping[str, RunConfigValue]) -> tuple[str, RunConfigValue]:
    key, separator, text = (part.strip() for part in override.partition("="))
    if not separator or not text:
        raise ConfigError(f"--set {override}: write key=value, as in num-server-rounds=3")
    if key not in config:
        raise ConfigError(f"--set {override}: {key!r} is unknown; the app has {', '.join(config)}")
    value, default = parse_value(text), config[key]
    if isinstance(default, str) and isinstance(value, float) and not math.isfinite(value):
        # TOML reads words such as nan as numbers.
        value = text
    if not isinstance(value, bool | int | float | str):
        raise ConfigError(f"--set {override}: a run config has numbers, texts, true and false only")
    # A text's default may accept any value, such as "auto" or a number; numbers and booleans keep their type.
    if not isinstance(default, str) and _kind(value) != _kind(default):
        raise ConfigError(
            f"--set {override}: must be {_kind(default)}, as the app's {key} = {json.dumps(default)}"
        )
    return key, value


def _kind(value: RunConfigValue) -> str:
    if isinstance(value, bool):
        return "true or false"
    return "a text" if isinstance(value, str) else "a number"
