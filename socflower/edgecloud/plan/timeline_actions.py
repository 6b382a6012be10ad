"""The actions of a split training in order, on which its weights depend alone, and their encoding in a message."""

import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum

from socflower.errors import ConfigError
from socflower.wire.codecs.quantisation import BITS

_FORMAT = 1
_PARTY_BITS, _BATCH_BITS, _CUT_BITS, _WIDTH_BITS, _WINDOW_BITS = 10, 28, 9, 3, 10  # with 2 of the kind: 62


class Kind(IntEnum):
    """The steps of a batch, in this order, and the move of a cut between batches."""

    FORWARD = 0  # the front half computes features
    STEP = 1  # the back half processes them, updates its weights and returns their gradient
    APPLY = 2  # the front half updates its weights by that gradient
    RECUT = 3  # layers move between the halves; nothing is in flight, and `batch` is the next to go forward


@dataclass(frozen=True, slots=True)
class Action:
    """One action of one party; actions take effect in the order of the list.

    `cut`, `bits` and `window` are those of the batch's forward pass; for a RECUT, those that hold from now on. Window 0
    means that nothing is applied between a batch's forward pass and its gradient, so its graph can be kept. In joined
    training the STEPs of all parties for a batch are consecutive, in party order, and are a single step. Where the cut
    is None, the three actions are one training step at the edge.
    """

    kind: Kind
    party: int
    batch: int
    cut: int | None
    bits: int = 32
    window: int = 0


def encode_actions(actions: Iterable[Action]) -> list[int]:
    """Return a format number, a checksum, and each action as an integer below 2^62.

    Raises `ConfigError` where a party, batch, cut or window is too large for its bit field.
    """
    words = [_word(action) for action in actions]
    return [_FORMAT, _checksum(words), *words]


def decode_actions(words: Sequence[int]) -> tuple[Action, ...]:
    """Return the actions that `encode_actions` wrote; `ConfigError` for anything else."""
    if any(type(word) is not int or not 0 <= word < 1 << 62 for word in words):
        raise ConfigError("actions: not all are integers from 0 to 2^62 - 1; they did not come from encode_actions")
    if len(words) < 2 or words[0] != _FORMAT:
        raise ConfigError(f"actions: begin with {list(words[:1])}, not with format {_FORMAT}; use the same version of "
                          "socflower on both sides")
    if _checksum(words[2:]) != words[1]:
        raise ConfigError("actions: the checksum does not fit; some are lost or changed")
    return tuple(_action(word) for word in words[2:])


def _word(action: Action) -> int:
    word = int(action.kind)
    fields = ((action.party, _PARTY_BITS, "party"), (action.batch, _BATCH_BITS, "batch"),
              (0 if action.cut is None else action.cut + 1, _CUT_BITS, "cut"),
              (BITS.index(action.bits), _WIDTH_BITS, "bits"), (action.window, _WINDOW_BITS, "window"))
    for value, num_bits, name in fields:
        if not 0 <= value < 1 << num_bits:
            raise ConfigError(f"actions: {name} of {action} does not fit into {num_bits} bits")
        word = word << num_bits | value
    return word


def _action(word: int) -> Action:
    values = []
    for num_bits in (_WINDOW_BITS, _WIDTH_BITS, _CUT_BITS, _BATCH_BITS, _PARTY_BITS):
        values.append(word & (1 << num_bits) - 1)
        word >>= num_bits
    window, width, cut, batch, party = values
    if width >= len(BITS):
        raise ConfigError(f"actions: width number {width} is unknown; they did not come from encode_actions")
    return Action(Kind(word), party, batch, cut - 1 if cut else None, BITS[width], window)


def _checksum(words: Sequence[int]) -> int:
    return zlib.crc32(b"".join(word.to_bytes(8, "little") for word in words))
