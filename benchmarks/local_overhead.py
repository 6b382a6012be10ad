"""The local engine against a bare torch loop that does the same arithmetic, and two cores against one.

A round of SoCFlow (LeNet-5, 8 groups, batch 64, data of MNIST's size) goes through strategy, messages, worker process
and native aggregation on our side; the peer is a plain loop that trains the same groups on the same batches one after
the other, keeps their momentum, and averages their weights. Both use one torch thread, start warm, and take turns; the
weights after the first round must agree.

The second row runs the same rounds on one worker process and on two. It shows a gain only if two cores are free.
"""

import statistics
from functools import cache
from pathlib import Path
from time import perf_counter

import numpy as np
import torch
from flwr.app import ArrayRecord, ConfigRecord, Context
from torch import nn
from torch.nn import functional

from benchmarks.harness import Row, less_is_better
from socflower.clients.app import make_client_app
from socflower.cluster import parse_cluster
from socflower.engines.local.grid import LocalGrid
from socflower.engines.local.workers import AppReference
from socflower.engines.names import num_cores
from socflower.strategies.settings import TrainingSchedule
from socflower.strategies.socflow import SoCFlow
from socflower.training.batches import group_batches
from socflower.training.fp32 import FP32Trainer, sgd
from socflower.workloads.dataset import LabelledData
from socflower.workloads.models.classifiers import build_model

NUM_GROUPS = 8
BATCH_SIZE = 64
LEARNING_RATE = 0.01


@cache
def data() -> LabelledData:
    """Return random images of MNIST's size: only the arithmetic matters here."""
    generator = torch.Generator().manual_seed(0)
    return LabelledData(
        inputs=torch.randint(0, 256, (60_000, 1, 28, 28), generator=generator, dtype=torch.uint8),
        labels=torch.randint(0, 10, (60_000,), generator=generator),
        mean=(0.13,),
        std=(0.31,),
        num_classes=10,
    )


def model(_: Context | None = None) -> nn.Module:
    """Return the model both sides train."""
    return build_model("lenet5", in_channels=1, image_size=28, num_classes=10, seed=1)


client_app = make_client_app(
    model,
    lambda context, part, num_parts: data(),
    FP32Trainer(optimizer=sgd(LEARNING_RATE, 0.9), channels_last=False),
)


class Engine:
    """Rounds on the local engine, as `Strategy.start` does them."""

    def __init__(self, num_workers: int, interval_epochs: float) -> None:
        reference = AppReference(
            target="benchmarks.local_overhead:client_app", folder=Path(__file__).parents[1]
        )
        self.grid = LocalGrid(reference, 32, num_workers=num_workers)
        self.strategy = SoCFlow(
            cluster=parse_cluster({"boards": 8, "socs_per_board": 4}),
            groups=NUM_GROUPS,
            schedule=TrainingSchedule(
                num_samples=len(data()),
                batch_size=BATCH_SIZE,
                num_epochs=10,
                interval_epochs=interval_epochs,
            ),
        )
        self.arrays = ArrayRecord(model().state_dict())
        self.round = 0

    def step(self) -> float:
        """Do the next round and return its seconds."""
        self.round += 1
        started_s = perf_counter()
        replies = self.grid.send_and_receive(
            self.strategy.configure_train(self.round, self.arrays, ConfigRecord(), self.grid)
        )
        arrays, _ = self.strategy.aggregate_train(self.round, replies)
        assert arrays is not None
        self.arrays = arrays
        return perf_counter() - started_s


class BareLoop:
    """The same rounds in plain torch, in this process."""

    def __init__(self, strategy: SoCFlow) -> None:
        self.strategy = strategy
        self.models = [model() for _ in range(NUM_GROUPS)]
        self.optimizers = [
            torch.optim.SGD(each.parameters(), lr=LEARNING_RATE, momentum=0.9)
            for each in self.models
        ]
        self.weights = {
            name: tensor.clone() for name, tensor in self.models[0].state_dict().items()
        }
        self.round = 0

    def step(self) -> float:
        """Do the next round and return its seconds."""
        self.round += 1
        started_s = perf_counter()
        interval = self.strategy.method.sync.intervals[self.round - 1]
        for group, (network, optimizer) in enumerate(
            zip(self.models, self.optimizers, strict=True)
        ):
            network.load_state_dict(self.weights)
            task = self.strategy.method.messages.task(self.strategy.plan.groups[group], interval)
            for indices in group_batches(task, len(data())):
                inputs, labels = data().batch(torch.from_numpy(indices))
                optimizer.zero_grad()
                functional.cross_entropy(network(inputs), labels).backward()
                optimizer.step()
        states = [network.state_dict() for network in self.models]
        self.weights = {
            name: torch.stack([state[name] for state in states]).mean(dim=0) for name in states[0]
        }
        return perf_counter() - started_s


def run(quick: bool = False) -> list[Row]:
    """Return the row of the engine's overhead and, on two or more cores, the row of the gain by two workers."""
    torch.set_num_threads(1)
    interval, rounds = (0.05, 3) if quick else (0.25, 9)
    rows = [_overhead(interval, rounds)]
    if num_cores() > 1:
        rows.append(_two_cores(interval, rounds))
    return rows


def _overhead(interval: float, rounds: int) -> Row:
    engine = Engine(1, interval)
    with engine.grid:
        bare = BareLoop(engine.strategy)
        engine.step()
        bare.step()
        # Compared after one round: the averages are rounded differently, and training amplifies the
        # difference.
        ok = _equal(engine.arrays, bare.weights)
        pairs = [(engine.step(), bare.step()) for _ in range(rounds)]
    ours, theirs = (statistics.median(column) for column in zip(*pairs, strict=True))
    return less_is_better(
        f"a round of {NUM_GROUPS} groups x {engine.strategy.method.sync.intervals[0].num_steps} steps, one core",
        ours,
        "bare torch loop",
        theirs,
        "s",
        limit=theirs,
        ok=ok,
    )


def _two_cores(interval: float, rounds: int) -> Row:
    one, two = Engine(1, interval), Engine(2, interval)
    with one.grid, two.grid:
        one.step()
        two.step()
        pairs = [(two.step(), one.step()) for _ in range(rounds)]
    ours, theirs = (statistics.median(column) for column in zip(*pairs, strict=True))
    return less_is_better(
        f"the same round on two cores ({num_cores()} usable)",
        ours,
        "one worker process",
        theirs,
        "s",
        limit=theirs / 2,
        ok=_equal(one.arrays, two.arrays.to_torch_state_dict()),
    )


def _equal(ours: ArrayRecord, theirs: dict[str, torch.Tensor]) -> bool:
    return all(
        np.allclose(tensor.numpy(), theirs[name].numpy(), rtol=1e-4, atol=1e-6)
        for name, tensor in ours.to_torch_state_dict().items()
    )
