"""How the members of a group exchange gradients: with whom, and in which coding (F4, F8a)."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from socflower.cluster import Cluster, TaskGraphBuilder
from socflower.errors import ConfigError
from socflower.hierarchy.exchange.coding_bytes import (
    EXACT,
    KINDS,
    RING,
    SERVER,
    Coding,
    CollectiveOperation,
    Compute,
    SelectedBuckets,
    gradient_coding,
)
from socflower.hierarchy.exchange.collective_tasks import (
    Dependencies,
    Exchange,
    ring_rounds,
    server_exchange,
)


def exchange_in_groups(
    kind: str,
    compression: str,
    cluster: Cluster,
    groups: Sequence[Sequence[int]],
    steps_per_epoch: int,
) -> "GradientExchange":
    """Return how the members of these groups exchange gradients; `ConfigError` if the coding is not for their size."""
    coding = gradient_coding(compression, steps_per_epoch=steps_per_epoch)
    coding.require_size(max(map(len, groups)))
    socs = [soc for members in groups for soc in members]
    return GradientExchange(kind=kind, coding=coding.on(cluster, socs))


@dataclass(frozen=True, slots=True)
class ExchangeTasks:
    """An exchange in a graph: the transfers that begin it, those that end it, and those that end it by SoC."""

    first: tuple[int, ...]
    last: tuple[int, ...]
    done: Mapping[int, tuple[int, ...]]


@dataclass(frozen=True, kw_only=True, slots=True)
class GradientExchange:
    """With whom members exchange their gradients: in a ring, or with a parameter server, and in which coding."""

    kind: str = RING
    coding: Coding = EXACT

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ConfigError(f"exchange: kind = {self.kind!r}; use one of {', '.join(KINDS)}")
        if fault := exchange_fault(self.kind, self.coding):
            raise ConfigError(fault)

    def wire_bytes(self, bucket: Exchange, size: int, step: int | None = None) -> float:
        """Return the bytes that a member sends for a bucket of float32 gradients, the mean over members.

        A server is one of the members, the first.
        """
        operations = self.coding.operations(bucket, size, step)
        return sum(each.wire_bytes(size, self.kind) for each in operations)

    def lower(
        self,
        builder: TaskGraphBuilder,
        members: Sequence[int],
        bucket: Exchange,
        after: Dependencies,
        name: str,
        step: int | None = None,
        compute: Compute | None = None,
    ) -> ExchangeTasks:
        """Add the exchange of a bucket in a step to a graph; a member takes part after its tasks in `after`.

        `compute` adds the members' work to encode and decode; without it, that takes no time.
        """
        size = len(members)
        if size == 1:
            return ExchangeTasks((), (), {members[0]: tuple(after[members[0]])})
        encoded = self.coding.memory_bytes(bucket, size, step)
        if compute is not None and encoded:
            after = {
                soc: (compute(f"{name} encode", soc, encoded, tuple(after[soc])),)
                for soc in members
            }
        # Codings work on the whole bucket.
        fused = bucket.fused or not self.coding.is_exact
        first: tuple[int, ...] = ()
        for operation in self.coding.operations(bucket, size, step):
            begins, ends, after = self._operation(
                builder, members, replace(bucket, fused=fused), operation, after, name
            )
            first = first or begins
        return ExchangeTasks(first, ends, {soc: tuple(after[soc]) for soc in members})

    def _operation(
        self,
        builder: TaskGraphBuilder,
        members: Sequence[int],
        sent: Exchange,
        operation: CollectiveOperation,
        after: Dependencies,
        name: str,
    ) -> tuple[tuple[int, ...], tuple[int, ...], dict[int, tuple[int, ...]]]:
        """Add an operation; return the transfers that begin it, those that end it, and those that end it by SoC."""
        size = len(members)
        if self.kind == SERVER:
            upload = replace(sent, num_bytes=operation.num_bytes)
            download = replace(sent, num_bytes=operation.returned_bytes(size))
            return server_exchange(builder, members, upload, after, name, download)
        part = replace(sent, num_bytes=operation.send_bytes(size))
        ring = ring_rounds(builder, members, part, operation.num_sends(size), after, name)
        return ring.transfers, ring.transfers, dict(ring.done)

    def stages(self, first_step: int, num_steps: int) -> Iterator[tuple[int, int]]:
        """Yield how many steps send equally many bytes, and the first of these, for steps from `first_step` on."""
        end = first_step + num_steps
        inside = [step for step in self.coding.changes if first_step < step < end]
        for start, stop in pairwise([first_step, *inside, end]):
            yield stop - start, start


def exchange_fault(kind: str, coding: Coding) -> str:
    """Return why members cannot exchange so in this coding; empty if they can."""
    if kind != SERVER or not isinstance(coding, SelectedBuckets):
        return ""
    return (
        f"compression = {coding.name!r} compares times of a ring, and this is a {SERVER}; use 'dgc'"
    )


EXACT_RING = GradientExchange()
