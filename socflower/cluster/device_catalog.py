"""Devices in TOML: the catalogue (`catalog.toml`), and the reader and writer of device profiles.

A profile has `schema = 1`, tables `[device.NAME]` and, if it was measured, one `[link]`. A figure is
`{ value, source }`; a source says "measured: ...", "assumption: ..." or where the figure was published.
"""

import math
import re
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any, TypeVar

from socflower.cluster.device import Device, LayerTimings, Processor, StepTimings
from socflower.cluster.toml_file import read_toml, reject_unknown_keys
from socflower.errors import ConfigError

SCHEMA = 1
NUMBER_FORMATS = ("fp32", "int8")
NAME_PATTERN = re.compile(r"[A-Za-z0-9_-]+")
"""Valid device names: bare keys of TOML, so that `[device.NAME]` needs no quotes."""

DEVICE_FIGURES = ("idle_w", "network_w", "memory_bytes", "memory_bytes_per_s", "layer_overhead_s")
_MAY_BE_ZERO = ("idle_w", "network_w", "layer_overhead_s", "message_s", "round_trip_s")
_PROCESSOR_KEYS = ("flops_per_s", "active_w", "number_format", "shares", "model")
_MODEL_KEYS = ("value", "source", "batch", "step_s", "layer")
_LAYER_KEYS = ("name", "kind", "batch", "seconds")
_LINK_FIGURES = ("bytes_per_s", "round_trip_s", "message_s")
_Result = TypeVar("_Result")


@dataclass(frozen=True, kw_only=True, slots=True)
class LinkMeasurement:
    """The measurement of a device's link to a peer."""

    peer: str
    bytes_per_s: float  # of the slower direction
    round_trip_s: float  # of a message of a few bytes
    message_s: float  # handling of one small message, at one end


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceFile:
    """The validated tables of a profile."""

    devices: Mapping[str, Mapping[str, Any]]
    link: Mapping[str, Any] | None = None

    def device(self, name: str) -> Device:
        """Return a device of the file."""
        return parse_device(name, self.devices[name], "device profile")


def read_device_file(path: Path) -> DeviceFile:
    """Return the tables of a device profile; `ConfigError` in one line for invalid input."""
    document = read_toml(path, "device profile")
    reject_unknown_keys(document, ("schema", "device", "link"), str(path))
    if document.get("schema", SCHEMA) != SCHEMA:
        raise ConfigError(f"{path}: schema = {document['schema']!r} is not known to this version; "
                          f"write schema = {SCHEMA}")
    tables = document.get("device")
    if not isinstance(tables, Mapping) or not tables:
        raise ConfigError(f"{path}: has no [device.NAME] table; `socflower profile --device snapdragon-865` prints one")
    parse_devices(tables, str(path))
    if "link" in document:
        parse_link(document["link"], str(path))
    return DeviceFile(devices=tables, link=document.get("link"))


def parse_devices(tables: object, where: str) -> dict[str, Device]:
    """Return the devices of `[device.NAME]` tables."""
    return {name: parse_device(name, table, where) for name, table in _table(tables, _Place(where, "device")).items()}


def parse_device(name: str, table: object, where: str) -> Device:
    """Return the device of a `[device.NAME]` table; `ConfigError` names `where`, key, value and remedy."""
    if not NAME_PATTERN.fullmatch(name):
        raise ConfigError(f"{where}: device name {name!r} must be made of letters, digits, - and _")
    place = _Place(where, f"device.{name}")
    entry = _table(table, place)
    reject_unknown_keys(entry, (*DEVICE_FIGURES, "processor", "link"), str(place))
    if "link" in entry:
        _link(entry["link"], place.below("link"))
    at = place.below("processor")
    processors = _table(entry.get("processor", {}), at)
    return _made(where, lambda: Device(
        name=name, processors={key: _processor(key, value, at.below(key)) for key, value in processors.items()},
        **{key: _figure_of(entry, key, place) for key in DEVICE_FIGURES},
    ))


def parse_link(table: object, where: str) -> LinkMeasurement:
    """Return the measurement of a `[link]` table."""
    return _link(table, _Place(where, "link"))


def figure(value: float, source: str) -> dict[str, Any]:
    """Return a figure in the form of a table entry."""
    return {"value": value, "source": source}


def toml_text(document: Mapping[str, Any], *, comment: str = "") -> str:
    """Return a document of profile or catalogue as TOML; `tomllib.loads` gives back an equal one.

    Tables of plain values, figures in one line, and lists of tables named "layer" are all there is.
    """
    lines = [f"# {line}".rstrip() for line in comment.splitlines()]
    _write_table(document, (), lines)
    return "\n".join(lines).strip("\n") + "\n"


@dataclass(frozen=True, slots=True)
class _Place:
    """The place of a table in a file, for error texts: "my-board.toml [device.mine.processor.cpu]"."""

    file: str
    path: str

    def __str__(self) -> str:
        return f"{self.file} [{self.path}]"

    def below(self, key: str) -> "_Place":
        return _Place(self.file, f"{self.path}.{key}")


def _link(table: object, at: _Place) -> LinkMeasurement:
    entry = _table(table, at)
    reject_unknown_keys(entry, ("peer", *_LINK_FIGURES), str(at))
    return LinkMeasurement(peer=_text(entry, "peer", at), **{key: _figure_of(entry, key, at) for key in _LINK_FIGURES})


def _processor(name: str, table: object, at: _Place) -> Processor:
    entry = _table(table, at)
    reject_unknown_keys(entry, _PROCESSOR_KEYS, str(at))
    number_format = entry.get("number_format", "fp32")
    if number_format not in NUMBER_FORMATS:
        raise ConfigError(f"{at}: number_format = {number_format!r} is unknown; use one of "
                          f"{', '.join(NUMBER_FORMATS)}")
    rates, timings, layers = {}, {}, {}
    for model, value in _table(entry.get("model", {}), at.below("model")).items():
        here = at.below(f"model.{model}")
        measured = _table(value, here)
        reject_unknown_keys(measured, _MODEL_KEYS, str(here))
        _text(measured, "source", here)
        rates[model] = _number(measured, "value", here, may_be_zero=False)
        if "batch" in measured or "step_s" in measured:
            timings[model] = _timings(measured, "step_s", here)
        if "layer" in measured:
            layers[model] = _layers(measured["layer"], here.below("layer"))
    return _made(at.file, lambda: Processor(
        name=name, number_format=number_format, shares=_text(entry, "shares", at) if "shares" in entry else "",
        flops_per_s=_figure_of(entry, "flops_per_s", at), active_w=_figure_of(entry, "active_w", at),
        flops_per_s_by_model=rates, timings=timings, layer_timings=layers,
    ))


def _layers(value: object, at: _Place) -> tuple[LayerTimings, ...]:
    if not isinstance(value, list):
        raise ConfigError(f"{at}: layer = {value!r} must be written [[{at.path}]], a list of tables")
    made = []
    for index, item in enumerate(value):
        here = _Place(at.file, f"{at.path} {index + 1}")
        entry = _table(item, here)
        reject_unknown_keys(entry, _LAYER_KEYS, str(here))
        made.append(LayerTimings(name=_text(entry, "name", here), kind=_text(entry, "kind", here),
                                 timings=_timings(entry, "seconds", here)))
    return tuple(made)


def _timings(table: Mapping[str, Any], key: str, at: _Place) -> StepTimings:
    batches = _list(table, "batch", int, "whole numbers", at)
    seconds = _list(table, key, (int, float), "numbers (seconds)", at)
    return _made(str(at), lambda: StepTimings(batches=tuple(batches), step_s=tuple(map(float, seconds))))


def _list(table: Mapping[str, Any], key: str, kind: Any, what: str, at: _Place) -> list[Any]:
    value = table.get(key)
    if not isinstance(value, list) or not all(isinstance(item, kind) and not isinstance(item, bool) for item in value):
        raise ConfigError(f"{at}: {key} = {value!r} must be a list of {what}")
    return value


def _table(value: object, at: _Place) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise ConfigError(f"{at} must be a table, got {value!r}")
    return value


def _text(table: Mapping[str, Any], key: str, at: _Place | str) -> str:
    value = table.get(key)
    if not isinstance(value, str) or not value.strip():
        raise ConfigError(f"{at}: {key} = {value!r} must be a text that is not empty")
    return value


def _figure_of(table: Mapping[str, Any], key: str, at: _Place) -> float:
    if key not in table:
        raise ConfigError(f"{at}: {key} is missing; write {key} = {{ value = ..., source = \"...\" }}")
    entry = table[key]
    if not isinstance(entry, Mapping):
        raise ConfigError(f"{at}: {key} = {entry!r} must say where it is from: "
                          f"{key} = {{ value = {entry!r}, source = \"...\" }}")
    here = f"{at} {key}"
    reject_unknown_keys(entry, ("value", "source"), here)
    _text(entry, "source", here)
    return _number(entry, "value", here, may_be_zero=key in _MAY_BE_ZERO)


def _number(table: Mapping[str, Any], key: str, at: _Place | str, *, may_be_zero: bool) -> float:
    value = table.get(key)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf \
            or (value == 0 and not may_be_zero):
        raise ConfigError(f"{at}: {key} = {value!r} must be a number {'of 0 or more' if may_be_zero else 'above 0'}")
    try:
        return float(value)
    except OverflowError:
        raise ConfigError(f"{at}: {key} is too large a number") from None


def _made(where: str, make: Callable[[], _Result]) -> _Result:
    """Return the result of `make`; its errors get the file's name."""
    try:
        return make()
    except ConfigError as error:
        text = str(error)
        raise ConfigError(text if text.startswith(where) else f"{where}: {text}") from None


def _write_table(table: Mapping[str, Any], path: tuple[str, ...], lines: list[str]) -> None:
    values = {key: value for key, value in table.items() if _is_value(value)}
    if path and (values or not table):
        lines += ["", f"[{_dotted(path)}]"]
    lines += [f"{_key(key)} = {_value(value)}" for key, value in values.items()]
    for key, value in table.items():
        if key in values:
            continue
        if isinstance(value, Mapping):
            _write_table(value, (*path, key), lines)
            continue
        for entry in value:
            lines += ["", f"[[{_dotted((*path, key))}]]"]
            lines += [f"{_key(name)} = {_value(item)}" for name, item in entry.items()]


def _is_value(value: object) -> bool:
    """Say whether a value is written in one line: plain ones, lists of plain ones, and figures."""
    if isinstance(value, Mapping):
        return set(value) == {"value", "source"}
    return not (isinstance(value, list) and value and isinstance(value[0], Mapping))


def _value(value: Any) -> str:
    if isinstance(value, Mapping):
        return "{ " + ", ".join(f"{_key(key)} = {_value(entry)}" for key, entry in value.items()) + " }"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_value, value)) + "]"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return _quoted(value)
    return str(value) if isinstance(value, int) else _float(float(value))


def _float(value: float) -> str:
    """Return the shorter of two spellings that read back as the very same number: 32000000000.0 and 32e9."""
    plain = repr(value)
    if value == 0.0 or not math.isfinite(value):
        return plain
    exponent = 3 * math.floor(math.log10(abs(value)) / 3)
    scaled = f"{repr(value / 10.0**exponent).removesuffix('.0')}e{exponent}" if abs(exponent) < 300 else plain
    return scaled if len(scaled) < len(plain) and float(scaled) == value else plain


def _key(key: str) -> str:
    return key if NAME_PATTERN.fullmatch(key) else _quoted(key)


def _dotted(path: tuple[str, ...]) -> str:
    return ".".join(map(_key, path))


def _quoted(text: str) -> str:
    """Return a basic string of TOML; JSON's escapes differ beyond the first 65,536 characters and for DEL."""
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return '"' + "".join(char if char >= " " and char != "\x7f" else f"\\u{ord(char):04x}" for char in escaped) + '"'


@cache
def catalog() -> Mapping[str, Any]:
    """Return the whole catalogue, sources included."""
    return tomllib.loads(resources.files("socflower.cluster").joinpath("catalog.toml").read_text("utf-8"))


def device_names() -> tuple[str, ...]:
    """Return the names of all devices, in the order of the file."""
    return tuple(catalog()["device"])


def device_table(name: str) -> Mapping[str, Any]:
    """Return a device's table with the sources; `ConfigError` lists the names if there is none of that name."""
    devices = catalog()["device"]
    if name not in devices:
        raise ConfigError(f"device {name!r} is unknown; the catalogue has {', '.join(devices)}; a file of your own "
                          "ends in .toml")
    table: Mapping[str, Any] = devices[name]
    return table


@cache
def device(name: str) -> Device:
    """Return a device of the catalogue; `ConfigError` lists the names if there is none of that name."""
    return parse_device(name, device_table(name), "catalog.toml")


def message_s() -> float:
    """Return the handling cost of one message of one tensor, seconds."""
    return float(catalog()["network"]["message_s"]["value"])


def link_bytes_per_s() -> float:
    """Return the rate of a '1 Gbps' link of a SoC-Cluster, bytes per second and direction."""
    return float(catalog()["network"]["link_bytes_per_s"]["value"])
