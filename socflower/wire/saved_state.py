"""Files of saved state, written atomically with a digest of all bytes, and arrays as bytes for them."""

import hashlib
import io
import json
import os
import zipfile
import zlib
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from socflower.errors import ConfigError

_MAGIC = "socflower-sealed"


class DamagedFile(Exception):
    """A sealed file that is incomplete, changed or not a sealed file; the text names it."""


def write_sealed(path: Path, header: Mapping[str, Any], payload: Iterable[bytes | memoryview] = (), *,
                 sync_folder: bool = True) -> None:
    """Write `header` (JSON) and the bytes of `payload` atomically: `path` always holds the old file or the new one.

    The first line has the SHA-256 and the length of the rest. `sync_folder=False` avoids waiting for the disk where
    another file follows in the same folder. Raises `OSError` where the file cannot be written.
    """
    pieces = [json.dumps(header, separators=(",", ":")).encode() + b"\n", *payload]
    digest = hashlib.sha256()
    for piece in pieces:
        digest.update(piece)
    first_line = f"{_MAGIC} {digest.hexdigest()} {sum(memoryview(piece).nbytes for piece in pieces)}\n"
    write_atomically(path, (first_line.encode(), *pieces))
    if sync_folder:
        _sync_folder(path.parent)


def write_atomically(path: Path, pieces: Iterable[bytes | memoryview], *, mode: int = 0o666) -> None:
    """Write a file atomically, at no time readable beyond `mode` and the umask.

    Raises `OSError` where it cannot be written.
    """
    partial = path.with_name(f".{path.name}.{os.getpid()}.part")
    partial.unlink(missing_ok=True)  # of a killed process with the same id
    try:
        with os.fdopen(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as stream:
            stream.writelines(pieces)
            stream.flush()
            # Without this a power failure may leave an empty file under the new name.
            os.fsync(stream.fileno())
        os.replace(partial, path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def read_sealed(path: Path) -> tuple[dict[str, Any], memoryview]:
    """Return header and payload; `DamagedFile` if any byte is missing, added or changed."""
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
    """Remove the partial files of killed writers."""
    for partial in folder.glob(".*.part"):
        partial.unlink(missing_ok=True)


def _sync_folder(folder: Path) -> None:
    with suppress(OSError):  # not every file system lets a folder be synced
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


_HEADER = "header"


def to_bytes(kind: str, header: Mapping[str, Any], arrays: Mapping[str, NDArray[Any]]) -> bytes:
    """Return `header` (JSON) and `arrays` as bytes that only `from_bytes` of the same `kind` accepts."""
    text = json.dumps({**header, "kind": kind}).encode()
    stream = io.BytesIO()
    members: dict[str, Any] = {f"array {key}": array for key, array in arrays.items()}
    members[_HEADER] = np.frombuffer(text, np.uint8)
    np.savez(stream, **members)
    return stream.getvalue()


def from_bytes(kind: str, saved: bytes) -> tuple[dict[str, Any], dict[str, NDArray[Any]]]:
    """Return header and arrays; `ConfigError` for damaged bytes or another kind. Never unpickles."""
    try:
        with np.load(io.BytesIO(saved), allow_pickle=False) as archive:
            header = json.loads(archive[_HEADER].tobytes())
            arrays = {key.removeprefix("array "): archive[key] for key in archive.files if key != _HEADER}
        found = header.pop("kind")
    except (ValueError, TypeError, AttributeError, KeyError, OSError, EOFError, NotImplementedError, RuntimeError,
            zipfile.BadZipFile, zlib.error) as error:
        raise ConfigError(f"saved {kind}: is damaged ({type(error).__name__}); go back to an earlier checkpoint, or "
                          "start anew") from None
    if found != kind:
        raise ConfigError(f"saved {kind}: is of {found}; restore what was saved by the same part")
    return header, arrays
