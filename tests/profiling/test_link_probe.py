"""Link probes over real sockets of the loopback: figures that hang together, and one line for every stranger."""

import queue
import socket
import threading
from collections.abc import Callable, Iterator

import pytest

from socflower.errors import ConfigError
from socflower.profiling.link_probe import MAGIC, ProbeServer, parse_peer, probe, serve

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
    with socket.create_connection((HOST, server.port), timeout=5) as stranger:
        stranger.sendall(said)
    assert probe(HOST, server.port, stream_s=0.005).bytes_per_s > 0


def test_a_silent_stranger_does_not_keep_others_waiting(server: ProbeServer) -> None:
    with socket.create_connection((HOST, server.port), timeout=5):
        assert probe(HOST, server.port, stream_s=0.005).bytes_per_s > 0


def test_serve_answers_until_it_is_interrupted() -> None:
    ready: queue.Queue[int] = queue.Queue()
    threading.Thread(target=serve, args=(0, ready.put), daemon=True).start()
    assert probe(HOST, ready.get(timeout=10), stream_s=0.005).bytes_per_s > 0


def test_what_was_sent_comes_back_in_bounds(server: ProbeServer) -> None:
    with socket.create_connection((HOST, server.port), timeout=5) as peer:
        peer.sendall(MAGIC + b"E\0\0\0\3abc" + b"E\0\1\0\1")  # the second is one byte too long
        received = b""
        while part := peer.recv(1000):
            received += part
    assert received == MAGIC + b"abc"


def answering(answer: Callable[[socket.socket], object]) -> tuple[int, threading.Thread]:
    """Run a server of one connection; return its port."""
    listener = socket.create_server((HOST, 0))

    def run() -> None:
        with listener:
            connection, _ = listener.accept()
            with connection:
                answer(connection)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return listener.getsockname()[1], thread


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        (lambda connection: None, "the connection was closed"),
        (
            lambda connection: (
                connection.recv(99) and connection.sendall(b"HTTP/1.1 400 Bad Request\r\n")
            ),
            "answered something else",
        ),
        (
            lambda connection: connection.recv(99) and connection.sendall(b"socflower-link 2\n"),
            "answered something else",
        ),
        (
            lambda connection: (
                (connection.recv(99) and connection.sendall(MAGIC + b"x" * 8))
                or connection.recv(99)
            ),
            "sent back other bytes than it got",
        ),
        (
            lambda connection: connection.recv(99) and connection.sendall(MAGIC),
            "the connection was closed",
        ),
    ],
)
def test_a_peer_that_is_none_of_ours_is_named(
    answer: Callable[[socket.socket], object], says: str
) -> None:
    port, thread = answering(answer)
    with pytest.raises(ConfigError, match=says) as caught:
        probe(HOST, port, stream_s=0.005)
    assert f"--peer {HOST}:{port}" in str(caught.value) and "\n" not in str(caught.value)
    thread.join(5)


def test_nobody_there_is_named() -> None:
    with socket.create_server((HOST, 0)) as free:
        port = free.getsockname()[1]
    with pytest.raises(
        ConfigError, match="the connection was refused; run `socflower profile --serve"
    ):
        probe(HOST, port)


def test_a_port_that_is_taken_is_named(server: ProbeServer) -> None:
    with pytest.raises(ConfigError, match=f"--serve {server.port}: cannot listen"):
        ProbeServer(server.port, HOST)
    with pytest.raises(ConfigError, match="--serve 70000: a port is a number of 0 to 65535"):
        ProbeServer(70000)


def test_a_closed_server_answers_nobody() -> None:
    server = ProbeServer(0, HOST)
    port = server.port
    server.close()
    server.wait()
    with pytest.raises(ConfigError, match="the connection was refused"):
        probe(HOST, port)


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
    with pytest.raises(ConfigError, match="write HOST:PORT"):
        parse_peer(text)
