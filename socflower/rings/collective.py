"""What a ring offers its members, whatever carries the bytes: in process, over gloo, or over gRPC with TLS."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Protocol, TypeAlias

from torch import Tensor

POLL_INTERVAL_S = 0.05
"""How often, at least, a wait looks at what its caller wants looked at."""

Poll: TypeAlias = Callable[[], None]
"""Called while waiting; what it raises ends the wait."""


def never(_: object = None) -> None:
    """Poll for nothing."""


class PeerLost(Exception):
    """A member of the ring is gone, or the ring has been left; what was under way is not to be used.

    The ring of this generation is only good for `close` afterwards: a reduction that failed leaves its buffer in a
    state that differs between members.
    """


class Work(Protocol):
    """An all-reduce under way."""

    def wait(self, poll: Poll = never) -> None:
        """Return when the buffer has the sum; raise `PeerLost` if it never will have, or what `poll` raises."""
        ...


class Collective(ABC):
    """One generation of a ring: a fixed set of members that call the same operations in the same order.

    Every member has the same bits after an `all_reduce`: each part of the buffer is summed once, and copied.
    """

    rank: int  # 0 to size - 1, in ring order
    size: int
    transport: str  # "in-process", "gloo" or "grpc", as it stands in results

    @abstractmethod
    def all_reduce(self, buffer: Tensor) -> Work:
        """Begin to sum a buffer over all members, in place; it must not be touched until the work is done.

        The buffer is contiguous, one-dimensional and on the CPU, float32, float64, float16 or int32. Several may be
        under way; they end in the order in which they began.
        """

    @abstractmethod
    def all_gather(self, payload: bytes, poll: Poll = never) -> list[bytes]:
        """Return every member's payload, by rank; lengths may differ."""

    @abstractmethod
    def broadcast(self, payload: bytes | None, source: int, poll: Poll = never) -> bytes:
        """Return the payload of rank `source`; the others pass None."""

    @abstractmethod
    def close(self) -> None:
        """Leave the ring at once, whatever is under way, without waiting for anybody; may be called twice."""
