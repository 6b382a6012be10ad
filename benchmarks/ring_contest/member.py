"""One member: `python -m benchmarks.ring_contest.member FILE RANK` takes part in a contest; rank 0 prints times.

FILE is JSON with `contest`, `addresses` (each member's host), `port` (the first of the ports that are free at every
member) and `tls` (three PEM files for each member).
"""

import hashlib
import json
import os
import sys
import time
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from benchmarks.harness import from_json
from benchmarks.ring_contest.plan import Contest, Entry, Times
from socflower.hierarchy import gradient_coding
from socflower.peers.collective import no_poll
from socflower.peers.ring.bucket_exchange import BucketExchange
from socflower.peers.ring.member import open_ring
from socflower.peers.transports.port import RingPort
from socflower.training.exchange.group_sum import own_compression
from socflower.training.fp32 import FP32Trainer, sgd
from socflower.training.trainer import TrainingSpan
from socflower.wire.secure_channel import Tls
from socflower.workloads.models.classifiers import build_model

LEARNING_RATE, MOMENTUM = 0.01, 0.9
_TOKEN = b"for benchmarks, everybody's key."
_PATIENCE_S = 120.0
_CLASSES = 10


class Trainee(Protocol):
    """An entry under training."""

    model: nn.Module

    def step(self, inputs: Tensor, labels: Tensor) -> None:
        """Do one step with this member's part of a batch."""
        ...

    def close(self) -> None:
        """Release everything."""
        ...


class Ddp:
    """Plain torch over the default process group."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model.to(memory_format=torch.channels_last).train()  # type: ignore[call-overload]
        self._parallel = DistributedDataParallel(self.model)
        self._optimizer = torch.optim.SGD(
            self.model.parameters(), lr=LEARNING_RATE, momentum=MOMENTUM
        )

    def step(self, inputs: Tensor, labels: Tensor) -> None:
        self._optimizer.zero_grad()
        functional.cross_entropy(
            self._parallel(inputs.contiguous(memory_format=torch.channels_last)), labels
        ).backward()
        self._optimizer.step()

    def close(self) -> None:
        pass


class Ours:
    """A trainer's session and the exchange of its gradients, as a ring's member uses them."""

    def __init__(self, model: nn.Module, entry: Entry, port: RingPort, size: int) -> None:
        self.model = model
        self._exchange = BucketExchange(model, entry.num_buckets)
        trainer = FP32Trainer(optimizer=sgd(LEARNING_RATE, MOMENTUM), channels_last=True)
        self._session = trainer.start(model, TrainingSpan())
        # Without the warm-up, in which compression starts gently.
        coding = gradient_coding(entry.compression)
        self._compression = None if coding.is_exact else own_compression(self._session, coding, 0)
        self._port, self._size, self._num_steps = port, size, 0
        self._ring = open_ring(entry.transport, port, range(size), 0, _PATIENCE_S)

    def step(self, inputs: Tensor, labels: Tensor) -> None:
        if self._compression is not None:
            self._compression.start_step(self._num_steps)
        self._exchange.begin(self._ring, no_poll, compression=self._compression)
        self._session.gradients([(inputs, labels)], len(labels) * self._size)
        self._exchange.finish()
        self._session.apply()
        if self._compression is not None:
            self._compression.finish_step()
        self._num_steps += 1

    def close(self) -> None:
        self._exchange.close()
        self._ring.close()
        self._port.close()


class Alone:
    """A member without others: a step without any exchange."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        trainer = FP32Trainer(optimizer=sgd(LEARNING_RATE, MOMENTUM), channels_last=True)
        self._session = trainer.start(model, TrainingSpan())
        self.forward_s = self.backward_s = 0.0
        self._began_s = 0.0
        model.register_forward_pre_hook(self._on_begin)
        model.register_forward_hook(self._on_forward)

    def step(self, inputs: Tensor, labels: Tensor) -> None:
        self._session.gradients([(inputs, labels)], len(labels))
        self.backward_s += time.perf_counter() - self._began_s
        self._session.apply()

    def close(self) -> None:
        pass

    def _on_begin(self, *_: object) -> None:
        self._began_s = time.perf_counter()

    def _on_forward(self, *_: object) -> None:
        now_s = time.perf_counter()
        self.forward_s += now_s - self._began_s
        self._began_s = now_s


def main(path: str, rank: int) -> int:
    """Take part as member `rank`; rank 0 prints a list of `Times`, one for each entry."""
    torch.set_num_threads(1)
    document = json.loads(Path(path).read_text("utf-8"))
    contest = from_json(Contest, document["contest"])
    hosts, first_port = document["addresses"], document["port"]
    os.environ["GLOO_SOCKET_IFNAME"] = contest.interface
    dist.init_process_group(
        "gloo",
        init_method=f"tcp://{hosts[0]}:{first_port}",
        rank=rank,
        world_size=len(hosts),
        timeout=timedelta(seconds=_PATIENCE_S),
    )
    trainees = []
    for number, entry in enumerate(contest.entries):
        # Ports differ because members may share a host.
        addresses = [
            f"{host}:{first_port + 1 + number * len(hosts) + member}"
            for member, host in enumerate(hosts)
        ]
        tls = Tls(*map(Path, document["tls"][rank])) if entry.tls else None
        trainees.append(_trainee(contest, entry, rank, addresses, tls))
        dist.barrier()
    times = _measured(contest, rank, trainees)
    for trainee in trainees:
        dist.barrier()
        trainee.close()
    if rank == 0:
        print(json.dumps([asdict(each) for each in times]), flush=True)
    dist.barrier()
    dist.destroy_process_group()
    return 0


def _trainee(
    contest: Contest, entry: Entry, rank: int, addresses: list[str], tls: Tls | None
) -> Trainee:
    model = build_model(contest.model, in_channels=3, image_size=32, num_classes=_CLASSES, seed=1)
    if entry.transport == "ddp":
        return Ddp(model)
    if entry.transport == "none":
        return Alone(model)
    port = RingPort(
        addresses[rank],
        rank=rank,
        addresses=addresses,
        token=_TOKEN,
        tls=tls,
        heartbeat_s=_PATIENCE_S,
    )
    # A ring may open only when all members can be reached, as a group's membership ensures.
    dist.barrier()
    return Ours(model, entry, port, len(addresses))


def _measured(contest: Contest, rank: int, trainees: list[Trainee]) -> list[Times]:
    generator = torch.Generator().manual_seed(100 + rank)
    batches = [
        (
            torch.randn(contest.samples, 3, 32, 32, generator=generator),
            torch.randint(0, _CLASSES, (contest.samples,), generator=generator),
        )
        for _ in range(4)
    ]
    for trainee in trainees:
        trainee.step(*batches[0])
    # Compared after one step: sums of more than two members are rounded in another order, and an
    # activation that changes its sign for that reason makes a difference a thousand times as large.
    differences = [_difference(trainee.model, trainees[0].model) for trainee in trainees]
    done = [0] * len(trainees)
    rows: list[list[tuple[float, float, float, float, int]]] = [[] for _ in trainees]
    # The first round is not counted.
    for number in range(1 + contest.rounds):
        for index, trainee in enumerate(trainees):
            row = _block(contest, trainee, batches, done[index])
            done[index] += contest.steps
            if number:
                rows[index].append(row)
    return [
        Times(
            step_s=tuple(row[0] for row in rows[index]),
            cpu_s=tuple(row[1] for row in rows[index]),
            forward_s=tuple(row[2] for row in rows[index]),
            backward_s=tuple(row[3] for row in rows[index]),
            sent_bytes=tuple(row[4] for row in rows[index]),
            difference=differences[index]
            if contest.entries[0].transport == "ddp"
            else float("nan"),
            same_on_all=_same_on_all(trainee.model),
        )
        for index, trainee in enumerate(trainees)
    ]


def _block(
    contest: Contest,
    trainee: Trainee,
    batches: list[tuple[Tensor, Tensor]],
    done: int,
) -> tuple[float, float, float, float, int]:
    """Do a round's steps of one entry; return the values of `Times` for a step, in the order of its fields."""
    if isinstance(trainee, Alone):
        trainee.forward_s = trainee.backward_s = 0.0
    dist.barrier()
    sent, cpu_s, began_s = _sent_bytes(contest.interface), time.process_time(), time.perf_counter()
    for step in range(contest.steps):
        trainee.step(*batches[(done + step) % len(batches)])
    taken_s, cpu_s = time.perf_counter() - began_s, time.process_time() - cpu_s
    sent = _sent_bytes(contest.interface) - sent
    slowest = torch.tensor([taken_s])
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    forward_s, backward_s = (
        (trainee.forward_s, trainee.backward_s) if isinstance(trainee, Alone) else (0.0, 0.0)
    )
    return (
        float(slowest) / contest.steps,
        cpu_s / contest.steps,
        forward_s / contest.steps,
        backward_s / contest.steps,
        sent // contest.steps,
    )


def _difference(model: nn.Module, reference: nn.Module) -> float:
    return max(
        float((own.detach() - other.detach()).abs().max())
        for own, other in zip(model.parameters(), reference.parameters(), strict=True)
    )


def _same_on_all(model: nn.Module) -> bool:
    digest = hashlib.sha256()
    for parameter in model.parameters():
        digest.update(parameter.detach().contiguous().numpy().tobytes())
    told: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(told, digest.hexdigest())
    return len(set(told)) == 1


def _sent_bytes(interface: str) -> int:
    counter = Path(f"/sys/class/net/{interface}/statistics/tx_bytes")
    return int(counter.read_text()) if counter.exists() else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], int(sys.argv[2])))
