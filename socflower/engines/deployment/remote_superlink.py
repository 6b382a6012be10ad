"""Engine `deployment` on a remote SuperLink: submit the app, and read progress and outcome from the run's log.

A run with checkpoints is submitted twice: one submission trains, and the other has loaded everything and takes over
when the first one dies, since the kernel then releases the lock of the checkpoints (`scenario/app/remote_main.py`). So
another submission does no harm, and there is one more as soon as one gives no sign of life.
"""

import json
import math
import time
import tomllib
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from socflower.engines.app_files import (
    CHECKPOINT_FOLDER_KEY,
    FRESH_KEY,
    NUM_NODES_KEY,
    SEND_MODEL_KEY,
    SERIES_KEY,
)
from socflower.engines.deployment.attempts import OnNotice, RunHistory, lost_nodes
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
from socflower.engines.deployment.outcome_lines import (
    ALIVE,
    READY,
    SCENARIO,
    LineReader,
    ReceivedFile,
)
from socflower.engines.deployment.submitted_run import FlwrClient, RunLog
from socflower.engines.deployment.superlink import CONNECTION, ENGINE
from socflower.engines.run_folder import RunFolder
from socflower.errors import ConfigError, TrainingFailed
from socflower.wire.saved_state import write_atomically

_POLL_S = 0.2
# The pause before a SuperLink that did not answer is queried again.
_ASK_S = 1.0
# How long it may fail to answer, for example while it restarts.
_SILENCE_S = 180.0
# A ServerApp without a sign of life for so long may be dead, and for twice as long after each false alarm: on a busy
# machine another submission makes it worse. Flower tells after four minutes.
_QUIET_S = 5.0
_LONGEST_QUIET_S = 60.0
# Flower itself starts a process again that has not come so far within 30 s. Later ones have a multiple of the time that
# the first one took.
_START_S = 40.0
_LEAST_START_S = 10.0
_LONGEST_S = 300.0
_START_FACTOR = 4.0
_MOST_SUBMISSIONS = 3
# One that trains hangs if it is silent for so long, and another one still does not get its lock: it cannot kill the
# holder, which it does after 15 s otherwise.
_HANGS_S = 30.0


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
    run_config: dict[str, Any] = {
        NUM_NODES_KEY: len(app.node_configs),
        FRESH_KEY: deployment.fresh,
        CHECKPOINT_FOLDER_KEY: deployment.checkpoint_folder,
        SEND_MODEL_KEY: wants_model,
    }
    with own_processes(folder) as mark:
        flwr = FlwrClient(marked(environment, mark, "command"), connection, folder)
        while True:
            run_config[SERIES_KEY] = uuid.uuid4().hex
            bundle = folder / f"app-{len(history.restarts) + 1}"
            app.bundle_files.write(bundle, run_config)
            model = ReceivedFile(run_folder.model) if wants_model else None
            series = _Series(bundle, flwr, history, on_notice, model, deployment)
            failure = series.follow()
            if failure is None:
                break
            if deployment.run_id is not None:
                raise TrainingFailed(
                    f"run {deployment.run_id}: {failure}, without a result; a run with checkpoints has two ids, of "
                    "which the other one may have it"
                )
            if not deployment.checkpoint_folder:
                raise TrainingFailed(
                    f"engine {ENGINE}: {failure}; with --checkpoint-folder the run would be resumed"
                )
            history.record_restart(None, failure, deployment.restarts, on_notice)
            run_config[FRESH_KEY] = False
    outcome, trace = series.documents["outcome"], series.documents.get("trace")
    if model is not None and "error" not in outcome and not model.is_whole:
        if deployment.run_id is not None:
            raise ConfigError(
                f"run {deployment.run_id}: its log has no model: it was submitted without --save-model; leave that out"
            )
        raise TrainingFailed(
            f"engine {ENGINE}: the run has ended well, but parts of its model are missing in its log; "
            "run it again, or leave out --save-model"
        )
    if trace is None:
        return outcome, None
    path = folder / "far-trace.json"
    write_atomically(path, json.dumps(trace))
    return outcome, path


class _Submission:
    """One submission of the app: its log, and the signs of life of its ServerApp."""

    def __init__(self, log: RunLog) -> None:
        self.log = log
        self.run_id: int | None = None
        # Flower's, as it was after the log's end.
        self.status: str | None = None
        self._reader = LineReader()
        self._submitted_s = time.monotonic()
        # The seconds until its first sign of life; None before.
        self.started_after_s: float | None = None
        # Whether it was silent for too long, and has not been heard of since.
        self.is_suspected = False
        # The newest sign of life, before the first one the beginning.
        self._alive_s = time.monotonic()
        # When it began to wait for the lock of the checkpoints, or got it.
        self.is_ready_since_s: float | None = None
        # False while a log that was opened again has not had a line: `flwr` may still wait for the SuperLink.
        self.is_connected = True

    def silence_s(self) -> float:
        """Return the seconds since the newest sign of life, or since the beginning."""
        return time.monotonic() - self._alive_s

    def suspect(self) -> None:
        """Take it for dead until its next sign of life: the SuperLink was away, which may have ended the ServerApp."""
        self._alive_s = -math.inf

    def follow_again(self, log: RunLog) -> None:
        """Read the log from its beginning again."""
        self.log.close()
        self.log, self.is_connected = log, False

    def documents(self) -> Iterator[tuple[str, Any]]:
        """Yield kind and document of what was logged since the last call, without signs of life."""
        for line in self.log.new_lines():
            if not self.is_connected and self._alive_s > -math.inf:
                # What was written meanwhile is yet to come.
                self._alive_s = time.monotonic()
            self.is_connected = True
            for kind, document in self._reader.feed(line):
                self._alive_s = time.monotonic()
                if self.started_after_s is None:
                    self.started_after_s = self._alive_s - self._submitted_s
                if kind == READY:
                    self.is_ready_since_s = self._alive_s
                elif kind != ALIVE:
                    yield kind, document
        self.run_id = self.run_id or self.log.run_id


class _Series:
    """The submissions of one app; their logs are followed to the outcome."""

    def __init__(
        self,
        app: Path,
        flwr: FlwrClient,
        history: RunHistory,
        on_notice: OnNotice,
        model: ReceivedFile | None,
        deployment: DeploymentOptions,
    ) -> None:
        self.documents: dict[str, Any] = {}
        self._app, self._flwr, self._history, self._on_notice = app, flwr, history, on_notice
        self._model, self._deployment = model, deployment
        self._submissions: list[_Submission] = []
        # The one that trains, or did so last.
        self._leader: _Submission | None = None
        self._cause = "the ServerApp died"
        self._start_s, self._quiet_s = _START_S, _QUIET_S
        # Submissions that did not start in time: the next ones have twice as long for each.
        self._num_missed = 0
        self._answered_s = time.monotonic()
        # The SuperLink does not answer.
        self._is_away = False
        # Whether it has taken this run before: if it does not now, it is away.
        self._was_taken = bool(history.restarts)
        self._refused_since_s: float | None = None

    def follow(self) -> str | None:
        """Read the logs until `documents` has the outcome, and return None; else return why there is none."""
        if self._deployment.run_id is None:
            self._submit()
        else:
            submission = _Submission(self._flwr.log_again(self._deployment.run_id))
            submission.run_id = self._deployment.run_id
            self._submissions.append(submission)
        try:
            while True:
                ended = [each for each in self._submissions if each.log.ended()]
                self._read_logs()
                if "outcome" in self.documents:
                    lost = lost_nodes(self.documents["outcome"])
                    if lost is not None and self._deployment.checkpoint_folder:
                        return lost
                    if "error" not in self.documents["outcome"]:
                        # The others end by themselves.
                        for each in self._submissions:
                            each.log.close()
                        self._submissions.clear()
                    return None
                for each in ended:
                    if each in self._submissions and not self._is_away:
                        self._on_log_end(each)
                self._is_away = self._is_away and self._await_superlink()
                if not self._submissions:
                    return self._cause
                if any(each.is_connected and each not in ended for each in self._submissions):
                    self._answered_s = time.monotonic()
                may_stand_by = self._deployment.checkpoint_folder and not self._is_away
                if may_stand_by and (failure := self._stand_by()):
                    return failure
                time.sleep(_POLL_S)
        finally:
            self._end()

    def _read_logs(self) -> None:
        for each in [*self._submissions]:
            # Another one that took over may have replaced it.
            if each not in self._submissions:
                continue
            for kind, document in each.documents():
                self._take(each, kind, document)
            if each.run_id is not None:
                self._was_taken, self._refused_since_s = True, None

    def _submit(self) -> None:
        self._submissions.append(_Submission(self._flwr.submit(self._app)))

    def _end(self) -> None:
        """Stop what still runs, the submission that trains last, so that no other one takes over."""
        for each in sorted(self._submissions, key=lambda each: each is self._leader):
            self._drop(each)

    def _drop(self, submission: _Submission) -> None:
        """Stop a submission, and follow it no longer."""
        self._submissions.remove(submission)
        submission.log.close()
        # A run that is only read goes on.
        if submission.run_id not in (None, self._deployment.run_id):
            self._flwr.stop(submission.run_id)

    def _stand_by(self) -> str | None:
        """Submit the app again unless enough submissions live; return why the one that trains has to be replaced."""
        alive = [each for each in self._submissions if self._is_alive(each)]
        others = [each for each in alive if each is not self._leader]
        is_missing = not alive or (self._leader is not None and not others)
        if is_missing and len(self._submissions) < _MOST_SUBMISSIONS:
            self._num_missed += any(each.started_after_s is None for each in self._submissions)
            self._submit()
        if self._leader in alive and len(others) > 1:
            # After a false alarm, or a SuperLink's restart that the ServerApps have survived.
            self._drop(others[-1])
        leader = self._leader
        waited_s = max(
            (
                time.monotonic() - each.is_ready_since_s
                for each in others
                if each.is_ready_since_s is not None
            ),
            default=0.0,
        )
        hangs_s = max(_HANGS_S, 3.0 * self._quiet_s)
        if (
            leader in self._submissions
            and leader is not None
            and leader.is_connected
            and min(leader.silence_s(), waited_s) > hangs_s
        ):
            return f"the ServerApp has given no sign of life for {hangs_s:g} s"
        return None

    def _is_alive(self, submission: _Submission) -> bool:
        """Return whether a submission is not taken for dead; learn from how long it took, and from false alarms."""
        took_s = submission.started_after_s
        if took_s is None:
            return submission.silence_s() < min(self._start_s * 2.0**self._num_missed, _LONGEST_S)
        self._start_s = max(_LEAST_START_S, _START_FACTOR * took_s)
        if not submission.is_connected:
            return True
        is_alive = submission.silence_s() < self._quiet_s
        if is_alive and submission.is_suspected:
            self._quiet_s = min(2.0 * self._quiet_s, _LONGEST_QUIET_S)
        submission.is_suspected = not is_alive
        return is_alive

    def _take(self, submission: _Submission, kind: str, document: Any) -> None:
        if kind == "progress":
            self._history.add_round(document)
        elif kind == "resumed":
            self._on_begin(submission, int(document["after_round"]))
        elif kind == "status":
            self._history.on_status(document)
        elif kind == "model" and self._model is not None:
            self._model.add(document)
        else:
            self.documents[kind] = document

    def _on_begin(self, submission: _Submission, after_round: int) -> None:
        """Record which submission trains from now on; it has the lock of the checkpoints, so the others do not."""
        before, self._leader = self._leader, submission
        if before is None:
            self._history.record_resume(after_round)
            return
        restarts = self._deployment.restarts
        self._history.record_restart(after_round, self._cause, restarts, self._on_notice)
        self._cause = "the ServerApp died"
        if before in self._submissions:
            # Otherwise the nodes would still receive its messages.
            self._drop(before)

    def _on_log_end(self, submission: _Submission) -> None:
        """Drop a submission whose run has ended without an outcome; if it may still run, open its log again."""
        run_id = submission.run_id
        if run_id is None:
            if not self._was_taken:
                # Nothing was trained; the usual cause is a wrong address or name.
                raise ConfigError(
                    f"engine {ENGINE}: Flower did not start the run; the end of its log: "
                    f"{tail(submission.log.path)}"
                )
            self._drop(submission)
            if not self._submissions:
                self._submit_later(submission)
            return
        if submission.status is not None and submission.status.startswith("finished"):
            # The whole log was read after this status was received.
            self._on_run_end(submission, submission.status)
            return
        submission.status = self._flwr.status(run_id)
        self._is_away = submission.status is None
        if not self._is_away:
            self._answered_s = time.monotonic()
            submission.follow_again(self._flwr.log_again(run_id))

    def _submit_later(self, refused: _Submission) -> None:
        """Submit again after a pause; raise `TrainingFailed` if the SuperLink has taken no run for `_SILENCE_S`."""
        now_s = time.monotonic()
        self._refused_since_s = self._refused_since_s or now_s
        if now_s - self._refused_since_s > _SILENCE_S:
            raise TrainingFailed(
                f"engine {ENGINE}: the SuperLink has taken no run for {_SILENCE_S:g} s; the end of its log: "
                f"{tail(refused.log.path)}"
            )
        self._on_notice("the SuperLink takes no run; trying again")
        time.sleep(_ASK_S)
        self._submit()

    def _on_run_end(self, submission: _Submission, status: str) -> None:
        submission.run_id = None
        self._drop(submission)
        if submission is self._leader or not self._submissions:
            self._cause = f"Flower ended the run ({status})"
        if submission is self._leader and status == "finished:stopped":
            raise TrainingFailed(f"engine {ENGINE}: somebody stopped the run on the SuperLink")

    def _await_superlink(self) -> bool:
        """Return whether a SuperLink that did not answer still does not; it may do so for three minutes."""
        run_id = next(each.run_id for each in self._submissions if each.run_id is not None)
        if time.monotonic() - self._answered_s > _SILENCE_S:
            raise TrainingFailed(
                f"engine {ENGINE}: the SuperLink has not answered for {_SILENCE_S:g} s; run {run_id} may "
                f"still be running there, flwr stop {run_id} ends it"
            )
        self._on_notice("the SuperLink does not answer; trying again")
        time.sleep(_ASK_S)
        if self._flwr.status(run_id) is None:
            return True
        for each in self._submissions:
            each.suspect()
        return False


def scenario_of_run(deployment: DeploymentOptions, folder: Path) -> dict[str, Any]:
    """Return the document of the scenario of `deployment.run_id`, from the beginning of its log.

    Raises `ConfigError` if there is none.
    """
    environment, connection = connection_to(deployment, folder)
    require_command("flwr", environment, ENGINE)
    assert deployment.run_id is not None
    with own_processes() as mark:
        flwr = FlwrClient(marked(environment, mark, "command"), connection, folder)
        log, reader = flwr.log_again(deployment.run_id), LineReader()
        try:
            while True:
                ended = log.ended()
                for line in log.new_lines():
                    for kind, document in reader.feed(line):
                        if kind == SCENARIO:
                            return dict(document)
                if ended:
                    raise ConfigError(
                        f"run {deployment.run_id}: its log has no scenario; name a run of `socflower run --superlink`; "
                        f"the end of the log: {tail(log.path)}"
                    )
                time.sleep(_POLL_S)
        finally:
            log.close()


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
