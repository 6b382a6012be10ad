"""Reports refused calls at a ring port, and unidentified connections, which never make a call.

gRPC closes the latter without notice, so they are found in the kernel's connection table, which has open connections
and, for a minute, those that gRPC has closed. A connection is unidentified if its other end did not make a call, not
even a refused one, within some seconds. Connections that open and close between two polls are not detected, nor any on
platforms without /proc/net/tcp.
"""

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from ipaddress import IPv6Address, ip_address
from logging import WARNING
from urllib.parse import unquote

from socflower.wire.logs import Log, RefusalLog, log

_LINES_PER_MINUTE = 3


def warn(line: str) -> None:
    """Log a line as Flower's warnings."""
    log(WARNING, line)


class RingRefusals:
    """Reports refusals through `log_line`; thread-safe."""

    def __init__(self, log_line: Log = warn, clock: Callable[[], float] = time.monotonic) -> None:
        self._log = RefusalLog(log_line, what="ring port", lines_per_period=_LINES_PER_MINUTE, clock=clock)

    def report(self, peer: str, what: str) -> None:
        """Log that `what` of `peer` (an address, with or without a port) was refused, subject to a rate limit."""
        self._log.report(peer, f"ring port: refused {what} from {peer}; the run is unharmed")

    def close(self) -> None:
        """Log the number of refusals that were not logged one by one."""
        self._log.flush(everything=True)


_POLL_INTERVAL_S = 1.0
_CALL_TIMEOUT_S = 3.0


class UnidentifiedConnectionWatch:
    """Reports each unidentified connection once, by `report(address)` from a thread, until it is closed."""

    def __init__(self, port: int, report: Callable[[str], object]) -> None:
        self._port = port
        self._report = report
        self._callers: set[str] = set()
        self._lock = threading.Lock()
        # Connections of the previous process on this port remain in the table for a while.
        self._seen_s: dict[str, float] = dict.fromkeys(_other_ends(port), float("inf"))
        self._closed = threading.Event()
        threading.Thread(target=self._watch, name="ring-connection-watch", daemon=True).start()

    def on_call(self, peer: str) -> None:
        """Record the peer of a call, in gRPC's notation: ipv4:10.0.0.3:50000."""
        host, _, port = unquote(peer).partition(":")[2].rpartition(":")
        with self._lock:
            self._callers.add(f"{host.strip('[]')}:{port}")

    def close(self) -> None:
        """Stop the watch; may be called twice."""
        self._closed.set()

    def _watch(self) -> None:
        while not self._closed.wait(_POLL_INTERVAL_S):
            now_s = time.monotonic()
            present = set(_other_ends(self._port))
            with self._lock:
                # Closed connections are removed, since their ports may be reused.
                self._callers -= self._seen_s.keys() - present
                callers = set(self._callers)
            self._seen_s = {end: self._seen_s.get(end, now_s) for end in present}
            for end, since_s in self._seen_s.items():
                if now_s > since_s + _CALL_TIMEOUT_S and end not in callers:
                    self._seen_s[end] = float("inf")
                    self._report(end)


def _other_ends(port: int) -> Iterator[str]:
    """Yield host:port of the other end of every connection to a local port, whatever its state."""
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        with suppress(OSError), open(table, encoding="ascii") as rows:
            next(rows, None)
            for row in rows:
                here, there, state = row.split()[1:4]
                if int(here.rpartition(":")[2], 16) == port and state != "0A":  # 0A is a listening socket
                    host, _, number = there.rpartition(":")
                    yield f"{_host(host)}:{int(number, 16)}"


def _host(digits: str) -> str:
    """Return an address from the kernel's hexadecimal words of four bytes in the machine's order."""
    words = [bytes.fromhex(digits[start:start + 8]) for start in range(0, len(digits), 8)]
    packed = b"".join(word[::-1] if sys.byteorder == "little" else word for word in words)
    address = ip_address(packed)
    # A socket for both families names IPv4 addresses in the form of IPv6.
    return str(address.ipv4_mapped or address) if isinstance(address, IPv6Address) else str(address)
