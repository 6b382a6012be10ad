"""Checkpoints of a run: writing, finding and checking them. Files and values only, no training.

`DIR/checkpoint/` holds `round-N.ckpt` for the last two synchronisations, `trace-N.spans` with the spans that each
round added to the trace, and `clients/` with the clients' own states.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from socflower.errors import ConfigError
from socflower.wire.arrays import MalformedBytes, pack_arrays, unpack_arrays
from socflower.wire.saved_state import DamagedFile, StateKind, StateStore, remove_partial

_ROUND = StateKind(name="checkpoint", schema=4, remedy="start again with --fresh")
_SPANS = StateKind(name="trace of a round", schema=2, remedy="start again with --fresh")
# Further fields with arrays. Their names in a file begin with "/outer/", as the name of no tensor does.
_BESIDE = ("outer", "servers", "feedback")
# The newest, and the previous one in case the newest is damaged.
_NUM_KEPT = 2

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
    # Groups dropped in the round; they may lack momentum.
    without_state: list[int] = field(default_factory=list)
    # SoCs without planned work.
    away: list[int] = field(default_factory=list)
    # SoCs that the round was planned without.
    planned_without: list[int] = field(default_factory=list)
    # The state of re-balancing.
    balance: Mapping[str, Any] = field(default_factory=dict)
    # The moments of an outer strategy.
    outer: Mapping[str, NDArray[Any]] = field(default_factory=dict)
    # The models of servers, if they differ.
    servers: Mapping[str, NDArray[Any]] = field(default_factory=dict)
    # The state of the compression of leaders' models.
    feedback: Mapping[str, NDArray[Any]] = field(default_factory=dict)
    resumed_from: list[int] = field(default_factory=list)
    # SoCs by the device that trained them last.
    trained_on: Mapping[str, list[int]] = field(default_factory=dict)
    # The training's id in the state folders of nodes.
    training: str = ""
    # Rounds whose spans are in separate files.
    trace_parts: list[int] = field(default_factory=list)


class CheckpointFolder:
    """The folder of one run's checkpoints. Every error is a `ConfigError` of one line, as of `StateStore`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._rounds = StateStore(path, _ROUND, prefix="round-", suffix=".ckpt", keep=_NUM_KEPT)
        self._spans = StateStore(path, _SPANS, prefix="trace-", suffix=".spans")

    @property
    def clients(self) -> Path:
        """The folder in which clients keep trainer states."""
        return self.path / "clients"

    def create(self) -> None:
        """Create the folder, and remove files that a killed writer left incomplete."""
        self.clients.mkdir(parents=True, exist_ok=True)
        remove_partial(self.path)
        remove_partial(self.clients)

    def open(self, what: str, *, wait_s: float, on_wait: Callable[[str], None]) -> None:
        """Keep other processes from writing here, until `remove` or the end of this one."""
        self._rounds.open(what, wait_s=wait_s, on_wait=on_wait)

    def remove(self) -> None:
        """Remove all checkpoints, and the folder unless it contains other files."""
        self._rounds.remove()
        self._spans.remove()
        ours = [*self.clients.glob("*.state")]
        for folder in (self.path, self.clients):
            ours += [*folder.glob(".*.part"), *folder.glob(".*-lock")]
        for path in ours:
            path.unlink(missing_ok=True)
        self._rounds.close()
        for folder in (self.clients, self.path):
            with suppress(OSError):
                folder.rmdir()

    def write(self, checkpoint: Checkpoint, trace_part: Mapping[str, Any] | None = None) -> None:
        """Write the spans of the round, then the checkpoint; remove checkpoints that are no longer kept."""
        if trace_part is not None:
            self._spans.write(checkpoint.server_round, trace_part)
        state = {entry.name: getattr(checkpoint, entry.name) for entry in fields(checkpoint)}
        arrays = dict(state.pop("arrays"))
        for key in _BESIDE:
            arrays |= {f"/{key}/{name}": array for name, array in state.pop(key).items()}
        self._rounds.write(checkpoint.server_round, state, pack_arrays(arrays))

    def rounds(self) -> list[int]:
        """Return the rounds that have checkpoints, newest first, intact or not."""
        return self._rounds.numbers()

    def newest_name(self) -> str:
        """Return the name of the newest checkpoint, "round 3"; empty if there is none."""
        return f"round {rounds[0]}" if (rounds := self.rounds()) else ""

    def read(self, server_round: int) -> Checkpoint:
        """Return a checkpoint; `DamagedFile` if the checkpoint or its spans are damaged."""
        state, payload = self._rounds.read(server_round)
        try:
            arrays = unpack_arrays(payload)
            beside: dict[str, Any] = {}
            for key in _BESIDE:
                prefix = f"/{key}/"
                names = [name for name in arrays if name.startswith(prefix)]
                beside[key] = {name.removeprefix(prefix): arrays.pop(name) for name in names}
            checkpoint = Checkpoint(**state, **beside, arrays=arrays)
        except MalformedBytes as error:
            # The file is forged: its digest is not a signature.
            raise DamagedFile(
                f"{self._rounds.path(server_round)} is damaged ({error})", _ROUND.remedy
            ) from None
        for _ in self.trace_parts(checkpoint):
            pass
        return checkpoint

    def trace_parts(self, checkpoint: Checkpoint) -> Iterator[dict[str, Any]]:
        """Yield the spans of each round up to the checkpoint's, oldest first."""
        return (self._spans.read(server_round)[0] for server_round in checkpoint.trace_parts)

    def newest(self, on_damage: Callable[[str], None] = lambda line: None) -> Checkpoint | None:
        """Return the newest intact checkpoint, or None if the folder has none; see `StateStore.newest`."""
        return self._rounds.newest(self.read, on_damage)

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
        self._rounds.remove(after=server_round)
        self._spans.remove(after=server_round)


@dataclass(frozen=True, kw_only=True, slots=True)
class Checkpointing:
    """How a run keeps checkpoints."""

    kept: CheckpointFolder
    engine: str
    # The round of the checkpoint to resume from; None: start a new training.
    resume_after: int | None = None

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
