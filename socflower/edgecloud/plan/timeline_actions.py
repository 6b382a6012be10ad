"""The actions of a split training: their rule of order, and their encoding. The weights depend on their order alone."""

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


def next_action(
    *, allowed: bool, link_is_idle: bool, has_gradient: bool, just_applied: bool, is_drained: bool
) -> ActionKind | None:
    """Return what a front half does next; RECUT is whatever needs an empty pipeline; None: wait (F23).

    A forward pass is `allowed` if the window has room, batches remain, and nothing waits for the pipeline to drain. If
    it may do either, a front half alternates: after an update comes a forward pass. So batches stay spread over the
    pipeline, and constant rates give exactly F26's period, max(T_M, T_Σ/(K+1)). To apply every arrived gradient first
    would make gradients less stale, but leaves link and back half idle, and takes up to 1.7 times as long whenever
    updates are a large part of T_Σ. While another batch waits for the link, a forward pass has no benefit yet.
    """
    may_forward = allowed and link_is_idle
    if has_gradient and not (may_forward and just_applied):
        return ActionKind.APPLY
    if may_forward:
        return ActionKind.FORWARD
    return ActionKind.RECUT if is_drained and not allowed else None


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
