"""A folder has one process at a time, and none is kept out by one that is gone."""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest

from socflower.errors import ConfigError
from socflower.wire import folders
from socflower.wire.folders import LOCK_FILE, FolderLock, exclusive_folder
from tests.one_line import one_line, refused

HOLD = """\
import sys
from pathlib import Path
from socflower.wire.folders import exclusive_folder
with exclusive_folder(Path(sys.argv[1]), "--out there"):
    print("held", flush=True)
    sys.stdin.readline()
"""


class Holder:
    """Another process that uses a folder until it is told to end, or killed."""

    def __init__(self, folder: Path) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", HOLD, str(folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == "held\n"

    def end(self) -> None:
        self.process.communicate("end\n", timeout=60)

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate(timeout=60)


def test_a_second_process_is_told_who_is_there_until_the_first_is_killed(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "out"
    holder = Holder(folder)
    try:
        second = exclusive_folder(folder, "--out here")
        refused(second.__enter__, "--out here", holder.process.pid)
        assert (folder / LOCK_FILE).exists(), "the refused one took the lock away"
    finally:
        holder.kill()
    assert (folder / LOCK_FILE).exists()
    with exclusive_folder(folder, "--out here"):
        assert int((folder / LOCK_FILE).read_text()) == os.getpid()
    assert list(folder.iterdir()) == []


def test_a_holder_that_ends_is_waited_for(tmp_path: Path) -> None:
    holder, said = Holder(tmp_path), list[str]()

    def on_wait(line: str) -> None:
        said.append(line)
        holder.end()

    with FolderLock(tmp_path / LOCK_FILE, "kept", wait_s=60.0, on_wait=on_wait):
        (line,) = said
        one_line(line, "kept", holder.process.pid)


HANGS = """\
import sys
from pathlib import Path
from socflower.wire.folders import FolderLock
lock = FolderLock(Path(sys.argv[1]), "the holder", lease_s=float(sys.argv[2]))
print("held", flush=True)
sys.stdin.readline()
"""


@pytest.fixture
def leaseholder(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """Another process that holds a lock, and shows ten times in a second that it lives."""
    process = subprocess.Popen(
        [sys.executable, "-c", HANGS, str(tmp_path / LOCK_FILE), "1"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None and process.stdout.readline() == "held\n"
    yield process
    process.kill()
    process.communicate(timeout=60)


def test_a_holder_that_hangs_is_ended_before_another_process_writes(
    tmp_path: Path, leaseholder: subprocess.Popen[str]
) -> None:
    """So it writes nothing more, whenever it would have been continued."""
    leaseholder.send_signal(signal.SIGSTOP)
    said = list[str]()
    with FolderLock(tmp_path / LOCK_FILE, "kept", wait_s=60.0, on_wait=said.append, lease_s=1.0):
        assert leaseholder.wait(timeout=60) == -signal.SIGKILL
    one_line(said[-1], "kept", leaseholder.pid)


def test_a_holder_that_lives_is_not_ended_however_long_it_works(
    tmp_path: Path, leaseholder: subprocess.Popen[str]
) -> None:
    refused(
        lambda: FolderLock(tmp_path / LOCK_FILE, "kept", wait_s=3.0, lease_s=1.0),
        "kept",
        leaseholder.pid,
    )
    assert leaseholder.poll() is None


def test_without_a_lease_a_stopped_holder_is_left_alone(
    tmp_path: Path, leaseholder: subprocess.Popen[str]
) -> None:
    leaseholder.send_signal(signal.SIGSTOP)
    refused(lambda: FolderLock(tmp_path / LOCK_FILE, "kept", wait_s=2.0), "kept", leaseholder.pid)
    assert leaseholder.poll() is None


def test_only_the_holder_itself_is_ended(
    tmp_path: Path, leaseholder: subprocess.Popen[str]
) -> None:
    """The file may name another process: a number of another container, or one given again."""
    leaseholder.send_signal(signal.SIGSTOP)
    bystander = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        (tmp_path / LOCK_FILE).write_text(f"{bystander.pid}\n")
        said = list[str]()
        refused(
            lambda: FolderLock(
                tmp_path / LOCK_FILE, "kept", wait_s=3.0, on_wait=said.append, lease_s=1.0
            ),
            "kept",
            bystander.pid,
        )
        one_line(said[-1], "kept", bystander.pid)
        assert bystander.poll() is None and leaseholder.poll() is None
    finally:
        bystander.communicate(timeout=60)


def test_silence_is_counted_only_while_it_is_watched() -> None:
    """A process that was itself stopped, with its machine, has not seen what the holder showed meanwhile."""
    silence = folders.Silence(10.0)
    assert not any(silence.lasts("a", now_s) for now_s in (0.0, 1.0, 1000.0, 1001.0))
    assert not any(silence.lasts("a", 1001.0 + step) for step in range(1, 6))
    assert any(silence.lasts("a", 1006.0 + step) for step in range(10))
    assert not silence.lasts("b", 1017.0)


ENDED = """\
import ctypes, fcntl, os, subprocess, sys, threading
descriptor = os.open(sys.argv[1], os.O_RDWR | os.O_CREAT)
fcntl.flock(descriptor, fcntl.LOCK_EX)
os.write(descriptor, f"{os.getpid()}\\n".encode())
if sys.argv[2] == "child":
    # As a child has the descriptor between fork and exec, when the daemon starts a command.
    subprocess.Popen([sys.executable, "-c", "print('held', flush=True); input()"], pass_fds=[descriptor])
else:
    threading.Thread(target=lambda: (input(), os._exit(0))).start()
    print("held", flush=True)
    ctypes.CDLL(None).pthread_exit(None)  # the process is shown as a zombie, and its files are open
"""


@pytest.mark.parametrize("keeper", ["child", "thread"])
def test_a_lock_that_outlives_its_holder_for_a_moment_is_waited_for(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    keeper: str,
) -> None:
    path, tries = tmp_path / LOCK_FILE, [0]
    holder = subprocess.Popen(
        [sys.executable, "-c", ENDED, str(path), keeper],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert (
        holder.stdin is not None
        and holder.stdout is not None
        and holder.stdout.readline() == "held\n"
    )
    if keeper == "child":
        holder.kill()
        holder.wait(timeout=60)
    else:
        while not folders.is_ending(holder.pid):
            # The thread may be faster than the main thread's end.
            pass

    class EndsLate(folders.FileLock):  # type: ignore[misc]
        def acquire(self, *arguments: Any, **settings: Any) -> Any:
            tries[0] += 1
            if tries[0] == 5:
                # The child's end too, since it has the same output.
                holder.communicate("end\n", timeout=60)
            return super().acquire(*arguments, **settings)

    try:
        with monkeypatch.context() as patched:
            patched.setattr(folders, "_ENDING_S", 0.0)
            refused(lambda: FolderLock(path, "fans"), "fans", holder.pid, "ended")
        monkeypatch.setattr(folders, "_ENDING_S", 60.0)
        monkeypatch.setattr(folders, "FileLock", EndsLate)
        with FolderLock(path, "fans"):
            assert tries[0] >= 5 and int(path.read_text()) == os.getpid()
    finally:
        if holder.returncode is None or not holder.stdin.closed:
            holder.communicate("end\n", timeout=60)


def test_a_process_ends_from_its_kill_on_and_never_before() -> None:
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    assert not folders.is_ending(process.pid) and not folders.is_ending(os.getpid())
    process.kill()
    while not folders.is_ending(process.pid):
        # At the latest as a zombie, since nobody has waited for it.
        pass
    process.communicate(timeout=60)
    assert folders.is_ending(process.pid)
    assert not any(map(folders.is_ending, (None, 0, -1, 1)))


def test_two_of_one_process_keep_each_other_out(tmp_path: Path) -> None:
    with FolderLock(tmp_path / LOCK_FILE, "first"):
        refused(lambda: FolderLock(tmp_path / LOCK_FILE, "second"), "second", os.getpid())


def test_a_fork_server_and_its_workers_do_not_keep_the_lock(tmp_path: Path) -> None:
    """They are started while the folder is held, and may outlive whoever held it."""
    lock = FolderLock(tmp_path / LOCK_FILE, "first")
    worker = get_context("forkserver").Process(target=signal.pause)
    worker.start()
    try:
        lock.release()
        FolderLock(tmp_path / LOCK_FILE, "second").release()
    finally:
        worker.kill()
        worker.join()


def test_at_no_time_do_two_hold_it_though_files_come_and_go(tmp_path: Path) -> None:
    """Each holder removes the file that others may have opened already."""
    inside, most, held = [0], [0], [0]

    def use() -> None:
        for _ in range(100):
            try:
                lock = FolderLock(tmp_path / LOCK_FILE, "lock")
            except ConfigError:
                continue
            inside[0] += 1
            most[0] = max(most[0], inside[0])
            held[0] += 1
            inside[0] -= 1
            lock.release()

    threads = [threading.Thread(target=use) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == [1] and held[0] > 0


def test_folders_that_were_made_in_vain_go_again(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError), exclusive_folder(tmp_path / "a" / "b", "--out a/b"):
        raise RuntimeError
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(RuntimeError), exclusive_folder(tmp_path / "a" / "b", "--out a/b"):
        (tmp_path / "a" / "kept").touch()
        raise RuntimeError
    assert [path.name for path in tmp_path.rglob("*")] == ["a", "kept"]


@pytest.mark.parametrize("name", ["file", "file/below"])
def test_what_cannot_be_a_folder_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / "file").touch()
    refused(exclusive_folder(tmp_path / name, "--out x").__enter__, "--out x", "file")
