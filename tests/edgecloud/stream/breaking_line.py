"""A TCP line that can be cut, at a random byte or at will, and be down for a while."""

import random
import socket
import threading
from contextlib import suppress


class BreakingLine:
    """Listens at `port` and forwards to `target`; each connection breaks after some random number of bytes.

    `mean_bytes` 0 never breaks by itself. While `down`, connections are refused.
    """

    def __init__(self, target: int, *, seed: int = 0, mean_bytes: int = 0) -> None:
        self._target, self._random, self._mean_bytes = target, random.Random(seed), mean_bytes
        self.num_connections = 0
        self._down = threading.Event()
        self._lock = threading.Lock()
        self._open: set[socket.socket] = set()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def cut(self) -> None:
        """Break what is connected."""
        with self._lock:
            ends, self._open = self._open, set()
        for end in ends:
            _shut(end)

    def down(self) -> None:
        self._down.set()
        self.cut()

    def up(self) -> None:
        self._down.clear()

    def close(self) -> None:
        self.down()
        _shut(self._listener)

    def passed(self, content: bytes) -> bytes:
        """Return what arrives of some bytes, when they do; worse lines do worse."""
        return content

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            if self._down.is_set():
                near.close()
                continue
            try:
                far = socket.create_connection(("127.0.0.1", self._target), timeout=60)
            except OSError:
                near.close()
                continue
            far.settimeout(None)
            # Else every small write waits for the answer to the one before.
            for end in (near, far):
                end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self.num_connections += 1
            budget = [
                self._random.expovariate(1 / self._mean_bytes) if self._mean_bytes else float("inf")
            ]
            with self._lock:
                self._open |= {near, far}
            for source, sink in ((near, far), (far, near)):
                threading.Thread(
                    target=self._forward, args=(source, sink, budget), daemon=True
                ).start()

    def _forward(self, source: socket.socket, sink: socket.socket, budget: list[float]) -> None:
        try:
            while content := source.recv(4096):
                budget[0] -= len(content)
                if budget[0] < 0:
                    break
                sink.sendall(self.passed(content))
        except OSError:
            pass
        for end in (source, sink):
            with self._lock:
                self._open.discard(end)
            _shut(end)


def _shut(end: socket.socket) -> None:
    with suppress(OSError):
        end.shutdown(socket.SHUT_RDWR)
    end.close()
