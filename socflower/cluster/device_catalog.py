"""Devices in TOML: the catalogue (`catalog.toml`), and the reader and writer of device profiles.

A profile has `schema = 1`, tables `[device.NAME]` and, if it was measured, one `[link]`. A figure is
`{ value, source }`; a source says "measured: ...", "assumption: ..." or where the figure was published.
"""

import json
import math
import re
import tomllib
from collections.abc import Mapping
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any, ClassVar

from pydantic import Field

from socflower.cluster.device import Device, LayerTimings, NumberFormat, Processor, StepTimings
from socflower.errors import ConfigError
from socflower.field_rules import SchemaVersion, Text
from socflower.toml_file import Table, read_table, read_toml

SCHEMA = 1
NAME_PATTERN = re.compile(r"[A-Za-z0-9_-]+")
"""Valid device names: bare keys of TOML, so that `[device.NAME]` needs no quotes."""

DEVICE_FIGURES = ("idle_w", "network_w", "memory_bytes", "memory_bytes_per_s", "layer_overhead_s")


class Figure(Table):
    """A figure and its origin."""

    FORM: ClassVar[str] = '{ value = ..., source = "..." }'

    value: float = Field(ge=0)
    source: Text


class PositiveFigure(Figure):
    """A figure that cannot be 0."""

    value: float = Field(gt=0)


class LayerTable(Table):
    """`[[device.NAME.processor.NAME.model.NAME.layer]]`: an operator's seconds at several batch sizes."""

    name: Text
    kind: Text
    batch: tuple[int, ...]
    seconds: tuple[float, ...]

    @property
    def timings(self) -> LayerTimings:
        """The layer as a value."""
        return LayerTimings(
            name=self.name,
            kind=self.kind,
            timings=StepTimings(batches=self.batch, step_s=self.seconds),
        )

    def check(self) -> None:
        """Let the value check itself."""
        _ = self.timings


class ModelFigure(PositiveFigure):
    """A processor's rate on a model, and the times of whole steps."""

    FORM: ClassVar[str] = ""

    batch: tuple[int, ...] | None = None
    step_s: tuple[float, ...] | None = None
    layer: tuple[LayerTable, ...] | None = None

    @property
    def timings(self) -> StepTimings | None:
        """The measured steps, if any."""
        if self.batch is None and self.step_s is None:
            return None
        return StepTimings(batches=self.batch or (), step_s=self.step_s or ())

    def check(self) -> None:
        """Let the value check itself."""
        _ = self.timings


class ProcessorTable(Table):
    """`[device.NAME.processor.NAME]`"""

    flops_per_s: PositiveFigure
    active_w: PositiveFigure
    number_format: NumberFormat = "fp32"
    shares: Text | None = None
    model: dict[str, ModelFigure] = Field({})

    def processor(self, name: str) -> Processor:
        """Return the table as a value."""
        return Processor(
            name=name,
            number_format=self.number_format,
            shares=self.shares or "",
            flops_per_s=self.flops_per_s.value,
            active_w=self.active_w.value,
            flops_per_s_by_model={model: table.value for model, table in self.model.items()},
            timings={model: table.timings for model, table in self.model.items() if table.timings},
            layer_timings={
                model: tuple(layer.timings for layer in table.layer)
                for model, table in self.model.items()
                if table.layer is not None
            },
        )


class LinkTable(Table):
    """`[link]` of a profile, `[device.NAME.link]` of a cluster: the measurement of a device's link to a peer."""

    peer: Text
    # Of the slower direction.
    bytes_per_s: PositiveFigure
    # Of a message of a few bytes.
    round_trip_s: Figure
    # Handling of one small message, at one end.
    message_s: Figure


class DeviceTable(Table):
    """`[device.NAME]`"""

    idle_w: Figure
    network_w: Figure
    memory_bytes: PositiveFigure
    memory_bytes_per_s: PositiveFigure
    layer_overhead_s: Figure
    processor: dict[str, ProcessorTable]
    link: LinkTable | None = None

    def device(self, name: str) -> Device:
        """Return the table as a value."""
        return Device(
            name=name,
            processors={key: table.processor(key) for key, table in self.processor.items()},
            **{key: getattr(self, key).value for key in DEVICE_FIGURES},
        )


def check_devices(tables: Mapping[str, DeviceTable]) -> None:
    """Raise `ConfigError` for an invalid name, or a device with values that do not fit each other."""
    for name, table in tables.items():
        if not NAME_PATTERN.fullmatch(name):
            raise ConfigError(f"device name {name!r} must have letters, digits, - and _ only")
        table.device(name)


class DeviceFile(Table):
    """A device profile."""

    schema_version: SchemaVersion = Field(1, alias="schema")
    device: dict[str, DeviceTable] = Field({})
    link: LinkTable | None = None

    def check(self) -> None:
        """Refuse a profile without devices, and let devices check themselves."""
        if not self.device:
            raise ConfigError("has no [device.NAME] table; `socflower profile --device` prints one")
        check_devices(self.device)


def read_device_file(path: Path) -> dict[str, Any]:
    """Return the document of a device profile, checked; `ConfigError` in one line for invalid input."""
    document = read_toml(path, "device profile")
    read_table(DeviceFile, document, str(path))
    return document


def figure(value: float, source: str) -> dict[str, Any]:
    """Return a figure in the form of a table entry."""
    return {"value": value, "source": source}


def toml_text(document: Mapping[str, Any], *, comment: str = "") -> str:
    """Return a document of profile or catalogue as TOML; `tomllib.loads` gives back an equal one.

    Supports tables of plain values, figures in one line, and lists of tables of plain values.
    """
    lines = [f"# {line}".rstrip() for line in comment.splitlines()]
    _write_table(document, (), lines)
    return "\n".join(lines).strip("\n") + "\n"


def _write_table(table: Mapping[str, Any], path: tuple[str, ...], lines: list[str]) -> None:
    values = {key: value for key, value in table.items() if _is_value(value)}
    # A table that has only sub-tables needs no header of its own.
    if path and (values or not table):
        lines += ["", f"[{_dotted(path)}]"]
    lines += [f"{_key(key)} = {_value(value)}" for key, value in values.items()]
    for key, value in table.items():
        if key in values:
            continue
        # Sub-tables come after the values, which TOML would otherwise assign to the sub-table.
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
        entries = [f"{_key(key)} = {_value(entry)}" for key, entry in value.items()]
        return f"{{ {', '.join(entries)} }}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_value, value)) + "]"
    if isinstance(value, float):
        return _float(value)
    # JSON's strings are TOML's, except that TOML also wants DEL to be escaped.
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def _float(value: float) -> str:
    """Return the shorter of two spellings that read back as the very same number: 32000000000.0 and 32e9."""
    plain = repr(value)
    if value == 0.0 or not math.isfinite(value):
        return plain
    exponent = 3 * math.floor(math.log10(abs(value)) / 3)
    # Beyond 300 the power itself would overflow or lose digits.
    if abs(exponent) >= 300:
        return plain
    scaled = f"{repr(value / 10.0**exponent).removesuffix('.0')}e{exponent}"
    return scaled if len(scaled) < len(plain) and float(scaled) == value else plain


def _key(key: str) -> str:
    return key if NAME_PATTERN.fullmatch(key) else _value(key)


def _dotted(path: tuple[str, ...]) -> str:
    return ".".join(map(_key, path))


@cache
def catalog() -> Mapping[str, Any]:
    """Return the whole catalogue, sources included."""
    file = resources.files("socflower.cluster").joinpath("catalog.toml")
    return tomllib.loads(file.read_text("utf-8"))


def device_names() -> tuple[str, ...]:
    """Return the names of all devices, in the order of the file."""
    return tuple(catalog()["device"])


def device_table(name: str) -> Mapping[str, Any]:
    """Return a device's table with the sources; `ConfigError` lists the names if `name` is unknown."""
    devices = catalog()["device"]
    if name not in devices:
        known = ", ".join(devices)
        raise ConfigError(
            f"device {name!r} is unknown; the catalogue has {known}; files of your own end in .toml"
        )
    table: Mapping[str, Any] = devices[name]
    return table


@cache
def device(name: str) -> Device:
    """Return a device of the catalogue; `ConfigError` lists the names if `name` is unknown."""
    return read_table(DeviceTable, device_table(name), f"catalog.toml [device.{name}]").device(name)


def message_s() -> float:
    """Return the handling cost of one message of one tensor, seconds."""
    return float(catalog()["network"]["message_s"]["value"])


def link_bytes_per_s() -> float:
    """Return the rate of a '1 Gbps' link of a SoC-Cluster, bytes per second and direction."""
    return float(catalog()["network"]["link_bytes_per_s"]["value"])


def usable_memory_bytes(kind: Device) -> float:
    """Return the memory that system and runtime leave for training on a device."""
    board = catalog()["board"]
    reserved_bytes = float(board["reserved_memory_bytes"]["value"])
    least_part = float(board["least_part_for_training"]["value"])
    return max(kind.memory_bytes - reserved_bytes, kind.memory_bytes * least_part)
