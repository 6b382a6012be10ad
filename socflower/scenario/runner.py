"""Runs a scenario on an engine and writes its result files, either all of them or none."""

import json
import shutil
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol, TypeAlias

from socflower.engines.app_files import RUN_FOLDER_KEY
from socflower.engines.checkpoint import CheckpointFolder, Checkpointing
from socflower.engines.deployment.attempts import OnNotice
from socflower.engines.deployment.options import DeploymentOptions
from socflower.engines.deployment.run import run_in_deployment
from socflower.engines.local.run_app import run_on_local_grid
from socflower.engines.local.workers import AppReference
from socflower.engines.names import num_cores
from socflower.engines.run_folder import RunFolder
from socflower.engines.run_log import NO_LOGGING, RoundLogging
from socflower.engines.simulation import run_in_flower_simulation
from socflower.errors import (
    ConfigError,
    DataUnavailable,
    InfeasiblePlan,
    SocflowerError,
    TrainingFailed,
)
from socflower.report.quality import costs_to_target
from socflower.report.report import write_report
from socflower.scenario.app.deployed import app_in_folder, deployed_app
from socflower.scenario.app.main import scenario_server_app
from socflower.scenario.app.round_record import versions
from socflower.scenario.arithmetic import arithmetic_notes
from socflower.scenario.expectations import check_expectations
from socflower.scenario.prepared_run import PreparedRun, prepare
from socflower.scenario.priced_processors import gpu_notes, priced_processors
from socflower.scenario.schema.config import Scenario
from socflower.scenario.schema.file import scenario_cluster, to_document
from socflower.scenario.schema.strategies import group_strategy
from socflower.wire.folders import UNFINISHED, exclusive_folder, new_folder, temporary_folder
from socflower.wire.message_keys import LOST_STATE
from socflower.wire.saved_state import atomic_file, write_atomically

# Faults that would end this process if the client ran in it.
_NEED_WORKERS = ("hang", "die")
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

WARNING_OF_SIMULATION = (
    "while this runs, every user of this machine can reach its SuperLink, and so run programs as you; on a "
    "shared machine use --engine local"
)

OnRound: TypeAlias = Callable[[dict[str, Any]], None]

DEFAULT_DEPLOYMENT = DeploymentOptions()


def run_scenario(
    scenario: Scenario | PreparedRun,
    engine: str = "local",
    *,
    num_workers: int | None = None,
    on_round: OnRound = lambda entry: None,
    trace_to: Path | None = None,
    checkpointing: Checkpointing | None = None,
    deployment: DeploymentOptions = DEFAULT_DEPLOYMENT,
    on_notice: OnNotice = lambda line: None,
    model_to: Path | None = None,
) -> dict[str, Any]:
    """Train and return the result document, expectations checked; trace and model go to `trace_to` and `model_to`.

    `num_workers` is the number of worker processes of the local engine (default: one per core; 0: none).
    With `checkpointing`, every synchronisation writes a checkpoint, and the run may resume from one.
    `deployment` is for the engine of that name; `on_notice` gets a line about each failure that it recovered from.
    A scenario that is not prepared yet is checked first. Raises a `SocflowerError` in one line if it cannot run or
    failed.
    """
    prepared = _prepared(scenario, engine, deployment)
    scenario = prepared.scenario
    for event in scenario.events:
        if engine == "local" and num_workers == 0 and event.kind in _NEED_WORKERS:
            raise ConfigError(
                f"{scenario.name} [[event]] kind = {event.kind!r} would take this process with it; use "
                "--workers 1 or more"
            )
    with temporary_folder() as temporary:
        folder = RunFolder(temporary)
        folder.write_scenario(to_document(scenario))
        if checkpointing is not None:
            folder.write_checkpointing(checkpointing)
        # The ServerApp may run in another process, so rounds are read from the folder.
        with following(folder, on_round):
            if engine == "local":
                _run_locally(prepared, folder, num_workers)
            elif engine == "deployment":
                app, wants_model = deployed_app(scenario), model_to is not None
                run_in_deployment(app, folder, deployment, on_notice, wants_model=wants_model)
            else:
                on_notice(WARNING_OF_SIMULATION)
                workers = _num_useful_workers(scenario)
                run_in_flower_simulation(folder, app_in_folder(), _num_nodes(scenario), workers)
        outcome = folder.read_outcome()
        # Engines raise if the ServerApp wrote nothing.
        assert outcome is not None
        if "error" in outcome:
            raise failure(outcome)
        if trace_to is not None and folder.trace.exists():
            shutil.copyfile(folder.trace, trace_to)
        if model_to is not None:
            shutil.copyfile(folder.model, model_to)
    return _result(scenario, engine, outcome)


def _prepared(
    scenario: Scenario | PreparedRun, engine: str, deployment: DeploymentOptions
) -> PreparedRun:
    if isinstance(scenario, PreparedRun):
        return scenario
    return prepare(scenario, engine, trains_here=not deployment.superlink)


def _result(scenario: Scenario, engine: str, outcome: dict[str, Any]) -> dict[str, Any]:
    """Return the result document of an outcome: claims, costs to the target, and where its figures come from."""
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


def failure(outcome: Mapping[str, Any]) -> SocflowerError:
    """Return the error of a run; a user's mistake that only the app detected keeps its type and exit status."""
    mistakes = {kind.__name__: kind for kind in (ConfigError, DataUnavailable, InfeasiblePlan)}
    return mistakes.get(outcome.get("kind", ""), TrainingFailed)(outcome["error"])


def with_predictions(result: dict[str, Any]) -> dict[str, Any]:
    """Return the result of a deployment, in which virtual time is a prediction."""
    # Apps of users have no warm-up.
    warm_up = result.get("warm_up")
    return {
        **with_prediction(result),
        "rounds": [with_prediction(entry) for entry in result["rounds"]],
        "warm_up": None if warm_up is None else with_prediction(warm_up),
    }


def with_prediction(entry: dict[str, Any]) -> dict[str, Any]:
    """Return a round's entry of a deployment, in which virtual time is a prediction."""
    return {**entry, "virtual_s": None, "predicted_s": entry["virtual_s"]}


def run_to_folder(
    scenario: Scenario | PreparedRun,
    out: Path,
    engine: str = "local",
    *,
    num_workers: int | None = None,
    on_round: OnRound = lambda entry: None,
    resumable: bool = False,
    fresh: bool = False,
    on_notice: OnNotice = lambda line: None,
    deployment: DeploymentOptions = DEFAULT_DEPLOYMENT,
    save_model: Path | None = None,
    logging: RoundLogging = NO_LOGGING,
) -> dict[str, Any]:
    """Run and write `result.json`, `trace.json` and `report.html` into `out`, all three or none.

    A `resumable` run keeps checkpoints in `out/checkpoint` until it succeeds, and resumes from the newest one there
    unless `fresh` is set; `on_notice` gets a line about that. `save_model` is a file for the trained model. `logging`
    writes the rounds into `out` while the run goes. Raises `ConfigError` for a checkpoint of another run.
    """
    prepared = _prepared(scenario, engine, deployment)
    with exclusive_folder(out, f"--out {out}"), logging.into(out) as log_round:

        def follow(entry: dict[str, Any]) -> None:
            # A deployment's virtual time is a prediction, also in its log.
            log_round(with_prediction(entry) if engine == "deployment" else entry)
            on_round(entry)

        def run(checkpointing: Checkpointing | None) -> dict[str, Any]:
            return _run_to_folder(
                prepared,
                out,
                engine,
                save_model,
                checkpointing=checkpointing,
                num_workers=num_workers,
                on_round=follow,
                on_notice=on_notice,
                deployment=deployment,
            )

        if resumable:
            return _resumed(run, prepared.scenario, out, engine, fresh, on_notice)
        try:
            return run(None)
        except TrainingFailed as error:
            raise TrainingFailed(_with_advice(error, remotely_kept_line(deployment))) from None


def _resumed(
    run: Callable[[Checkpointing | None], dict[str, Any]],
    scenario: Scenario,
    out: Path,
    engine: str,
    fresh: bool,
    on_notice: OnNotice,
) -> dict[str, Any]:
    with kept_for_resume(kept := checkpoint_folder(out), out, fresh):
        checkpoint = kept.resume(to_document(scenario), engine, versions(), on_notice)
        if checkpoint is not None:
            on_notice(
                f"resuming {out} after round {checkpoint.server_round} of {checkpoint.num_rounds}; "
                "--fresh starts over"
            )
        result = run(Checkpointing(kept=kept, engine=engine).after(checkpoint))
        # Only a finished run no longer needs its checkpoints.
        kept.remove()
    return result


def _run_to_folder(
    run: PreparedRun,
    out: Path,
    engine: str,
    save_model: Path | None,
    *,
    checkpointing: Checkpointing | None,
    **settings: Any,
) -> dict[str, Any]:
    within = None if checkpointing is None else checkpointing.kept.path
    with new_folder(out, within=within) as fresh:
        result = run_scenario(
            run,
            engine,
            trace_to=fresh / "trace.json",
            model_to=save_model and fresh / "model.npz",
            checkpointing=checkpointing,
            **settings,
        )
        # A model inside `out` takes part in its replacement, all files or none.
        if save_model is not None and save_model.parent.resolve() == out.resolve():
            (fresh / "model.npz").replace(fresh / save_model.name)
            save_model = None
        write_atomically(fresh / "result.json", json.dumps(result, indent=1))
        write_report(
            fresh / "report.html", [result], title=run.scenario.name, question=run.scenario.question
        )
    if save_model is not None:
        _move_model(out / "model.npz", save_model)
    return result


def _move_model(model: Path, target: Path) -> None:
    """Move a trained model, also to another file system; `ConfigError` if that fails, and the model stays."""
    try:
        with model.open("rb") as source, atomic_file(target) as copy:
            shutil.copyfileobj(source, copy)
    except OSError as error:
        raise ConfigError(
            f"--save-model {target}: cannot be written ({error.strerror}); the model is {model}"
        ) from None
    model.unlink()


def checkpoint_folder(out: Path) -> CheckpointFolder:
    """Return the checkpoint folder of a run into `out`."""
    return CheckpointFolder(out / "checkpoint")


class Kept(Protocol):
    """What a run keeps in a folder until it succeeds, so that it can be resumed."""

    path: Path

    def create(self) -> None:
        """Create the folder, and remove files that a killed writer left incomplete."""

    def newest_name(self) -> str:
        """Return the point after which the run can resume, such as "round 3"; empty if there is none."""

    def remove(self) -> None:
        """Remove everything, and the folder."""


@contextmanager
def kept_for_resume(kept: Kept, out: Path, fresh: bool) -> Iterator[None]:
    """Create the folder in which a run into `out` keeps its state, empty if `fresh`; errors remove an empty one."""
    try:
        if fresh:
            kept.remove()
        kept.create()
        # A killed run leaves half-written folders, which nothing else removes.
        for half_written in kept.path.glob(f"{UNFINISHED}*"):
            shutil.rmtree(half_written)
    except OSError as error:
        raise ConfigError(f"--out {out}: cannot be written ({error.strerror})") from None
    try:
        yield
    except BaseException as error:
        if not kept.newest_name():
            kept.remove()
        elif isinstance(error, TrainingFailed):
            raise TrainingFailed(_with_advice(error, kept_line(kept, fresh=fresh))) from None
        raise


def kept_line(kept: Kept, *, fresh: bool) -> str:
    """Return the line about what is kept of a run that ended early; empty if nothing is.

    With `fresh` the command was given --fresh, which would remove it.
    """
    name = kept.newest_name()
    return (
        name and f"{name} is kept in {kept.path}: {_resumes(fresh)} after it, --fresh starts over"
    )


def remotely_kept_line(deployment: DeploymentOptions) -> str:
    """Return the line about checkpoints on the SuperLink's machine; empty if none are kept there."""
    return deployment.checkpoint_folder and (
        f"checkpoints are in {deployment.checkpoint_folder} on the SuperLink's machine: "
        f"{_resumes(deployment.fresh)} after the newest, --fresh starts over"
    )


def _resumes(fresh: bool) -> str:
    return f"the same command {'without --fresh ' if fresh else ''}resumes"


def _with_advice(error: TrainingFailed, advice: str) -> str:
    """Return the text of an error with advice on how to resume; one about a lost state has its own."""
    return str(error) if not advice or LOST_STATE in str(error) else f"{error}; {advice}"


def _run_locally(run: PreparedRun, folder: RunFolder, num_workers: int | None) -> None:
    scenario = run.scenario
    workers = _num_useful_workers(scenario) if num_workers is None else num_workers
    run_on_local_grid(
        scenario_server_app(lambda context: folder, run),
        AppReference(target="socflower.scenario.app.main:client_app"),
        num_nodes=_num_nodes(scenario),
        run_config={RUN_FOLDER_KEY: str(folder.path)},
        num_workers=workers,
    )


def _num_nodes(scenario: Scenario) -> int:
    return scenario.strategy.socs or scenario_cluster(scenario).num_socs


def _num_useful_workers(scenario: Scenario) -> int:
    """Return how many clients can run at the same time on this machine; more worker processes than that would idle."""
    groups = None
    if scenario.has_groups:
        groups = group_strategy(scenario.strategy.name).num_groups or scenario.strategy.groups
    return min(num_cores(), groups if isinstance(groups, int) else _num_nodes(scenario))


@contextmanager
def following(folder: RunFolder, on_round: OnRound) -> Iterator[None]:
    """Pass each round's progress entry to `on_round` as it is written."""
    ended = threading.Event()

    def follow() -> None:
        seen = 0
        while True:
            # Entries that were written before the end are read by one more poll.
            is_last_poll = ended.wait(0.1)
            for entry in folder.read_progress(seen):
                seen += 1
                on_round(entry)
            if is_last_poll:
                return

    thread = threading.Thread(target=follow, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
