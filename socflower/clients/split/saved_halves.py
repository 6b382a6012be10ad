"""Saves the halves of a split training between rounds, with their optimisers: in the Flower context, and in files."""

import json
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

from flwr.app import ConfigRecord, Context

from socflower.clients.saved_training import Position, StateFiles
from socflower.wire.saved_state import DamagedFile
from socflower.wire.split_message_keys import SplitTask

_RECORD = "socflower-split-state"
_LENGTH = struct.Struct("<Q")


@dataclass(frozen=True)
class SplitState:
    """The saved halves of one client's part of a training, identified by the next batch and the cuts.

    Halves that were saved with both halves here do not fit an edge whose other half is in the cloud, nor vice versa.

    Only halves that are not averaged with those of other clients have a state: momentum does not fit averaged weights,
    so averaged halves start each round with a new optimiser, as clients of FedAvg do.
    """

    task: SplitTask
    context: Context
    files: StateFiles | None = None

    def read(self) -> list[bytes] | None:
        """Return what `save` saved for the task's first batch and its cuts, or None."""
        if self.task.first_batch == 0:
            if self.files is not None:
                self.files.delete(self.task.parties[0])
            return None
        begin = self._position(self.task.first_batch)
        kept = self.context.state.config_records.get(_RECORD)
        if kept and kept["position"] == list(begin):
            return self._if_same_cuts(cast(bytes, kept["halves"]))
        if self.files is None:
            return None
        try:
            found = self.files.read(begin)
        except DamagedFile:
            return None
        return None if found is None or found.state is None else self._if_same_cuts(found.state)

    def save(self, halves: Sequence[bytes], cuts: Sequence[int]) -> None:
        """Save the halves of the task's end, with each party's cut."""
        position = self._position(self.task.first_batch + self.task.num_batches)
        packed = _packed([self._cut_record(cuts), *halves])
        self.context.state[_RECORD] = ConfigRecord({"halves": packed, "position": list(position)})
        if self.files is not None:
            self.files.write(position, packed)

    def _if_same_cuts(self, packed: bytes) -> list[bytes] | None:
        place, *halves = _unpacked(packed)
        return halves if place == self._cut_record(self.task.cuts) else None

    def _cut_record(self, cuts: Sequence[int]) -> bytes:
        return json.dumps({"cuts": list(cuts), "cloud": bool(self.task.address)}).encode()

    def _position(self, batch: int) -> Position:
        return Position(self.task.parties[0], self.task.num_parties, self.task.total_batches, batch)


def _packed(halves: Sequence[bytes]) -> bytes:
    return b"".join(part for half in halves for part in (_LENGTH.pack(len(half)), half))


def _unpacked(packed: bytes) -> list[bytes]:
    halves, at = [], 0
    while at < len(packed):
        (length,) = _LENGTH.unpack_from(packed, at)
        at += _LENGTH.size
        halves.append(packed[at:at + length])
        at += length
    return halves
