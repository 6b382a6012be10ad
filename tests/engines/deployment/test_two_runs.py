"""Two commands train on the same nodes at once: neither finds anything of the other, and both end as if alone."""

import json
import subprocess
import sysconfig
from pathlib import Path

import pytest

from socflower.engines.deployment.flower_processes import free_ports, own_processes
from socflower.engines.deployment.private_network import MACHINE_NETWORK
from socflower.engines.deployment.superlink import LocalFlower
from socflower.scenario.runner import run_to_folder
from socflower.scenario.schema.file import load_scenario
from tests.engines.deployment.deployments import SCENARIO

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
SOCFLOWER = Path(sysconfig.get_path("scripts")) / "socflower"


def test_two_runs_of_a_scenario_at_once_do_not_touch_each_other(tmp_path: Path) -> None:
    """The scenario is the same, so that whatever is named by it would be found by both."""
    scenario = tmp_path / "survive.toml"
    scenario.write_text(SCENARIO.format(epochs=3))
    states = [tmp_path / f"states-{index}" for index in range(2)]
    configs = [
        f'partition-id={index} num-partitions=2 board={index} slot=0 state-folder="{folder}"'
        for index, folder in enumerate(states)
    ]
    ports, folder = free_ports(3), tmp_path / "flower"
    folder.mkdir()
    with own_processes() as mark:
        flower = LocalFlower(folder, configs, ports, mark, print, MACHINE_NETWORK)
        runs = [
            subprocess.Popen(
                [
                    *(SOCFLOWER, "run", scenario, "--engine", "deployment", "--json"),
                    *("--out", tmp_path / f"out-{name}", "--superlink", f"127.0.0.1:{ports[0]}"),
                    *("--checkpoint-folder", tmp_path / f"kept-{name}"),
                    *("--save-model", tmp_path / f"{name}.npz"),
                ],
                cwd=tmp_path,
                env=dict(flower.environment),
                text=True,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
            )
            for name in ("one", "other")
        ]
        try:
            said = [run.communicate(timeout=800) for run in runs]
        finally:
            for run in runs:
                run.kill()
                run.wait()
    local = run_to_folder(load_scenario(scenario), tmp_path / "local", num_workers=0)
    for run, (out, err) in zip(runs, said, strict=True):
        assert run.returncode == 0, err
        result = json.loads(out)
        assert result["weights_sha256"] == local["weights_sha256"]
        assert (result["restarts"], result["resumed_from"]) == ([], [])
        assert all(entry["events"] == [] for entry in result["rounds"])
    assert (tmp_path / "one.npz").exists() and (tmp_path / "other.npz").exists()
    # Each node has a folder of states for each training.
    assert [len([*each.iterdir()]) for each in states] == [2, 2]
