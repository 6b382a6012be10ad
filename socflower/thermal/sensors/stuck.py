"""When a constant sensor counts as stuck: one rule, whose thresholds are those of a device, a rack or a pause."""

import math
from collections import deque
from collections.abc import Hashable, Mapping, Set
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from socflower.errors import require_range

_Name = TypeVar("_Name", bound=Hashable)


@dataclass(frozen=True, kw_only=True, slots=True)
class StuckRule:
    """The thresholds of `ConstantSensors`."""

    # How long a sensor may be constant, and in how many readings; two an hour apart prove nothing.
    after_s: float
    min_reads: int = 0
    # The change of another sensor that counts: above noise and rounding, below the effect of starting work.
    others_change_c: float = math.inf
    # At least this part of the others changes so; 0: one of them.
    others_part: float = 0.0
    # Whether only time under load counts: coarse sensors of an idle SoC do not change for hours.
    under_load: bool = False

    def __post_init__(self) -> None:
        require_range("sensors", above=0, stuck_after_s=self.after_s)

    def is_long(self, constant_s: float, num_reads: int) -> bool:
        """Return whether a sensor has been constant for long enough to be stuck."""
        return constant_s >= self.after_s and num_reads >= self.min_reads

    def contradicts(self, num_changed: int, num_others: int) -> bool:
        """Return whether enough of the other sensors have changed."""
        return num_others > 0 and num_changed >= max(1.0, self.others_part * num_others)


@dataclass(slots=True)
class SensorHistory:
    """The recent values of one sensor, and how long it has been constant."""

    # When the value changed, and to what.
    recent_c: deque[tuple[float, float]] = field(default_factory=deque)
    # Since the last change: time under load, and readings in it.
    busy_s: float = 0.0
    num_reads: int = 0
    # How far it fell at its last change.
    fall_c: float = 0.0
    # Whether the others have changed while this one was constant.
    is_contradicted: bool = False

    @property
    def changed_s(self) -> float:
        """When its value last changed."""
        return self.recent_c[-1][0]

    def record(self, now_s: float, value_c: float, busy_s: float, memory_s: float) -> None:
        """Record a value after `busy_s` of load; those that ended more than `memory_s` ago are forgotten."""
        if not self.recent_c or self.recent_c[-1][1] != value_c:
            self.fall_c = self.recent_c[-1][1] - value_c if self.recent_c else 0.0
            self.recent_c.append((now_s, value_c))
            self.busy_s = 0.0
            self.num_reads = 0
            self.is_contradicted = False
        elif busy_s > 0.0:
            self.busy_s += busy_s
            self.num_reads += 1
        while len(self.recent_c) > 1 and self.recent_c[1][0] <= now_s - memory_s:
            self.recent_c.popleft()

    def has_changed(self, by_c: float, since_s: float) -> bool:
        """Return whether the recent values from `since_s` on differ by so much."""
        values_c = []
        for changed_s, value_c in reversed(self.recent_c):
            values_c.append(value_c)
            if changed_s <= since_s:
                break
        return max(values_c) - min(values_c) >= by_c


class ConstantSensors(Generic[_Name]):
    """Which of several sensors are constant while others change."""

    def __init__(self, rule: StuckRule) -> None:
        self.histories: dict[_Name, SensorHistory] = {}
        self._rule = rule

    def update(
        self, now_s: float, values_c: Mapping[_Name, float], busy_s: Mapping[_Name, float]
    ) -> set[_Name]:
        """Record a reading of each sensor, and the load since the last one; return the sensors that are stuck.

        A sensor that shows nothing is not stuck, and its history stays. Without others none is stuck, for lack of a
        comparison. That others have changed is remembered if only time under load counts, since they may return to
        where they were before that time is up.
        """
        rule = self._rule
        for name, value_c in values_c.items():
            history = self.histories.setdefault(name, SensorHistory())
            history.record(now_s, value_c, busy_s[name], rule.after_s)
        stuck = set()
        # By the time since which a sensor is constant; many share it if they froze together.
        num_changed: dict[float, int] = {}
        for name in values_c:
            history = self.histories[name]
            constant_s = history.busy_s if rule.under_load else now_s - history.changed_s
            is_long = rule.is_long(constant_s, history.num_reads)
            if is_long or rule.under_load:
                remembered = rule.under_load and history.is_contradicted
                since_s = history.changed_s
                if not remembered and since_s not in num_changed:
                    num_changed[since_s] = self._num_changed(values_c.keys(), since_s)
                # The sensor itself has not changed since then.
                history.is_contradicted = remembered or rule.contradicts(
                    num_changed[since_s], len(values_c) - 1
                )
                if is_long and history.is_contradicted:
                    stuck.add(name)
        return stuck

    def _num_changed(self, names: Set[_Name], since_s: float) -> int:
        by_c = self._rule.others_change_c
        return sum(self.histories[name].has_changed(by_c, since_s) for name in names)
