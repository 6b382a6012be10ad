"""Engine `deployment` on a remote SuperLink: submit the app, and read progress and outcome from the run's log."""

import json
import time
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from socflower.engines.app_files import (
    CHECKPOINT_FOLDER_KEY,
    FRESH_KEY,
    NUM_NODES_KEY,
    SEND_MODEL_KEY,
)
from socflower.engines.deployment.attempts import OnNotice, RunHistory
from socflower.engines.deployment.flower_processes import (
    flower_environment,
    marked,
    own_processes,
    require_command,
    tail,
    users_environment,
    write_connection,
)
from socflower.engines.deployment.options import DeployedApp, DeploymentOptions
from socflower.engines.deployment.outcome_lines import ALIVE, LineReader, ReceivedFile
from socflower.engines.deployment.submitted_run import FlwrClient
from socflower.engines.deployment.superlink import CONNECTION, ENGINE
from socflower.engines.run_folder import RunFolder
from socflower.errors import ConfigError, TrainingFailed
from socflower.wire.saved_state import write_atomically

_POLL_S = 0.2
# The pause before a SuperLink that did not answer is queried again.
_ASK_S = 5.0
# How long it may fail to answer, for example while it restarts.
_SILENCE_S = 180.0
# A ServerApp that has reported `ALIVE` and does not for so long is dead or hangs. Flower tells after four minutes.
_DEAD_S = 15.0


def run_on_remote_superlink(
    app: DeployedApp,
    run_folder: RunFolder,
    history: RunHistory,
    deployment: DeploymentOptions,
    on_notice: OnNotice,
    *,
    wants_model: bool = False,
) -> tuple[dict[str, Any], Path | None]:
    """Return the outcome, and the trace if it was sent; after a failure submit again if there are checkpoints.

    With `wants_model` the trained model is sent too, into `run_folder.model`.
    """
    folder = run_folder.path
    environment, connection = connection_to(deployment, folder)
    require_command("flwr", environment, ENGINE)
    run_config = {
        NUM_NODES_KEY: len(app.node_configs),
        FRESH_KEY: deployment.fresh,
        CHECKPOINT_FOLDER_KEY: deployment.checkpoint_folder,
        SEND_MODEL_KEY: wants_model,
    }
    with own_processes(folder) as mark:
        flwr = FlwrClient(marked(environment, mark, "command"), connection, folder)
        while True:
            bundle = folder / f"app-{len(history.restarts) + 1}"
            app.bundle_files.write(bundle, run_config)
            model = ReceivedFile(run_folder.model) if wants_model else None
            may_resume = bool(deployment.checkpoint_folder)
            attempt = _Attempt(bundle, flwr, history, on_notice, model, may_resume=may_resume)
            failure = attempt.follow()
            if failure is None:
                break
            if not deployment.checkpoint_folder:
                raise TrainingFailed(
                    f"engine {ENGINE}: {failure}; with --checkpoint-folder the run would be resumed"
                )
            history.record_restart(None, failure, deployment.restarts, on_notice)
            run_config[FRESH_KEY] = False
    outcome, trace = attempt.documents["outcome"], attempt.documents.get("trace")
    if model is not None and "error" not in outcome and not model.is_whole:
        raise TrainingFailed(
            f"engine {ENGINE}: the run has ended well, but parts of its model are missing in its log; "
            "run it again, or leave out --save-model"
        )
    if trace is None:
        return outcome, None
    path = folder / "far-trace.json"
    write_atomically(path, json.dumps(trace))
    return outcome, path


class _Attempt:
    """One submission of the app; its log is followed to the outcome."""

    def __init__(
        self,
        app: Path,
        flwr: FlwrClient,
        history: RunHistory,
        on_notice: OnNotice,
        model: ReceivedFile | None,
        *,
        may_resume: bool = False,
    ) -> None:
        self.documents: dict[str, Any] = {}
        self._flwr, self._history, self._on_notice, self._model = flwr, history, on_notice, model
        self._reader = LineReader()
        self._log = flwr.submit(app)
        self._run_id: int | None = None
        self._status: str | None = None
        self._answered_s = time.monotonic()
        # Without checkpoints a training that may have died is worth waiting for.
        self._may_resume = may_resume
        # The time of the newest sign of life of the ServerApp, or of the connection to its log; None before the first.
        self._alive_s: float | None = None
        # False while a log that was opened again has not had a line: `flwr` may still wait for the
        # SuperLink.
        self._is_connected = True

    def follow(self) -> str | None:
        """Read the log until `documents` has the outcome, and return None; else return why there is none."""
        try:
            while True:
                ended = self._log.ended()
                self._read_lines()
                self._run_id = self._run_id or self._log.run_id
                if "outcome" in self.documents:
                    # The run has ended, so it need not be stopped.
                    self._run_id = None
                    return None
                if ended:
                    failure = self._on_log_end()
                    if failure is not None:
                        return failure
                    continue
                if self._is_connected:
                    self._answered_s = time.monotonic()
                    if self._may_resume and self._is_silent:
                        return f"the ServerApp has given no sign of life for {_DEAD_S:g} s"
                time.sleep(_POLL_S)
        finally:
            self._log.close()
            if self._run_id is not None:
                self._flwr.stop(self._run_id)

    @property
    def _is_silent(self) -> bool:
        return self._alive_s is not None and time.monotonic() - self._alive_s > _DEAD_S

    def _read_lines(self) -> None:
        for line in self._log.new_lines():
            if not self._is_connected and self._alive_s is not None:
                # What was written meanwhile is yet to come.
                self._alive_s = time.monotonic()
            self._is_connected = True
            for kind, document in self._reader.feed(line):
                if self._alive_s is not None or kind == ALIVE:
                    self._alive_s = time.monotonic()
                if kind == "progress":
                    self._history.add_round(document)
                elif kind == "resumed":
                    self._history.record_resume(int(document["after_round"]))
                elif kind == "status":
                    self._history.on_status(document)
                elif kind == "model" and self._model is not None:
                    self._model.add(document)
                elif kind != ALIVE:
                    self.documents[kind] = document

    def _on_log_end(self) -> str | None:
        """Return why the run ended without an outcome; if it may still run, open its log again and return None."""
        run_id = self._run_id
        if run_id is None:
            # Nothing was trained; the usual cause is a wrong address or name.
            raise ConfigError(
                f"engine {ENGINE}: Flower did not start the run; the end of its log: "
                f"{tail(self._log.path)}"
            )
        if self._status is not None and self._status.startswith("finished"):
            # The whole log was read after this status was received.
            self._run_id = None
            return f"Flower ended the run ({self._status})"
        self._status = self._flwr.status(run_id)
        if self._status is not None:
            self._answered_s = time.monotonic()
        elif time.monotonic() - self._answered_s > _SILENCE_S:
            raise TrainingFailed(
                f"engine {ENGINE}: the SuperLink has not answered for {_SILENCE_S:g} s; run {run_id} may "
                f"still be running there, flwr stop {run_id} ends it"
            )
        else:
            self._on_notice("the SuperLink does not answer; trying again")
            time.sleep(_ASK_S)
        self._log.close()
        self._log, self._is_connected = self._flwr.log_again(run_id), False
        return None


def connection_to(deployment: DeploymentOptions, folder: Path) -> tuple[Mapping[str, str], str]:
    """Return the environment of `flwr` and the SuperLink's name in its configuration."""
    if deployment.is_address:
        environment = flower_environment(folder)
        write_connection(
            Path(environment["FLWR_HOME"]),
            CONNECTION,
            deployment.superlink,
            root_certificates=deployment.superlink_ca,
        )
        return environment, CONNECTION
    environment = users_environment()
    config = Path(environment.get("FLWR_HOME") or Path.home() / ".flwr") / "config.toml"
    try:
        table = tomllib.loads(config.read_text("utf-8")).get("superlink", {})
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"--superlink {deployment.superlink}: cannot read {config} ({error}); give HOST:PORT, or add "
            f"[superlink.{deployment.superlink}] there"
        ) from None
    known = [name for name, value in table.items() if isinstance(value, dict)]
    if deployment.superlink not in known:
        raise ConfigError(
            f"--superlink {deployment.superlink}: {config} has no [superlink.{deployment.superlink}], "
            f"only {', '.join(known) or 'none'}; give one of these or HOST:PORT"
        )
    return environment, deployment.superlink
