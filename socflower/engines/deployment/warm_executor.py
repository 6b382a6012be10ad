"""Resident clients: a SuperNode whose ClientApp stays for a run, forked from a process that has imported torch.

Flower starts a new Python process for every message, which imports torch before it trains. This command runs Flower's
own SuperNode, SuperLink or SuperExec and changes only how the process of an app is started:

    python -m socflower.engines.deployment.warm_executor -- flower-supernode --insecure --superlink 10.0.0.1:9092 …

The SuperExec starts a zygote: a process with one thread that has imported the clients' modules and only forks. A fork
of it runs `flwr-clientapp` with the arguments, environment and streams that the new process would have, and then again
for each further message of the same run, with its model, data and app loaded. Each run has its own fork. A fork that
is at work, such as one that hangs, is not waited for: the message gets another one. A SuperLink's ServerApps are forks
as well, one for each run, so that a run that is started again after its ServerApp died does not import torch first.
The zygote ends with its SuperExec, as do forks; a killed one is replaced at the next message.

This file depends on Flower's internals, and has all that does: three of its modules start their children with
`subprocess.Popen` (see `_STARTERS`), one of them pauses between two questions for a message, a third names a task's
run, and `flwr-clientapp` ends its process. It therefore checks Flower's version.
"""

import argparse
import contextlib
import functools
import gc
import importlib
import json
import os
import shutil
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from importlib.metadata import entry_points, version
from importlib.util import find_spec
from logging import INFO, WARNING
from pathlib import Path
from typing import Any

from socflower.engines.installed import dependencies
from socflower.errors import ConfigError
from socflower.quantities import counted

_TORCH = ("torch", "torch._dynamo", "torch.distributed")
PRELOAD = (*_TORCH, "flwr.supernode.cli", "flwr.clientapp", "socflower.clients")
"""What a SuperNode's zygote imports, and in `PRELOAD_OF_SERVERS` a SuperLink's."""
PRELOAD_OF_SERVERS = (
    *_TORCH,
    "flwr.superlink.cli",
    "flwr.serverapp",
    "socflower.strategies.socflow",
)

_SUPERNODE, _SUPERLINK, _SUPEREXEC = "flower-supernode", "flower-superlink", "flower-superexec"
_CLIENTAPP, _SERVERAPP = "flwr-clientapp", "flwr-serverapp"
# Of the SuperExec that a SuperLink starts.
_SERVES = "--server-apps"
# Flower's command, and its module that starts a child with `subprocess.Popen`.
_STARTERS = {
    _SUPERNODE: "flwr.supernode.start_client_internal",
    _SUPERLINK: "flwr.superlink.cli.flower_superlink",
    _SUPEREXEC: "flwr.supercore.superexec.executor.subprocess_executor",
}
# Its module that asks for tasks, with their runs, and the one that answers a message.
_SUPEREXEC_LOOP = "flwr.supercore.superexec.run_superexec"
_CLIENTAPP_RUN = "flwr.supernode.runtime.run_clientapp"
# A busy small board may import torch from a slow SD card.
_READY_TIMEOUT_S = 300.0
# Residents of as many runs stay; a fork without a message for so long ends, and with it what its run kept in memory.
_MOST_RESIDENTS = 2
_RESIDENT_IDLE_S = 900.0
_FORK_TIMEOUT_S = 60.0
# The SuperNode's shortest pause here after a message, and what tells its pauses between messages from others.
_FIRST_POLL_S = 0.25
_LEAST_POLL_S = 1.0
# The exit status after a ConfigError.
_CONFIG_ERROR_STATUS = 2
_OPENBLAS_THREADS = "OPENBLAS_NUM_THREADS"
_HEADER = struct.Struct("!I")


def warm_supernode_command(args: Sequence[str], preload: Sequence[str] = ()) -> list[str]:
    """Return the warm equivalent of `flower-supernode ARGS`; `preload` names more modules to import."""
    return [*_own_command(preload), "--", _SUPERNODE, *args]


def warm_superlink_command(args: Sequence[str]) -> list[str]:
    """Return the warm equivalent of `flower-superlink ARGS`."""
    return [*_own_command(), "--", _SUPERLINK, *args]


class Zygote:
    """A process that has imported `preload` and forks on request; it ends when this end of its socket closes.

    Raises `ConfigError` if a module cannot be imported or starts a thread: a fork would copy locks that such a thread
    holds, but not the thread that releases them.
    """

    def __init__(
        self, preload: Sequence[str], environment: Mapping[str, str] | None = None
    ) -> None:
        self._requests, theirs = socket.socketpair()
        environment = dict(os.environ if environment is None else environment)
        with theirs:
            # NumPy's OpenBLAS starts its threads on import unless it is limited to one.
            self._process = subprocess.Popen(
                [
                    sys.executable,
                    "-P",
                    __file__,
                    "--zygote",
                    str(theirs.fileno()),
                    json.dumps(
                        {
                            "preload": list(preload),
                            "openblas-threads": environment.get(_OPENBLAS_THREADS),
                        }
                    ),
                ],
                pass_fds=[theirs.fileno()],
                env={**environment, _OPENBLAS_THREADS: "1"},
            )
        self.pid = self._process.pid
        try:
            self._requests.settimeout(_READY_TIMEOUT_S)
            problem = _read_line(self._requests)
        except OSError as error:
            self.close()
            raise ConfigError(
                f"warm executor: the zygote did not get ready ({error}); see its output above, or leave "
                "the warm executor out"
            ) from error
        if problem:
            self.close()
            raise ConfigError(f"warm executor: {problem}")

    def fork(
        self,
        entry: str,
        argv: Sequence[str],
        *,
        stdout: int | None = None,
        stderr: int | None = None,
        tasks: socket.socket | None = None,
    ) -> int:
        """Run `entry` ("module:function", without arguments) in a fork whose `sys.argv` is `argv`; return its pid.

        `stdout` and `stderr` are file descriptors, or None for this process's own. With `tasks` the fork stays, and
        runs `entry` again for each `argv` that comes over it. Raises `OSError` on failure.
        """
        ours, theirs = socket.socketpair()
        with ours:
            with theirs:
                request = _packed({"entry": entry, "argv": list(argv)})
                files = [
                    1 if stdout is None else stdout,
                    2 if stderr is None else stderr,
                    theirs.fileno(),
                    *([] if tasks is None else [tasks.fileno()]),
                ]
                socket.send_fds(self._requests, [request], files)
            ours.settimeout(_FORK_TIMEOUT_S)
            answer = _read_line(ours)
        if not answer.isdecimal():
            raise OSError(f"the zygote cannot fork: {answer}")
        return int(answer)

    def close(self) -> None:
        """End the zygote; the processes that it forked continue."""
        self._requests.close()
        try:
            self._process.wait(timeout=5.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


class _WarmParent:
    """Replaces `subprocess` in the module that starts the SuperExec, to start a warm one."""

    def __init__(self, options: Sequence[str]) -> None:
        self._options = options

    def __getattr__(self, name: str) -> Any:
        return getattr(subprocess, name)

    def Popen(self, args: Sequence[str], **settings: Any) -> "subprocess.Popen[bytes]":
        """Start the child of the SuperNode or SuperLink through this file's command."""
        superexec = subprocess.Popen([*_own_command(), *self._options, "--", *args], **settings)

        def follow() -> None:
            # A parent whose SuperExec failed to start would accept messages or runs and never answer.
            if superexec.wait() == _CONFIG_ERROR_STATUS:
                os.kill(os.getpid(), signal.SIGTERM)

        threading.Thread(target=follow, daemon=True).start()
        return superexec


class _Pauses:
    """Replaces `time` in the module of the SuperNode, which asks the SuperLink for a message every 3 s.

    A message mostly comes soon after the answer to the one before, so the pauses begin short: each is a quarter of the
    time since that answer, until they are as long as Flower's.
    """

    def __init__(self) -> None:
        self._idle_s = 0.0

    def __getattr__(self, name: str) -> Any:
        return getattr(time, name)

    def sleep(self, seconds: float) -> None:
        """Sleep for a part of the pause between two questions; other pauses are those within a message."""
        pause_s = seconds
        if seconds < _LEAST_POLL_S:
            self._idle_s = 0.0
        else:
            pause_s = min(seconds, max(_FIRST_POLL_S, self._idle_s / 4.0))
            self._idle_s += pause_s
        time.sleep(pause_s)


class _Resident:
    """A fork that stays for a run, and this end of the socket over which it gets its messages."""

    def __init__(self, pid: int, tasks: socket.socket) -> None:
        self.pid, self._tasks = pid, tasks
        self.has_ended = False

    def take(self, argv: Sequence[str]) -> bool:
        """Give it a message, and return True; False if it is at work, or has ended."""
        try:
            # It sends a line end after each message.
            if not self._tasks.recv(1, socket.MSG_DONTWAIT):
                self.has_ended = True
                return False
            self._tasks.sendall(_packed(list(argv)))
        except BlockingIOError:
            return False
        except OSError:
            self.has_ended = True
            return False
        return True

    def close(self) -> None:
        """Let it end, after its message if it is at work."""
        self._tasks.close()


class _WarmSuperExec:
    """Replaces `subprocess` in the module that starts tasks: apps are forked, other tasks start as usual."""

    DEVNULL = subprocess.DEVNULL

    def __init__(self, preload: Sequence[str]) -> None:
        self._preload = preload
        # The run of the next task; None: unknown, so that its process does not stay.
        self.run_id: int | None = None
        # By run, the one that got a message last at the end.
        self._residents: dict[int, _Resident] = {}
        self._entries = {command: _console_script(command) for command in (_CLIENTAPP, _SERVERAPP)}
        self._zygote = self._new_zygote()

    def Popen(
        self,
        args: Sequence[str],
        stdout: int | None = None,
        stderr: int | None = None,
    ) -> int:
        """Start a task with these streams, and return its process id; Flower uses nothing of what this returns."""
        if args[0] not in self._entries:
            return subprocess.Popen(args, stdout=stdout, stderr=stderr).pid
        with open(os.devnull, "wb") as null:
            out, err = (
                null.fileno() if stream == self.DEVNULL else stream for stream in (stdout, stderr)
            )
            argv = [shutil.which(args[0]) or args[0], *args[1:]]
            if args[0] == _SERVERAPP or self.run_id is None:
                return self._fork(argv, out, err)
            resident = self._residents.pop(self.run_id, None)
            if resident is None or not resident.take(argv):
                if resident is not None and not resident.has_ended:
                    # At work, as one whose task Flower has given up.
                    self._residents[self.run_id] = resident
                    return self._fork(argv, out, err)
                if resident is not None:
                    resident.close()
                resident = self._new_resident(argv, out, err)
            self._residents[self.run_id] = resident
            return resident.pid

    def _new_resident(
        self, argv: Sequence[str], stdout: int | None, stderr: int | None
    ) -> _Resident:
        while len(self._residents) >= _MOST_RESIDENTS:
            self._residents.pop(next(iter(self._residents))).close()
        ours, theirs = socket.socketpair()
        with theirs:
            return _Resident(self._fork(argv, stdout, stderr, theirs), ours)

    def _fork(
        self,
        argv: Sequence[str],
        stdout: int | None,
        stderr: int | None,
        tasks: socket.socket | None = None,
    ) -> int:
        from flwr.supercore import log

        entry = self._entries[Path(argv[0]).name]
        try:
            return self._zygote.fork(entry, argv, stdout=stdout, stderr=stderr, tasks=tasks)
        except (BrokenPipeError, ConnectionResetError, ProcessLookupError, TimeoutError) as error:
            log(
                WARNING,
                "warm executor: zygote %d died or hangs (%s); starting another",
                self._zygote.pid,
                error,
            )
            self._zygote.close()
            self._zygote = self._new_zygote()
            return self._zygote.fork(entry, argv, stdout=stdout, stderr=stderr, tasks=tasks)

    def _new_zygote(self) -> Zygote:
        from flwr.supercore import log

        start_s = time.monotonic()
        zygote = Zygote(self._preload)
        log(
            INFO, "warm executor: zygote %d ready in %.1f s", zygote.pid, time.monotonic() - start_s
        )
        return zygote


def check_flwr_version(found: str) -> None:
    """Raise `ConfigError` unless `found` is a version of Flower that this file was tested with."""
    if found not in (tested := _tested_flwr()):
        raise ConfigError(
            f"warm executor: tested with flwr {' and '.join(tested)}, found {found}; leave it out, or pass "
            "--any-flwr-version"
        )


def _tested_flwr() -> tuple[str, ...]:
    flower = dependencies().get("flwr")
    if flower is None:
        raise ConfigError(
            "warm executor: this installation's metadata is older than its code; install socflower again"
        )
    return flower.tested


def main(arguments: Sequence[str]) -> None:
    """Run the Flower command after `--`, warm."""
    parser = argparse.ArgumentParser(
        prog="python -m socflower.engines.deployment.warm_executor",
        description="Run a Flower SuperNode, SuperLink or SuperExec that forks its apps from a process with torch "
        "loaded.",
    )
    parser.add_argument(
        "--any-flwr-version",
        action="store_true",
        help="try it also where flwr is not a tested version",
    )
    parser.add_argument(
        "--preload",
        metavar="MODULE",
        action="append",
        default=[],
        help="import this module too before forking; may be given several times",
    )
    parser.add_argument(
        _SERVES, action="store_true", help="import what ServerApps need, not what ClientApps do"
    )
    parser.add_argument("command", nargs="+", metavar="-- flower-supernode ARGS")
    split = arguments.index("--") if "--" in arguments else len(arguments)
    options, command = list(arguments[:split]), list(arguments[split + 1 :])
    chosen = parser.parse_args([*options, *command[:1]])
    if "torch" in sys.modules:
        # `python -m` has imported the whole package; Flower's own processes do not need torch in memory.
        os.execv(sys.executable, [*_own_command(), *arguments])
    if not chosen.any_flwr_version:
        check_flwr_version(version("flwr"))
    _require_supported(command, chosen.preload)
    # systemd units name commands by their paths.
    name = Path(command[0]).name
    starter = importlib.import_module(_STARTERS[name])
    is_known = getattr(starter, "subprocess", None) is subprocess
    if not (is_known and (name != _SUPERNODE or getattr(starter, "time", None) is time)):
        raise ConfigError(
            f"warm executor: flwr {version('flwr')} starts its processes in another way than "
            f"{' and '.join(_tested_flwr())}; leave it out"
        )
    sys.argv = [shutil.which(command[0]) or command[0], *command[1:]]
    if name == _SUPERNODE:
        vars(starter).update(subprocess=_WarmParent(options), time=_Pauses())
    elif name == _SUPERLINK:
        vars(starter)["subprocess"] = _WarmParent([*options, _SERVES])
    else:
        modules = PRELOAD_OF_SERVERS if chosen.server_apps else PRELOAD
        executor = _WarmSuperExec([*chosen.preload, *modules])
        vars(starter)["subprocess"] = executor
        _tell_runs(executor)
    sys.exit(_function(_console_script(name))())


def _tell_runs(executor: _WarmSuperExec) -> None:
    """Tell the executor the run of each task before it is started."""
    superexec = importlib.import_module(_SUPEREXEC_LOOP)
    plugin: Any = superexec.AutoExecPlugin

    class TellingPlugin(plugin):  # type: ignore[misc]
        def launch_task(self, token: str, task: Any) -> Any:
            executor.run_id = int(task.run_id)
            return super().launch_task(token, task)

    vars(superexec)["AutoExecPlugin"] = TellingPlugin


def _require_supported(command: Sequence[str], preload: Sequence[str]) -> None:
    if not hasattr(os, "fork"):
        raise ConfigError("warm executor: this system cannot fork; leave it out")
    name = Path(command[0]).name
    if name not in _STARTERS:
        raise ConfigError(f"warm executor: -- {command[0]}: runs {', '.join(_STARTERS)} only")
    words = " ".join(command[1:]).replace("=", " ")
    if name != _SUPEREXEC and "--isolation process" in words:
        raise ConfigError(
            f"warm executor: with --isolation process {name} starts no apps; run its flower-superexec through this "
            "command instead"
        )
    if name == _SUPEREXEC and "--executor kubernetes" in words:
        raise ConfigError(
            "warm executor: --executor kubernetes starts pods, not processes; leave this out"
        )
    for module in preload:
        if find_spec(module.partition(".")[0]) is None:
            raise ConfigError(
                f"warm executor: --preload {module}: no such module; install it, or leave it out"
            )


# ------------------------------------------------------------------------------------------ in the zygote
def _zygote_main(descriptor: str, settings: str) -> None:
    """Import, report readiness, fork; a child returns from `_serve` and runs the requested entry point."""
    # Ctrl-C reaches the terminal's process group: it ends the SuperExec, and the closed socket then
    # ends the zygote.
    interrupt = signal.signal(signal.SIGINT, signal.SIG_IGN)
    chosen = json.loads(settings)
    requests = socket.socket(fileno=int(descriptor))
    # `_serve` detects a SuperExec that has ended.
    with contextlib.suppress(BrokenPipeError):
        requests.sendall((_preload(chosen["preload"]) + "\n").encode())
    gc.collect()
    # Otherwise each child's first collection copies the pages of all shared objects.
    gc.freeze()
    entry, sys.argv, tasks = _serve(requests)
    signal.signal(signal.SIGINT, interrupt)
    if chosen["openblas-threads"] is None:
        del os.environ[_OPENBLAS_THREADS]
    else:
        os.environ[_OPENBLAS_THREADS] = chosen["openblas-threads"]
    # A new process draws its global seeds from the system; forks would share the zygote's, except
    # Python's own.
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()
    if "torch" in sys.modules:
        sys.modules["torch"].default_generator.seed()
    with contextlib.suppress(OSError):
        Path("/proc/self/comm").write_text(Path(sys.argv[0]).name)
    if tasks is not None:
        _stay(entry, tasks)
    sys.exit(_function(entry)())


def _stay(entry: str, tasks: socket.socket) -> None:
    """Run the entry point for one message after another, until the SuperExec closes the socket or sends no more."""
    _outlive_messages()
    os.environ[importlib.import_module("socflower.wire.node_files").RESIDENT] = "1"
    function = _function(entry)
    tasks.settimeout(_RESIDENT_IDLE_S)
    while True:
        with contextlib.suppress(SystemExit):
            function()
        # Flower's handlers are of the message that has ended; each registration keeps those before it.
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGQUIT):
            signal.signal(number, signal.SIG_DFL)
        # The SuperExec may have ended, or there is no message for a long time.
        try:
            tasks.sendall(b"\n")
            (length,) = _HEADER.unpack(_read_exactly(tasks, _HEADER.size))
            sys.argv = json.loads(_read_exactly(tasks, length))
        except OSError:
            sys.exit(0)


def _outlive_messages() -> None:
    """Let `flwr-clientapp` return at the end of a message, where Flower ends the process."""
    run: Any = importlib.import_module(_CLIENTAPP_RUN)
    handlers = importlib.import_module("flwr.supercore.exit.exit_handler")

    def end_message(*_: Any, **__: Any) -> None:
        for is_early in (True, False):
            handlers.trigger_exit_handlers(run_before_force_exit=is_early)
        raise SystemExit

    # Of its threads that watch the SuperExec one is enough.
    watch = functools.cache(run.start_parent_process_monitor)
    vars(run).update(flwr_exit=end_message, start_parent_process_monitor=watch)


def _preload(modules: Sequence[str]) -> str:
    """Import `modules`; return an error text, or "" on success."""
    for module in modules:
        try:
            importlib.import_module(module)
        except Exception as error:
            return f"cannot preload {module} ({type(error).__name__}: {error}); install it, or leave it out"
        if (num_threads := _num_threads()) > 1:
            return f"importing {module} started {counted(num_threads - 1, 'thread')}, so it cannot be preloaded"
    return ""


def _serve(requests: socket.socket) -> tuple[str, list[str], socket.socket | None]:
    """Fork once per request. Returns in children only, with entry, `sys.argv`, and the socket of one that stays."""
    # Ended children leave no zombies.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    while True:
        header, files, _, _ = socket.recv_fds(requests, _HEADER.size, 4)
        if not header:
            sys.exit(0)
        request = json.loads(_read_exactly(requests, _HEADER.unpack(header)[0]))
        out, err, descriptor, *tasks = files
        with socket.socket(fileno=descriptor) as report:
            try:
                pid = os.fork()
                if pid == 0:
                    # The child itself sends its process id, so that an answer proves that it runs.
                    report.sendall(f"{os.getpid()}\n".encode())
            except OSError as error:
                report.sendall(f"{error}\n".encode())
                pid = -1
        if pid == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            requests.close()
            os.dup2(out, 1)
            os.dup2(err, 2)
        os.close(out)
        os.close(err)
        if pid == 0:
            stream = socket.socket(fileno=tasks[0]) if tasks else None
            return request["entry"], request["argv"], stream
        for kept in tasks:
            os.close(kept)


# --------------------------------------------------------------------------------------------- helpers
def _own_command(preload: Sequence[str] = ()) -> list[str]:
    # By path and not by -m: the package's __init__ imports torch, which a SuperNode does not need.
    # -P keeps this file's folder out of sys.path.
    return [
        sys.executable,
        "-P",
        __file__,
        *(word for module in preload for word in ("--preload", module)),
    ]


def _console_script(command: str) -> str:
    """Return "module:function" of an installed command."""
    return next(iter(entry_points(group="console_scripts", name=command))).value


def _function(entry: str) -> Any:
    module, _, name = entry.partition(":")
    return getattr(importlib.import_module(module), name)


def _num_threads() -> int:
    tasks = Path("/proc/self/task")
    return len(list(tasks.iterdir())) if tasks.exists() else threading.active_count()


def _read_line(stream: socket.socket) -> str:
    """Return the next line; raises `ProcessLookupError` if the other end closes first."""
    line = b""
    while not line.endswith(b"\n"):
        byte = stream.recv(1)
        if not byte:
            raise ProcessLookupError("the zygote died")
        line += byte
    return line[:-1].decode()


def _packed(document: Any) -> bytes:
    """Return a JSON document behind its length."""
    text = json.dumps(document).encode()
    return _HEADER.pack(len(text)) + text


def _read_exactly(stream: socket.socket, num_bytes: int) -> bytes:
    parts = b""
    while len(parts) < num_bytes:
        part = stream.recv(num_bytes - len(parts))
        if not part:
            sys.exit(0)
        parts += part
    return parts


if __name__ == "__main__":
    if sys.argv[1:2] == ["--zygote"]:
        _zygote_main(*sys.argv[2:])
    try:
        main(sys.argv[1:])
    except ConfigError as problem:
        print(problem, file=sys.stderr)
        sys.exit(_CONFIG_ERROR_STATUS)
