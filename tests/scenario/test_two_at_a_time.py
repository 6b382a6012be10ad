"""Two processes in one folder: the second is refused in one line. That the first loses nothing: cli/test_ctrl_c.py."""

import json
import os
from pathlib import Path

import pytest

from socflower.engines.run_folder import OUTCOME
from socflower.errors import ConfigError
from socflower.scenario.app.deployed import SCENARIO_FILE
from socflower.scenario.app.remote_main import BundledRunFolder
from socflower.scenario.schema.file import to_document
from socflower.wire.folders import LOCK_FILE, FolderLock
from tests.command_line import Ran, Socflower
from tests.engines.deployment.interrupted_runs import refused_by
from tests.scenario.small_runs import small


def is_refused(ran: Ran, begins: str) -> None:
    assert refused_by(ran, os.getpid(), begins), ran.err


def test_whatever_writes_into_a_folder_keeps_others_out(
    socflower: Socflower, tmp_path: Path
) -> None:
    (tmp_path / "case.toml").write_text("[cluster]\nboards = [2]\n")
    (tmp_path / "app").mkdir()
    out = tmp_path / "shared"
    out.mkdir()
    with FolderLock(out / LOCK_FILE, "the first"):
        for command in (
            "run case.toml --workers 0",
            "compare case.toml --workers 0",
            "run app --cluster case.toml --workers 0",
            "certificates host-1",
        ):
            is_refused(socflower(f"{command} --out shared --json"), "--out ")
        assert [path.name for path in out.iterdir()] == [LOCK_FILE]


def test_a_comparison_and_a_run_of_one_of_its_strategies_keep_each_other_out(
    socflower: Socflower,
    tmp_path: Path,
) -> None:
    (tmp_path / "case.toml").write_text("[cluster]\nboards = [2]\n")
    (tmp_path / "both" / "sgd").mkdir(parents=True)
    with FolderLock(tmp_path / "both" / "sgd" / LOCK_FILE, "the run"):
        ran = socflower("compare case.toml --strategies sgd --out both --workers 0 --json")
        is_refused(ran, "--out both/sgd: ")
    assert [str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()] == [
        "case.toml"
    ]


def test_two_profiles_into_one_file_keep_each_other_out(
    socflower: Socflower, tmp_path: Path
) -> None:
    with FolderLock(tmp_path / ".here.toml.lock", "the first"):
        is_refused(socflower("profile --out here.toml --json"), "--out here.toml: ")
    assert list(tmp_path.iterdir()) == []


def test_the_checkpoints_of_a_run_elsewhere_have_one_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its ServerApp waits for the one before, which may have to find out that it was given up."""
    monkeypatch.setattr("socflower.scenario.app.remote_main._ENDING_S", 0.0)
    bundle, kept, lines = tmp_path / "bundle", tmp_path / "kept", list[str]()
    bundle.mkdir()
    kept.mkdir()
    (bundle / SCENARIO_FILE).write_text(json.dumps(to_document(small())))
    folder = BundledRunFolder(
        path=tmp_path / "run", bundle=bundle, kept=kept, fresh=False, print_line=lines.append
    )
    folder.path.mkdir()
    with (
        FolderLock(kept / ".round-lock", "the first"),
        pytest.raises(ConfigError, match=f"{kept}: process {os.getpid()} is at work there"),
    ):
        folder.read_checkpointing()
    checkpointing = folder.read_checkpointing()
    assert checkpointing is not None and checkpointing.kept.path == kept
    with pytest.raises(ConfigError, match="is at work there"):
        FolderLock(kept / ".round-lock", "a third")
    folder.write(OUTCOME, {"final_accuracy": 1.0})
    assert not kept.exists(), "after a run that ended well nothing of its checkpoints is left"
