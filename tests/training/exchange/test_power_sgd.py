"""Gradients of low rank: those of torch's communication hook, and nothing lost for good."""

import os
import threading
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch import distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook

from socflower.engines.local.workers import _end_with_parent as end_with_parent
from socflower.engines.local.workers import _start_method as start_method
from socflower.hierarchy.exchange.coding_bytes import PowerSGD
from socflower.training.exchange.codings import make_compression
from socflower.training.exchange.compression import run_together, seeded
from socflower.training.exchange.power_sgd import orthonormal
from tests.peers.peers import START_S

SHAPES = ((24, 4, 3, 3), (30, 40), (24,), (4, 3))
NUM_ELEMENTS = 24 * 36 + 30 * 40 + 24 + 12
SIZE, NUM_STEPS, START = 2, 7, 2


def gradient(rank: int, step: int) -> Tensor:
    """Return a member's gradient: the first matrix has a low rank and some noise; no member has the second at first."""
    generator = torch.Generator().manual_seed(100 * rank + step)
    drawn = torch.randn(NUM_ELEMENTS, generator=generator)
    low = torch.randn(24, 2, generator=generator) @ torch.randn(2, 36, generator=generator)
    drawn[: 24 * 36] = low.flatten() + 0.1 * drawn[: 24 * 36]
    return drawn


class Bucket:
    """What the hook uses of DDP's bucket."""

    def __init__(self, buffer: Tensor) -> None:
        self._buffer = buffer

    def buffer(self) -> Tensor:
        return self._buffer

    def gradients(self) -> list[Tensor]:
        sizes = [torch.Size(shape) for shape in SHAPES]
        parts = self._buffer.split([size.numel() for size in sizes])
        return [part.view(size) for part, size in zip(parts, sizes, strict=True)]

    def index(self) -> int:
        return 0

    def is_last(self) -> bool:
        return True


def by_torch(pipe: Connection, rank: int, file: str, low: int) -> None:
    """Be a process of a gloo group; send the means that torch's hook gives it."""
    threading.Thread(target=end_with_parent, daemon=True).start()
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=SIZE)
    state = PowerSGDState(None, matrix_approximation_rank=low, start_powerSGD_iter=START)
    # The first bases are random: they are drawn with the same seed here.
    state.rng = SimpleNamespace(randint=lambda _: seeded(5, 0).initial_seed())
    means = []
    for step in range(NUM_STEPS):
        bucket: Any = Bucket(gradient(rank, step))
        found = powerSGD_hook(state, bucket).wait()
        means.append((found[0] if isinstance(found, list) else found).tolist())
    pipe.send(means)
    dist.destroy_process_group()


def means_by_torch(file: str, low: int) -> list[Tensor]:
    """Return each process's means."""
    context = start_method()
    pipes = [context.Pipe() for _ in range(SIZE)]
    processes = [
        context.Process(target=by_torch, args=(there, rank, file, low), daemon=True)
        for rank, (_, there) in enumerate(pipes)
    ]
    try:
        for process in processes:
            process.start()
        assert all(here.poll(START_S) for here, _ in pipes), "a process does not end"
        return [torch.tensor(here.recv()) for here, _ in pipes]
    finally:
        for process in processes:
            process.kill()
            process.join()


def ours(coding: PowerSGD, size: int, gradients: Sequence[Sequence[Tensor]]) -> list[Tensor]:
    """Return the sums of each step's gradients."""
    members = [make_compression(coding, seed=5) for _ in range(size)]
    sums = []
    for step, each in enumerate(gradients):
        own = [one.clone() for one in each]
        for member in members:
            member.start_step(step)
        run_together(
            [
                member.exchange(rank, size, 0, own[rank], SHAPES)
                for rank, member in enumerate(members)
            ]
        )
        for member in members:
            member.finish_step()
        assert all(torch.equal(own[0], other) for other in own)
        sums.append(own[0])
    if size > 1 and members[0]._kept:
        left = torch.stack([member._kept[0][-1] for member in members]).sum(0)
        total = torch.stack([torch.stack(list(each)).sum(0) for each in gradients]).sum(0)
        assert torch.allclose(torch.stack(sums).sum(0) + left, total, atol=1e-3)
    return sums


@pytest.mark.parametrize("low", [1, 2, 4])
def test_sums_are_those_of_torchs_hook(low: int, tmp_path: Path) -> None:
    """A member's weighted gradient is its part of the mean, so that our sum is torch's mean."""
    means, others = means_by_torch(str(tmp_path / "store"), low)
    assert torch.equal(means, others)
    weighted = [[gradient(rank, step) / SIZE for rank in range(SIZE)] for step in range(NUM_STEPS)]
    sums = torch.stack(ours(PowerSGD(rank=low, start_step=START), SIZE, weighted))
    assert torch.allclose(sums, means, atol=2e-4)
    assert not torch.allclose(sums[-1], torch.stack(weighted[-1]).sum(0), atol=0.1)


def test_a_matrix_of_the_rank_that_is_sent_is_exact() -> None:
    gradients = torch.zeros(2, NUM_ELEMENTS)
    for row, part in enumerate(gradients):
        part[:864] = torch.outer(torch.arange(24.0) + 1 + row, torch.ones(36)).flatten()
    for found in ours(PowerSGD(), 2, [list(gradients)] * 3):
        assert torch.allclose(found, gradients.sum(0), atol=1e-3)


def test_a_layer_without_gradients_at_first_learns_later() -> None:
    zeros, ones = [torch.zeros(NUM_ELEMENTS)] * 2, [torch.ones(NUM_ELEMENTS)] * 2
    *_, last = ours(PowerSGD(rank=2), 2, [zeros, zeros, ones])
    assert torch.allclose(last, torch.full((NUM_ELEMENTS,), 2.0), atol=1e-4)


def test_columns_are_orthonormal_or_zero() -> None:
    matrix = torch.randn(20, 4, generator=torch.Generator().manual_seed(1))
    found = orthonormal(matrix)
    assert torch.allclose(found.T @ found, torch.eye(4), atol=1e-5)
    assert torch.allclose(found @ (found.T @ matrix), matrix, atol=1e-5)
    assert torch.equal(orthonormal(torch.zeros(5, 2)), torch.zeros(5, 2))
    spanned = torch.stack([matrix[:, 0], 3 * matrix[:, 0], matrix[:, 1]], dim=1)
    assert orthonormal(spanned).norm(dim=0).tolist() == pytest.approx([1, 0, 1])
