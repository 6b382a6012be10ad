"""States of groups in files: by plan and group, apart from each other, and gone when their training starts again."""

from pathlib import Path

import pytest

from socflower.clients.saved_training import Position, StateFiles
from socflower.errors import ConfigError
from socflower.wire.saved_state import DamagedFile, StateKind

KIND = StateKind(name="state", schema=1, remedy="start anew")


def write(files: StateFiles, group_id: int, num_groups: int, step: int) -> None:
    files.of(Position(group_id, num_groups, 100, step), KIND).write(step, {}, [b"%d" % step])


def read(files: StateFiles, group_id: int, num_groups: int, step: int) -> bytes:
    return bytes(files.of(Position(group_id, num_groups, 100, step), KIND).read(step)[1])


def test_groups_and_plans_do_not_push_each_other_out(tmp_path: Path) -> None:
    files = StateFiles(tmp_path / "deep")
    for step in range(1, 9):
        for group_id in (0, 1, 10):
            write(files, group_id, 11, step)
        write(files, 0, 2, step)
    assert read(files, 1, 11, 6) == b"6" and read(files, 10, 11, 8) == read(files, 0, 2, 8) == b"8"
    with pytest.raises(DamagedFile, match="cannot be read"):
        read(files, 1, 11, 5)
    files.delete(1)
    with pytest.raises(DamagedFile, match="cannot be read"):
        read(files, 1, 11, 8)
    assert read(files, 10, 11, 8) == read(files, 0, 11, 8) == read(files, 0, 2, 8) == b"8"


def test_the_state_of_another_seed_is_refused(tmp_path: Path) -> None:
    files = StateFiles(tmp_path)
    files.of(Position(0, 2, 100, 5, seed=2), KIND).write(5, {}, [b"other"])
    with pytest.raises(ConfigError, match=r"belongs to group-0-of-2-steps-100-seed-2, not to .*-seed-1"):
        read(files, 0, 2, 5)
