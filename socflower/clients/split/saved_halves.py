"""Saves the halves of a split training between rounds, with their optimisers: in the Flower context, and in files."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

from flwr.app import ConfigRecord, Context

from socflower.clients.saved_training import Position, StateFiles
from socflower.wire.saved_state import DamagedFile, StateKind
from socflower.wire.split_message_keys import SplitTask

_RECORD = "socflower-split-state"
_HALVES = StateKind(name="saved half of a split", schema=2, remedy="start a new training (--fresh)")


def state_owner(trial: str) -> str:
    """Return the owner of the files of an edge's halves, by the trial that they belong to, if any."""
    return _of_trial("edge", trial)


def _of_trial(name: str, trial: str) -> str:
    return f"{name}-{trial}" if trial else name


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
        self._remove_other_trials()
        begin = self._position(self.task.first_batch)
        kept = self.context.state.config_records.get(self._record)
        if kept and kept["position"] == list(begin):
            return (
                cast(list[bytes], kept["halves"])
                if kept["cuts"] == self._cuts(self.task.cuts)
                else None
            )
        if self.files is None:
            return None
        try:
            state, payload = self.files.of(begin, _HALVES).read(begin.next_step)
        except DamagedFile:
            return None
        ends = list(itertools.accumulate(state["half_bytes"]))
        halves = [bytes(payload[start:end]) for start, end in zip([0, *ends], ends, strict=False)]
        return halves if state["cuts"] == self._cuts(self.task.cuts) else None

    def save(self, halves: Sequence[bytes], cuts: Sequence[int]) -> None:
        """Save the halves of the task's end, with each party's cut."""
        position, place = (
            self._position(self.task.first_batch + self.task.num_batches),
            self._cuts(cuts),
        )
        self.context.state[self._record] = ConfigRecord(
            {"halves": list(halves), "cuts": place, "position": list(position)}
        )
        if self.files is not None:
            self.files.of(position, _HALVES).write(
                position.next_step,
                {"cuts": place, "half_bytes": [len(half) for half in halves]},
                halves,
            )

    @property
    def _record(self) -> str:
        return _of_trial(_RECORD, self.task.trial)

    def _remove_other_trials(self) -> None:
        """Remove what other trials saved: the training goes on from one of them."""
        if not self.task.trial:
            return
        for key in [each for each in self.context.state if each.startswith(f"{_RECORD}-")]:
            if key != self._record:
                del self.context.state[key]
        if self.files is not None:
            party = self.task.parties[0]
            for path in self.files.folder.glob(f"{state_owner('*')}-{party}-of-*.state"):
                if not path.name.startswith(f"{self.files.owner}-"):
                    path.unlink(missing_ok=True)

    def _cuts(self, cuts: Sequence[int]) -> list[int]:
        """Return the cuts, and whether the other half is in a cloud."""
        return [*cuts, int(bool(self.task.address))]

    def _position(self, batch: int) -> Position:
        return Position(
            self.task.parties[0],
            self.task.num_parties,
            self.task.total_batches,
            batch,
            self.task.seed,
        )
