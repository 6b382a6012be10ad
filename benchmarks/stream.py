"""Messages over a lane of the peers' stream against a bare stream of gRPC with the same options, between two processes.

A lane numbers its messages, keeps them until the other end has used them, resumes after a broken connection, and
authenticates every message; the bare stream does none of this. Both take turns over loopback with messages of one size;
a figure is the median of the turns, a ratio the median of the turns' ratios. The sum of what arrives is checked.
"""

import statistics
import sys
import time
from collections.abc import Callable, Iterator

import grpc
import numpy as np

from benchmarks.harness import Row
from benchmarks.processes import LineProcess
from socflower.allocator import keep_freed_memory
from socflower.engines.deployment.flower_processes import free_ports
from socflower.peers.transports.lanes import Lanes
from socflower.peers.transports.port import CALL_LIMIT_BYTES, RingPort
from socflower.wire.secure_channel import Address, bind_server, open_channel

_TOKEN = b"0123456789abcdef" * 2
_HEARTBEAT_S = 10.0
_TURN_BYTES = 64 << 20


class _Bare(grpc.GenericRpcHandler):
    """A service whose calls are streams of bytes that are summed; the answer is the sum."""

    def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler:
        return grpc.stream_unary_rpc_method_handler(
            lambda messages, context: str(sum(map(_total, messages))).encode()
        )


def _total(message: bytes | memoryview) -> float:
    return float(np.frombuffer(message, np.float32).sum(dtype=np.float64))


def _lanes(rank: int, addresses: list[str]) -> tuple[RingPort, Lanes]:
    # As in a process that trains.
    keep_freed_memory()
    port = RingPort(
        addresses[rank],
        rank=rank,
        addresses=addresses,
        token=_TOKEN,
        tls=None,
        heartbeat_s=_HEARTBEAT_S,
    )
    return port, Lanes(port, "bench", [0, 1], 1, _HEARTBEAT_S, accepts=lambda rank, lane: True)


def receive(addresses: list[str], bare: str) -> None:
    """Serve both streams; for each line of input, sum that many messages of the lane and write the sum."""
    port, lanes = _lanes(1, addresses)
    server = bind_server(
        Address.parse(bare),
        None,
        [_Bare()],
        interceptors=[],
        num_threads=4,
        heartbeat_s=_HEARTBEAT_S,
        max_message_bytes=CALL_LIMIT_BYTES,
        bind_timeout_s=_HEARTBEAT_S,
    )
    server.start()
    print("ready", flush=True)
    for line in sys.stdin:
        print(sum(_total(lanes.receive(0, 0)) for _ in range(int(line))), flush=True)
    lanes.close(graceful=True)
    port.close()
    server.stop(0.0)


def run(quick: bool = False) -> list[Row]:
    """Return rows of the throughput in MB/s for messages of several sizes."""
    addresses = [f"127.0.0.1:{number}" for number in free_ports(3)]
    far = LineProcess("benchmarks.stream", *addresses)
    far.read()
    port, lanes = _lanes(0, addresses[:2])
    with open_channel(
        addresses[2], None, heartbeat_s=_HEARTBEAT_S, max_message_bytes=CALL_LIMIT_BYTES
    ) as channel:
        bare = channel.stream_unary("/bench/sum")
        rows = [
            _compare(size, 3 if quick else 15, lanes, far, bare)
            for size in (1 << 14, 1 << 18, 1 << 20)
        ]
    lanes.close(graceful=True)
    port.close()
    far.end()
    return rows


def _compare(
    size: int,
    turns: int,
    lanes: Lanes,
    far: LineProcess,
    bare: Callable[[Iterator[bytes]], bytes],
) -> Row:
    """Time both streams in turns; the first turn warms up."""
    num_messages = _TURN_BYTES // size
    body = np.ones(size // 4, np.float32).tobytes()
    own, peer, right = [], [], True
    for _ in range(turns + 1):
        began_s = time.perf_counter()
        far.write(str(num_messages))
        for _ in range(num_messages):
            lanes.send(1, 0, memoryview(body))
        right &= float(far.read()) == _TURN_BYTES / 4
        own.append(_TURN_BYTES / (time.perf_counter() - began_s) / 1e6)
        began_s = time.perf_counter()
        right &= float(bare(iter([body] * num_messages))) == _TURN_BYTES / 4
        peer.append(_TURN_BYTES / (time.perf_counter() - began_s) / 1e6)
    ratios = [ours / theirs for ours, theirs in zip(own[1:], peer[1:], strict=True)]
    return Row(
        case=f"messages of {size >> 10} KiB",
        ours=statistics.median(own[1:]),
        peer="a bare stream of gRPC",
        peer_value=statistics.median(peer[1:]),
        unit="MB/s",
        ratio=statistics.median(ratios),
        ok=right,
    )


if __name__ == "__main__":
    receive(sys.argv[1:3], sys.argv[3])
