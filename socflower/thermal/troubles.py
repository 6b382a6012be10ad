"""What is wrong now, and a line when that begins and ends: never a line a look."""

import math
from collections.abc import Callable, Hashable
from contextlib import suppress

_AGAIN_AFTER_S = 3600.0
"""A trouble that comes and goes is worth a line again after this long."""


class Troubles:
    """Troubles that last, by key; `say` gets a line when one begins and when it ends, once an hour and key at most."""

    def __init__(self, say: Callable[[str], object]) -> None:
        self._say = say
        self._present: dict[Hashable, str] = {}
        self._said_s: dict[Hashable, float] = {}
        self._untold_end: set[Hashable] = set()  # whose beginning was said

    @property
    def notes(self) -> tuple[str, ...]:
        """What is wrong now, a line each."""
        return tuple(self._present.values())

    def set(self, key: Hashable, text: str | None, at_s: float, *, well: str = "") -> None:
        """Take in that a trouble is there, or with None that it is not; `well` is said when it ends.

        By the key alone, since an error's text may differ every time.
        """
        if text is None:
            if self._present.pop(key, None) is not None and key in self._untold_end:
                self._untold_end.discard(key)
                self._tell(well)
            return
        begins = key not in self._present
        self._present[key] = text
        if begins and at_s - self._said_s.get(key, -math.inf) >= _AGAIN_AFTER_S:
            self._said_s[key] = at_s
            self._untold_end.add(key)
            self._tell(text)

    def _tell(self, line: str) -> None:
        if line:
            with suppress(Exception):  # a log that is full or closed must not end the control of a fan
                self._say(line)
