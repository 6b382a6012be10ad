"""Engine `deployment`: an app on a SuperLink and SuperNodes, of this machine or of a rack somewhere.

Without a SuperLink's address the engine starts one, and a SuperNode for each SoC that takes part, and ends them. When
the ServerApp or the SuperLink dies, the run is submitted again, and goes on from its newest checkpoint.
"""

import os
import signal
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil

from socflower.engines.app_files import NUM_NODES_KEY, RUN_FOLDER_KEY, AppFiles
from socflower.engines.checkpoint import CheckpointFolder, Checkpointing
from socflower.engines.deployment.attempts import RunStory, Say
from socflower.engines.deployment.cloud_process import LocalCloud
from socflower.engines.deployment.far_superlink import run_far_away
from socflower.engines.deployment.flower_processes import tail
from socflower.engines.deployment.options import DeployedApp, DeploymentOptions
from socflower.engines.deployment.submitted_run import FlwrClient, RunLog
from socflower.engines.deployment.superlink import CONNECTION, ENGINE, LocalFlower, local_flower
from socflower.engines.run_folder import RunFolder
from socflower.errors import TrainingFailed

_POLL_S = 0.2
_ASK_S = 5.0  # between two questions to Flower, each of which starts a process
_LAST_WORDS_S = 5.0  # in which Flower ends a run whose ServerApp failed by itself; that one was killed it learns later


def run_in_deployment(app: DeployedApp, folder: RunFolder, deployment: DeploymentOptions, say: Say) -> None:
    """Run the app, whose run's folder is `folder`, and leave the outcome there.

    `say` gets a line about each thing that went wrong and was made good. Raises `ConfigError` for a SuperLink that is
    not known and `TrainingFailed` where no attempt came to an outcome.
    """
    story = RunStory(folder)
    if deployment.superlink:
        story.end(*run_far_away(app, folder.path, story, deployment, say))
    else:
        story.end(*_run_here(app, folder, story, deployment, say))


def _run_here(
    app: DeployedApp, folder: RunFolder, story: RunStory, deployment: DeploymentOptions, say: Say,
) -> tuple[dict[str, Any], Path]:
    checkpointing = folder.read_checkpointing() or Checkpointing(folder=folder.path / "checkpoint", engine=ENGINE)
    kept = CheckpointFolder(checkpointing.folder)
    kept.create()
    with local_flower(folder.path, app.node_configs, say, warm=deployment.warm) as flower:
        story.superlink_shared_because = flower.network.shared_because
        flwr = FlwrClient(flower.environment, CONNECTION, folder.path, flower.network)
        cloud = LocalCloud(folder.path, app.document, flower.environment, say, flower.network) if app.needs_cloud \
            else None
        while True:
            attempt = RunFolder(folder.path / f"attempt-{len(story.restarts) + 1}")
            attempt.path.mkdir()
            attempt.write_scenario(app.document)
            attempt.write_checkpointing(checkpointing)
            if cloud is not None:
                attempt.write_cloud(cloud.address)
            cause, run_id = _attempt_here(app.here, attempt, flower, cloud, flwr, story)
            outcome = attempt.read_outcome()
            if cause is None and outcome is not None:
                if attempt.model.exists():
                    attempt.model.replace(folder.model)
                return outcome, attempt.trace
            checkpoint = kept.newest(say)
            after = 0 if checkpoint is None else checkpoint.server_round
            story.restart(after, str(cause), deployment.restarts, say)
            flower.restart_superlink()
            if run_id is not None:
                # Else its messages would still be handed to the nodes.
                flwr.stop(run_id)
            kept.forget_after(after)
            checkpointing = replace(checkpointing, resume_after=None if checkpoint is None else after)


def _attempt_here(
    files: AppFiles, attempt: RunFolder, flower: LocalFlower, cloud: LocalCloud | None, flwr: FlwrClient,
    story: RunStory,
) -> tuple[str | None, int | None]:
    """Submit the run and follow it until there is an outcome; return why there will be none, and Flower's run id.

    After that the attempt's ServerApp runs no more, though its clients may.
    """
    app = attempt.path / "app"
    files.write(app, {RUN_FOLDER_KEY: str(attempt.path), NUM_NODES_KEY: len(flower.node_pids)})
    start = _ServerAppStart(flower)
    log, num_told, asked_s, pid = flwr.submit(app), 0, 0.0, None
    try:
        while True:
            flower.look_after_nodes()
            if cloud is not None:
                cloud.look_after()
            cause = flower.superlink_death()
            died_s = start.died_s() if pid is None else None
            # After that: whoever has ended may have told its process id before.
            pid = pid or attempt.read_server_process()
            if cause is None and pid is not None and not _is_running(pid):
                cause = "the ServerApp's process died"
            if cause is None and log.ended() and time.monotonic() - asked_s >= _ASK_S:
                cause, asked_s = _verdict(log, flwr, begun=pid is not None), time.monotonic()
            if cause is None and pid is None and died_s is not None and time.monotonic() - died_s >= _LAST_WORDS_S:
                cause = "the ServerApp's process died while it started"
            # In this order: whoever died may have left an outcome before, and progress before that.
            has_outcome = attempt.read_outcome() is not None
            for entry in attempt.read_progress(num_told):
                num_told += 1
                story.tell(entry)
            list(log.new_lines())
            if has_outcome:
                return None, log.run_id
            if cause is not None:
                if pid is not None and _is_running(pid):
                    os.kill(pid, signal.SIGKILL)  # it hangs, or does not know yet that its SuperLink is gone
                return cause, log.run_id
            time.sleep(_POLL_S)
    finally:
        log.close()


class _ServerAppStart:
    """The ServerApp's process from its start to the moment at which it tells its process id.

    Flower notices the death of such a process after a minute, and then ends the run, or starts another process.
    """

    def __init__(self, flower: LocalFlower) -> None:
        self._flower = flower
        self._of_others = flower.server_apps()  # of an earlier attempt
        self._seen = False
        self._died_s: float | None = None

    def died_s(self) -> float | None:
        """Return since when no process is left of those that were seen, None if there is one or none was seen."""
        if self._flower.server_apps() - self._of_others:
            self._seen, self._died_s = True, None
        elif self._seen and self._died_s is None:
            self._died_s = time.monotonic()
        return self._died_s


def _verdict(log: RunLog, flwr: FlwrClient, *, begun: bool) -> str | None:
    """Return why a run has ended whose log has, or None if Flower says that it goes on."""
    list(log.new_lines())
    status = None if log.run_id is None else flwr.status(log.run_id)
    if status is not None and not status.startswith("finished"):
        return None
    if not begun:
        # The next attempt would fare no better.
        what = "Flower did not start the run" if log.run_id is None else "the ServerApp failed as it started"
        raise TrainingFailed(f"engine {ENGINE}: {what}; Flower's last words: {tail(log.path)}")
    return f"Flower ended the run ({status or 'it does not answer'})"


def _is_running(pid: int) -> bool:
    """Return whether a process is there, and not only its exit status."""
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False
