"""Bytes that pass the SuperLink in a synchronisation: SoCFlow's ring of leaders against FedAvg of the same nodes.

Real SuperNodes reach a real SuperLink through counting proxies, one each. The same four nodes train the same model on
the same digits, as two groups under SoCFlow and each alone under Flower's FedAvg. Under SoCFlow a synchronisation
should carry one model to the SuperLink and none from it (F8), under FedAvg one model per node in each direction.
Counted are the bytes from the end of the first round, when every node has the app, to the end of the last, less those
of an equally long idle time: SuperNodes ask for work all the time.
"""

import asyncio
import json
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.harness import Row, less_is_better
from socflower.engines.deployment.flower_processes import (
    end,
    flower_environment,
    free_ports,
    start,
    tail,
)
from socflower.engines.deployment.superlink import CONNECTION, start_superlink
from socflower.engines.deployment.warm_executor import warm_supernode_command

APP = Path(__file__).with_name("hub_app")
NUM_NODES, NUM_GROUPS = 4, 2
RUN_TIMEOUT_S = 900.0
_SAMPLE_INTERVAL_S = 0.1
# Two of the SuperNode's questions for work, and the registration of the last node.
_SETTLING_S = 8.0
_CHUNK_BYTES = 1 << 16


@dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    """The bytes that all proxies together had forwarded at one moment."""

    time_s: float
    up_bytes: int
    down_bytes: int


class CountingProxies:
    """TCP proxies on this machine, one for each port of `targets`, that count bytes in both directions."""

    def __init__(self, targets: Sequence[int]) -> None:
        self.ports: list[int] = []
        self.up_bytes, self.down_bytes = [0] * len(targets), [0] * len(targets)
        self.samples: list[Sample] = []
        self._targets = tuple(targets)
        self._loop = asyncio.new_event_loop()
        self._ended = asyncio.Event()
        self._listening = threading.Event()
        self._thread = threading.Thread(target=self._loop.run_until_complete, args=(self._serve(),))

    def __enter__(self) -> "CountingProxies":
        self._thread.start()
        self._listening.wait()
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._ended.set)
        self._thread.join()
        self._loop.close()

    def between(self, start_s: float, end_s: float) -> Sample:
        """Return the bytes that passed between two moments of `time.time()`; `time_s` is the duration."""
        first, last = (
            min(self.samples, key=lambda sample, at_s=at_s: abs(sample.time_s - at_s))
            for at_s in (start_s, end_s)
        )
        return Sample(
            time_s=last.time_s - first.time_s,
            up_bytes=last.up_bytes - first.up_bytes,
            down_bytes=last.down_bytes - first.down_bytes,
        )

    async def _serve(self) -> None:
        async with asyncio.TaskGroup() as connections:
            servers = []
            for node in range(len(self._targets)):

                async def connected(
                    reader: asyncio.StreamReader,
                    writer: asyncio.StreamWriter,
                    node: int = node,
                ) -> None:
                    connections.create_task(self._carry(node, reader, writer))

                servers.append(await asyncio.start_server(connected, "127.0.0.1", 0))
            self.ports = [server.sockets[0].getsockname()[1] for server in servers]
            self._listening.set()
            while not self._ended.is_set():
                self.samples.append(
                    Sample(
                        time_s=time.time(),
                        up_bytes=sum(self.up_bytes),
                        down_bytes=sum(self.down_bytes),
                    )
                )
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._ended.wait(), _SAMPLE_INTERVAL_S)
            for server in servers:
                server.close()

    async def _carry(
        self, node: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        try:
            link_reader, link_writer = await asyncio.open_connection(
                "127.0.0.1", self._targets[node]
            )
        except OSError:
            # Nothing listens at the target, so the caller must not find a listener here either.
            writer.close()
            return
        await asyncio.gather(
            self._pump(reader, link_writer, self.up_bytes, node),
            self._pump(link_reader, writer, self.down_bytes, node),
        )

    async def _pump(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        counts: list[int],
        node: int,
    ) -> None:
        with suppress(ConnectionError):
            while chunk := await reader.read(_CHUNK_BYTES):
                counts[node] += len(chunk)
                writer.write(chunk)
                await writer.drain()
        writer.close()


@dataclass(frozen=True, kw_only=True, slots=True)
class Deployment:
    """A SuperLink and its SuperNodes, running."""

    folder: Path
    environment: dict[str, str]
    # In front of the SuperLink, one for each SuperNode.
    proxies: CountingProxies
    # In front of each SuperNode's ring port, if the bytes of rings are counted.
    ring_proxies: CountingProxies | None
    node_pids: tuple[int, ...]
    app: Path

    def wait_until_idle(self) -> None:
        """Wait until every SuperNode has registered and sends nothing but questions for work."""
        _wait_until(lambda: min(self.proxies.up_bytes) > 0)
        logs = [self.folder / f"supernode-{index}.log" for index in range(len(self.node_pids))]
        _wait_until(
            lambda: all(
                "Starting Flower SuperExec" in log.read_text("utf-8", "replace") for log in logs
            )
        )
        time.sleep(_SETTLING_S)

    def run(self, **run_config: object) -> list[dict[str, Any]]:
        """Run the app to its end; return the mark of every round. Round 0 is the start."""
        marks = self.folder / f"marks-{len(list(self.folder.glob('marks-*.log')))}.jsonl"
        settings = {
            "num-nodes": len(self.node_pids),
            "marks": str(marks),
            **{key.replace("_", "-"): value for key, value in run_config.items()},
        }
        log = marks.with_suffix(".log")
        command = [
            "flwr",
            "run",
            str(self.app),
            CONNECTION,
            "--stream",
            "--run-config",
            " ".join(f"{key}={json.dumps(value)}" for key, value in settings.items()),
        ]
        flwr_run = start(command, self.environment, log, self.folder)
        try:
            flwr_run.wait(timeout=RUN_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            pass
        finally:
            end(flwr_run)
        lines = (
            [json.loads(line) for line in marks.read_text().splitlines()] if marks.exists() else []
        )
        if not lines or lines[-1]["round"] != settings["num-rounds"]:
            raise RuntimeError(f"the run did not end: {tail(log, 12)}")
        return lines


@contextmanager
def deployed(
    num_nodes: int,
    *,
    warm: bool = False,
    app: Path = APP,
    counts_rings: bool = False,
) -> Iterator[Deployment]:
    """Run a SuperLink and `num_nodes` SuperNodes behind proxies, in a temporary folder.

    `Deployment.run` runs the app in the folder `app`. With `counts_rings` members of rings reach each other through
    proxies too; they exchange over gRPC then.
    """
    with ExitStack() as stack:
        # A process that was told to end may still write while the folder is removed.
        folder = Path(
            stack.enter_context(
                tempfile.TemporaryDirectory(prefix="socflower-hub-", ignore_cleanup_errors=True)
            )
        )
        environment = flower_environment(folder)
        link_port, *ports = free_ports(1 + 2 * num_nodes)
        node_ports, ring_ports = ports[:num_nodes], ports[num_nodes:]
        stack.callback(start_superlink(folder, environment, link_port).end)
        proxies = stack.enter_context(CountingProxies([link_port] * num_nodes))
        ring_proxies = stack.enter_context(CountingProxies(ring_ports)) if counts_rings else None
        nodes = []
        for index, (port, proxy_port) in enumerate(zip(node_ports, proxies.ports, strict=True)):
            ring = (
                f'ring="127.0.0.1:{ring_ports[index]}"'
                if ring_proxies is None
                else f'ring="127.0.0.1:{ring_proxies.ports[index]}" ring-bind="127.0.0.1:{ring_ports[index]}" '
                'ring-transport="grpc"'
            )
            args = [
                "--insecure",
                "--superlink",
                f"127.0.0.1:{proxy_port}",
                "--host",
                "127.0.0.1",
                "--port",
                str(port),
                "--node-config",
                f"partition-id={index} num-partitions={num_nodes} board=0 slot={index} {ring}",
            ]
            command = warm_supernode_command(args) if warm else ["flower-supernode", *args]
            nodes.append(start(command, environment, folder / f"supernode-{index}.log", folder))
            stack.callback(end, nodes[-1])
        yield Deployment(
            folder=folder,
            environment=environment,
            proxies=proxies,
            ring_proxies=ring_proxies,
            app=app,
            node_pids=tuple(node.pid for node in nodes),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Traffic:
    """The bytes that a strategy moved through the SuperLink."""

    # To and from the SuperLink in a synchronisation, without polling.
    up_bytes: float
    down_bytes: float
    # In both directions, of all idle nodes together.
    polling_bytes_per_s: float
    model_bytes: int
    accuracy: float


def traffic(strategy: str, model: str, *, num_rounds: int, idle_s: float) -> Traffic:
    """Measure one strategy with one model, on a deployment of its own."""
    with deployed(NUM_NODES, warm=True) as cluster:
        cluster.wait_until_idle()
        start_s = time.time()
        time.sleep(idle_s)
        idle = cluster.proxies.between(start_s, time.time())
        marks = cluster.run(
            strategy=strategy, model=model, num_groups=NUM_GROUPS, num_rounds=num_rounds
        )
        first_s, last_s = marks[1]["time_s"], marks[-1]["time_s"]
        busy = cluster.proxies.between(first_s, last_s)
    share = busy.time_s / idle.time_s
    return Traffic(
        up_bytes=(busy.up_bytes - share * idle.up_bytes) / (num_rounds - 1),
        down_bytes=(busy.down_bytes - share * idle.down_bytes) / (num_rounds - 1),
        polling_bytes_per_s=(idle.up_bytes + idle.down_bytes) / idle.time_s,
        model_bytes=marks[0]["model_bytes"],
        accuracy=marks[-1]["accuracy"],
    )


def run(quick: bool = False) -> list[Row]:
    """Return rows for each direction and for polling; `quick` leaves out the large model."""
    num_rounds, idle_s = (3, 20.0) if quick else (6, 40.0)
    rows = []
    for model in ("lenet5",) if quick else ("lenet5", "perceptron"):
        ours, peer = (
            traffic(strategy, model, num_rounds=num_rounds, idle_s=idle_s)
            for strategy in ("socflow", "fedavg")
        )
        case = f"{model} of {ours.model_bytes} B, {NUM_NODES} SuperNodes in {NUM_GROUPS} groups: "
        rows += [
            _row(
                case + "to the SuperLink in a synchronisation",
                ours.up_bytes,
                peer.up_bytes,
                ours,
                num_models=1,
            ),
            _row(
                case + "from the SuperLink in a synchronisation",
                ours.down_bytes,
                peer.down_bytes,
                ours,
                num_models=0,
            ),
            less_is_better(
                case + "both ways while idle",
                ours.polling_bytes_per_s,
                "the same, before FedAvg ran",
                peer.polling_bytes_per_s,
                "B/s",
                ok=ours.polling_bytes_per_s > 0.0,
            ),
        ]
    return rows


def _row(
    case: str, ours_bytes: float, peer_bytes: float, measured: Traffic, *, num_models: int
) -> Row:
    """Return a row that is right if exactly `num_models` models passed; further bytes are Flower's wrapping."""
    least_bytes = num_models * measured.model_bytes
    return less_is_better(
        case,
        ours_bytes,
        "FedAvg of the same nodes",
        peer_bytes,
        "B",
        limit=least_bytes,
        ok=least_bytes <= ours_bytes < least_bytes + measured.model_bytes
        and measured.accuracy > 0.5,
    )


def _wait_until(happened: Callable[[], bool], timeout_s: float = 300.0) -> None:
    deadline_s = time.monotonic() + timeout_s
    while not happened():
        if time.monotonic() > deadline_s:
            raise RuntimeError(f"nothing within {timeout_s:g} s")
        time.sleep(0.2)
