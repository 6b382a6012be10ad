"""The bandwidth of one direction of a link over time: piecewise constant, with exact durations of transfers."""

import math
from bisect import bisect_left, bisect_right
from dataclasses import dataclass, field
from itertools import pairwise

from socflower.errors import ConfigError


@dataclass(frozen=True, slots=True)
class RateSteps:
    """A rate that changes at given times: `bytes_per_s[i]` holds from `times_s[i]` on; 0 is a lost link.

    At `end_s` the steps repeat from the start, as in Mahimahi; without an end the last rate holds for good.
    """

    times_s: tuple[float, ...]  # rise from 0
    bytes_per_s: tuple[float, ...]
    end_s: float = math.inf
    _passed_bytes: tuple[float, ...] = field(
        init=False, repr=False, compare=False
    )  # by each of the times, and the end

    def __post_init__(self) -> None:
        times_s = self.times_s
        if not times_s or len(times_s) != len(self.bytes_per_s) or times_s[0] != 0.0:
            raise ConfigError(
                "bandwidth profile: needs as many rates as times, the first at 0 s; got "
                f"{len(self.bytes_per_s)} rates and times {list(times_s[:3])}..."
            )
        for before_s, after_s in pairwise((*times_s, self.end_s)):
            if not before_s < after_s:
                raise ConfigError(
                    f"bandwidth profile: times must rise, but {after_s} s follows {before_s} s"
                )
        for time_s, rate in zip(times_s, self.bytes_per_s, strict=True):
            if not 0 <= rate < math.inf:
                raise ConfigError(
                    f"bandwidth profile: {rate} bytes/s at {time_s} s must be 0 or more and finite"
                )
        passed = [0.0]
        for index, (before_s, after_s) in enumerate(pairwise((*times_s, self.end_s))):
            rate = self.bytes_per_s[index]
            passed.append(passed[-1] + (rate * (after_s - before_s) if rate else 0.0))
        object.__setattr__(self, "_passed_bytes", tuple(passed))

    def rate(self, time_s: float) -> float:
        """Return the rate at a time, bytes per second."""
        return self.step_at(time_s)[0]

    def step_at(self, time_s: float) -> tuple[float, float]:
        """Return the rate at a time, and until when it holds: for good where no byte will ever pass again."""
        rounds, within_s = self._locate(time_s)
        index = bisect_right(self.times_s, within_s) - 1
        if math.isfinite(self.end_s) and (len(self.times_s) == 1 or not self._passed_bytes[-1]):
            return self.bytes_per_s[index], math.inf
        while True:
            rate, index = self.bytes_per_s[index], index + 1
            if index == len(self.times_s):
                if math.isinf(self.end_s):
                    return rate, math.inf
                rounds, index = rounds + 1, 0
            until_s = self.times_s[index] + (rounds * self.end_s if rounds else 0.0)
            if until_s > time_s:  # otherwise rounding hid a step
                return rate, until_s

    def total_bytes(self, time_s: float) -> float:
        """Return how many bytes a link that is always busy has carried since time 0."""
        rounds, within_s = self._locate(time_s)
        index = bisect_right(self.times_s, within_s) - 1
        total = self._passed_bytes[index] + self.bytes_per_s[index] * (
            within_s - self.times_s[index]
        )
        return total + rounds * self._passed_bytes[-1] if rounds else total

    def passed_s(self, start_s: float, num_bytes: float) -> float:
        """Return when the last of `num_bytes` has left, if the first may leave at `start_s`; infinity for never."""
        if num_bytes <= 0 or math.isinf(start_s):
            return start_s
        rounds, within_s = self._locate(start_s)
        index = bisect_right(self.times_s, within_s) - 1
        rate = self.bytes_per_s[index]
        next_s = self.times_s[index + 1] if index + 1 < len(self.times_s) else self.end_s
        if rate and num_bytes <= rate * (
            next_s - within_s
        ):  # most transfers end in the step in which they begin
            return start_s + num_bytes / rate
        target = self._passed_bytes[index] + rate * (within_s - self.times_s[index]) + num_bytes
        per_round = self._passed_bytes[-1]
        if math.isfinite(self.end_s) and target > per_round:
            more_rounds = target / per_round if per_round else math.inf
            if math.isinf(more_rounds):  # nothing passes, or so little that the time overflows
                return math.inf
            more = math.ceil(more_rounds) - 1
            rounds += more
            target -= more * per_round
        # The first step at whose end that many bytes have passed.
        index = bisect_left(self._passed_bytes, target) - 1
        if index < 0:  # rounding: exactly at the end of a round
            return max(start_s, rounds * self.end_s)
        if index >= len(self.times_s):  # lost for good, or by rounding the very end of a round
            return math.inf if math.isinf(self.end_s) else max(start_s, (rounds + 1) * self.end_s)
        when_s = (
            self.times_s[index] + (target - self._passed_bytes[index]) / self.bytes_per_s[index]
        )
        return max(start_s, when_s + rounds * self.end_s if rounds else when_s)

    def _locate(self, time_s: float) -> tuple[int, float]:
        """Return how many times the steps have repeated, and the time within the current round."""
        if time_s < self.end_s:
            return 0, max(time_s, 0.0)
        rounds = math.floor(time_s / self.end_s)
        within_s = time_s - rounds * self.end_s
        if within_s < 0:  # rounding
            return rounds, 0.0
        return (rounds + 1, 0.0) if within_s >= self.end_s else (rounds, within_s)
