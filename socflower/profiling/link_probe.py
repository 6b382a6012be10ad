"""Measurement of the link to another machine over plain TCP: `serve` answers there, `probe` measures here.

Both ends first send `MAGIC`. Then the prober sends requests: a letter and a big-endian number of four bytes.

| request | answer |
| --- | --- |
| E n, n bytes | the same bytes |
| U n, then chunks for n milliseconds | their total size |
| D n | chunks for n milliseconds |

All sizes are bounded, and no data is kept.
"""

import os
import socket
import statistics
import struct
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from socflower.errors import ConfigError

MAGIC = b"socflower-link 1\n"
PING_BYTES = 8
MESSAGE_BYTES = 4096
NUM_MESSAGES = 50
STREAM_S = 1.0

_CHUNK_BYTES = 1 << 16
_MAX_STREAM_S = 10.0
_TIMEOUT_S = 5.0
_MAX_CONNECTIONS = 8
_REQUEST = struct.Struct(">cI")
_SIZE = struct.Struct(">I")
_SUM = struct.Struct(">Q")


@dataclass(frozen=True, kw_only=True, slots=True)
class LinkFigures:
    """The measured figures of a link, as seen from this machine."""

    peer: str
    # The median of messages of 8 bytes.
    round_trip_s: float
    upload_bytes_per_s: float
    download_bytes_per_s: float
    # Handling of one small message, without the time of its bytes.
    message_s: float

    @property
    def bytes_per_s(self) -> float:
        """The rate of the slower direction, since a cluster's links have one rate for both."""
        return min(self.upload_bytes_per_s, self.download_bytes_per_s)


class ProbeServer:
    """Answers probes in its own threads until it is closed; port 0 takes any free port."""

    def __init__(self, port: int, host: str = "") -> None:
        try:
            self._listener = socket.create_server((host, port))
        except OSError as error:
            reason = error.strerror or error
            raise ConfigError(
                f"--serve {port}: cannot listen ({reason}); use another port"
            ) from None
        self.port = int(self._listener.getsockname()[1])
        self._free = threading.BoundedSemaphore(_MAX_CONNECTIONS)
        self._thread = threading.Thread(target=self._accept, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop answering."""
        # Wakes accept(), which close() alone does not; not all systems can shut a listener down.
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def wait(self) -> None:
        """Return when the server has been closed."""
        while self._thread.is_alive():
            self._thread.join(0.5)

    def __enter__(self) -> "ProbeServer":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                if self._listener.fileno() == -1:
                    return
                # Such as too many open files: retry without busy waiting.
                time.sleep(0.1)
                continue
            if not self._free.acquire(blocking=False):
                connection.close()
                continue
            threading.Thread(target=self._answer, args=(connection,), daemon=True).start()

    def _answer(self, connection: socket.socket) -> None:
        try:
            # An unknown or disconnected peer must not affect the next one.
            with connection, suppress(OSError, EOFError, ValueError):
                _prepare(connection)
                _answer_requests(connection)
        finally:
            self._free.release()


def serve(port: int, on_ready: Callable[[int], None]) -> None:
    """Answer probes on a port until interrupted; `on_ready` gets the port. Raises what `ProbeServer` does."""
    with ProbeServer(port) as server:
        on_ready(server.port)
        server.wait()


def parse_peer(text: str) -> tuple[str, int]:
    """Return host and port of HOST:PORT; an IPv6 address is in brackets."""
    host, _, port = text.rpartition(":")
    if not host or not port.isascii() or not port.isdigit() or not 1 <= int(port) <= 65535:
        raise ConfigError(f"--peer {text}: write HOST:PORT, as in --peer 192.168.1.7:5201")
    return host.removeprefix("[").removesuffix("]"), int(port)


def probe(host: str, port: int, *, stream_s: float = STREAM_S) -> LinkFigures:
    """Measure the link to a machine that runs `serve`; raises `ConfigError` if that fails.

    The round trip is the median of small messages. Rates are of a stream of `stream_s` in each direction, up to the
    arrival of its last byte. The time of a message is half the median round trip of 4 KB, less its bytes at the slower
    rate, and at least 0.
    """
    peer = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    try:
        with socket.create_connection((host, port), timeout=_TIMEOUT_S) as connection:
            _prepare(connection)
            connection.sendall(MAGIC)
            if _receive(connection, len(MAGIC)) != MAGIC:
                raise ValueError("answered something else")
            round_trip_s = _round_trip_s(connection, PING_BYTES)
            upload = _upload_bytes_per_s(connection, stream_s, round_trip_s)
            download = _download_bytes_per_s(connection, stream_s)
            half_trip_s = _round_trip_s(connection, MESSAGE_BYTES) / 2
    except (OSError, EOFError, ValueError) as error:
        raise ConfigError(f"--peer {peer}: {_reason(error, port)}") from None
    bytes_s = MESSAGE_BYTES / min(upload, download)
    return LinkFigures(
        peer=peer,
        round_trip_s=round_trip_s,
        upload_bytes_per_s=upload,
        download_bytes_per_s=download,
        message_s=max(0.0, half_trip_s - bytes_s),
    )


def _reason(error: Exception, port: int) -> str:
    """Return the cause and the remedy of a failed probe."""
    remedy = f"run `socflower profile --serve {port}`, of the same version, on that machine"
    if isinstance(error, ConnectionRefusedError):
        return f"the connection was refused; {remedy}"
    if isinstance(error, TimeoutError):
        return f"no answer within {_TIMEOUT_S:g} s; {remedy}"
    if isinstance(error, EOFError | ConnectionError):
        return f"the connection was closed; {remedy}"
    if isinstance(error, UnicodeError | OSError):
        reason = getattr(error, "strerror", None) or error
        return f"cannot be reached ({reason}); check host and port"
    return f"{error}; {remedy}"


def _prepare(connection: socket.socket) -> None:
    connection.settimeout(_TIMEOUT_S)
    # Send small messages at once.
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def _answer_requests(connection: socket.socket) -> None:
    if _receive(connection, len(MAGIC)) != MAGIC:
        return
    connection.sendall(MAGIC)
    while True:
        request, number = _REQUEST.unpack(_receive(connection, _REQUEST.size))
        if request == b"E" and number <= _CHUNK_BYTES:
            connection.sendall(_receive(connection, number))
        elif request == b"U":
            connection.sendall(_SUM.pack(_receive_stream(connection)))
        elif request == b"D":
            _send_stream(connection, number / 1000)
        else:
            return


def _round_trip_s(connection: socket.socket, num_bytes: int) -> float:
    seconds = []
    for _ in range(NUM_MESSAGES):
        message = os.urandom(num_bytes)
        start_s = time.perf_counter()
        connection.sendall(_REQUEST.pack(b"E", num_bytes) + message)
        answer = _receive(connection, num_bytes)
        seconds.append(time.perf_counter() - start_s)
        if answer != message:
            raise ValueError("sent back other bytes than it got")
    return statistics.median(seconds)


def _upload_bytes_per_s(connection: socket.socket, stream_s: float, round_trip_s: float) -> float:
    start_s = time.perf_counter()
    connection.sendall(_REQUEST.pack(b"U", round(1000 * stream_s)))
    sent = _send_stream(connection, stream_s)
    (arrived,) = _SUM.unpack(_receive(connection, _SUM.size))
    if arrived != sent:
        raise ValueError(f"counted {arrived} bytes of {sent}")
    # The last byte takes half a round trip to arrive, and the answer another half.
    return sent / max(time.perf_counter() - start_s - round_trip_s, 1e-6)


def _download_bytes_per_s(connection: socket.socket, stream_s: float) -> float:
    connection.sendall(_REQUEST.pack(b"D", round(1000 * stream_s)))
    # The clock starts with the stream, not with the request.
    first = _receive(connection, 1)
    start_s = time.perf_counter()
    return _receive_stream(connection, first) / max(time.perf_counter() - start_s, 1e-6)


def _send_stream(connection: socket.socket, seconds: float) -> int:
    """Send chunks for `seconds`, at least one, and the empty chunk at the end; return the total bytes."""
    chunk = _SIZE.pack(_CHUNK_BYTES) + bytes(_CHUNK_BYTES)
    end_s = time.perf_counter() + min(seconds, _MAX_STREAM_S)
    sent = 0
    while not sent or time.perf_counter() < end_s:
        connection.sendall(chunk)
        sent += _CHUNK_BYTES
    connection.sendall(_SIZE.pack(0))
    return sent


def _receive_stream(connection: socket.socket, begun: bytes = b"") -> int:
    """Receive chunks up to the empty one; return the total bytes. `begun` was read before."""
    arrived = 0
    buffer = bytearray(_CHUNK_BYTES)
    end_s = time.perf_counter() + _MAX_STREAM_S + _TIMEOUT_S
    while True:
        (size,) = _SIZE.unpack(begun + _receive(connection, _SIZE.size - len(begun)))
        begun = b""
        if size == 0:
            return arrived
        if size > _CHUNK_BYTES or time.perf_counter() > end_s:
            raise ValueError(f"sent a chunk of {size} bytes, or for too long")
        _receive_into(connection, memoryview(buffer)[:size])
        arrived += size


def _receive(connection: socket.socket, num_bytes: int) -> bytes:
    buffer = bytearray(num_bytes)
    _receive_into(connection, memoryview(buffer))
    return bytes(buffer)


def _receive_into(connection: socket.socket, view: memoryview) -> None:
    """Fill `view`; raises `EOFError` if the other end closes, `TimeoutError` if it is silent or too slow."""
    end_s = time.perf_counter() + _TIMEOUT_S
    while view:
        if time.perf_counter() > end_s:
            raise TimeoutError
        received = connection.recv_into(view)
        if not received:
            raise EOFError
        view = view[received:]
