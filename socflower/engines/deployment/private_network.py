"""A network of its own for the processes of a run, in which nobody else reaches what listens on 127.0.0.1.

Flower's SuperLink takes orders from whoever reaches its port, and on this machine's loopback that is every user. In a
network namespace of Linux there is another loopback, which only processes that were started in it reach, and whoever
may enter it: the same user, and root.

    python -m socflower.engines.deployment.private_network

keeps such a namespace open: it switches the loopback on, says so in a line, and then answers for each line of its
standard input (`health PORT` or `connect PORT`) whether something answers there. It ends with its input.
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
    """Where processes of a run listen and connect."""

    @property
    def shared_because(self) -> str:
        """Why other users of this machine reach what listens here; "" if they do not."""

    @property
    def environment(self) -> Mapping[str, str]:
        """What processes here need in their environment beside what they have."""

    def command(self, command: Sequence[str]) -> list[str]:
        """Return the command that runs `command` here; it is the same process in the end."""

    def healthy(self, port: int) -> bool:
        """Return whether GET /health at a port of 127.0.0.1 is answered."""

    def listens(self, port: int) -> bool:
        """Return whether a port of 127.0.0.1 takes connections."""


class MachineNetwork:
    """The network of this machine, with everybody on it."""

    def __init__(self, shared_because: str = "no network of their own was asked for") -> None:
        self.shared_because = shared_because
        self.environment: Mapping[str, str] = {}

    def command(self, command: Sequence[str]) -> list[str]:
        """Return it as it is."""
        return list(command)

    def healthy(self, port: int) -> bool:
        """Return whether GET /health at a port of 127.0.0.1 is answered."""
        return _healthy(port)

    def listens(self, port: int) -> bool:
        """Return whether a port of 127.0.0.1 takes connections."""
        return _listens(port)


MACHINE_NETWORK = MachineNetwork()


class _Namespace:
    """A network namespace, as long as the process that keeps it open lives."""

    shared_because = ""
    # The internet is out of reach. Data sets were loaded before the run and are in the cache of the hub's packages,
    # which would otherwise try to reach the hub first.
    environment: Mapping[str, str] = {"HF_HUB_OFFLINE": "1"}

    def __init__(self, keeper: "subprocess.Popen[str]", enter: Sequence[str]) -> None:
        self._keeper = keeper
        self._enter = list(enter)

    def command(self, command: Sequence[str]) -> list[str]:
        return [*self._enter, *command]

    def healthy(self, port: int) -> bool:
        return self._ask(f"health {port}")

    def listens(self, port: int) -> bool:
        return self._ask(f"connect {port}")

    def _ask(self, question: str) -> bool:
        assert self._keeper.stdin is not None and self._keeper.stdout is not None
        with suppress(OSError):  # it was killed: nothing answers there
            self._keeper.stdin.write(f"{question}\n")
            self._keeper.stdin.flush()
            return self._keeper.stdout.readline() == "yes\n"
        return False


@contextmanager
def private_network(environment: Mapping[str, str]) -> Iterator[Network]:
    """Yield a network of its own for processes with an environment; where there can be none, the machine's, and why.

    The namespace goes when its last process has ended.
    """
    missing = [tool for tool in ("unshare", "nsenter") if shutil.which(tool, path=environment.get("PATH")) is None]
    if missing:
        yield MachineNetwork(f"there is no command {missing[0]} here, which makes network namespaces on Linux")
        return
    reasons = []
    # Root needs no user namespace, in which files of other users would be foreign.
    for with_user in ((False, True) if os.geteuid() == 0 else (True,)):
        keeper = _keeper(environment, with_user=with_user)
        try:
            entered = _entered(keeper, environment, with_user=with_user)
            if isinstance(entered, _Namespace):
                yield entered
                return
            reasons.append(entered)
        finally:
            _close(keeper)
    yield MachineNetwork(f"no network namespace can be made here: {reasons[-1]}")


def _keeper(environment: Mapping[str, str], *, with_user: bool) -> "subprocess.Popen[str]":
    user = ["--user", "--map-root-user"] if with_user else []
    return subprocess.Popen(
        ["unshare", *user, "--net", sys.executable, "-m", "socflower.engines.deployment.private_network"],
        env=dict(environment), text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        start_new_session=True)


def _entered(keeper: "subprocess.Popen[str]", environment: Mapping[str, str], *, with_user: bool) -> _Namespace | str:
    """Return the namespace that the process keeps, tried out, or the words of what failed."""
    assert keeper.stdout is not None
    said = keeper.stdout.readline().strip()
    if said != _READY:
        return said or "unshare ended without a word"
    # Inside, this user is root, which it is only there; what it makes is this user's.
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


def _switch_loopback_on() -> None:
    """Set the flag IFF_UP of `lo`, which is off in a new namespace; needs no tool."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        name = b"lo".ljust(16, b"\0")
        (flags,) = struct.unpack_from("h", fcntl.ioctl(probe, _SIOCGIFFLAGS, name + bytes(16)), 16)
        fcntl.ioctl(probe, _SIOCSIFFLAGS, name + struct.pack("h", flags | _IFF_UP) + bytes(14))


def _keep_open() -> None:
    try:
        _switch_loopback_on()
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
