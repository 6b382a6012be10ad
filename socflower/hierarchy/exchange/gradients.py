"""How the members of a group exchange gradients: with whom, in which coding, and what they send (F4, F8a).

| coding            | a member sends, per element, of n members | what is lost                                       |
| ----------------- | ----------------------------------------- | -------------------------------------------------- |
| `none`            | 8(n-1)/n bytes                            | nothing                                            |
| `fp16`            | 4(n-1)/n                                  | 11 bits are kept; n rounding errors                |
| `int8`            | 2(n-1)/n                                  | nothing for good: rounding errors are sent later   |
| `int8-stochastic` | 2(n-1)/n                                  | noise that is zero on average; keeps no state      |
| `int4`            | (n-1)/2                                   | nothing for good: rounding errors are sent later   |
| `dgc`             | 8(n-1) · ratio                            | nothing for good: small values are sent later      |

`int4` gathers what members send, and sums it in FP32: from 4 members on it sends more than `int8`, from 16 on more than
`none`.

These are descriptions. `training/exchange` has their sums for a group in one process, `peers/ring` sends them between
machines. The headers of messages are not counted, and encoding takes no virtual time.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import ClassVar, NamedTuple

from socflower.cluster import GraphBuilder
from socflower.errors import ConfigError, require_range
from socflower.hierarchy.exchange.collectives import (
    Dependencies,
    Exchange,
    ring_rounds,
    server_exchange,
)

RING, SERVER = "ring", "server"
KINDS = (RING, SERVER)
CODINGS = ("none", "fp16", "int8", "int8-stochastic", "int4", "dgc")

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


class Operation(NamedTuple):
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

    def wire_bytes(self, size: int) -> float:
        """Return the bytes that a member sends, the mean over members."""
        return self.num_sends(size) * self.send_bytes(size)


@dataclass(frozen=True, slots=True)
class Coding(ABC):
    """The form in which members send a bucket of gradients."""

    name: ClassVar[str]
    is_exact: ClassVar[bool] = False
    """Whether gradients are summed as they are."""
    applies_momentum: ClassVar[bool] = False
    """Whether it applies momentum, so that the optimiser's must be 0."""

    @abstractmethod
    def operations(
        self, num_bytes: float, size: int, step: int | None = None
    ) -> tuple[Operation, ...]:
        """Return the operations, in order, that sum a bucket of float32 gradients of `num_bytes` over `size` members.

        `step` counts from the start of training; None is a step after all warm-up.
        """

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
        self, num_bytes: float, size: int, step: int | None = None
    ) -> tuple[Operation, ...]:
        """Return one all-reduce."""
        return (Operation(num_bytes),)


EXACT = Exact()


class Float16(Coding):
    """Sums in halves, in a unit that follows from the sum of the members' largest magnitudes."""

    name = "fp16"

    def operations(
        self, num_bytes: float, size: int, step: int | None = None
    ) -> tuple[Operation, ...]:
        """Return all-reduces of one magnitude, and of the halves."""
        return Operation(_VALUE_BYTES), Operation(num_bytes / 2)


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
        self, num_bytes: float, size: int, step: int | None = None
    ) -> tuple[Operation, ...]:
        """Return all-reduces of the blocks' steps, and of a byte for each element, in whole words."""
        num_elements = num_elements_of(num_bytes)
        return (
            Operation(_VALUE_BYTES * -(-num_elements // BLOCK)),
            Operation(_VALUE_BYTES * -(-num_elements // 4)),
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
        self, num_bytes: float, size: int, step: int | None = None
    ) -> tuple[Operation, ...]:
        """Return an all-gather of the blocks' steps and of half a byte for each element."""
        num_elements = num_elements_of(num_bytes)
        payload = _VALUE_BYTES * -(-num_elements // SMALL_BLOCK) + -(-num_elements // 2)
        return Operation(_LENGTH_BYTES * size), Operation(payload, gathers=True)


@dataclass(frozen=True, kw_only=True, slots=True)
class LargestValues(Coding):
    """Each member sends its largest accumulated gradients, and accumulates the others further.

    Parameters
    ----------
    ratio : float
        Fraction of a bucket's values that is sent, above 0 and at most 1; at least one value is sent.
    warm_up_steps : int
        Number of steps from a ratio of 1/4 over 1/16, 1/64, … to `ratio`, in stages of equal length.
    """

    name: ClassVar[str] = "dgc"
    applies_momentum: ClassVar[bool] = True

    ratio: float = 0.001
    warm_up_steps: int = 0

    def __post_init__(self) -> None:
        require_range("dgc", above=0, most=1, ratio=self.ratio)
        require_range("dgc", least=0, warm_up_steps=self.warm_up_steps)

    def operations(
        self, num_bytes: float, size: int, step: int | None = None
    ) -> tuple[Operation, ...]:
        """Return an all-gather of values and indices, or an all-reduce if that sends no more bytes."""
        num_elements = num_elements_of(num_bytes)
        num_sent = self.num_sent(num_elements, size, step)
        if num_sent == num_elements:
            return (Operation(num_bytes),)
        return Operation(_LENGTH_BYTES * size), Operation(_PAIR_BYTES * num_sent, gathers=True)

    @property
    def changes(self) -> tuple[int, ...]:
        """The steps at which the ratio changes."""
        num_stages = self._num_stages
        if not self.warm_up_steps:
            return ()
        return tuple(
            -(-self.warm_up_steps * stage // num_stages) for stage in range(1, num_stages + 1)
        )

    def num_sent(self, num_elements: int, size: int, step: int | None) -> int:
        """Return the number of a bucket's values that each of `size` members sends: all if a sum sends no more."""
        num_sent = max(1, math.ceil(self.ratio_at(step) * num_elements))
        gathered = Operation(_PAIR_BYTES * num_sent, gathers=True).wire_bytes(size)
        summed = math.ceil(Operation(_VALUE_BYTES * num_elements).wire_bytes(size))
        return num_elements if gathered >= summed else num_sent

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


def gradient_coding(name: str, *, steps_per_epoch: int = 0) -> Coding:
    """Return a coding by name; `ConfigError` for an unknown one. "dgc" warms up for four epochs, as in its paper."""
    match name:
        case "none":
            return EXACT
        case "fp16":
            return Float16()
        case "int8":
            return Int8()
        case "int8-stochastic":
            return StochasticInt8()
        case "int4":
            return Int4()
        case "dgc":
            return LargestValues(warm_up_steps=_WARM_UP_EPOCHS * steps_per_epoch)
    raise ConfigError(f"compression = {name!r} does not exist; use one of {', '.join(CODINGS)}")


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
        if self.kind == SERVER and not self.coding.is_exact:
            raise ConfigError(
                f"exchange: a parameter server sums float32, and the coding is {self.coding.name!r}; use a ring"
            )

    def wire_bytes(self, num_bytes: float, size: int, step: int | None = None) -> float:
        """Return the bytes that a member sends for a bucket of float32 gradients of `num_bytes`, the mean over members.

        A server is one of the members, the first.
        """
        if self.kind == SERVER:
            return 2 * (size - 1) * num_bytes / size
        return sum(each.wire_bytes(size) for each in self.coding.operations(num_bytes, size, step))

    def lower(
        self,
        builder: GraphBuilder,
        members: Sequence[int],
        bucket: Exchange,
        after: Dependencies,
        name: str,
        step: int | None = None,
    ) -> ExchangeTasks:
        """Add the exchange of a bucket in a step to a graph; a member takes part after its tasks in `after`."""
        size = len(members)
        if size == 1:
            return ExchangeTasks((), (), {members[0]: tuple(after[members[0]])})
        if self.kind == SERVER:
            return ExchangeTasks(*server_exchange(builder, members, bucket, after, name))
        # Codings work on the whole bucket.
        fused = bucket.fused or not self.coding.is_exact
        first: tuple[int, ...] = ()
        for operation in self.coding.operations(bucket.num_bytes, size, step):
            ring = ring_rounds(
                builder,
                members,
                replace(bucket, num_bytes=operation.send_bytes(size), fused=fused),
                operation.num_sends(size),
                after,
                name,
            )
            first, after = first or ring.transfers, ring.done
        return ExchangeTasks(first, ring.transfers, ring.done)

    def stages(self, first_step: int, num_steps: int) -> Iterator[tuple[int, int]]:
        """Yield how many steps send equally many bytes, and the first of these, for steps from `first_step` on."""
        end = first_step + num_steps
        inside = [step for step in self.coding.changes if first_step < step < end]
        for start, stop in pairwise([first_step, *inside, end]):
            yield stop - start, start


EXACT_RING = GradientExchange()


def num_elements_of(num_bytes: float) -> int:
    """Return the number of float32 values in so many bytes."""
    return math.ceil(num_bytes / _VALUE_BYTES)
