"""A small HTTP server in threads, for the ports of operators and of devices' users."""

import socket
import socketserver
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class HttpServer(ThreadingHTTPServer):
    """Answers each request in a daemon thread."""

    daemon_threads = True
    # A request that hangs must not delay the end of the process, or of a message.
    block_on_close = False

    def __init__(self, host: str, port: int, handler: type["HttpHandler"]) -> None:
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        super().__init__((host, port), handler)

    def server_bind(self) -> None:
        """Bind without looking up the host's name, which takes seconds if no name server answers."""
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = (
            str(self.server_address[0]),
            int(self.server_address[1]),
        )

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
