"""Files that are whole or not there: written in one step, with a digest over every byte that is read back."""

import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

_MAGIC = "socflower-sealed"


class DamagedFile(Exception):
    """A sealed file that is torn, changed or no sealed file at all; the text names it."""


def write_sealed(path: Path, header: Mapping[str, Any], payload: Iterable[bytes | memoryview] = (), *,
                 sync_folder: bool = True) -> None:
    """Write `header` (JSON) and the bytes of `payload`; whatever happens, `path` holds the old file or the new one.

    The first line has the SHA-256 and the length of all that follows. `sync_folder` False spares a wait for the disk
    where another file is written into the folder right after. Raises `OSError` where it cannot be written.
    """
    pieces = [json.dumps(header, separators=(",", ":")).encode() + b"\n", *payload]
    digest = hashlib.sha256()
    for piece in pieces:
        digest.update(piece)
    first_line = f"{_MAGIC} {digest.hexdigest()} {sum(memoryview(piece).nbytes for piece in pieces)}\n"
    write_whole(path, (first_line.encode(), *pieces))
    if sync_folder:
        _sync_folder(path.parent)


def write_whole(path: Path, pieces: Iterable[bytes | memoryview], *, mode: int = 0o666) -> None:
    """Write a file that is whole or not there, and at no time readable by more than `mode` and the umask allow.

    Raises `OSError` where it cannot be written.
    """
    partial = path.with_name(f".{path.name}.{os.getpid()}.part")
    partial.unlink(missing_ok=True)  # of a process that was killed, and had this number
    try:
        with os.fdopen(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as stream:
            stream.writelines(pieces)
            stream.flush()
            # Without this a power failure can leave the new name on an empty file.
            os.fsync(stream.fileno())
        os.replace(partial, path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def read_sealed(path: Path) -> tuple[dict[str, Any], memoryview]:
    """Return header and payload; `DamagedFile` if a byte is missing, too much or not what was written."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise DamagedFile(f"{path.name} cannot be read ({error.strerror})") from None
    first_line, newline, rest = content.partition(b"\n")
    expected = f"{_MAGIC} {hashlib.sha256(rest).hexdigest()} {len(rest)}".encode()
    if not newline or first_line != expected:
        raise DamagedFile(f"{path.name} is torn or damaged (its digest does not fit)")
    header, _, _ = rest.partition(b"\n")
    return json.loads(header), memoryview(rest)[len(header) + 1:]


def remove_partial(folder: Path) -> None:
    """Remove what a writer that was killed left half-written."""
    for partial in folder.glob(".*.part"):
        partial.unlink(missing_ok=True)


def _sync_folder(folder: Path) -> None:
    with suppress(OSError):  # not every file system lets a folder be synced
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
