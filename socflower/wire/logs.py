"""Lines in Flower's log, without importing Flower; and what a port refused, in few lines for each peer and minute."""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from threading import Lock
from typing import TypeAlias

Log: TypeAlias = Callable[[str], object]
Clock: TypeAlias = Callable[[], float]

log = logging.getLogger("flwr").log
"""Flower's own logger, whose handlers it sets up in every process that runs an app."""

_OTHERS = "other peers"


@dataclass(slots=True)
class _Minute:
    """What was said of one host since its first refusal."""

    since_s: float
    num_lines: int = 0
    num_left_out: int = 0


class RefusalLog:
    """Logs refusals through `log_line`; from several threads.

    Whoever tries again and again must neither fill the log nor silence it.
    Of each host `lines_per_period` are logged in `period_s`; the rest is counted, and told in one line when the period
    has ended and something happens again, or at `flush`. At most `most_hosts` are told apart at a time; all others
    share the lines of one, so that an attacker with many addresses costs neither memory nor log. A port's own messages
    do not pass through here, so nobody can use them up.
    """

    def __init__(
        self, log_line: Log, *, what: str, lines_per_period: int = 5, most_hosts: int = 32, period_s: float = 60.0,
        clock: Clock = time.monotonic,
    ) -> None:
        self._log_line, self._what, self._clock = log_line, what, clock
        self._lines_per_period, self._most_hosts, self._period_s = lines_per_period, most_hosts, period_s
        self._lock = Lock()
        self._minutes: dict[str, _Minute] = {}

    def report(self, peer: str, line: str) -> None:
        """Log a line about `peer`, an address with a port at its end or none, or count it."""
        host = peer.rpartition(":")[0] or peer  # a stranger has a new port each time
        with self._lock:
            said = self._ended()
            if host not in self._minutes and len(self._minutes) - (_OTHERS in self._minutes) >= self._most_hosts:
                host = _OTHERS
            minute = self._minutes.setdefault(host, _Minute(self._clock()))
            if minute.num_lines < self._lines_per_period:
                minute.num_lines += 1
                last = minute.num_lines == self._lines_per_period
                said.append(line + (f"; more about {host} is only counted for {self._period_s:g} s" if last else ""))
            else:
                minute.num_left_out += 1
        self._say(said)

    def flush(self, *, everything: bool = False) -> None:
        """Tell how many lines were left out in the periods that have ended; or in all of them."""
        with self._lock:
            said = self._ended(everything)
        self._say(said)

    def _ended(self, everything: bool = False) -> list[str]:
        """Forget hosts whose period has ended; return what there is to say about them."""
        now_s = self._clock()
        ended = [host for host, minute in self._minutes.items()
                 if everything or now_s >= minute.since_s + self._period_s]
        lines: list[str] = []
        for host in ended:
            minute = self._minutes.pop(host)
            if minute.num_left_out:
                lines.append(f"{self._what}: {minute.num_left_out} more refusals of {host} within "
                             f"{min(self._period_s, now_s - minute.since_s):.0f} s")
        return lines

    def _say(self, lines: list[str]) -> None:
        for line in lines:  # outside the lock: a log may be slow
            self._log_line(line)
