"""The catalogue of devices and network constants: `catalog.toml`, read once."""

import tomllib
from collections.abc import Mapping
from functools import cache
from importlib import resources
from typing import Any

from socflower.cluster.device import Device
from socflower.cluster.device_file import parse_device
from socflower.errors import ConfigError


@cache
def catalog() -> Mapping[str, Any]:
    """Return the catalogue as it stands in the file, sources included."""
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
