"""Edges of split trainings on a cluster with round numbers, from any time on."""

from collections.abc import Sequence
from typing import Any

from socflower.cluster import Device, Processor
from socflower.cluster.topology import uniform_cluster
from socflower.edgecloud.plan import split_pipeline
from socflower.edgecloud.plan.party import Party
from socflower.edgecloud.plan.split_pipeline import Timeline
from socflower.sim import EventClock

EDGE = Device(
    name="edge",
    idle_w=1.0,
    network_w=0.5,
    memory_bytes=1e9,
    memory_bytes_per_s=1e9,
    layer_overhead_s=0.0,
    processors={"cpu": Processor(name="cpu", flops_per_s=1e9, active_w=5.0)},
)


def simulate_split(
    parties: Sequence[Party],
    num_batches: int,
    first_batch: int = 0,
    *,
    start_s: float = 0.0,
    **settings: Any,
) -> Timeline:
    """Simulate the parties on a clock of their own, which has come to `start_s`."""
    cluster = uniform_cluster(
        EDGE,
        [max(1, len(parties))],
        soc_bytes_per_s=1e6,
        board_bytes_per_s=1e6,
        hub_bytes_per_s=1e6,
        message_s=0.0,
    )
    clock = EventClock(cluster)
    clock.restore({**clock.state(), "duration_s": start_s})
    return split_pipeline.simulate_split(
        parties, num_batches, first_batch, clock=clock, cluster=cluster, **settings
    )
