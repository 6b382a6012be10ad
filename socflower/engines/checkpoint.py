"""Checkpoints of a run: writing, finding and checking them. Files and values only, no training.

`DIR/checkpoint/` holds `round-N.ckpt` for the last two synchronisations, `trace-N.spans` with the spans that each
round added to the trace, and `clients/` with the clients' own states.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from socflower.errors import ConfigError
from socflower.wire.arrays import MalformedBytes, pack_arrays, unpack_arrays
from socflower.wire.saved_state import DamagedFile, StateKind, StateStore, remove_partial

_ROUND = StateKind(name="checkpoint", schema=5, remedy="start again with --fresh")
_SPANS = StateKind(name="trace of a round", schema=2, remedy="start again with --fresh")
# The key of an array's number in a state, and how the names of these arrays begin in a file.
_ARRAY = "/array"
# The newest, and the previous one in case the newest is damaged.
_NUM_KEPT = 2
# A ServerApp on a busy machine may get no processor time for some seconds.
_LEASE_S = 15.0

# These change neither weights nor virtual time.
_FREE_KEYS = ("name", "question", "compare", "expect", "folder")


@dataclass(frozen=True, kw_only=True, slots=True)
class Checkpoint:
    """The state that a server needs to resume after `server_round`; plain values, which JSON stores exactly."""

    server_round: int
    num_rounds: int
    # The resolved scenario.
    scenario: Mapping[str, Any]
    engine: str
    versions: Mapping[str, str]
    # The rounds of the result, from round 0.
    rounds: list[dict[str, Any]]
    clock: Mapping[str, Any]
    arrays: Mapping[str, NDArray[Any]]
    warm_up: Mapping[str, Any] | None = None
    # What the strategy resumes from: plain values, and arrays in mappings. Only the strategy reads it.
    strategy: Mapping[str, Any] = field(default_factory=dict)
    resumed_from: list[int] = field(default_factory=list)
    # SoCs by the device that trained them last.
    trained_on: Mapping[str, list[int]] = field(default_factory=dict)
    # The training's id in the state folders of nodes.
    training: str = ""
    # Rounds whose spans are in separate files.
    trace_parts: list[int] = field(default_factory=list)


class RunStore:
    """What a run keeps in a folder until it succeeds, so that it can be resumed.

    Its states are numbered; `unit` names one of them to a user. Every error is a `ConfigError` of one line, as of
    `StateStore`.
    """

    unit: str

    def __init__(self, path: Path, states: StateStore) -> None:
        self.path = path
        self._states = states

    def create(self) -> None:
        """Create the folder, and remove files that a killed writer left incomplete."""
        self.path.mkdir(parents=True, exist_ok=True)
        remove_partial(self.path)

    def numbers(self) -> list[int]:
        """Return the numbers of the states to resume from, newest first, intact or not."""
        return self._states.numbers()

    def newest_name(self) -> str:
        """Return the name of the newest state, such as "round 3"; empty if there is none."""
        return f"{self.unit} {numbers[0]}" if (numbers := self.numbers()) else ""

    def clear(self) -> None:
        """Remove everything; a store that is open stays so."""
        self._states.remove()
        for path in self.path.glob(".*.part"):
            path.unlink(missing_ok=True)

    def remove(self) -> None:
        """Remove everything, and the folder unless it contains other files."""
        self.clear()
        # Before the lock is released, after which its file may be another process's.
        for path in self.path.glob(".*-lock"):
            path.unlink(missing_ok=True)
        self._states.close()
        with suppress(OSError):
            self.path.rmdir()


class CheckpointFolder(RunStore):
    """The folder of one run's checkpoints."""

    unit = "round"

    def __init__(self, path: Path) -> None:
        kept = StateStore(path, _ROUND, prefix="round-", suffix=".ckpt", keep=_NUM_KEPT)
        super().__init__(path, kept)
        self._spans = StateStore(path, _SPANS, prefix="trace-", suffix=".spans")

    @property
    def clients(self) -> Path:
        """The folder in which clients keep trainer states."""
        return self.path / "clients"

    def create(self) -> None:
        """Create the folder, and remove files that a killed writer left incomplete."""
        super().create()
        self.clients.mkdir(exist_ok=True)
        remove_partial(self.clients)

    def open(self, what: str, *, wait_s: float, on_wait: Callable[[str], None]) -> None:
        """Keep other processes from writing here, until `remove` or the end of this one.

        A process that does so, and then shows no life for 15 s, is killed if another one waits here.
        """
        self._states.open(what, wait_s=wait_s, on_wait=on_wait, lease_s=_LEASE_S)

    @property
    def is_open(self) -> bool:
        """Whether this process keeps others from writing here."""
        return self._states.is_open

    def close(self) -> None:
        """Let other processes write here."""
        self._states.close()

    def clear(self) -> None:
        """Remove all checkpoints and states of clients; an open folder stays open."""
        # First what refers to the rest: a process may be killed in between.
        super().clear()
        self._spans.remove()
        for pattern in ("*.state", ".*.part", ".*-lock"):
            for path in self.clients.glob(pattern):
                path.unlink(missing_ok=True)

    def remove(self) -> None:
        """Remove all checkpoints and states of clients, and the folder unless it contains other files."""
        self.clear()
        with suppress(OSError):
            self.clients.rmdir()
        super().remove()

    def write(self, checkpoint: Checkpoint, trace_part: Mapping[str, Any] | None = None) -> None:
        """Write the spans of the round, then the checkpoint; remove checkpoints that are no longer kept."""
        if trace_part is not None:
            self._spans.write(checkpoint.server_round, trace_part)
        state = {entry.name: getattr(checkpoint, entry.name) for entry in fields(checkpoint)}
        arrays = dict(state.pop("arrays"))
        own: list[NDArray[Any]] = []
        state["strategy"] = _without_arrays(checkpoint.strategy, own)
        arrays |= {f"{_ARRAY}/{number}": array for number, array in enumerate(own)}
        self._states.write(checkpoint.server_round, state, pack_arrays(arrays))

    def read(self, server_round: int) -> Checkpoint:
        """Return a checkpoint; `DamagedFile` if the checkpoint or its spans are damaged."""
        state, payload = self._states.read(server_round)
        try:
            arrays = unpack_arrays(payload)
            own = [arrays.pop(name) for name in list(arrays) if name.startswith(f"{_ARRAY}/")]
            state["strategy"] = _with_arrays(state["strategy"], own)
            checkpoint = Checkpoint(**state, arrays=arrays)
        except (MalformedBytes, IndexError) as error:
            # The file is forged: its digest is not a signature.
            raise DamagedFile(
                f"{self._states.path(server_round)} is damaged ({error})", _ROUND.remedy
            ) from None
        for _ in self.trace_parts(checkpoint):
            pass
        return checkpoint

    def trace_parts(self, checkpoint: Checkpoint) -> Iterator[dict[str, Any]]:
        """Yield the spans of each round up to the checkpoint's, oldest first."""
        return (self._spans.read(server_round)[0] for server_round in checkpoint.trace_parts)

    def newest(self, on_damage: Callable[[str], None] = lambda line: None) -> Checkpoint | None:
        """Return the newest intact checkpoint, or None if the folder has none; see `StateStore.newest`."""
        return self._states.newest(self.read, on_damage)

    def resume(
        self,
        scenario: Mapping[str, Any],
        engine: str,
        versions: Mapping[str, str],
        on_damage: Callable[[str], None] = lambda line: None,
    ) -> Checkpoint | None:
        """Return the newest intact checkpoint, from which this run resumes, and remove those after it.

        Returns None if there is none. Raises `ConfigError` if it is of another run, or if all are damaged.
        """
        checkpoint = self.newest(on_damage)
        if checkpoint is not None:
            require_same_run(checkpoint, scenario, engine, versions, self.path)
            self.remove_after(checkpoint.server_round)
        return checkpoint

    def remove_after(self, server_round: int) -> None:
        """Remove checkpoints newer than a round, since the run resumes there and writes them again."""
        self._states.remove(after=server_round)
        self._spans.remove(after=server_round)


def _without_arrays(state: Any, arrays: list[NDArray[Any]]) -> Any:
    """Return a state with the number of each array in its place; the arrays are added to `arrays`."""
    if isinstance(state, Mapping):
        return {key: _without_arrays(value, arrays) for key, value in state.items()}
    if isinstance(state, np.ndarray):
        arrays.append(state)
        return {_ARRAY: len(arrays) - 1}
    return state


def _with_arrays(state: Any, arrays: list[NDArray[Any]]) -> Any:
    """Return a state with its arrays again."""
    if not isinstance(state, Mapping):
        return state
    if _ARRAY in state:
        return arrays[state[_ARRAY]]
    return {key: _with_arrays(value, arrays) for key, value in state.items()}


@dataclass(frozen=True, kw_only=True, slots=True)
class Checkpointing:
    """How a run keeps checkpoints."""

    kept: CheckpointFolder
    engine: str
    # The round of the checkpoint to resume from; None: start a new training.
    resume_after: int | None = None

    def to_document(self) -> dict[str, Any]:
        """Return this as plain values, for other processes of the run."""
        folder = str(self.kept.path.resolve())
        return {"folder": folder, "engine": self.engine, "resume_after": self.resume_after}

    @classmethod
    def from_document(cls, document: Mapping[str, Any]) -> "Checkpointing":
        """Return what `to_document` described."""
        kept = CheckpointFolder(Path(document["folder"]))
        return cls(kept=kept, engine=document["engine"], resume_after=document["resume_after"])

    def after(self, checkpoint: Checkpoint | None) -> "Checkpointing":
        """Return the same for a run that resumes from a checkpoint, or starts from the beginning without one."""
        return replace(self, resume_after=None if checkpoint is None else checkpoint.server_round)


def require_same_run(
    checkpoint: Checkpoint,
    scenario: Mapping[str, Any],
    engine: str,
    versions: Mapping[str, str],
    where: Path,
) -> None:
    """Raise `ConfigError` with the first difference if the checkpoint is of another training."""
    theirs = {
        **training_keys(checkpoint.scenario),
        "engine": checkpoint.engine,
        "versions": checkpoint.versions,
    }
    ours = {**training_keys(scenario), "engine": engine, "versions": versions}
    require_equal(where, theirs, ours)


def require_equal(where: Path, theirs: Mapping[str, Any], ours: Mapping[str, Any]) -> None:
    """Raise `ConfigError` with the first difference if what a folder keeps is of another run."""
    found = difference(theirs, ours)
    if found is not None:
        key, before, now = found
        raise ConfigError(
            f"{where} is of another run: {key} was {before!r} there and is {now!r} now; name another "
            "--out, or start again with --fresh"
        )


def difference(left: Any, right: Any, key: str = "") -> tuple[str, Any, Any] | None:
    """Return the dotted key of the first difference of two documents, and both values; None if they are equal."""
    if isinstance(left, Mapping) and isinstance(right, Mapping):
        for name in dict.fromkeys((*left, *right)):
            found = difference(
                left.get(name), right.get(name), f"{key}.{name}" if key else str(name)
            )
            if found is not None:
                return found
        return None
    are_lists = isinstance(left, list | tuple) and isinstance(right, list | tuple)
    if are_lists and len(left) == len(right):
        for index, (one, other) in enumerate(zip(left, right, strict=True)):
            found = difference(one, other, f"{key}[{index}]")
            if found is not None:
                return found
        return None
    return None if left == right else (key, left, right)


def training_keys(document: Mapping[str, Any]) -> dict[str, Any]:
    """Return the part of a resolved scenario that determines the weights and the virtual time."""
    return {key: value for key, value in document.items() if key not in _FREE_KEYS}
