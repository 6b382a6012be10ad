"""States of groups in files: by position, the last three, damage told, and `None` kept as a fact of its own."""

from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from socflower.clients.saved_training import Position, SavedState, StateFiles
from socflower.errors import ConfigError
from socflower.wire.saved_state import DamagedFile


def at(next_step: int, group_id: int = 0, num_groups: int = 2, total_steps: int = 100) -> Position:
    return Position(group_id, num_groups, total_steps, next_step)


@settings(max_examples=40)
@given(position=st.tuples(*[st.integers(0, 10**9)] * 4), state=st.none() | st.binary())
def test_what_was_written_comes_back_at_its_position_only(
    position: tuple[int, int, int, int], state: bytes | None,
) -> None:
    with TemporaryDirectory() as folder:
        files = StateFiles(Path(folder) / "deep")
        assert files.read(Position(*position)) is None
        files.write(Position(*position), state)
        assert files.read(Position(*position)) == SavedState(state)
        for index in range(4):
            other = [value + (index == k) for k, value in enumerate(position)]
            assert files.read(Position(*other)) is None


@settings(max_examples=15)
@given(steps=st.lists(st.integers(1, 12), min_size=1, max_size=4))
def test_the_three_before_any_step_are_there_after_it_was_written(steps: list[int]) -> None:
    """Whatever attempts there were before: going back removes nothing that is needed."""
    with TemporaryDirectory() as folder:
        files = StateFiles(Path(folder))
        for last in steps:
            for step in range(1, last + 1):
                files.write(at(step), b"%d" % step)
            for step in range(max(1, last - 2), last + 1):
                assert files.read(at(step)) == SavedState(b"%d" % step)
            assert last < 4 or files.read(at(last - 3)) is None


def test_groups_and_plans_do_not_push_each_other_out(tmp_path: Path) -> None:
    files = StateFiles(tmp_path)
    for step in range(1, 9):
        for group_id in (0, 1, 10):
            files.write(at(step, group_id, num_groups=11), b"")
    assert files.read(at(6, 1, 11)) == files.read(at(8, 10, 11)) == SavedState(b"")
    files.delete(1)
    assert files.read(at(8, 1, 11)) is None
    assert files.read(at(8, 10, 11)) == files.read(at(8, 0, 11)) == SavedState(b"")


def test_damage_is_told(tmp_path: Path) -> None:
    files = StateFiles(tmp_path)
    files.write(at(1), b"state")
    (path,) = tmp_path.iterdir()
    path.write_bytes(path.read_bytes()[:-1] + b"E")
    with pytest.raises(DamagedFile, match="digest"):
        files.read(at(1))


def test_the_state_of_another_position_under_this_name_is_not_taken(tmp_path: Path) -> None:
    files = StateFiles(tmp_path)
    files.write(at(1), b"state")
    (path,) = tmp_path.iterdir()
    path.rename(tmp_path / path.name.replace("at-1", "at-2"))
    with pytest.raises(DamagedFile, match="another training"):
        files.read(at(2))


def test_a_folder_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(ConfigError, match="cannot be written"):
        StateFiles(tmp_path / "file" / "below").write(at(1), b"")
