"""A link's bandwidth over time: piecewise constant rates per direction, and exact durations of transfers."""

import csv
import math
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Literal, TypeAlias

from socflower.errors import ConfigError, require_range

Direction: TypeAlias = Literal["up", "down"]
HEADER = ("time_s", "up_bytes_per_s", "down_bytes_per_s")


@dataclass(frozen=True, kw_only=True, slots=True)
class LinkRates:
    """The rates of a link at one moment, per direction."""

    up_bytes_per_s: float
    down_bytes_per_s: float
    latency_s: float = 0.0  # one way

    def __post_init__(self) -> None:
        if not (self.up_bytes_per_s >= 0 and self.down_bytes_per_s >= 0 and 0 <= self.latency_s < math.inf):
            raise ConfigError(f"link: rates {self.up_bytes_per_s}, {self.down_bytes_per_s} bytes/s and latency "
                              f"{self.latency_s} s must not be negative")


@dataclass(frozen=True, slots=True)
class Steps:
    """A rate that changes at given times: `bytes_per_s[i]` holds from `times_s[i]` on; 0 is a lost link.

    At `end_s` the steps repeat from the start, as in Mahimahi; without an end the last rate holds for good.
    """

    times_s: tuple[float, ...]  # rise from 0
    bytes_per_s: tuple[float, ...]
    end_s: float = math.inf
    _passed_bytes: tuple[float, ...] = field(init=False, repr=False, compare=False)  # by each of the times, and the end

    def __post_init__(self) -> None:
        times_s = self.times_s
        if not times_s or len(times_s) != len(self.bytes_per_s) or times_s[0] != 0.0:
            raise ConfigError("bandwidth profile: needs as many rates as times, the first at 0 s; got "
                              f"{len(self.bytes_per_s)} rates and times {list(times_s[:3])}...")
        for before_s, after_s in pairwise((*times_s, self.end_s)):
            if not before_s < after_s:
                raise ConfigError(f"bandwidth profile: times must rise, but {after_s} s follows {before_s} s")
        for time_s, rate in zip(times_s, self.bytes_per_s, strict=True):
            if not 0 <= rate < math.inf:
                raise ConfigError(f"bandwidth profile: {rate} bytes/s at {time_s} s must be 0 or more and finite")
        passed = [0.0]
        for index, (before_s, after_s) in enumerate(pairwise((*times_s, self.end_s))):
            rate = self.bytes_per_s[index]
            passed.append(passed[-1] + (rate * (after_s - before_s) if rate else 0.0))
        object.__setattr__(self, "_passed_bytes", tuple(passed))

    def rate(self, time_s: float) -> float:
        """Return the rate at a time, bytes per second."""
        return self.bytes_per_s[bisect_right(self.times_s, self._locate(time_s)[1]) - 1]

    def total_bytes(self, time_s: float) -> float:
        """Return how many bytes a link that is always busy has carried since time 0."""
        rounds, within_s = self._locate(time_s)
        index = bisect_right(self.times_s, within_s) - 1
        total = self._passed_bytes[index] + self.bytes_per_s[index] * (within_s - self.times_s[index])
        return total + rounds * self._passed_bytes[-1] if rounds else total

    def passed_s(self, start_s: float, num_bytes: float) -> float:
        """Return when the last of `num_bytes` has left, if the first may leave at `start_s`; infinity for never."""
        if num_bytes <= 0 or math.isinf(start_s):
            return start_s
        rounds, within_s = self._locate(start_s)
        index = bisect_right(self.times_s, within_s) - 1
        rate = self.bytes_per_s[index]
        next_s = self.times_s[index + 1] if index + 1 < len(self.times_s) else self.end_s
        if rate and num_bytes <= rate * (next_s - within_s):  # most transfers end in the step in which they begin
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
        when_s = self.times_s[index] + (target - self._passed_bytes[index]) / self.bytes_per_s[index]
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


@dataclass(frozen=True, slots=True)
class BandwidthProfile:
    """The bandwidth of a link between an edge and a cloud over time.

    Latency does not occupy the link: it only delays every arrival.
    """

    up: Steps
    down: Steps
    latency_s: float = 0.0  # one way

    def __post_init__(self) -> None:
        require_range("bandwidth profile", least=0, latency_s=self.latency_s)

    def steps(self, direction: Direction) -> Steps:
        """Return one direction."""
        return self.up if direction == "up" else self.down

    def rate(self, direction: Direction, time_s: float) -> float:
        """Return bytes per second at a time."""
        return self.steps(direction).rate(time_s)

    def rates(self, time_s: float) -> LinkRates:
        """Return both directions at a time."""
        return LinkRates(up_bytes_per_s=self.up.rate(time_s), down_bytes_per_s=self.down.rate(time_s),
                         latency_s=self.latency_s)

    def passed_s(self, direction: Direction, start_s: float, num_bytes: float) -> float:
        """Return the time until which a transfer that begins at `start_s` occupies the link; infinity for never."""
        return self.steps(direction).passed_s(start_s, num_bytes)

    def arrival_s(self, direction: Direction, start_s: float, num_bytes: float) -> float:
        """Return when the last byte of a transfer arrives: `passed_s` and the latency."""
        return self.steps(direction).passed_s(start_s, num_bytes) + self.latency_s

    def bytes_between(self, direction: Direction, begin_s: float, end_s: float) -> float:
        """Return how many bytes the link can carry in a span: the integral of its rate."""
        steps = self.steps(direction)
        return max(0.0, steps.total_bytes(end_s) - steps.total_bytes(begin_s))

    def mean(self, direction: Direction, begin_s: float = 0.0, end_s: float | None = None) -> float:
        """Return the mean rate in a span, bytes per second; by default up to the end of the profile.

        A profile without an end returns its last rate.
        """
        steps = self.steps(direction)
        until_s = steps.end_s if end_s is None else end_s
        if math.isinf(until_s):
            return steps.bytes_per_s[-1]
        if until_s <= begin_s:
            return steps.rate(begin_s)
        return self.bytes_between(direction, begin_s, until_s) / (until_s - begin_s)

    def mean_rates(self, begin_s: float = 0.0, end_s: float | None = None) -> LinkRates:
        """Return the means of both directions."""
        return LinkRates(up_bytes_per_s=self.mean("up", begin_s, end_s),
                         down_bytes_per_s=self.mean("down", begin_s, end_s), latency_s=self.latency_s)


def constant(up_bytes_per_s: float, down_bytes_per_s: float, latency_s: float = 0.0) -> BandwidthProfile:
    """Return a profile whose rates never change."""
    return BandwidthProfile(Steps((0.0,), (up_bytes_per_s,)), Steps((0.0,), (down_bytes_per_s,)), latency_s)


def segments(
    parts: Sequence[tuple[float, float, float]], *, latency_s: float = 0.0, repeats: bool = False,
) -> BandwidthProfile:
    """Return a profile made of (seconds, bytes/s up, bytes/s down), one after another.

    Without `repeats` the last part holds for good. Raises `ConfigError` for no parts, and for seconds that are not
    positive.
    """
    if not parts:
        raise ConfigError("bandwidth profile: no segments; give (seconds, bytes/s up, bytes/s down)")
    times_s = [0.0]
    for duration_s, _, _ in parts:
        if not 0 < duration_s < math.inf:
            raise ConfigError(f"bandwidth profile: a segment of {duration_s} s; it must be more than 0 and finite")
        times_s.append(times_s[-1] + duration_s)
    end_s = times_s.pop() if repeats else math.inf
    starts_s = tuple(times_s[:len(parts)])
    return BandwidthProfile(Steps(starts_s, tuple(up for _, up, _ in parts), end_s),
                            Steps(starts_s, tuple(down for _, _, down in parts), end_s), latency_s)


def read_csv(path: Path, *, latency_s: float = 0.0, repeats: bool = True) -> BandwidthProfile:
    """Return the profile of a CSV file; `ConfigError` names the line that is invalid.

        time_s,up_bytes_per_s,down_bytes_per_s
        0,250000,1250000
        10,0,0
        12.5,,                                  a last row with only a time: the profile ends here, and repeats

    With `repeats` it begins again at its end: at the time of the row without rates, or else when the last row has
    lasted as long as the one before it (a single row: 1 s). Without `repeats`, the last rates hold for good.
    """
    try:
        rows = list(csv.reader(path.read_text("utf-8").splitlines()))
    except OSError as error:
        raise ConfigError(f"bandwidth profile {path}: cannot be read ({error.strerror}); check the path") from None
    except UnicodeDecodeError:
        raise ConfigError(f"bandwidth profile {path}: is not UTF-8 text; is it a bandwidth profile?") from None
    if not rows or tuple(cell.strip() for cell in rows[0]) != HEADER:
        raise ConfigError(f"bandwidth profile {path} line 1: must be the header {','.join(HEADER)}")
    times_s: list[float] = []
    up: list[float] = []
    down: list[float] = []
    end_s: float | None = None
    for number, row in enumerate(rows[1:], start=2):
        cells = [cell.strip() for cell in row]
        if not any(cells):
            continue
        where = f"bandwidth profile {path} line {number}"
        if len(cells) != len(HEADER):
            raise ConfigError(f"{where}: has {len(cells)} values; give {len(HEADER)}: {','.join(HEADER)}")
        if end_s is not None:
            raise ConfigError(f"{where}: follows a row without rates, which only the last one may be")
        time_s = _number(cells[0], HEADER[0], where)
        last_s = times_s[-1] if times_s else None
        if last_s is None and time_s != 0:
            raise ConfigError(f"{where}: the first time is {cells[0]}; it must be 0")
        if last_s is not None and time_s <= last_s:
            raise ConfigError(f"{where}: time {cells[0]} s does not come after {last_s} s; sort the rows")
        if last_s is not None and not cells[1] and not cells[2]:
            end_s = time_s
            continue
        times_s.append(time_s)
        up.append(_number(cells[1], HEADER[1], where))
        down.append(_number(cells[2], HEADER[2], where))
    if not times_s:
        raise ConfigError(f"bandwidth profile {path}: has no rows; give at least the rates at 0 s")
    if not repeats:
        end_s = math.inf
    elif end_s is None:
        end_s = times_s[-1] + (times_s[-1] - times_s[-2] if len(times_s) > 1 else 1.0)
    return BandwidthProfile(
        Steps(tuple(times_s), tuple(up), end_s), Steps(tuple(times_s), tuple(down), end_s), latency_s)


def _number(text: str, name: str, where: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise ConfigError(f"{where}: {name} = {text!r} is no number") from None
    if not 0 <= value < math.inf:
        raise ConfigError(f"{where}: {name} = {text} must be 0 or more and finite")
    return value
