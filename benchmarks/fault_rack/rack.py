"""A SuperLink, SuperNodes and a cloud in network namespaces, each restarted after its death as by systemd.

Every node has a namespace, so that its link can be taken down and its processes are known. Everything runs in the
namespaces of this process (`NAMESPACES`), and ends with it.
"""

import json
import os
import queue
import signal
import subprocess
import sys
import sysconfig
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from benchmarks.fault_rack.warm import NETNS, SOCKET, start_server, use_warm_processes
from socflower.engines.deployment.flower_processes import flower_environment, tail
from socflower.engines.deployment.private_network import MACHINE_NETWORK
from socflower.wire.node_files import NodeRecord, read_record
from tests.testbed.topology import NAMESPACES, Rack

SOCFLOWER = str(Path(sysconfig.get_path("scripts")) / "socflower")
# The shell is the namespaces' first process, which reaps orphans; its second command keeps it from `exec`.
PREFIX = (*NAMESPACES, "bash", "-c", '"$@"; exit $?', "rack")
HUB = "10.77.255.1"
SUPERLINK_PORT, CLOUD_PORT, _RING_PORT, _NODE_PORT = 28000, 28400, 28200, 28100
# Of a process's environment: the part of the rack that it belongs to.
PART = "FAULT_RACK_PART"
COMMAND = "command"
_READY_S = 120.0
_POLL_S = 0.1


class Service:
    """A command that is started again some seconds after its death, with nothing of its earlier processes left."""

    def __init__(
        self, part: str, command: Sequence[str], environment: Mapping[str, str], folder: Path
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.part, self.folder, self.num_starts = part, folder, 0
        self._command = list(command)
        # systemd gives a service its own TMPDIR with PrivateTmp=yes.
        self.temporary = folder / "tmp"
        self.temporary.mkdir(exist_ok=True)
        self._environment = {**environment, PART: part, "TMPDIR": str(self.temporary)}
        self._back_at_s: float | None = None
        self._lock = threading.Lock()
        self._start()

    def _start(self) -> None:
        self.num_starts += 1
        with (self.folder / "log").open("ab") as log:
            self._process = subprocess.Popen(
                self._command,
                env=self._environment,
                cwd=self.folder,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def kill(self, outage_s: float) -> None:
        """Kill all its processes at once; it is started again after `outage_s`."""
        with self._lock:
            self._back_at_s = time.monotonic() + outage_s
            self._kill_all()

    def supervise(self, pause_s: float) -> None:
        """Start it again if it has ended, and its outage or `pause_s` is over."""
        with self._lock:
            if self._back_at_s is None and self._process.poll() is not None:
                self._back_at_s = time.monotonic() + pause_s
                # With its main process all of its control group ends.
                self._kill_all()
            if self._back_at_s is not None and time.monotonic() >= self._back_at_s:
                self._back_at_s = None
                self._start()

    def _kill_all(self) -> None:
        # A process that is just being started is found by the second look.
        for _ in range(2):
            for process in processes_of(self.part):
                with suppress(psutil.Error):
                    process.kill()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(10)

    def log_end(self) -> str:
        """Return the last lines of its log."""
        return tail(self.folder / "log", 6)


class FaultRack:
    """The rack; `restart_s` is how long systemd waits before it starts a part again."""

    def __init__(
        self,
        folder: Path,
        boards: Sequence[int],
        *,
        cloud_scenario: Path | None = None,
        restart_s: float = 2.0,
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self._restart_s = restart_s
        self.network = Rack(
            slots_per_board=tuple(boards),
            soc_bit_per_s=1_000_000_000,
            uplink_bit_per_s=1_000_000_000,
            burst_bytes=256 * 1024,
            queue_s=0.02,
        )
        self.network.build()
        _run("ip", "address", "add", f"{HUB}/16", "dev", "core")
        self.environment = {
            **flower_environment(folder),
            "OMP_NUM_THREADS": "1",
            "SOCFLOWER_CLOUD": f"{HUB}:{CLOUD_PORT}",
            "SOCFLOWER_CLOUD_TOKEN_FILE": str(folder / "token"),
        }
        self.environment[SOCKET] = str(folder / "warm")
        self._warm = start_server(folder / "warm", self.environment)
        os.environ[SOCKET] = self.environment[SOCKET]
        use_warm_processes()
        self.services: dict[str, Service] = {}
        self._ended = threading.Event()
        self._started: Callable[[str], None] = lambda part: None
        if cloud_scenario is not None:
            self._add("cloud", self._cloud_command(cloud_scenario))
        superlink = ["flower-superlink", "--insecure", "--host", "0.0.0.0"]
        superlink += ["--port", str(SUPERLINK_PORT), "--database", str(folder / "superlink.sqlite")]
        self._add("superlink", superlink)
        self._await(lambda: MACHINE_NETWORK.listens(SUPERLINK_PORT), "superlink")
        for soc in range(self.network.num_socs):
            self._add(f"node-{soc}", self._node_command(soc), f"soc{soc}")
        self._supervisor = threading.Thread(target=self._supervise, daemon=True)
        self._supervisor.start()
        for soc in range(self.network.num_socs):
            node = self.services[f"node-{soc}"]
            self._await(lambda node=node: "Starting Flower SuperExec" in _text(node), node.part)

    def _cloud_command(self, scenario: Path) -> list[str]:
        address, token = f"{HUB}:{CLOUD_PORT}", str(self.folder / "token")
        return [
            *(SOCFLOWER, "cloud", "serve", str(scenario), "--listen", address),
            *("--token-file", token, "--folder", str(self.folder / "sessions"), "--threads", "1"),
        ]

    def _node_command(self, soc: int) -> list[str]:
        board, slot = self.place(soc)
        config = (
            f"partition-id={soc} num-partitions={self.network.num_socs} board={board} slot={slot} "
            f'ring="{self.network.address(soc)}:{_RING_PORT}" '
            f'state-folder="{self.folder / f"states-{soc}"}"'
        )
        return [
            *(SOCFLOWER, "node", "--"),
            *("flower-supernode", "--insecure", "--superlink", f"{HUB}:{SUPERLINK_PORT}"),
            *("--host", "127.0.0.1", "--port", str(_NODE_PORT), "--node-config", config),
        ]

    def place(self, soc: int) -> tuple[int, int]:
        """Return a SoC's board and slot."""
        address = self.network.address(soc).split(".")
        return int(address[2]), int(address[3]) - 1

    def _add(self, part: str, command: Sequence[str], namespace: str = "") -> None:
        folder = self.folder / part
        environment = {**self.environment, "FLWR_HOME": str(folder / "home"), NETNS: namespace}
        self.services[part] = Service(part, command, environment, folder)

    def _await(self, happened: Callable[[], bool], part: str) -> None:
        end_s = time.monotonic() + _READY_S
        while not happened():
            if time.monotonic() > end_s:
                raise RuntimeError(f"{part} is not ready: {self.services[part].log_end()}")
            time.sleep(_POLL_S)

    def _supervise(self) -> None:
        while not self._ended.wait(_POLL_S):
            for service in self.services.values():
                service.supervise(self._restart_s)

    # ------------------------------------------------------------------------------------------ what it does
    def record(self, soc: int) -> NodeRecord:
        """Return what a node's clients do; that of a node that has just started is empty."""
        folders = self.services[f"node-{soc}"].temporary.glob("*/record.json")
        newest = max(folders, key=_changed_s, default=None)
        record = None if newest is None else read_record(newest.parent)
        return record or NodeRecord()

    def training_since(self, moment_s: float) -> float | None:
        """Return the Unix time of the first training message that began at a node after a moment, if one did."""
        began = [
            record.began_at_s
            for record in map(self.record, range(self.network.num_socs))
            if record.kind == "train" and record.began_at_s > moment_s
        ]
        return min(began, default=None)

    def trains(self, server_round: int) -> bool:
        """Return whether a node trains in this round or a later one."""
        records = map(self.record, range(self.network.num_socs))
        return any(
            record.kind == "train"
            and record.working_since_s is not None
            and record.server_round >= server_round
            for record in records
        )

    def server_apps(self) -> list[psutil.Process]:
        """Return the running ServerApps."""
        found = []
        for process in processes_of("superlink"):
            # One may end meanwhile.
            with suppress(psutil.Error):
                if process.name() == "flwr-serverapp":
                    found.append(process)
        return found

    # ------------------------------------------------------------------------------------------ strikes
    def power_off(self, soc: int, outage_s: float) -> None:
        """Kill all processes of a node; it starts again after `outage_s`."""
        self.services[f"node-{soc}"].kill(outage_s)

    def kill_client(self, soc: int) -> None:
        """Kill a node's client as when memory runs out; its SuperNode stays."""
        with suppress(psutil.Error):
            psutil.Process(self.record(soc).pid).kill()

    def kill_server_app(self) -> None:
        """Kill the ServerApp."""
        for process in self.server_apps():
            with suppress(psutil.Error):
                process.kill()

    def cut(self, soc: int, outage_s: float) -> None:
        """Take a node's link down for some seconds; its connections stay open and silent."""
        _run("ip", "link", "set", f"soc{soc}", "down")
        threading.Timer(outage_s, _run, ("ip", "link", "set", f"soc{soc}", "up")).start()

    # ------------------------------------------------------------------------------------------ what is left
    def left_over(self) -> list[str]:
        """Return what still runs of a run that has ended, and zombies; the rack's own services are not among them."""
        found = [" ".join(each.cmdline()).strip()[:120] for each in processes_of(COMMAND)]
        found += [f"ServerApp {each.pid}" for each in self.server_apps()]
        found += [
            f"zombie {each.pid}"
            for each in psutil.process_iter()
            if each.status() == psutil.STATUS_ZOMBIE and each.ppid() not in (0, 1)
        ]
        return found

    def resources(self) -> dict[str, int]:
        """Return memory, descriptors and threads of all processes of the rack together, and their number.

        A page that several processes share counts once.
        """
        total = {"processes": 0, "pss_bytes": 0, "descriptors": 0, "threads": 0}
        for process in psutil.process_iter():
            with suppress(psutil.Error, OSError):
                if SOCKET in process.environ():
                    total["processes"] += 1
                    total["pss_bytes"] += _pss_bytes(process.pid)
                    total["descriptors"] += process.num_fds()
                    total["threads"] += process.num_threads()
        return total

    def superlink_bytes(self) -> int:
        """Return the memory of the SuperLink that no other process shares."""
        superlink = [each for each in processes_of("superlink") if each.ppid() == self._warm.pid]
        return max((int(each.memory_full_info().uss) for each in superlink), default=0)

    def hub_bytes(self) -> int:
        """Return the bytes that nodes and the hub have sent each other."""
        shown = subprocess.run(
            ["ip", "-s", "-j", "link", "show", "core"], capture_output=True, check=True
        ).stdout
        counts = json.loads(shown)[0]["stats64"]
        return int(counts["rx"]["bytes"] + counts["tx"]["bytes"])

    def close(self) -> None:
        """End everything."""
        self._warm.kill()
        self._ended.set()
        self._supervisor.join()
        for service in self.services.values():
            service.kill(0.0)


def processes_of(part: str) -> list[psutil.Process]:
    """Return the running processes of a part of the rack."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error, OSError):
            if (
                process.status() != psutil.STATUS_ZOMBIE
                and process.environ().get(PART) == part
                and process.pid != os.getpid()
            ):
                found.append(process)
    return found


def start_command(rack: FaultRack, folder: Path, *arguments: str) -> "subprocess.Popen[bytes]":
    """Start `socflower` with arguments in a folder, where it writes the files "said" and "printed"."""
    temporary = folder / "tmp"
    temporary.mkdir(parents=True, exist_ok=True)
    environment = {**rack.environment, PART: COMMAND, "TMPDIR": str(temporary), "TERM": "dumb"}
    with (folder / "said").open("wb") as said, (folder / "printed").open("wb") as printed:
        return subprocess.Popen(
            [SOCFLOWER, *arguments],
            env=environment,
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=printed,
            stderr=said,
            start_new_session=True,
        )


def end_command(process: "subprocess.Popen[bytes]") -> None:
    """End a command that did not end by itself, and what it started."""
    if process.poll() is None:
        process.send_signal(signal.SIGINT)
        with suppress(subprocess.TimeoutExpired):
            process.wait(20)
    for each in processes_of(COMMAND):
        with suppress(psutil.Error):
            each.kill()
    process.wait()


def serve(answer: Callable[[Mapping[str, Any]], Mapping[str, Any]]) -> None:
    """Mount the namespaces' own /proc, then answer each line of the standard input with a line."""
    _run("mount", "-t", "proc", "proc", "/proc")
    out = os.fdopen(os.dup(1), "w")
    # What is printed by others would be taken for an answer.
    os.dup2(2, 1)
    asked: queue.Queue[str] = queue.Queue()
    threading.Thread(target=_read_lines, args=(asked,), daemon=True).start()
    while True:
        out.write(f"{json.dumps(answer(json.loads(asked.get())))}\n")
        out.flush()


def _read_lines(asked: "queue.Queue[str]") -> None:
    """Pass on the lines of the standard input; at its end this process and its namespaces end, whatever it does."""
    for line in sys.stdin:
        asked.put(line)
    os._exit(0)


def _pss_bytes(pid: int) -> int:
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return 1024 * int(line.split()[1])
    return 0


def _text(service: Service) -> str:
    return (service.folder / "log").read_text("utf-8", "replace")


def _changed_s(path: Path) -> float:
    with suppress(OSError):
        return path.stat().st_mtime
    return 0.0


def _run(*command: str) -> None:
    subprocess.run(command, check=True, stdin=subprocess.DEVNULL, stdout=sys.stderr)
