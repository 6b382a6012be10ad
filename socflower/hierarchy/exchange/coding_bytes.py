"""Codings of gradients, and the bytes that members send in each of them (F4, F8a).

| coding            | a member sends, per element, of n members | what is lost                                       |
| ----------------- | ----------------------------------------- | -------------------------------------------------- |
| `none`            | 8(n-1)/n bytes                            | nothing                                            |
| `fp16`            | 4(n-1)/n                                  | 11 bits are kept; n rounding errors                |
| `int8`            | 2(n-1)/n                                  | nothing for good: rounding errors are sent later   |
| `int8-stochastic` | 2(n-1)/n                                  | noise that is zero on average; keeps no state      |
| `int4`            | (n-1)/2                                   | nothing for good: rounding errors are sent later   |
| `dgc`             | 8(n-1) · ratio                            | nothing for good: small values are sent later      |
| `hipress`         | that of `dgc` or of `none`                | the same; each bucket takes the faster of the two  |
| `powersgd`        | 8(n-1)/n · rank (1/rows + 1/columns)      | nothing for good: what has a higher rank, later    |

That is in a ring. With a parameter server, the first member, n - 1 members send what they sum to it, and it sends the
sum to each of them.

`int4` gathers what members send, and sums it in FP32: from 4 members on it sends more than `int8`, from 16 on more than
`none`.

These are descriptions. `training/exchange` has their sums for a group in one process, `peers/ring` sends them between
machines. The headers of messages are not counted.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import ClassVar, NamedTuple, Self

from socflower.cluster import Cluster
from socflower.errors import ConfigError, require_range
from socflower.hierarchy.exchange.collective_tasks import (
    Exchange,
)

RING, SERVER = "ring", "server"
KINDS = (RING, SERVER)

BLOCK = 4096
"""Elements of a block, which share a step in eight bits."""
SMALL_BLOCK = 256
"""The same in four bits, which have few levels for elements of other sizes."""

_VALUE_BYTES = 4
# A value and its index.
_PAIR_BYTES = 8
# An all-gather of payloads begins with a sum of this much for each member: the payload's length.
_LENGTH_BYTES = 8
# The ratio of deep gradient compression changes by this factor in its warm-up.
_WARM_UP_FACTOR = 4
_WARM_UP_EPOCHS = 4

# How often memory could move the bytes while they are encoded and decoded: the time of `training/exchange` in passes of
# the update of SGD with momentum (`UPDATE_PASSES`), on one core of an EPYC at four million values; buckets in a cache
# take down to half. Formats of fewer bits are conversions in a stream, which cost little beside an update: they are
# not priced.
# Of a bucket, to accumulate it and find its largest values.
_CHOICE_PASSES = 25.0
# Of a payload, to add its values.
_ADD_PASSES = 20.0
# Of a matrix and each rank: its four products with factors.
_PRODUCT_PASSES = 15.0

Compute = Callable[[str, int, float, Sequence[int]], int]
"""Adds work of a SoC to a graph: (name, SoC, bytes that memory moves, tasks before it) -> the task."""


class CollectiveOperation(NamedTuple):
    """A collective operation: an all-reduce of a buffer, or an all-gather of payloads."""

    # Of the buffer, or of one member's payload.
    num_bytes: float
    gathers: bool = False

    def num_sends(self, size: int) -> int:
        """Return how often each of `size` members sends to the next one."""
        return size - 1 if self.gathers else 2 * (size - 1)

    def send_bytes(self, size: int) -> float:
        """Return the bytes of one of these sends, the mean over members."""
        return self.num_bytes if self.gathers else self.num_bytes / size

    def returned_bytes(self, size: int) -> float:
        """Return the bytes that a server returns to each of the other members."""
        return self.num_bytes * size if self.gathers else self.num_bytes

    def wire_bytes(self, size: int, kind: str = RING) -> float:
        """Return the bytes that a member sends, the mean over members."""
        if kind == SERVER:
            return (size - 1) * (self.num_bytes + self.returned_bytes(size)) / size
        return self.num_sends(size) * self.send_bytes(size)


@dataclass(frozen=True, slots=True)
class Coding(ABC):
    """The form in which members send a bucket of gradients."""

    name: ClassVar[str]
    is_exact: ClassVar[bool] = False
    """Whether gradients are summed as they are."""
    applies_momentum: ClassVar[bool] = False
    """Whether it applies momentum, so that the optimiser's must be 0."""

    @property
    def spec(self) -> str:
        """The text from which `gradient_coding` makes it again: its name, and its options as key=value."""
        options = (f"{entry.name}={getattr(self, entry.name)!r}" for entry in fields(self))
        return " ".join((self.name, *options))

    def on(self, cluster: Cluster, socs: Sequence[int]) -> Self:
        """Return it with the figures of the SoCs that use it, for a coding that decides by them."""
        return self

    @abstractmethod
    def operations(
        self, bucket: Exchange, size: int, step: int | None = None
    ) -> tuple[CollectiveOperation, ...]:
        """Return the operations, in order, that sum a bucket of float32 gradients over `size` members.

        `step` counts from the start of training; None is a step after all warm-up.
        """

    def memory_bytes(self, bucket: Exchange, size: int, step: int | None = None) -> float:
        """Return the memory traffic that takes as long as encoding and decoding a bucket."""
        return 0.0

    @property
    def changes(self) -> tuple[int, ...]:
        """The steps, ascending, from which on a member sends another number of bytes."""
        return ()

    def require_size(self, size: int) -> None:
        """Raise `ConfigError` for a group that is too large for this coding."""
        return


class Exact(Coding):
    """Sums in the gradients' own type."""

    name = "none"
    is_exact = True

    def operations(
        self, bucket: Exchange, size: int, step: int | None = None
    ) -> tuple[CollectiveOperation, ...]:
        """Return one all-reduce."""
        return (CollectiveOperation(bucket.num_bytes),)


EXACT = Exact()


class Float16(Coding):
    """Sums in halves, in a unit that follows from the sum of the members' largest magnitudes."""

    name = "fp16"

    def operations(
        self, bucket: Exchange, size: int, step: int | None = None
    ) -> tuple[CollectiveOperation, ...]:
        """Return all-reduces of one magnitude, and of the halves."""
        return CollectiveOperation(_VALUE_BYTES), CollectiveOperation(bucket.num_bytes / 2)


class Int8(Coding):
    """Sums of integer multiples of a step for each block; rounding errors are added to the next gradient."""

    name = "int8"
    # Of a lane's ±127: one level is reserved for float32 rounding errors in steps and quotients.
    levels: ClassVar[int] = 126
    # The maximum rounding of a quotient away from zero.
    max_rounding: ClassVar[float] = 0.5
    most_members: ClassVar[int] = levels // 2
    """With more, each member would have fewer levels than a sign and a zero need."""

    def operations(
        self, bucket: Exchange, size: int, step: int | None = None
    ) -> tuple[CollectiveOperation, ...]:
        """Return all-reduces of the blocks' steps, and of a byte for each element, in whole words."""
        num_elements = num_elements_of(bucket.num_bytes)
        return (
            CollectiveOperation(_VALUE_BYTES * -(-num_elements // BLOCK)),
            CollectiveOperation(_VALUE_BYTES * -(-num_elements // 4)),
        )

    def require_size(self, size: int) -> None:
        """Raise `ConfigError` for more members than the levels of a byte can sum."""
        if size > self.most_members:
            raise ConfigError(
                f"compression = {self.name!r}: a group has at most {self.most_members} members, this one "
                f"{size}; use 'fp16', or more groups"
            )


class StochasticInt8(Int8):
    """`Int8` with unbiased rounding, and without a memory of errors, for groups whose members change."""

    name = "int8-stochastic"
    max_rounding = 1.0


class Int4(Coding):
    """Each member's own multiples of its own steps, gathered and summed in float32 (Douillard et al., 2025)."""

    name = "int4"
    # On each side of zero.
    levels: ClassVar[int] = 7

    def operations(
        self, bucket: Exchange, size: int, step: int | None = None
    ) -> tuple[CollectiveOperation, ...]:
        """Return an all-gather of the blocks' steps and of half a byte for each element."""
        num_elements = num_elements_of(bucket.num_bytes)
        payload = _VALUE_BYTES * -(-num_elements // SMALL_BLOCK) + -(-num_elements // 2)
        return CollectiveOperation(_LENGTH_BYTES * size), CollectiveOperation(payload, gathers=True)


@dataclass(frozen=True, kw_only=True, slots=True)
class LargestValues(Coding):
    """Each member sends its largest accumulated gradients, and accumulates the others further.

    Parameters
    ----------
    ratio : float
        Fraction of a bucket's values that is sent, above 0 and at most 1; at least one value is sent.
    warm_up_steps : int
        Number of steps from a ratio of 1/4 over 1/16, 1/64, … to `ratio`, in stages of equal length.
    clip_norm : float
        The largest norm of a gradient; each of n members limits its own to n^-1/2 of it. 0 is no limit.
    """

    name: ClassVar[str] = "dgc"
    applies_momentum: ClassVar[bool] = True

    ratio: float = 0.001
    warm_up_steps: int = 0
    clip_norm: float = 0.0

    def __post_init__(self) -> None:
        require_range(self.name, above=0, most=1, ratio=self.ratio)
        require_range(
            self.name, least=0, warm_up_steps=self.warm_up_steps, clip_norm=self.clip_norm
        )

    def operations(
        self, bucket: Exchange, size: int, step: int | None = None
    ) -> tuple[CollectiveOperation, ...]:
        """Return an all-gather of values and indices, or an all-reduce if that sends no more bytes."""
        num_elements = num_elements_of(bucket.num_bytes)
        num_sent = self.num_sent(num_elements, size, step)
        if num_sent == num_elements:
            return (CollectiveOperation(bucket.num_bytes),)
        return CollectiveOperation(_LENGTH_BYTES * size), CollectiveOperation(
            _PAIR_BYTES * num_sent, gathers=True
        )

    @property
    def changes(self) -> tuple[int, ...]:
        """The steps at which the ratio changes."""
        num_stages = self._num_stages
        if not self.warm_up_steps:
            return ()
        return tuple(
            -(-self.warm_up_steps * stage // num_stages) for stage in range(1, num_stages + 1)
        )

    def memory_bytes(self, bucket: Exchange, size: int, step: int | None = None) -> float:
        """Return the traffic as long as the choice of values takes, and the addition of all members'."""
        num_elements = num_elements_of(bucket.num_bytes)
        num_sent = self.num_sent(num_elements, size, step)
        if num_sent == num_elements:
            return 0.0
        return _CHOICE_PASSES * bucket.num_bytes + _ADD_PASSES * _PAIR_BYTES * num_sent * size

    def num_sent(self, num_elements: int, size: int, step: int | None) -> int:
        """Return the number of a bucket's values that each of `size` members sends: all if a sum sends no more."""
        num_sent = max(1, math.ceil(self.ratio_at(step) * num_elements))
        return num_sent if self._pays(num_sent, num_elements, size) else num_elements

    def _pays(self, num_sent: int, num_elements: int, size: int) -> bool:
        gathered = CollectiveOperation(_PAIR_BYTES * num_sent, gathers=True).wire_bytes(size)
        return gathered < math.ceil(
            CollectiveOperation(_VALUE_BYTES * num_elements).wire_bytes(size)
        )

    def ratio_at(self, step: int | None) -> float:
        """Return the ratio of a step."""
        if step is None or step >= self.warm_up_steps:
            return self.ratio
        stage = step * self._num_stages // self.warm_up_steps
        return max(self.ratio, float(_WARM_UP_FACTOR) ** -(stage + 1))

    @property
    def _num_stages(self) -> int:
        # The last power above the ratio ends the warm-up: 1/4, 1/16, 1/64, 1/256, then 0.001.
        return max(1, math.ceil(round(math.log(1 / self.ratio, _WARM_UP_FACTOR), 9)) - 1)


@dataclass(frozen=True, kw_only=True, slots=True)
class SelectedBuckets(LargestValues):
    """`LargestValues` for the buckets in which it is predicted to be faster than an exact sum (HiPress's SeCoPa).

    For a bucket of m bytes, a sent fraction r and n members (Bai et al., SOSP 2021, section 4.3):

        T_exact = 2(n-1) · T_send(m/n),   T_coded = (n-1) · T_send(r·m) + T_enc(m) + n · T_dec(r·m)

    with the lengths of payloads added to T_coded. In HiPress the alternative is a ring or servers of its own; here
    an exact sum is in the same ring. Figures that are 0 are those of the cluster.

    Parameters
    ----------
    bytes_per_s : float
        Of the slowest link between members.
    message_s : float
        Handling of a message.
    memory_bytes_per_s : float
        Of the slowest member's memory, by which encoding and decoding are predicted.
    """

    name: ClassVar[str] = "hipress"

    bytes_per_s: float = 0.0
    message_s: float = 0.0
    memory_bytes_per_s: float = 0.0

    def __post_init__(self) -> None:
        LargestValues.__post_init__(self)
        figures = {entry.name: getattr(self, entry.name) for entry in fields(self)[-3:]}
        require_range(self.name, least=0, **figures)

    def on(self, cluster: Cluster, socs: Sequence[int]) -> Self:
        """Return it with the cluster's figures in place of those that are 0."""
        boards = {cluster.board_of(soc) for soc in socs}
        links = [cluster.boards[board].soc_bytes_per_s for board in boards]
        if len(boards) > 1:
            links += [cluster.boards[board].uplink_bytes_per_s for board in boards]
        servers = {cluster.server_of(board) for board in boards}
        if len(servers) > 1:
            links += [cluster.servers[server].uplink_bytes_per_s for server in servers]
        memory = min(cluster.device_of(soc).memory_bytes_per_s for soc in socs)
        return replace(
            self,
            bytes_per_s=self.bytes_per_s or float(min(links)),
            message_s=self.message_s or float(cluster.message_s),
            memory_bytes_per_s=self.memory_bytes_per_s or float(memory),
        )

    def _pays(self, num_sent: int, num_elements: int, size: int) -> bool:
        if not self.bytes_per_s:
            raise ConfigError(
                f"{self.name}: it compares times, and bytes_per_s = 0; give that of the slowest link"
            )
        num_bytes = _VALUE_BYTES * num_elements
        payload = CollectiveOperation(_PAIR_BYTES * num_sent, gathers=True)
        encoded = _CHOICE_PASSES * num_bytes + _ADD_PASSES * payload.num_bytes * size
        coded_s = self._seconds(CollectiveOperation(_LENGTH_BYTES * size), size) + self._seconds(
            payload, size
        )
        coded_s += encoded / self.memory_bytes_per_s if self.memory_bytes_per_s else 0.0
        return coded_s < self._seconds(CollectiveOperation(num_bytes), size)

    def _seconds(self, operation: CollectiveOperation, size: int) -> float:
        send_s = self.message_s + operation.send_bytes(size) / self.bytes_per_s
        return operation.num_sends(size) * send_s


class Matrix(NamedTuple):
    """A tensor as a matrix: its first dimension by all others; and the rank in which it is sent, 0 for all of it."""

    num_rows: int
    num_columns: int
    rank: int


@dataclass(frozen=True, kw_only=True, slots=True)
class PowerSGD(Coding):
    """Each matrix of a bucket is sent as the product of two of low rank; what is left is added to the next gradient.

    Vogels et al. (NeurIPS 2019), with the rule of `torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook` for what
    is sent exactly.

    Parameters
    ----------
    rank : int
        Of the product.
    start_step : int
        The first step in which matrices are compressed; earlier ones are summed exactly.
    min_rate : float
        A matrix is compressed if that makes it smaller by more than this factor.
    """

    name: ClassVar[str] = "powersgd"

    rank: int = 1
    start_step: int = 0
    min_rate: float = 2.0

    def __post_init__(self) -> None:
        require_range(self.name, least=1, rank=self.rank, min_rate=self.min_rate)
        require_range(self.name, least=0, start_step=self.start_step)

    def operations(
        self, bucket: Exchange, size: int, step: int | None = None
    ) -> tuple[CollectiveOperation, ...]:
        """Return all-reduces of the tensors that are sent exactly, of the left and of the right factors."""
        if not self.compresses(step):
            return (CollectiveOperation(bucket.num_bytes),)
        matrices = self._matrices_of(bucket)
        counts = (
            sum(each.num_rows * each.num_columns for each in matrices if not each.rank),
            sum(each.num_rows * each.rank for each in matrices),
            sum(each.num_columns * each.rank for each in matrices),
        )
        return tuple(CollectiveOperation(_VALUE_BYTES * count) for count in counts if count)

    def memory_bytes(self, bucket: Exchange, size: int, step: int | None = None) -> float:
        """Return the traffic of the products of each matrix with its factors, each a pass for each rank."""
        if not self.compresses(step):
            return 0.0
        return sum(
            _PRODUCT_PASSES * _VALUE_BYTES * each.num_rows * each.num_columns * each.rank
            for each in self._matrices_of(bucket)
        )

    @property
    def changes(self) -> tuple[int, ...]:
        """The first step with compression."""
        return (self.start_step,)

    def compresses(self, step: int | None) -> bool:
        """Return whether matrices are compressed in a step."""
        return step is None or step >= self.start_step

    def matrices(self, shapes: Sequence[Sequence[int]]) -> tuple[Matrix, ...]:
        """Return how tensors of these shapes are sent."""
        found = []
        for shape in shapes:
            num_rows = shape[0] if shape else 1
            num_columns = math.prod(shape) // max(1, num_rows)
            rank = min(num_rows, num_columns, self.rank)
            sent = (num_rows + num_columns) * rank * self.min_rate
            pays = sent < num_rows * num_columns
            found.append(Matrix(num_rows, num_columns, rank if pays else 0))
        return tuple(found)

    def _matrices_of(self, bucket: Exchange) -> tuple[Matrix, ...]:
        shapes = [gradient.shape for gradient in bucket.gradients]
        if _VALUE_BYTES * sum(map(math.prod, shapes)) != bucket.num_bytes:
            raise ConfigError(
                f"compression = {self.name!r} depends on the shapes of a model's tensors, and its profile has "
                "none of float32; make one with profile_module, or use another compression"
            )
        return self.matrices(shapes)


_CODINGS: dict[str, type[Coding]] = {
    kind.name: kind
    for kind in (
        Exact,
        Float16,
        Int8,
        StochasticInt8,
        Int4,
        LargestValues,
        SelectedBuckets,
        PowerSGD,
    )
}
CODINGS = tuple(_CODINGS)


def gradient_coding(spec: str, *, steps_per_epoch: int = 0) -> Coding:
    """Return a coding by its name, with options such as "powersgd rank=4"; `ConfigError` for what does not exist.

    "dgc" and "hipress" warm up for four epochs, as deep gradient compression in its paper, unless it is an option.
    """
    name, *options = spec.split() or ("",)
    if name not in _CODINGS:
        raise ConfigError(f"compression = {spec!r} does not exist; use one of {', '.join(CODINGS)}")
    kind = _CODINGS[name]
    types = {entry.name: entry.type for entry in fields(kind)}
    given = [option.partition("=")[0] for option in options]
    if len(set(given)) < len(given):
        raise ConfigError(f"compression = {spec!r}: an option is given twice; keep one")
    values: dict[str, float] = {}
    if issubclass(kind, LargestValues):
        values["warm_up_steps"] = _WARM_UP_EPOCHS * steps_per_epoch
    for option in options:
        key, _, text = option.partition("=")
        try:
            values[key] = (int if types[key] is int else float)(text)
        except (KeyError, ValueError):
            known = ", ".join(f"{key}={'N' if own is int else 'X'}" for key, own in types.items())
            raise ConfigError(
                f"compression = {spec!r}: {option!r} is no option of {name!r}; use {known or 'none'}"
            ) from None
    return kind(**values)


def num_elements_of(num_bytes: float) -> int:
    """Return the number of float32 values in so many bytes."""
    return math.ceil(num_bytes / _VALUE_BYTES)
