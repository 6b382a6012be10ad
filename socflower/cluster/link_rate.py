"""The bandwidth of one direction of a link over time: piecewise constant, with exact durations of transfers."""

import math
from bisect import bisect_left, bisect_right
from dataclasses import dataclass, field
from itertools import pairwise

from socflower.errors import ConfigError, require_range


@dataclass(frozen=True, slots=True)
class RateSteps:
    """A rate that changes at given times: `bytes_per_s[i]` holds from `times_s[i]` on; 0 is a lost link.

    At `end_s` the steps repeat from the start, as in Mahimahi; without an end the last rate never changes.
    """

    # Ascending from 0.
    times_s: tuple[float, ...]
    bytes_per_s: tuple[float, ...]
    end_s: float = math.inf
    # Bytes that have passed at each of the times, and at the end.
    _passed_bytes: tuple[float, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        times_s, rates = self.times_s, self.bytes_per_s
        stretches = list(pairwise((*times_s, self.end_s)))
        rises = all(before_s < after_s for before_s, after_s in stretches)
        if times_s[:1] != (0.0,) or len(times_s) != len(rates) or not rises:
            raise ConfigError(
                f"bandwidth profile: times {list(times_s[:9])} of {len(rates)} rates must rise from 0 s to "
                f"{self.end_s} s"
            )
        passed = [0.0]
        for rate, (before_s, after_s) in zip(rates, stretches, strict=True):
            require_range("bandwidth profile", least=0, bytes_per_s=rate)
            # A dead link may have no end, and 0 times infinity is NaN.
            passed.append(passed[-1] + (rate * (after_s - before_s) if rate else 0.0))
        object.__setattr__(self, "_passed_bytes", tuple(passed))

    def rate(self, time_s: float) -> float:
        """Return the rate at a time, bytes per second."""
        return self.step_at(time_s)[0]

    def step_at(self, time_s: float) -> tuple[float, float]:
        """Return the rate at a time, and until when it holds: infinity if no byte will pass after it."""
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
            # Rounding may put the time of a step at or before the present; then the next one counts.
            if until_s > time_s:
                return rate, until_s

    def total_bytes(self, time_s: float) -> float:
        """Return how many bytes a link that is always busy has carried since time 0."""
        rounds, within_s = self._locate(time_s)
        index = bisect_right(self.times_s, within_s) - 1
        stretch_bytes = self.bytes_per_s[index] * (within_s - self.times_s[index])
        total = self._passed_bytes[index] + stretch_bytes
        return total + rounds * self._passed_bytes[-1] if rounds else total

    def passed_s(self, start_s: float, num_bytes: float) -> float:
        """Return when the last of `num_bytes` has left if the first leaves at `start_s`; infinity if it never does."""
        if num_bytes <= 0 or math.isinf(start_s):
            return start_s
        # The step in which the transfer begins.
        rounds, within_s = self._locate(start_s)
        index = bisect_right(self.times_s, within_s) - 1
        rate = self.bytes_per_s[index]
        next_s = self.times_s[index + 1] if index + 1 < len(self.times_s) else self.end_s
        # Most transfers end in the step in which they begin.
        if rate and num_bytes <= rate * (next_s - within_s):
            return start_s + num_bytes / rate
        # Bytes that the link will have carried, since the start of the current round, when the transfer ends.
        target = self._passed_bytes[index] + rate * (within_s - self.times_s[index]) + num_bytes
        per_round = self._passed_bytes[-1]
        if math.isfinite(self.end_s) and target > per_round:
            more_rounds = target / per_round if per_round else math.inf
            # Nothing passes, or so little that the time overflows.
            if math.isinf(more_rounds):
                return math.inf
            # Whole rounds carry equal bytes, so they are skipped at once.
            more = math.ceil(more_rounds) - 1
            rounds += more
            target -= more * per_round
        # The first step at whose end that many bytes have passed.
        index = bisect_left(self._passed_bytes, target) - 1
        # By rounding, the end of a round may fall just outside its steps.
        if index < 0:
            return max(start_s, rounds * self.end_s)
        if index >= len(self.times_s):
            return math.inf if math.isinf(self.end_s) else max(start_s, (rounds + 1) * self.end_s)
        stretch_s = (target - self._passed_bytes[index]) / self.bytes_per_s[index]
        when_s = self.times_s[index] + stretch_s
        return max(start_s, when_s + rounds * self.end_s if rounds else when_s)

    def _locate(self, time_s: float) -> tuple[int, float]:
        """Return how many times the steps have repeated, and the time within the current round."""
        if time_s < self.end_s:
            return 0, max(time_s, 0.0)
        rounds = math.floor(time_s / self.end_s)
        within_s = time_s - rounds * self.end_s
        # The quotient of the floor may be off by one, by rounding.
        if within_s < 0:
            return rounds, 0.0
        return (rounds + 1, 0.0) if within_s >= self.end_s else (rounds, within_s)
