"""A private network for the processes of a run, in which other users cannot reach ports of 127.0.0.1.

Flower's SuperLink accepts commands from any client that reaches its port, and every user of this machine reaches its
loopback. A Linux network namespace has a separate loopback. Only processes in the namespace reach it, and only the
same user and root may enter the namespace.

    python -m socflower.engines.deployment.private_network

keeps such a namespace open: it enables the loopback, prints a line when it is ready, and answers each line of its
standard input (`health PORT` or `connect PORT`) with whether that port responds. It ends at the end of its input.
"""

import fcntl
import os
import shutil
import socket
import struct
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Protocol

_READY = "ready"
_TIMEOUT_S = 2.0
_SIOCGIFFLAGS, _SIOCSIFFLAGS, _IFF_UP = 0x8913, 0x8914, 0x1


class Network(Protocol):
    """The network in which processes of a run listen and connect."""

    @property
    def shared_because(self) -> str:
        """Why other users of this machine can reach its ports; "" if they cannot."""

    @property
    def environment(self) -> Mapping[str, str]:
        """Additional environment variables for processes in this network."""

    def command(self, command: Sequence[str]) -> list[str]:
        """Return the command that executes `command` in this network, in the same process."""

    def healthy(self, port: int) -> bool:
        """Return whether GET /health at a port of 127.0.0.1 is answered."""

    def listens(self, port: int) -> bool:
        """Return whether a port of 127.0.0.1 takes connections."""


class MachineNetwork:
    """The network of this machine, which all its users share."""

    def __init__(self, shared_because: str = "no network of their own was asked for") -> None:
        self.shared_because = shared_because
        self.environment: Mapping[str, str] = {}

    def command(self, command: Sequence[str]) -> list[str]:
        """Return the command unchanged."""
        return list(command)

    def healthy(self, port: int) -> bool:
        """Return whether GET /health at a port of 127.0.0.1 is answered."""
        return _healthy(port)

    def listens(self, port: int) -> bool:
        """Return whether a port of 127.0.0.1 takes connections."""
        return _listens(port)


MACHINE_NETWORK = MachineNetwork()


class _Namespace:
    """A network namespace; it exists as long as the process that keeps it open."""

    shared_because = ""
    # The internet is unreachable. Data sets were loaded before the run and are cached; without this variable the
    # hub's packages would try to reach the hub first.
    environment: Mapping[str, str] = {"HF_HUB_OFFLINE": "1"}

    def __init__(self, keeper: "subprocess.Popen[str]", enter: Sequence[str]) -> None:
        self._keeper = keeper
        self._enter = list(enter)

    def command(self, command: Sequence[str]) -> list[str]:
        return [*self._enter, *command]

    def healthy(self, port: int) -> bool:
        return self._query(f"health {port}")

    def listens(self, port: int) -> bool:
        return self._query(f"connect {port}")

    def _query(self, question: str) -> bool:
        assert self._keeper.stdin is not None and self._keeper.stdout is not None
        with suppress(OSError):  # the keeper was killed: no port responds
            self._keeper.stdin.write(f"{question}\n")
            self._keeper.stdin.flush()
            return self._keeper.stdout.readline() == "yes\n"
        return False


@contextmanager
def private_network(environment: Mapping[str, str]) -> Iterator[Network]:
    """Yield a private network for processes with an environment; if none is possible, the machine's, with the cause.

    The namespace disappears when its last process has ended.
    """
    missing = [tool for tool in ("unshare", "nsenter") if shutil.which(tool, path=environment.get("PATH")) is None]
    if missing:
        yield MachineNetwork(f"there is no command {missing[0]} here, which makes network namespaces on Linux")
        return
    reasons = []
    # Root needs no user namespace, in which other users' files would be inaccessible.
    for with_user in ((False, True) if os.geteuid() == 0 else (True,)):
        keeper = _start_keeper(environment, with_user=with_user)
        try:
            entered = _enter(keeper, environment, with_user=with_user)
            if isinstance(entered, _Namespace):
                yield entered
                return
            reasons.append(entered)
        finally:
            _close(keeper)
    yield MachineNetwork(f"no network namespace can be made here: {reasons[-1]}")


def _start_keeper(environment: Mapping[str, str], *, with_user: bool) -> "subprocess.Popen[str]":
    user = ["--user", "--map-root-user"] if with_user else []
    return subprocess.Popen(
        ["unshare", *user, "--net", sys.executable, "-m", "socflower.engines.deployment.private_network"],
        env=dict(environment), text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        start_new_session=True)


def _enter(keeper: "subprocess.Popen[str]", environment: Mapping[str, str], *, with_user: bool) -> _Namespace | str:
    """Return the namespace that the process keeps open, after a test of it; else the error text."""
    assert keeper.stdout is not None
    said = keeper.stdout.readline().strip()
    if said != _READY:
        return said or "unshare ended without a word"
    # Inside the namespace this user is mapped to root; files that are created there belong to this user.
    user = ["--user", "--preserve-credentials"] if with_user else []
    namespace = _Namespace(keeper, ["nsenter", "--target", str(keeper.pid), *user, "--net"])
    probe = (f"import os, sys; sys.exit(os.stat('/proc/self/ns/net').st_ino != os.stat('/proc/{keeper.pid}/ns/net')"
             ".st_ino)")
    tried = subprocess.run(namespace.command([sys.executable, "-c", probe]), env=dict(environment), text=True,
                           stdin=subprocess.DEVNULL, capture_output=True, check=False)
    if tried.returncode:
        return (tried.stderr.strip().splitlines() or [f"nsenter ended with {tried.returncode}"])[-1]
    return namespace


def _close(keeper: "subprocess.Popen[str]") -> None:
    for stream in (keeper.stdin, keeper.stdout):
        if stream is not None:
            with suppress(OSError):
                stream.close()
    with suppress(ProcessLookupError):
        keeper.terminate()
    keeper.wait()


def _healthy(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=_TIMEOUT_S):
            return True
    except (urllib.error.URLError, OSError):
        return False


def _listens(port: int) -> bool:
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=_TIMEOUT_S):
            return True
    except OSError:
        return False


def _enable_loopback() -> None:
    """Set the flag IFF_UP of `lo`, which is off in a new namespace; needs no external tool."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        name = b"lo".ljust(16, b"\0")
        (flags,) = struct.unpack_from("h", fcntl.ioctl(probe, _SIOCGIFFLAGS, name + bytes(16)), 16)
        fcntl.ioctl(probe, _SIOCSIFFLAGS, name + struct.pack("h", flags | _IFF_UP) + bytes(14))


def _keep_open() -> None:
    try:
        _enable_loopback()
    except OSError as error:
        print(f"the loopback of a new network namespace cannot be switched on ({error.strerror})", flush=True)
        return
    print(_READY, flush=True)
    for line in sys.stdin:
        question, _, port = line.strip().partition(" ")
        found = (_healthy if question == "health" else _listens)(int(port))
        print("yes" if found else "no", flush=True)


if __name__ == "__main__":
    _keep_open()
