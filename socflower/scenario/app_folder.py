"""Runs any Flower app folder: its unmodified ServerApp and ClientApp, with its metrics and their virtual time."""

import hashlib
import json
import math
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from socflower.cluster import Cluster
from socflower.cluster.cluster_file import load_cluster
from socflower.cluster.task_graph import Activity
from socflower.engines.any_engine import (
    DEFAULT_DEPLOYMENT,
    EngineApp,
    EngineChoice,
    with_predictions,
)
from socflower.engines.checkpoint import RunStore
from socflower.engines.deployment.options import DeployedApp, DeploymentOptions
from socflower.engines.local.exchange_record import ExchangeRecord
from socflower.engines.local.run_app import FlowerApp, load_flower_app, require_server_app
from socflower.engines.local.workers import AppReference, resolve_client_app
from socflower.engines.run_folder import RunFolder
from socflower.engines.run_log import NO_LOGGING, RoundLogging
from socflower.errors import ConfigError
from socflower.scenario.app.own_app import own_app_files, training_profile
from socflower.scenario.app.own_app import server_app as own_server_app
from socflower.scenario.app.round_record import versions
from socflower.scenario.expectations import check_app_claims, parse_claims, refuse_unknown_metrics
from socflower.scenario.jobs import run_job_to_folder
from socflower.scenario.priced_processors import cluster_gpu_notes
from socflower.toml_file import parse_value
from socflower.user_code import forgotten_modules, own_sources

RunConfigValue: TypeAlias = bool | int | float | str
OnNotice: TypeAlias = Callable[[str], None]

_PRICED_BY = {
    "fp32": "leave the pricing out of Costs",
    "int8": "SoCFlow(…, costs=Costs(model_profile=…, pricing=Int8Pricing())) has those of int8",
    "mixed": "SoCFlow(…, costs=Costs(model_profile=…, pricing=MixedPricing())) has those of both processors",
}


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

    # ------------------------------------------------------------------------------------ as a `Job`
    @property
    def question(self) -> str:
        """Nothing: an app has no question."""
        return ""

    def engine_app(self) -> EngineApp:
        """Return the app that stands for this one: it reads from the run's folder which one it is."""
        app, cluster = load_flower_app(self.folder), load_cluster(self.cluster_file)
        num_nodes = self.num_nodes or cluster.num_socs
        files = own_app_files()
        return EngineApp(
            server_app=own_server_app,
            client_app=AppReference(target="socflower.scenario.app.own_app:client_app"),
            num_nodes=num_nodes,
            num_parallel=num_nodes,
            deployed=DeployedApp(
                document={
                    "app": str(self.folder.resolve()),
                    "cluster_file": str(self.cluster_file.resolve()),
                    "run_config": run_config(app, self.overrides),
                    "training_flops": self.training_flops,
                },
                local_files=files,
                bundle_files=files,
                node_configs=_node_configs(cluster, num_nodes),
            ),
        )

    def keep(self, out: Path, settings: EngineChoice) -> RunStore | None:
        """Return the record of the app's exchanges of messages on engine local; Flower's engines keep nothing."""
        if settings.engine != "local":
            return None
        return run_record(out, self.inputs(), settings.on_notice)

    def prepare(self, folder: RunFolder, kept: RunStore | None, settings: EngineChoice) -> None:
        """Do nothing: the record is replayed by the grid."""

    def result(self, outcome: dict[str, Any], engine: str) -> dict[str, Any]:
        """Return the result document: claims, and where its figures come from."""
        cluster = load_cluster(self.cluster_file)
        result = {
            "schema": 1,
            "app": str(self.folder),
            "label": self.title,
            "engine": engine,
            "run_config": run_config(load_flower_app(self.folder), self.overrides),
            "cluster_file": str(self.cluster_file),
            "num_nodes": self.num_nodes or cluster.num_socs,
            **outcome,
        }
        result["expectations"], missed = check_app_claims(parse_claims(self.claims), result)
        if engine == "deployment":
            result = with_predictions(result)
        result["notes"] += [
            *cluster_gpu_notes(cluster, engine, result["trained_on"]),
            *_pricing_notes(result, self.training_flops),
            *missed,
        ]
        return result

    def write_model(self, weights: Path, target: Path) -> None:
        """Copy the weights: whose names are those of an app's own model is not known here."""
        shutil.copyfile(weights, target)

    def shown(self, result: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the result with its settings where the report looks for those of a scenario."""
        keys = ("app", "strategy", "cluster_file", "num_nodes", "run_config")
        settings = {key: result[key] for key in keys}
        return {**result, "strategy": result["label"], "scenario": settings}


def run_app_folder(
    run: AppRun,
    out: Path,
    *,
    fresh: bool = False,
    on_notice: OnNotice = lambda line: None,
    logging: RoundLogging = NO_LOGGING,
) -> dict[str, Any]:
    """Run the app into a folder; see `run_job_to_folder`.

    On engine `local` the run keeps its exchanges of messages in `out/exchanges` until it succeeds, and resumes from
    them unless `fresh` is set; `on_notice` gets a line about that. Raises `TrainingFailed`, and changes nothing
    else, if no client succeeded, or none of those that trained last.
    """
    settings = EngineChoice(
        engine=run.engine,
        num_workers=run.num_workers,
        deployment=run.deployment,
        on_notice=on_notice,
    )
    # Another app may have modules of the same names.
    with forgotten_modules(run.folder):
        return run_job_to_folder(run, out, settings, fresh=fresh, logging=logging)


def run_record(
    out: Path,
    inputs: Mapping[str, Any] | None = None,
    on_notice: OnNotice = lambda line: None,
) -> ExchangeRecord:
    """Return the record of the exchanges of an app that runs into `out`."""
    return ExchangeRecord(out / "exchanges", inputs or {}, on_notice=on_notice)


def _digest(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


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
