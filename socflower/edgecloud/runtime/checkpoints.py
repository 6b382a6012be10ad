"""Checkpoints from which a training continues after one of its processes was lost, and which one all sides have.

`epoch_id` is the random name of a stretch of training that all sides of a session began together. A checkpoint is
identified by the epoch in which it was saved and by its batch, so two sides that have the same checkpoint have halves
that were trained together. A side can also be ready at a batch without a saved checkpoint: at the beginning of a span
its half is in that state.
"""

import logging
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from socflower.edgecloud.plan.cuts import SplitPlan
from socflower.errors import ConfigError
from socflower.wire.saved_state import DamagedFile, StateKind, StateStore

_KIND = StateKind(
    name="checkpoint of a split half",
    schema=2,
    remedy="remove it, and the training continues from a checkpoint that all sides have",
)
_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class SplitCheckpoint:
    """The batch before which a side can start; without an `epoch_id`, its half is in that state now."""

    batch: int
    epoch_id: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class SavedHalf:
    """The saved state of one side at a checkpoint."""

    # As `Half.save` gave it.
    half: bytes
    # The codec's state per sample, if it has any.
    codec: bytes = b""
    # Of a front half.
    split_plan: SplitPlan | None = None


class CheckpointStore:
    """The last two checkpoints of a side, in a folder; without a folder nothing is stored.

    `name` identifies the side: files of another name are an error, since their weights do not fit.
    Raises `ConfigError` for a folder that cannot be read or written.
    """

    def __init__(self, folder: Path | None, name: str) -> None:
        self._store: StateStore | None = None
        if folder is None:
            return
        try:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        except OSError as error:
            raise ConfigError(
                f"checkpoints: folder {folder} cannot be used ({error.strerror})"
            ) from None
        files = {"prefix": "checkpoint-", "suffix": ".saved"}
        self._store = StateStore(folder, _KIND, **files, keep=2, owner=name)

    @property
    def keeps(self) -> bool:
        """Whether checkpoints are stored, so that it is worth saving a half."""
        return self._store is not None

    def checkpoints(self) -> tuple[SplitCheckpoint, ...]:
        """Return the checkpoints that can be loaded, oldest first; damaged ones are logged and left out."""
        return tuple(checkpoint for checkpoint, _, _ in reversed(list(self._entries())))

    def save(self, checkpoint: SplitCheckpoint, saved: SavedHalf) -> None:
        """Store a checkpoint atomically, and remove all but the last two."""
        if self._store is None:
            return
        state = {
            "checkpoint": asdict(checkpoint),
            "half_bytes": len(saved.half),
            "split_plan": None if saved.split_plan is None else asdict(saved.split_plan),
        }
        number = max(self._store.numbers(), default=-1) + 1
        self._store.write(number, state, (saved.half, saved.codec))

    def load(self, checkpoint: SplitCheckpoint) -> SavedHalf:
        """Return the state saved at a checkpoint; `ConfigError` if it is damaged, of another name or missing."""
        for found, state, payload in self._entries():
            if found == checkpoint:
                at = state["half_bytes"]
                split_plan = state["split_plan"]
                return SavedHalf(
                    half=bytes(payload[:at]),
                    codec=bytes(payload[at:]),
                    split_plan=None if split_plan is None else SplitPlan(**split_plan),
                )
        folder = self._store.folder if self._store else "memory"
        raise ConfigError(f"checkpoints: none of batch {checkpoint.batch} is whole in {folder}")

    def _entries(self) -> Iterator[tuple[SplitCheckpoint, dict[str, Any], memoryview]]:
        """Yield checkpoint, state and payload of each intact entry, newest first."""
        if self._store is None:
            return
        for number in self._store.numbers():
            try:
                state, payload = self._store.read(number)
            except DamagedFile as error:
                _log.warning("checkpoints: %s; it is left out", error.cause)
                continue
            yield SplitCheckpoint(**state["checkpoint"]), state, payload


def common_checkpoint(
    offers: Sequence[Sequence[SplitCheckpoint]], last_batch: int
) -> SplitCheckpoint | None:
    """Return the latest checkpoint up to `last_batch` from which every side can start, or None.

    A side whose half is in that state now matches any epoch. `epoch_id` is empty if all sides are in that state;
    otherwise the other sides load the checkpoint of that epoch.
    """

    def can_start(place: SplitCheckpoint, offer: Sequence[SplitCheckpoint]) -> bool:
        return place in offer or SplitCheckpoint(batch=place.batch) in offer

    places = {place for offer in offers for place in offer if place.batch <= last_batch}
    common = [place for place in places if all(can_start(place, offer) for offer in offers)]
    # Of one batch the empty epoch comes first, since nothing has to be loaded; then the order of names decides.
    common.sort(key=lambda place: (-place.batch, place.epoch_id))
    return common[0] if common else None
