"""Engine `deployment`: an app on a SuperLink and SuperNodes, on this machine or on a remote rack.

Without a SuperLink's address the engine starts and ends a SuperLink and one SuperNode per participating SoC. When the
ServerApp or the SuperLink dies, the run is submitted again and resumes from its newest checkpoint.
"""

import os
import signal
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from socflower.engines.app_files import NUM_NODES_KEY, RUN_FOLDER_KEY, AppFiles
from socflower.engines.checkpoint import CheckpointFolder, Checkpointing
from socflower.engines.deployment.attempts import OnNotice, RunHistory, lost_nodes
from socflower.engines.deployment.flower_processes import is_running, tail
from socflower.engines.deployment.options import DeployedApp, DeploymentOptions
from socflower.engines.deployment.remote_superlink import run_on_remote_superlink
from socflower.engines.deployment.submitted_run import FlwrClient, RunLog
from socflower.engines.deployment.superlink import CONNECTION, ENGINE, LocalFlower, local_flower
from socflower.engines.run_folder import (
    CHECKPOINTING,
    CLOUD,
    OUTCOME,
    SCENARIO,
    SERVER,
    STATUS,
    RunFolder,
)
from socflower.errors import TrainingFailed

_POLL_S = 0.2
# The pause between two queries of Flower: each of them starts a process.
_ASK_S = 5.0
# Flower ends a run within this time if its ServerApp raised an error; it notices a killed ServerApp
# only later.
_FAILURE_NOTICE_S = 5.0


def run_in_deployment(
    app: DeployedApp,
    folder: RunFolder,
    deployment: DeploymentOptions,
    on_notice: OnNotice,
    *,
    wants_model: bool = False,
) -> None:
    """Run the app with `folder` as the run's folder, and write the outcome there.

    A remote SuperLink sends the trained model, into `folder.model`, only if `wants_model`. `on_notice` gets a line
    about each failure that was recovered from. Raises `ConfigError` for an unknown SuperLink and `TrainingFailed` if no
    attempt produced an outcome.
    """
    history = RunHistory(folder)
    if deployment.superlink:
        history.write_outcome(
            *run_on_remote_superlink(
                app, folder, history, deployment, on_notice, wants_model=wants_model
            )
        )
    else:
        history.write_outcome(*_run_locally(app, folder, history, deployment, on_notice))


def _run_locally(
    app: DeployedApp,
    folder: RunFolder,
    history: RunHistory,
    deployment: DeploymentOptions,
    on_notice: OnNotice,
) -> tuple[dict[str, Any], Path]:
    checkpointing = folder.read_checkpointing() or Checkpointing(
        kept=CheckpointFolder(folder.path / "checkpoint"), engine=ENGINE
    )
    kept = checkpointing.kept
    kept.create()
    resident = deployment.resident
    with local_flower(folder.path, app.node_configs, on_notice, resident=resident) as flower:
        history.superlink_shared_because = flower.network.shared_because
        flwr = FlwrClient(flower.environment, CONNECTION, folder.path, flower.network)
        cloud = flower.start_cloud(app.document) if app.needs_cloud else None
        while True:
            attempt = RunFolder(folder.path / f"attempt-{len(history.restarts) + 1}")
            attempt.path.mkdir()
            attempt.write(SCENARIO, app.document)
            attempt.write(CHECKPOINTING, checkpointing.to_document())
            if cloud is not None:
                attempt.write(CLOUD, asdict(cloud))
            cause, run_id = _attempt_locally(app.local_files, attempt, flower, flwr, history)
            outcome = attempt.read(OUTCOME)
            if cause is None and outcome is not None:
                cause = lost_nodes(outcome)
            if cause is None and outcome is not None:
                if attempt.model.exists():
                    attempt.model.replace(folder.model)
                return outcome, attempt.trace
            checkpoint = kept.newest(on_notice)
            after = 0 if checkpoint is None else checkpoint.server_round
            history.record_restart(after, str(cause), deployment.restarts, on_notice)
            flower.restart_superlink()
            if run_id is not None:
                # Otherwise the nodes would still receive its messages.
                flwr.stop(run_id)
            kept.remove_after(after)
            checkpointing = checkpointing.after(checkpoint)


def _attempt_locally(
    files: AppFiles,
    attempt: RunFolder,
    flower: LocalFlower,
    flwr: FlwrClient,
    history: RunHistory,
) -> tuple[str | None, int | None]:
    """Submit the run and follow it to its outcome; return the cause of failure, if any, and Flower's run id.

    When this returns, the attempt's ServerApp has ended; its clients may still run.
    """
    app = attempt.path / "app"
    files.write(app, {RUN_FOLDER_KEY: str(attempt.path), NUM_NODES_KEY: flower.num_nodes})
    start, told = _ServerAppStart(flower), None
    log, num_read, asked_s, pid = flwr.submit(app), 0, 0.0, None
    try:
        while True:
            flower.poll()
            cause = flower.superlink_exit()
            died_s = start.died_s() if pid is None else None
            # Read after `died_s`: a process that ended may have written its process id before.
            pid = pid or (attempt.read(SERVER) or {}).get("pid")
            if cause is None and pid is not None and not is_running(pid):
                cause = "the ServerApp's process died"
            if cause is None and log.ended() and time.monotonic() - asked_s >= _ASK_S:
                cause, asked_s = _verdict(log, flwr, begun=pid is not None), time.monotonic()
            if (
                cause is None
                and pid is None
                and died_s is not None
                and time.monotonic() - died_s >= _FAILURE_NOTICE_S
            ):
                cause = "the ServerApp's process died while it started"
            # The outcome is read first: a process that died may have written progress, then an outcome.
            has_outcome = attempt.read(OUTCOME) is not None
            for entry in attempt.read_progress(num_read):
                num_read += 1
                history.add_round(entry)
            if (status := attempt.read(STATUS)) is not None and status != told:
                told = status
                history.on_status(status)
            list(log.new_lines())
            if has_outcome:
                return None, log.run_id
            if cause is not None:
                if pid is not None and is_running(pid):
                    # The process hangs, or has not noticed that its SuperLink ended.
                    os.kill(pid, signal.SIGKILL)
                return cause, log.run_id
            time.sleep(_POLL_S)
    finally:
        log.close()


class _ServerAppStart:
    """Observes the ServerApp's process from its start until it writes its process id.

    Flower notices the death of such a process after a minute, and then ends the run or starts another process.
    """

    def __init__(self, flower: LocalFlower) -> None:
        self._flower = flower
        # The processes of earlier attempts.
        self._earlier = flower.server_apps()
        self._seen = False
        self._died_s: float | None = None

    def died_s(self) -> float | None:
        """Return the time at which the last observed process ended; None if one still runs or none was seen."""
        if self._flower.server_apps() - self._earlier:
            self._seen, self._died_s = True, None
        elif self._seen and self._died_s is None:
            self._died_s = time.monotonic()
        return self._died_s


def _verdict(log: RunLog, flwr: FlwrClient, *, begun: bool) -> str | None:
    """Return why a run whose log has ended is over, or None if Flower reports that it still runs."""
    list(log.new_lines())
    status = None if log.run_id is None else flwr.status(log.run_id)
    if status is not None and not status.startswith("finished"):
        return None
    if not begun:
        # The next attempt would fail in the same way.
        what = (
            "Flower did not start the run"
            if log.run_id is None
            else "the ServerApp failed as it started"
        )
        raise TrainingFailed(f"engine {ENGINE}: {what}; the end of its log: {tail(log.path)}")
    return f"Flower ended the run ({status or 'it does not answer'})"
