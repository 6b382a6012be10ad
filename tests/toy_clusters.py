"""A device and clusters with round numbers, rings made of real transfers, and speeds that change when a test says."""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import pairwise
from typing import Any

import pytest

from socflower.cluster import (
    Board,
    Cluster,
    Device,
    LayerProfile,
    ModelProfile,
    Processor,
    TaskGraphBuilder,
    Usage,
)

MakeCluster = Callable[..., Cluster]
AddRing = Callable[..., list[int]]

TOY = Device(
    name="toy",
    idle_w=1.0,
    network_w=0.5,
    memory_bytes=1e9,
    memory_bytes_per_s=1e9,
    layer_overhead_s=0.0,
    processors={
        "cpu": Processor(name="cpu", flops_per_s=1e9, active_w=5.0),
        "npu": Processor(name="npu", flops_per_s=1e9, active_w=3.0),
    },
)
"""Idle 1 W, CPU 5 W, NPU 3 W, network 0.5 W."""


def toy_cluster(
    slots: Sequence[int] = (5,),
    *,
    link: float = 100.0,
    uplink: float | None = None,
    hub: float | None = None,
    message_s: float = 0.0,
) -> Cluster:
    """Toys, whose links carry 100 bytes/s unless said otherwise; handling is free."""
    boards = [
        Board(num_slots=count, device=TOY, soc_bytes_per_s=link, uplink_bytes_per_s=uplink or link)
        for count in slots
    ]
    return Cluster(
        name="toys", boards=tuple(boards), hub_bytes_per_s=hub or link, message_s=message_s
    )


def toy_profile(
    flops: float, num_bytes: float, num_tensors: int = 1, name: str = "toy"
) -> ModelProfile:
    """A model of one layer."""
    layer = LayerProfile(
        name="only",
        kind="Linear",
        forward_flops=flops,
        output_bytes=4.0,
        weight_bytes=num_bytes,
        num_tensors=num_tensors,
    )
    return ModelProfile(name=name, input_bytes=4.0, layers=(layer,))


def same_usage(left: Usage, right: Usage) -> None:
    """Assert that two usages are equal but for rounding."""
    assert left.duration_s == pytest.approx(right.duration_s, rel=1e-9, abs=1e-9)
    for name in ("soc_seconds", "energy_j", "num_bytes"):
        ours, theirs = getattr(left, name), getattr(right, name)
        ours = {key: value for key, value in ours.items() if value or key in theirs}
        assert ours == pytest.approx(theirs, rel=1e-9, abs=1e-9)


class Weather:
    """`DeviceDynamics` without heat: from each moment on, these speeds and these SoCs that users have.

    `watts` are the power factors of some speeds; those of others are the speeds themselves.
    """

    def __init__(
        self,
        *stretches: tuple[float, Sequence[float], Collection[int]],
        watts: Mapping[float, float] | None = None,
        fans_w: float = 0.0,
    ) -> None:
        assert all(before[0] < after[0] for before, after in pairwise(stretches))
        self._stretches, self._watts, self._fans_w = stretches, watts or {}, fans_w
        self.now_s = 0.0
        self.loads: list[tuple[float, Sequence[float]]] = []

    def _present(self) -> int:
        begun = [from_s <= self.now_s + 1e-9 for from_s, _, _ in self._stretches]
        return sum(begun) - 1

    def speed_factors(self) -> list[float]:
        return list(self._stretches[self._present()][1])

    def power_factors(self) -> list[float]:
        return [self._watts.get(speed, speed) for speed in self.speed_factors()]

    def taken_socs(self) -> frozenset[int]:
        return frozenset(self._stretches[self._present()][2])

    def steady_s(self, power_w: Sequence[float]) -> float:
        later = self._stretches[self._present() + 1 :]
        return later[0][0] - self.now_s if later else math.inf

    def advance(self, duration_s: float, power_w: Sequence[float]) -> float:
        self.now_s += duration_s
        self.loads.append((duration_s, power_w))
        return self._fans_w * duration_s

    def state(self) -> dict[str, Any]:
        return {"now_s": self.now_s}

    def restore(self, state: Mapping[str, Any]) -> None:
        self.now_s = state["now_s"]


def ring_all_reduce(
    builder: TaskGraphBuilder,
    members: Sequence[int],
    num_bytes: float,
    num_messages: int = 0,
    after: Sequence[int] = (),
) -> list[int]:
    """Add 2(n-1) sub-steps of n transfers, and return the last transfer into each member."""
    n = len(members)
    holds: list[tuple[int, ...]] = [(task,) for task in after] or [()] * n
    arrived: list[int] = []
    for step in range(2 * (n - 1)):
        sent = [
            builder.transfer(
                f"ring {step}",
                member,
                members[(rank + 1) % n],
                num_bytes / n,
                num_messages=num_messages,
                after=holds[rank],
            )
            for rank, member in enumerate(members)
        ]
        arrived = [sent[rank - 1] for rank in range(n)]
        holds = [(sent[rank - 1], sent[rank]) for rank in range(n)]
    return arrived


@pytest.fixture(scope="session")
def toy() -> Device:
    return TOY


@pytest.fixture(scope="session")
def make_cluster() -> MakeCluster:
    return toy_cluster


@pytest.fixture(scope="session")
def add_ring() -> AddRing:
    return ring_all_reduce
