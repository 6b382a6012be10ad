"""The interface of a ring for its members: in process, over gloo, or over gRPC with TLS."""

import json
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Protocol, TypeAlias, TypeVar, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from socflower.training.exchange.compression import Script

_Result = TypeVar("_Result")

POLL_INTERVAL_S = 0.05
"""The maximum interval between calls of a `Poll` during a wait."""

Poll: TypeAlias = Callable[[], None]
"""Called repeatedly during a wait; an exception from it ends the wait."""


def no_poll(_: object = None) -> None:
    """Do nothing: a `Poll` for waits that are never interrupted."""


class PeerLost(Exception):
    """A member of the ring is lost, or the ring was closed; results of pending operations must not be used.

    Afterwards, only `close` may be called on this generation of the ring: the buffer of a failed reduction differs
    between members.
    """


class Work(Protocol):
    """A pending all-reduce."""

    def wait(self, poll: Poll = no_poll) -> None:
        """Return when the buffer has the sum; raise `PeerLost` if the operation failed, or what `poll` raises."""
        ...


class Collective(ABC):
    """One generation of a ring: a fixed set of members that call the same operations in the same order.

    Every member has the same bits after an `all_reduce`: each part of the buffer is summed once, and copied.
    """

    # From 0 to size - 1, in ring order.
    rank: int
    size: int
    # "in-process", "gloo" or "grpc", as in results.
    transport: str

    @abstractmethod
    def all_reduce(self, buffer: Tensor) -> Work:
        """Begin to sum a buffer over all members, in place; it must not be used until the work is done.

        The buffer is contiguous and one-dimensional, on the CPU, and float32, float64, float16 or int32. Several may be
        pending; they complete in the order in which they began.
        """

    @abstractmethod
    def all_gather(self, payload: bytes, poll: Poll = no_poll) -> list[bytes]:
        """Return every member's payload, by rank; lengths may differ."""

    @abstractmethod
    def broadcast(self, payload: bytes | None, source: int, poll: Poll = no_poll) -> bytes:
        """Return the payload of rank `source`; the others pass None."""

    @abstractmethod
    def close(self) -> None:
        """Leave the ring at once, without waiting for pending operations; may be called twice."""


def exchange_over(ring: Collective, script: Script[_Result], poll: Poll = no_poll) -> _Result:
    """Run this member's script of an exchange over a ring, and return its result; raises what ring and `poll` raise."""
    payloads: list[bytes] | None = None
    while True:
        try:
            yielded = script.send(payloads)
        except StopIteration as ended:
            return cast(_Result, ended.value)
        if isinstance(yielded, Tensor):
            ring.all_reduce(yielded).wait(poll)
            payloads = None
        else:
            payloads = ring.all_gather(yielded, poll)


def gather_json(ring: Collective, document: object, poll: Poll = no_poll) -> list[Any]:
    """Return every member's document, by rank; documents consist of what JSON has. Raises as `all_gather` does."""
    payloads = ring.all_gather(json.dumps(document).encode(), poll)
    return [json.loads(payload) for payload in payloads]


class RingPeers:
    """The members of a ring for a session that agrees with them during a step; see `JointSession`."""

    def __init__(
        self, ring: Collective, poll: Poll, waiting: Callable[[], AbstractContextManager[None]]
    ) -> None:
        self.rank, self.size = ring.rank, ring.size
        self.poll = poll
        self._ring, self._waiting = ring, waiting

    def sum(self, values: npt.NDArray[Any]) -> None:
        """Replace an array by its sum over all members; raises `PeerLost`, or what the poll raises."""
        # A failed reduction leaves its buffer undefined.
        summed = torch.from_numpy(values.copy())
        with self._waiting():
            self._ring.all_reduce(summed).wait(self.poll)
        np.copyto(values, summed.numpy())
