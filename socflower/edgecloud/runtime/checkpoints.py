"""Places at which a training can go on after one of its processes was lost: saved halves, and which one all have.

A *lineage* is a stretch of training that all sides of a session began together; it has a random name. A barrier is
known by the lineage in which it was saved and by its batch, so two sides that have the same barrier have halves that
were trained together. A side may also stand somewhere without having saved it: at the beginning of a span, when its
caller says so.
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
class Barrier:
    """Before which batch a side can stand; without a lineage it does stand there now."""

    batch: int
    lineage: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Saved:
    """What a side saved at a barrier."""

    half: bytes  # as `Half.save` gave it
    codec: bytes = b""  # what the codec remembers of samples, if it does
    split_plan: SplitPlan | None = None  # of a front half


class BarrierStore:
    """A side's barriers in a folder, the last two; without a folder it keeps none.

    `name` tells whose they are: files of another name are an error, since their weights would fit nothing.
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
            raise ConfigError(f"barriers: folder {folder} cannot be used ({error.strerror}); give one that this "
                              "process may write to") from None

    @property
    def keeps(self) -> bool:
        """Whether it keeps anything, so that it is worth saving a half."""
        return self._folder is not None

    def barriers(self) -> tuple[Barrier, ...]:
        """Return what can be loaded, oldest first: a damaged file is passed over, for what is before it."""
        found = []
        for _, batch, lineage, _ in self._files():
            barrier = Barrier(batch=batch, lineage=lineage)
            with suppress(DamagedFile):
                self._read(barrier)
                found.append(barrier)
        return tuple(found)

    def save(self, barrier: Barrier, saved: Saved) -> None:
        """Keep it, whole or not at all, and forget all but the last two."""
        if self._folder is None:
            return
        files = self._files()
        number = files[-1][0] + 1 if files else 0
        split_plan = saved.split_plan
        header: dict[str, Any] = {
            "form": _FORM, "name": self._name, "batch": barrier.batch, "lineage": barrier.lineage,
            "half_bytes": len(saved.half), "deployment": None if split_plan is None else
            {"cut": split_plan.cut, "bits": split_plan.bits, "window": split_plan.window}}
        path = self._folder / f"barrier-{number:09d}-{barrier.batch}-{barrier.lineage}.saved"
        try:
            write_sealed(path, header, (saved.half, saved.codec))
            for _, _, _, old in self._files()[:-_KEPT]:
                old.unlink(missing_ok=True)
        except OSError as error:
            raise ConfigError(f"barriers: {path} cannot be written ({error.strerror}); make room, or give another "
                              "folder") from None

    def load(self, barrier: Barrier) -> Saved:
        """Return what was saved there; `ConfigError` if it is damaged, of another name or not there."""
        try:
            header, payload = self._read(barrier)
        except DamagedFile as error:
            raise ConfigError(f"barriers: {error}; remove it, and what is before it will be used") from None
        place = header["deployment"]
        return Saved(half=bytes(payload[:header["half_bytes"]]), codec=bytes(payload[header["half_bytes"]:]),
                     split_plan=None if place is None else SplitPlan(**place))

    def _read(self, barrier: Barrier) -> tuple[dict[str, Any], memoryview]:
        path = next((path for _, batch, lineage, path in reversed(self._files())
                     if (batch, lineage) == (barrier.batch, barrier.lineage)), None)
        if path is None:
            raise ConfigError(f"barriers: none of batch {barrier.batch} in {self._folder}; look whether it is the "
                              "right folder")
        header, payload = read_sealed(path)
        if header.get("form") != _FORM or header.get("name") != self._name:
            raise ConfigError(f"barriers: {path} belongs to {header.get('name')}, not to {self._name}; give each side "
                              "of each run a folder of its own")
        return header, payload

    def _files(self) -> list[tuple[int, int, str, Path]]:
        """Return number, batch, lineage and path of each, in the order in which they were written."""
        if self._folder is None:
            return []
        try:
            matches = [(_NAME.fullmatch(name), name) for name in os.listdir(self._folder)]
        except OSError as error:
            raise ConfigError(f"barriers: folder {self._folder} cannot be read ({error.strerror})") from None
        return sorted((int(match[1]), int(match[2]), match[3], self._folder / name) for match, name in matches if match)


def common_barrier(offers: Sequence[Sequence[Barrier]], last_batch: int) -> Barrier | None:
    """Return the highest place up to `last_batch` at which every side can stand, or None.

    A side that stands there now fits any lineage. The lineage is empty where all stand there now; otherwise those who
    do not stand there load the barrier of that lineage.
    """
    best: Barrier | None = None
    for place in sorted({barrier for offer in offers for barrier in offer}, key=lambda one: (one.batch, one.lineage)):
        if place.batch > last_batch or (best is not None and (place.batch, place.lineage == "") <= (
                best.batch, best.lineage == "")):
            continue
        standing = Barrier(batch=place.batch)
        if all(standing in offer or (place.lineage and place in offer) for offer in offers):
            best = place
    return best
