"""A running estimate of a link's bandwidth, from the transfers that the training makes anyway."""

import math
from dataclasses import dataclass, field

from socflower.edgecloud.links.bandwidth_profile import Direction, LinkRates

_CHANGE = 2.0
"""The factor between two rates that is no noise."""


@dataclass(slots=True)
class _DirectionEstimate:
    """Decaying sums of past bytes and seconds in one direction, and the transfer in flight."""

    first_bytes_per_s: float
    num_bytes: float = 0.0
    seconds: float = 0.0
    # If the last transfer was far from the rate before it: that rate, and the transfer's bytes and seconds.
    deviation: tuple[float, float, float] | None = None
    # When the last transfer was added.
    counted_s: float = -math.inf
    waiting_since_s: float | None = None
    waiting_bytes: float = 0.0

    @property
    def bytes_per_s(self) -> float:
        return self.num_bytes / self.seconds if self.seconds > 0 else self.first_bytes_per_s

    def forget_if_changed(self, num_bytes: float, seconds: float) -> None:
        """Forget what was before the last transfer, if that one and this one show the same change of the rate."""
        rate, last_bytes, last_s = self.deviation or (self.bytes_per_s, 0.0, 0.0)
        changed = _deviates(num_bytes, seconds, rate)
        if changed and self.deviation and changed == _deviates(last_bytes, last_s, rate):
            self.num_bytes = last_bytes
            self.seconds = last_s
            self.deviation = None
        else:
            is_new = changed and self.seconds > 0.0
            self.deviation = (self.bytes_per_s, num_bytes, seconds) if is_new else None


def _deviates(num_bytes: float, seconds: float, bytes_per_s: float) -> int:
    """Return 1 for a transfer that is much faster than a rate, -1 for a much slower one, otherwise 0."""
    usual_bytes = bytes_per_s * seconds
    return (num_bytes > _CHANGE * usual_bytes) - (_CHANGE * num_bytes < usual_bytes)


@dataclass(slots=True)
class BandwidthMeter:
    """A running estimate of both rates of a link; the caller passes the time, in seconds that never decrease.

    The rate of a direction is the bytes of past transfers divided by their seconds, each transfer weighted by
    e^(−age/memory_s). Weighting by seconds keeps many small transfers from outweighing a large one, and makes the rate
    exact on a constant link. A transfer longer than `memory_s` counts as one of that length; otherwise an outage would
    lower the estimate for too long. Transfers below `min_bytes` take mostly latency and system calls, so they only end
    a silence.

    Two successive transfers that are both twice as fast, or both half as fast, as the estimate before them are a change
    of the link: what was before is forgotten.

    Bytes in flight bound the rate as soon as they are late. If they are late by `silence_s`, the link counts as lost,
    rate 0, until something arrives. To notice a loss within about `silence_s`, pass the next chunk expected to
    `set_in_flight`, not the whole of a long tensor.
    """

    # The estimate until a transfer has been measured; its latency is used throughout.
    first: LinkRates
    memory_s: float = 5.0
    silence_s: float = 2.0
    min_bytes: float = 4096.0
    _estimates: dict[Direction, _DirectionEstimate] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self._estimates = {
            "up": _DirectionEstimate(self.first.up_bytes_per_s),
            "down": _DirectionEstimate(self.first.down_bytes_per_s),
        }

    def add_transfer(
        self, direction: Direction, num_bytes: float, seconds: float, now_s: float
    ) -> None:
        """Count a transfer that took `seconds`, latency included, and ended at `now_s`; nothing is in flight then."""
        estimate = self._estimates[direction]
        estimate.waiting_since_s = None
        carrying_s = seconds - self.first.latency_s
        if num_bytes < self.min_bytes or carrying_s <= 0:
            return
        estimate.forget_if_changed(num_bytes, carrying_s)
        fading = math.exp(-max(0.0, now_s - estimate.counted_s) / self.memory_s)
        share = min(1.0, self.memory_s / carrying_s)
        estimate.num_bytes = estimate.num_bytes * fading + num_bytes * share
        estimate.seconds = estimate.seconds * fading + carrying_s * share
        estimate.counted_s = now_s

    def set_in_flight(
        self,
        direction: Direction,
        since_s: float,
        num_bytes: float,
    ) -> None:
        """Note that `num_bytes` are in flight, or overdue, since `since_s`; a later call replaces an earlier one."""
        estimate = self._estimates[direction]
        estimate.waiting_since_s = since_s
        estimate.waiting_bytes = max(1.0, num_bytes)

    def clear_in_flight(self, direction: Direction) -> None:
        """Note that nothing is in flight, so that silence does not count as a loss."""
        self._estimates[direction].waiting_since_s = None

    def rates(self, now_s: float) -> LinkRates:
        """Return the estimated rates at `now_s`."""
        return LinkRates(
            up_bytes_per_s=self._rate(self._estimates["up"], now_s),
            down_bytes_per_s=self._rate(self._estimates["down"], now_s),
            latency_s=self.first.latency_s,
        )

    def _rate(self, estimate: _DirectionEstimate, now_s: float) -> float:
        rate = estimate.bytes_per_s
        if estimate.waiting_since_s is None:
            return rate
        waited_s = now_s - estimate.waiting_since_s - self.first.latency_s
        if waited_s * rate <= estimate.waiting_bytes:
            return rate
        late_s = waited_s - estimate.waiting_bytes / rate
        return 0.0 if late_s >= self.silence_s else estimate.waiting_bytes / waited_s
