"""Small files below /sys and /proc, and notes about them, which are not repeated at every reading."""

from pathlib import Path

_REPEAT_AFTER_S = 3600.0
"""A note is repeated at the earliest after this long, also for an intermittent error."""


def read_text(path: Path) -> str:
    """Return the file's text without the line break. Raises OSError, and ValueError for text that is not ASCII."""
    return path.read_text("ascii").strip()


def read_integer(path: Path) -> int:
    """Return the file's integer. Raises OSError, and ValueError for anything but a 64-bit integer."""
    value = int(read_text(path))
    if abs(value) >= 1 << 64:
        raise ValueError(f"{path}: {value} is no number of a device")
    return value


def matching_paths(folder: Path, pattern: str) -> list[Path]:
    """Return the matching paths, hwmon2 before hwmon10; none where the folder is missing or not readable."""
    try:
        return sorted(folder.glob(pattern), key=lambda path: (len(path.as_posix()), path.as_posix()))
    except OSError:
        return []


def error_text(error: Exception) -> str:
    """Return why a file could not be read, as a text that does not vary between readings."""
    if isinstance(error, OSError):
        return (error.strerror or type(error).__name__).lower()
    return "holds no number"


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
            self._added_at_s[text] = float("inf")
            self._pending.append(text)

    def drain(self) -> tuple[str, ...]:
        """Return the notes added since the last call."""
        pending, self._pending = tuple(self._pending), []
        return pending
