"""Rules of values, written once in the annotations of their types, and the line that says what broke one.

`checked` makes a type that checks its values when it is built, in a program or from a file. Tables of files
(`socflower.toml_file`) read the same annotations.
"""

import json
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from datetime import date, time
from functools import cache
from types import NoneType, UnionType
from typing import (
    Annotated,
    Any,
    TypeVar,
    Union,
    cast,
    dataclass_transform,
    get_args,
    get_origin,
    get_type_hints,
)

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    TypeAdapter,
    ValidationError,
)
from pydantic.fields import FieldInfo
from pydantic_core import CoreSchema, PydanticCustomError
from pydantic_core.core_schema import (
    no_info_after_validator_function,
)

from socflower.did_you_mean import did_you_mean
from socflower.errors import ConfigError
from socflower.plain_numbers import plain_numbers


@dataclass(frozen=True)
class OneOf:
    """Limits a key to some values."""

    values: Collection[int | str]

    def __get_pydantic_core_schema__(
        self, source: Any, handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        """Check the value after its type."""
        return no_info_after_validator_function(self._check, handler(source))

    def _check(self, value: int | str) -> int | str:
        if value not in self.values:
            raise PydanticCustomError("one_of", "not one of the values")
        return value


SchemaVersion = Annotated[
    int, OneOf((1,)), Field(description="version of the format; 1 is the only one")
]
Pairs = tuple[tuple[float, float], ...]
Text = Annotated[str, Field(pattern=r"\S")]
Positive = Annotated[float, Field(gt=0)]
NotNegative = Annotated[float, Field(ge=0)]

_Checked = TypeVar("_Checked")
_SHOWN_CHARS = 200
_TYPES = {int: "a whole number", float: "a number", bool: "true or false", str: "a text"}
_ITEMS = {int: "whole numbers", float: "numbers", str: "names"}


@dataclass_transform(frozen_default=True, kw_only_default=True, field_specifiers=(field,))
def checked(cls: type[_Checked]) -> type[_Checked]:
    """Decorate a class to be a frozen, keyword-only dataclass whose annotations are rules.

    A number, text, choice (`OneOf`) or range (`Field(gt=0)`) in an annotation is checked when a value is built; a
    method `check` may then compare fields. Both raise `ConfigError` with the class's name, or, for values from a file,
    with the place in the file. NumPy's numbers become Python's (`plain_numbers`), and lists and arrays become tuples. A
    field costs about a microsecond, so values that are built by the thousand should not be checked.
    """
    prepare = cls.__dict__.get("__post_init__")

    def check_fields(self: Any) -> None:
        if prepare is not None:
            prepare(self)
        kind: Any = type(self)
        for name, adapter in _adapters(kind).items():
            value = getattr(self, name)
            if isinstance(value, list):
                value = _tuples(value)
                object.__setattr__(self, name, value)
            try:
                adapter.validate_python(value)
            except ValidationError as error:
                (first, *_) = error.errors(include_url=False, include_input=False)
                first["loc"] = (name, *first["loc"])
                raise ConfigError(_line(kind, self, kind.__name__, first)) from None
        if hasattr(self, "check"):
            try:
                self.check()
            except (ConfigError, ValueError) as error:
                raise _Misfit(f"{kind.__name__}: {reason(error)}") from None

    target = cast(Any, cls)
    target.__post_init__ = check_fields
    target.__pydantic_config__ = _OF_FILES
    return plain_numbers(dataclass(frozen=True, kw_only=True, slots=True)(cls))


def _tuples(value: Any) -> Any:
    """Return a list, and the lists in it, as tuples, which no caller can change later."""
    return tuple(map(_tuples, value)) if isinstance(value, list) else value


class _Misfit(ConfigError, ValueError):
    """Fields that do not fit each other. Pydantic catches a `ValueError`, and knows its place in the file."""


def reason(error: Exception) -> str:
    """Return an error's text without the class of the value that misfits: a file's reader does not know it."""
    return str(error).partition(": ")[2] if isinstance(error, _Misfit) else str(error)


_OF_FILES = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)
_OF_PYTHON = ConfigDict(strict=True, arbitrary_types_allowed=True, allow_inf_nan=False)


@cache
def _adapters(kind: type) -> dict[str, TypeAdapter[Any]]:
    """Return an adapter for each field of a class whose annotation can be checked."""
    hints = get_type_hints(kind, include_extras=True)
    names = [entry.name for entry in fields(cast(Any, kind)) if entry.init]
    rules = [name for name in names if _is_rule(hints[name])]
    return {name: TypeAdapter(hints[name], config=_OF_PYTHON) for name in rules}


def _is_rule(annotation: Any) -> bool:
    """Return whether values can be checked against an annotation: not callables, protocols and type variables.

    A dataclass has rules of its own.
    """
    if annotation in (Any, object) or isinstance(annotation, TypeVar) or is_dataclass(annotation):
        return False
    if get_origin(annotation) in (Callable, type) or getattr(annotation, "_is_protocol", False):
        return False
    parts = [part for part in get_args(annotation) if isinstance(part, type) or get_args(part)]
    return all(map(_is_rule, parts))


# ------------------------------------------------------------------------------------------ values of keys
def keys_of(kind: type) -> dict[str, FieldInfo]:
    """Return the keys of a table, a model or a dataclass, with type, default, limits and description."""
    if is_dataclass(kind):
        hints = get_type_hints(kind, include_extras=True)
        keys = {}
        for entry in fields(kind):
            hint = hints[entry.name]
            keys[entry.name] = FieldInfo.from_annotated_attribute(hint, entry.default)
        return keys
    assert issubclass(kind, BaseModel)
    return {entry.alias or name: entry for name, entry in kind.model_fields.items()}


def allowed(annotation: Any, limits: Sequence[Any] = ()) -> str:
    """Return the values of a key in words, such as "a whole number above 0"."""
    limits = tuple(_flat(limits))
    if get_origin(annotation) is Annotated:
        inner, *more = get_args(annotation)
        return allowed(inner, (*limits, *more))
    if get_origin(annotation) in (Union, UnionType):
        kinds = [kind for kind in get_args(annotation) if kind is not NoneType]
        if float in kinds and int in kinds:
            kinds.remove(int)
        return " or ".join(allowed(kind, limits) for kind in kinds)
    for limit in limits:
        if isinstance(limit, OneOf):
            values = [*limit.values]
            if len(values) == 1:
                return json.dumps(values[0])
            return f"one of {', '.join(map(str, values))}"
    if get_origin(annotation) in (tuple, Sequence):
        return f"a list of {_items(get_args(annotation)[0])}{_range(limits)}"
    if (
        isinstance(annotation, type)
        and annotation not in _TYPES
        and table_of(annotation)[0] is None
    ):
        return f"of type {annotation.__name__}"
    return f"{_TYPES.get(annotation, 'a table')}{_range(limits)}"


def _items(annotation: Any, limits: Sequence[Any] = ()) -> str:
    if get_origin(annotation) is Annotated:
        inner, *more = get_args(annotation)
        return _items(inner, tuple(_flat(more)))
    for limit in limits:
        if isinstance(limit, OneOf):
            return f"{_ITEMS[annotation]} out of {', '.join(map(str, limit.values))}"
    if get_origin(annotation) is tuple:
        each = [allowed(kind) for kind in get_args(annotation)]
        of = "numbers" if set(each) == {"a number"} else " and ".join(each)
        return f"{'pairs' if len(each) == 2 else 'triples'} of {of}"
    return f"{_ITEMS.get(annotation, 'tables')}{_range(limits)}"


def _flat(limits: Sequence[Any]) -> Iterator[Any]:
    for limit in limits:
        yield from limit.metadata if isinstance(limit, FieldInfo) else (limit,)


def _range(limits: Sequence[Any]) -> str:
    number: dict[str, str] = {}
    for limit in limits:
        for name in ("gt", "ge", "lt", "le"):
            if getattr(limit, name, None) is not None:
                number[name] = f"{getattr(limit, name):.15g}"
    if {"ge", "le"} <= set(number):
        return f" from {number['ge']} to {number['le']}"
    words = []
    if "gt" in number:
        words.append(f"above {number['gt']}")
    elif "ge" in number:
        words.append(f"of {number['ge']} or more")
    if "lt" in number:
        words.append(f"below {number['lt']}")
    elif "le" in number:
        words.append(f"at most {number['le']}")
    if any(getattr(limit, name, None) for limit in limits for name in ("min_length", "pattern")):
        words.append("that is not empty")
    return f" {' and '.join(words)}".rstrip()


# --------------------------------------------------------------------------------------------- refusals
def refusal(kind: type, document: object, where: str, error: ValidationError) -> str:
    """Return the line about the first unknown key, which explains a missing one, else about the first error."""
    errors = error.errors(include_url=False, include_input=False)
    unknown = ("extra_forbidden", "unexpected_keyword_argument")
    first = next((each for each in errors if each["type"] in unknown), errors[0])
    return _line(kind, document, where, first)


def _line(kind: type, document: Any, where: str, error: Any) -> str:
    """Follow an error's place through models and document, down to the key, and say what is wrong there."""
    loc: list[int | str] = list(error["loc"])
    path: list[int | str] = []
    value, entry = document, None
    while loc:
        if isinstance(value, date | time):
            # pydantic got it as a table.
            return f"{_place(where, path)} must be a table, got {_shown(value)}"
        keys = keys_of(kind)
        name = str(loc.pop(0))
        if name not in keys:
            return unknown_key(name, value[name], keys, _place(where, path))
        path.append(name)
        entry = keys[name]
        if error["type"] == "missing" and not loc:
            inner, _ = table_of(entry.annotation)
            form = f"; write {name} = {inner.FORM}" if inner and getattr(inner, "FORM", "") else ""
            return f"{_place(where, path[:-1])}: {name} is missing{form}"
        value = value.get(name) if isinstance(value, Mapping) else getattr(value, name, None)
        inner, shape = table_of(entry.annotation)
        if inner is None and get_origin(entry.annotation) in (dict, Mapping):
            return _plain_entry_line(entry, value, loc, where, path, error)
        if inner is None:
            break
        if loc and shape:
            # An entry of a list of tables, or of tables by name.
            if isinstance(value, date | time):
                return f"{_place(where, path)} must be a table, got {_shown(value)}"
            step = loc.pop(0)
            path.append(step)
            value = cast(Any, value)[step]
        kind = inner
    if error["type"] in ("value_error", "assertion_error"):
        return _at(_place(where, path), reason(error["ctx"]["error"]))
    if error["type"] == "json_invalid":
        return f"{where}: is nested too deeply, or has invalid characters"
    if entry is None:
        return f"{where} must be a table, got {_shown(value)}"
    inner, shape = table_of(entry.annotation)
    if inner is not None:
        return _no_table(where, path, value, inner, shape)
    key = _key(where, path)
    takes = allowed(entry.annotation, entry.metadata)
    if takes.startswith("one of ") and isinstance(value, str):
        return f"{key} = {_shown(value)} is unknown; use {takes}"
    return f"{key} = {_shown(value)} must be {takes}{_finite(error)}"


def _plain_entry_line(
    entry: FieldInfo,
    value: object,
    loc: Sequence[int | str],
    where: str,
    path: Sequence[int | str],
    error: Any,
) -> str:
    """Return the line about a key that takes plain values by name or number."""
    if not isinstance(value, Mapping):
        return f"{_place(where, path)} must be a table, got {_shown(value)}"
    key = _key(where, [*path, loc[0]])
    names, values = get_args(entry.annotation)
    if loc[-1] == "[key]":
        return f"{key} must be {allowed(names)}"
    return f"{key} = {_shown(value[loc[0]])} must be {allowed(values)}{_finite(error)}"


def _finite(error: Any) -> str:
    return " and finite" if error["type"] == "finite_number" else ""


def unknown_key(name: str, value: object, keys: Collection[str], at: str) -> str:
    """Return the line about an unknown key, with the closest known key, or all of them."""
    before = f"{at}: " if at else ""
    hint = did_you_mean(name, keys, f"known keys: {', '.join(keys)}")
    return f"{before}unknown key {name!r} (value {_shown(value)}); {hint}"


def _no_table(where: str, path: list[int | str], value: object, inner: type, shape: str) -> str:
    form = getattr(inner, "FORM", "")
    if form:
        return f"{_key(where, path)} = {_shown(value)} must be written {path[-1]} = {form}"
    if shape == "list" and isinstance(path[-1], str):
        name = ".".join(step for step in path if isinstance(step, str))
        return f"{_key(where, path)} = {_shown(value)} must be written [[{name}]], a list of tables"
    if shape == "dict" and len(path) == 1:
        return f"{_key(where, path)} = {_shown(value)} must be tables [{path[0]}.NAME]"
    return f"{_place(where, path)} must be a table, got {_shown(value)}"


def table_of(annotation: Any) -> tuple[Any, str]:
    """Return the table that a key takes, and "list" or "dict" if it takes several; None for a value."""
    origin = get_origin(annotation)
    inner = [kind for kind in get_args(annotation) if kind is not NoneType]
    if origin in (Annotated, Union, UnionType):
        found = [table_of(kind) for kind in (inner[:1] if origin is Annotated else inner)]
        return next((each for each in found if each[0]), (None, ""))
    if origin in (tuple, dict):
        table, _ = table_of(inner[0] if origin is tuple else inner[1])
        return (table, "list" if origin is tuple else "dict") if table else (None, "")
    is_model = isinstance(annotation, type) and issubclass(annotation, BaseModel)
    is_table = is_model or (isinstance(annotation, type) and is_dataclass(annotation))
    return (annotation, "") if is_table else (None, "")


def _place(where: str, path: Sequence[int | str]) -> str:
    """Return the place of a table: "file.toml [device.mine.processor.cpu]", "file.toml [[event]] 1"."""
    name = ".".join(step for step in path if isinstance(step, str))
    numbers = [str(step + 1) for step in path if isinstance(step, int)]
    table = f"[[{name}]] {' '.join(numbers)}" if numbers else f"[{name}]" if name else ""
    return f"{where} {table}".strip()


def _key(where: str, path: Sequence[int | str]) -> str:
    return _at(_place(where, path[:-1]), str(path[-1]))


def _at(place: str, text: str) -> str:
    """Return a text after its place: "file.toml: seed", "file.toml [train] epochs"."""
    if not place:
        return text
    ends_with_table = re.search(r"\](?: \d+)?$", place)
    return f"{place} {text}" if ends_with_table else f"{place}: {text}"


def _shown(value: object) -> str:
    text = str(value) if isinstance(value, date | time) else repr(value)
    # The text of an array has several lines.
    text = " ".join(map(str.strip, text.splitlines()))
    return text if len(text) <= _SHOWN_CHARS else f"{text[:_SHOWN_CHARS]}…"
