"""Reading TOML files so that every mistake is one line that names the file, the key and the remedy."""

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, fields
from difflib import get_close_matches
from pathlib import Path
from types import UnionType
from typing import Any, TypeVar, get_args, get_type_hints

from socflower.errors import ConfigError

Pairs = tuple[tuple[float, float], ...]

_Table = TypeVar("_Table")
_NUMBER = (int, float)
_ROWS: dict[Any, tuple[int, str]] = {Pairs: (2, "pairs"), tuple[tuple[float, float, float], ...]: (3, "triples")}
_LISTS: dict[Any, tuple[type, str]] = {tuple[str, ...]: (str, "names"), tuple[int, ...]: (int, "whole numbers")}


def read_toml(path: Path, what: str) -> dict[str, Any]:
    """Return a file's document; `ConfigError`, naming it as `what`, if it cannot be read or is not TOML."""
    try:
        return tomllib.loads(path.read_text("utf-8"))
    except OSError as error:
        raise ConfigError(f"{what} {path}: cannot be read ({error.strerror}); check the path") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{what} {path}: is not UTF-8 text; is it a TOML file?") from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{what} {path}: not valid TOML: {error}") from None


def reject_unknown_keys(
    table: Mapping[str, Any], known: Sequence[str], where: str, renamed: Mapping[str, str] | None = None,
) -> None:
    """Raise `ConfigError` naming the first key that is not known, and its successor or the closest one that is."""
    for key in table:
        if renamed and key in renamed and key not in known:
            raise ConfigError(f"{where}: key {key!r} is called {renamed[key]!r} now; rename it")
        if key not in known:
            close = get_close_matches(key, known, n=1)
            hint = f"did you mean {close[0]!r}?" if close else f"known keys: {', '.join(known)}"
            raise ConfigError(f"{where}: unknown key {key!r} (value {table[key]!r}); {hint}")


def require_tables(value: object, name: str, where: str) -> Sequence[Mapping[str, Any]]:
    """Return the tables of `[[name]]`; `ConfigError` if they were written any other way."""
    if not isinstance(value, Sequence) or not all(isinstance(entry, Mapping) for entry in value):
        raise ConfigError(f"{where}: {name} = {value!r} must be written [[{name}]], a list of tables")
    return value


def parse_value(text: str) -> object:
    """Return the value of a command-line override: TOML, or the text itself if it is not."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def parse_table(kind: type[_Table], table: object, where: str) -> _Table:
    """Return a table's values as `kind`; `ConfigError` names the key that is unknown, missing or of a wrong type.

    `kind.RENAMED`, if present, has the successors of renamed keys.
    """
    if not isinstance(table, Mapping):
        raise ConfigError(f"{where} must be a table, got {table!r}")
    known = fields(kind)  # type: ignore[arg-type]
    reject_unknown_keys(table, [entry.name for entry in known], where, getattr(kind, "RENAMED", None))
    for entry in known:
        if entry.name not in table and entry.default is MISSING and entry.default_factory is MISSING:
            raise ConfigError(f"{where}: {entry.name} is missing")
    hints = get_type_hints(kind)
    return kind(**{key: _converted(value, hints[key], f"{where} {key}") for key, value in table.items()})


def _converted(value: object, expected: Any, where: str) -> object:
    """Return a TOML value as the field's type: whole numbers become floats, lists tuples; no other conversion."""
    allowed = get_args(expected) if isinstance(expected, UnionType) else (expected,)
    plain = tuple(kind for kind in allowed if isinstance(kind, type) and kind is not type(None))
    if isinstance(value, list) and expected in _ROWS:
        length, rows = _ROWS[expected]
        if not all(isinstance(row, list) and len(row) == length and all(
                isinstance(number, _NUMBER) and not isinstance(number, bool) for number in row) for row in value):
            raise ConfigError(f"{where} = {value!r} must be a list of {rows} of numbers")
        return tuple(tuple(map(float, row)) for row in value)
    if isinstance(value, list) and expected in _LISTS:
        kind, items = _LISTS[expected]
        if not all(isinstance(item, kind) and not isinstance(item, bool) for item in value):
            raise ConfigError(f"{where} = {value!r} must be a list of {items}")
        return tuple(value)
    if isinstance(value, bool) and bool not in plain:
        pass
    elif isinstance(value, int) and int not in plain and float in plain:
        return float(value)
    elif isinstance(value, plain):
        return value
    names = " or ".join({"int": "a whole number", "float": "a number", "str": "a text", "bool": "true or false",
                         "tuple": "a list"}.get(getattr(kind, "__name__", ""), str(kind)) for kind in plain or (tuple,))
    raise ConfigError(f"{where} = {value!r} must be {names}")
