"""Tables in CSV files: a header that must be as documented, and rows of cells; errors name file and line."""

import csv
import math
from collections.abc import Iterator, Sequence
from pathlib import Path

from socflower.errors import ConfigError


def read_rows(path: Path, header: Sequence[str], what: str) -> Iterator[tuple[str, list[str]]]:
    """Yield where each row is, for errors, and its cells, one for each name of `header`; empty rows are skipped.

    `what` is what the file is, in errors. Raises `ConfigError` for a file that cannot be read, is not UTF-8, begins
    with another header, or has a row of another length.
    """
    named = f"{what} {path}"
    try:
        lines = list(csv.reader(path.read_text("utf-8-sig").splitlines()))
    except OSError as error:
        raise ConfigError(f"{named}: cannot be read ({error.strerror})") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{named}: is not UTF-8 text") from None
    if not lines or [cell.strip() for cell in lines[0]] != [*header]:
        raise ConfigError(f"{named} line 1: must be the header {','.join(header)}")
    for number, line in enumerate(lines[1:], start=2):
        cells = [cell.strip() for cell in line]
        if not any(cells):
            continue
        where = f"{named} line {number}"
        if len(cells) != len(header):
            raise ConfigError(f"{where}: has {len(cells)} values, not {len(header)}")
        yield where, cells


def number_of(text: str, name: str, where: str) -> float:
    """Return the number in a cell of the column `name`; `ConfigError` unless it is 0 or more and finite."""
    try:
        value = float(text)
    except ValueError:
        raise ConfigError(f"{where}: {name} = {text!r} must be a number") from None
    if not 0 <= value < math.inf:
        raise ConfigError(f"{where}: {name} = {text} must be 0 or more and finite")
    return value
