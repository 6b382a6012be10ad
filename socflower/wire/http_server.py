"""A small HTTP server in threads, for the ports of operators and of devices' users."""

import socket
import socketserver
import sys
import threading
from collections import deque
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from socflower.wire.logs import Log, RefusalLog

# One more closes the oldest, so that half-open connections keep neither threads nor an operator's request.
_MOST_CONNECTIONS = 16


class HttpServer(ThreadingHTTPServer):
    """Answers each request in a daemon thread.

    `log_line` gets a line a minute about each host that holds too many connections; `what` names the server there.
    """

    daemon_threads = True
    # Connections that wait to be accepted: with a full queue the kernel drops new ones, which retry after a second.
    request_queue_size = 128
    # A request that hangs must not delay the end of the process, or of a message.
    block_on_close = False

    def __init__(
        self, host: str, port: int, handler: type["HttpHandler"], what: str, log_line: Log
    ) -> None:
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._what = what
        self._evictions = RefusalLog(log_line, what=what, lines_per_period=1)
        self._lock, self._open = threading.Lock(), deque[tuple[Any, str]]()
        super().__init__((host, port), handler)

    def server_bind(self) -> None:
        """Bind without looking up the host's name, which takes seconds if no name server answers."""
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = (
            str(self.server_address[0]),
            int(self.server_address[1]),
        )

    def process_request(self, request: Any, client_address: Any) -> None:
        """Answer in a thread of its own; with too many, the oldest connection is closed, which ends its thread."""
        evicted = ""
        with self._lock:
            if len(self._open) >= _MOST_CONNECTIONS:
                oldest, evicted = self._open.popleft()
                with suppress(OSError):
                    oldest.shutdown(socket.SHUT_RDWR)
            self._open.append((request, f"{client_address[0]}:{client_address[1]}"))
        if evicted:
            what = (
                f"{self._what}: closed a connection of {evicted}, the oldest of {_MOST_CONNECTIONS}"
            )
            self._evictions.report(evicted, f"{what} without a request; others are answered")
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        """Close a connection."""
        with self._lock:
            self._open = deque(each for each in self._open if each[0] is not request)
        super().shutdown_request(request)

    def server_close(self) -> None:
        """Release the port, and log how many connections were closed."""
        super().server_close()
        self._evictions.flush(everything=True)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore broken connections, which their client notices."""
        if not isinstance(sys.exception(), OSError):
            super().handle_error(request, client_address)


class HttpHandler(BaseHTTPRequestHandler):
    """Replies with a whole text, and logs nothing: requests come every few seconds, or have visible effects."""

    def reply(self, status: int, text: str, kind: str = "text/plain; charset=utf-8") -> None:
        """Send a text."""
        body = text.encode()
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing."""
