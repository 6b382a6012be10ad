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
from socflower.engines.deployment.outcome_lines import LineReader, ReceivedFile
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


def run_on_remote_superlink(
    app: DeployedApp,
    run_folder: RunFolder,
    history: RunHistory,
    deployment: DeploymentOptions,
    on_notice: OnNotice,
    *,
    wants_model: bool = False,
) -> tuple[dict[str, Any], Path | None]:
    """Return the outcome, and the trace if it was sent; after a failure submit again where checkpoints allow it.

    With `wants_model` the trained model is sent too, into `run_folder.model`.
    """
    folder = run_folder.path
    environment, connection = connection_to(deployment, folder)
    require_command("flwr", environment, ENGINE)
    fresh = deployment.fresh
    with own_processes(folder) as mark:
        flwr = FlwrClient(marked(environment, mark, "command"), connection, folder)
        while True:
            bundle = folder / f"app-{len(history.restarts) + 1}"
            app.bundle_files.write(
                bundle,
                {
                    NUM_NODES_KEY: len(app.node_configs),
                    FRESH_KEY: fresh,
                    CHECKPOINT_FOLDER_KEY: deployment.checkpoint_folder,
                    SEND_MODEL_KEY: wants_model,
                },
            )
            model = ReceivedFile(run_folder.model) if wants_model else None
            documents = _attempt_remotely(bundle, flwr, history, on_notice, model)
            if isinstance(documents, str):
                if not deployment.checkpoint_folder:
                    raise TrainingFailed(
                        f"engine {ENGINE}: {documents}; with --checkpoint-folder the run would be "
                        "resumed"
                    )
                history.record_restart(None, documents, deployment.restarts, on_notice)
                fresh = False
                continue
            if model is not None and "error" not in documents["outcome"] and not model.is_whole:
                raise TrainingFailed(
                    f"engine {ENGINE}: the run has ended well, but parts of its model are missing in "
                    "its log; run it again, or leave out --save-model"
                )
            trace = None
            if "trace" in documents:
                trace = folder / "far-trace.json"
                write_atomically(trace, json.dumps(documents["trace"]))
            return documents["outcome"], trace


def _attempt_remotely(
    app: Path,
    flwr: FlwrClient,
    history: RunHistory,
    on_notice: OnNotice,
    model: ReceivedFile | None = None,
) -> dict[str, Any] | str:
    """Submit and follow; return the received documents, outcome included, or why there will be no outcome."""
    reader, documents = LineReader(), dict[str, Any]()
    log, run_id, answered_s, status = flwr.submit(app), None, time.monotonic(), None
    # Whether the log is a stream from the SuperLink: one that was opened again begins with lines
    # that are known.
    is_connected = True
    try:
        while True:
            ended = log.ended()
            for line in log.new_lines():
                is_connected = True
                for kind, document in reader.feed(line):
                    if kind == "progress":
                        history.add_round(document)
                    elif kind == "resumed":
                        history.record_resume(int(document["after_round"]))
                    elif kind == "model" and model is not None:
                        model.add(document)
                    else:
                        documents[kind] = document
            run_id = run_id or log.run_id
            if "outcome" in documents:
                # There is nothing to stop.
                run_id = None
                return documents
            if not ended:
                if is_connected:
                    answered_s = time.monotonic()
                time.sleep(_POLL_S)
                continue
            if run_id is None:
                # Nothing was trained; the usual cause is a wrong address or name.
                raise ConfigError(
                    f"engine {ENGINE}: Flower did not start the run; the end of its log: "
                    f"{tail(log.path)}"
                )
            if status is not None and status.startswith("finished"):
                # The whole log was read after this status was received.
                run_id = None
                return f"Flower ended the run ({status})"
            status = flwr.status(run_id)
            if status is not None:
                answered_s = time.monotonic()
            elif time.monotonic() - answered_s > _SILENCE_S:
                raise TrainingFailed(
                    f"engine {ENGINE}: the SuperLink has not answered for {_SILENCE_S:g} s; run "
                    f"{run_id} may still be running there, flwr stop {run_id} ends it"
                )
            else:
                on_notice("the SuperLink does not answer; trying again")
                time.sleep(_ASK_S)
            log.close()
            log, is_connected = flwr.log_again(run_id), False
    finally:
        log.close()
        if run_id is not None:
            flwr.stop(run_id)


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
