"""States of groups in files: by plan and group, apart from each other, and gone when their training starts again."""

import os
import time
from pathlib import Path

import pytest
from flwr.app import ConfigRecord, Message, RecordDict

from socflower.clients.saved_training import Position, StateFiles, state_files
from socflower.flower_adapter import begin_run
from socflower.wire.message_keys import CONFIG, TRAINING
from socflower.wire.saved_state import DamagedFile, StateKind
from tests.one_line import refused

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
    refused(lambda: read(files, 1, 11, 5), "cannot be read", error=DamagedFile)
    files.delete(1)
    refused(lambda: read(files, 1, 11, 8), "cannot be read", error=DamagedFile)
    assert read(files, 10, 11, 8) == read(files, 0, 11, 8) == read(files, 0, 2, 8) == b"8"


def test_the_state_of_another_seed_is_refused(tmp_path: Path) -> None:
    files = StateFiles(tmp_path)
    files.of(Position(0, 2, 100, 5, seed=2), KIND).write(5, {}, [b"other"])
    refused(lambda: read(files, 0, 2, 5), "group-0-of-2-steps-100-seed-2", "-seed-1")


# ------------------------------------------------------------------------------------------ trainings in one folder
DAY_S = 24 * 3600


def of(training: object) -> Message:
    begin_run(1)  # without one no message can be made
    return Message(
        RecordDict({CONFIG: ConfigRecord({} if training is None else {TRAINING: training})}),
        1,
        "train",
    )


def test_each_training_has_a_folder_of_its_own_if_the_server_names_it(tmp_path: Path) -> None:
    assert state_files(of("7"), None) is None
    assert state_files(of(None), tmp_path) == StateFiles(tmp_path)
    first, second = (state_files(of(training), tmp_path, "edge") for training in ("7", "8"))
    assert (
        first == StateFiles(tmp_path / "training-7", "edge")
        and second is not None
        and first.folder.is_dir()
    )
    write(first, 0, 2, 5)
    second.delete(0)
    assert read(first, 0, 2, 5) == b"5"
    assert [path.name for path in tmp_path.iterdir() if path.is_file()] == []


@pytest.mark.parametrize("training", ["", "../7", "7/8", "7a", "١", 1.5, b"7"])
def test_an_id_that_is_no_number_names_no_folder(tmp_path: Path, training: object) -> None:
    refused(lambda: state_files(of(training), tmp_path / "states"), "digits")
    assert not (tmp_path / "states").exists()


def test_a_new_training_removes_those_that_ended_or_were_given_up(tmp_path: Path) -> None:
    """A training that has reached its last step stays for a day, one that was interrupted for thirty."""
    for name, step, days in (
        ("training-1", 100, 0.9),
        ("training-2", 100, 1.1),
        ("training-3", 99, 29),
        ("training-4", 99, 31),
        ("training-9", 99, 31),
        ("mine", 100, 99),
    ):
        write(StateFiles(tmp_path / name), 0, 2, step)
        then_s = time.time() - days * DAY_S
        os.utime(tmp_path / name, (then_s, then_s))
    elsewhere = tmp_path.with_name("elsewhere")
    elsewhere.mkdir()
    (tmp_path / "training-5").symlink_to(elsewhere)
    os.utime(elsewhere, (1.0, 1.0))

    def names() -> set[str]:
        return {path.name for path in tmp_path.iterdir()}

    state_files(of("3"), tmp_path)
    assert len(names()) == 7, "a training that goes on removes none"
    state_files(of("6"), tmp_path)
    assert (
        names() == {"training-1", "training-3", "training-5", "training-6", "mine"}
        and elsewhere.is_dir()
    )


def test_a_training_in_use_stays_however_long_its_rounds_are(tmp_path: Path) -> None:
    (tmp_path / "training-1").mkdir()
    os.utime(tmp_path / "training-1", (1.0, 1.0))
    state_files(of("1"), tmp_path)  # resumed after years, before a new training begins
    state_files(of("2"), tmp_path)
    assert (tmp_path / "training-1").is_dir()


def test_a_folder_that_cannot_be_written_is_named_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    refused(lambda: state_files(of("1"), tmp_path / "file"), f"{tmp_path}/file")
