"""Members of a ring as processes of their own, for tests that kill or stop them."""

import os
import signal
import threading
import time
from multiprocessing.connection import Connection

import torch

from socflower.engines.deployment.flower_processes import free_ports
from socflower.engines.local.workers import _end_with_parent as end_with_parent
from socflower.engines.local.workers import _start_method as start_method
from socflower.peers.collective import Collective
from socflower.peers.ring.member import open_ring
from socflower.peers.transports.port import RingPort
from socflower.wire.secure_channel import PeerUnreachable, Tls

TOKEN = b"0123456789abcdef" * 2
START_S = 90.0  # what a process may take to start on a loaded machine, the first one with the server of processes


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


def opened(
    name: str, port: RingPort, ranks: list[int], generation: int, heartbeat_s: float
) -> Collective:
    """Open a ring over a transport, or for "gloo-server" and "grpc-server" a star."""
    transport, _, kind = name.partition("-")
    return open_ring(transport, port, ranks, generation, heartbeat_s, kind or "ring")


class Peer:
    """A process with one member, forked from the server of processes; ended on leaving the `with` block."""

    def __init__(
        self,
        role: str,
        rank: int,
        addresses: list[str],
        *,
        heartbeat_s: float = 5.0,
        tls: Tls | None = None,
    ) -> None:
        processes = start_method()
        self._lines, lines = processes.Pipe(duplex=False)
        self._process = processes.Process(
            target=main, args=(lines, role, rank, addresses, heartbeat_s, tls), daemon=True
        )
        self._process.start()
        lines.close()

    def __enter__(self) -> "Peer":
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        self._process.join()
        self._lines.close()

    def read_line(self) -> str:
        """Return the next line it says; "" when it has ended."""
        try:
            return str(self._lines.recv())
        except EOFError:
            return ""

    def kill(self) -> None:
        self._process.kill()

    def stop(self) -> None:
        assert self._process.pid is not None
        os.kill(self._process.pid, signal.SIGSTOP)


def main(
    lines: Connection,
    role: str,
    rank: int,
    addresses: list[str],
    heartbeat_s: float,
    tls: Tls | None,
) -> None:
    threading.Thread(target=end_with_parent, daemon=True).start()
    port = RingPort(
        addresses[rank],
        rank=rank,
        addresses=addresses,
        token=TOKEN,
        tls=tls,
        heartbeat_s=heartbeat_s,
    )
    if role == "hold":

        def hold(caller, body):
            lines.send("held")
            while caller.is_active():
                time.sleep(0.01)
            lines.send("gone")
            return b""

        port.handle("hold", hold)
        port.handle("echo", lambda caller, body: body)
        lines.send("ready")
        time.sleep(600)
    elif role == "caller":
        lines.send("ready")
        port.call(0, "hold", timeout_s=600)
    elif role.startswith("graceful-"):
        close_gracefully(
            lines, port, role.removeprefix("graceful-"), list(range(len(addresses))), heartbeat_s
        )
    else:  # a transport's name: reduce until something ends it
        reduce_on(lines, port, role, list(range(len(addresses))), heartbeat_s)


def reduce_on(
    lines: Connection, port: RingPort, transport: str, ranks: list[int], heartbeat_s: float
) -> None:
    torch.set_num_threads(1)
    wait_for_peers(port, ranks)
    ring = opened(transport, port, ranks, 1, heartbeat_s)
    lines.send("ready")
    while True:
        ring.all_reduce(torch.ones(250_000)).wait()


def close_gracefully(
    lines: Connection, port: RingPort, transport: str, ranks: list[int], heartbeat_s: float
) -> None:
    """Reduce once in each of ten generations and leave at once; say the sums, or what went wrong."""
    wait_for_peers(port, ranks)
    sums = []
    for generation in range(10):
        ring = opened(transport, port, ranks, generation, heartbeat_s)
        buffer = torch.ones(100_000)
        try:
            ring.all_reduce(buffer).wait()
        except Exception as error:
            lines.send(repr(error))
            raise
        ring.close()
        sums.append(float(buffer[-1]))
    lines.send(str(sums))
    time.sleep(600)  # until all have met and said so
