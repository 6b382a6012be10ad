"""The benchmark's link: bytes pass unchanged and in full, at the rate of each direction, and senders are held back."""

import hashlib
import select
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from benchmarks.split_contest.relay import Relay
from socflower.edgecloud.links.bandwidth_profile import Direction, constant
from socflower.edgecloud.links.shaping import TokenBucket

_NOISE = hashlib.shake_256(b"relay").digest(1 << 20)


class _VirtualTime:
    """A clock that moves only while someone waits."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def clock(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds

    def bucket(self, direction: Direction, bytes_per_s: float) -> TokenBucket:
        return TokenBucket(
            constant(bytes_per_s, bytes_per_s), direction, clock=self.clock, sleep=self.sleep
        )


@contextmanager
def _server(answer: bytes = b"") -> Iterator[tuple[str, list[bytes]]]:
    """Yield an address and what each connection to it has sent; it answers after the end of that."""
    heard: list[bytes] = []
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            while True:
                try:
                    with listener.accept()[0] as connection:
                        heard.append(_read(connection))
                        connection.sendall(answer)
                except OSError:
                    return

        threading.Thread(target=serve, daemon=True).start()
        yield f"127.0.0.1:{listener.getsockname()[1]}", heard
        listener.shutdown(socket.SHUT_RDWR)


def _read(connection: socket.socket) -> bytes:
    content = bytearray()
    while part := connection.recv(1 << 18):
        content += part
    return bytes(content)


def _ask(address: str, content: bytes) -> bytes:
    host, port = address.split(":")
    with socket.create_connection((host, int(port)), timeout=60) as connection:
        connection.sendall(content)
        connection.shutdown(socket.SHUT_WR)
        return _read(connection)


@pytest.mark.parametrize("bytes_per_s", [0.0, 40e6])
def test_what_is_sent_arrives_unchanged_and_in_full_though_the_sender_has_closed(
    bytes_per_s: float,
) -> None:
    with _server(answer=_NOISE[::-1]) as (target, heard), Relay(target) as relay:
        relay.set_rate(bytes_per_s)
        assert _ask(relay.address, _NOISE) == _NOISE[::-1]
        assert _ask(relay.address, b"") == _NOISE[::-1]
        assert heard == [_NOISE, b""]


@pytest.mark.parametrize("mbit_per_s", [2, 5, 10, 20, 50, 100, 200, 500, 1000])
def test_each_direction_has_its_rate(mbit_per_s: int) -> None:
    """In virtual time, since the machine's own may be short."""
    time, rate = _VirtualTime(), mbit_per_s * 1e6 / 8
    sent = (_NOISE * 16)[: round(0.1 * rate)]
    with _server(answer=sent) as (target, heard), Relay(target, time.bucket) as relay:
        relay.set_rate(rate)
        assert _ask(relay.address, sent) == sent and heard == [sent]
        assert time.now_s == pytest.approx(0.2, rel=0.02)  # one direction after the other


def test_a_sender_that_is_faster_than_the_link_is_held_back() -> None:
    with _server() as (target, heard), Relay(target) as relay:
        relay.set_rate(1000.0)
        host, port = relay.address.split(":")
        with socket.create_connection((host, int(port))) as connection:
            connection.setblocking(False)
            num_bytes = 0
            while select.select([], [connection], [], 0.2)[1]:
                num_bytes += connection.send(_NOISE)
                assert num_bytes < 64 << 20
        assert heard == []


def test_a_new_rate_holds_at_once() -> None:
    with _server() as (target, heard), Relay(target) as relay:
        relay.set_rate(1.0)
        host, port = relay.address.split(":")
        with socket.create_connection((host, int(port))) as connection:
            connection.sendall(_NOISE[: 1 << 16])
            relay.set_rate(0.0)
            connection.shutdown(socket.SHUT_WR)
            assert _read(connection) == b""
        assert heard == [_NOISE[: 1 << 16]]


def test_without_a_target_a_connection_ends() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        target = f"127.0.0.1:{taken.getsockname()[1]}"
    with Relay(target) as relay:
        host, port = relay.address.split(":")
        with socket.create_connection((host, int(port)), timeout=60) as connection:
            assert _read(connection) == b""
