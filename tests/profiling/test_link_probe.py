"""Link probes over real sockets of the loopback: figures that hang together, and one line for every stranger."""

import queue
import socket
import threading
from collections.abc import Iterator

import pytest

from socflower.profiling.link_probe import MAGIC, ProbeServer, parse_peer, probe, serve
from tests.one_line import refused

HOST = "127.0.0.1"


@pytest.fixture
def server() -> Iterator[ProbeServer]:
    with ProbeServer(0, HOST) as running:
        yield running


def test_a_probe_measures_both_directions(server: ProbeServer) -> None:
    found = probe(HOST, server.port, stream_s=0.02)
    assert found.peer == f"{HOST}:{server.port}"
    assert 0 < found.round_trip_s < 5
    assert found.bytes_per_s == min(found.upload_bytes_per_s, found.download_bytes_per_s) > 0
    assert 0 <= found.message_s < 5


@pytest.mark.parametrize(
    "said",
    [
        b"",
        b"GET / HTTP/1.1\r\n\r\n",
        MAGIC[:5],
        MAGIC,
        MAGIC + b"X\0\0\0\1",
        MAGIC + b"E\xff\xff\xff\xff",
        MAGIC + b"E\0",
        MAGIC + b"U\0\0\0\1\xff\xff\xff\xff",
        MAGIC + b"D\0\0\0\1",
        b"\0" * 100_000,
    ],
)
def test_a_stranger_does_not_stop_the_server(server: ProbeServer, said: bytes) -> None:
    """Neither while it is connected, nor afterwards."""
    with socket.create_connection((HOST, server.port), timeout=60) as stranger:
        stranger.sendall(said)
        assert probe(HOST, server.port, stream_s=0.005).bytes_per_s > 0
    assert probe(HOST, server.port, stream_s=0.005).bytes_per_s > 0


def test_serve_answers_until_it_is_interrupted() -> None:
    ready: queue.Queue[int] = queue.Queue()
    threading.Thread(target=serve, args=(0, ready.put), daemon=True).start()
    assert probe(HOST, ready.get(timeout=60), stream_s=0.005).bytes_per_s > 0


def test_what_was_sent_comes_back_in_bounds(server: ProbeServer) -> None:
    with socket.create_connection((HOST, server.port), timeout=60) as peer:
        peer.sendall(MAGIC + b"E\0\0\0\3abc" + b"E\0\1\0\1")  # the second is one byte too long
        received = b""
        while part := peer.recv(1000):
            received += part
    assert received == MAGIC + b"abc"


def answering(*answers: bytes) -> int:
    """Run a server of one connection, which answers each message with the next one; return its port."""
    listener = socket.create_server((HOST, 0))

    def run() -> None:
        with listener:
            connection, _ = listener.accept()
            with connection:
                for answer in answers:
                    connection.recv(99)
                    connection.sendall(answer)

    threading.Thread(target=run, daemon=True).start()
    return listener.getsockname()[1]


@pytest.mark.parametrize(
    ("answers", "says"),
    [
        ((), "closed"),
        ((b"HTTP/1.1 400 Bad Request\r\n",), "answered"),
        ((b"socflower-link 2\n",), "answered"),
        ((MAGIC + b"x" * 8, b""), "other bytes"),
        ((MAGIC,), "closed"),
    ],
)
def test_a_peer_that_is_none_of_ours_is_named(answers: tuple[bytes, ...], says: str) -> None:
    port = answering(*answers)
    refused(lambda: probe(HOST, port, stream_s=0.005), f"--peer {HOST}:{port}", says)


def test_a_closed_server_answers_nobody() -> None:
    server = ProbeServer(0, HOST)
    server.close()
    server.wait()
    named = ("refused", f"`socflower profile --serve {server.port}`")
    refused(lambda: probe(HOST, server.port), *named)


def test_a_port_that_is_taken_is_named(server: ProbeServer) -> None:
    refused(lambda: ProbeServer(server.port, HOST), f"--serve {server.port}")


@pytest.mark.parametrize(
    ("text", "peer"),
    [
        ("there:80", ("there", 80)),
        ("10.0.0.1:65535", ("10.0.0.1", 65535)),
        ("[::1]:7", ("::1", 7)),
    ],
)
def test_peers(text: str, peer: tuple[str, int]) -> None:
    assert parse_peer(text) == peer


@pytest.mark.parametrize(
    "text", ["there", "there:", ":80", "there:0", "there:65536", "there:-1", "there:x", "", "a:²"]
)
def test_peers_that_cannot_be(text: str) -> None:
    refused(lambda: parse_peer(text), f"--peer {text}", "HOST:PORT")
