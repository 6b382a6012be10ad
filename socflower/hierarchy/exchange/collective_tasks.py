"""Transfers of collectives in a task graph: rings, a parameter server, trees.

Each function adds transfers to a `TaskGraphBuilder` and returns the indices of the tasks that complete the result.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from socflower.cluster import Endpoint, Gradient, TaskGraphBuilder, bucket_starts
from socflower.errors import require_range

PER_TENSOR, BUCKETS = "per-tensor", "buckets"
FUSIONS = (PER_TENSOR, BUCKETS)
"""How the tensors of a model are sent (F8a): each as a message of its own, or each bucket as one."""

Dependencies = Mapping[int, Sequence[int]]
"""Tasks that must be done before a SoC sends, by SoC."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Exchange:
    """The data that a member exchanges: the gradients or weights of a model."""

    num_bytes: float
    num_tensors: int
    # Whether it is one message instead of one for each tensor (F8a).
    fused: bool = False
    # Of the tensors, in the order in which they are sent; empty: not known.
    gradients: tuple[Gradient, ...] = ()

    def __post_init__(self) -> None:
        require_range("exchange", least=0, num_bytes=self.num_bytes)
        require_range("exchange", least=1, num_tensors=self.num_tensors)

    @property
    def num_messages(self) -> int:
        """The number of messages of each transfer."""
        return 1 if self.fused else self.num_tensors

    def buckets(self, count: int) -> "tuple[Bucket, ...]":
        """Return at most `count` buckets, no more than tensors, by the rule of real rings (F8a).

        If the sizes of tensors are not known, buckets have equal bytes and about equal numbers of tensors, and are
        completed at equal intervals of the backward pass.
        """
        if self.gradients:
            starts = bucket_starts([gradient.num_bytes for gradient in self.gradients], count)
            parts = [
                self.gradients[start:end] for start, end in pairwise([*starts, len(self.gradients)])
            ]
        else:
            count = min(count, self.num_tensors)
            small, extra = divmod(self.num_tensors, count)
            parts = [
                (
                    Gradient(
                        num_bytes=self.num_bytes / count / (small + (index < extra)),
                        done=(index + 1) / count,
                    ),
                )
                * (small + (index < extra))
                for index in range(count)
            ]
        buckets: list[Bucket] = []
        done = 0.0
        for part in parts:
            # The last bucket waits for the whole backward pass.
            done = (
                1.0
                if len(buckets) == len(parts) - 1
                else max(done, *(gradient.done for gradient in part))
            )
            buckets.append(
                Bucket(
                    Exchange(
                        num_bytes=sum(gradient.num_bytes for gradient in part),
                        num_tensors=len(part),
                        fused=self.fused,
                        gradients=tuple(part) if self.gradients else (),
                    ),
                    done,
                )
            )
        return tuple(buckets)


class Bucket(NamedTuple):
    """Tensors that are exchanged together, and the part of the backward pass after which they are complete."""

    exchange: Exchange
    done: float


@dataclass(frozen=True, slots=True)
class RingTasks:
    """Transfers around a ring in the graph: all of them, and those that end it by SoC."""

    transfers: tuple[int, ...]
    done: Mapping[int, tuple[int, ...]]


def ring_rounds(
    builder: TaskGraphBuilder,
    socs: Sequence[int],
    sent: Exchange,
    rounds: int,
    after: Dependencies,
    name: str,
) -> RingTasks:
    """Add rounds in which each of several SoCs sends `sent` to the next one.

    A SoC's send depends on its receive and its send of the round before.
    """
    first = builder.next_index
    sends = tuple(
        builder.transfer(
            f"{name} ring",
            soc,
            socs[(rank + 1) % len(socs)],
            sent.num_bytes,
            num_messages=sent.num_messages,
            rounds=rounds,
            after=after[soc],
            after_round=(first + (rank - 1) % len(socs),),
        )
        for rank, soc in enumerate(socs)
    )
    return RingTasks(sends, {soc: (sends[rank - 1], sends[rank]) for rank, soc in enumerate(socs)})


def server_exchange(
    builder: TaskGraphBuilder,
    socs: Sequence[int],
    exchange: Exchange,
    after: Dependencies,
    name: str,
    returned: Exchange | None = None,
) -> tuple[tuple[int, ...], tuple[int, ...], dict[int, tuple[int, ...]]]:
    """Add an exchange with a parameter server, the first SoC: n-1 uploads and, after all of them, n-1 downloads.

    Downloads have the size of `returned`, by default that of uploads. Returns the uploads, the downloads, and the tasks
    that end the exchange by SoC.
    """
    server, *others = socs
    returned = returned or exchange
    uploads = tuple(
        builder.transfer(
            f"{name} upload",
            soc,
            server,
            exchange.num_bytes,
            num_messages=exchange.num_messages,
            after=after[soc],
        )
        for soc in others
    )
    # The sum includes the server's own gradient.
    ready = (*after[server], *uploads)
    downloads = tuple(
        builder.transfer(
            f"{name} download",
            server,
            soc,
            returned.num_bytes,
            num_messages=returned.num_messages,
            after=ready,
        )
        for soc in others
    )
    done = {soc: (index,) for soc, index in zip(others, downloads, strict=True)}
    return uploads, downloads, {server: (*ready, *downloads), **done}


def gather(
    builder: TaskGraphBuilder,
    center: Endpoint,
    leaders: Sequence[int],
    exchange: Exchange,
    after: Dependencies,
    name: str,
    processor: str = "cpu",
) -> int:
    """Add an upload to `center` from every other leader; return the task that waits for all of them.

    `processor` is a processor of `center`.
    """
    uploads = [
        builder.transfer(
            f"{name} upload",
            leader,
            center,
            exchange.num_bytes,
            num_messages=exchange.num_messages,
            after=after.get(leader, ()),
        )
        for leader in leaders
        if leader != center
    ]
    own = after.get(center, ()) if isinstance(center, int) else ()
    # One task, which takes no time: N downloads after N uploads would be N² dependencies.
    return builder.compute(
        f"{name} uploaded", center, 0.0, processor=processor, after=(*own, *uploads)
    )


def scatter(
    builder: TaskGraphBuilder,
    center: Endpoint,
    leaders: Sequence[int],
    exchange: Exchange,
    after: int,
    name: str,
) -> dict[int, int]:
    """Add a download from `center` to every other leader; return the task after which each leader has the model."""
    return {
        leader: after
        if leader == center
        else builder.transfer(
            f"{name} download",
            center,
            leader,
            exchange.num_bytes,
            num_messages=exchange.num_messages,
            after=(after,),
        )
        for leader in leaders
    }


def broadcast(
    builder: TaskGraphBuilder,
    order: Sequence[int],
    exchange: Exchange,
    after: Sequence[int],
    name: str,
) -> dict[int, tuple[int, ...]]:
    """Add a broadcast by a binomial tree from the first SoC, in ceil(log2 n) rounds; return the last task of each SoC.

    Each holder is responsible for a range of `order`. It sends to the SoC in the middle, which takes over the second
    half, and repeats this with the first half. If `order` is contiguous by board, few transfers cross boards.
    """
    needs = {order[0]: tuple(after)}
    for holder, receiver in _halvings(order):
        index = builder.transfer(
            f"{name} broadcast",
            holder,
            receiver,
            exchange.num_bytes,
            num_messages=exchange.num_messages,
            after=needs[holder],
        )
        needs[holder] = needs[receiver] = (index,)
    return needs


def _halvings(order: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield (holder, receiver) of a binomial tree; each holder's sends are in their order of execution."""
    if len(order) > 1:
        middle = (len(order) + 1) // 2
        yield order[0], order[middle]
        yield from _halvings(order[:middle])
        yield from _halvings(order[middle:])
