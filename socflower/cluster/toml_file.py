"""Reading TOML files so that every mistake is one line that names the file, the key and the remedy."""

import tomllib
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from socflower.errors import ConfigError


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


def reject_unknown_keys(table: Mapping[str, Any], known: Sequence[str], where: str) -> None:
    """Raise `ConfigError` naming the first key that is not known and the closest one that is."""
    for key in table:
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
