"""A SuperLink that is not ours, behind its proxy, with TLS and registered keys: docs/guides/deployment.md in small.

SuperNodes and strangers reach the machine at 127.0.0.2, where only the proxy listens; operators, as by the end of a
tunnel, at 127.0.0.1. Where nginx is not installed there is no proxy, and what is about it is skipped.
"""

import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sysconfig
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from socflower.engines.deployment.flower_processes import (
    end_marked,
    flower_environment,
    free_ports,
    marked,
    own_processes,
    processes_of,
    start,
    write_connection,
)
from socflower.scenario.app.deployed import app_in_bundle
from socflower.scenario.runner import run_to_folder
from socflower.scenario.schema.file import load_scenario
from tests.engines.deployment.deployments import SCENARIO
from tests.engines.deployment.nginx_door import DOOR_ADDRESS, FLEET, TRICKS, Door, missing

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
SERVICE = (
    Path(__file__).parents[3] / "docs" / "examples" / "systemd" / "socflower-superlink.service"
)
SOCFLOWER = Path(sysconfig.get_path("scripts")) / "socflower"
OPENSSL = """\
openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-384 -nodes -days 3650 \
  -keyout ca.key -out ca.pem -subj "/CN=rack authority"
openssl req -newkey ec -pkeyopt ec_paramgen_curve:P-384 -nodes -keyout superlink.key -out superlink.csr \
  -subj "/CN=superlink"
openssl x509 -req -in superlink.csr -CA ca.pem -CAkey ca.key -CAcreateserial -days 825 -out superlink.pem \
  -extfile <(printf "subjectAltName=IP:127.0.0.2,IP:127.0.0.1,DNS:localhost")
for node in node0 node1 stranger; do ssh-keygen -q -t ecdsa -b 384 -N "" -C "" -f $node; done
"""


class Rack:
    """A SuperLink and two registered SuperNodes, started as on a rack; and strangers who would like to take part."""

    def __init__(self, folder: Path, mark: str) -> None:
        self.folder = folder
        self.mark = mark
        self.started: list[subprocess.Popen[bytes]] = []
        subprocess.run(
            ["bash", "-euc", OPENSSL], cwd=folder, check=True, capture_output=True, timeout=60
        )
        self.port, door_port, *self.node_ports = free_ports(7)
        self.environment = flower_environment(folder)
        write_connection(
            Path(self.environment["FLWR_HOME"]),
            "rack",
            f"127.0.0.1:{self.port}",
            root_certificates=folder / "ca.pem",
        )
        self.start(service_command(folder, self.port), "superlink")
        self.door = None
        if missing() is None:
            nginx = folder / "nginx"
            nginx.mkdir()
            self.door = Door(nginx, folder, door_port, self.port)
        for node in ("node0", "node1"):
            self.flwr(
                "supernode", "register", f"{node}.pub", "rack", until="registered successfully"
            )
        for index, node in enumerate(("node0", "node1")):
            self.start_node(
                node,
                f"partition-id={index} num-partitions=2 board={index} slot=0 "
                f'state-folder="{folder / "states" / node}"',
                "--auth-supernode-private-key",
                node,
            )

    def start(self, command: list[str], name: str) -> "subprocess.Popen[bytes]":
        return self.keep(
            start(
                command,
                marked(self.environment, self.mark, name),
                self.folder / f"{name}.log",
                self.folder,
            )
        )

    def keep(self, process: "subprocess.Popen[bytes]") -> "subprocess.Popen[bytes]":
        self.started.append(process)
        return process

    def start_node(
        self, name: str, config: str, *options: str, trust: str = "ca.pem"
    ) -> "subprocess.Popen[bytes]":
        home = self.folder / f"home-{name}"
        home.mkdir()
        address = f"127.0.0.1:{self.port}" if self.door is None else self.door.address
        command = [
            "flower-supernode",
            "--superlink",
            address,
            "--root-certificates",
            trust,
            "--port",
            str(self.node_ports.pop()),
            "--node-config",
            config,
            *options,
        ]
        return self.keep(
            start(
                command,
                {**marked(self.environment, self.mark, name), "FLWR_HOME": str(home)},
                self.folder / f"{name}.log",
                self.folder,
            )
        )

    def flwr(self, *arguments: str, until: str) -> str:
        """What a command says as soon as it says it: the SuperLink may still be starting."""
        deadline = time.monotonic() + 120
        while True:
            ran = subprocess.run(
                ["flwr", *arguments],
                env=self.environment,
                cwd=self.folder,
                capture_output=True,
                text=True,
                timeout=60,
                check=False,
            )
            if until in ran.stdout:
                return ran.stdout
            assert time.monotonic() < deadline, ran.stdout + ran.stderr
            time.sleep(1)

    def server_apps(self) -> list[psutil.Process]:
        found = []
        for process in processes_of(self.mark, "superlink"):
            with suppress(psutil.Error):
                if process.name() == "flwr-serverapp":
                    found.append(process)
        return found

    def log(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text("utf-8", "replace")


def service_command(folder: Path, port: int) -> list[str]:
    """The command of the shipped service of the SuperLink, with the port and the files of a test."""
    unit = SERVICE.read_text("utf-8")
    (command,) = re.findall(r"^ExecStart=\S+/(flower-superlink (?:.*\\\n)*.*)$", unit, re.MULTILINE)
    assert " --port 8000 " in command
    words = re.sub(
        r"/(?:etc|var/lib)/socflower", str(folder), command.replace("--port 8000", f"--port {port}")
    )
    return shlex.split(words.replace("\\\n", " "))


@pytest.fixture(scope="module")
def rack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rack]:
    with own_processes() as mark:
        rack = Rack(tmp_path_factory.mktemp("rack"), mark)
        yield rack
        if rack.door is not None:
            rack.door.__exit__()
    for process in rack.started:
        process.wait(60)


def submitted(rack: Rack, out: Path, *options: str, epochs: int = 2) -> "subprocess.Popen[str]":
    scenario = write_scenario(out.parent, epochs)
    return subprocess.Popen(
        [SOCFLOWER, "run", scenario, "--engine", "deployment", "--out", out, "--json", *options],
        cwd=out.parent,
        env={**marked(rack.environment, rack.mark, "submitting")},
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def assert_as_local(result: dict[str, Any], folder: Path) -> None:
    local = run_to_folder(
        load_scenario(folder / "survive.toml"),
        folder / "local",
        num_workers=0,
        save_model=folder / "local.npz",
    )
    for key in ("weights_sha256", "final_accuracy", "energy_j", "bytes", "scenario"):
        assert result[key] == local[key], key
    assert result["predicted_s"] == local["virtual_s"]
    assert json.loads((folder / "out" / "trace.json").read_text()) == json.loads(
        (folder / "local" / "trace.json").read_text()
    )


def test_strangers_are_refused_and_the_run_is_unharmed(rack: Rack, tmp_path: Path) -> None:
    strangers = {
        "nokey": rack.start_node("nokey", "partition-id=0 num-partitions=2"),
        "stranger": rack.start_node(
            "stranger",
            "partition-id=0 num-partitions=2",
            "--auth-supernode-private-key",
            "stranger",
        ),
        # Who trusts another authority does not talk to this SuperLink.
        "distrusting": rack.start_node(
            "distrusting",
            "partition-id=0",
            "--auth-supernode-private-key",
            "node0",
            trust=_other_authority(tmp_path),
        ),
    }
    run = submitted(
        rack,
        tmp_path / "out",
        "--superlink",
        f"127.0.0.1:{rack.port}",
        "--superlink-ca",
        str(rack.folder / "ca.pem"),
        "--save-model",
        str(tmp_path / "model.npz"),
    )
    out, said = run.communicate(timeout=400)
    assert run.returncode == 0, said
    result = json.loads(out)
    assert result["restarts"] == []
    assert all(entry["events"] == [] for entry in result["rounds"])
    assert_as_local(result, tmp_path)
    with np.load(tmp_path / "model.npz") as sent, np.load(tmp_path / "local.npz") as here:
        assert sent.files == here.files and all(
            np.array_equal(sent[name], here[name]) for name in sent.files
        )
    unregistered = "All SuperNodes must be registered" if rack.door is None else "404 Not Found"
    for name, cause in (
        ("nokey", unregistered),
        ("stranger", "Failed to activate SuperNode"),
        ("distrusting", "CERTIFICATE_VERIFY_FAILED"),
    ):
        end_of_wait = time.monotonic() + 60
        while cause not in rack.log(name):
            assert time.monotonic() < end_of_wait, rack.log(name)
            time.sleep(0.5)
        end_marked(rack.mark, name)
        strangers[name].wait(60)
    listed = rack.flwr("supernode", "list", "rack", "--format", "json", until="online")
    assert len(re.findall(r'"online"', listed)) == 2


def test_whoever_reaches_the_machine_and_holds_its_authority_can_neither_register_nor_submit(
    rack: Rack,
    tmp_path: Path,
) -> None:
    """With `ca.pem`, which is public, Flower's own commands, and calls that differ only in where they are sent."""
    if rack.door is None:
        pytest.skip(str(missing()))
    with (
        pytest.raises(OSError, match="refused"),
        socket.create_connection((DOOR_ADDRESS, rack.port), timeout=10),
    ):
        pass
    home = tmp_path / "home"
    write_connection(home, "door", rack.door.address, root_certificates=rack.folder / "ca.pem")
    app_in_bundle(load_scenario(write_scenario(tmp_path))).write(tmp_path / "app", {"num-nodes": 2})
    outsider = {**rack.environment, "FLWR_HOME": str(home)}
    nodes = rack.flwr("supernode", "list", "rack", "--format", "json", until='"success"')
    runs = rack.flwr("list", "rack", "--format", "json", until='"success"')
    for words in (
        ["supernode", "register", str(rack.folder / "stranger.pub"), "door"],
        ["run", "app", "door"],
        ["list", "door"],
        ["supernode", "list", "door"],
        ["federation", "list", "door"],
    ):
        ran = subprocess.run(
            ["flwr", *words],
            env=outsider,
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert ran.returncode != 0 and "404" in ran.stdout + ran.stderr, (
            words,
            ran.stdout,
            ran.stderr,
        )
    # A call that lists nodes to whoever may make it: here it is made in every way that a proxy might misread.
    body = (
        f"Host: {DOOR_ADDRESS}\r\nContent-Type: application/protobuf\r\nContent-Length: 0\r\n"
        "Connection: close\r\n\r\n"
    )
    answered = rack.door.ask(
        f"POST /v1/control/list-nodes HTTP/1.1\r\n{body}".encode(), at=("127.0.0.1", rack.port)
    )
    assert answered.startswith(b"HTTP/1.1 200 ")  # on the SuperLink's own machine
    before = len(rack.door.passed())
    for target in TRICKS:
        answer = rack.door.ask(f"POST {target} HTTP/1.1\r\n{body}".encode())
        assert not answer.startswith(b"HTTP/1.1 2"), (target, answer)
    # Registered nodes go on calling meanwhile; all that was passed on are their calls.
    assert {path for path, _ in rack.door.passed()[before:]} <= FLEET
    # A call of SuperNodes without a signature gets as far as the SuperLink, which refuses it.
    unsigned = rack.door.ask(f"POST /v1/fleet/pull-messages HTTP/1.1\r\n{body}".encode())
    assert unsigned.startswith(b"HTTP/1.1 401 "), unsigned
    later = rack.flwr("supernode", "list", "rack", "--format", "json", until='"success"')
    assert identities(later) == identities(nodes) and len(identities(nodes)) == 2
    assert identities(
        rack.flwr("list", "rack", "--format", "json", until='"success"')
    ) == identities(runs)


def identities(listed: str) -> set[str]:
    return set(re.findall(r'"(?:node-id|run-id)": "?(\d+)', listed))


def write_scenario(folder: Path, epochs: int = 1) -> Path:
    path = folder / "survive.toml"
    path.write_text(SCENARIO.format(epochs=epochs))
    return path


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_run_far_away_goes_on_after_its_server_app_was_killed_or_stopped(
    rack: Rack, tmp_path: Path, number: signal.Signals
) -> None:
    kept = rack.folder / "checkpoints"
    run = submitted(
        rack, tmp_path / "out", "--superlink", "rack", "--checkpoint-folder", str(kept), epochs=3
    )
    try:
        deadline = time.monotonic() + 300
        while not list(kept.glob("round-*.ckpt")):
            assert run.poll() is None and time.monotonic() < deadline, run.communicate()
            time.sleep(0.2)
        # The one that trains; another one stands by.
        trains = int((kept / ".round-lock").read_text())
        assert trains in {process.pid for process in rack.server_apps()}
        os.kill(trains, number)
        out, said = run.communicate(timeout=500)
    finally:
        if run.poll() is None:
            run.kill()
            run.communicate()
    assert run.returncode == 0, said
    result = json.loads(out)
    (restart,) = result["restarts"]
    assert 1 <= restart["after_round"] < 3 and restart["cause"] == "the ServerApp died"
    assert result["resumed_from"] == [restart["after_round"]]
    assert_as_local(result, tmp_path)
    assert not list(kept.glob("*.ckpt"))
    # One that was stopped is gone too, and cannot be continued.
    assert not psutil.pid_exists(trains)


def test_an_interrupted_command_stops_the_run_it_submitted(rack: Rack, tmp_path: Path) -> None:
    earlier = {process.pid for process in rack.server_apps()}
    run = submitted(rack, tmp_path / "out", "--superlink", "rack", epochs=50)
    try:
        deadline = time.monotonic() + 200
        while not {process.pid for process in rack.server_apps()} - earlier:
            assert run.poll() is None and time.monotonic() < deadline, run.communicate()
            time.sleep(0.2)
        run.send_signal(signal.SIGINT)
        _, said = run.communicate(timeout=200)
    finally:
        if run.poll() is None:
            run.kill()
            run.communicate()
    assert run.returncode == 130 and "interrupted; nothing was written" in said
    rack.flwr("list", "rack", "--format", "json", until="finished:stopped")
    assert not (tmp_path / "out").exists()


def _other_authority(folder: Path) -> str:
    path = folder / "other.pem"
    subprocess.run(
        [
            "openssl",
            "req",
            "-x509",
            "-newkey",
            "ec",
            "-pkeyopt",
            "ec_paramgen_curve:P-384",
            "-nodes",
            "-keyout",
            str(folder / "other.key"),
            "-out",
            str(path),
            "-subj",
            "/CN=other",
        ],
        check=True,
        capture_output=True,
        timeout=60,
    )
    return str(path)
