"""Checkpoints from which a training continues after one of its processes was lost, and which one all sides have.

`epoch_id` is the random name of a stretch of training that all sides of a session began together. A checkpoint is
identified by the epoch in which it was saved and by its batch, so two sides that have the same checkpoint have halves
that were trained together. A side can also be ready at a batch without a saved checkpoint: at the beginning of a span,
when its caller says so.
"""

import os
import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from socflower.edgecloud.plan.cuts import SplitPlan
from socflower.errors import ConfigError
from socflower.wire.saved_state import DamagedFile, read_sealed, remove_partial, write_sealed

_KEPT = 2
_FORM = 1
_NAME = re.compile(r"barrier-(\d{9})-(\d+)-([0-9a-f]+)\.saved")


@dataclass(frozen=True, kw_only=True, slots=True)
class Checkpoint:
    """The batch before which a side can start; without an `epoch_id`, its half is in that state now."""

    batch: int
    epoch_id: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class SavedHalf:
    """What a side saved at a checkpoint."""

    half: bytes  # as `Half.save` gave it
    codec: bytes = b""  # the codec's state per sample, if it has any
    split_plan: SplitPlan | None = None  # of a front half


class CheckpointStore:
    """The last two checkpoints of a side, in a folder; without a folder nothing is stored.

    `name` identifies the side: files of another name are an error, since their weights do not fit.
    Raises `ConfigError` for a folder that cannot be read or written.
    """

    def __init__(self, folder: Path | None, name: str) -> None:
        self._folder, self._name = folder, name
        if folder is None:
            return
        try:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            remove_partial(folder)
        except OSError as error:
            raise ConfigError(f"checkpoints: folder {folder} cannot be used ({error.strerror}); give one that this "
                              "process may write to") from None

    @property
    def keeps(self) -> bool:
        """Whether checkpoints are stored, so that it is worth saving a half."""
        return self._folder is not None

    def checkpoints(self) -> tuple[Checkpoint, ...]:
        """Return the checkpoints that can be loaded, oldest first; damaged files are skipped."""
        found = []
        for _, batch, epoch_id, _ in self._files():
            checkpoint = Checkpoint(batch=batch, epoch_id=epoch_id)
            with suppress(DamagedFile):
                self._read(checkpoint)
                found.append(checkpoint)
        return tuple(found)

    def save(self, checkpoint: Checkpoint, saved: SavedHalf) -> None:
        """Store a checkpoint atomically, and remove all but the last two."""
        if self._folder is None:
            return
        files = self._files()
        number = files[-1][0] + 1 if files else 0
        split_plan = saved.split_plan
        header: dict[str, Any] = {
            "form": _FORM, "name": self._name, "batch": checkpoint.batch, "lineage": checkpoint.epoch_id,
            "half_bytes": len(saved.half), "deployment": None if split_plan is None else
            {"cut": split_plan.cut, "bits": split_plan.bits, "window": split_plan.window}}
        path = self._folder / f"barrier-{number:09d}-{checkpoint.batch}-{checkpoint.epoch_id}.saved"
        try:
            write_sealed(path, header, (saved.half, saved.codec))
            for _, _, _, old in self._files()[:-_KEPT]:
                old.unlink(missing_ok=True)
        except OSError as error:
            raise ConfigError(f"checkpoints: {path} cannot be written ({error.strerror}); make room, or give another "
                              "folder") from None

    def load(self, checkpoint: Checkpoint) -> SavedHalf:
        """Return what was saved at a checkpoint; `ConfigError` if it is damaged, of another name or missing."""
        try:
            header, payload = self._read(checkpoint)
        except DamagedFile as error:
            raise ConfigError(f"checkpoints: {error}; remove it, and what is before it will be used") from None
        place = header["deployment"]
        return SavedHalf(half=bytes(payload[:header["half_bytes"]]), codec=bytes(payload[header["half_bytes"]:]),
                         split_plan=None if place is None else SplitPlan(**place))

    def _read(self, checkpoint: Checkpoint) -> tuple[dict[str, Any], memoryview]:
        path = next((path for _, batch, epoch_id, path in reversed(self._files())
                     if (batch, epoch_id) == (checkpoint.batch, checkpoint.epoch_id)), None)
        if path is None:
            raise ConfigError(f"checkpoints: none of batch {checkpoint.batch} in {self._folder}; check whether it is "
                              "the right folder")
        header, payload = read_sealed(path)
        if header.get("form") != _FORM or header.get("name") != self._name:
            raise ConfigError(f"checkpoints: {path} belongs to {header.get('name')}, not to {self._name}; give each "
                              "side of each run a folder of its own")
        return header, payload

    def _files(self) -> list[tuple[int, int, str, Path]]:
        """Return number, batch, epoch_id and path of each, in the order in which they were written."""
        if self._folder is None:
            return []
        try:
            matches = [(_NAME.fullmatch(name), name) for name in os.listdir(self._folder)]
        except OSError as error:
            raise ConfigError(f"checkpoints: folder {self._folder} cannot be read ({error.strerror})") from None
        return sorted((int(match[1]), int(match[2]), match[3], self._folder / name) for match, name in matches if match)


def common_checkpoint(offers: Sequence[Sequence[Checkpoint]], last_batch: int) -> Checkpoint | None:
    """Return the latest checkpoint up to `last_batch` from which every side can start, or None.

    A side whose half is in that state now matches any epoch. `epoch_id` is empty where this holds for all; otherwise
    the other sides load the checkpoint of that epoch.
    """
    best: Checkpoint | None = None
    for place in sorted({checkpoint for offer in offers for checkpoint in offer},
                        key=lambda one: (one.batch, one.epoch_id)):
        if place.batch > last_batch or (best is not None and (place.batch, place.epoch_id == "") <= (
                best.batch, best.epoch_id == "")):
            continue
        current = Checkpoint(batch=place.batch)
        if all(current in offer or (place.epoch_id and place in offer) for offer in offers):
            best = place
    return best
