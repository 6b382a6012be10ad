"""A device and clusters with round numbers, and rings made of real transfers."""

from collections.abc import Callable, Sequence

import pytest

from socflower.cluster import Cluster, Device, GraphBuilder, Processor
from socflower.cluster.topology import uniform_cluster

MakeCluster = Callable[..., Cluster]
AddRing = Callable[..., list[int]]


@pytest.fixture(scope="session")
def toy() -> Device:
    """Idle 1 W, CPU 5 W, NPU 3 W, network 0.5 W."""
    return Device(
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


@pytest.fixture(scope="session")
def make_cluster(toy: Device) -> MakeCluster:
    """All links carry 100 bytes/s unless said otherwise, handling is free."""

    def make(
        slots: Sequence[int] = (5,),
        *,
        link: float = 100.0,
        uplink: float | None = None,
        hub: float | None = None,
        message_s: float = 0.0,
    ) -> Cluster:
        return uniform_cluster(
            toy,
            slots,
            soc_bytes_per_s=link,
            board_bytes_per_s=uplink or link,
            hub_bytes_per_s=hub or link,
            message_s=message_s,
        )

    return make


@pytest.fixture(scope="session")
def add_ring() -> AddRing:
    """Adds a ring all-reduce, 2(n-1) sub-steps of n transfers, and returns the last transfer into each member."""

    def add(
        builder: GraphBuilder,
        members: Sequence[int],
        num_bytes: float,
        num_messages: int = 0,
        after: Sequence[int] = (),
    ) -> list[int]:
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

    return add
