"""Reading TOML files into pydantic models; every mistake is one line that names file, key, value and remedy."""

import json
import tomllib
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, ClassVar, Self, TypeVar, cast

from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError, model_validator

from socflower.errors import ConfigError
from socflower.field_rules import reason, refusal
from socflower.plain_numbers import plain

_Kind = TypeVar("_Kind")


class Table(BaseModel):
    """A table of a file. Types are strict, except that a float may be an integer; NaN and infinity are refused."""

    model_config = ConfigDict(
        strict=True,
        extra="forbid",
        frozen=True,
        allow_inf_nan=False,
        validate_by_name=True,
        validate_by_alias=True,
    )
    # The form of a table that is written in one line.
    FORM: ClassVar[str] = ""

    @model_validator(mode="after")
    def _refuse_here(self) -> Self:
        """Raise the error that pydantic expects, so that it adds the place in the file."""
        try:
            self.check()
        except ConfigError as error:
            raise ValueError(reason(error)) from None
        return self

    def check(self) -> None:
        """Raise `ValueError` or `ConfigError` for values that contradict each other."""

    def replaced(self, **changes: Any) -> Self:
        """Return a copy with other values, which are checked; `ConfigError` for invalid ones."""
        values = {**dict(self), **changes}
        try:
            return self.__class__.model_validate(values, by_name=True)
        except ValidationError as error:
            raise ConfigError(refusal(self.__class__, values, "", error)) from None


def read_toml(path: Path, what: str) -> dict[str, Any]:
    """Return a file's document; `ConfigError`, which calls it `what`, if it cannot be read or is not TOML.

    A byte-order mark, which editors on Windows write, is skipped.
    """
    try:
        return tomllib.loads(path.read_text("utf-8-sig"))
    except OSError as error:
        problem = f"cannot be read ({error.strerror}); check the path"
    except UnicodeDecodeError:
        problem = "is not UTF-8 text; is it a TOML file?"
    except (RecursionError, ValueError) as error:
        # Besides wrong syntax, tables may be nested too deeply, and numbers may have too many digits for Python.
        problem = f"not valid TOML: {str(error).partition(';')[0]}"
    raise ConfigError(f"{what} {path}: {problem}")


def parse_value(text: str) -> object:
    """Return the value of a command-line override: TOML, or the text itself if it is not."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except (ValueError, RecursionError):
        return text


@cache
def _adapter(kind: Any) -> TypeAdapter[Any]:
    return TypeAdapter(kind)


def read_table(kind: type[_Kind], table: object, where: str) -> _Kind:
    """Return a table's values as `kind`, a `Table` or a `checked` type.

    `ConfigError` names `where`, the first wrong key, its value and the remedy.
    """
    try:
        # The rules of JSON input are those of TOML: a list for a tuple, a table for a dataclass, and nothing else.
        document = json.dumps(table, default=_plain)
        value: _Kind = _adapter(cast(Any, kind)).validate_json(
            document, by_alias=True, by_name=False
        )
        return value
    except ValidationError as error:
        raise ConfigError(refusal(kind, table, where, error)) from None
    except RecursionError:
        raise ConfigError(f"{where}: is nested too deeply") from None


def _plain(value: object) -> object:
    """Return NumPy's numbers as Python's, and dates as tables, which no key takes: JSON lacks both."""
    number = plain(value)
    if number is not value:
        return number
    return dict(value) if isinstance(value, Mapping) else {type(value).__name__: str(value)}
