"""The catalogue of devices and network constants: `catalog.toml`, read once."""

import tomllib
from collections.abc import Mapping
from functools import cache
from importlib import resources
from typing import Any

from socflower.cluster.device import Device, Processor
from socflower.errors import ConfigError

_DEVICE_KEYS = ("idle_w", "network_w", "memory_bytes", "memory_bytes_per_s", "layer_overhead_s")


@cache
def catalog() -> Mapping[str, Any]:
    """Return the catalogue as it stands in the file, sources included."""
    return tomllib.loads(resources.files("socflower.cluster").joinpath("catalog.toml").read_text("utf-8"))


def device_names() -> tuple[str, ...]:
    """Return the names of all devices, in the order of the file."""
    return tuple(catalog()["device"])


@cache
def device(name: str) -> Device:
    """Return a device of the catalogue; `ConfigError` lists the names if there is none of that name."""
    devices = catalog()["device"]
    if name not in devices:
        raise ConfigError(f"device {name!r} is unknown; the catalogue has {', '.join(devices)}")
    entry = devices[name]
    return Device(name=name, processors={key: _processor(key, table) for key, table in entry["processor"].items()},
                  **{key: float(entry[key]["value"]) for key in _DEVICE_KEYS})


def message_s() -> float:
    """Return the handling cost of one message of one tensor, seconds."""
    return float(catalog()["network"]["message_s"]["value"])


def link_bytes_per_s() -> float:
    """Return the rate of a '1 Gbps' link of a SoC-Cluster, bytes per second and direction."""
    return float(catalog()["network"]["link_bytes_per_s"]["value"])


def _processor(name: str, table: Mapping[str, Any]) -> Processor:
    return Processor(
        name=name, number_format=table["number_format"], flops_per_s=float(table["flops_per_s"]["value"]),
        active_w=float(table["active_w"]["value"]),
        flops_per_s_by_model={model: float(figure["value"]) for model, figure in table.get("model", {}).items()},
    )
