"""Runs an app on any engine: with one folder through which its outcome comes back."""

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from time import perf_counter
from typing import Any, TypeAlias

from flwr.serverapp import ServerApp

from socflower.engines.app_files import RUN_FOLDER_KEY
from socflower.engines.deployment.attempts import OnNotice
from socflower.engines.deployment.options import DeployedApp, DeploymentOptions
from socflower.engines.deployment.run import run_in_deployment
from socflower.engines.local.exchange_record import ExchangeRecord
from socflower.engines.local.run_app import run_on_local_grid
from socflower.engines.local.workers import AppReference
from socflower.engines.names import num_cores
from socflower.engines.run_folder import OUTCOME, SCENARIO, STATUS, RunFolder
from socflower.engines.run_status import OnStatus
from socflower.engines.simulation import run_in_flower_simulation
from socflower.errors import (
    ConfigError,
    DataUnavailable,
    InfeasiblePlan,
    SocflowerError,
    TrainingFailed,
)

OnRound: TypeAlias = Callable[[dict[str, Any]], None]

DEFAULT_DEPLOYMENT = DeploymentOptions()

_WARNING_OF_SIMULATION = (
    "while this runs, every user of this machine can reach its SuperLink, and so run programs as you; on a "
    "shared machine use --engine local"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineApp:
    """An app that reads its document from the run's folder, in the forms in which engines take it."""

    # Of engine local, whose ServerApp runs in this process.
    server_app: ServerApp
    client_app: AppReference
    num_nodes: int
    # How many clients can run at the same time; more worker processes than that would idle.
    num_parallel: int
    # As files, with document and node configs.
    deployed: DeployedApp


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineChoice:
    """Where an app runs; `num_workers` are the processes of engine local (default: one per core; 0: none)."""

    engine: str = "local"
    num_workers: int | None = None
    deployment: DeploymentOptions = DEFAULT_DEPLOYMENT
    on_round: OnRound = lambda entry: None
    on_notice: OnNotice = lambda line: None
    # Gets what the ServerApp is doing now, when that has changed.
    on_status: OnStatus = lambda document: None


def run_on_engine(
    app: EngineApp,
    folder: RunFolder,
    settings: EngineChoice,
    *,
    record: ExchangeRecord | None = None,
    wants_model: bool = False,
) -> dict[str, Any]:
    """Run the app and return the outcome that it wrote; raises its error, of the same kind and in one line.

    On engine local the app resumes from a `record` of its exchanges. A remote SuperLink sends the trained model only if
    `wants_model`.
    """
    started_s = perf_counter()
    folder.write(SCENARIO, app.deployed.document)
    # The ServerApp may run in another process, so rounds are read from the folder.
    with following(folder, settings.on_round, settings.on_status):
        if settings.engine == "local":
            num_workers = settings.num_workers
            run_on_local_grid(
                app.server_app,
                app.client_app,
                num_nodes=app.num_nodes,
                run_config={RUN_FOLDER_KEY: str(folder.path)},
                num_workers=_most_useful(app.num_parallel) if num_workers is None else num_workers,
                record=record,
            )
        elif settings.engine == "deployment":
            run_in_deployment(
                app.deployed,
                folder,
                settings.deployment,
                settings.on_notice,
                wants_model=wants_model,
            )
        else:
            settings.on_notice(_WARNING_OF_SIMULATION)
            workers = _most_useful(app.num_parallel)
            run_in_flower_simulation(folder, app.deployed.local_files, app.num_nodes, workers)
    outcome = folder.read(OUTCOME)
    # Engines raise if the ServerApp wrote nothing.
    assert outcome is not None
    if "error" not in outcome:
        resumed = {} if record is None else {"resumed_from": record.resumed_from}
        return {"wall_s": perf_counter() - started_s, "resumed_from": [], **outcome, **resumed}
    error = _error_of(outcome)
    if record is not None and isinstance(error, TrainingFailed):
        record.forget_failures()
    raise error


def _most_useful(num_parallel: int) -> int:
    return min(num_cores(), num_parallel)


def _error_of(outcome: Mapping[str, Any]) -> SocflowerError:
    """Return the error of a run; a user's mistake that only the app detected keeps its type and exit status."""
    mistakes = {kind.__name__: kind for kind in (ConfigError, DataUnavailable, InfeasiblePlan)}
    return mistakes.get(outcome.get("kind", ""), TrainingFailed)(outcome["error"])


@contextmanager
def following(
    folder: RunFolder, on_round: OnRound, on_status: OnStatus = lambda document: None
) -> Iterator[None]:
    """Pass each round's progress entry to `on_round` as it is written, and each new status to `on_status`."""
    ended = threading.Event()

    def follow() -> None:
        seen, told = 0, None
        while True:
            # Entries that were written before the end are read by one more poll.
            is_last_poll = ended.wait(0.1)
            for entry in folder.read_progress(seen):
                seen += 1
                on_round(entry)
            if (status := folder.read(STATUS)) is not None and status != told:
                told = status
                on_status(status)
            if is_last_poll:
                return

    thread = threading.Thread(target=follow, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


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
