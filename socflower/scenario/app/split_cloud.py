"""The cloud as a process: its program, its token, and its service until a signal ends it."""

import json
import signal
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from rich.table import Table

from socflower.clients.split.cloud_sessions import session_factory
from socflower.edgecloud.cloud.cloud_service import CloudService
from socflower.edgecloud.cloud.operator_calls import CloudOperator, session_status
from socflower.edgecloud.cloud.session import SessionFactory
from socflower.edgecloud.split_program import SplitProgram
from socflower.edgecloud.stream.credentials import Token, TokenFile, new_token, read_token
from socflower.engines.names import MAX_WORKERS, require_count
from socflower.errors import ConfigError
from socflower.model_graph.torch_device import resolve_device
from socflower.quantities import human_bytes
from socflower.scenario.app.split_client import split_settings
from socflower.scenario.prepared_run import require_given_codec
from socflower.scenario.schema.file import apply_override, from_document, load_scenario
from socflower.scenario.schema.scenario_file import Scenario
from socflower.scenario.split_setting import SplitSetting
from socflower.training.hang_watch import end_process, watch_hangs
from socflower.user_code import import_attribute
from socflower.wire.saved_state import write_atomically
from socflower.wire.secure_channel import Tls
from socflower.wire.status_port import Metric, PortState, StatusPort, label, metric

_LONGEST_WAIT_S = 0.5


def serve_until_signal(
    program: str,
    overrides: Sequence[str],
    *,
    listen: str,
    token: Token,
    tls: Tls | None,
    insecure: bool,
    folder: Path | None,
    num_threads: int,
    metrics: str,
    on_ready: Callable[[str], None],
    on_notice: Callable[[str], None],
) -> None:
    """Serve a program's runs until SIGINT or SIGTERM; `on_ready` gets the address, `on_notice` a line per failure.

    `metrics` is the address of the port of `--metrics`; empty: none.
    """
    if metrics:
        StatusPort.check(metrics)
    factory = _factory(program, overrides)
    require_count("--threads", num_threads, 0, MAX_WORKERS)
    if num_threads:
        torch.set_num_threads(num_threads)
    # Restarted, the cloud continues from checkpoints; edges would wait for a half that hangs.
    watch_hangs(end_process)
    ended, ends = threading.Event(), ExitStack()
    before = {
        number: signal.signal(number, lambda *_: ended.set())
        for number in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        service = CloudService(
            listen,
            factory,
            operator_token=token,
            tls=tls,
            insecure=insecure,
            folder=folder,
            log=on_notice,
        )
        try:
            if metrics:
                port = ends.enter_context(StatusPort(metrics, lambda: _port_state(service)))
                on_notice(f"metrics at http://{port.address}/metrics")
            on_ready(service.address)
            # The kernel may give a signal to a thread of gRPC. That does not interrupt a wait without a limit in this
            # one, and Python calls handlers in the main thread alone.
            while not ended.wait(_LONGEST_WAIT_S):
                pass
        finally:
            ends.close()
            service.close()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _port_state(service: CloudService) -> PortState:
    """Return what the port of `--metrics` answers for a cloud."""
    sessions = service.status()

    def by_run(key: str) -> dict[str, float | None]:
        return {label("run", session["run_id"]): session[key] for session in sessions}

    document = {
        "schema": 1,
        "kind": "cloud",
        "state": "serving",
        "waiting_for": ", ".join(
            f"{session['num_parties'] - len(session['waiting'])} edges of {session['run_id']}"
            for session in sessions
            if session["waiting"]
        )
        or "nothing",
        "sessions": sessions,
    }
    names = (
        ("cloud_batches_total", "Batches that the cloud's half has trained.", "num_batches_done"),
        ("cloud_received_bytes_total", "Bytes from edges.", "received_bytes"),
        ("cloud_sent_bytes_total", "Bytes to edges.", "sent_bytes"),
        ("cloud_edges", "Edges of the session.", "num_parties"),
    )
    return PortState(
        document=document,
        metrics=[
            metric("cloud_sessions", "Sessions that are open.", len(sessions)),
            *(Metric(name=name, help=help, values=by_run(key)) for name, help, key in names),
        ],
    )


def read_or_create_token(path: Path) -> tuple[TokenFile, bool]:
    """Return the token in a file, and whether the file was created now; only its owner may read a new file."""
    if path.exists():
        return TokenFile(path), False
    try:
        write_atomically(path, f"{new_token()}\n", mode=0o600)
    except OSError as error:
        raise ConfigError(
            f"--token-file {path}: cannot be made ({error.strerror}); name another place"
        ) from None
    return TokenFile(path), True


def cloud_status(
    address: str, token_file: Path, tls: Tls | None, *, insecure: bool
) -> list[dict[str, Any]]:
    """Return the status of a cloud's sessions."""
    return session_status(
        CloudOperator(address=address, token=read_token(token_file), tls=tls, insecure=insecure)
    )


def status_table(sessions: Sequence[Mapping[str, Any]]) -> Table | str:
    """Return a table of sessions with the main columns; `cloud_status` returns all of them."""
    if not sessions:
        return "no sessions are open"
    table = Table("run", "edges", "state", "received", "sent", "last error", header_style="bold")
    for session in sessions:
        table.add_row(
            session["run_id"],
            str(session["num_parties"]),
            _state(session),
            human_bytes(session["received_bytes"]),
            human_bytes(session["sent_bytes"]),
            session["error"],
        )
    return table


def _state(session: Mapping[str, Any]) -> str:
    if session["waiting"]:
        return f"{len(session['waiting'])} of {session['num_parties']} edges are here"
    if session["batch"] is not None:
        return f"before batch {session['batch']}"
    last = session["last_batch"]
    return "training" if last is None else f"training, batch {last} done"


def _factory(program: str, overrides: Sequence[str]) -> SessionFactory:
    if ":" in program and not Path(program).exists():
        if overrides:
            raise ConfigError(f"--set is for scenarios, and {program} is a program")
        imported = _import_program(program)
        resolve_device(imported.device, f"program {program}: device")
        return session_factory(imported)
    setting = SplitSetting(_scenario(Path(program), overrides))
    resolve_device(setting.workload.program.device, f"{program} [train] device")

    def data(party: int, num_parties: int) -> Any:
        known = setting.workload.cloud_samples(party)
        if known is None:
            raise ConfigError(f"{program}: this workload has nothing in the cloud but features")
        return known

    return session_factory(setting.workload.program, settings=split_settings(setting), data_fn=data)


def _scenario(path: Path, overrides: Sequence[str]) -> Scenario:
    if path.suffix != ".json":
        scenario = load_scenario(path, overrides)
    else:
        try:
            document = json.loads(path.read_text("utf-8"))
        except (OSError, ValueError) as error:
            raise ConfigError(f"scenario {path}: cannot be read ({error})") from None
        for override in overrides:
            apply_override(document, override)
        scenario = from_document(document)
    if not scenario.kind.uses_cloud:
        raise ConfigError(
            f"{path}: [strategy] name = {scenario.strategy.name!r} has no cloud; use one of the split "
            "strategies"
        )
    require_given_codec(scenario)
    return scenario


def _import_program(program: str) -> SplitProgram:
    # A command's sys.path has the folder of its script instead of the working directory.
    found = import_attribute(
        program, Path.cwd(), f"program {program}", "write module:name, importable from here"
    )
    found = found() if callable(found) and not isinstance(found, SplitProgram) else found
    if not isinstance(found, SplitProgram):
        raise ConfigError(
            f"program {program}: is a {type(found).__name__}, not a SplitProgram; make one with "
            "socflower.LayeredProgram"
        )
    return found
