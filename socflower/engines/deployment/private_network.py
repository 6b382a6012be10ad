"""A private network for the processes of a run, in which other users cannot reach ports of 127.0.0.1.

Flower's SuperLink accepts commands from any client that reaches its port, and every user of this machine reaches its
loopback. A Linux network namespace has a separate loopback. Only processes in the namespace reach it, and only the
same user and root may enter the namespace.

    python -m socflower.engines.deployment.private_network

keeps such a namespace open: it enables the loopback, prints a line when it is ready, and answers each port on a line of
its standard input with whether that port takes connections. It ends at the end of its input.
"""

import fcntl
import os
import shutil
import socket
import struct
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress

_READY = "ready"
_TIMEOUT_S = 2.0
_SIOCGIFFLAGS, _SIOCSIFFLAGS, _IFF_UP = 0x8913, 0x8914, 0x1


class Network:
    """The network in which processes of a run listen and connect: this machine's, or a namespace.

    `shared_because` says why other users of this machine can reach its ports; it is "" for a namespace, which exists
    as long as the process `keeper` that keeps it open, and which the command `enter` enters.
    """

    def __init__(
        self,
        shared_because: str = "",
        keeper: "subprocess.Popen[str] | None" = None,
        enter: Sequence[str] = (),
    ) -> None:
        self.shared_because = shared_because
        self._keeper = keeper
        self._enter = enter
        # A namespace does not reach the internet. Data sets were loaded before the run and are
        # cached; without this variable the hub's packages would try to reach the hub first.
        self.environment: Mapping[str, str] = {"HF_HUB_OFFLINE": "1"} if keeper else {}

    def command(self, command: Sequence[str]) -> list[str]:
        """Return the command that executes `command` in this network, in the same process."""
        return [*self._enter, *command]

    def listens(self, port: int) -> bool:
        """Return whether a port of 127.0.0.1 takes connections."""
        if self._keeper is None:
            return _listens(port)
        assert self._keeper.stdin is not None and self._keeper.stdout is not None
        # The keeper was killed: no port responds.
        with suppress(OSError):
            self._keeper.stdin.write(f"{port}\n")
            self._keeper.stdin.flush()
            return self._keeper.stdout.readline() == "yes\n"
        return False


MACHINE_NETWORK = Network("no network of their own was asked for")


@contextmanager
def private_network(environment: Mapping[str, str]) -> Iterator[Network]:
    """Yield a private network for processes with an environment; if none is possible, the machine's, with the cause.

    The namespace disappears when its last process has ended.
    """
    missing = [
        tool
        for tool in ("unshare", "nsenter")
        if shutil.which(tool, path=environment.get("PATH")) is None
    ]
    if missing:
        yield Network(
            f"there is no command {missing[0]} here, which makes network namespaces on Linux"
        )
        return
    reason = ""
    # Root needs no user namespace, in which other users' files would be inaccessible.
    for with_user in (False, True) if os.geteuid() == 0 else (True,):
        user = ["--user", "--map-root-user"] if with_user else []
        with subprocess.Popen(
            [
                "unshare",
                *user,
                "--net",
                sys.executable,
                "-m",
                "socflower.engines.deployment.private_network",
            ],
            env=dict(environment),
            text=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        ) as keeper:
            try:
                entered = _enter(keeper, environment, with_user=with_user)
                if isinstance(entered, Network):
                    yield entered
                    return
                reason = entered
            finally:
                keeper.terminate()
                # The keeper was killed before.
                with suppress(OSError):
                    keeper.stdin.close()  # type: ignore[union-attr]  # it is a pipe
    yield Network(f"no network namespace can be made here: {reason}")


def _enter(
    keeper: "subprocess.Popen[str]", environment: Mapping[str, str], *, with_user: bool
) -> Network | str:
    """Return the namespace that the process keeps open, after a test of it; else the error text."""
    assert keeper.stdout is not None
    said = keeper.stdout.readline().strip()
    if said != _READY:
        return said or "unshare ended without a word"
    # Inside the namespace this user is mapped to root; files that are created there belong to this user.
    user = ["--user", "--preserve-credentials"] if with_user else []
    network = Network("", keeper, ["nsenter", "--target", str(keeper.pid), *user, "--net"])
    probe = (
        f"import os, sys; sys.exit(os.stat('/proc/self/ns/net').st_ino != os.stat('/proc/{keeper.pid}/ns/net')"
        ".st_ino)"
    )
    tried = subprocess.run(
        network.command([sys.executable, "-c", probe]),
        env=dict(environment),
        text=True,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        check=False,
    )
    if tried.returncode:
        return (tried.stderr.strip().splitlines() or [f"nsenter ended with {tried.returncode}"])[-1]
    return network


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


if __name__ == "__main__":
    try:
        _enable_loopback()
    except OSError as error:
        sys.exit(
            f"the loopback of a new network namespace cannot be switched on ({error.strerror})"
        )
    print(_READY, flush=True)
    for line in sys.stdin:
        print("yes" if _listens(int(line)) else "no", flush=True)
