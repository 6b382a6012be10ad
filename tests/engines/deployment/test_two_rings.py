"""Two trainings in rings at once on the same nodes: neither finds anything of the other, and both end as if alone."""

import json
import subprocess
import sysconfig
from pathlib import Path

import numpy as np
import pytest

from socflower.engines.deployment.flower_processes import free_ports, own_processes
from socflower.engines.deployment.private_network import MACHINE_NETWORK
from socflower.engines.deployment.superlink import LocalFlower

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
SOCFLOWER = Path(sysconfig.get_path("scripts")) / "socflower"
# Rings over gRPC sum in one order everywhere, so that a run's weights are the same bits each time.
SCENARIO = """\
# Do two runs in rings leave each other alone?
seed = {seed}
[cluster]
boards = [2]
[train]
epochs = 3
batch_size = 128
learning_rate = 0.05
[strategy]
groups = 1
sync_interval_epochs = 1
[ring]
transport = "grpc"
"""


class Run:
    """`socflower run` of one of the scenarios on the nodes."""

    def __init__(self, folder: Path, name: str, seed: int, flower: LocalFlower, port: int) -> None:
        self._scenario = folder / f"seed-{seed}.toml"
        self._scenario.write_text(SCENARIO.format(seed=seed))
        self._model = folder / f"{name}.npz"
        self._process = subprocess.Popen(
            [
                *(SOCFLOWER, "run", self._scenario, "--engine", "deployment", "--json"),
                *("--out", folder / f"out-{name}", "--superlink", f"127.0.0.1:{port}"),
                *("--checkpoint-folder", folder / f"kept-{name}", "--save-model", self._model),
            ],
            cwd=folder,
            env=dict(flower.environment),
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )

    def finish(self) -> tuple[dict[str, object], dict[str, np.ndarray]]:
        """Return result and model of a run that ends well."""
        try:
            out, said = self._process.communicate(timeout=400)
        finally:
            self._process.kill()
            self._process.wait()
        assert self._process.returncode == 0, said
        with np.load(self._model) as weights:
            return json.loads(out), dict(weights)


def test_two_rings_at_once_on_the_same_nodes_do_not_touch_each_other(tmp_path: Path) -> None:
    """Momentum and the ports of rings are each run's own; with another's, weights or events would differ."""
    states = [tmp_path / f"states-{index}" for index in range(2)]
    ports, folder = free_ports(5), tmp_path / "flower"
    configs = [
        f'partition-id={index} num-partitions=2 board=0 slot={index} ring="127.0.0.1:{port}" '
        f'state-folder="{state}"'
        for index, (state, port) in enumerate(zip(states, ports, strict=False))
    ]
    folder.mkdir()
    with own_processes() as mark:
        flower = LocalFlower(folder, configs, ports[2:], mark, print, MACHINE_NETWORK)
        at_once = [Run(tmp_path, f"both-{seed}", seed, flower, ports[2]) for seed in (1, 2)]
        together = [run.finish() for run in at_once]
        alone = [Run(tmp_path, f"alone-{seed}", seed, flower, ports[2]).finish() for seed in (1, 2)]
    for (result, weights), (expected, right) in zip(together, alone, strict=True):
        assert result["restarts"] == []
        assert [entry["events"] for entry in result["rounds"]] == [[]] * 4
        assert result["weights_sha256"] == expected["weights_sha256"]
        assert weights.keys() == right.keys()
        assert all(np.array_equal(weights[name], right[name]) for name in right)
    assert together[0][0]["weights_sha256"] != together[1][0]["weights_sha256"]
    # Each node has a folder of states for each training, and nothing else.
    assert [len([*each.iterdir()]) for each in states] == [4, 4]
