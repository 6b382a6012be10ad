"""Flower's commands as child processes: their environment, their start, and the end of all their descendants.

Flower starts further processes, some in their own sessions, which outlive a SuperLink that is killed. Each process
that is started here therefore has a mark in its environment, which its children inherit, and all processes with the
mark are ended. A guard (`process_guard.py`) does the same if this process is killed.
"""

import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from socflower.engines.deployment.private_network import MACHINE_NETWORK, Network
from socflower.engines.deployment.process_guard import end_marked
from socflower.errors import ConfigError, TrainingFailed

START_TIMEOUT_S = 90.0
_END_TIMEOUT_S = 10.0
_EPHEMERAL_PORTS = Path("/proc/sys/net/ipv4/ip_local_port_range")
_RANDOM = random.SystemRandom()

Process = subprocess.Popen[bytes]


def flower_environment(folder: Path) -> dict[str, str]:
    """Return the environment in which Flower's commands use `folder` as their home, not the user's own."""
    return {**users_environment(), "FLWR_HOME": str(folder / "flwr-home")}


def users_environment() -> dict[str, str]:
    """Return the environment in which Flower's commands use the user's own Flower configuration."""
    return {
        **os.environ, "FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1",
        # Otherwise Flower creates an environment for each run and installs the app's dependencies into it.
        "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
        "PYTHONUNBUFFERED": "1",  # log lines appear as soon as they are written
        "PATH": os.pathsep.join([sysconfig.get_path("scripts"), os.environ.get("PATH", "")]),
    }


def require_command(name: str, environment: Mapping[str, str], engine: str) -> None:
    """Raise `ConfigError` if one of Flower's commands is not installed."""
    if shutil.which(name, path=environment["PATH"]) is None:
        raise ConfigError(f"engine {engine}: {name} is not on the PATH; pip install flwr beside socflower")


def start(
    command: Sequence[str], environment: Mapping[str, str], log: Path, folder: Path, *, append: bool = False,
) -> Process:
    """Start a process in its own session, so that Ctrl-C does not reach it; its output goes to `log`."""
    with log.open("ab" if append else "wb") as stream:
        return subprocess.Popen(command, env=dict(environment), cwd=folder, start_new_session=True,
                                stdin=subprocess.DEVNULL, stdout=stream, stderr=subprocess.STDOUT)


def end(process: Process) -> None:
    """End a process that `start` started, and its process group; return when it has ended."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGTERM)
    await_end(process)


def await_end(process: Process) -> None:
    """Wait for a process that was told to end; kill it after a timeout."""
    try:
        process.wait(timeout=_END_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


@contextmanager
def own_processes(folder: Path | None = None) -> Iterator[str]:
    """Yield a mark for the environment of processes; all processes with it end with the context or this process.

    If this process is killed, the guard also removes `folder`.
    """
    mark = uuid.uuid4().hex
    command = [sys.executable, "-m", "socflower.engines.deployment.process_guard", mark]
    guard = subprocess.Popen(command if folder is None else [*command, str(folder)], start_new_session=True,
                             stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    assert guard.stdin is not None
    try:
        yield mark
    finally:
        end_marked(mark)
        with suppress(OSError):
            guard.stdin.write(b"done")
            guard.stdin.close()
        await_end(guard)


def wait_until_healthy(
    port: int, process: Process, log: Path, engine: str, network: Network = MACHINE_NETWORK,
) -> None:
    """Wait until the SuperLink on a local port answers; `TrainingFailed` if it ended or takes too long."""
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise TrainingFailed(f"engine {engine}: the SuperLink ended at its start: {tail(log)}")
        if network.healthy(port):
            return
        time.sleep(0.2)
    raise TrainingFailed(f"engine {engine}: the SuperLink was not ready after {START_TIMEOUT_S:g} s: {tail(log)}")


def write_connection(home: Path, name: str, address: str, *, root_certificates: Path | None = None) -> None:
    """Add a SuperLink to Flower's configuration: with TLS if `root_certificates` is given, else in plain HTTP."""
    home.mkdir(exist_ok=True)
    # A JSON string is a valid TOML string.
    how = "insecure = true" if root_certificates is None else "root-certificates = " + json.dumps(
        str(root_certificates.resolve()), ensure_ascii=False)
    (home / "config.toml").write_text(f'[superlink]\ndefault = "{name}"\n\n[superlink.{name}]\n'
                                      f"address = {json.dumps(address)}\n{how}\n", "utf-8")


def free_ports(count: int) -> list[int]:
    """Return `count` distinct ports of this machine that were free at the time of the call.

    They lie below the ephemeral port range; otherwise another process's connection could take a port before its
    server has started.
    """
    with ExitStack() as stack:
        ports: list[int] = []
        candidates = _server_ports()
        for port in [*_RANDOM.sample(candidates, min(20 * count, len(candidates))), *[0] * count]:
            probe = stack.enter_context(socket.socket())
            with suppress(OSError):  # in use
                probe.bind(("127.0.0.1", port))
                ports.append(int(probe.getsockname()[1]))
                if len(ports) == count:
                    break
        return ports


def _server_ports() -> range:
    """Return the ports below the ephemeral port range."""
    try:
        first = int(_EPHEMERAL_PORTS.read_text().split()[0])
    except (OSError, ValueError, IndexError):
        first = 49152  # RFC 6335
    return range(10000, first) if first > 20000 else range(first, 60000)


def tail(log: Path, num_lines: int = 3) -> str:
    """Return the last lines of a log as one line."""
    lines = [line.strip() for line in log.read_text("utf-8", "replace").splitlines() if line.strip()]
    return " | ".join(lines[-num_lines:]) if lines else "(its log is empty)"
