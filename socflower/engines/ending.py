"""When a run ends before its last round; apart from the run's folder, since planning loads no Flower."""

import re
from dataclasses import dataclass
from datetime import datetime, timedelta

from socflower.errors import ConfigError

_ROUNDS_LEFT, _CLOSING_S = 1.5, 10.0
"""What must fit before a deadline for another round: so many of the longest one, and time to write the results."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Ending:
    """When a run ends before its last round: once its quality reaches a target, or its time or epochs a limit."""

    # "accuracy" or "loss"; None without a target.
    quality: str | None = None
    target: float = 0.0
    # None: no limit.
    most_virtual_s: float | None = None
    most_epochs: float | None = None
    # Seconds since 1970 at which model and checkpoint must be written.
    deadline_s: float | None = None

    def leaves_no_round(self, now_s: float, longest_round_s: float) -> bool:
        """Whether another round, with half of one to spare and the time to write results, would miss the deadline."""
        if self.deadline_s is None:
            return False
        return now_s + _ROUNDS_LEFT * longest_round_s + _CLOSING_S > self.deadline_s


def next_time(option: str, clock: str, after: datetime) -> datetime:
    """Return when a clock next shows "HH:MM", strictly later than `after`; `ConfigError` names the option."""
    found = re.fullmatch(r"(\d{1,2}):(\d{2})", clock.strip())
    if not found or int(found[1]) > 23 or int(found[2]) > 59:
        raise ConfigError(f"{option} {clock}: write a time of the day, as in {option} 06:00")
    at = after.replace(hour=int(found[1]), minute=int(found[2]), second=0, microsecond=0)
    return at if at > after else at + timedelta(days=1)
