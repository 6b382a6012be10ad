"""A ClientApp and a strategy for rings of real processes on this machine."""

import copy
import json
import os
import signal
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from flwr.app import Array, ArrayRecord, Context, Message, MetricRecord
from flwr.clientapp import ClientApp
from flwr.clientapp.typing import ClientAppCallable
from torch import nn

from socflower.clients.app import make_client_app
from socflower.cluster import Cluster, parse_cluster
from socflower.engines.deployment.flower_processes import free_ports
from socflower.peers.collective import Collective, PeerLost, Poll, no_poll
from socflower.peers.leaders import model_exchange as leader_exchange
from socflower.peers.leaders.model_changes import ChangeCompression
from socflower.peers.leaders.model_exchange import GroupsModel
from socflower.peers.ring.settings import RingSettings
from socflower.peers.transports.port import RingPort
from socflower.strategies.socflow import SoCFlow
from socflower.training.fp32 import FP32Trainer, sgd
from socflower.training.hang_watch import HangLimits, end_process, watch_hangs
from socflower.training.schedules import cosine_annealing
from socflower.wire.message_keys import CONFIG, GROUP, SERVER_ROUND, GroupTask
from socflower.wire.secure_channel import PeerUnreachable
from socflower.workloads.dataset import LabelledData
from tests.seeded import built
from tests.strategies.options import grouped

NUM_SAMPLES = 320


def network(*, norm: bool = False) -> nn.Module:
    def layers() -> nn.Module:
        first: list[nn.Module] = [nn.Conv2d(1, 8, 3, bias=not norm)]
        if norm:
            first.append(nn.BatchNorm2d(8))
        return nn.Sequential(
            *first, nn.ReLU(), nn.Flatten(), nn.Linear(8 * 6 * 6, 40), nn.ReLU(), nn.Linear(40, 4)
        )

    return built(layers, 3)


def samples() -> LabelledData:
    generator = torch.Generator().manual_seed(5)
    labels = torch.randint(0, 4, (NUM_SAMPLES,), generator=generator)
    inputs = torch.randint(0, 256, (NUM_SAMPLES, 1, 8, 8), generator=generator, dtype=torch.uint8)
    inputs[torch.arange(NUM_SAMPLES), 0, labels, labels] = 255
    return LabelledData(inputs=inputs, labels=labels, mean=(0.5,), std=(0.5,), num_classes=4)


def part(context: Context, partition: int, num_partitions: int) -> LabelledData:
    data = samples()
    return (
        data
        if num_partitions == 1
        else data.select(torch.arange(partition, NUM_SAMPLES, num_partitions))
    )


def disturbed(message: Message, context: Context, call_next: ClientAppCallable) -> Message:
    """Give a test time to strike, and places to do it.

    The run config's `step-s` is how long a loss takes, `slower` of a node's config a factor of that. In the round
    `disturbed-round` (default 1) a node waits `begin-delay-s` before it trains and `end-delay-s` before it replies,
    waits for the mark `waits-for`, raises in the phase `raises-in`, stands still in a step with `hangs`, is killed in
    the phase `dies-in`, stops in the phase `stops-in`, and from the phase `cut-in` on cannot reach the participants
    `cut-from` ("2 3"). Where there is a ledger, what a node has been asked for and how far it has come stands beside
    it, in files.
    """
    global _step_s, _raises_at_step, _dies_at_step, _hangs_at_step, _struck_meeting
    global _cut_from, _cut_in
    node = context.node_config
    _step_s = float(context.run_config.get("step-s", 0.0)) * float(node.get("slower", 1))
    if GROUP not in message.content.config_records:
        return call_next(message, context)
    server_round = int(message.content.config_records[CONFIG][SERVER_ROUND])
    strikes = server_round == int(node.get("disturbed-round", 1))
    raises_in, dies_in = (node.get(key) if strikes else None for key in ("raises-in", "dies-in"))
    _raises_at_step = 3 if raises_in == "mid-batch" else 0
    _dies_at_step = 3 if dies_in == "mid-batch" else 0
    _hangs_at_step = 3 if strikes and node.get("hangs") else 0
    if _hangs_at_step:
        watch_hangs(end_process, HangLimits(first_s=4.0, least_s=2.0, idle_s=1.0))
    stops_in, cut_in = (node.get(key) if strikes else None for key in ("stops-in", "cut-in"))
    _cut_from, _cut_in = frozenset(map(int, str(node.get("cut-from", "")).split())), str(cut_in)
    _struck_meeting = (str(dies_in or stops_in), signal.SIGKILL if dies_in else signal.SIGSTOP)
    _mark(
        context,
        server_round,
        "asked",
        json.dumps(GroupTask.decode(message.content.config_records[GROUP]).encode()),
    )
    time.sleep(float(node.get("begin-delay-s", 0.0)) if strikes else 0.0)
    # Of another node, as `mark_of` names it.
    awaited = Path(str(context.run_config.get("ledger"))) / str(node.get("waits-for", ""))
    while strikes and "waits-for" in node and not awaited.exists():
        time.sleep(0.01)
    if raises_in == "rendezvous":
        raise ValueError("raised before its ring")
    if dies_in == "rendezvous":
        os.kill(os.getpid(), signal.SIGKILL)
    reply = call_next(message, context)
    if dies_in == "synchronisation":
        os.kill(os.getpid(), signal.SIGKILL)
    _mark(context, server_round, "trained", json.dumps(resources()))
    time.sleep(float(node.get("end-delay-s", 0.0)) if strikes else 0.0)
    if raises_in == "synchronisation":
        raise ValueError("raised after its ring")
    return reply


def resources() -> dict[str, int]:
    """Return what a process must not have more and more of."""
    return {
        "threads": threading.active_count(),
        "files": len(os.listdir("/proc/self/fd")),
        "kib": int(
            next(
                line
                for line in Path("/proc/self/status").read_text().splitlines()
                if line.startswith("VmRSS")
            ).split()[1]
        ),
    }


def mark_of(folder: Path, partition: int, server_round: int, what: str) -> Path:
    """Return the file in which a node says that it has been "asked", or has "trained", a line for each time."""
    return folder / f"{partition}.{server_round}.{what}"


def _mark(context: Context, server_round: int, what: str, text: str) -> None:
    folder = context.run_config.get("ledger")
    if folder:
        with mark_of(
            Path(str(folder)), int(context.node_config["partition-id"]), server_round, what
        ).open("a") as to:
            to.write(text + "\n")


_step_s = 0.0
_raises_at_step = 0
_dies_at_step = 0
_hangs_at_step = 0
_struck_meeting = ("", signal.SIGKILL)
_cut_from: frozenset[int] = frozenset()
_cut_in = ""
_exchange_models, _call, _open_stream = (
    leader_exchange.exchange_models,
    RingPort.call,
    RingPort.open_stream,
)


def _struck_exchange(
    ring: Collective,
    own: GroupsModel,
    poll: Poll = no_poll,
    changes: ChangeCompression | None = None,
) -> GroupsModel:
    """Exchange models with other leaders; strike before, or when the sum has come."""
    global _cut_in
    _strike_meeting("meeting")
    if _cut_in == "meeting":
        _cut_in = "begin"
        raise PeerLost("the link is cut")
    mean = _exchange_models(ring, own, poll, changes)
    _strike_meeting("met")
    return mean


def _strike_meeting(phase: str) -> None:
    if _struck_meeting[0] == phase:
        os.kill(os.getpid(), _struck_meeting[1])


def _loss(outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    global _raises_at_step, _dies_at_step, _hangs_at_step
    time.sleep(_step_s)
    _hangs_at_step -= 1
    if _hangs_at_step == 0:
        threading.Event().wait()
    _raises_at_step -= 1
    if _raises_at_step == 0:
        raise ValueError("raised in a step")
    _dies_at_step -= 1
    if _dies_at_step == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    return nn.functional.cross_entropy(outputs, labels)


def _call_if_linked(port: RingPort, rank: int, *args: Any, **named: Any) -> bytes:
    _require_link(rank)
    return _call(port, rank, *args, **named)


def _stream_if_linked(port: RingPort, rank: int, *args: Any, **named: Any) -> Any:
    _require_link(rank)
    return _open_stream(port, rank, *args, **named)


def _require_link(rank: int) -> None:
    if _cut_in == "begin" and rank in _cut_from:
        raise PeerUnreachable("the link is cut")


def client_app() -> ClientApp:
    leader_exchange.exchange_models = _struck_exchange
    RingPort.call, RingPort.open_stream = _call_if_linked, _stream_if_linked  # type: ignore[method-assign]

    def model(context: Context) -> nn.Module:
        return network(norm=bool(context.run_config.get("norm", False)))

    def trainer(context: Context) -> FP32Trainer:
        return FP32Trainer(
            optimizer=sgd(0.05, 0.9),
            scheduler=cosine_annealing,
            loss=_loss,
            reduction=str(context.run_config.get("member-passes", "auto")),
        )

    def states(context: Context) -> Path | None:
        """Return this node's own folder, as on a machine of its own."""
        folder = context.run_config.get("states")
        return Path(str(folder)) / str(context.node_config["partition-id"]) if folder else None

    def ledger(context: Context) -> Path | None:
        folder = context.run_config.get("ledger")
        return (
            Path(str(folder)) / f"{context.node_config['partition-id']}.jsonl" if folder else None
        )

    return make_client_app(
        model, part, trainer, mods=[disturbed], ring_ledger=ledger, state_folder=states
    )


def node_configs(
    cluster: Cluster,
    of_soc: Mapping[int, Mapping[str, Any]] | None = None,
    **extra: Any,
) -> list[dict[str, Any]]:
    """Return a config for every SoC, in an order that is not theirs: the last one's first."""
    places = [
        (board, slot)
        for board in range(len(cluster.boards))
        for slot in range(len(cluster.socs_of(board)))
    ]
    return [
        {
            "board": board,
            "slot": slot,
            "ring": f"127.0.0.1:{port}",
            **extra,
            **(of_soc or {}).get(soc, {}),
        }
        for soc, ((board, slot), port) in enumerate(
            zip(places, free_ports(len(places)), strict=True)
        )
    ][::-1]


def cluster(boards: int = 2, socs_per_board: int = 2) -> Cluster:
    return parse_cluster({"boards": boards, "socs_per_board": socs_per_board})


def strategy(
    on: Cluster,
    num_groups: int = 2,
    *,
    rings: Mapping[str, Any] | None = None,
    kind: type[SoCFlow] = SoCFlow,
    **changes: Any,
) -> SoCFlow:
    settings: dict[str, Any] = {
        "cluster": on,
        "groups": num_groups,
        "num_samples": NUM_SAMPLES,
        "batch_size": 16,
        "num_epochs": 2,
        "interval_epochs": 1.0,
        "seed": 4,
    }
    changes = copy.deepcopy(changes)  # an outer strategy has moments
    return kind(
        **grouped(**{**settings, **changes}),
        rings=RingSettings(
            **{"heartbeat_s": 4.0, "rendezvous_s": 30.0, "leader_grace_s": 5.0, **(rings or {})}
        ),
    )


def initial(*, norm: bool = False) -> ArrayRecord:
    return ArrayRecord(
        {name: Array(tensor.numpy()) for name, tensor in network(norm=norm).state_dict().items()}
    )


def no_metrics(server_round: int, arrays: ArrayRecord) -> MetricRecord | None:
    return None
