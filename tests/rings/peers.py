"""Members of a ring as processes of their own, for tests that kill or stop them."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from socflower.engines.deployment.flower_processes import free_ports
from socflower.rings.collective import Collective
from socflower.rings.transports.port import RingPort
from socflower.wire.secure_channel import PeerUnreachable, Tls

TOKEN = b"0123456789abcdef" * 2
START_S = 90.0  # what a process may take to import torch on a loaded machine


def free_addresses(count: int) -> list[str]:
    return [f"127.0.0.1:{port}" for port in free_ports(count)]


def wait_for_peers(port: RingPort, ranks: list[int]) -> None:
    """Wait until the ports of all others answer, as a group's membership does before a ring opens."""
    port.handle("ping", lambda caller, body: body)
    end_s = time.monotonic() + START_S
    for rank in ranks:
        while rank != port.rank:
            try:
                port.call(rank, "ping", timeout_s=START_S)
                break
            except PeerUnreachable:
                assert time.monotonic() < end_s, "a peer did not start"
                time.sleep(0.05)


class Peer:
    """A process with one member; ended on leaving the `with` block."""

    def __init__(
        self, role: str, rank: int, addresses: list[str], *, heartbeat_s: float = 5.0, tls: Tls | None = None,
    ) -> None:
        files = [str(tls.ca), str(tls.certificate), str(tls.key)] if tls else None
        self._process = subprocess.Popen(
            [sys.executable, "-m", __name__, json.dumps([role, rank, addresses, heartbeat_s, files])],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[2])

    def __enter__(self) -> "Peer":
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout):
            assert stream is not None
            stream.close()

    def read_line(self) -> str:
        """Return the next line it prints."""
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()

    def kill(self) -> None:
        self._process.kill()

    def stop(self) -> None:
        os.kill(self._process.pid, signal.SIGSTOP)


def main(role: str, rank: int, addresses: list[str], heartbeat_s: float, files: list[str] | None) -> None:
    tls = Tls(*map(Path, files)) if files else None
    port = RingPort(addresses[rank], rank=rank, addresses=addresses, token=TOKEN, tls=tls, heartbeat_s=heartbeat_s)
    if role == "hold":
        def hold(caller, body):
            print("held", flush=True)
            while caller.is_active():
                time.sleep(0.01)
            print("gone", flush=True)
            return b""

        port.handle("hold", hold)
        port.handle("echo", lambda caller, body: body)
        print("ready", flush=True)
        time.sleep(600)
    elif role == "caller":
        print("ready", flush=True)
        port.call(0, "hold", timeout_s=600)
    elif role.startswith("graceful-"):
        close_gracefully(port, role.removeprefix("graceful-"), list(range(len(addresses))), heartbeat_s)
    else:  # a transport's name: reduce until something ends it
        reduce_on(port, role, list(range(len(addresses))), heartbeat_s)


def reduce_on(port: RingPort, transport: str, ranks: list[int], heartbeat_s: float) -> None:
    import torch

    from socflower.rings.member import open_ring

    torch.set_num_threads(1)
    wait_for_peers(port, ranks)
    ring: Collective = open_ring(transport, port, ranks, 1, heartbeat_s)
    print("ready", flush=True)
    while True:
        ring.all_reduce(torch.ones(250_000)).wait()


def close_gracefully(port: RingPort, transport: str, ranks: list[int], heartbeat_s: float) -> None:
    """Reduce once in each of ten generations and leave at once; print the sums, or what went wrong."""
    import torch

    from socflower.rings.member import open_ring

    wait_for_peers(port, ranks)
    sums = []
    for generation in range(10):
        ring = open_ring(transport, port, ranks, generation, heartbeat_s)
        buffer = torch.ones(100_000)
        try:
            ring.all_reduce(buffer).wait()
        except Exception as error:
            print(repr(error), flush=True)
            raise
        ring.close()
        sums.append(float(buffer[-1]))
    print(sums, flush=True)
    sys.stdin.read()  # until all have met and printed


if __name__ == "__main__":
    main(*json.loads(sys.argv[1]))
