"""A link's bandwidth over time: piecewise constant rates per direction, and exact durations of transfers."""

import csv
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias

from socflower.cluster.link_rate import RateSteps
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
        if not (
            self.up_bytes_per_s >= 0
            and self.down_bytes_per_s >= 0
            and 0 <= self.latency_s < math.inf
        ):
            raise ConfigError(
                f"link: rates {self.up_bytes_per_s}, {self.down_bytes_per_s} bytes/s and latency "
                f"{self.latency_s} s must not be negative"
            )

    def behind(self, shared: "LinkRates | None", num_sharing: int = 1) -> "LinkRates":
        """Return the rates of this link and a fair share of another one after it, with the latency of both."""
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

    Latency does not occupy the link: it only delays every arrival.
    """

    up: RateSteps
    down: RateSteps
    latency_s: float = 0.0  # one way

    def __post_init__(self) -> None:
        require_range("bandwidth profile", least=0, latency_s=self.latency_s)

    def steps(self, direction: Direction) -> RateSteps:
        """Return one direction."""
        return self.up if direction == "up" else self.down

    def rate(self, direction: Direction, time_s: float) -> float:
        """Return bytes per second at a time."""
        return self.steps(direction).rate(time_s)

    def rates(self, time_s: float) -> LinkRates:
        """Return both directions at a time."""
        return LinkRates(
            up_bytes_per_s=self.up.rate(time_s),
            down_bytes_per_s=self.down.rate(time_s),
            latency_s=self.latency_s,
        )

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
        return LinkRates(
            up_bytes_per_s=self.mean("up", begin_s, end_s),
            down_bytes_per_s=self.mean("down", begin_s, end_s),
            latency_s=self.latency_s,
        )


def constant(
    up_bytes_per_s: float, down_bytes_per_s: float, latency_s: float = 0.0
) -> BandwidthProfile:
    """Return a profile whose rates never change."""
    return BandwidthProfile(
        RateSteps((0.0,), (up_bytes_per_s,)), RateSteps((0.0,), (down_bytes_per_s,)), latency_s
    )


def segments(
    parts: Sequence[tuple[float, float, float]],
    *,
    latency_s: float = 0.0,
    repeats: bool = False,
) -> BandwidthProfile:
    """Return a profile made of (seconds, bytes/s up, bytes/s down), one after another.

    Without `repeats` the last part holds for good. Raises `ConfigError` for no parts, and for seconds that are not
    positive.
    """
    if not parts:
        raise ConfigError(
            "bandwidth profile: no segments; give (seconds, bytes/s up, bytes/s down)"
        )
    times_s = [0.0]
    for duration_s, _, _ in parts:
        if not 0 < duration_s < math.inf:
            raise ConfigError(
                f"bandwidth profile: a segment of {duration_s} s; it must be more than 0 and finite"
            )
        times_s.append(times_s[-1] + duration_s)
    end_s = times_s.pop() if repeats else math.inf
    starts_s = tuple(times_s[: len(parts)])
    return BandwidthProfile(
        RateSteps(starts_s, tuple(up for _, up, _ in parts), end_s),
        RateSteps(starts_s, tuple(down for _, _, down in parts), end_s),
        latency_s,
    )


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
        rows = list(csv.reader(path.read_text("utf-8-sig").splitlines()))
    except OSError as error:
        raise ConfigError(
            f"bandwidth profile {path}: cannot be read ({error.strerror}); check the path"
        ) from None
    except UnicodeDecodeError:
        raise ConfigError(
            f"bandwidth profile {path}: is not UTF-8 text; is it a bandwidth profile?"
        ) from None
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
            raise ConfigError(
                f"{where}: has {len(cells)} values; give {len(HEADER)}: {','.join(HEADER)}"
            )
        if end_s is not None:
            raise ConfigError(
                f"{where}: follows a row without rates, which only the last one may be"
            )
        time_s = _number(cells[0], HEADER[0], where)
        last_s = times_s[-1] if times_s else None
        if last_s is None and time_s != 0:
            raise ConfigError(f"{where}: the first time is {cells[0]}; it must be 0")
        if last_s is not None and time_s <= last_s:
            raise ConfigError(
                f"{where}: time {cells[0]} s does not come after {last_s} s; sort the rows"
            )
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
        RateSteps(tuple(times_s), tuple(up), end_s),
        RateSteps(tuple(times_s), tuple(down), end_s),
        latency_s,
    )


def _number(text: str, name: str, where: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise ConfigError(f"{where}: {name} = {text!r} is no number") from None
    if not 0 <= value < math.inf:
        raise ConfigError(f"{where}: {name} = {text} must be 0 or more and finite")
    return value
