"""The engine `deployment`: what is asked of it, what its processes are told, and one run from end to end."""

import json
import os
import socket
import subprocess
import sys
import tempfile
import time
import tomllib
from pathlib import Path
from typing import Any

import psutil
import pytest
from flwr.app import Context, RecordDict, UserConfig

from socflower.engines.any_engine import with_predictions
from socflower.engines.deployment import flower_processes
from socflower.engines.deployment.attempts import RunHistory
from socflower.engines.deployment.flower_processes import (
    MARK,
    end_marked,
    free_ports,
    marked,
    processes_of,
)
from socflower.engines.deployment.options import DeploymentOptions
from socflower.engines.deployment.private_network import private_network
from socflower.engines.deployment.remote_superlink import connection_to
from socflower.engines.local.grid import LocalGrid
from socflower.engines.local.workers import AppReference
from socflower.engines.run_folder import OUTCOME, RunFolder
from socflower.errors import TrainingFailed
from socflower.report.quality import ACCURACY, costs_to_target
from socflower.report.report import render_report
from socflower.scenario.app.deployed import app_in_bundle, app_in_folder, node_configs, participants
from socflower.scenario.app.remote_main import bundled_server_app
from socflower.scenario.prepared_run import prepare
from socflower.scenario.runner import run_to_folder
from socflower.scenario.schema.config import DataConfig, PrecisionConfig
from socflower.scenario.schema.file import from_document
from tests.command_line import Socflower, is_mistake
from tests.engines.deployment.deployments import DeployedRun
from tests.one_line import one_line, refused
from tests.scenario.small_runs import small, small_result


# ------------------------------------------------------------------------------------------------- end to end
@pytest.mark.timeout(900)
def test_a_run_on_two_super_nodes_gives_the_weights_of_the_local_engine(tmp_path: Path) -> None:
    # With fresh processes the weights are the same, as test_warm_executor checks.
    with DeployedRun(tmp_path, epochs=1) as run:
        run.one("warm_executor.py")
        words = run.one("flower-superlink").cmdline()
        port = int(words[words.index("--port") + 1])
        run.one("flwr-serverapp")  # so the SuperLink answers by now
        with socket.socket() as stranger:
            reached = stranger.connect_ex(("127.0.0.1", port)) == 0
        result = run.finish()
        assert result["superlink_isolated"] is not reached
        assert (result["superlink_shared_because"] is None) is result["superlink_isolated"]
        # Here, where it can be, it is.
        with private_network(os.environ) as network:
            assert result["superlink_isolated"] is (network.shared_because == "")
        assert not run.left_over()
    local = run_to_folder(from_document(result["scenario"]), tmp_path / "local", num_workers=0)
    for key in ("weights_sha256", "final_accuracy", "energy_j", "bytes"):
        assert result[key] == local[key], key
    assert (result["engine"], result["virtual_s"], result["predicted_s"]) == (
        "deployment",
        None,
        local["virtual_s"],
    )
    assert result["restarts"] == []
    for entry, of_local in zip(result["rounds"], local["rounds"], strict=True):
        assert (entry["virtual_s"], entry["predicted_s"]) == (None, of_local["virtual_s"])
        assert 0.0 < entry["wall_s"] <= result["wall_s"]
    assert {path.name for path in run.out.iterdir()} == {"result.json", "trace.json", "report.html"}
    assert "Accuracy over wall time" in (run.out / "report.html").read_text("utf-8")
    assert not list((tmp_path / "tmp").glob("socflower-*"))


INT8 = """\
# Do rings of processes train in int8 what one process does, also when a user takes a machine?
[cluster]
boards = [2, 2]
[train]
epochs = {epochs}
batch_size = 128
learning_rate = 0.02
[precision]
arithmetic = "int8"
[ring]
transport = "TRANSPORT"
[strategy]
groups = 2
sync_interval_epochs = 1
leaders = "LEADERS"
leader_compression = "COMPRESSION"
rebalance = "shares"
rebalance_steps = 2
[[event]]
kind = "preempt"
soc = 3
round = 2
"""


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("transport", "leaders", "compression"),
    [
        ("gloo", "star", "none"),
        ("grpc", "ring", "none"),
        ("gloo", "ring", "int8"),
        ("gloo", "tree", "none"),
        ("grpc", "tree", "int8"),
    ],
)
def test_rings_in_int8_give_the_weights_of_the_local_engine_whoever_leaves(
    tmp_path: Path, transport: str, leaders: str, compression: str
) -> None:
    scenario = (
        INT8.replace("TRANSPORT", transport)
        .replace("LEADERS", leaders)
        .replace("COMPRESSION", compression)
    )
    with DeployedRun(tmp_path, epochs=3, scenario=scenario) as run:
        result = run.finish()
    local = run_to_folder(from_document(result["scenario"]), tmp_path / "local", num_workers=0)
    assert result["weights_sha256"] == local["weights_sha256"]
    assert transport in result["transports"]["inside groups"]
    for each in (result, local):
        kinds = [event["kind"] for entry in each["rounds"] for event in entry["events"]]
        assert {"preempted", "returned"} <= set(kinds)


PIPELINE = """\
# Do stages on SuperNodes train what one process does, also when a user takes a machine between rounds?
[cluster]
soc_bytes_per_s = 125e6
[[board]]
count = 3
device = "jetson-nano"
[model]
name = "vgg-small"
[data]
name = "digits"
[train]
epochs = {epochs}
batch_size = 64
learning_rate = 0.01
[strategy]
name = "hybrid-pipeline"
[pipeline]
micro_batch_sizes = [16]
[[event]]
kind = "preempt"
soc = 1
round = 1
at = 0.0
"""


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_stages_give_the_weights_of_the_local_engine_whoever_leaves(tmp_path: Path) -> None:
    with DeployedRun(tmp_path, epochs=2, scenario=PIPELINE) as run:
        result = run.finish()
    local = run_to_folder(from_document(result["scenario"]), tmp_path / "local", num_workers=0)
    assert len(result["plan"]["pipelines"][0]["stages"]) > 1
    assert result["weights_sha256"] == local["weights_sha256"]
    for each in (result, local):
        kinds = [event["kind"] for entry in each["rounds"] for event in entry["events"]]
        assert {"preempted", "replanned", "returned"} <= set(kinds)


@pytest.mark.parametrize(("key", "value"), [("compression", "fp16"), ("overlap_buckets", 4)])
def test_rings_in_int8_refuse_what_their_sums_cannot_have(key: str, value: Any) -> None:
    scenario = small().replaced(precision=PrecisionConfig(arithmetic="int8"))
    changed = scenario.replaced(strategy=scenario.strategy.replaced(**{key: value}))
    for engine in ("deployment", "local", "simulation"):
        refused(lambda engine=engine: prepare(changed, engine), f"[strategy] {key}", "leave it out")


# --------------------------------------------------------------------------------------------------- options
@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"superlink": "10.0.0.2:8000"}, "127.0.0.1"),
        ({"superlink": "rack.example:8000"}, "--superlink-ca"),
        ({"superlink": "rack", "superlink_ca": Path(__file__)}, "root-certificates"),
        ({"superlink_ca": Path(__file__)}, "HOST:PORT"),
        ({"superlink": "127.0.0.1:8000", "superlink_ca": Path("no.pem")}, "no.pem"),
        ({"checkpoint_folder": "/var/lib/runs"}, "on the machine of --superlink"),
        ({"restarts": -1}, "-1"),
    ],
)
def test_options_that_cannot_be_are_one_line(options: dict[str, Any], says: str) -> None:
    refused(lambda: DeploymentOptions(**options), says)


@pytest.mark.parametrize("address", ["127.0.0.1:8000", "[::1]:8000", "localhost:8000"])
def test_this_machine_needs_no_certificate(address: str) -> None:
    assert DeploymentOptions(superlink=address).is_address


def test_a_super_link_by_name_is_looked_up_in_the_users_configuration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLWR_HOME", str(tmp_path))
    refused(lambda: connection_to(DeploymentOptions(superlink="rack"), tmp_path), "cannot read")
    (tmp_path / "config.toml").write_text(
        "[superlink]\ndefault = 'lab'\n[superlink.lab]\naddress = 'lab:8000'\n"
    )
    environment, name = connection_to(DeploymentOptions(superlink="lab"), tmp_path)
    assert (environment["FLWR_HOME"], name) == (str(tmp_path), "lab")
    refused(
        lambda: connection_to(DeploymentOptions(superlink="rack"), tmp_path), "[superlink.rack]"
    )


def test_a_super_link_by_address_leaves_the_users_configuration_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLWR_HOME", str(tmp_path / "users"))
    authority = tmp_path / "it's ours.pem"
    authority.write_text("")
    environment, name = connection_to(DeploymentOptions(superlink="localhost:8000"), tmp_path)
    config = Path(environment["FLWR_HOME"]) / "config.toml"
    assert tomllib.loads(config.read_text())["superlink"][name] == {
        "address": "localhost:8000",
        "insecure": True,
    }
    connection_to(DeploymentOptions(superlink="rack:8000", superlink_ca=authority), tmp_path)
    assert tomllib.loads(config.read_text())["superlink"][name] == {
        "address": "rack:8000",
        "root-certificates": str(authority),
    }
    assert not (tmp_path / "users").exists()


def test_options_of_a_deployment_need_its_engine(socflower: Socflower, tmp_path: Path) -> None:
    (tmp_path / "case.toml").write_text("")
    ran = socflower("run", "case.toml", "--superlink", "rack", "--checkpoint-folder", "/tmp")
    is_mistake(ran, "--superlink", "--engine deployment", "--engine local")


def test_a_super_link_that_does_not_answer_is_one_line(
    socflower: Socflower, tmp_path: Path
) -> None:
    (tmp_path / "case.toml").write_text("[cluster]\nboards = [1, 1]\n[strategy]\ngroups = 2\n")
    ran = socflower(
        "run",
        "case.toml",
        "--engine",
        "deployment",
        "--superlink",
        f"127.0.0.1:{free_ports(1)[0]}",
        "--json",
    )
    assert ran.status == 2 and ran.out == "" and ran.err.count("\n") == 1
    assert ran.err.startswith(
        "error: engine deployment: Flower did not start the run; the end of its log: "
    )
    assert not (tmp_path / "out").exists()


def test_where_others_train_the_data_need_not_be_here(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("SOCFLOWER_DATA", str(tmp_path))
    monkeypatch.setitem(sys.modules, "datasets", None)
    scenario = from_document(
        {**json.loads(json.dumps(small_result()["scenario"])), "data": {"name": "cifar10"}}
    )
    assert scenario.data == DataConfig(name="cifar10")
    prepare(scenario, "deployment", trains_here=False)


# ------------------------------------------------------------------------------------------- nodes and bundles
def test_each_super_node_is_told_its_part_and_its_place() -> None:
    assert node_configs(small(boards=(2, 1), groups=1)) == (
        "partition-id=0 num-partitions=3 board=0 slot=0",
        "partition-id=1 num-partitions=3 board=0 slot=1",
        "partition-id=2 num-partitions=3 board=1 slot=0",
    )


@pytest.mark.parametrize(
    ("scenario", "socs"),
    [
        (small(), (0, 1, 2, 3)),
        (small("sgd"), (0,)),
        (small("ring", socs=2), (0, 1)),
        (small("fedavg", socs=3), (0, 1, 2)),
        (small(groups="auto", socs=2), (0, 1)),
    ],
)
def test_only_socs_that_take_part_have_a_super_node(scenario: Any, socs: tuple[int, ...]) -> None:
    assert participants(scenario) == socs


def test_a_bundle_has_its_scenario_with_it_and_names_nothing_of_this_machine(
    tmp_path: Path,
) -> None:
    app_in_bundle(small()).write(
        tmp_path / "app", {"num-nodes": 4, "checkpoint-folder": '/srv/"ä"\\x', "fresh": True}
    )
    assert from_document(json.loads((tmp_path / "app" / "scenario.json").read_text())) == small()
    project = tomllib.loads((tmp_path / "app" / "pyproject.toml").read_text("utf-8"))
    assert project["tool"]["flwr"]["app"]["config"] == {
        "num-nodes": 4,
        "checkpoint-folder": '/srv/"ä"\\x',
        "fresh": True,
    }
    assert not any(
        str(tmp_path) in path.read_text("utf-8") for path in (tmp_path / "app").iterdir()
    )
    app_in_folder().write(tmp_path / "other", {"run-folder": str(tmp_path)})
    assert not (tmp_path / "other" / "scenario.json").exists()


def test_the_app_of_a_bundle_leaves_no_folder_on_the_machine_of_its_super_link(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    monkeypatch.setenv("SOCFLOWER_DATA", str(tmp_path / "none"))
    document = {**json.loads(json.dumps(small_result()["scenario"])), "data": {"name": "cifar10"}}
    app_in_bundle(from_document(document)).write(tmp_path / "app", {"num-nodes": 1})
    run_config: UserConfig = {"num-nodes": 1}
    with LocalGrid(
        AppReference(target="socflower.scenario.app.main:client_app"),
        1,
        run_config=run_config,
        num_workers=0,
    ) as grid:
        bundled_server_app(tmp_path / "app")(
            grid,
            Context(
                run_id=grid.run.run_id,
                node_id=0,
                node_config={},
                state=RecordDict(),
                run_config=run_config,
            ),
        )
    assert "socflower:" in capsys.readouterr().out  # the outcome, which is an error here
    assert not list(temporary.glob("socflower-*"))


# ------------------------------------------------------------------------------------------------- processes
SHELL = "sleep 300 & (setsid sleep 300 &) ; sleep 300"


def started(command: list[str], mark: str) -> "subprocess.Popen[bytes]":
    return subprocess.Popen(
        command,
        env=marked(os.environ, mark, "shell"),
        start_new_session=True,
        stdout=subprocess.DEVNULL,
    )


def await_count(mark: str, count: int) -> None:
    deadline = time.monotonic() + 60
    while len(processes_of(mark)) != count:
        assert time.monotonic() < deadline, processes_of(mark)
        time.sleep(0.05)


def test_all_that_carries_the_mark_ends_also_in_other_sessions() -> None:
    mark, others = f"ours-{os.getpid()}", f"theirs-{os.getpid()}"
    shell, other = started(["sh", "-c", SHELL], mark), started(["sleep", "300"], others)
    try:
        await_count(mark, 4)
        end_marked(mark, "another part")
        assert len(processes_of(mark)) == 4
        end_marked(mark)
        assert not processes_of(mark)
        assert other.poll() is None and len(processes_of(others)) == 1
    finally:
        end_marked(mark)
        end_marked(others)
        shell.wait(), other.wait()


def test_what_ignores_a_polite_signal_ends_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flower_processes, "_END_TIMEOUT_S", 1.0)
    mark = f"stubborn-{os.getpid()}"
    stubborn = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
            "print('ready', flush=True)\nwhile True: time.sleep(1)",
        ],
        env=marked(os.environ, mark),
        stdout=subprocess.PIPE,
    )
    try:
        assert stubborn.stdout is not None and stubborn.stdout.readline() == b"ready\n"
        stubborn.stdout.close()
        end_marked(mark)
        assert not processes_of(mark)
    finally:
        stubborn.kill()
        stubborn.wait()


def test_a_guard_ends_what_is_left_when_its_owner_is_killed(tmp_path: Path) -> None:
    program = (
        "import os, subprocess, time\n"
        "from socflower.engines.deployment.flower_processes import marked, own_processes\n"
        "with own_processes() as mark:\n"
        "    child = subprocess.Popen(['sleep', '300'], env=marked(os.environ, mark), start_new_session=True)\n"
        "    print(child.pid, flush=True)\n"
        "    time.sleep(300)\n"
    )
    owner = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None
    child = psutil.Process(int(owner.stdout.readline()))
    until_s = time.monotonic() + 60
    # Empty for a moment, while the program takes the place of its parent's.
    while MARK not in child.environ():
        assert time.monotonic() < until_s
        time.sleep(0.01)
    owner.kill()
    owner.wait()
    owner.stdout.close()
    try:
        child.wait(60)
    finally:
        if child.is_running():
            child.kill()
    assert not child.is_running()


# ---------------------------------------------------------------------------------------------- history of all attempts
def test_restarts_are_one_story_with_each_round_once(tmp_path: Path) -> None:
    folder, said = RunFolder(tmp_path), list[str]()
    history = RunHistory(folder)
    for number in (0, 1, 1, 0, 2):
        history.add_round({"round": number})
    history.record_restart(1, "the SuperLink ended", 2, said.append)
    history.record_restart(2, "the ServerApp's process died", 2, said.append)
    one_line(said[0], "the SuperLink ended", "after round 1", "restart 1 of at most 2")
    refused(
        lambda: history.record_restart(2, "again", 2, said.append),
        *("again", "2 restarts", "round 1: the SuperLink ended", "round 2: the ServerApp's"),
        error=TrainingFailed,
    )
    assert [entry["round"] for entry in folder.read_progress(0)] == [0, 1, 2]
    history.write_outcome(
        {"rounds": [{"round": number} for number in range(3)], "wall_s": 1e9}, None
    )
    outcome = folder.read(OUTCOME)
    assert outcome is not None and outcome["wall_s"] < 1e9
    assert [entry["after_round"] for entry in outcome["restarts"]] == [1, 2]
    walls = [entry["wall_s"] for entry in outcome["rounds"]]
    assert walls == sorted(walls)


def deployed_result() -> dict[str, Any]:
    result = with_predictions({**small_result(), "engine": "deployment"})
    for number, entry in enumerate(result["rounds"]):
        entry["wall_s"] = 10.0 * (number + 1)
    return {
        **result,
        "restarts": [{"after_round": 1, "cause": "the SuperLink ended (killed by SIGKILL)"}],
        "target_accuracy": None,
        "time_to_accuracy_s": None,
    }


def test_time_to_an_accuracy_is_real_where_time_is() -> None:
    result = deployed_result()
    assert result["virtual_s"] is None and result["predicted_s"] == small_result()["virtual_s"]
    assert (
        costs_to_target(result, ACCURACY, result["rounds"][1]["accuracy"])["time_to_accuracy_s"]
        == 20.0
    )


def test_the_report_of_a_deployment_shows_real_time_and_restarts() -> None:
    page = render_report([deployed_result()], title="deployed")
    for part in (
        "Accuracy over wall time",
        ">Wall time<",
        ">Predicted time<",
        "killed by SIGKILL",
        "predicted ",
    ):
        assert part in page, part
    assert "Accuracy over virtual time" not in page
