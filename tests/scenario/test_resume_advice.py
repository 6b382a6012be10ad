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
from socflower.scenario import runner
from socflower.scenario.runner import kept_line, run_to_folder
from socflower.scenario.schema.config import EventConfig
from tests.command_line import Socflower
from tests.scenario.small_runs import Reference, small, without_drawing
from tests.scenario.test_resume import assert_ends_as, resume, stop_after

pytestmark = pytest.mark.usefixtures("on_few_digits")


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


@pytest.mark.parametrize("name", SITUATIONS)
def test_what_passes_is_waited_for_and_the_same_command_resumes(
    name: str,
    reference: Reference,
    tmp_path: Path,
) -> None:
    """After the cause is gone the run ends as one that was never interrupted, and has lost no round."""
    scenario, out = small(interval=0.25), tmp_path / "out"
    stop_after(scenario, out, 2)
    with SITUATIONS[name](out), pytest.raises(SocflowerError) as caught:
        resume(scenario, out)
    assert advised(str(caught.value)) == "same"
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
        with pytest.raises(SocflowerError) as caught:
            resume(scenario, tmp_path)
        assert advised(str(caught.value)) == "fresh" and "the same command" not in str(caught.value)
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
    with pytest.raises(TrainingFailed) as caught:
        resume(failing, tmp_path, fresh=fresh)
    advice = advised(str(caught.value))
    assert advice == ("same without --fresh" if fresh else "same")
    said: list[str] = []
    with pytest.raises(TrainingFailed):
        run_to_folder(
            failing,
            tmp_path,
            resumable=True,
            num_workers=0,
            on_notice=said.append,
            fresh=fresh and advice == "same",
        )
    assert said == [f"resuming {tmp_path} after round 2 of 4; --fresh starts anew"]


@pytest.mark.parametrize("fresh", [False, True])
def test_an_interrupted_command_says_which_command_resumes(
    fresh: bool,
    socflower: Socflower,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    scenario = tmp_path / "case.toml"
    scenario.write_text(
        "# Interrupted?\n[cluster]\nboards = 2\nsocs_per_board = 1\n[train]\nepochs = 1\n[strategy]\n"
        "groups = 2\nsync_interval_epochs = 0.5\n"
    )
    write = CheckpointFolder.write

    def interrupted(self: CheckpointFolder, *arguments: Any) -> None:
        write(self, *arguments)
        raise KeyboardInterrupt

    options = ("run", scenario, "--out", tmp_path / "out", "--workers", 0, "--json")
    with monkeypatch.context() as patch:
        patch.setattr(CheckpointFolder, "write", interrupted)
        ran = socflower(*options, *(["--fresh"] if fresh else []))
    assert ran.status == 130
    advice = advised(ran.err.splitlines()[-1])
    assert advice == ("same without --fresh" if fresh else "same")
    again = socflower(*options, *(["--fresh"] if fresh and advice == "same" else []))
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
    def run_scenario(*arguments: Any, **named_arguments: Any) -> None:
        raise error

    monkeypatch.setattr(runner, "run_scenario", run_scenario)
    scenario = tmp_path / "case.toml"
    scenario.write_text(
        "# Far away?\n[cluster]\nboards = 2\nsocs_per_board = 1\n[train]\nepochs = 2\n[strategy]\n"
        "groups = 2\nsync_interval_epochs = 1\n"
    )
    ran = socflower(
        "run",
        scenario,
        "--engine",
        "deployment",
        "--superlink",
        "127.0.0.1:8",
        "--out",
        tmp_path / "out",
        *(["--checkpoint-folder", folder] if folder else []),
        *(["--fresh"] if fresh else []),
    )
    line = ran.err.splitlines()[-1]
    assert ran.status == (130 if isinstance(error, KeyboardInterrupt) else 1)
    if advice is None:
        assert "fresh" not in line and "same command" not in line
    else:
        assert (
            advised(line) == advice
            and f"checkpoints are in {folder} on the SuperLink's machine" in line
        )


def test_without_checkpoints_nothing_is_advised(tmp_path: Path) -> None:
    assert (
        kept_line(CheckpointFolder(tmp_path), fresh=False)
        == kept_line(CheckpointFolder(tmp_path), fresh=True)
        == ""
    )
    assert runner.remotely_kept_line(DeploymentOptions(superlink="127.0.0.1:8")) == ""
