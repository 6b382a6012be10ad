"""A guard around unreliable sources: every read returns a reading within a time limit.

A vendor's library may raise, hang or return invalid values. The device's state is then unknown; training continues.
"""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, fields
from logging import WARNING
from typing import Any

from socflower.plain_numbers import plain, plain_numbers
from socflower.thermal.sensors.reading import HeatSource, Reading
from socflower.wire.logs import log

_LONGEST_NOTE = 200
_MOST_NOTES = 16

_QUIET_S = 60.0
"""Least time between two warnings of one kind about an intermittent source."""


@dataclass(frozen=True, slots=True)
class _Answer:
    """What a source answered to one read: a reading, or the text of an error."""

    number: int
    at_s: float
    outcome: Reading | str


@plain_numbers
class GuardedSource:
    """A source whose `read` always returns within a time limit; an error is a note, and a warning when it starts.

    Parameters
    ----------
    make : () -> HeatSource
        Makes the source at the first read; if that raises, nothing is known and the next read tries again.
    timeout_s : float
        How long a read waits for its answer. While a source hangs, reads return at once; its thread is left running.
    max_age_s : float, default 0
        An answer to an earlier read counts for so long. With `timeout_s` 0 no read waits, and each asks for the next.
    """

    def __init__(
        self,
        make: Callable[[], HeatSource],
        *,
        timeout_s: float = 2.0,
        max_age_s: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._make = make
        self._timeout_s = timeout_s
        self._max_age_s = max_age_s
        self._clock = clock
        self._source: HeatSource | None = None
        self._asking: threading.Thread | None = None
        self._number = 0
        # Before the first answer nothing is known, which is no error yet.
        now_s = clock()
        self._latest = _Answer(0, now_s, Reading(at_s=now_s))
        self._lock = threading.Lock()
        self._warned_at_s: dict[str, float] = {}
        self._is_working = True

    def read(self) -> Reading:
        """Return the source's reading, or one without values."""
        with self._lock:
            # A thread that hung may answer much later: that answers no new read, unless `max_age_s` allows it.
            if self._asking is not None and self._asking.is_alive():
                return self._latest_reading(None, "still hangs")
            self._number += 1
            self._asking = threading.Thread(
                target=self._read_in_thread,
                args=(self._number,),
                name="heat-source",
                daemon=True,
            )
            try:
                self._asking.start()
            # There are no more threads, or the interpreter is shutting down.
            except RuntimeError as error:
                self._asking = None
                return self._unknown("thread", f"cannot be asked ({error})")
            self._asking.join(self._timeout_s)
            within_s = max(self._timeout_s, self._max_age_s)
            return self._latest_reading(self._number, f"did not answer within {within_s:g} s")

    def wait(self, timeout_s: float) -> bool:
        """Wait so long for the answer to the last read; return whether there has been any answer."""
        if self._asking is not None:
            self._asking.join(max(0.0, timeout_s))
        return self._latest.number > 0

    def _read_in_thread(self, number: int) -> None:
        outcome: Reading | str
        try:
            if self._source is None:
                self._source = self._make()
            outcome = _validated(self._source.read())
        # Training continues, whatever a vendor's library raises.
        except BaseException as error:
            outcome = f"{type(error).__name__}: {error}"
        # One assignment: a reader in another thread must not see an answer with another one's time.
        self._latest = _Answer(number, self._clock(), outcome)

    def _latest_reading(self, number: int | None, complaint: str) -> Reading:
        """Return the answer to a read, or an earlier one that is recent enough."""
        latest = self._latest
        is_recent = self._max_age_s > 0.0 and self._clock() - latest.at_s <= self._max_age_s
        if latest.number != number and not is_recent:
            return self._unknown("hangs", complaint)
        if isinstance(latest.outcome, str):
            return self._unknown("fails", latest.outcome)
        self._is_working = True
        return latest.outcome

    def _unknown(self, kind: str, cause: str) -> Reading:
        """Return a reading without values; warn unless this kind of error was reported a short time ago."""
        now_s = self._clock()
        name = "" if self._source is None else f" {type(self._source).__name__}"
        text = _one_line(f"heat source{name}: {cause}; its values are unknown")
        if self._is_working:
            # After a recovery an error is reported again, but not at every read of an intermittent source.
            self._warned_at_s = {
                one: at_s for one, at_s in self._warned_at_s.items() if now_s < at_s + _QUIET_S
            }
            self._is_working = False
        if kind not in self._warned_at_s:
            self._warned_at_s[kind] = now_s
            log(WARNING, "%s", text)
        return Reading(at_s=now_s, notes=(text,))


def _validated(reading: object) -> Reading:
    """Return a reading that is checked again, in Python's types; a source may return anything."""
    if not isinstance(reading, Reading):
        raise TypeError(f"read() returned {type(reading).__name__}, not a Reading")
    values: dict[str, Any] = {}
    for entry in fields(Reading):
        value = getattr(reading, entry.name)
        values[entry.name] = plain(value)
    notes = reading.notes[:_MOST_NOTES]
    values["notes"] = tuple(_one_line(str(note)) for note in notes)
    return Reading(**values)


def _one_line(text: str) -> str:
    # File names under /sys may contain bytes that are not valid text, which a message cannot carry.
    valid = text.encode("utf-8", "replace").decode("utf-8")
    return " ".join(valid.split())[:_LONGEST_NOTE]
