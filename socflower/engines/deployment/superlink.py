"""A SuperLink and SuperNodes as processes of this machine: a node for each config, all on 127.0.0.1.

Where the system allows it they have a network of their own (`private_network.py`).
"""

import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

from socflower.engines.deployment.flower_processes import (
    Process,
    flower_environment,
    free_ports,
    own_processes,
    require_command,
    start,
    wait_until_healthy,
    write_connection,
)
from socflower.engines.deployment.private_network import Network, private_network
from socflower.engines.deployment.process_guard import end_marked, marked
from socflower.engines.deployment.warm_executor import warm_supernode_command
from socflower.errors import TrainingFailed

ENGINE = "deployment"
CONNECTION = "scenario"
_SUPERLINK = "superlink"
_SERVER_APP = "flwr-serverapp"


class LocalFlower:
    """A SuperLink on a database, so that it can be started again, and its SuperNodes."""

    def __init__(
        self, folder: Path, configs: Sequence[str], ports: Sequence[int], mark: str, say: Callable[[str], None],
        network: Network, *, warm: bool = False,
    ) -> None:
        self.environment = {**marked(flower_environment(folder), mark, "command"), **network.environment}
        self.network = network
        self._folder = folder
        self._mark = mark
        self._say = say
        self._warm = warm
        self._port = ports[0]
        for command in ("flower-superlink", "flower-supernode", "flwr"):
            require_command(command, self.environment, ENGINE)
        write_connection(Path(self.environment["FLWR_HOME"]), CONNECTION, f"127.0.0.1:{self._port}")
        self._superlink = self._start_superlink()
        self._nodes = {config: self._start_node(index, config, port)
                       for index, (config, port) in enumerate(zip(configs, ports[1:], strict=True))}

    @property
    def superlink_pid(self) -> int:
        """Process id of the SuperLink that runs now."""
        return self._superlink.pid

    @property
    def node_pids(self) -> tuple[int, ...]:
        """Process ids of the SuperNodes that are left."""
        return tuple(process.pid for process in self._nodes.values())

    def server_apps(self) -> set[psutil.Process]:
        """Return the ServerApps' processes that run now, started by the SuperLink."""
        found = set()
        with suppress(psutil.Error):
            for process in psutil.Process(self._superlink.pid).children(recursive=True):
                with suppress(psutil.Error):
                    if any(Path(word).name == _SERVER_APP for word in process.cmdline()[:3]):
                        found.add(process)
        return found

    def superlink_death(self) -> str | None:
        """Return how the SuperLink ended, or None while it runs."""
        code = self._superlink.poll()
        return None if code is None else f"the SuperLink ended ({_how(code)})"

    def look_after_nodes(self) -> None:
        """Say a line about each SuperNode that has ended since; `TrainingFailed` if none is left.

        A dead node is not started again: that a machine is gone is what the strategy has to deal with.
        """
        for config, process in list(self._nodes.items()):
            code = process.poll()
            if code is not None:
                del self._nodes[config]
                self._say(f"SuperNode {process.pid} ({config}) ended ({_how(code)}); {len(self._nodes)} left")
        if not self._nodes:
            raise TrainingFailed(f"engine {ENGINE}: no SuperNode is left; run the same command again")

    def restart_superlink(self) -> None:
        """Start the SuperLink again, on the same port and database, if it has ended; SuperNodes reconnect."""
        if self._superlink.poll() is None:
            return
        # What it had started must not go on beside what comes now.
        end_marked(self._mark, _SUPERLINK)
        self._superlink = self._start_superlink()

    def _start_superlink(self) -> Process:
        log = self._folder / "superlink.log"
        # The ServerApp is looked for more often than every second, which matters at the start of short runs.
        environment = {**marked(self.environment, self._mark, _SUPERLINK), "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.25"}
        command = ["flower-superlink", "--insecure", "--host", "127.0.0.1", "--port", str(self._port),
                   "--database", str(self._folder / "superlink.sqlite")]
        process = start(self.network.command(command), environment, log, self._folder, append=True)
        try:
            wait_until_healthy(self._port, process, log, ENGINE, self.network)
        except TrainingFailed:
            # One that was killed is a death like any other, of which `superlink_death` tells; one that gave up would
            # do so again.
            if (process.poll() or 0) >= 0:
                raise
        return process

    def _start_node(self, index: int, config: str, port: int) -> Process:
        home = self._folder / f"supernode-{index}"
        home.mkdir()
        environment = {**marked(self.environment, self._mark, f"supernode-{index}"), "FLWR_HOME": str(home),
                       "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.25"}
        args = ["--insecure", "--superlink", f"127.0.0.1:{self._port}", "--port", str(port), "--node-config", config]
        command = warm_supernode_command(args) if self._warm else ["flower-supernode", *args]
        return start(self.network.command(command), environment, home / "log", self._folder)


@contextmanager
def local_flower(
    folder: Path, node_configs: Sequence[str], say: Callable[[str], None], *, warm: bool = False,
) -> Iterator[LocalFlower]:
    """Keep a SuperLink and SuperNodes running in `folder`; at the end nothing of them is left.

    `node_configs` are those of the nodes, to which each node's port for rings is added.
    """
    num_nodes = len(node_configs)
    ports = free_ports(2 * num_nodes + 1)
    configs = [f'{config} ring="127.0.0.1:{port}"' for config, port in zip(node_configs, ports, strict=False)]
    with own_processes(folder) as mark, private_network(marked(flower_environment(folder), mark, "network")) as network:
        if network.shared_because:
            say("while this runs, every user of this machine can reach its SuperLink, and so run programs as you: "
                + network.shared_because)
        yield LocalFlower(folder, configs, ports[num_nodes:], mark, say, network, warm=warm)


def _how(code: int) -> str:
    return f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit status {code}"
