"""A real SuperLink is killed while a submitted run is under way, and comes back."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from socflower.engines.deployment.flower_processes import free_ports, own_processes
from socflower.engines.deployment.private_network import MACHINE_NETWORK
from socflower.engines.deployment.superlink import LocalFlower
from socflower.scenario.runner import run_to_folder
from socflower.scenario.schema.file import load_scenario
from tests.engines.deployment.deployments import SCENARIO

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
# The command line, of a run that was submitted a quarter of an hour before: longer ago than a SuperLink may be away.
COMMAND = """\
import sys, time, types
from socflower.cli.main import main
from socflower.engines.deployment import remote_superlink

ages_s = [900.0]
remote_superlink.time = types.SimpleNamespace(
    sleep=time.sleep, monotonic=lambda: time.monotonic() - (ages_s.pop() if ages_s else 0.0))
sys.exit(main())
"""


def test_a_command_goes_on_when_the_super_link_of_an_old_run_is_away_for_seconds(
    tmp_path: Path,
) -> None:
    scenario, kept, said = tmp_path / "survive.toml", tmp_path / "kept", tmp_path / "said"
    scenario.write_text(SCENARIO.format(epochs=4))
    configs = [
        f'partition-id={index} num-partitions=2 board={index} slot=0 state-folder="{tmp_path / str(index)}"'
        for index in range(2)
    ]
    ports, folder = free_ports(3), tmp_path / "flower"
    folder.mkdir()
    with own_processes() as mark, said.open("w") as stderr:
        flower = LocalFlower(folder, configs, ports, mark, print, MACHINE_NETWORK)
        command = subprocess.Popen(
            [
                sys.executable,
                "-c",
                COMMAND,
                "run",
                scenario,
                "--engine",
                "deployment",
                "--json",
                "--out",
                tmp_path / "out",
                "--superlink",
                f"127.0.0.1:{ports[0]}",
                "--checkpoint-folder",
                kept,
            ],
            cwd=tmp_path,
            env=dict(flower.environment),
            text=True,
            stdout=subprocess.PIPE,
            stderr=stderr,
        )
        try:
            while not [*kept.glob("round-*.ckpt")]:
                assert command.poll() is None, said.read_text()
                time.sleep(0.2)
            os.kill(flower._superlink.pid, signal.SIGKILL)
            time.sleep(2.0)
            while command.poll() is None and "does not answer" not in said.read_text():
                time.sleep(0.2)
            assert command.poll() is None, said.read_text()
            flower._superlink.start()
            output, _ = command.communicate(timeout=300)
        finally:
            command.kill()
            command.communicate()
    assert command.returncode == 0, said.read_text()
    result, local = (
        json.loads(output),
        run_to_folder(load_scenario(scenario), tmp_path / "local", num_workers=0),
    )
    assert result["weights_sha256"] == local["weights_sha256"]
    assert [entry["round"] for entry in result["rounds"]] == [0, 1, 2, 3, 4]
