"""Lines in Flower's log, without importing Flower, and a rate-limited log of a port's refusals."""

import json
import logging
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from threading import Lock
from typing import TypeAlias

Log: TypeAlias = Callable[[str], object]
Clock: TypeAlias = Callable[[], float]

log = logging.getLogger("flwr").log
"""Flower's own logger, whose handlers it sets up in every process that runs an app."""


def warn(line: str) -> None:
    """Log a line as Flower's warnings."""
    log(logging.WARNING, line)


LOG_FORMAT = "SOCFLOWER_LOG_FORMAT"
"""Environment variable, which child processes inherit: "json" makes each line a JSON document."""


def logs_json() -> bool:
    """Return whether lines of this process are to be JSON documents."""
    return os.environ.get(LOG_FORMAT) == "json"


def json_line(text: str, level: str = "INFO", **more: object) -> str:
    """Return a line of a log as a JSON document."""
    return json.dumps({"at_s": time.time(), "level": level, "text": text, **more})


class _JsonLines(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        """Return a record as a line; the traceback of an exception is a key of it."""
        error = {"error": self.formatException(record.exc_info)} if record.exc_info else {}
        return json_line(record.getMessage(), record.levelname, **error)


def use_log_format() -> None:
    """Let Flower's logger write JSON lines if the environment asks for them; call it after Flower is imported."""
    if logs_json():
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(_JsonLines())
        logging.getLogger("flwr").handlers[:] = [handler]


_OTHERS = "other peers"


@dataclass(slots=True)
class _HostPeriod:
    """The lines about one host since its first refusal."""

    since_s: float
    num_lines: int = 0
    num_left_out: int = 0


class RefusalLog:
    """Logs refusals through `log_line`; safe between threads.

    A peer that tries repeatedly must neither fill the log nor silence it. `lines_per_period` lines about each host are
    logged in `period_s`; the others are counted, and reported in one line at the first event after the period, or at
    `flush`. At most `most_hosts` are counted separately; all others count as one host, so that an attacker with many
    addresses uses neither memory nor log.
    """

    def __init__(
        self,
        log_line: Log,
        *,
        what: str,
        lines_per_period: int = 5,
        most_hosts: int = 32,
        period_s: float = 60.0,
        clock: Clock = time.monotonic,
    ) -> None:
        self._log_line, self._what, self._clock = log_line, what, clock
        self._lines_per_period, self._most_hosts = lines_per_period, most_hosts
        self._period_s = period_s
        self._lock = Lock()
        self._periods: dict[str, _HostPeriod] = {}

    def report(self, peer: str, line: str) -> None:
        """Log a line about `peer`, an address with a port at its end or none, or count it."""
        # The port is left out, since it is another one at each attempt.
        host = peer.rpartition(":")[0] or peer
        with self._lock:
            lines_to_log = self._ended()
            num_hosts = len(self._periods) - (_OTHERS in self._periods)
            if host not in self._periods and num_hosts >= self._most_hosts:
                host = _OTHERS
            period = self._periods.setdefault(host, _HostPeriod(self._clock()))
            if period.num_lines < self._lines_per_period:
                period.num_lines += 1
                if period.num_lines == self._lines_per_period:
                    line += f"; more about {host} is only counted for {self._period_s:g} s"
                lines_to_log.append(line)
            else:
                period.num_left_out += 1
        self._log_lines(lines_to_log)

    def flush(self, *, everything: bool = False) -> None:
        """Log how many lines were left out in the periods that have ended, or with `everything` in all."""
        with self._lock:
            lines_to_log = self._ended(everything)
        self._log_lines(lines_to_log)

    def _ended(self, everything: bool = False) -> list[str]:
        """Remove hosts whose period has ended; return the lines about them."""
        now_s = self._clock()
        ended = [
            host
            for host, period in self._periods.items()
            if everything or now_s >= period.since_s + self._period_s
        ]
        lines: list[str] = []
        for host in ended:
            period = self._periods.pop(host)
            if period.num_left_out:
                seconds = min(self._period_s, now_s - period.since_s)
                lines.append(
                    f"{self._what}: {period.num_left_out} more refusals of {host} within {seconds:.0f} s"
                )
        return lines

    def _log_lines(self, lines: list[str]) -> None:
        for line in lines:
            # Outside the lock: a log may be slow.
            self._log_line(line)
