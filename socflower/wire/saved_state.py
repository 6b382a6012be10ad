"""State that outlives its process: files written atomically, sealed entries, and stores that keep the last of them.

A sealed entry is one line with the SHA-256 and the length of the rest, one line of JSON, and a payload of bytes. The
JSON names the kind of state, its schema, the version that wrote it and its owner, so that `unseal` can refuse a
damaged, old or foreign file.
"""

import errno
import hashlib
import json
import os
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import psutil
from numpy.typing import NDArray

from socflower import __version__
from socflower.errors import ConfigError
from socflower.wire.arrays import MalformedBytes, pack_arrays, unpack_arrays
from socflower.wire.folders import FolderLock

T = TypeVar("T")
_MAGIC = b"socflower-sealed "
# How long to wait for another process that writes to the same store.
_WRITE_WAIT_S = 60.0


# ---------------------------------------------------------------------------------------------- atomic files
_being_written: set[Path] = set()
"""Partial files of this process's present writers. A killed process with the same id may have left others."""


@contextmanager
def atomic_file(path: Path, *, mode: int = 0o666) -> Iterator[BinaryIO]:
    """Yield a stream whose bytes are at `path` after the block: `path` always holds the old file or the whole new one.

    `mode` and the umask apply from the beginning. Raises `OSError` if it cannot be written; after any error `path` is
    unchanged.
    """
    partial = path.with_name(f".{path.name}.{os.getpid()}-{threading.get_native_id()}.part")
    # A killed process with the same ids may have left it.
    partial.unlink(missing_ok=True)
    _being_written.add(partial)
    try:
        descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
        with os.fdopen(descriptor, "wb") as stream:
            yield stream
            stream.flush()
            # Without this a power failure may leave an empty file under the new name.
            os.fsync(stream.fileno())
        os.replace(partial, path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    finally:
        _being_written.discard(partial)
    with suppress(OSError):
        # Not every file system lets a folder be synced.
        descriptor = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def write_atomically(
    path: Path, content: str | bytes | Iterable[bytes | memoryview], *, mode: int = 0o666
) -> None:
    """Write a text (UTF-8) or bytes by `atomic_file`."""
    pieces = content.encode() if isinstance(content, str) else content
    with atomic_file(path, mode=mode) as stream:
        stream.writelines([pieces] if isinstance(pieces, bytes) else pieces)


def remove_partial(folder: Path) -> None:
    """Remove the partial files of writers that were killed; those of running processes stay."""
    for partial in folder.glob(".*.part"):
        match = re.fullmatch(r"\..+\.(\d+)-\d+\.part", partial.name)
        if match is None or partial in _being_written:
            # Without a match it is a file of another program.
            continue
        pid = int(match[1])
        if pid == os.getpid() or not psutil.pid_exists(pid):
            partial.unlink(missing_ok=True)


# ---------------------------------------------------------------------------------------------- sealed entries
@dataclass(frozen=True, kw_only=True, slots=True)
class StateKind:
    """What all entries of a kind have in common."""

    # How errors call an entry.
    name: str
    # Raise it when the content changes.
    schema: int
    # What a user can do about an entry that cannot be used.
    remedy: str


class DamagedFile(ConfigError):
    """An entry that is missing, incomplete or changed, or not an entry; an earlier one may be intact."""

    def __init__(self, cause: str, remedy: str) -> None:
        super().__init__(f"{cause}; {remedy}")
        self.cause = cause


class UnreadableFile(ConfigError):
    """An entry that may be intact, but that this process cannot read at present."""

    def __init__(self, path: Path, error: OSError) -> None:
        super().__init__(
            f"{path} cannot be read ({error.strerror}); run the same command again when it can"
        )


_PASSING = {
    *(errno.EACCES, errno.EPERM, errno.EMFILE, errno.ENFILE),
    *(errno.ENOMEM, errno.ESTALE, errno.ETIMEDOUT),
}
"""Errors that may pass and do not mean damage: rights, too many open files, a file server that is away."""


def seal(
    kind: StateKind,
    state: Mapping[str, Any],
    payload: Iterable[bytes | memoryview] = (),
    *,
    owner: str = "",
    number: int = 0,
) -> list[bytes | memoryview]:
    """Return the pieces of an entry with `state` (JSON) and the bytes of `payload`; see `unseal`."""
    header = {
        "kind": kind.name,
        "schema": kind.schema,
        "version": __version__,
        "owner": owner,
        "number": number,
        "state": state,
    }
    pieces = [json.dumps(header, separators=(",", ":")).encode() + b"\n", *payload]
    digest = hashlib.sha256()
    for piece in pieces:
        digest.update(piece)
    num_bytes = sum(memoryview(piece).nbytes for piece in pieces)
    return [b"%s%s %d\n" % (_MAGIC, digest.hexdigest().encode(), num_bytes), *pieces]


def unseal(
    kind: StateKind,
    content: bytes,
    where: str,
    *,
    owner: str = "",
    number: int = 0,
) -> tuple[dict[str, Any], memoryview]:
    """Return state and payload of a whole entry of this kind, schema, owner and number.

    Raises `DamagedFile` if any byte is missing, added or changed, or if it is another entry under this one's name, and
    `ConfigError` for a whole entry of another kind, schema or owner. `where` begins each line.
    """
    first_line, _, _ = content.partition(b"\n")
    rest = memoryview(content)[len(first_line) + 1 :]
    if first_line != b"%s%s %d" % (_MAGIC, hashlib.sha256(rest).hexdigest().encode(), len(rest)):
        raise DamagedFile(f"{where} is damaged (its digest does not fit)", kind.remedy)
    line, _, _ = content[len(first_line) + 1 :].partition(b"\n")
    header: dict[str, Any] = json.loads(line)
    mismatch = _mismatch(header, kind, owner)
    if mismatch is not None:
        raise ConfigError(f"{where} {mismatch}, or {kind.remedy}")
    if header["number"] != number:
        raise DamagedFile(f"{where} is number {header['number']} under another name", kind.remedy)
    return header["state"], rest[len(line) + 1 :]


def _mismatch(header: Mapping[str, Any], kind: StateKind, owner: str) -> str | None:
    """Return why an undamaged entry cannot be used, and the first remedy."""
    schema, own = header["schema"], header["owner"]
    if header["kind"] != kind.name:
        return f"is of another kind ({header['kind']}, not {kind.name}); name another folder"
    if schema != kind.schema:
        age = "a newer" if schema > kind.schema else "an older"
        form = f"{header['version']}, schema {schema}, not {kind.schema}"
        return f"was written by {age} version of socflower ({form}); use that version"
    if own != owner:
        names = f"{own or 'nobody'}, not to {owner or 'nobody'}"
        return f"belongs to {names}; name another folder"
    return None


def read_sealed(
    path: Path, kind: StateKind, *, owner: str = "", number: int = 0
) -> tuple[dict[str, Any], memoryview]:
    """Return state and payload of an entry's file; raises as `unseal` does, and `UnreadableFile`."""
    try:
        content = path.read_bytes()
    except OSError as error:
        if error.errno in _PASSING:
            raise UnreadableFile(path, error) from None
        raise DamagedFile(f"{path} cannot be read ({error.strerror})", kind.remedy) from None
    return unseal(kind, content, str(path), owner=owner, number=number)


def to_bytes(kind: str, header: Mapping[str, Any], arrays: Mapping[str, NDArray[Any]]) -> bytes:
    """Return `header` (JSON) and `arrays` as bytes that only `from_bytes` of the same `kind` accepts."""
    return b"".join(seal(_part(kind), header, pack_arrays(arrays)))


def from_bytes(kind: str, saved: bytes) -> tuple[dict[str, Any], dict[str, NDArray[Any]]]:
    """Return header and arrays, which may be written to; `ConfigError` for damaged bytes or another kind."""
    header, payload = unseal(_part(kind), saved, f"saved {kind}:")
    try:
        return header, unpack_arrays(payload)
    except MalformedBytes as error:
        # The bytes were forged: a digest is not a signature.
        raise DamagedFile(f"saved {kind}: is damaged ({error})", _part(kind).remedy) from None


def _part(kind: str) -> StateKind:
    return StateKind(name=kind, schema=2, remedy="go back to an earlier checkpoint")


# ---------------------------------------------------------------------------------------------- stores
class StateStore:
    """The last entries of one kind in a folder, each a sealed file named by its number: a round, step or position.

    One process writes at a time: `write` holds the store's lock, and so does a store from `open` to `close`. The kernel
    releases the lock of a process that dies. Reading needs no lock, since files are replaced whole.

    Parameters
    ----------
    folder : Path
        Created by the first write. Stores with other prefixes may share it.
    kind : StateKind
        Entries of another kind or schema are an error.
    prefix, suffix : str
        A file is named `prefix`, the number, `suffix`.
    keep : int, optional
        How many entries are kept, up to the one just written; by default all. Later entries, of an attempt that got
        further, stay until they are written again.
    owner : str
        Entries of another owner are an error.
    """

    def __init__(
        self,
        folder: Path,
        kind: StateKind,
        *,
        prefix: str,
        suffix: str,
        keep: int | None = None,
        owner: str = "",
    ) -> None:
        self.folder, self.kind = folder, kind
        self._prefix, self._suffix, self._keep, self._owner = prefix, suffix, keep, owner
        self._lock: FolderLock | None = None

    def open(
        self,
        what: str,
        *,
        wait_s: float = 0.0,
        on_wait: Callable[[str], None] = lambda line: None,
        lease_s: float | None = None,
    ) -> None:
        """Create and lock the store until `close`, as `FolderLock` does; a second call does nothing."""
        if self._lock is None:
            self._lock = self._new_lock(what, wait_s, on_wait, lease_s)

    @property
    def is_open(self) -> bool:
        """Whether this store holds its lock."""
        return self._lock is not None

    def close(self) -> None:
        """Let others write."""
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    def path(self, number: int) -> Path:
        """Return the file of an entry, existing or not."""
        return self.folder / f"{self._prefix}{number:06d}{self._suffix}"

    def numbers(self) -> list[int]:
        """Return the numbers of the entries, intact or not, newest first; `ConfigError` for a file of another form."""
        found = []
        for name in self._names():
            number = name.removeprefix(self._prefix).removesuffix(self._suffix)
            if not number.isdecimal():
                raise ConfigError(
                    f"{self.folder / name} was not written by socflower; remove it, or {self.kind.remedy}"
                )
            found.append(int(number))
        return sorted(found, reverse=True)

    def write(
        self, number: int, state: Mapping[str, Any], payload: Iterable[bytes | memoryview] = ()
    ) -> None:
        """Write an entry, and remove those that are no longer kept.

        Raises `ConfigError` if it cannot be written; all others stay as they are.
        """
        path = self.path(number)
        pieces = seal(self.kind, state, payload, owner=self._owner, number=number)
        what = f"{self.kind.name} in {self.folder}"
        with nullcontext() if self._lock else self._new_lock(what, _WRITE_WAIT_S):
            try:
                write_atomically(path, pieces)
            except OSError as error:
                raise _unwritable(str(path), error, "make room, or name another folder") from None
            if self._keep is not None:
                earlier = [each for each in self.numbers() if each <= number]
                for old in earlier[self._keep :]:
                    self.path(old).unlink(missing_ok=True)

    def read(self, number: int) -> tuple[dict[str, Any], memoryview]:
        """Return state and payload of an entry; raises as `unseal` does, and `DamagedFile` for a missing one."""
        return read_sealed(self.path(number), self.kind, owner=self._owner, number=number)

    def newest(
        self, load: Callable[[int], T], on_damage: Callable[[str], None] = lambda line: None
    ) -> T | None:
        """Return `load(number)` of the newest entry for which it raises no `DamagedFile`, or None without entries.

        `on_damage` gets a line for each damaged entry that is skipped. Raises `ConfigError` if all are damaged, for an
        entry of another kind, schema or owner, and for one that cannot be read now but may be intact.
        """
        causes = []
        for number in self.numbers():
            try:
                found = load(number)
            except DamagedFile as error:
                causes.append(error.cause)
                continue
            for cause in causes:
                on_damage(f"{cause}; continuing from the one before it, {self.path(number).name}")
            return found
        if causes:
            raise ConfigError(
                f"{self.folder}: no {self.kind.name} is whole: {'; '.join(causes)}; {self.kind.remedy}"
            )
        return None

    def remove(self, *, after: int = -1) -> None:
        """Remove the entries with numbers above `after`; by default every file with the store's prefix and suffix."""
        if after < 0:
            paths = [self.folder / name for name in self._names()]
        else:
            paths = [self.path(number) for number in self.numbers() if number > after]
        for path in paths:
            try:
                path.unlink(missing_ok=True)
            except OSError as error:
                raise ConfigError(f"{path}: cannot be removed ({error.strerror})") from None

    def _names(self) -> list[str]:
        try:
            names = os.listdir(self.folder)
        except FileNotFoundError:
            return []
        except OSError as error:
            raise ConfigError(
                f"{self.folder}: cannot be read ({error.strerror}); name another folder"
            ) from None
        return [
            name for name in names if name.startswith(self._prefix) and name.endswith(self._suffix)
        ]

    def _new_lock(
        self,
        what: str,
        wait_s: float,
        on_wait: Callable[[str], None] = lambda line: None,
        lease_s: float | None = None,
    ) -> FolderLock:
        path = self.folder / f".{self._prefix}lock"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            lock = FolderLock(path, what, wait_s=wait_s, on_wait=on_wait, lease_s=lease_s)
            try:
                remove_partial(self.folder)
            except OSError:
                lock.release()
                raise
        except OSError as error:
            raise _unwritable(what, error, "name another folder") from None
        return lock


def _unwritable(what: str, error: OSError, remedy: str) -> ConfigError:
    return ConfigError(f"{what}: cannot be written ({error.strerror}); {remedy}")
