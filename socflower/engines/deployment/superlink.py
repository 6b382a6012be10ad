"""A SuperLink and SuperNodes as processes of this machine: one node per config, all on 127.0.0.1.

They run in a private network where the system allows it (`private_network.py`).
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
    """A SuperLink with a database, so that it can be restarted, and its SuperNodes."""

    def __init__(
        self, folder: Path, configs: Sequence[str], ports: Sequence[int], mark: str, on_notice: Callable[[str], None],
        network: Network, *, warm: bool = False,
    ) -> None:
        self.environment = {**marked(flower_environment(folder), mark, "command"), **network.environment}
        self.network = network
        self._folder = folder
        self._mark = mark
        self._on_notice = on_notice
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
        """Process id of the current SuperLink."""
        return self._superlink.pid

    @property
    def node_pids(self) -> tuple[int, ...]:
        """Process ids of the SuperNodes that still run."""
        return tuple(process.pid for process in self._nodes.values())

    def server_apps(self) -> set[psutil.Process]:
        """Return the running ServerApp processes that the SuperLink started."""
        found = set()
        with suppress(psutil.Error):
            for process in psutil.Process(self._superlink.pid).children(recursive=True):
                with suppress(psutil.Error):
                    if any(Path(word).name == _SERVER_APP for word in process.cmdline()[:3]):
                        found.add(process)
        return found

    def superlink_exit(self) -> str | None:
        """Return how the SuperLink ended, or None while it runs."""
        code = self._superlink.poll()
        return None if code is None else f"the SuperLink ended ({_how(code)})"

    def poll_nodes(self) -> None:
        """Report each SuperNode that has ended since the last call; raise `TrainingFailed` if none is left.

        An ended node is not restarted: the strategy has to handle the loss of a machine.
        """
        for config, process in list(self._nodes.items()):
            code = process.poll()
            if code is not None:
                del self._nodes[config]
                self._on_notice(f"SuperNode {process.pid} ({config}) ended ({_how(code)}); {len(self._nodes)} left")
        if not self._nodes:
            raise TrainingFailed(f"engine {ENGINE}: no SuperNode is left; run the same command again")

    def restart_superlink(self) -> None:
        """Restart the SuperLink on the same port and database if it has ended; SuperNodes reconnect."""
        if self._superlink.poll() is None:
            return
        # Processes of the old SuperLink must not run beside those of the new one.
        end_marked(self._mark, _SUPERLINK)
        self._superlink = self._start_superlink()

    def _start_superlink(self) -> Process:
        log = self._folder / "superlink.log"
        # Poll for tasks more often than Flower's default of one second, which delays the start of short runs.
        environment = {**marked(self.environment, self._mark, _SUPERLINK), "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.25"}
        command = ["flower-superlink", "--insecure", "--host", "127.0.0.1", "--port", str(self._port),
                   "--database", str(self._folder / "superlink.sqlite")]
        process = start(self.network.command(command), environment, log, self._folder, append=True)
        try:
            wait_until_healthy(self._port, process, log, ENGINE, self.network)
        except TrainingFailed:
            # A killed SuperLink is reported by `superlink_exit`; one that exited with an error would do so again.
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
    folder: Path, node_configs: Sequence[str], on_notice: Callable[[str], None], *, warm: bool = False,
) -> Iterator[LocalFlower]:
    """Run a SuperLink and SuperNodes in `folder` within the context, and end all their processes at its exit.

    Each entry of `node_configs` is one node's config, to which the node's port for rings is added.
    """
    num_nodes = len(node_configs)
    ports = free_ports(2 * num_nodes + 1)
    configs = [f'{config} ring="127.0.0.1:{port}"' for config, port in zip(node_configs, ports, strict=False)]
    with own_processes(folder) as mark, \
            private_network(marked(flower_environment(folder), mark, "network")) as network:
        if network.shared_because:
            on_notice("while this runs, every user of this machine can reach its SuperLink, and so run programs as "
                      f"you: {network.shared_because}")
        yield LocalFlower(folder, configs, ports[num_nodes:], mark, on_notice, network, warm=warm)


def _how(code: int) -> str:
    return f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit status {code}"
