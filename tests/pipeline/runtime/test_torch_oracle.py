"""Plans of equal micro-batches and one device a stage compute what torch.distributed.pipelining does over gloo."""

import os
import threading
from multiprocessing.connection import Connection

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

from socflower.engines.deployment.flower_processes import free_ports
from socflower.engines.local.workers import _end_with_parent as end_with_parent
from socflower.engines.local.workers import _start_method as start_method
from socflower.training.fp32 import FP32Trainer, sgd
from tests.peers.peers import START_S
from tests.pipeline.problems import straight_plan
from tests.pipeline.runtime.training import assert_close, data, minis, read, train_together

LEARNING_RATE = 0.5
MICRO_BATCH = 4
LAYERS_UNTIL = (1, 4, 7, 10)
"""Where the model's layers, as the profiler cuts it, end in the sequence: before each one that multiplies."""


def sequence() -> nn.Sequential:
    torch.manual_seed(5)
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1),
        nn.Conv2d(4, 6, 3),
        nn.BatchNorm2d(6),
        nn.ReLU(),
        nn.Conv2d(6, 6, 3),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(24, 12),
        nn.Tanh(),
        nn.Identity(),
        nn.Linear(12, 5),
    )


def by_torch(
    pipe: Connection, rank: int, cuts: tuple[int, ...], num_micro_batches: int, port: int
) -> None:
    """Be one rank of torch's pipeline; send the weights of its stage after two updates, by their names in the model."""
    from torch.distributed.pipelining import PipelineStage
    from torch.distributed.pipelining.schedules import Schedule1F1B

    threading.Thread(target=end_with_parent, daemon=True).start()
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group(
        "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=len(cuts)
    )
    ends = [0, *(LAYERS_UNTIL[cut] if cut < len(LAYERS_UNTIL) else 11 for cut in cuts)]
    module = sequence()[ends[rank] : ends[rank + 1]].train()
    with torch.no_grad():
        # Without them it runs the stage on memory of any content, which spoils the running statistics.
        entering = sequence()[: ends[rank]](torch.zeros(MICRO_BATCH, 1, 6, 6))
        leaving = sequence()[ends[rank] : ends[rank + 1]](entering)
    stage = PipelineStage(
        module,
        rank,
        len(cuts),
        torch.device("cpu"),
        input_args=entering.requires_grad_(rank > 0),
        output_args=leaving.requires_grad_(),
    )
    schedule = Schedule1F1B(stage, num_micro_batches, loss_fn=functional.cross_entropy)
    optimizer = torch.optim.SGD(module.parameters(), lr=LEARNING_RATE)
    for mini in minis(2, MICRO_BATCH * num_micro_batches):
        inputs, labels = data().batch(torch.from_numpy(mini.indices))
        optimizer.zero_grad()
        if rank == 0:
            schedule.step(inputs)
        else:
            schedule.step(target=labels) if rank == len(cuts) - 1 else schedule.step()
        optimizer.step()
    pipe.send({name: value.numpy() for name, value in module.state_dict().items()})
    dist.destroy_process_group()


def weights_by_torch(cuts: tuple[int, ...], num_micro_batches: int) -> dict[str, np.ndarray]:
    context, (port,) = start_method(), free_ports(1)
    pipes = [context.Pipe() for _ in cuts]
    ranks = [
        context.Process(
            target=by_torch, args=(there, rank, cuts, num_micro_batches, port), daemon=True
        )
        for rank, (_, there) in enumerate(pipes)
    ]
    found: dict[str, np.ndarray] = {}
    try:
        for process in ranks:
            process.start()
        for rank, (here, _) in enumerate(pipes):
            assert here.poll(START_S), f"rank {rank} does not end"
            found |= here.recv()
    finally:
        for process in ranks:
            process.kill()
            process.join()
    return found


@pytest.mark.parametrize(
    ("cuts", "num_micro_batches", "tolerance"),
    [((1, 4), 4, 0.0), pytest.param((0, 2, 4), 3, 1e-6, marks=pytest.mark.slow)],
)
def test_torchs_1f1b_computes_the_same(
    cuts: tuple[int, ...], num_micro_batches: int, tolerance: float
) -> None:
    """Micro-batches are added in one order; torch scales their sum, ours each: the same bits by a power of two."""
    plan = straight_plan(cuts, ((MICRO_BATCH,),) * len(cuts), num_micro_batches)
    trainer = FP32Trainer(optimizer=sgd(LEARNING_RATE, momentum=0.0), device="cpu")
    ours = train_together(sequence(), plan, minis(2, plan.num_samples), trainer).weights
    assert not torch.equal(ours["0.weight"], sequence()[0].weight)
    theirs = weights_by_torch(cuts, num_micro_batches)
    assert_close(ours, {name: torch.from_numpy(own) for name, own in theirs.items()}, tolerance)


def test_the_sequence_is_cut_as_the_profiler_cuts_it() -> None:
    ends = [piece.operations[-1].node.name for piece in read(sequence()).chain.pieces]
    assert ends == ["_0", "_3", "_6", "_9", "output"]
