"""Runs a scenario or an app folder on an engine and writes its result files, either all of them or none."""

import json
import shutil
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

from socflower.engines.any_engine import (
    EngineApp,
    EngineChoice,
    run_on_engine,
    with_prediction,
)
from socflower.engines.checkpoint import RunStore
from socflower.engines.deployment.options import DeploymentOptions
from socflower.engines.local.exchange_record import ExchangeRecord
from socflower.engines.run_folder import RunFolder
from socflower.engines.run_log import NO_LOGGING, RoundLogging
from socflower.engines.run_status import STATUS_FILE, RunStatus
from socflower.errors import ConfigError, TrainingFailed
from socflower.report.report import write_report
from socflower.wire.folders import UNFINISHED, exclusive_folder, new_folder, temporary_folder
from socflower.wire.message_keys import LOST_STATE
from socflower.wire.saved_state import atomic_file, write_atomically
from socflower.wire.status_port import StatusPort

RESULT_FILES = ("result.json", "trace.json", "report.html", "comparison.json")


class Job(Protocol):
    """What is run: an app with its cluster, and what its result says."""

    @property
    def title(self) -> str:
        """The name above the report."""

    @property
    def question(self) -> str:
        """The question that the run answers, above the report; may be empty."""

    def check(self) -> None:
        """Raise a one-line error for what can be known before anything starts."""

    def engine_app(self) -> EngineApp:
        """Return the app for the engines."""

    def keep(self, out: Path, settings: EngineChoice) -> RunStore | None:
        """Return what keeps the state of a run into `out`; None if nothing does."""

    def prepare(self, folder: RunFolder, kept: RunStore | None, settings: EngineChoice) -> None:
        """Write into the run's folder from where it resumes."""

    def result(self, outcome: dict[str, Any], engine: str) -> dict[str, Any]:
        """Return the result document of an outcome, with its claims checked."""

    def write_model(self, weights: Path, target: Path) -> None:
        """Write a trained model, whose weights are an npz, in the format that the target's ending names."""

    def shown(self, result: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the result as the report reads it."""


def run_job(
    job: Job,
    settings: EngineChoice,
    *,
    kept: RunStore | None = None,
    trace_to: Path | None = None,
    model_to: Path | None = None,
) -> dict[str, Any]:
    """Run and return the result document; trace and model go to `trace_to` and `model_to`."""
    app = job.engine_app()
    with temporary_folder() as temporary:
        folder = RunFolder(temporary)
        job.prepare(folder, kept, settings)
        record = kept if isinstance(kept, ExchangeRecord) else None
        wants_model = model_to is not None
        outcome = run_on_engine(app, folder, settings, record=record, wants_model=wants_model)
        if trace_to is not None and folder.trace.exists():
            shutil.copyfile(folder.trace, trace_to)
        if model_to is not None:
            job.write_model(folder.model, model_to)
    return job.result(outcome, settings.engine)


def run_job_to_folder(
    job: Job,
    out: Path,
    settings: EngineChoice,
    *,
    fresh: bool = False,
    save_model: Path | None = None,
    logging: RoundLogging = NO_LOGGING,
) -> dict[str, Any]:
    """Run and write `result.json`, `trace.json` and `report.html` into `out`, all three or none.

    A job that keeps its state does so until it succeeds, and resumes from it unless `fresh` is set. `save_model` is a
    file for the trained model. `logging` writes the rounds into `out` while the run goes. Raises `ConfigError` for the
    state of another run.
    """
    with exclusive_folder(out, f"--out {out}"):
        job.check()
        kept = job.keep(out, settings)
        with (
            _watched(job.title, out, settings, logging) as watched,
            logging.into(out) as log_round,
            kept_for_resume(kept, out, settings, fresh=fresh),
        ):

            def follow(entry: dict[str, Any]) -> None:
                # A deployment's virtual time is a prediction, also in its log.
                log_round(with_prediction(entry) if settings.engine == "deployment" else entry)
                watched.on_round(entry)

            result = _write_results(
                job, out, replace(watched, on_round=follow), kept=kept, save_model=save_model
            )
            # Only a finished run no longer needs what it kept; one that ended early may go farther.
            if kept is not None and result.get("ended_after") is None:
                kept.remove()
    return result


@contextmanager
def _watched(
    title: str, out: Path, settings: EngineChoice, logging: RoundLogging
) -> Iterator[EngineChoice]:
    """Keep `status.json` in `out`, and serve it at the port of `--metrics`, within the context."""
    status = RunStatus(out / STATUS_FILE, title, settings.engine)

    def on_round(entry: dict[str, Any]) -> None:
        status.on_round(entry)
        settings.on_round(entry)

    def on_notice(line: str) -> None:
        status.on_notice(line)
        settings.on_notice(line)

    with ExitStack() as stack:
        stack.callback(status.close)
        if logging.metrics:
            port = stack.enter_context(StatusPort(logging.metrics, status.port_state))
            settings.on_notice(f"metrics at http://{port.address}/metrics")
        yield replace(settings, on_round=on_round, on_notice=on_notice, on_status=status.on_server)


def _write_results(
    job: Job,
    out: Path,
    settings: EngineChoice,
    *,
    kept: RunStore | None,
    save_model: Path | None,
) -> dict[str, Any]:
    file = "model" if save_model is None else f"model{save_model.suffix}"
    with new_folder(out, within=None if kept is None else kept.path) as new:
        result = run_job(
            job,
            settings,
            kept=kept,
            trace_to=new / "trace.json",
            model_to=save_model and new / file,
        )
        # A model inside `out` takes part in its replacement, all files or none.
        if save_model is not None and save_model.parent.resolve() == out.resolve():
            (new / file).replace(new / save_model.name)
            save_model = None
        write_atomically(new / "result.json", json.dumps(result, indent=1))
        report = new / "report.html"
        write_report(report, [job.shown(result)], title=job.title, question=job.question)
        # Files of another kind of run would otherwise stay beside the new result.
        for name in RESULT_FILES:
            if not (new / name).exists():
                (out / name).unlink(missing_ok=True)
    if save_model is not None:
        _move_model(out / file, save_model)
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


@contextmanager
def kept_for_resume(
    kept: RunStore | None, out: Path, settings: EngineChoice, *, fresh: bool
) -> Iterator[None]:
    """Create the folder in which a run into `out` keeps its state, empty if `fresh`; errors remove an empty one.

    A training that fails says how to resume it.
    """
    if kept is None:
        try:
            yield
        except TrainingFailed as error:
            advice = remotely_kept_line(settings.deployment)
            raise TrainingFailed(_with_advice(error, advice)) from None
        return
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


def kept_line(kept: RunStore, *, fresh: bool) -> str:
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
