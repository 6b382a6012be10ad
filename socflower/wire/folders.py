"""Folders that one process uses at a time, and temporary folders that are removed.

A process holds a lock on its folder, which the kernel releases at the end of the process. Creating a temporary folder
removes those in the same place whose lock is free.
"""

import errno
import fcntl
import math
import os
import shutil
import signal
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from types import TracebackType

from filelock import FileLock, Timeout

from socflower.errors import ConfigError

LOCK_FILE = ".socflower.lock"
UNFINISHED = ".socflower-"
"""Prefix of folders with unfinished files."""

_POLL_S = 0.1

_ENDING_S = 5.0
"""How long to wait for a lock whose holder has ended or is about to; on a busy machine it took up to 0.05 s."""

_ENDING_POLL_S = 0.01
_SIGNS_PER_LEASE = 10
# A flag in /proc/PID/stat: the process runs the kernel's code that ends it.
_PF_EXITING = 0x4


class FolderLock:
    """Locks the file `path` until `release` or the end of this process; the file contains its holder's process id.

    Parameters
    ----------
    path : Path
        The lock's file, in or next to the protected folder. It is created, and removed by `release`; the file of a
        killed process locks nothing.
    what : str
        Prefix of errors: the option and the folder that are locked.
    wait_s : float
        How long to wait for a holder, such as one that is about to end.
    on_wait : Callable
        Called with a line before a wait, and before a holder is ended.
    lease_s : float, optional
        The holder shows ten times in this time that it lives, by the file's time of modification. A waiting process
        kills a holder that has shown nothing for so long, such as one that is stopped or hangs: it can then write
        nothing more, and the kernel releases the lock. Only a process of this machine can be killed; without a lease
        none is.

    Raises `ConfigError`, which names the holder, if another process or another lock of this one holds the file; and if
    the file cannot be made or its file system has no locks.

    A killed holder keeps the lock for a moment: until the kernel has closed its files, and until each child that it was
    starting runs its own program, because a forked child has a copy of the descriptor until then. So the constructor
    waits up to 5 s for a lock whose holder is no longer running.
    """

    def __init__(
        self,
        path: Path,
        what: str,
        *,
        wait_s: float = 0.0,
        on_wait: Callable[[str], None] = lambda line: None,
        lease_s: float | None = None,
    ) -> None:
        self.path = path
        # A fallback to a lock by existence would outlive a killed process.
        self._lock = FileLock(
            path, thread_local=False, fallback_to_soft=False, poll_interval=_POLL_S
        )
        try:
            try:
                self._lock.acquire(timeout=0)
            except Timeout:
                self._acquire_from_holder(what, wait_s, on_wait, lease_s)
            path.write_text(f"{os.getpid()}\n")
        except OSError as error:
            self._lock.release()
            has_no_locks = error.errno in (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP)
            cause = (
                "its file system has no locks" if has_no_locks else f"cannot write in {path.parent}"
            )
            raise ConfigError(f"{what}: {cause} ({error.strerror}); name another folder") from None
        self._released = threading.Event()
        if lease_s is not None:
            # The thread must not keep this lock from being collected.
            weakref.finalize(self, self._released.set)
            threading.Thread(
                target=_show_life,
                args=(path, lease_s / _SIGNS_PER_LEASE, self._released),
                name="folder-lease",
                daemon=True,
            ).start()

    def _acquire_from_holder(
        self, what: str, wait_s: float, on_wait: Callable[[str], None], lease_s: float | None
    ) -> None:
        deadline_s = time.monotonic() + _ENDING_S
        ended = True
        # One wait at least: for an instant a killed process looks like any other.
        while ended:
            with suppress(Timeout):
                self._lock.acquire(timeout=_ENDING_POLL_S, poll_interval=_ENDING_POLL_S)
                return
            # The file may still name an earlier holder that was killed, so it is read at every poll.
            ended = is_ending(self._holder_pid())
            if time.monotonic() >= deadline_s:
                break
        # A holder may not have written its id yet.
        pid = self._holder_pid()
        holder = f"process {pid}" if pid else "another process"
        busy = f"{what}: {holder} is at work there"
        if ended:
            busy = f"{what}: {holder} has ended, but a process that it started holds {self.path}"
        if wait_s:
            on_wait(f"{busy}; waiting for its end")
        silence = Silence(math.inf if lease_s is None else lease_s)
        end_s = time.monotonic() + wait_s
        while True:
            with suppress(Timeout):
                self._lock.acquire(timeout=min(wait_s, _POLL_S))
                return
            if time.monotonic() >= end_s:
                raise ConfigError(f"{busy}; wait until it ends, or name another one")
            sign = _modified(self.path)
            if silence.lasts(sign, time.monotonic()):
                self._end_holder(f"{what}: no sign of life for {lease_s:g} s of", sign, on_wait)
                silence = Silence(math.inf)

    def _end_holder(self, what: str, sign: int | None, on_wait: Callable[[str], None]) -> None:
        """Kill the holder whose last sign is `sign`, if it is a process of this machine."""
        pid = self._holder_pid()
        if _modified(self.path) != sign:
            # Another process that waited has ended the holder, and is the holder now.
            return
        # AttributeError: this system has no descriptors of processes.
        with suppress(OSError, AttributeError):
            # The descriptor stays that of the process which is found to hold the lock.
            process = os.pidfd_open(pid or 0)
            try:
                if pid != os.getpid() and _has_locked(pid, self.path):
                    on_wait(f"{what} process {pid}; ending it")
                    signal.pidfd_send_signal(process, signal.SIGKILL)
                    return
            finally:
                os.close(process)
        on_wait(f"{what} process {pid}, which cannot be ended from here; end it")

    def _holder_pid(self) -> int | None:
        try:
            return int(self.path.read_text("utf-8"))
        except (OSError, ValueError):
            return None

    def release(self) -> None:
        """Remove the file and release the lock; a second call does nothing."""
        if self._lock.is_locked:
            self._released.set()
            # Before the release, after which it may belong to another process. A process that opened it before locks
            # a file without a name, which `filelock` notices and tries again.
            self.path.unlink(missing_ok=True)
            self._lock.release()

    def __enter__(self) -> "FolderLock":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.release()


class Silence:
    """Tells when a sign has not changed for `longest_s` in which it was watched.

    Between two looks at most a second counts: in a longer pause this process was stopped, perhaps with the other one.
    """

    def __init__(self, longest_s: float) -> None:
        self._longest_s = longest_s
        self._sign: object = None
        self._watched_s = self._looked_s = 0.0

    def lasts(self, sign: object, now_s: float) -> bool:
        """Return whether the silence has lasted for so long at `now_s`, when the sign is `sign`."""
        if sign == self._sign:
            self._watched_s += min(now_s - self._looked_s, 1.0)
        else:
            self._sign, self._watched_s = sign, 0.0
        self._looked_s = now_s
        return self._watched_s >= self._longest_s


def _show_life(path: Path, interval_s: float, released: threading.Event) -> None:
    while not released.wait(interval_s):
        with suppress(OSError):
            os.utime(path)


def _modified(path: Path) -> int | None:
    """Return the time of modification in nanoseconds; None for a missing file."""
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return None


def _has_locked(pid: int | None, path: Path) -> bool:
    """Return whether the kernel lists a process as the holder of a file's lock."""
    holder = ("FLOCK", str(pid), str(path.stat().st_ino))
    # As in "1: FLOCK ADVISORY WRITE 31983 fe:00:2147112 0 EOF"; a process that waits has an arrow before FLOCK.
    locks = map(str.split, Path("/proc/locks").read_text("utf-8").splitlines())
    return any((lock[1], lock[4], lock[5].rpartition(":")[2]) == holder for lock in locks)


def is_ending(pid: int | None) -> bool:
    """Return whether a process is known to have ended or to be about to: its id is free, or it has begun to exit."""
    if pid is None or pid <= 0:
        return False
    if _is_free(pid):
        return True
    try:
        # The second field, a name in brackets, may have spaces and brackets.
        fields = Path(f"/proc/{pid}/stat").read_text("utf-8", "replace").rpartition(")")[2].split()
        status = Path(f"/proc/{pid}/status").read_text("utf-8", "replace")
    except OSError:
        # It ended just now, or this system shows no such files.
        return _is_free(pid)
    is_killed = False
    for line in status.splitlines():
        if line.startswith(("SigPnd:", "ShdPnd:")):
            signals = int(line.split()[1], 16)
            is_killed |= bool(signals >> (signal.SIGKILL - 1) & 1)
    return is_killed or fields[0] in "ZX" or bool(int(fields[6]) & _PF_EXITING)


def _is_free(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except OSError:
        # It is another user's process.
        pass
    return False


def _require_folder(folder: Path, what: str) -> None:
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"{what}: is a file; name a folder")


def _unwritable(folder: Path, what: str, error: OSError) -> ConfigError:
    return ConfigError(f"{what}: cannot write in {folder} ({error.strerror}); name another folder")


@contextmanager
def exclusive_folder(folder: Path, what: str) -> Iterator[None]:
    """Lock a folder for this process; a missing one is created, and removed after an error if empty.

    Raises `ConfigError`, which begins with `what`, as `FolderLock` does, and for a file of that name.
    """
    _require_folder(folder, what)
    missing = [each for each in (folder, *folder.parents) if not each.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _unwritable(folder, what, error) from None
    try:
        with FolderLock(folder / LOCK_FILE, what):
            yield
    except BaseException:
        with suppress(OSError):
            for each in missing:
                each.rmdir()
        raise


# Only folders with this suffix are removed on behalf of another process.
_SUFFIX = ".locked"
_TRIES = 100


@contextmanager
def temporary_folder(prefix: str = "socflower-", *, within: Path | None = None) -> Iterator[Path]:
    """Yield an empty folder in `within`, or among the system's temporary files; remove it at the end.

    Raises `OSError` if it cannot be made.
    """
    parent = Path(tempfile.gettempdir()) if within is None else within
    remove_abandoned(parent, prefix)
    folder, descriptor = _make(parent, prefix)
    try:
        yield folder
    finally:
        # Processes that are about to end may still write there; the next run removes their files.
        shutil.rmtree(folder, ignore_errors=True)
        os.close(descriptor)


@contextmanager
def new_folder(out: Path, *, within: Path | None = None) -> Iterator[Path]:
    """Yield an empty folder whose files move to `out` at the end; after an error `out` is unchanged.

    It is created in `within`, by default in `out` or its nearest existing parent.
    """
    what = f"--out {out}"
    _require_folder(out, what)
    # On the file system of `out` the move is a rename, and write errors appear before training.
    existing = (parent for parent in (out, *out.parents) if parent.exists())
    nearest = within or next(existing, Path("."))
    with ExitStack() as stack:
        try:
            temporary = stack.enter_context(temporary_folder(UNFINISHED, within=nearest))
        except OSError as error:
            raise _unwritable(nearest, what, error) from None
        yield temporary
        out.mkdir(parents=True, exist_ok=True)
        for entry in temporary.iterdir():
            target = out / entry.name
            if target.is_dir():
                shutil.rmtree(target)
            entry.replace(target)


def remove_abandoned(parent: Path, prefix: str = "socflower-") -> None:
    """Remove this user's temporary folders in `parent` whose processes have ended."""
    for folder in parent.glob(f"{prefix}*{_SUFFIX}"):
        try:
            # No link is followed: in a world-writable folder any user may have created it.
            descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        except OSError:
            # It was removed meanwhile, or is another user's.
            continue
        try:
            if os.fstat(descriptor).st_uid == os.getuid():
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
        except OSError:
            # It is in use, or on a file system without locks.
            pass
        finally:
            os.close(descriptor)


def _make(parent: Path, prefix: str) -> tuple[Path, int]:
    """Return a new folder and the descriptor that holds its lock."""
    for _ in range(_TRIES):
        folder = Path(tempfile.mkdtemp(prefix=prefix, suffix=_SUFFIX, dir=parent))
        try:
            descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        except FileNotFoundError:
            # Another process removed it as abandoned before it was locked here.
            continue
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            continue
        except OSError:
            # This file system has no locks, so no other process can lock the folder to remove it.
            return folder, descriptor
        if folder.is_dir():
            return folder, descriptor
        os.close(descriptor)
    raise FileExistsError(f"{parent}: no folder could be made and locked in {_TRIES} tries")
