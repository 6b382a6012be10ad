"""Temporary folders that do not stay: removed at the end, and after a process that was killed by the next one.

A process holds a lock on its folder, which the kernel releases whatever ends the process. Whoever makes a folder
in the same place removes those that nobody holds any more.
"""

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_SUFFIX = ".locked"  # only folders of this kind are ever removed for another process
_TRIES = 100


@contextmanager
def temporary_folder(prefix: str = "socflower-", *, within: Path | None = None) -> Iterator[Path]:
    """Yield an empty folder in `within`, or where the system keeps temporary files; remove it at the end.

    Raises `OSError` where it cannot be made.
    """
    parent = Path(tempfile.gettempdir()) if within is None else within
    remove_abandoned(parent, prefix)
    folder, descriptor = _make(parent, prefix)
    try:
        yield folder
    finally:
        # Processes that are about to end may still write there; what they leave, the next run removes.
        shutil.rmtree(folder, ignore_errors=True)
        os.close(descriptor)


def remove_abandoned(parent: Path, prefix: str = "socflower-") -> None:
    """Remove this user's folders of the kind in `parent` whose processes are gone."""
    for folder in parent.glob(f"{prefix}*{_SUFFIX}"):
        try:
            # No link is followed: in a folder that all may write to, anybody may have put it there.
            descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        except OSError:  # gone, or somebody else's
            continue
        try:
            if os.fstat(descriptor).st_uid == os.getuid():
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
        except OSError:  # in use, or on a file system without locks
            pass
        finally:
            os.close(descriptor)


def _make(parent: Path, prefix: str) -> tuple[Path, int]:
    """Return a new folder and the descriptor that holds its lock."""
    for _ in range(_TRIES):
        folder = Path(tempfile.mkdtemp(prefix=prefix, suffix=_SUFFIX, dir=parent))
        try:
            descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        except FileNotFoundError:  # another process took it for abandoned before the lock was ours
            continue
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            continue
        except OSError:  # no locks on this file system; then nobody else can lock it either, so it is left alone
            return folder, descriptor
        if folder.is_dir():
            return folder, descriptor
        os.close(descriptor)
    raise FileExistsError(f"{parent}: no folder could be made and locked in {_TRIES} tries")
