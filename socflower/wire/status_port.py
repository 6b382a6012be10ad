"""A port for operators: `/metrics` for Prometheus, `/healthz`, `/readyz`, and `/status` as JSON.

The text format of metrics is that of Prometheus, version 0.0.4. The port only answers GET, has no password, and tells
nothing secret; it refuses addresses that are neither loopback nor private.
"""

import json
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from socflower.errors import ConfigError
from socflower.wire.http_server import HttpHandler, HttpServer
from socflower.wire.logs import Log, warn
from socflower.wire.secure_channel import Address

_REQUEST_TIMEOUT_S = 5.0
_TEXT = "text/plain; version=0.0.4; charset=utf-8"


@dataclass(frozen=True, kw_only=True, slots=True)
class Metric:
    """A metric of `/metrics`; its name has the unit, and a counter ends in `_total`."""

    name: str
    help: str
    # By the labels in braces, such as '{group="3"}'; "" has none. None values are left out.
    values: Mapping[str, float | None]

    def lines(self) -> list[str]:
        """Return its lines in Prometheus' text format; none without a value."""
        known = {labels: value for labels, value in self.values.items() if value is not None}
        if not known:
            return []
        name = f"socflower_{self.name}"
        kind = "counter" if name.endswith("_total") else "gauge"
        return [
            f"# HELP {name} {self.help}",
            f"# TYPE {name} {kind}",
            *(f"{name}{labels} {float(value)!r}" for labels, value in known.items()),
        ]


def metric(name: str, help: str, value: float | None) -> Metric:
    """Return a metric without labels."""
    return Metric(name=name, help=help, values={"": value})


def label(name: str, value: object) -> str:
    """Return the braces of one label, with the value escaped."""
    text = str(value).replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'{{{name}="{text}"}}'


@dataclass(frozen=True, kw_only=True, slots=True)
class PortState:
    """What the port answers with."""

    # The answer of `/status`.
    document: Mapping[str, Any]
    metrics: Sequence[Metric] = ()
    # Why `/readyz` answers 503; "" if it is ready.
    not_ready: str = ""
    # Why `/healthz` answers 503; "" if it is healthy.
    fault: str = field(default="")


class StatusPort:
    """Answers at `address` (host:port, port 0 for a free one) while it is entered; `read` returns the state.

    `log_line` gets a line a minute about a host that holds too many connections. Raises `ConfigError` for an address
    that is public, malformed, or in use.
    """

    def __init__(
        self, address: str, read: Callable[[], PortState], *, log_line: Log = warn
    ) -> None:
        self._wanted, self._read, self._log_line = self.check(address), read, log_line

    @staticmethod
    def check(text: str) -> Address:
        """Return the address; `ConfigError` if it is malformed or public."""
        address = Address.parse(text, "--metrics")
        address.require_private(
            "the port has no password; give a private address of this machine, or put a proxy before it"
        )
        return address

    def __enter__(self) -> "StatusPort":
        """Begin to listen."""
        if self._wanted.port and (taken := self._wanted.why_taken()):
            raise ConfigError(f"{taken}; choose another port")
        self._server = _Server(self._wanted, self._read, self._log_line)
        threading.Thread(
            target=self._server.serve_forever,
            kwargs={"poll_interval": 0.1},
            name="status-port",
            daemon=True,
        ).start()
        return self

    @property
    def address(self) -> str:
        """The address at which it listens."""
        return str(Address(self._wanted.host, self._server.server_port))

    def __exit__(self, *_: object) -> None:
        """Release the port."""
        self._server.shutdown()
        self._server.server_close()


class _Server(HttpServer):
    def __init__(self, address: Address, read: Callable[[], PortState], log_line: Log) -> None:
        self.read = read
        super().__init__(address.host, address.port, _Handler, "status port", log_line)


class _Handler(HttpHandler):
    server: _Server
    timeout = _REQUEST_TIMEOUT_S

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        if path not in ("/metrics", "/healthz", "/readyz", "/status"):
            self.reply(404, "there are /metrics, /healthz, /readyz and /status\n")
            return
        state = self.server.read()
        if path == "/metrics":
            lines = [line for each in state.metrics for line in each.lines()]
            self.reply(200, "".join(f"{line}\n" for line in lines), _TEXT)
        elif path == "/status":
            self.reply(200, json.dumps(state.document) + "\n", "application/json")
        else:
            problem = state.fault if path == "/healthz" else state.fault or state.not_ready
            self.reply(503 if problem else 200, f"{problem or 'ok'}\n")
