"""A group's training state in files of its own, for when the client's process or its node is gone."""

from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from socflower.cluster.sealed_file import DamagedFile, read_sealed, write_sealed
from socflower.errors import ConfigError

_SCHEMA = 1
# A server goes on from its last checkpoint, or the one before if that is damaged; the group may be a round ahead.
_KEPT = 3


class Position(NamedTuple):
    """Between which steps of which training a state belongs."""

    group_id: int
    num_groups: int
    total_steps: int
    next_step: int


class Kept(NamedTuple):
    """What a file says; a group that diverged has no state, on purpose."""

    state: bytes | None


@dataclass(frozen=True, slots=True)
class StateFiles:
    """The states of the groups of one training that are led from here, the last three of each."""

    folder: Path

    def write(self, position: Position, state: bytes | None) -> None:
        """Keep the state with which a group goes on at `position`; None if it starts with a new optimiser there."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            write_sealed(self._path(position), {"schema": _SCHEMA, "position": position, "state": state is not None},
                         () if state is None else (state,))
        except OSError as error:
            raise ConfigError(f"state folder {self.folder}: cannot be written ({error.strerror}); make room, or name "
                              "another one") from None
        # Steps after this one are of an attempt that was interrupted, and about to be written again.
        for step in sorted(step for step in self._steps(position) if step <= position.next_step)[:-_KEPT]:
            self._path(position._replace(next_step=step)).unlink(missing_ok=True)

    def read(self, position: Position) -> Kept | None:
        """Return what was kept for `position`, or None if nothing was; `DamagedFile` if it is not whole."""
        path = self._path(position)
        if not path.exists():
            return None
        header, payload = read_sealed(path)
        if header["schema"] != _SCHEMA or header["position"] != list(position):
            raise DamagedFile(f"{path.name} is of another version or another training")
        return Kept(bytes(payload) if header["state"] else None)

    def forget(self, group_id: int) -> None:
        """Remove all states of a group: its training starts anew."""
        for path in self.folder.glob(f"group-{group_id}-*.state"):
            path.unlink(missing_ok=True)

    def _steps(self, position: Position) -> list[int]:
        pattern = f"{self._prefix(position)}*.state"
        return [int(path.stem.rpartition("-")[2]) for path in self.folder.glob(pattern)]

    def _path(self, position: Position) -> Path:
        return self.folder / f"{self._prefix(position)}{position.next_step}.state"

    @staticmethod
    def _prefix(position: Position) -> str:
        return f"group-{position.group_id}-of-{position.num_groups}-steps-{position.total_steps}-at-"
