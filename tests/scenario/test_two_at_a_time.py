"""Two processes in one folder: the second is refused in one line, and nothing of the first is lost."""

import json
import os
import signal
from pathlib import Path

import pytest

from socflower.errors import ConfigError
from socflower.scenario.app.deployed import SCENARIO_FILE
from socflower.scenario.app.remote_main import BundledRunFolder
from socflower.scenario.schema.file import to_document
from socflower.wire.folders import LOCK_FILE, FolderLock
from tests.command_line import Ran, Socflower
from tests.engines.deployment.interrupted_runs import Runs, kill, wait_for
from tests.scenario.small_runs import small

HERE = f"process {os.getpid()} is at work there; wait until it ends, or name another one\n"


def is_refused(ran: Ran, begins: str, ends: str = HERE) -> bool:
    line = ran.err.startswith(f"error: {begins}") and ran.err.endswith(ends) and ran.err.count("\n") == 1
    return ran.status == 2 and ran.out == "" and line


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def test_a_second_run_into_a_folder_changes_nothing_for_the_first(socflower: Socflower, tmp_path: Path) -> None:
    """The first stands still while the second comes, is killed at last, and its run goes on from where it was."""
    runs = Runs(tmp_path, epochs=2)
    first = runs.start()
    try:
        wait_for(lambda: runs.newest() >= 1)
        os.killpg(first.pid, signal.SIGSTOP)
        before = contents(runs.out)
        assert LOCK_FILE in before and "result.json" not in before
        for options in ((), ("--fresh",), ("--set", "train.epochs=1")):
            second = socflower("run", runs.scenario, "--out", runs.out, "--workers", 0, "--json", *options)
            assert is_refused(second, f"--out {runs.out}: ", HERE.replace(str(os.getpid()), str(first.pid))), second.err
        assert contents(runs.out) == before
    finally:
        kill(first)
    assert "resuming" in runs.finish_here(socflower)
    assert len(runs.assert_as_uninterrupted()) == 1


def test_whatever_writes_into_a_folder_keeps_others_out(socflower: Socflower, tmp_path: Path) -> None:
    (tmp_path / "case.toml").write_text("[cluster]\nboards = [2]\n")
    (tmp_path / "app").mkdir()
    out = tmp_path / "shared"
    out.mkdir()
    with FolderLock(out / LOCK_FILE, "the first"):
        for command in (("run", "case.toml", "--workers", 0), ("compare", "case.toml", "--workers", 0),
                        ("run", "app", "--cluster", "case.toml", "--workers", 0), ("certificates", "host-1")):
            ran = socflower(*command, "--out", "shared", "--json")
            assert is_refused(ran, "--out "), ran.err
        assert [path.name for path in out.iterdir()] == [LOCK_FILE]


def test_a_comparison_and_a_run_of_one_of_its_strategies_keep_each_other_out(
    socflower: Socflower, tmp_path: Path,
) -> None:
    (tmp_path / "case.toml").write_text("[cluster]\nboards = [2]\n")
    (tmp_path / "both" / "sgd").mkdir(parents=True)
    with FolderLock(tmp_path / "both" / "sgd" / LOCK_FILE, "the run"):
        ran = socflower("compare", "case.toml", "--strategies", "sgd", "--out", "both", "--workers", 0, "--json")
        assert is_refused(ran, "--out both/sgd: "), ran.err
    assert [str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()] == ["case.toml"]


def test_two_profiles_into_one_file_keep_each_other_out(socflower: Socflower, tmp_path: Path) -> None:
    with FolderLock(tmp_path / ".here.toml.lock", "the first"):
        assert is_refused(socflower("profile", "--out", "here.toml", "--json"), "--out here.toml: ")
    assert list(tmp_path.iterdir()) == []


def test_the_checkpoints_of_a_run_elsewhere_have_one_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its ServerApp waits for the one before, which may have to find out that it was given up."""
    monkeypatch.setattr("socflower.scenario.app.remote_main._ENDING_S", 0.0)
    bundle, kept, lines = tmp_path / "bundle", tmp_path / "kept", list[str]()
    bundle.mkdir()
    kept.mkdir()
    (bundle / SCENARIO_FILE).write_text(json.dumps(to_document(small())))
    folder = BundledRunFolder(path=tmp_path / "run", bundle=bundle, kept=kept, fresh=False, print_line=lines.append)
    folder.path.mkdir()
    with FolderLock(kept / ".round-lock", "the first"), \
            pytest.raises(ConfigError, match=f"{kept}: process {os.getpid()} is at work there"):
        folder.read_checkpointing()
    checkpointing = folder.read_checkpointing()
    assert checkpointing is not None and checkpointing.kept.path == kept
    with pytest.raises(ConfigError, match="is at work there"):
        FolderLock(kept / ".round-lock", "a third")
    folder.write_outcome({"final_accuracy": 1.0})
    assert not kept.exists(), "after a run that ended well nothing of its checkpoints is left"
