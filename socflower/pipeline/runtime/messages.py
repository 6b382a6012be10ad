"""Messages between the devices of a plan, and the requests with which a member's script waits for them."""

from collections.abc import Callable, Generator
from typing import Any, NamedTuple, TypeAlias, TypeVar

from torch import Tensor

_Result = TypeVar("_Result")

ACTIVATIONS = "activations"
GRADIENTS = "gradients"
# The same of batches whose lengths differ.
FREE_ACTIVATIONS = "free activations"
FREE_GRADIENTS = "free gradients"
SAMPLES = "samples"
LABELS = "labels"
RING = "ring"
# Stages for the leader at the end of training.
END = "end"
# Stages that are moved or backed up.
STATE = "state"
# Agreements among members.
CONTROL = "control"
LANES = (
    ACTIVATIONS,
    GRADIENTS,
    SAMPLES,
    LABELS,
    RING,
    END,
    STATE,
    CONTROL,
    FREE_ACTIVATIONS,
    FREE_GRADIENTS,
)
"""Kinds of messages between two devices; messages of one lane arrive in the order of sending."""

_OF_ANY_SIZE = frozenset((SAMPLES, LABELS, END, STATE, CONTROL, FREE_ACTIVATIONS, FREE_GRADIENTS))


def is_of_any_size(lane: str) -> bool:
    """Whether only the sender knows the sizes of a lane's messages."""
    return lane in _OF_ANY_SIZE


class Receive(NamedTuple):
    """A script waits for the next message of a lane; the answer is its bytes."""

    source: int
    lane: str
    # None: only the sender knows the size.
    num_bytes: int | None = None


class Reduce(NamedTuple):
    """A script waits for the sum of a buffer over some devices, in place, in the order of a ring of them."""

    devices: tuple[int, ...]
    # One-dimensional and on the CPU.
    buffer: Tensor


class Expect(NamedTuple):
    """A script announces messages of known sizes that it will wait for, so that links can fetch them ahead."""

    # In the order of arrival on each lane.
    messages: tuple[Receive, ...]


Script: TypeAlias = Generator[Receive | Reduce | Expect, Any, _Result]
Send: TypeAlias = Callable[[int, str, bytearray], None]
"""Takes the receiving SoC, the lane and the bytes; returns at once."""
