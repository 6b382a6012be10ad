"""Files of users that begin with a byte-order mark, as editors on Windows write it, are read like those without."""

import codecs
from collections.abc import Callable
from pathlib import Path

import pytest

from socflower.cluster import load_cluster
from socflower.cluster.device_catalog import device_table, toml_text
from socflower.edgecloud.links.bandwidth_profile import read_csv
from socflower.edgecloud.stream.credentials import read_token
from socflower.engines.local.run_app import load_flower_app
from socflower.scenario.measured_file import read_measured
from socflower.scenario.schema.file import load_scenario
from socflower.thermal.fans.config import read_fan_file
from socflower.toml_file import read_toml

CLUSTER = "[cluster]\nboards = 2\nsocs_per_board = 2\n"
APP = """[tool.flwr.app.components]
serverapp = "server:app"
clientapp = "client:app"
[tool.flwr.app.config]
rounds = 3
"""
FAN = """[fan]
output = "simulated"
min_rpm = 1000.0
max_rpm = 5000.0
failsafe_rpm = 4000.0
[policy]
name = "passive"
[[source]]
kind = "local"
"""


def cluster_by_profile(path: Path) -> object:
    """Read a cluster whose device is in the file."""
    (path.parent / "by_profile.toml").write_text(
        f'[cluster]\nboards = 1\ndevice = "{path.name}"\n', "utf-8"
    )
    return load_cluster(path.parent / "by_profile.toml")


READERS: dict[str, tuple[str, str, Callable[[Path], object]]] = {
    "a scenario": ("case.toml", "# How long?\n" + CLUSTER, load_scenario),
    "a cluster": ("rack.toml", CLUSTER, load_cluster),
    "a device profile": (
        "own.toml",
        toml_text({"schema": 1, "device": {"own": device_table("raspberry-pi-4b")}}),
        cluster_by_profile,
    ),
    "an app": ("pyproject.toml", APP, lambda path: load_flower_app(path.parent)),
    "a fan configuration": ("fan.toml", FAN, read_fan_file),
    "any TOML": ("any.toml", "a = 1\n", lambda path: read_toml(path, "file")),
    "a bandwidth profile": (
        "link.csv",
        "time_s,up_bytes_per_s,down_bytes_per_s\n0,1000,2000\n",
        read_csv,
    ),
    "a token": ("token", "0123456789abcdef" * 4 + "\n", read_token),
    "measured costs": ("layers.json", '{"schema": 1}', lambda path: read_measured(path, "profile")),
}


@pytest.mark.parametrize("what", READERS)
def test_a_byte_order_mark_changes_nothing(what: str, tmp_path: Path) -> None:
    name, text, read = READERS[what]
    path = tmp_path / name
    path.write_bytes(text.encode())
    without = read(path)
    path.write_bytes(codecs.BOM_UTF8 + text.encode())
    assert read(path) == without
