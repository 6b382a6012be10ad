"""Small files below /sys and /proc, devices whose numbers change, and notes that are not repeated."""

import errno
import math
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

_REPEAT_AFTER_S = 3600.0
"""A note is repeated at the earliest after this long, also for an intermittent error."""


def read_text(path: Path) -> str:
    """Return the file's text without the line break. Raises OSError, and ValueError for text that is not ASCII."""
    return path.read_text("ascii").strip()


def read_integer(path: Path) -> int:
    """Return the file's integer. Raises OSError, and ValueError for anything but a 64-bit integer."""
    return _integer(path, read_text(path))


def _integer(path: Path, text: str) -> int:
    value = int(text)
    if abs(value) >= 1 << 64:
        raise ValueError(f"{path}: {value} has more than 64 bits")
    return value


_HID_COUNTER = re.compile(r"(?<=^[0-9A-F]{4}:[0-9A-F]{4}:[0-9A-F]{4})\.[0-9A-F]{4,}$")
"""At the end of an HID device's name, such as 0003:1E71:2007.0003: the kernel counts how often it has seen one."""


class DeviceIdentity(NamedTuple):
    """What a device keeps when its number changes."""

    # "nct6798"; power supplies have none.
    name: str | None
    # Name of the parent device, such as "nct6775.656" or "0000:03:00.0".
    device: str | None


def identity_of(path: Path) -> DeviceIdentity:
    """Return the identity of the device that has this folder at present; never raises."""
    try:
        with OpenFolder(path) as folder:
            return folder.identity()
    except OSError:
        return DeviceIdentity(None, None)


class OpenFolder:
    """An open folder of a device; a context manager.

    After the device is removed every access raises OSError, also if another device has its number by then.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)

    def __enter__(self) -> "OpenFolder":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close it."""
        os.close(self._descriptor)

    def identity(self) -> DeviceIdentity:
        """Return the device's identity."""
        try:
            name = self.read_text("name") or None
        except (OSError, ValueError):
            name = None
        try:
            target = os.readlink("device", dir_fd=self._descriptor)
        except OSError:
            target = ""
        device = _HID_COUNTER.sub("", os.path.basename(target.rstrip("/")))
        return DeviceIdentity(name, device or None)

    def read_text(self, name: str) -> str:
        """Return a file's text as the function `read_text` does."""
        with open(self._open(name, os.O_RDONLY), encoding="ascii") as file:
            return file.read().strip()

    def read_integer(self, name: str) -> int:
        """Return a file's integer as the function `read_integer` does."""
        return _integer(self.path / name, self.read_text(name))

    def write(self, name: str, value: int) -> None:
        """Write an integer; a file that is missing is not created. Raises OSError."""
        # Without O_CREAT, which would make a file that the kernel removed.
        descriptor = self._open(name, os.O_WRONLY | os.O_TRUNC)
        try:
            os.write(descriptor, f"{value}\n".encode())
        finally:
            os.close(descriptor)

    def _open(self, name: str, flags: int) -> int:
        return os.open(name, flags, dir_fd=self._descriptor)


class DeviceFolder:
    """A device's folder in a class of /sys, such as hwmon3, whose number may change when its driver is loaded again.

    Each access compares the device's identity. If another device has the number, or none, it is looked for among the
    neighbouring folders. A device without an identity is not looked for.
    """

    def __init__(self, path: Path, identity: DeviceIdentity | None = None) -> None:
        self.path = path
        """The folder at the last access."""
        self.identity = identity_of(path) if identity is None else identity

    @contextmanager
    def open(self) -> Iterator[OpenFolder]:
        """Yield the open folder. Raises `FileNotFoundError` if the device is not there, or several may be it."""
        # Compared after it is opened: from then on another device that gets the number is not accessed.
        with self._opened(self.path) or self._find() as folder:
            yield folder

    def _opened(self, path: Path) -> OpenFolder | None:
        try:
            folder = OpenFolder(path)
        except OSError:
            return None
        if folder.identity() == self.identity:
            return folder
        # Another device has the number now.
        folder.close()
        return None

    def _find(self) -> OpenFolder:
        """Return the device's open folder among its neighbours. Raises `FileNotFoundError` unless one is it."""
        found: list[OpenFolder] = []
        pattern = re.sub(r"\d+$", "*", self.path.name)
        for path in matching_paths(self.path.parent, pattern):
            folder = self._opened(path) if any(self.identity) else None
            if folder is not None:
                found.append(folder)
        if len(found) == 1:
            self.path = found[0].path
            return found[0]
        for folder in found:
            folder.close()
        what = self.identity.name or self.identity.device or self.path.name
        cause = f"there are several {what}" if found else f"there is no {what} now"
        raise FileNotFoundError(errno.ENOENT, cause)


def matching_paths(folder: Path, pattern: str) -> list[Path]:
    """Return the matching paths, hwmon2 before hwmon10; none if the folder is missing or not readable."""
    try:
        paths = list(folder.glob(pattern))
    except OSError:
        return []
    return sorted(paths, key=lambda path: (len(path.as_posix()), path.as_posix()))


def error_text(error: Exception) -> str:
    """Return why a file could not be read, as a text that does not vary between readings."""
    return reason(error) if isinstance(error, OSError) else "is not a number"


def reason(error: Exception) -> str:
    """Return a short reason why a file or a program could not be used."""
    if isinstance(error, OSError):
        return (error.strerror or type(error).__name__).lower()
    return str(error)


class NoteLog:
    """Notes about errors, each at most once an hour: `add` them at every reading, `drain` the new ones."""

    def __init__(self) -> None:
        self._added_at_s: dict[str, float] = {}
        self._pending: list[str] = []

    def add(self, text: str, at_s: float) -> None:
        """Add a note, unless it was added within the last hour."""
        added_at_s = self._added_at_s.get(text)
        if added_at_s is None or at_s - added_at_s >= _REPEAT_AFTER_S:
            self._added_at_s[text] = at_s
            self._pending.append(text)

    def add_once(self, text: str) -> None:
        """Add a note the first time only."""
        if text not in self._added_at_s:
            self._added_at_s[text] = math.inf
            self._pending.append(text)

    def drain(self) -> tuple[str, ...]:
        """Return the notes added since the last call."""
        pending = tuple(self._pending)
        self._pending = []
        return pending
