"""Temperatures of other machines, for the machine with the fan: JSON from a file or over HTTP.

A document is a reading as printed by `socflower heat --json`, or an object with only `temperature_c`.
"""

import json
import time
import urllib.request
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

from socflower.thermal.sensors.reading import Reading, is_number, possible_c

_LARGEST_BYTES = 1 << 16


class FileSource:
    """Readings that a program writes into a file repeatedly: `{"temperature_c": 41.5}`.

    A file whose time is more than `max_age_s` in the past or in the future gives no temperature.
    """

    def __init__(
        self,
        path: Path,
        *,
        max_age_s: float,
        now: Callable[[], float] = time.time,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._path = path
        self._max_age_s = max_age_s
        self._now = now
        self._clock = clock

    def read(self) -> Reading:
        """Return the file's reading."""
        now_s = self._clock()
        try:
            with self._path.open("rb") as stream:
                document = stream.read(_LARGEST_BYTES)
                age_s = self._now() - self._path.stat().st_mtime
        except OSError as error:
            return _unknown_reading(now_s, f"{self._path}: cannot be read ({error.strerror})")
        if abs(age_s) > self._max_age_s:
            return _unknown_reading(now_s, f"{self._path}: not written for {self._max_age_s:g} s")
        return _reading(document, now_s, str(self._path))


class HttpSource:
    """A reading as JSON from another machine, by GET. Proxies are not used."""

    def __init__(self, url: str, *, timeout_s: float) -> None:
        self._url = url
        self._timeout_s = timeout_s
        # Without this an environment's proxy would be asked for machines of the rack's own network.
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))

    def read(self) -> Reading:
        """Return the machine's reading."""
        try:
            with closing(self._opener.open(self._url, timeout=self._timeout_s)) as answer:
                document = answer.read(_LARGEST_BYTES)
        # urllib passes on whatever its parsers raise for a foreign server's answer.
        except Exception as error:
            note = f"{self._url}: no answer ({type(error).__name__})"
            return _unknown_reading(time.monotonic(), note)
        return _reading(document, time.monotonic(), self._url)


def _reading(
    content: bytes,
    now_s: float,
    where: str,
) -> Reading:
    """Return a document's temperature and load; None and a note for a missing or invalid temperature."""
    try:
        document: Any = json.loads(content)
        if isinstance(document, dict):
            document = document.get("reading", document)
        temperature_c = document.get("temperature_c")
        at_s = document.get("at_s")
        load = document.get("user_load")
    except (ValueError, AttributeError, RecursionError):
        return _unknown_reading(now_s, f"{where}: is not a JSON object")
    # The other machine's time stamp is kept: it shows whether that machine takes new readings.
    at_s = float(at_s) if is_number(at_s) else now_s
    known_c = possible_c(temperature_c)
    if known_c is None:
        return _unknown_reading(at_s, f"{where}: temperature_c is missing or impossible")
    user_load = float(load) if is_number(load) and 0.0 <= load <= 1.0 else None
    return Reading(
        at_s=at_s,
        temperature_c=known_c,
        user_load=user_load,
    )


def _unknown_reading(at_s: float, note: str) -> Reading:
    return Reading(at_s=at_s, notes=(note,))
