"""Runs a scenario on an engine and writes its result files."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from socflower.cluster import Cluster
from socflower.engines.any_engine import (
    EngineApp,
    EngineChoice,
    with_predictions,
)
from socflower.engines.checkpoint import CheckpointFolder, Checkpointing, RunStore
from socflower.engines.ending import Ending
from socflower.engines.local.workers import AppReference
from socflower.engines.run_folder import CHECKPOINTING, ENDING, RunFolder
from socflower.engines.run_log import NO_LOGGING, RoundLogging
from socflower.errors import ConfigError
from socflower.report.quality import costs_to_target
from socflower.scenario.app.deployed import deployed_app
from socflower.scenario.app.main import folder_of_run_config, scenario_server_app
from socflower.scenario.app.round_record import versions
from socflower.scenario.arithmetic import arithmetic_notes
from socflower.scenario.expectations import check_expectations
from socflower.scenario.jobs import run_job, run_job_to_folder
from socflower.scenario.model_export import write_model
from socflower.scenario.prepared_run import PreparedRun, prepare
from socflower.scenario.priced_processors import gpu_notes, priced_processors
from socflower.scenario.schema.config import NEED_WORKERS
from socflower.scenario.schema.file import num_nodes, num_participants, to_document
from socflower.scenario.schema.scenario_file import Scenario

_NOTES = (
    "Virtual time and energy come from the cluster model; accuracy and loss come from real training of this model.",
    "Exchange constants are fitted to the eight latencies of SoCFlow+ 2.2 (see docs/concepts/virtual-time.md).",
)
"""Where the figures of every result come from."""

_NOTES_OF_DEPLOYMENT = (
    "Wall time was measured on this deployment, its start included; predicted time, SoC time, energy and bytes come "
    "from the cluster model; accuracy and loss come from real training of this model.",
    _NOTES[1],
)


@dataclass(frozen=True, kw_only=True, slots=True)
class ScenarioJob:
    """A scenario that was checked for its engine."""

    run: PreparedRun
    # Keeps checkpoints in the folder of its results.
    resumable: bool = False
    ending: Ending | None = None

    @property
    def title(self) -> str:
        """The scenario's name."""
        return self.run.scenario.name

    @property
    def question(self) -> str:
        """The scenario's question."""
        return self.run.scenario.question

    def check(self) -> None:
        """Do nothing: it is checked."""

    def engine_app(self) -> EngineApp:
        """Return the app of every scenario; on engine local it uses what is already built."""
        scenario = self.run.scenario
        return EngineApp(
            server_app=scenario_server_app(folder_of_run_config, self.run),
            client_app=AppReference(target="socflower.scenario.app.main:client_app"),
            num_nodes=num_nodes(scenario, self.run.cluster),
            num_parallel=_num_parallel(scenario, self.run.cluster),
            deployed=deployed_app(scenario),
        )

    def keep(self, out: Path, settings: EngineChoice) -> RunStore | None:
        """Return the folder of checkpoints."""
        return checkpoint_folder(out) if self.resumable else None

    def prepare(self, folder: RunFolder, kept: RunStore | None, settings: EngineChoice) -> None:
        """Write when the run ends, where checkpoints are, and after which one the run resumes."""
        if self.ending is not None:
            folder.write(ENDING, asdict(self.ending))
        if not isinstance(kept, CheckpointFolder):
            return
        checkpoint = kept.resume(
            to_document(self.run.scenario), settings.engine, versions(), settings.on_notice
        )
        if checkpoint is not None:
            settings.on_notice(
                f"resuming {kept.path.parent} after round {checkpoint.server_round} of "
                f"{checkpoint.num_rounds}; --fresh starts over"
            )
        checkpointing = Checkpointing(kept=kept, engine=settings.engine).after(checkpoint)
        folder.write(CHECKPOINTING, checkpointing.to_document())

    def result(self, outcome: dict[str, Any], engine: str) -> dict[str, Any]:
        """Return the result document: claims, costs to the target, and where its figures come from."""
        scenario = self.run.scenario
        result = {"schema": 1, "scenario": to_document(scenario), "engine": engine, **outcome}
        # Before `with_predictions` renames virtual time: claims are about the model's time on every engine.
        result["expectations"] = check_expectations(scenario.expect, result)
        if engine == "deployment":
            result = with_predictions(result)
        result |= costs_to_target(result, *scenario.compare.target_of([result]))
        result["processors"] = priced_processors(scenario, result["trained_on"])
        result["notes"] = [
            *(_NOTES_OF_DEPLOYMENT if engine == "deployment" else _NOTES),
            *arithmetic_notes(scenario),
            *gpu_notes(result["processors"], engine),
        ]
        return result

    def write_model(self, weights: Path, target: Path) -> None:
        """Write a trained model in the format that the target's ending names."""
        write_model(self.run.scenario, weights, target)

    def shown(self, result: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the result as it is."""
        return result


def run_scenario(
    scenario: Scenario | PreparedRun,
    engine: str = "local",
    *,
    trace_to: Path | None = None,
    model_to: Path | None = None,
    **settings: Any,
) -> dict[str, Any]:
    """Train and return the result document, expectations checked; trace and model go to `trace_to` and `model_to`.

    `settings` are those of `EngineChoice`. A scenario that is not prepared yet is checked first. Raises a
    `SocflowerError` in one line if it cannot run or failed.
    """
    where = EngineChoice(engine=engine, **settings)
    job = ScenarioJob(run=_prepared(scenario, where))
    return run_job(job, where, trace_to=trace_to, model_to=model_to)


def run_to_folder(
    scenario: Scenario | PreparedRun,
    out: Path,
    engine: str = "local",
    *,
    resumable: bool = False,
    fresh: bool = False,
    save_model: Path | None = None,
    logging: RoundLogging = NO_LOGGING,
    ending: Ending | None = None,
    **settings: Any,
) -> dict[str, Any]:
    """Run into a folder; see `run_job_to_folder`, and `EngineChoice` for `settings`.

    `ending` ends the run early, on engines of this machine.

    A `resumable` run keeps checkpoints in `out/checkpoint` until it succeeds, and resumes from the newest one there
    unless `fresh` is set.
    """
    where = EngineChoice(engine=engine, **settings)
    job = ScenarioJob(run=_prepared(scenario, where), resumable=resumable, ending=ending)
    return run_job_to_folder(job, out, where, fresh=fresh, save_model=save_model, logging=logging)


def _prepared(scenario: Scenario | PreparedRun, settings: EngineChoice) -> PreparedRun:
    run = scenario
    if not isinstance(run, PreparedRun):
        trains_here = not settings.deployment.superlink
        run = prepare(run, settings.engine, trains_here=trains_here)
    for event in run.scenario.events:
        in_this_process = settings.engine == "local" and settings.num_workers == 0
        if in_this_process and event.kind in NEED_WORKERS:
            raise ConfigError(
                f"{run.scenario.name} [[event]] kind = {event.kind!r} would take this process with it; use "
                "--workers 1 or more"
            )
    return run


def checkpoint_folder(out: Path) -> CheckpointFolder:
    """Return the checkpoint folder of a run into `out`."""
    return CheckpointFolder(out / "checkpoint")


def _num_parallel(scenario: Scenario, cluster: Cluster) -> int:
    """Return how many clients can run at the same time."""
    num_socs = num_participants(scenario, cluster)
    groups = scenario.strategy.num_groups(num_socs)
    return groups if isinstance(groups, int) else num_socs
