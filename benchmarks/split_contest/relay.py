"""The link: `python -m benchmarks.split_contest.relay HOST:PORT EDGE` forwards TCP at a set rate each way.

It is a separate process, so that shaping takes no processor time of the ends. It writes its address first; a line
`rate BYTES_PER_S` sets the rate of each direction (0: no limit) and is answered once it applies. All connections share
a token bucket for each direction. Only a chunk and the sockets' small buffers wait here: TCP stops a sender that is
faster than the link, and further bytes stay in the sender's buffers. `EDGE` is the edge's processor, on which the relay
only wakes up (`_pulse`).
"""

import contextlib
import os
import socket
import sys
import threading
import time
from collections.abc import Callable

from socflower.edgecloud.links.bandwidth_profile import Direction, constant
from socflower.edgecloud.links.shaping import TokenBucket
from socflower.wire.secure_channel import Address

BUFFER_BYTES = 256 << 10
"""Of a socket that is read here; enough for a reader or writer that is 2 ms late at 1 Gbit/s."""

_CHUNK_S, _LEAST_CHUNK_BYTES, _MOST_CHUNK_BYTES = 0.002, 1448, 64 << 10
_LATE_S = 0.004
"""For how long a bucket may catch up, since a thread that sleeps wakes up late."""
_PULSE_S = 0.00025


class Relay:
    """Forwards every connection to `address` to a target, in both directions; a context.

    `bucket` builds the limit of a direction from a rate in bytes per second.
    """

    def __init__(
        self, target: str, bucket: Callable[[Direction, float], TokenBucket] | None = None
    ) -> None:
        self._target = Address.parse(target, "relay: target")
        self._bucket = bucket or _bucket
        self._buckets: dict[Direction, TokenBucket | None] = {"up": None, "down": None}
        self._chunk_bytes = _MOST_CHUNK_BYTES
        self._sockets: list[socket.socket] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        # Accepted sockets inherit this option.
        self._listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, BUFFER_BYTES)
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def __enter__(self) -> "Relay":
        return self

    def __exit__(self, *_: object) -> None:
        self.set_rate(0.0)
        for each in (self._listener, *self._sockets):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()

    def set_rate(self, bytes_per_s: float) -> None:
        """Limit each direction to a rate from now on; 0 removes the limit."""
        old = [bucket for bucket in self._buckets.values() if bucket is not None]
        self._chunk_bytes = (
            _MOST_CHUNK_BYTES
            if not bytes_per_s
            else round(min(_MOST_CHUNK_BYTES, max(_LEAST_CHUNK_BYTES, _CHUNK_S * bytes_per_s)))
        )
        directions: tuple[Direction, Direction] = ("up", "down")
        self._buckets = {
            direction: self._bucket(direction, bytes_per_s) if bytes_per_s else None
            for direction in directions
        }
        for bucket in old:
            bucket.close()

    def _accept(self) -> None:
        # The listener raises when it is closed.
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                try:
                    far = self._dial()
                except OSError:
                    near.close()
                    continue
                for each in (near, far):
                    each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                    each.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, BUFFER_BYTES)
                    self._sockets.append(each)
                for source, sink, direction in ((near, far, "up"), (far, near, "down")):
                    threading.Thread(
                        target=self._forward, args=(source, sink, direction), daemon=True
                    ).start()

    def _dial(self) -> socket.socket:
        far = socket.socket()
        far.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, BUFFER_BYTES)
        try:
            far.connect((self._target.host, self._target.port))
        except OSError:
            far.close()
            raise
        return far

    def _forward(self, source: socket.socket, sink: socket.socket, direction: Direction) -> None:
        """Forward one direction until its end, and pass that on after the last byte."""
        buffer = memoryview(bytearray(_MOST_CHUNK_BYTES))
        try:
            while num_bytes := source.recv_into(buffer, self._chunk_bytes):
                bucket = self._buckets[direction]
                if bucket is not None:
                    # A bucket that a new rate has replaced does not wait.
                    bucket.wait(num_bytes)
                sink.sendall(buffer[:num_bytes])
            sink.shutdown(socket.SHUT_WR)
        except OSError:
            # One end is gone, so the connection to the other is closed.
            for each in (source, sink):
                with contextlib.suppress(OSError):
                    each.shutdown(socket.SHUT_RDWR)


def _bucket(direction: Direction, bytes_per_s: float) -> TokenBucket:
    burst_bytes = _MOST_CHUNK_BYTES + round(_LATE_S * bytes_per_s)
    return TokenBucket(constant(bytes_per_s, bytes_per_s), direction, burst_bytes=burst_bytes)


def _pulse(processor: int) -> None:
    """Wake up often on a processor.

    The kernel updates a group's use of its quota when processes switch and at its tick of 4 ms. Frequent switches on
    the edge's processor make the edge slow, instead of fast for 4 ms and halted for 36 ms.
    """
    # Of this thread alone.
    os.sched_setaffinity(0, [processor])
    while True:
        time.sleep(_PULSE_S)


def main() -> int:
    """Relay until the input ends."""
    # A link does not wait for a processor; only root may set this.
    with contextlib.suppress(OSError):
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
    threading.Thread(target=_pulse, args=(int(sys.argv[2]),), daemon=True).start()
    with Relay(sys.argv[1]) as relay:
        print(relay.address, flush=True)
        for line in sys.stdin:
            relay.set_rate(float(line.split()[1]))
            print("set", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
