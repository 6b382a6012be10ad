"""Recordings of readings: a text file with one reading per line, CSV or JSON lines, written continuously."""

import csv
import itertools
import json
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields, replace
from pathlib import Path
from types import TracebackType
from typing import Any, TextIO

from socflower.errors import ConfigError
from socflower.plain_numbers import plain_numbers
from socflower.thermal.sensors.reading import HeatSource, Reading

_FIELDS = tuple(field.name for field in fields(Reading))
_NUMBERS = ("at_s", "temperature_c", "clock_factor", "battery_fraction", "user_load")
_BOOLEANS = {"true": True, "false": False}
_LONGEST_INTERVAL_S = 1e7  # 116 days; `time.sleep` fails beyond some centuries
_CSV, _LINES = (".csv",), (".jsonl", ".ndjson", ".json")


class RecordedSource:
    """Replays readings by a clock; before the first it returns the first, after the last the last.

    The replay starts at the first `read`; the readings have the time stamps of the replay. Each note is returned once,
    even if the replay skipped its reading.

    Parameters
    ----------
    recording : Path, str or sequence of Reading
        A file (.csv: with a header line, cells are empty where the device reported nothing; .jsonl, .json, .ndjson: one
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
        self._readings = (
            load_recording(Path(recording))
            if isinstance(recording, Path | str)
            else tuple(recording)
        )
        if not self._readings:
            raise ConfigError("recording: there is no reading in it")
        for before, after in zip(self._readings, self._readings[1:], strict=False):
            if not before.at_s <= after.at_s:
                raise ConfigError(
                    f"recording: at_s = {after.at_s} comes after {before.at_s}; sort by time"
                )
        self._began_s: float | None = None
        self._next = 0  # the first reading whose notes were not returned yet

    def read(self) -> Reading:
        """Return the latest reading at the present time of the replay."""
        now_s = self._clock()
        if self._began_s is None:
            self._began_s = now_s
        elapsed_s = now_s - self._began_s
        notes: list[str] = []
        while (
            self._next < len(self._readings)
            and self._readings[self._next].at_s - self._readings[0].at_s <= elapsed_s
        ):
            notes.extend(self._readings[self._next].notes)
            self._next += 1
        return replace(self._readings[self._next - 1], at_s=now_s, notes=tuple(notes))


class Recorder:
    """Writes readings to a new file, each line at once; a context manager."""

    def __init__(self, path: Path) -> None:
        self._kind = _kind(path)
        try:
            self._file: TextIO = path.open("x", encoding="utf-8", newline="")
        except FileExistsError:
            raise ConfigError(
                f"{path}: is there already; name another file for the recording"
            ) from None
        except OSError as error:
            raise ConfigError(f"{path}: cannot be written ({error.strerror})") from None
        self._path = path
        if self._kind == _CSV:
            self._write(",".join(_FIELDS))

    def __enter__(self) -> "Recorder":
        return self

    def __exit__(
        self,
        _kind: type[BaseException] | None,
        _error: BaseException | None,
        _trace: TracebackType | None,
    ) -> None:
        self._file.close()

    def write(self, reading: Reading) -> None:
        """Append a reading. Raises ConfigError if the file cannot be written."""
        if self._kind == _CSV:
            self._write(",".join(_cell(getattr(reading, name)) for name in _FIELDS))
        else:
            self._write(json.dumps(as_object(reading), ensure_ascii=False))

    def _write(self, line: str) -> None:
        try:
            self._file.write(line + "\n")
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
    on_reading: Callable[[Reading], None] | None = None,
) -> None:
    """Write a reading every `interval_s` to a new file that `RecordedSource` reads.

    Continues until `num_readings` are written, or without it until interrupted; the file always has whole lines.
    Raises ConfigError where the file exists already or cannot be written.
    """
    readings = readings_of(source, interval_s=interval_s, num_readings=num_readings, sleep=sleep)
    with Recorder(path) as recorder:
        for reading in readings:
            recorder.write(reading)
            if on_reading is not None:
                on_reading(reading)


def readings_of(
    source: HeatSource,
    *,
    interval_s: float,
    num_readings: int | None = None,
    sleep: Callable[[float], None] = time.sleep,
) -> Iterator[Reading]:
    """Return readings every `interval_s`, without end if `num_readings` is not given; raises ConfigError at once."""
    if not 0 < interval_s <= _LONGEST_INTERVAL_S:
        raise ConfigError(
            f"an interval of {interval_s} s between readings: give seconds above 0, at most "
            f"{_LONGEST_INTERVAL_S:g}"
        )

    def readings() -> Iterator[Reading]:
        for number in itertools.count() if num_readings is None else range(num_readings):
            if number:
                sleep(interval_s)
            yield source.read()

    return readings()


def as_object(reading: Reading) -> dict[str, Any]:
    """Return the reading as an object of JSON: every field, null where the device reported nothing."""
    return {
        name: list(value) if isinstance(value := getattr(reading, name), tuple) else value
        for name in _FIELDS
    }


def load_recording(path: Path) -> tuple[Reading, ...]:
    """Return the readings of a recording; ConfigError with file and line for invalid content."""
    kind = _kind(path)
    try:
        text = path.read_text("utf-8-sig")
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror})") from None
    except ValueError:
        raise ConfigError(f"{path}: is no text in UTF-8") from None
    readings: list[Reading] = []
    for number, row in _csv_rows(path, text) if kind == _CSV else _json_rows(path, text):
        try:
            readings.append(_reading(row))
        except ConfigError as error:
            raise ConfigError(f"{path}, line {number}: {error}") from None
        if len(readings) > 1 and readings[-1].at_s < readings[-2].at_s:
            raise ConfigError(
                f"{path}, line {number}: at_s = {readings[-1].at_s} comes after {readings[-2].at_s}; "
                "sort by time"
            )
    if not readings:
        raise ConfigError(f"{path}: there is no reading in it")
    return tuple(readings)


def _kind(path: Path) -> tuple[str, ...]:
    for kind in (_CSV, _LINES):
        if path.suffix.lower() in kind:
            return kind
    raise ConfigError(f"{path}: name a recording .csv or .jsonl")


def _cell(value: Any) -> str:
    if value is None or value == ():
        return ""
    if isinstance(value, tuple):
        return '"' + json.dumps(list(value), ensure_ascii=False).replace('"', '""') + '"'
    return str(value).lower() if isinstance(value, bool) else repr(value)


def _csv_rows(path: Path, text: str) -> Iterator[tuple[int, dict[str, Any]]]:
    reader = csv.reader(text.splitlines(keepends=True), strict=True)
    columns: list[str] = []
    try:
        for cells in reader:
            if not any(cell.strip() for cell in cells):
                continue
            if not columns:
                columns = [cell.strip() for cell in cells]
                if len(set(columns)) < len(columns):
                    raise ConfigError(
                        f"{path}, line {reader.line_num}: a column name appears twice"
                    )
                continue
            if len(cells) != len(columns):
                raise ConfigError(
                    f"{path}, line {reader.line_num}: {len(cells)} cells under {len(columns)} columns"
                )
            yield (
                reader.line_num,
                {
                    name: _value(name, cell.strip())
                    for name, cell in zip(columns, cells, strict=True)
                },
            )
    except csv.Error as error:
        raise ConfigError(f"{path}, line {reader.line_num}: {error}") from None


def _value(name: str, cell: str) -> Any:
    """Return the value of a CSV cell; an invalid one stays text, which `_reading` rejects."""
    if name == "notes":
        if cell.startswith("["):
            try:
                return json.loads(cell)
            except ValueError:
                return cell
        return [cell] if cell else []
    if not cell:
        return None
    if name in _NUMBERS:
        try:
            return float(cell)
        except ValueError:
            return cell
    return _BOOLEANS.get(cell.lower(), cell)


def _json_rows(path: Path, text: str) -> Iterator[tuple[int, dict[str, Any]]]:
    # Not splitlines: a note may contain one of the rarer line separators.
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            row = None
        if not isinstance(row, dict):
            raise ConfigError(
                f"{path}, line {number}: is no JSON object; a recording has one a line"
            )
        yield number, row


def _reading(row: dict[str, Any]) -> Reading:
    for name, value in row.items():
        if name not in _FIELDS:
            raise ConfigError(f"{name} is no field of a reading; there are {', '.join(_FIELDS)}")
        if name == "notes":
            if not (isinstance(value, list) and all(isinstance(note, str) for note in value)):
                raise ConfigError(f"notes = {value!r} must be a list of texts")
        elif name in _NUMBERS:
            if value is not None and (type(value) not in (int, float) or not _is_finite(value)):
                raise ConfigError(
                    f"{name} = {value!r} is no number; leave it out where the device said nothing"
                )
        elif value is not None and not isinstance(value, bool):
            raise ConfigError(f"{name} = {value!r} must be true or false")
    if row.get("at_s") is None:
        raise ConfigError("at_s is missing: when was it read, in seconds?")
    return Reading(**{**row, "notes": tuple(row.get("notes", ()))})


def _is_finite(value: float) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:  # an int beyond the range of floats
        return False
