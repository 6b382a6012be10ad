"""Checkpoints of a run: how one is written, found again and checked. Files and values only, no training.

`DIR/checkpoint/` has `round-N.ckpt` for the last two synchronisations, `trace-N.spans` with what virtual time brought
in each of the rounds so far, and `clients/` with what clients keep for themselves.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from socflower.errors import ConfigError
from socflower.wire.saved_state import DamagedFile, read_sealed, remove_partial, write_sealed

SCHEMA = 1
_KEPT = 2  # the newest, and the one before for when it is damaged

# These change neither weights nor virtual time.
_FREE_KEYS = ("name", "question", "compare", "expect")


@dataclass(frozen=True, kw_only=True, slots=True)
class Checkpoint:
    """All that a server needs to go on after `server_round`; plain values, so that JSON keeps them exactly."""

    server_round: int
    num_rounds: int
    scenario: Mapping[str, Any]  # resolved
    engine: str
    versions: Mapping[str, str]
    rounds: list[dict[str, Any]]  # of the result, from round 0
    clock: Mapping[str, Any]
    arrays: Mapping[str, NDArray[Any]]
    warm_up: Mapping[str, Any] | None = None
    without_state: list[int] = field(default_factory=list)  # groups that the round dropped: they may have no momentum
    away: list[int] = field(default_factory=list)  # SoCs that no work was planned for
    planned_without: list[int] = field(default_factory=list)  # SoCs that the round was planned without
    balance: Mapping[str, Any] = field(default_factory=dict)  # what re-balancing has come to
    resumed_from: list[int] = field(default_factory=list)
    trace_parts: list[int] = field(default_factory=list)  # rounds whose spans stand in files of their own


@dataclass(frozen=True, slots=True)
class CheckpointFolder:
    """The folder of one run's checkpoints."""

    path: Path

    @property
    def clients(self) -> Path:
        """Where clients keep their trainers' states."""
        return self.path / "clients"

    def create(self) -> None:
        """Make the folder, empty of what a killed writer left half-written."""
        self.clients.mkdir(parents=True, exist_ok=True)
        remove_partial(self.path)
        remove_partial(self.clients)

    def remove(self) -> None:
        """Remove all checkpoints, and the folder unless somebody else's files are in it."""
        for pattern in ("round-*.ckpt", "trace-*.spans", "clients/*.state", ".*.part", "clients/.*.part"):
            for path in self.path.glob(pattern):
                path.unlink(missing_ok=True)
        for folder in (self.clients, self.path):
            with suppress(OSError):
                folder.rmdir()

    def write(self, checkpoint: Checkpoint, trace_part: Mapping[str, Any] | None = None) -> None:
        """Write a checkpoint, the spans of its round before it, and drop those no longer kept.

        Raises `ConfigError` where the folder cannot be written; earlier checkpoints stay as they are.
        """
        header = {entry.name: getattr(checkpoint, entry.name) for entry in fields(checkpoint)
                  if entry.name != "arrays"}
        header["schema"] = SCHEMA
        header["arrays"] = [[name, array.dtype.str, list(array.shape)] for name, array in checkpoint.arrays.items()]
        try:
            if trace_part is not None:
                write_sealed(self._trace(checkpoint.server_round), trace_part, sync_folder=False)
            write_sealed(self._round(checkpoint.server_round), header,
                         (_content(array) for array in checkpoint.arrays.values()))
        except OSError as error:
            raise ConfigError(f"checkpoint {self.path}: cannot be written ({error.strerror}); make room and run the "
                              "same command again") from None
        for old in self.rounds()[_KEPT:]:
            self._round(old).unlink(missing_ok=True)

    def rounds(self) -> list[int]:
        """Return the rounds of which there are checkpoints, newest first, whether whole or not."""
        return sorted((int(path.stem.partition("-")[2]) for path in self.path.glob("round-*.ckpt")), reverse=True)

    def read(self, server_round: int) -> Checkpoint:
        """Return a checkpoint; `DamagedFile` if it or spans that belong to it are not whole.

        Raises `ConfigError` for one that another version of socflower wrote.
        """
        header, payload = read_sealed(self._round(server_round))
        if header.pop("schema", None) != SCHEMA:
            raise ConfigError(f"{self.path}: its checkpoint is of another version of socflower; finish the run with "
                              "that one, or start anew with --fresh")
        checkpoint = Checkpoint(**{**header, "arrays": dict(_arrays(header["arrays"], payload))})
        for _ in self.trace_parts(checkpoint):
            pass
        return checkpoint

    def trace_parts(self, checkpoint: Checkpoint) -> Iterator[dict[str, Any]]:
        """Yield the spans of each round up to the checkpoint's, oldest first."""
        for server_round in checkpoint.trace_parts:
            yield read_sealed(self._trace(server_round))[0]

    def newest(self, on_damage: Callable[[str], None] = lambda line: None) -> Checkpoint | None:
        """Return the newest checkpoint that is whole, or None if there is none at all.

        `on_damage` gets a line about each that is passed over. Raises `ConfigError` if there are some, all damaged.
        """
        causes = []
        for server_round in self.rounds():
            try:
                checkpoint = self.read(server_round)
            except DamagedFile as error:
                causes.append(f"{error}")
                continue
            for cause in causes:
                on_damage(f"{cause}; going on from the checkpoint before it, of round {server_round}")
            return checkpoint
        if causes:
            raise ConfigError(f"{self.path}: no checkpoint is whole: {'; '.join(causes)}; start anew with --fresh")
        return None

    def forget_after(self, server_round: int) -> None:
        """Remove checkpoints newer than a round: the run goes on from there, and writes them again."""
        for path in (*self.path.glob("round-*.ckpt"), *self.path.glob("trace-*.spans")):
            if int(path.stem.partition("-")[2]) > server_round:
                path.unlink(missing_ok=True)

    def _round(self, server_round: int) -> Path:
        return self.path / f"round-{server_round:06d}.ckpt"

    def _trace(self, server_round: int) -> Path:
        return self.path / f"trace-{server_round:06d}.spans"


@dataclass(frozen=True, kw_only=True, slots=True)
class Checkpointing:
    """How a run keeps checkpoints."""

    folder: Path
    engine: str
    resume_after: int | None = None  # the round of the checkpoint to go on from; None: start anew


def require_same_run(checkpoint: Checkpoint, scenario: Mapping[str, Any], engine: str, versions: Mapping[str, str],
                     where: Path) -> None:
    """Raise `ConfigError`, naming the first difference, if the checkpoint is not of this very training."""
    theirs = {**training_of(checkpoint.scenario), "engine": checkpoint.engine, "versions": checkpoint.versions}
    ours = {**training_of(scenario), "engine": engine, "versions": versions}
    found = difference(theirs, ours)
    if found is not None:
        key, before, now = found
        raise ConfigError(f"{where} is of another run: {key} was {before!r} there and is {now!r} now; name another "
                          "--out, or start anew with --fresh")


def difference(left: Any, right: Any, key: str = "") -> tuple[str, Any, Any] | None:
    """Return the dotted key of the first difference of two documents and both values, or None if they are equal."""
    if isinstance(left, Mapping) and isinstance(right, Mapping):
        for name in dict.fromkeys((*left, *right)):
            found = difference(left.get(name), right.get(name), f"{key}.{name}" if key else str(name))
            if found is not None:
                return found
        return None
    if isinstance(left, list | tuple) and isinstance(right, list | tuple) and len(left) == len(right):
        pairs = enumerate(zip(left, right, strict=True))
        return next((found for index, (one, other) in pairs if (found := difference(one, other, f"{key}[{index}]"))),
                    None)
    return None if left == right else (key, left, right)


def training_of(document: Mapping[str, Any]) -> dict[str, Any]:
    """Return the part of a resolved scenario that decides the weights and the virtual time."""
    return {key: value for key, value in document.items() if key not in _FREE_KEYS}


def _content(array: NDArray[Any]) -> memoryview:
    """Return an array's bytes in C order, without a copy where they are in that order."""
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data


def _arrays(specification: list[list[Any]], payload: memoryview) -> Iterator[tuple[str, NDArray[Any]]]:
    start = 0
    for name, dtype, shape in specification:
        count = int(np.prod(shape, dtype=np.int64))
        array = np.frombuffer(payload, np.dtype(dtype), count, start) if count else np.empty(0, dtype)
        start += array.nbytes
        yield name, array.reshape(shape)
