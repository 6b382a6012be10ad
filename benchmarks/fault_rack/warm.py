"""Processes of a rack as forks of one process that has imported all that they need.

    python -m benchmarks.fault_rack.warm SOCKET

listens at a Unix socket, and forks for each request. In a fork `subprocess.Popen` asks it too, so that nothing in the
rack imports torch or Flower again: on two cores sixty nodes fit that way, and a cell of the matrix takes seconds. What
is started is what would be started otherwise, with its arguments, environment, streams and process group.
"""

import ctypes
import fcntl
import functools
import gc
import importlib
import json
import os
import random
import runpy
import selectors
import signal
import socket
import struct
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

SOCKET = "FAULT_RACK_SOCKET"
"""Environment variable: the socket; processes that have it fork instead of starting Python."""
NETNS = "FAULT_RACK_NETNS"
"""Environment variable: the network namespace of a process and its children."""
_PRELOAD = (
    *("torch", "torch._dynamo", "torch.distributed", "flwr.cli.app", "flwr.clientapp"),
    *("flwr.superlink.cli", "flwr.supercore.cli", "flwr.supernode.cli", "flwr.serverapp"),
    *("flwr.supernode.start_client_internal", "flwr.supercore.superexec.run_superexec"),
    *("socflower.cli.main", "socflower.cli.run", "socflower.cli.node", "socflower.clients"),
    *("socflower.engines.deployment.warm_executor", "socflower.engines.deployment.node"),
    *("socflower.scenario.app.main", "socflower.scenario.app.remote_main", "uvicorn", "fastapi"),
    *("socflower.strategies.socflow", "socflower.scenario.runner", "socflower.report.report"),
)
_LENGTH = struct.Struct("!I")
_STATUS = struct.Struct("!i")
# Room in which a fork writes its own environment and arguments, which `ps` and psutil read there.
_ROOM = 16384
_FIRST_FILE = 512
_CLONE_NEWNET = 0x40000000


@functools.cache
def entries() -> dict[str, str]:
    """Return "module:function" of each command that is forked."""
    return {
        entry.name: entry.value
        for entry in entry_points(group="console_scripts")
        if entry.name.startswith(("flwr", "flower", "socflower"))
    }


def start_server(path: Path, environment: Mapping[str, str]) -> "subprocess.Popen[bytes]":
    """Start the process that forks, and return it when it is ready."""
    room = "-" * _ROOM
    process = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.fault_rack.warm", str(path), room],
        # OpenBLAS and OpenMP must not have threads before a fork.
        env={**environment, "OPENBLAS_NUM_THREADS": "1", "FAULT_RACK_ROOM": room},
        stdout=subprocess.PIPE,
    )
    assert process.stdout is not None
    if process.stdout.readline() != b"ready\n":
        raise RuntimeError(f"the process that forks ended with {process.wait()}")
    return process


class WarmPopen(subprocess.Popen):
    """`subprocess.Popen` that lets the server fork if the command is one of the rack's."""

    _connection: socket.socket | None = None

    def _execute_child(self, args: Any, *others: Any) -> None:
        what = _forked(args)
        if what is None:
            super()._execute_child(args, *others)
            return
        _, _, _, pass_fds, cwd, env, _, _, _, read_in, *pipes = others[:15]
        write_in, read_out, write_out, read_err, write_err = pipes[:5]
        new_session = others[-2]
        connection = socket.socket(socket.AF_UNIX)
        connection.connect((env or os.environ).get(SOCKET, "") or os.environ[SOCKET])
        request = {
            "what": what,
            "env": dict(os.environ if env is None else env),
            "cwd": str(cwd or os.getcwd()),
            "session": bool(new_session),
            "files": [0, 1, 2, *pass_fds],
        }
        streams = [
            own if own != -1 else number
            for number, own in enumerate((read_in, write_out, write_err))
        ]
        text = json.dumps(request).encode()
        socket.send_fds(connection, [_LENGTH.pack(len(text))], [*streams, *pass_fds])
        connection.sendall(text)
        (self.pid,) = _STATUS.unpack(_read(connection, _STATUS.size))
        self._connection, self._child_created = connection, True
        self._close_pipe_fds(read_in, write_in, read_out, write_out, read_err, write_err)

    def _internal_poll(self, _deadstate: Any = None, **_: Any) -> int | None:
        if self._connection is None:
            return super()._internal_poll(_deadstate)
        lock = self._waitpid_lock
        if self.returncode is None and lock.acquire(False):
            try:
                pid, status = self._try_wait(os.WNOHANG)
                if pid == self.pid:
                    self._handle_exitstatus(status)
            finally:
                lock.release()
        return self.returncode

    def _try_wait(self, flags: int) -> tuple[int, int]:
        if self._connection is None:
            return super()._try_wait(flags)
        waits = socket.MSG_DONTWAIT if flags & os.WNOHANG else 0
        try:
            text = self._connection.recv(_STATUS.size, waits)
        except BlockingIOError:
            return 0, 0
        except OSError:
            text = b""
        # Without the server everything has been killed.
        return self.pid, _STATUS.unpack(text)[0] if text else int(signal.SIGKILL)


def use_warm_processes() -> None:
    """Let `subprocess.Popen` of this process fork."""
    subprocess.Popen = WarmPopen


def _forked(args: Any) -> dict[str, Any] | None:
    """Return what a fork has to run for a command; None if that is no command of the rack's."""
    if not isinstance(args, list | tuple):
        return None
    words = [os.fspath(word) for word in args]
    if Path(words[0]).name in entries():
        return {"entry": entries()[Path(words[0]).name], "argv": words}
    if words[0] != sys.executable:
        return None
    if words[1] == "-P" and words[2].endswith("warm_executor.py"):
        return {"executor": words[3:], "argv": words[2:]}
    if words[1] == "-m" and words[2].startswith("socflower."):
        return {"module": words[2], "argv": words[2:]}
    return None


# ------------------------------------------------------------------------------------------------- the server
def serve(path: str) -> dict[str, Any]:
    """Fork once per request; returns in children only, with the request."""
    wake, woken = socket.socketpair()
    for end in (wake, woken):
        end.setblocking(False)
    signal.set_wakeup_fd(woken.fileno())
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(path)
    listener.listen(256)
    connections: dict[int, socket.socket] = {}
    with selectors.DefaultSelector() as selector:
        selector.register(listener, selectors.EVENT_READ)
        selector.register(wake, selectors.EVENT_READ)
        print("ready", flush=True)
        while True:
            for key, _ in selector.select():
                if key.fileobj is wake:
                    with suppress(BlockingIOError):
                        wake.recv(4096)
                    _report_ended(connections)
                    continue
                connection, _ = listener.accept()
                request, files = _read_request(connection)
                pid = os.fork()
                if pid == 0:
                    signal.set_wakeup_fd(-1)
                    for own in (listener, wake, woken, connection, *connections.values()):
                        own.close()
                    selector.close()
                    return {**request, "received": files}
                for each in files:
                    os.close(each)
                connections[pid] = connection
                with suppress(OSError):
                    connection.sendall(_STATUS.pack(pid))


def _report_ended(connections: dict[int, socket.socket]) -> None:
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            return
        connection = connections.pop(pid, None)
        if connection is not None:
            with connection, suppress(OSError):
                connection.sendall(_STATUS.pack(status))


def _read_request(connection: socket.socket) -> tuple[dict[str, Any], list[int]]:
    header, files, _, _ = socket.recv_fds(connection, _LENGTH.size, 16)
    # Above all numbers that they are to have in the fork.
    moved = [fcntl.fcntl(each, fcntl.F_DUPFD, _FIRST_FILE) for each in files]
    for each in files:
        os.close(each)
    return json.loads(_read(connection, _LENGTH.unpack(header)[0])), moved


# ------------------------------------------------------------------------------------------------- in a fork
def become(request: Mapping[str, Any]) -> Callable[[], Any]:
    """Make this fork the process that was asked for, and return what it runs."""
    if request["session"]:
        os.setsid()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for own, wanted in zip(request["received"], request["files"], strict=True):
        os.dup2(own, wanted, inheritable=True)
        os.close(own)
    environment, argv = request["env"], request["what"]["argv"]
    os.environ.clear()
    os.environ.update(environment)
    _write_in_place(48, "\0".join(argv))
    _write_in_place(50, "\0".join(f"{key}={value}" for key, value in environment.items()))
    if name := environment.get(NETNS):
        _enter(name)
    os.chdir(request["cwd"])
    tempfile.tempdir = None
    random.seed()
    sys.modules["numpy"].random.seed()
    sys.modules["torch"].default_generator.seed()
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True, write_through=True)
    what = request["what"]
    sys.argv = list(argv)
    use_warm_processes()
    return _function(what)


def _function(what: Mapping[str, Any]) -> Callable[[], Any]:
    name = Path(what["argv"][0]).name
    if "module" in what:
        name = what["module"].rpartition(".")[2]
    with suppress(OSError):
        Path("/proc/self/comm").write_text(name)
    if "entry" in what:
        module, _, function = what["entry"].partition(":")
        return getattr(importlib.import_module(module), function)
    if "module" in what:
        return functools.partial(_run_module, what["module"])
    executor: Any = importlib.import_module("socflower.engines.deployment.warm_executor")
    words = what["executor"]
    if words[0] == "--zygote":
        return lambda: executor._zygote_main(*words[1:])
    # It would start a process without torch in its place.
    os.execv = lambda *_: None
    return lambda: executor.main(words)


def _run_module(module: str) -> None:
    # Otherwise `runpy` warns that it is imported already.
    del sys.modules[module]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def _enter(namespace: str) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    with open(f"/run/netns/{namespace}", "rb") as file:
        if libc.setns(file.fileno(), _CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"cannot enter {namespace}")


def _write_in_place(field: int, text: str) -> None:
    """Write this process's environment or arguments where the kernel shows them; `field` is that of the start."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    # The first field after the name is the third.
    start, end = int(fields[field - 3]), int(fields[field - 2])
    room = text.encode()[: end - start - 2]
    ctypes.memmove(start, room + bytes(end - start - len(room)), end - start)


def _read(connection: socket.socket, num_bytes: int) -> bytes:
    parts = b""
    while len(parts) < num_bytes:
        part = connection.recv(num_bytes - len(parts))
        if not part:
            raise OSError("the process that forks has ended")
        parts += part
    return parts


def main(path: str) -> Sequence[Any]:
    """Import, serve, and in a fork run what was asked for."""
    for module in _PRELOAD:
        importlib.import_module(module)
    threads = len(list(Path("/proc/self/task").iterdir()))
    if threads > 1:
        sys.exit(f"an import has started {threads - 1} threads")
    gc.collect()
    gc.freeze()
    return [become(serve(path))]


if __name__ == "__main__":
    (function,) = main(sys.argv[1])
    sys.exit(function())
