"""Small files below /sys and /proc, and how complaints about them are said once instead of at every look."""

from pathlib import Path

_AGAIN_AFTER_S = 3600.0
"""A complaint that comes back is worth a line again after this long; a sensor that flickers is not."""


def text_of(path: Path) -> str:
    """Return the file's text without the line break. Raises OSError, and ValueError for what is no ASCII."""
    return path.read_text("ascii").strip()


def whole_number(path: Path) -> int:
    """Return the file's number. Raises OSError, and ValueError for anything else than a number of 64 bits."""
    value = int(text_of(path))
    if abs(value) >= 1 << 64:
        raise ValueError(f"{path}: {value} is no number of a device")
    return value


def matches(folder: Path, pattern: str) -> list[Path]:
    """Return what matches, hwmon2 before hwmon10; nothing where the folder is missing or closed."""
    try:
        return sorted(folder.glob(pattern), key=lambda path: (len(path.as_posix()), path.as_posix()))
    except OSError:
        return []


def why(error: Exception) -> str:
    """Return why a file gave nothing, in words that do not change from look to look."""
    if isinstance(error, OSError):
        return (error.strerror or type(error).__name__).lower()
    return "holds no number"


class Complaints:
    """What is wrong, each line once an hour at most: `say` it at every look, `take` what is to be told."""

    def __init__(self) -> None:
        self._said_at_s: dict[str, float] = {}
        self._untold: list[str] = []

    def say(self, text: str, at_s: float) -> None:
        """Keep a line, unless it was said within the last hour."""
        said_at_s = self._said_at_s.get(text)
        if said_at_s is None or at_s - said_at_s >= _AGAIN_AFTER_S:
            self._said_at_s[text] = at_s
            self._untold.append(text)

    def once(self, text: str) -> None:
        """Keep a line the first time only, however long it stays true."""
        if text not in self._said_at_s:
            self._said_at_s[text] = float("inf")
            self._untold.append(text)

    def take(self) -> tuple[str, ...]:
        """Return the lines that nobody was told yet."""
        untold, self._untold = tuple(self._untold), []
        return untold
