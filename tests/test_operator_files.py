"""The files that operators install: units, image and compose file are well-formed, and name what there is, in order."""

import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml

from socflower.cli import main as cli
from socflower.clients.node_config import ring_node
from tests.test_doc_blocks import ROOT

EXAMPLES = ROOT / "docs" / "examples"
BIN = Path(sys.executable).parent
COMPOSE: dict[str, Any] = yaml.safe_load((EXAMPLES / "containers" / "compose.yaml").read_text())
CONTAINERFILE = (EXAMPLES / "containers" / "Containerfile").read_text()


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is missing")
@pytest.mark.parametrize("unit", sorted((EXAMPLES / "systemd").glob("*.service")), ids=str)
def test_systemd_accepts_each_unit(unit: Path, tmp_path: Path) -> None:
    installed = tmp_path / unit.name
    installed.write_text(unit.read_text().replace("/opt/socflower/bin", str(BIN)))
    checked = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", installed],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    said = [line for line in checked.stderr.splitlines() if unit.name in line]
    assert said == []


def test_each_stage_of_the_image_is_made_before_it_is_used_and_nothing_runs_as_root() -> None:
    steps = [
        line.split(maxsplit=1)
        for line in CONTAINERFILE.splitlines()
        if line and not line.startswith("#")
    ]
    known = {"FROM", "RUN", "COPY", "ENV", "USER", "WORKDIR", "CMD"}
    words = [word for word, _ in steps]
    assert {*words} <= known and words[0] == "FROM"
    stages: set[str] = set()
    for word, rest in steps:
        if word == "FROM" and " AS " in rest:
            stages.add(rest.split(" AS ")[1])
        for stage in re.findall(r"--from=(\w+)", rest):
            assert stage in stages
    assert words.index("USER") > max(index for index, word in enumerate(words) if word == "RUN")
    assert "Not run in containers" in CONTAINERFILE


def test_the_services_of_the_compose_file_start_in_order_and_can_be_drained() -> None:
    services = COMPOSE["services"]
    nodes = {name: each for name, each in services.items() if name.startswith("node")}
    rings = []
    for name, node in nodes.items():
        assert {*node["depends_on"]} <= {*services} and node["stop_signal"] == "SIGTERM"
        assert "healthcheck" in services["superlink"]
        words = shlex.split(node["command"])
        options, command = words[2 : words.index("--")], words[words.index("--") + 1 :]
        given = dict(zip(options[::2], options[1::2], strict=True))
        node_command: Any = typer.main.get_command(cli.app)
        known = {option for each in node_command.commands["node"].params for option in each.opts}
        assert words[:2] == ["socflower", "node"] and {*given} <= known
        assert node["healthcheck"]["test"][-1] == given["--metrics"]
        assert int(node["stop_grace_period"].removesuffix("m")) * 60 > float(given["--drain"])
        assert command[0] == "flower-supernode"
        config = dict(
            re.findall(r'([\w-]+)="?([^" ]+)"?', command[command.index("--node-config") + 1])
        )
        found = ring_node({"ring": config["ring"], "ring-bind": config["ring-bind"]})
        assert found is not None and found.address.partition(":")[0] == name
        rings.append((config["board"], config["slot"], config["partition-id"]))
    assert len({*rings}) == len(rings) == int(config["num-partitions"])
    assert COMPOSE["networks"]["rack"]["internal"]
    used = [volume.split(":")[0] for each in services.values() for volume in each["volumes"]]
    assert {*used} == {*COMPOSE["volumes"]}


def test_the_unit_of_a_node_waits_for_its_drain() -> None:
    unit = (EXAMPLES / "systemd" / "socflower-supernode.service").read_text()
    drain_s, stop_s = (
        float(re.search(pattern, unit)[1])  # type: ignore[index]
        for pattern in (r"--drain (\d+)", r"TimeoutStopSec=(\d+)")
    )
    # systemd's signal is for the command alone; its SuperNode would end at once.
    assert stop_s > drain_s and "KillMode=mixed" in unit
