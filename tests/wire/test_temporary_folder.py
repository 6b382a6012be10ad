"""Temporary folders: whatever ends their process, they do not stay for ever, and nobody loses one that is in use."""

import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from socflower.wire.folders import remove_abandoned, temporary_folder

HOLDER = """\
import sys, time
from pathlib import Path
from socflower.wire.folders import temporary_folder
with temporary_folder(within=Path(sys.argv[1])) as folder:
    (folder / "file").write_text("x")
    print(folder, flush=True)
    time.sleep(300)
"""


def test_a_folder_goes_with_its_use_also_after_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="ours"), temporary_folder(within=tmp_path) as folder:
        (folder / "sub").mkdir()
        (folder / "sub" / "file").write_text("x")
        raise ValueError("ours")
    assert not list(tmp_path.iterdir())


def test_what_a_killed_process_left_goes_with_the_next_folder_and_not_before(
    tmp_path: Path,
) -> None:
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    try:
        assert holder.stdout is not None
        held = Path(holder.stdout.readline().strip())
        with temporary_folder(within=tmp_path):
            assert (held / "file").read_text() == "x"
        os.kill(holder.pid, signal.SIGKILL)
    finally:
        holder.kill()
        holder.communicate()
    assert (held / "file").exists()
    with temporary_folder(within=tmp_path) as folder:
        assert list(tmp_path.iterdir()) == [folder]


def test_links_and_folders_of_another_kind_are_left_alone(tmp_path: Path) -> None:
    kept, parent = tmp_path / "kept", tmp_path / "parent"
    (kept / "inside").mkdir(parents=True)
    (parent / "socflower-other").mkdir(parents=True)
    (parent / "elsewhere.locked").mkdir()
    (parent / "socflower-link.locked").symlink_to(kept)
    (parent / "socflower-file.locked").write_text("x")
    remove_abandoned(parent)
    assert (kept / "inside").is_dir()
    assert len(list(parent.iterdir())) == 4


def test_folders_made_and_swept_at_the_same_time_never_lose_a_file(tmp_path: Path) -> None:
    def use(number: int) -> None:
        with temporary_folder(within=tmp_path) as folder:
            (folder / "file").write_text(str(number))
            remove_abandoned(tmp_path)
            assert (folder / "file").read_text() == str(number)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(use, range(200)))
    assert not list(tmp_path.iterdir())
