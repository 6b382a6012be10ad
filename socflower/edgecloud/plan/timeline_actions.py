"""The actions of a split training in order, on which its weights depend alone, and their encoding in a message."""

import struct
import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from enum import IntEnum

from socflower.errors import ConfigError

_FORMAT = 2
# Format, and the CRC-32 of the actions.
_HEAD = struct.Struct("<BI")
# Kind, party, batch, cut + 1 (0: none), bits, window.
_ACTION = struct.Struct("<BHIHBH")


class ActionKind(IntEnum):
    """The steps of a batch, in this order, and the move of a cut between batches."""

    # The front half computes features.
    FORWARD = 0
    # The back half processes them, updates its weights and returns their gradient.
    STEP = 1
    # The front half updates its weights by that gradient.
    APPLY = 2
    # Layers move between the halves; nothing is in flight, and `batch` is the next to go forward.
    RECUT = 3


@dataclass(frozen=True, slots=True)
class Action:
    """One action of one party; actions take effect in the order of the list.

    `cut`, `bits` and `window` are those of the batch's forward pass; for a RECUT, those that hold from now on. Window 0
    means that nothing is applied between a batch's forward pass and its gradient, so its graph can be kept. In joined
    training the STEPs of all parties for a batch are consecutive, in party order, and are a single step. If the cut is
    None, the three actions are one training step at the edge.
    """

    kind: ActionKind
    party: int
    batch: int
    cut: int | None
    bits: int = 32
    window: int = 0


def encode_actions(actions: Iterable[Action]) -> bytes:
    """Return the actions as bytes, after a format number and a checksum.

    Raises `ConfigError` if a party, batch, cut or window is too large for its field.
    """
    packed = []
    for action in actions:
        cut = 0 if action.cut is None else action.cut + 1
        values = (action.kind, action.party, action.batch, cut, action.bits, action.window)
        try:
            packed.append(_ACTION.pack(*values))
        except struct.error as error:
            raise ConfigError(f"actions: {action} does not fit ({error})") from None
    body = b"".join(packed)
    return _HEAD.pack(_FORMAT, zlib.crc32(body)) + body


def decode_actions(encoded: bytes) -> tuple[Action, ...]:
    """Return the actions that `encode_actions` wrote; `ConfigError` for anything else."""
    head = encoded[: _HEAD.size]
    body = encoded[_HEAD.size :]
    if len(head) < _HEAD.size or head[0] != _FORMAT:
        raise ConfigError(
            f"actions: format {head[:1]!r}, not {_FORMAT}; use the same socflower on both sides"
        )
    if zlib.crc32(body) != _HEAD.unpack(head)[1] or len(body) % _ACTION.size:
        raise ConfigError("actions: the checksum does not fit; some are lost or changed")
    return tuple(
        Action(ActionKind(kind), party, batch, cut - 1 if cut else None, bits, window)
        for kind, party, batch, cut, bits, window in _ACTION.iter_unpack(body)
    )
