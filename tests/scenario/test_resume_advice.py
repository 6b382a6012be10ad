"""What an interrupted run is advised to do: after each kind of end, the command that is named resumes the run."""

import errno
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from socflower.engines.checkpoint import CheckpointFolder
from socflower.engines.deployment.options import DeploymentOptions
from socflower.errors import SocflowerError, TrainingFailed
from socflower.scenario import jobs
from socflower.scenario.jobs import kept_line
from socflower.scenario.schema.config import EventConfig
from tests.command_line import Socflower
from tests.one_line import one_line, refused
from tests.scenario.small_runs import Reference, small, without_drawing
from tests.scenario.test_resume import assert_ends_as, resume, stop_after

pytestmark = pytest.mark.usefixtures("on_few_digits")


TWO_ROUNDS = """\
[cluster]
boards = 2
socs_per_board = 1
[train]
epochs = 1
[strategy]
groups = 2
sync_interval_epochs = 0.5
"""


def advised(text: str) -> str:
    """The command that a line advises first: the same one, the same without --fresh, or one with --fresh."""
    assert "\n" not in text
    commands = {
        "the same command without --fresh": "same without --fresh",
        "the same command": "same",
        "--fresh": "fresh",
    }
    found = re.search("|".join(commands), text)
    assert found is not None, text
    return commands[found[0]]


@contextmanager
def unreadable(pattern: str, number: int) -> Iterator[None]:
    """Files of this form of name exist, and reading them fails with this error."""
    read_bytes = Path.read_bytes

    def read(self: Path) -> bytes:
        if self.match(pattern):
            raise OSError(number, os.strerror(number), str(self))
        return read_bytes(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Path, "read_bytes", read)
        yield


@contextmanager
def away(folder: Path, pattern: str) -> Iterator[None]:
    """Files of this form of name are elsewhere, as of a node that is not there."""
    moved = {path: path.read_bytes() for path in folder.glob(pattern)}
    for path in moved:
        path.unlink()
    yield
    for path, content in moved.items():
        path.write_bytes(content)


SITUATIONS: dict[str, Callable[[Path], Any]] = {
    "the newest checkpoint may not be read": lambda out: unreadable(
        "round-000002.ckpt", errno.EACCES
    ),
    "too many files are open": lambda out: unreadable("round-*.ckpt", errno.EMFILE),
    "a group's state may not be read": lambda out: unreadable("group-1-*.state", errno.EACCES),
    "the file server of a group's state is away": lambda out: unreadable(
        "group-1-*.state", errno.ESTALE
    ),
    "the node with a group's state is away": lambda out: away(
        out / "checkpoint" / "clients", "group-1-*.state"
    ),
}


@pytest.mark.few_cells(2)
@pytest.mark.parametrize("name", SITUATIONS)
def test_what_passes_is_waited_for_and_the_same_command_resumes(
    name: str,
    reference: Reference,
    tmp_path: Path,
) -> None:
    """After the cause is gone the run ends as one that was never interrupted, and has lost no round."""
    scenario, out = small(interval=0.25), tmp_path / "out"
    stop_after(scenario, out, 2)
    with SITUATIONS[name](out):
        line = refused(lambda: resume(scenario, out), error=SocflowerError)
    assert advised(line) == "same"
    assert resume(scenario, out)["resumed_from"] == [2]
    assert_ends_as(reference(scenario), out)


def spoil(out: Path, pattern: str) -> None:
    for path in out.glob(pattern):
        path.write_bytes(path.read_bytes()[:-1])


@pytest.mark.parametrize(
    "pattern", ["checkpoint/round-*.ckpt", "checkpoint/clients/group-1-*.state"]
)
def test_what_is_damaged_needs_a_new_start(pattern: str, tmp_path: Path) -> None:
    """Nothing else is advised: the same command ends in the same way each time."""
    scenario = small(interval=0.25)
    stop_after(scenario, tmp_path, 2)
    spoil(tmp_path, pattern)
    for _ in range(2):
        line = refused(lambda: resume(scenario, tmp_path), error=SocflowerError)
        assert advised(line) == "fresh" and "the same command" not in line
    assert resume(scenario, tmp_path, fresh=True)["resumed_from"] == []


@pytest.mark.parametrize("number", [errno.EIO, errno.EISDIR])
def test_a_checkpoint_that_the_disk_has_lost_is_skipped(number: int, tmp_path: Path) -> None:
    scenario, out = small(interval=0.25), tmp_path / "out"
    stop_after(scenario, out, 2)
    with unreadable("round-000002.ckpt", number):
        assert without_drawing(scenario, out, resumable=True)["resumed_from"] == [1]


@pytest.mark.parametrize("fresh", [False, True])
def test_a_training_that_failed_is_resumed_by_what_its_error_advises(
    fresh: bool, tmp_path: Path
) -> None:
    """A command with --fresh would remove what is kept, so the same one would not resume."""
    failing = small(interval=0.25, events=(EventConfig(kind="raise", soc=0, round=3),))
    said: list[str] = []

    def train(fresh: bool) -> str:
        return refused(
            lambda: resume(failing, tmp_path, fresh=fresh, on_notice=said.append),
            error=TrainingFailed,
        )

    advice = advised(train(fresh))
    assert advice == ("same without --fresh" if fresh else "same") and said == []
    train(fresh and advice == "same")
    (line,) = said
    one_line(line, tmp_path, "after round 2 of 4", "--fresh")


@pytest.mark.parametrize("fresh", [False, True])
def test_an_interrupted_command_says_which_command_resumes(
    fresh: bool,
    socflower: Socflower,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "case.toml").write_text(TWO_ROUNDS)
    write = CheckpointFolder.write

    def interrupted(self: CheckpointFolder, *arguments: Any) -> None:
        write(self, *arguments)
        raise KeyboardInterrupt

    command = "run case.toml --out out --workers 0 --json"
    with monkeypatch.context() as patch:
        patch.setattr(CheckpointFolder, "write", interrupted)
        ran = socflower(f"{command} --fresh" if fresh else command)
    assert ran.status == 130
    advice = advised(ran.err.splitlines()[-1])
    assert advice == ("same without --fresh" if fresh else "same")
    again = socflower(command)
    assert again.status == 0 and "resuming" in again.err.splitlines()[0]


# ------------------------------------------------------------------------------------- a remote SuperLink
@pytest.mark.parametrize(
    ("folder", "fresh", "advice"),
    [("", False, None), ("/kept", False, "same"), ("/kept", True, "same without --fresh")],
)
@pytest.mark.parametrize(
    "error", [TrainingFailed("the SuperLink has not answered for 180 s"), KeyboardInterrupt()]
)
def test_a_run_far_away_resumes_from_the_checkpoints_there(
    folder: str,
    fresh: bool,
    advice: str | None,
    error: BaseException,
    socflower: Socflower,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def run_job(*arguments: Any, **named_arguments: Any) -> None:
        raise error

    monkeypatch.setattr(jobs, "run_job", run_job)
    (tmp_path / "case.toml").write_text(TWO_ROUNDS)
    options = f"--checkpoint-folder {folder}" if folder else ""
    options += " --fresh" if fresh else ""
    far = "--engine deployment --superlink 127.0.0.1:8 --out out"
    ran = socflower(f"run case.toml {far} {options}")
    line = ran.err.splitlines()[-1]
    assert ran.status == (130 if isinstance(error, KeyboardInterrupt) else 1)
    if advice is None:
        assert "fresh" not in line and "same command" not in line
    else:
        assert advised(line) == advice and f" {folder} on the SuperLink's machine" in line


def test_without_checkpoints_nothing_is_advised(tmp_path: Path) -> None:
    for fresh in (False, True):
        assert kept_line(CheckpointFolder(tmp_path), fresh=fresh) == ""
    assert jobs.remotely_kept_line(DeploymentOptions(superlink="127.0.0.1:8")) == ""
