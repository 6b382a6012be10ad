"""A rack of SuperNodes under `socflower node`: one comes late, one is restarted while it trains; nothing is lost."""

import json
import os
import signal
import subprocess
import sysconfig
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import psutil
import pytest

from socflower.engines.deployment.flower_processes import flower_environment, free_ports
from socflower.engines.deployment.superlink import start_superlink

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
SOCFLOWER = Path(sysconfig.get_path("scripts")) / "socflower"
SCENARIO = """\
# Is anything lost in a rolling restart?
[cluster]
boards = [2, 1]
[train]
epochs = 14
batch_size = 32
learning_rate = 0.02
[strategy]
groups = 1
sync_interval_epochs = 1
[ring]
min_nodes = 2
[expect]
min_accuracy = 0.9
"""


class Rack:
    """A SuperLink, and nodes that are started and stopped as systemd does."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self.folder = folder
        self.environment = flower_environment(folder)
        self.port, *self._ports = free_ports(10)
        stack.callback(start_superlink(folder, self.environment, self.port).end)
        stack.callback(self._end)
        self._nodes: dict[int, subprocess.Popen[bytes]] = {}
        self.metrics = dict(enumerate(self._ports[:3]))

    def start(self, index: int) -> None:
        board, slot = ((0, 0), (0, 1), (1, 0))[index]
        config = (
            f"partition-id={index} num-partitions=3 board={board} slot={slot} "
            f'ring="127.0.0.1:{self._ports[3 + index]}" state-folder="{self.folder / f"states-{index}"}"'
        )
        home = self.folder / f"home-{index}"
        home.mkdir(exist_ok=True)
        with (self.folder / f"node-{index}.log").open("ab") as log:
            self._nodes[index] = subprocess.Popen(
                [
                    *(SOCFLOWER, "node", "--metrics", f"127.0.0.1:{self.metrics[index]}", "--"),
                    *("flower-supernode", "--insecure", "--superlink", f"127.0.0.1:{self.port}"),
                    *("--host", "127.0.0.1", "--port", str(self._ports[6 + index])),
                    *("--node-config", config),
                ],
                env={**self.environment, "FLWR_HOME": str(home)},
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def status(self, index: int) -> dict[str, Any]:
        with (
            suppress(OSError),
            urlopen(f"http://127.0.0.1:{self.metrics[index]}/status", timeout=5) as answer,
        ):
            return json.loads(answer.read())
        return {}

    def drain(self, index: int) -> float:
        """End a node as `systemctl stop` does; return the seconds that this took."""
        start_s = time.monotonic()
        self._nodes[index].terminate()
        assert self._nodes[index].wait(120) == 0
        return time.monotonic() - start_s

    def server_apps(self) -> list[psutil.Process]:
        """The ServerApps of its SuperLink."""
        found = []
        for process in psutil.process_iter():
            with suppress(psutil.Error):
                is_server = process.name() == "flwr-serverapp"
                home = process.environ().get("FLWR_HOME") if is_server else None
                if home == self.environment["FLWR_HOME"]:
                    found.append(process)
        return found

    def _end(self) -> None:
        for node in self._nodes.values():
            node.send_signal(signal.SIGINT)
        for node in self._nodes.values():
            node.wait(60)


@contextmanager
def rack_in(folder: Path) -> Iterator[Rack]:
    with ExitStack() as stack:
        yield Rack(folder, stack)


def wait_for(happened: Callable[[], bool], run: "subprocess.Popen[bytes]", log: Path) -> None:
    end_s = time.monotonic() + 300
    while not happened():
        assert run.poll() is None, log.read_text()[-3000:]
        assert time.monotonic() < end_s, log.read_text()[-3000:]
        time.sleep(0.1)


def test_a_node_that_is_drained_completes_its_interval_and_takes_part_again(tmp_path: Path) -> None:
    (tmp_path / "case.toml").write_text(SCENARIO)
    out, said = tmp_path / "out", tmp_path / "said"
    with rack_in(tmp_path) as rack:
        rack.start(0)
        rack.start(1)
        with said.open("wb") as stream:
            run = subprocess.Popen(
                [
                    *(SOCFLOWER, "run", tmp_path / "case.toml", "--engine", "deployment"),
                    *("--superlink", f"127.0.0.1:{rack.port}", "--out", out),
                ],
                stdout=stream,
                stderr=subprocess.STDOUT,
                env=dict(os.environ),
            )

        def round_of(index: int) -> int:
            return int(rack.status(index).get("round") or 0)

        # Two of three nodes: it starts, and takes in the third.
        wait_for(lambda: round_of(0) >= 2, run, said)
        rack.start(2)
        wait_for(lambda: rack.status(2).get("state") == "train", run, said)
        joined_in = round_of(2)
        wait_for(lambda: round_of(2) > joined_in and rack.status(2)["state"] == "train", run, said)
        took_s = rack.drain(2)
        rack.start(2)
        wait_for(lambda: rack.status(2).get("state") == "train", run, said)
        assert run.wait(300) == 0, said.read_text()
    result = json.loads((out / "result.json").read_text())
    events = [
        (event["kind"], event["text"]) for entry in result["rounds"] for event in entry["events"]
    ]
    kinds = [kind for kind, _ in events]
    print(took_s, events)
    assert kinds.count("returned") == 2, events
    # It left by itself: nobody had to notice a death.
    assert not {"member-lost", "group-lost", "no-reply", "leader-lost"} & {*kinds}, events
    assert "preempted" in kinds and took_s < 60


def test_a_killed_serverapp_is_replaced_long_before_flower_tells_of_its_death(
    tmp_path: Path,
) -> None:
    (tmp_path / "case.toml").write_text(SCENARIO)
    out, said = tmp_path / "out", tmp_path / "said"
    with rack_in(tmp_path) as rack:
        rack.start(0)
        rack.start(1)
        with said.open("wb") as stream:
            run = subprocess.Popen(
                [
                    *(SOCFLOWER, "run", tmp_path / "case.toml", "--engine", "deployment"),
                    *("--superlink", f"127.0.0.1:{rack.port}", "--out", out),
                    *("--checkpoint-folder", tmp_path / "kept"),
                ],
                stdout=stream,
                stderr=subprocess.STDOUT,
                env=dict(os.environ),
            )

        def rounds_kept() -> int:
            return max(
                (int(path.stem[6:]) for path in (tmp_path / "kept").glob("round-*.ckpt")), default=0
            )

        wait_for(lambda: rounds_kept() >= 2, run, said)
        before = rounds_kept()
        (server,) = rack.server_apps()
        server.kill()
        killed_s = time.monotonic()
        wait_for(lambda: rounds_kept() > before + 1, run, said)
        took_s = time.monotonic() - killed_s
        assert run.wait(300) == 0, said.read_text()
    result = json.loads((out / "result.json").read_text())
    print(
        f"{took_s:.1f} s from the kill to the end of the second round after it", result["restarts"]
    )
    (restart,) = result["restarts"]
    assert "no sign of life" in restart["cause"] and restart["after_round"] >= before
    assert took_s < 120
