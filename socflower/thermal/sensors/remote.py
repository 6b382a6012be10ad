"""Temperatures of other machines, for the one that has the fan: JSON from a file or over HTTP, read in the background.

A document is a reading as `socflower heat --json` prints it, or an object with `temperature_c` alone.
"""

import json
import threading
import time
import urllib.request
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

from socflower.thermal.fans.quorum import is_number
from socflower.thermal.sensors.reading import COLDEST_C, HOTTEST_C, HeatSource, Reading

_LARGEST_BYTES = 1 << 16


class FileSource:
    """What some program writes into a file, again and again: `{"temperature_c": 41.5}`.

    A file older than `max_age_s`, or as much from the future, says nothing.
    """

    def __init__(self, path: Path, *, max_age_s: float, now: Callable[[], float] = time.time,
                 clock: Callable[[], float] = time.monotonic) -> None:
        self._path, self._max_age_s, self._now, self._clock = path, max_age_s, now, clock

    def read(self) -> Reading:
        """Return what the file says."""
        try:
            with self._path.open("rb") as stream:
                document = stream.read(_LARGEST_BYTES)
                age_s = self._now() - self._path.stat().st_mtime
        except OSError as error:
            return _nothing(self._clock(), f"{self._path}: cannot be read ({error.strerror})")
        if abs(age_s) > self._max_age_s:
            return _nothing(self._clock(), f"{self._path}: was not written for {self._max_age_s:g} s")
        return _reading(document, self._clock(), str(self._path))


class HttpSource:
    """What another machine answers to GET: a reading as JSON. No proxy is asked."""

    def __init__(self, url: str, *, timeout_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._url, self._timeout_s, self._clock = url, timeout_s, clock
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))

    def read(self) -> Reading:
        """Return what it answers."""
        try:
            with closing(self._opener.open(self._url, timeout=self._timeout_s)) as answer:
                document = answer.read(_LARGEST_BYTES)
        except Exception as error:  # a server of somebody else's: urllib lets through what its parsers raise
            return _nothing(self._clock(), f"{self._url}: no answer ({type(error).__name__})")
        return _reading(document, self._clock(), self._url)


class BackgroundSource:
    """Another source, read by a thread of its own, so that one that hangs holds nobody up; `close` ends it.

    Says nothing while the other has not answered for `max_age_s`.
    """

    def __init__(self, source: HeatSource, *, period_s: float, max_age_s: float,
                 clock: Callable[[], float] = time.monotonic) -> None:
        self._source, self._period_s, self._max_age_s, self._clock = source, period_s, max_age_s, clock
        self._latest: tuple[float, Reading] | None = None
        self._answered, self._closed = threading.Event(), threading.Event()
        threading.Thread(target=self._poll, name="reading-source", daemon=True).start()

    def read(self) -> Reading:
        """Return its last reading, at once."""
        latest, now_s = self._latest, self._clock()
        if latest is None or now_s - latest[0] > self._max_age_s:
            return _nothing(now_s, "does not answer")
        return latest[1]

    def wait_for_first(self, timeout_s: float) -> bool:
        """Wait for the first answer; return whether it came."""
        return self._answered.wait(max(0.0, timeout_s))

    def close(self) -> None:
        """End after the read under way, which may hang and is not waited for."""
        self._closed.set()

    def _poll(self) -> None:
        while not self._closed.is_set():
            try:
                reading = self._source.read()
            except Exception as error:
                reading = _nothing(self._clock(), f"cannot be read ({type(error).__name__})")
            self._latest = (self._clock(), reading)
            self._answered.set()
            self._closed.wait(self._period_s)


def _reading(content: bytes, now_s: float, where: str) -> Reading:
    """Return a document's temperature, and its load if it tells it; None and a note if it has none that can be."""
    try:
        document: Any = json.loads(content)
        if isinstance(document, dict):
            document = document.get("reading", document)
        temperature_c, at_s = document.get("temperature_c"), document.get("at_s")
        load = document.get("user_load")
    except (ValueError, AttributeError, RecursionError):
        return _nothing(now_s, f"{where}: is no JSON object")
    # The other machine's time is kept: by it one sees whether it ever looks again.
    at_s = float(at_s) if is_number(at_s) else now_s
    if temperature_c is None:
        return _nothing(at_s, f"{where}: has no temperature_c")
    if not is_number(temperature_c) or not COLDEST_C <= temperature_c <= HOTTEST_C:
        return _nothing(at_s, f"{where}: its temperature_c cannot be")
    return Reading(at_s=at_s, temperature_c=float(temperature_c),
                   user_load=float(load) if is_number(load) and 0.0 <= load <= 1.0 else None)


def _nothing(at_s: float, note: str) -> Reading:
    return Reading(at_s=at_s, notes=(note,))
