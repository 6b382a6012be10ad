"""A link's bandwidth over time: piecewise constant rates per direction, and exact durations of transfers."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Literal, TypeAlias

from socflower.cluster.link_rate import RateSteps
from socflower.csv_file import number_of, read_rows
from socflower.errors import ConfigError, require_range

Direction: TypeAlias = Literal["up", "down"]
HEADER = ("time_s", "up_bytes_per_s", "down_bytes_per_s")


@dataclass(frozen=True, kw_only=True, slots=True)
class LinkRates:
    """The rates of a link at one moment, per direction; rates may be infinite, `latency_s` is one way."""

    up_bytes_per_s: float
    down_bytes_per_s: float
    latency_s: float = 0.0

    def behind(self, shared: "LinkRates | None", num_sharing: int = 1) -> "LinkRates":
        """Return the rates of this link followed by a fair share of another one, with the latency of both."""
        if shared is None:
            return self
        return LinkRates(
            up_bytes_per_s=min(self.up_bytes_per_s, shared.up_bytes_per_s / num_sharing),
            down_bytes_per_s=min(self.down_bytes_per_s, shared.down_bytes_per_s / num_sharing),
            latency_s=self.latency_s + shared.latency_s,
        )


@dataclass(frozen=True, slots=True)
class BandwidthProfile:
    """The bandwidth of a link between an edge and a cloud over time.

    Latency, in seconds one way, does not occupy the link: it only delays every arrival.
    """

    up: RateSteps
    down: RateSteps
    latency_s: float = 0.0

    def __post_init__(self) -> None:
        require_range("bandwidth profile", least=0, latency_s=self.latency_s)

    def steps(self, direction: Direction) -> RateSteps:
        """Return one direction."""
        return self.up if direction == "up" else self.down

    def rates(self, time_s: float) -> LinkRates:
        """Return both directions at a time."""
        return LinkRates(
            up_bytes_per_s=self.up.rate(time_s),
            down_bytes_per_s=self.down.rate(time_s),
            latency_s=self.latency_s,
        )

    def passed_s(
        self,
        direction: Direction,
        start_s: float,
        num_bytes: float,
    ) -> float:
        """Return when a transfer that begins at `start_s` leaves the link; infinity if it never does."""
        return self.steps(direction).passed_s(start_s, num_bytes)

    def bytes_between(
        self,
        direction: Direction,
        begin_s: float,
        end_s: float,
    ) -> float:
        """Return how many bytes the link can carry in a span: the integral of its rate."""
        steps = self.steps(direction)
        return max(0.0, steps.total_bytes(end_s) - steps.total_bytes(begin_s))

    def mean(
        self,
        direction: Direction,
        begin_s: float = 0.0,
        end_s: float | None = None,
    ) -> float:
        """Return the mean rate in a span, bytes per second; by default up to the end of the profile.

        For a profile without an end it is the last rate.
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
        return LinkRates(
            up_bytes_per_s=self.mean("up", begin_s, end_s),
            down_bytes_per_s=self.mean("down", begin_s, end_s),
            latency_s=self.latency_s,
        )


def constant(
    up_bytes_per_s: float, down_bytes_per_s: float, latency_s: float = 0.0
) -> BandwidthProfile:
    """Return a profile whose rates never change."""
    up, down = (RateSteps((0.0,), (rate,)) for rate in (up_bytes_per_s, down_bytes_per_s))
    return BandwidthProfile(up, down, latency_s)


def segments(
    parts: Sequence[tuple[float, float, float]],
    *,
    latency_s: float = 0.0,
    repeats: bool = False,
) -> BandwidthProfile:
    """Return a profile of (seconds, bytes/s up, bytes/s down), one after another.

    Without `repeats` the last part never ends. Raises `ConfigError` for no parts, and for seconds that are not
    positive.
    """
    if not parts:
        raise ConfigError("bandwidth profile: no segments; give at least one")
    durations_s, up, down = zip(*parts, strict=True)
    for duration_s in durations_s:
        require_range("bandwidth profile", above=0, seconds=duration_s)
    *starts_s, total_s = accumulate(durations_s, initial=0.0)
    end_s = total_s if repeats else math.inf
    return _profile(starts_s, up, down, end_s, latency_s)


def _profile(
    times_s: Sequence[float],
    up: Sequence[float],
    down: Sequence[float],
    end_s: float,
    latency_s: float,
) -> BandwidthProfile:
    ups, downs = (RateSteps(tuple(times_s), tuple(rates), end_s) for rates in (up, down))
    return BandwidthProfile(ups, downs, latency_s)


def read_csv(path: Path, *, latency_s: float = 0.0, repeats: bool = True) -> BandwidthProfile:
    """Return the profile of a CSV file; `ConfigError` names the line that is invalid.

        time_s,up_bytes_per_s,down_bytes_per_s
        0,250000,1250000
        10,0,0
        12.5,,                                  a last row with only a time: the profile ends here, and repeats

    With `repeats` it begins again at its end: at the time of the row without rates, or else when the last row has
    lasted as long as the one before it (a single row: 1 s). Without `repeats`, the last rates never end.
    """
    rows, ends = _read_rows(path)
    if not rows:
        raise ConfigError(f"bandwidth profile {path}: has no rows; give at least the rates at 0 s")
    times_s, up, down = zip(*rows, strict=True)
    end_s = math.inf
    if repeats:
        last_s = times_s[-1] - times_s[-2] if len(times_s) > 1 else 1.0
        end_s = times_s[-1] + last_s if ends is None else ends
    return _profile(times_s, up, down, end_s, latency_s)


def _read_rows(path: Path) -> tuple[list[tuple[float, float, float]], float | None]:
    """Return time and rates of each row, and the time of the last row if it has no rates."""
    rows: list[tuple[float, float, float]] = []
    end_s: float | None = None
    for where, cells in read_rows(path, HEADER, "bandwidth profile"):
        if end_s is not None:
            raise ConfigError(f"{where}: only the last row may be without rates")
        time_s = number_of(cells[0], HEADER[0], where)
        _check_time(time_s, rows, where)
        if rows and not cells[1] and not cells[2]:
            end_s = time_s
        else:
            up, down = (number_of(cells[i], HEADER[i], where) for i in (1, 2))
            rows.append((time_s, up, down))
    return rows, end_s


def _check_time(time_s: float, rows: Sequence[tuple[float, float, float]], where: str) -> None:
    if not rows and time_s != 0:
        raise ConfigError(f"{where}: the first time is {time_s:g} s, not 0")
    if rows and time_s <= rows[-1][0]:
        raise ConfigError(f"{where}: {time_s:g} s comes after {rows[-1][0]} s; sort the rows")
