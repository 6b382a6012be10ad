"""Split scenarios on real processes: SuperLink, SuperNodes and a cloud give the weights of the local engine."""

import json
import os
import signal
import subprocess
from pathlib import Path
from typing import Any

import psutil
import pytest

from socflower.engines.deployment.flower_processes import users_environment
from socflower.scenario.runner import run_to_folder
from socflower.scenario.schema.file import load_scenario
from tests.engines.deployment.deployments import DeployedRun

HEAD = """\
# Do a cloud and edges in processes of their own train what one process does?
[train]
epochs = {{epochs}}
batch_size = {batch_size}
learning_rate = 0.05
[cluster]
boards = [{edges}]
[strategy]
name = "{strategy}"
sync_interval_epochs = {rounds}
[edgecloud]
link = "constant"
bytes_per_s = [2e7, 2e7]
latency_s = 0.0
adapt = false
window = [[0.0, 0]]
bits = [32]
error_feedback = "none"
{more}
"""
SAME = ("weights_sha256", "final_accuracy")


def scenario(
    *,
    edges: int = 1,
    strategy: str = "split-replay",
    more: str = "",
    batch_size: int = 500,
    rounds: float = 1.0,
) -> str:
    return HEAD.format(
        edges=edges, strategy=strategy, more=more, batch_size=batch_size, rounds=rounds
    )


CASES = {
    "one edge": (scenario(more='cut = 1\n[model]\nname = "lenet5"'), 1),
    "two parties of clicks": (
        scenario(
            edges=2, batch_size=2000, more='[data]\nname = "clicks"\n[model]\nname = "click-model"'
        ),
        1,
    ),
    "splitfed": (
        scenario(
            edges=2,
            strategy="splitfed",
            rounds=0.5,
            more='cut = 2\n[model]\nname = "lenet5"',
        ),
        1,
    ),
    "shared halves": (
        scenario(edges=2, more='cut = 1\ncloud_model = "shared"\n[model]\nname = "lenet5"'),
        2,
    ),
    "reverse": (scenario(more='cut = 1\n[model]\nname = "digit-generator"'), 2),
}


def locally(text: str, epochs: int, folder: Path) -> dict[str, Any]:
    folder.mkdir()
    (folder / "case.toml").write_text(text.format(epochs=epochs))
    return run_to_folder(load_scenario(folder / "case.toml"), folder / "out", num_workers=0)


# In make test edges train through a real cloud in test_split_cloud.py, and SuperNodes are in test_deployment.py.
@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", CASES)
def test_at_k_0_uncompressed_a_deployment_has_the_weights_of_one_process_bit_for_bit(
    name: str,
    tmp_path: Path,
) -> None:
    text, epochs = CASES[name]
    local = locally(text, epochs, tmp_path / "local")
    with DeployedRun(tmp_path, epochs=epochs, scenario=text) as run:
        result = run.finish()
        assert not run.left_over()
    assert {key: result[key] for key in SAME} == {key: local[key] for key in SAME}
    assert (
        result["transports"]["edge and cloud"] == "gRPC"
        and local["transports"]["edge and cloud"] == "in process"
    )
    assert result["split"]["max_staleness"] == 0
    for entry in result["rounds"]:
        assert entry["events"] == []
        if entry["round"]:
            assert len(entry["links"]) == local["split"]["num_edges"]


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("arithmetic", ["fp32", "int8"])
def test_the_simulation_engine_gives_what_the_local_one_gives(
    tmp_path: Path, arithmetic: str
) -> None:
    more = f'cut = 1\n[model]\nname = "lenet5"\n[precision]\narithmetic = "{arithmetic}"'
    text = scenario(edges=2, more=more).replace("[[0.0, 0]]", "[[0.0, 3]]")
    local = locally(text, 2, tmp_path / "local")
    simulated = run_to_folder(
        load_scenario(tmp_path / "local" / "case.toml"), tmp_path / "out", "simulation"
    )
    for key in (*SAME, "virtual_s", "energy_j", "bytes"):
        assert simulated[key] == local[key], key
    assert simulated["split"] == local["split"]


def cloud_of(run: DeployedRun) -> psutil.Process | None:
    for process in run.processes("socflower"):
        if "serve" in process.cmdline():
            return process
    return None


def is_within_a_round(run: DeployedRun, num_batches: int = 2, at_most: int = 10**6) -> bool:
    """Whether at least and at most so many batches of the present round are done; asked as any operator would.

    Where the run has a network of its own, the question is asked in there.
    """
    cloud = cloud_of(run)
    if cloud is None or run.newest() < 1:
        return False
    words = cloud.cmdline()
    command = [
        "socflower",
        "cloud",
        "status",
        words[words.index("--listen") + 1],
        "--json",
        "--token-file",
        words[words.index("--token-file") + 1],
    ]
    kinds = [
        kind
        for kind in ("user", "net")
        if Path(f"/proc/{cloud.pid}/ns/{kind}").stat().st_ino
        != Path(f"/proc/self/ns/{kind}").stat().st_ino
    ]
    if kinds:
        credentials = ["--preserve-credentials"] if "user" in kinds else []
        command = [
            "nsenter",
            "--target",
            str(cloud.pid),
            *credentials,
            *(f"--{kind}" for kind in kinds),
            *command,
        ]
    asked = subprocess.run(
        command, env=users_environment(), capture_output=True, text=True, check=True
    )
    sessions = json.loads(asked.stdout)["sessions"]
    return any(
        session["batch"] is None and num_batches <= session["num_batches_done"] <= at_most
        for session in sessions
    )


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_deployment_whose_cloud_is_killed_goes_on_and_nothing_differs(tmp_path: Path) -> None:
    """Killed within a round, on a line so slow that each takes seconds."""
    text = scenario(more='cut = 1\n[model]\nname = "lenet5"').replace("2e7", "1.5e6")
    local = locally(text, 3, tmp_path / "local")
    with DeployedRun(tmp_path, epochs=3, scenario=text) as run:
        run.wait_for(lambda: is_within_a_round(run, at_most=4))  # of 8, for asking takes a while
        cloud = cloud_of(run)
        assert cloud is not None
        os.kill(cloud.pid, signal.SIGKILL)
        result = run.finish()
        assert "the cloud ended (killed by SIGKILL); starting it again" in run.said().replace(
            "\n", " "
        )
        assert not run.left_over()
    assert {key: result[key] for key in SAME} == {key: local[key] for key in SAME}
    texts = [event["text"] for entry in result["rounds"] for event in entry["events"]]
    assert any("rolled back to the last checkpoint" in text for text in texts), texts


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_deployment_whose_server_app_is_killed_ends_and_says_that_the_cloud_began_anew(
    tmp_path: Path,
) -> None:
    text = scenario(more='cut = 1\n[model]\nname = "lenet5"').replace("2e7", "3e6")
    with DeployedRun(tmp_path, epochs=3, scenario=text) as run:
        run.wait_for(lambda: run.newest() >= 1)
        os.kill(run.one("flwr-serverapp").pid, signal.SIGKILL)
        result = run.finish()
        assert not run.left_over()
    (restart,) = result["restarts"]
    texts = [event["text"] for entry in result["rounds"] for event in entry["events"]]
    assert any("the cloud's half begins a new session before batch" in text for text in texts), (
        texts
    )
    assert result["rounds"][-1]["round"] == 3 and restart["cause"] == "the ServerApp's process died"


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_an_edge_whose_client_is_killed_ends_the_run_with_a_line_and_the_same_command_goes_on(
    tmp_path: Path,
) -> None:
    """Its half of the model is gone with it; what was there before the round is in the checkpoint."""
    text = scenario(more='cut = 1\n[model]\nname = "lenet5"').replace("2e7", "2e6")
    with DeployedRun(tmp_path, epochs=3, scenario=text) as run:
        run.wait_for(lambda: is_within_a_round(run))
        os.kill(run.one("flwr-clientapp").pid, signal.SIGKILL)
        assert run.process.wait(240) == 1, run.said()
        said = " ".join(run.said().split())
        assert "a part of the model is missing; first cause: edge 0" in said
        assert not run.left_over()
    with DeployedRun(tmp_path, epochs=3, scenario=text) as again:
        result = again.finish()
        assert not again.left_over()
    assert result["resumed_from"] and [entry["round"] for entry in result["rounds"]] == [0, 1, 2, 3]
