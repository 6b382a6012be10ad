"""Processes of a run: their environment, start and readiness, and the end of all their descendants.

Flower starts further processes, some in their own sessions, which outlive a SuperLink that is killed. Each process
that is started here therefore has a mark in its environment, which its children inherit, and all processes with the
mark are ended. If this process is killed, a guard does the same:

    python -m socflower.engines.deployment.flower_processes MARK [FOLDER]

waits for the end of its standard input, which comes when its parent has ended for any reason. It then ends the marked
processes and removes their folder, unless its parent wrote something first: then the parent has done both.
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

import psutil

from socflower.engines.deployment.private_network import MACHINE_NETWORK, Network
from socflower.errors import ConfigError, TrainingFailed

MARK = "SOCFLOWER_RUN"
PART = "SOCFLOWER_PART"
"""Environment variables: the run that a process belongs to, and the part of it, such as its SuperLink."""

_START_TIMEOUT_S = 90.0
_MAX_KILLED_STARTS = 3
_END_TIMEOUT_S = 10.0
_SCANS = 5
_EPHEMERAL_PORTS = Path("/proc/sys/net/ipv4/ip_local_port_range")
_RANDOM = random.SystemRandom()

Process = subprocess.Popen[bytes]


# ----------------------------------------------------------------------------------------------------- environment
def flower_environment(folder: Path) -> dict[str, str]:
    """Return the environment in which Flower's commands use `folder` as their home, not the user's own."""
    return {**users_environment(), "FLWR_HOME": str(folder / "flwr-home")}


def users_environment() -> dict[str, str]:
    """Return the environment in which Flower's commands use the user's own Flower configuration."""
    return {
        **os.environ,
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
        # Otherwise Flower creates an environment for each run and installs the app's dependencies into it.
        "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
        # Log lines appear as soon as they are written.
        "PYTHONUNBUFFERED": "1",
        "PATH": os.pathsep.join([sysconfig.get_path("scripts"), os.environ.get("PATH", "")]),
    }


def require_command(name: str, environment: Mapping[str, str], engine: str) -> None:
    """Raise `ConfigError` if one of Flower's commands is not installed."""
    if shutil.which(name, path=environment["PATH"]) is None:
        raise ConfigError(
            f"engine {engine}: {name} is not on the PATH; pip install flwr beside socflower"
        )


def write_connection(
    home: Path, name: str, address: str, *, root_certificates: Path | None = None
) -> None:
    """Add a SuperLink to Flower's configuration: with TLS if `root_certificates` is given, else in plain HTTP."""
    home.mkdir(exist_ok=True)
    # A JSON string is a valid TOML string.
    how = (
        "insecure = true"
        if root_certificates is None
        else "root-certificates = "
        + json.dumps(str(root_certificates.resolve()), ensure_ascii=False)
    )
    (home / "config.toml").write_text(
        f'[superlink]\ndefault = "{name}"\n\n[superlink.{name}]\n'
        f"address = {json.dumps(address)}\n{how}\n",
        "utf-8",
    )


# ----------------------------------------------------------------------------------------------------- start and end
def start(
    command: Sequence[str], environment: Mapping[str, str], log: Path, folder: Path
) -> Process:
    """Start a process in its own session, so that Ctrl-C does not reach it; its output is added to `log`."""
    with log.open("ab") as stream:
        return subprocess.Popen(
            command,
            env=dict(environment),
            cwd=folder,
            start_new_session=True,
            stdin=subprocess.DEVNULL,
            stdout=stream,
            stderr=subprocess.STDOUT,
        )


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


def exit_cause(code: int) -> str:
    """Return how a process ended, from its exit code, in words."""
    return f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit status {code}"


def is_running(pid: int) -> bool:
    """Return whether a process runs; a zombie does not."""
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def tail(log: Path, num_lines: int = 3) -> str:
    """Return the last lines of a log as one line."""
    lines = [
        line.strip() for line in log.read_text("utf-8", "replace").splitlines() if line.strip()
    ]
    return " | ".join(lines[-num_lines:]) if lines else "(its log is empty)"


class ListeningProcess:
    """A process that listens at a port of 127.0.0.1; after its end it can be started again at the same port."""

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        port: int,
        environment: Mapping[str, str],
        log: Path,
        *,
        engine: str,
        network: Network = MACHINE_NETWORK,
    ) -> None:
        self._name, self._engine, self._port, self._network = name, engine, port, network
        self._command, self._environment, self._log = network.command(command), environment, log
        self._num_killed = 0
        self.start()

    def start(self) -> None:
        """Start it, and return when it listens, or when a signal has killed it, which `ended` reports.

        Raises `TrainingFailed`, with the end of its log, if it exits by itself, does not listen in time, or was killed
        at several starts in a row.
        """
        self._process = start(self._command, self._environment, self._log, self._log.parent)
        deadline_s = time.monotonic() + _START_TIMEOUT_S
        while not self._network.listens(self._port):
            code = self._process.poll()
            if code is not None and code < 0 and self._num_killed + 1 < _MAX_KILLED_STARTS:
                self._num_killed += 1
                return
            if code is not None and code < 0:
                raise TrainingFailed(
                    f"engine {self._engine}: {self._name} was killed at each of {_MAX_KILLED_STARTS} "
                    "starts; is there enough memory?"
                )
            if code is not None or time.monotonic() > deadline_s:
                self.end()
                what = (
                    f"was not ready after {_START_TIMEOUT_S:g} s"
                    if code is None
                    else "ended at its start"
                )
                raise TrainingFailed(
                    f"engine {self._engine}: {self._name} {what}: {tail(self._log)}"
                )
            time.sleep(0.1)
        self._num_killed = 0

    @property
    def pid(self) -> int:
        """Process id of the current process."""
        return self._process.pid

    def ended(self) -> str | None:
        """Return how it ended, or None while it runs."""
        code = self._process.poll()
        return None if code is None else f"{self._name} ended ({exit_cause(code)})"

    def end(self) -> None:
        """End it and its process group."""
        end(self._process)


# ----------------------------------------------------------------------------------------------- processes with a mark
@contextmanager
def own_processes(folder: Path | None = None) -> Iterator[str]:
    """Yield a mark for the environment of processes; all processes with it end with the context or this process.

    If this process is killed, the guard also removes `folder`.
    """
    mark = uuid.uuid4().hex
    command = [sys.executable, "-m", "socflower.engines.deployment.flower_processes", mark]
    guard = subprocess.Popen(
        command if folder is None else [*command, str(folder)],
        start_new_session=True,
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    assert guard.stdin is not None
    try:
        yield mark
    finally:
        end_marked(mark)
        with suppress(OSError):
            guard.stdin.write(b"done")
            guard.stdin.close()
        await_end(guard)


def marked(environment: Mapping[str, str], mark: str, part: str = "") -> dict[str, str]:
    """Return an environment with the mark, by which its processes and their descendants can be ended."""
    return {**environment, MARK: mark, PART: part}


def end_marked(mark: str, part: str | None = None) -> None:
    """End all processes with the mark, or those of one part of the run: by SIGTERM first, then by SIGKILL."""
    for scan in range(_SCANS):
        # The next scan finds a process that starts during this one.
        found = processes_of(mark, part)
        if not found:
            return
        for process in found:
            # The process may have ended already.
            with suppress(psutil.Error):
                process.send_signal(signal.SIGKILL if scan else signal.SIGTERM)
        _, alive = psutil.wait_procs(found, timeout=_END_TIMEOUT_S / 2)
        for process in alive:
            with suppress(psutil.Error):
                process.kill()


def processes_of(mark: str, part: str | None = None) -> list[psutil.Process]:
    """Return the running processes of a run, or of one part of it, without this process."""
    found = []
    for process in psutil.process_iter():
        # The process may have ended, or belong to another user.
        with suppress(psutil.Error, OSError):
            if process.pid != os.getpid() and process.status() != psutil.STATUS_ZOMBIE:
                environment = process.environ()
                if environment.get(MARK) == mark and part in (None, environment.get(PART)):
                    found.append(process)
    return found


# ----------------------------------------------------------------------------------------------------- ports
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
            # The port may be in use.
            with suppress(OSError):
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
        # The first dynamic port of RFC 6335.
        first = 49152
    return range(10000, first) if first > 20000 else range(first, 60000)


if __name__ == "__main__":
    if not sys.stdin.buffer.read():
        end_marked(sys.argv[1])
        for abandoned in sys.argv[2:]:
            shutil.rmtree(abandoned, ignore_errors=True)
