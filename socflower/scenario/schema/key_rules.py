"""Rules between the keys of a table: a key that is set and not read is a mistake of the user."""

from collections.abc import Hashable, Mapping, Sequence

from socflower.errors import ConfigError
from socflower.toml_file import Table


def is_set(table: Table, key: str) -> bool:
    """Whether a key has another value than its default."""
    return bool(getattr(table, key) != type(table).model_fields[key].default)


def shown(table: object, key: str) -> str:
    """Return a key and its value as an error has them, such as "bits = [2, 8]"."""
    return f"{key} = {_listed(getattr(table, key))!r}"


def _listed(value: object) -> object:
    """Return a value with lists for tuples, as files have them."""
    return [_listed(each) for each in value] if isinstance(value, tuple) else value


def require_reader(table: Table, chooser: str, readers: Mapping[str, Sequence[str]]) -> None:
    """Raise `ConfigError` for a key that is set and that has no effect with the value of the key `chooser`.

    `readers` has, for each such key, the values of `chooser` with which it has an effect.
    """
    chosen = getattr(table, chooser)
    for key, values in readers.items():
        if chosen not in values and is_set(table, key):
            raise ConfigError(
                f"{shown(table, key)} is for {chooser} = {' or '.join(map(repr, values))}, and it is "
                f"{chosen!r}; leave it out"
            )


def require_distinct(key: str, values: Sequence[Hashable]) -> None:
    """Raise `ConfigError` for a value that a list has twice."""
    if len(set(values)) < len(values):
        raise ConfigError(f"{key} = {list(values)} has a value twice; give each once")


def require_both_or_none(table: Table, first: str, second: str) -> None:
    """Raise `ConfigError` for a key that is set without the other one, which belongs to it."""
    if is_set(table, first) != is_set(table, second):
        raise ConfigError(f"{shown(table, first)} and {shown(table, second)}: give both or none")
