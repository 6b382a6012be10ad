"""Recordings of readings: a text file with one reading per line, CSV or JSON lines, written continuously."""

import csv
import itertools
import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, TextIO

from socflower.errors import ConfigError, require_range
from socflower.plain_numbers import plain_numbers
from socflower.thermal.sensors.reading import HeatSource, Reading
from socflower.toml_file import read_table

_FIELDS = tuple(field.name for field in fields(Reading))
_FLAGS = ("throttled", "on_battery")
_BOOLEANS = {"true": True, "false": False}
_CSV = (".csv",)
_LINES = (".jsonl", ".ndjson", ".json")

_LONGEST_INTERVAL_S = 1e7
"""116 days; `time.sleep` fails beyond some centuries."""


class RecordedSource:
    """Replays readings by a clock; before the first it returns the first, after the last the last.

    The replay starts at the first `read`; the readings have the time stamps of the replay. Each note is returned once,
    even if the replay skipped its reading.

    Parameters
    ----------
    recording : Path, str or sequence of Reading
        A file (.csv: with a header line, cells are empty if the device reported nothing; .jsonl, .json, .ndjson: one
        object per line), or the readings themselves, in the order of `at_s`.
    clock : callable
        Seconds; only differences count.

    Raises
    ------
    ConfigError
        With file and line, for an unreadable file, an unknown column, or an invalid value.
    """

    def __init__(
        self,
        recording: Path | str | Sequence[Reading],
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._clock = clock
        name = "recording"
        if isinstance(recording, Path | str):
            name = str(recording)
            recording = load_recording(Path(recording))
        self._readings = tuple(recording)
        if not self._readings:
            raise ConfigError(f"{name}: has no reading")
        for before, after in pairwise(self._readings):
            if after.at_s < before.at_s:
                raise ConfigError(
                    f"{name}: at_s = {after.at_s} comes after {before.at_s}; sort by time"
                )
        self._began_s: float | None = None
        # Index of the first reading whose notes were not returned yet.
        self._next = 0

    def read(self) -> Reading:
        """Return the latest reading at the present time of the replay."""
        now_s = self._clock()
        if self._began_s is None:
            self._began_s = now_s
        recorded_s = now_s - self._began_s
        first_s = self._readings[0].at_s
        notes: list[str] = []
        # The first reading is always due, since it is 0 s after itself.
        for reading in self._readings[self._next :]:
            if reading.at_s - first_s > recorded_s:
                break
            notes.extend(reading.notes)
            self._next += 1
        return replace(self._readings[self._next - 1], at_s=now_s, notes=tuple(notes))


class Recorder:
    """Writes readings to a new file, each line at once; a context manager."""

    def __init__(self, path: Path) -> None:
        self._kind = _kind(path)
        try:
            self._file: TextIO = path.open("x", encoding="utf-8", newline="")
        except FileExistsError:
            raise ConfigError(f"{path}: exists; name a new file") from None
        except OSError as error:
            raise ConfigError(f"{path}: cannot be written ({error.strerror})") from None
        self._path = path
        if self._kind == _CSV:
            self._write(",".join(_FIELDS))

    def __enter__(self) -> "Recorder":
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def write(self, reading: Reading) -> None:
        """Append a reading. Raises `ConfigError` if the file cannot be written."""
        if self._kind == _CSV:
            cells = [_cell(getattr(reading, name)) for name in _FIELDS]
            self._write(",".join(cells))
        else:
            self._write(json.dumps(as_object(reading), ensure_ascii=False))

    def _write(self, line: str) -> None:
        try:
            # Flushed, so that the file has whole lines even if the process is killed.
            self._file.write(f"{line}\n")
            self._file.flush()
        except OSError as error:
            raise ConfigError(f"{self._path}: cannot be written ({error.strerror})") from None


@plain_numbers
def record(
    source: HeatSource,
    path: Path,
    *,
    interval_s: float = 1.0,
    num_readings: int | None = None,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Write a reading every `interval_s` to a new file that `RecordedSource` reads.

    Continues until `num_readings` are written, or without it until interrupted; the file always has whole lines.
    Raises `ConfigError` if the file exists already or cannot be written.
    """
    readings = readings_of(
        source,
        interval_s=interval_s,
        num_readings=num_readings,
        sleep=sleep,
    )
    with Recorder(path) as recorder:
        for reading in readings:
            recorder.write(reading)


def readings_of(
    source: HeatSource,
    *,
    interval_s: float,
    num_readings: int | None = None,
    sleep: Callable[[float], None] = time.sleep,
) -> Iterator[Reading]:
    """Return readings every `interval_s`, without end if `num_readings` is not given; raises `ConfigError` at once."""
    require_range(
        "readings",
        above=0.0,
        most=_LONGEST_INTERVAL_S,
        interval_s=interval_s,
    )

    def readings() -> Iterator[Reading]:
        for number in itertools.count() if num_readings is None else range(num_readings):
            if number:
                sleep(interval_s)
            yield source.read()

    return readings()


def as_object(reading: Reading) -> dict[str, Any]:
    """Return the reading as an object of JSON: every field, null for what the device did not report."""
    values = {name: getattr(reading, name) for name in _FIELDS}
    return {**values, "notes": list(reading.notes)}


def load_recording(path: Path) -> tuple[Reading, ...]:
    """Return the readings of a recording; `ConfigError` with file and line for invalid content."""
    rows = _csv_rows if _kind(path) == _CSV else _json_rows
    try:
        text = path.read_text("utf-8-sig")
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror})") from None
    except ValueError:
        raise ConfigError(f"{path}: is not UTF-8 text") from None
    return tuple(read_table(Reading, row, where) for where, row in rows(path, text))


def _kind(path: Path) -> tuple[str, ...]:
    for kind in (_CSV, _LINES):
        if path.suffix.lower() in kind:
            return kind
    raise ConfigError(f"{path}: name a recording .csv or .jsonl")


def _cell(value: Any) -> str:
    if value is None or value == ():
        return ""
    if isinstance(value, tuple):
        text = json.dumps(list(value), ensure_ascii=False)
        quoted = text.replace('"', '""')
        return f'"{quoted}"'
    return str(value).lower() if isinstance(value, bool) else repr(value)


def _csv_rows(path: Path, text: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Return each row with its place, such as "a.csv, line 2"."""
    reader = csv.reader(text.splitlines(keepends=True), strict=True)
    columns: list[str] = []
    try:
        for cells in reader:
            cells = [cell.strip() for cell in cells]
            where = f"{path}, line {reader.line_num}"
            if not any(cells):
                continue
            if not columns:
                columns = cells
                if len(set(columns)) < len(columns):
                    raise ConfigError(f"{where}: a column is named twice")
                continue
            if len(cells) != len(columns):
                raise ConfigError(f"{where}: {len(cells)} cells under {len(columns)} columns")
            row = zip(columns, cells, strict=True)
            yield where, {name: _value(name, cell) for name, cell in row}
    except csv.Error as error:
        raise ConfigError(f"{path}, line {reader.line_num}: {error}") from None


def _value(name: str, cell: str) -> Any:
    """Return the value of a CSV cell; an invalid one stays text, which `Reading` refuses."""
    try:
        if name == "notes":
            if cell.startswith("["):
                return json.loads(cell)
            return [cell] if cell else []
        if not cell:
            return None
        return _BOOLEANS[cell.lower()] if name in _FLAGS else float(cell)
    except (ValueError, KeyError):
        return cell


def _json_rows(path: Path, text: str) -> Iterator[tuple[str, dict[str, Any]]]:
    # Not splitlines: a note may contain one of the rarer line separators.
    for number, line in enumerate(text.split("\n"), 1):
        where = f"{path}, line {number}"
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            row = None
        if not isinstance(row, dict):
            raise ConfigError(f"{where}: is not a JSON object")
        yield where, row
