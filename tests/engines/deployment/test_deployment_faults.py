"""What dies while a deployment runs: the run ends as if it had not, and nothing of it is left."""

import os
import signal
from pathlib import Path
from typing import Any

import psutil
import pytest

from socflower.errors import TrainingFailed
from socflower.scenario.runner import run_to_folder
from socflower.scenario.schema.file import load_scenario
from tests.engines.deployment.deployments import SCENARIO, DeployedRun
from tests.one_line import refused

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("reference")
    (folder / "survive.toml").write_text(SCENARIO.format(epochs=3))
    return run_to_folder(load_scenario(folder / "survive.toml"), folder / "out", num_workers=0)


def assert_as_uninterrupted(result: dict[str, Any], reference: dict[str, Any]) -> None:
    for key in ("weights_sha256", "final_accuracy", "energy_j", "bytes"):
        assert result[key] == reference[key], key
    assert result["predicted_s"] == reference["virtual_s"]
    assert [entry["round"] for entry in result["rounds"]] == [
        entry["round"] for entry in reference["rounds"]
    ]
    walls = [entry["wall_s"] for entry in result["rounds"]]
    assert walls == sorted(walls) and walls[-1] <= result["wall_s"]


@pytest.mark.parametrize(
    ("command", "cause"),
    [
        ("flwr-serverapp", "the ServerApp's process died"),
        ("flower-superlink", "the SuperLink ended (killed by SIGKILL)"),
    ],
)
def test_a_run_goes_on_when_a_process_of_its_server_is_killed(
    command: str, cause: str, reference: dict[str, Any], tmp_path: Path
) -> None:
    with DeployedRun(tmp_path) as run:
        run.wait_for(lambda: run.newest() >= 1)
        os.kill(run.one(command).pid, signal.SIGKILL)
        result = run.finish()
        assert_as_uninterrupted(result, reference)
        (restart,) = result["restarts"]
        assert restart == {"after_round": result["resumed_from"][0], "cause": cause}
        assert 1 <= restart["after_round"] < 3
        assert (
            f"{cause}; continuing after round {restart['after_round']} (restart 1 of at most 3)"
            in run.said()
        )
        assert not run.left_over()
    assert sorted(path.name for path in run.out.iterdir()) == [
        "report.html",
        "result.json",
        "trace.json",
    ]
    assert not list((tmp_path / "tmp").glob("socflower-*"))


def test_without_restarts_the_death_of_the_server_app_ends_the_run_with_its_cause(
    tmp_path: Path,
) -> None:
    with DeployedRun(tmp_path, "--restarts", "0") as run:
        run.wait_for(lambda: run.newest() >= 1)
        os.kill(run.one("flwr-serverapp").pid, signal.SIGKILL)
        assert run.process.wait(120) == 1
        assert (
            "error: engine deployment: the ServerApp's process died; --restarts is 0; round"
            in run.said()
        )
        assert "the same command resumes after it" in run.said()
        assert not run.left_over()


def test_a_killed_super_node_is_told_of_and_not_started_again(tmp_path: Path) -> None:
    """Killed where nothing is asked of it any more: what the strategy makes of its silence is tested elsewhere."""
    with DeployedRun(tmp_path, epochs=2) as run:
        run.wait_for(lambda: run.newest() >= 1)
        victim = run.one("flower-supernode").pid
        os.kill(victim, signal.SIGKILL)
        run.wait_for(lambda: f"SuperNode {victim} (partition-id=" in run.said())
        assert "ended (killed by SIGKILL); 1 left" in run.said()
        assert len(run.processes("flower-supernode")) == 1


def test_a_client_that_hangs_at_the_first_question_is_left_out_and_comes_back(
    tmp_path: Path,
) -> None:
    """It is stopped with the process that would start another one, and continued when a round was trained without it.

    Their SuperNode stays connected.
    """
    with DeployedRun(tmp_path, "--fresh-processes", epochs=4) as run:
        client = run.one("flwr-clientapp")
        hung = [client.parent(), client]
        for process in hung:
            process.suspend()
        run.wait_for(lambda: run.newest() >= 1)
        for process in hung:
            process.resume()
        result = run.finish()
        assert not run.left_over()
    assert result["restarts"] == []
    events = [(entry["round"], event) for entry in result["rounds"] for event in entry["events"]]
    first, (number, second), *later = events
    assert first[0] == number == 1 and second["kind"] == "replanned"
    assert first[1]["kind"] == "no-answer" and "did not answer within" in first[1]["text"]
    assert [event["kind"] for _, event in later][:2] == ["returned", "replanned"]


def loads_torch(process: psutil.Process) -> bool:
    """Whether a process is that far in its start: Flower has handed it the run, and it imports the app."""
    try:
        return any("libtorch" in mapped.path for mapped in process.memory_maps())
    except psutil.Error:
        return False


def test_a_server_app_killed_while_it_starts_is_started_again(tmp_path: Path) -> None:
    with DeployedRun(tmp_path, epochs=1) as run:
        victim = run.one("flwr-serverapp")
        run.wait_for(lambda: loads_torch(victim))
        victim.suspend()  # else it may get further before it is killed
        told = list((tmp_path / "tmp").glob("socflower-*/attempt-1/server.json"))
        assert not told, "it was faster than this test"
        victim.kill()
        result = run.finish()
        (restart,) = result["restarts"]
        assert restart == {
            "after_round": 0,
            "cause": "the ServerApp's process died while it started",
        }
        assert not run.left_over()


def test_a_super_link_killed_while_it_starts_is_started_again(tmp_path: Path) -> None:
    with DeployedRun(tmp_path, epochs=1) as run:
        run.one("flower-superlink").kill()
        result = run.finish()
        assert [restart["cause"] for restart in result["restarts"]] == [
            "the SuperLink ended (killed by SIGKILL)"
        ]


def test_a_server_app_that_fails_by_itself_as_it_starts_is_not_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "socflower.scenario.app.deployed._IN_FOLDER",
        "app = None\nraise ImportError('no {part}App here')",
    )
    scenario = tmp_path / "survive.toml"
    scenario.write_text(SCENARIO.format(epochs=1))
    said: list[str] = []
    refused(
        lambda: run_to_folder(
            load_scenario(scenario), tmp_path / "out", "deployment", on_notice=said.append
        ),
        "import",
        error=TrainingFailed,
    )
    assert said == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGKILL])
def test_whatever_ends_the_command_ends_all_it_started(
    number: signal.Signals, tmp_path: Path
) -> None:
    with DeployedRun(tmp_path, epochs=20) as run:
        run.one("warm_executor.py")
        run.one("flwr-serverapp")
        os.kill(run.process.pid, number)
        assert run.process.wait(60) == (130 if number == signal.SIGINT else -number)
        assert not run.left_over()
        # Where it was killed itself, its guard removes them, last of all.
        run.wait_until_gone("socflower-*")
