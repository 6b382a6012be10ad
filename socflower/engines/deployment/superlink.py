"""A SuperLink, SuperNodes and a split training's cloud as processes of this machine, all on 127.0.0.1.

They run in a private network if the system allows it (`private_network.py`).
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil

from socflower.engines.deployment.flower_processes import (
    ListeningProcess,
    Process,
    end_marked,
    exit_cause,
    flower_environment,
    free_ports,
    marked,
    own_processes,
    require_command,
    start,
    write_connection,
)
from socflower.engines.deployment.private_network import MACHINE_NETWORK, Network, private_network
from socflower.engines.deployment.warm_executor import (
    warm_superlink_command,
    warm_supernode_command,
)
from socflower.engines.run_folder import CloudAddress
from socflower.errors import TrainingFailed
from socflower.wire.saved_state import write_atomically

ENGINE = "deployment"
CONNECTION = "scenario"
_SUPERLINK = "superlink"
_SERVER_APP = "flwr-serverapp"
# Poll for tasks more often than Flower's default of one second, which delays the start of short runs.
_POLLING = {"FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.25"}


def start_superlink(
    folder: Path,
    environment: Mapping[str, str],
    port: int,
    *options: str,
    engine: str = ENGINE,
    network: Network = MACHINE_NETWORK,
    warm: bool = False,
) -> ListeningProcess:
    """Start a SuperLink with more options of `flower-superlink`; `flwr run` knows it by the name `CONNECTION`.

    A `warm` one forks its ServerApps.
    """
    require_command("flower-superlink", environment, engine)
    write_connection(Path(environment["FLWR_HOME"]), CONNECTION, f"127.0.0.1:{port}")
    args = [
        "--insecure",
        "--host",
        "127.0.0.1",
        "--port",
        str(port),
        *options,
    ]
    command = warm_superlink_command(args) if warm else ["flower-superlink", *args]
    return ListeningProcess(
        "the SuperLink",
        command,
        port,
        environment,
        folder / "superlink.log",
        engine=engine,
        network=network,
    )


class LocalFlower:
    """A SuperLink with a database, so that it can be restarted, and its SuperNodes; the cloud, if one is started."""

    def __init__(
        self,
        folder: Path,
        configs: Sequence[str],
        ports: Sequence[int],
        mark: str,
        on_notice: Callable[[str], None],
        network: Network,
        *,
        resident: bool = True,
    ) -> None:
        self.environment = {
            **marked(flower_environment(folder), mark, "command"),
            **network.environment,
        }
        self.network = network
        self._folder = folder
        self._mark = mark
        self._on_notice = on_notice
        self._cloud: ListeningProcess | None = None
        for command in ("flower-supernode", "flwr"):
            require_command(command, self.environment, ENGINE)
        self._superlink = start_superlink(
            folder,
            {**marked(self.environment, mark, _SUPERLINK), **_POLLING},
            ports[0],
            "--database",
            str(folder / "superlink.sqlite"),
            network=network,
            warm=resident,
        )
        self._nodes = dict[str, Process]()
        for index, (config, port) in enumerate(zip(configs, ports[1:], strict=True)):
            home = folder / f"supernode-{index}"
            home.mkdir()
            environment = {
                **marked(self.environment, mark, home.name),
                **_POLLING,
                "FLWR_HOME": str(home),
            }
            args = [
                "--insecure",
                "--superlink",
                f"127.0.0.1:{ports[0]}",
                "--port",
                str(port),
                "--node-config",
                config,
            ]
            node = warm_supernode_command(args) if resident else ["flower-supernode", *args]
            self._nodes[config] = start(network.command(node), environment, home / "log", folder)

    @property
    def num_nodes(self) -> int:
        """The number of SuperNodes that still run."""
        return len(self._nodes)

    def server_apps(self) -> set[psutil.Process]:
        """Return the running ServerApp processes that the SuperLink started, as processes of their own or as forks."""
        found = set()
        with suppress(psutil.Error):
            for process in psutil.Process(self._superlink.pid).children(recursive=True):
                with suppress(psutil.Error):
                    if process.name() == _SERVER_APP:
                        found.add(process)
        return found

    def superlink_exit(self) -> str | None:
        """Return how the SuperLink ended, or None while it runs."""
        return self._superlink.ended()

    def poll(self) -> None:
        """Report each SuperNode that has ended since the last call, and start an ended cloud again.

        An ended node is not restarted: the strategy has to handle the loss of a machine. Raises `TrainingFailed` if
        no node is left.
        """
        for config, process in list(self._nodes.items()):
            code = process.poll()
            if code is not None:
                del self._nodes[config]
                self._on_notice(
                    f"SuperNode {process.pid} ({config}) ended ({exit_cause(code)}); "
                    f"{len(self._nodes)} left"
                )
        if not self._nodes:
            raise TrainingFailed(
                f"engine {ENGINE}: no SuperNode is left; run the same command again"
            )
        if self._cloud is not None and (ended := self._cloud.ended()):
            self._on_notice(f"{ended}; starting it again")
            # Edges reconnect by themselves.
            self._cloud.start()

    def restart_superlink(self) -> None:
        """Restart the SuperLink on the same port and database if it has ended; SuperNodes reconnect."""
        if self._superlink.ended():
            # Processes of the old SuperLink must not run beside those of the new one.
            end_marked(self._mark, _SUPERLINK)
            self._superlink.start()

    def start_cloud(self, document: Mapping[str, Any]) -> CloudAddress:
        """Start `socflower cloud serve` for a scenario, and return the address for a ServerApp."""
        folder, port = self._folder / "cloud", free_ports(1)[0]
        folder.mkdir()
        write_atomically(folder / "scenario.json", json.dumps(document))
        cloud = CloudAddress(address=f"127.0.0.1:{port}", token_file=str(folder / "token"))
        command = [
            "socflower",
            "cloud",
            "serve",
            str(folder / "scenario.json"),
            "--listen",
            cloud.address,
            "--token-file",
            cloud.token_file,
            "--folder",
            str(folder / "sessions"),
            "--threads",
            "1",
        ]
        self._cloud = ListeningProcess(
            "the cloud",
            command,
            port,
            self.environment,
            folder / "log",
            engine=ENGINE,
            network=self.network,
        )
        return cloud


@contextmanager
def local_flower(
    folder: Path,
    node_configs: Sequence[str],
    on_notice: Callable[[str], None],
    *,
    resident: bool = True,
) -> Iterator[LocalFlower]:
    """Run a SuperLink and SuperNodes in `folder` within the context, and end all their processes at its exit.

    Each entry of `node_configs` is one node's config, to which the node's port for rings is added.
    """
    num_nodes = len(node_configs)
    ports = free_ports(2 * num_nodes + 1)
    configs = [
        f'{config} ring="127.0.0.1:{port}"'
        for config, port in zip(node_configs, ports, strict=False)
    ]
    with (
        own_processes(folder) as mark,
        private_network(marked(flower_environment(folder), mark, "network")) as network,
    ):
        if network.shared_because:
            on_notice(
                "while this runs, every user of this machine can reach its SuperLink, and so run programs as "
                f"you: {network.shared_because}"
            )
        yield LocalFlower(
            folder, configs, ports[num_nodes:], mark, on_notice, network, resident=resident
        )
