"""What a link carries now, from the transfers that were going over it anyway."""

import math
from dataclasses import dataclass, field

from socflower.edgecloud.links.bandwidth_profile import Direction, LinkRates
from socflower.errors import ConfigError


@dataclass(slots=True)
class _OneWay:
    """Bytes and seconds of the past, fading; and what is under way."""

    first_bytes_per_s: float
    num_bytes: float = 0.0
    seconds: float = 0.0
    counted_s: float = -math.inf  # when the last transfer was added
    waiting_since_s: float | None = None
    waiting_bytes: float = 0.0

    @property
    def bytes_per_s(self) -> float:
        return self.num_bytes / self.seconds if self.seconds > 0 else self.first_bytes_per_s


@dataclass(slots=True)
class BandwidthMeter:
    """A running estimate of both rates of a link; the caller says what time it is, in seconds that only grow.

    The rate of a direction is bytes by seconds over past transfers, each weighted by e^(−age/memory_s): a mean over
    the time in which something was sent, not over transfers, so that many small ones do not outvote a large one, and
    an exact one if the link is constant. A transfer longer than memory_s counts as one of that length, or after an
    outage it would be believed too long. Transfers below `min_bytes` do not count, for their time is mostly latency
    and system calls; they only end a silence.

    Bytes under way bound the rate as soon as they are late; if they are late by `silence_s`, the link is lost, rate 0,
    until something arrives. So, to notice a loss within about `silence_s`, name as under way the next piece expected
    (a chunk), not the whole of a long tensor.
    """

    first: LinkRates  # believed until a transfer has been measured; its latency is always
    memory_s: float = 5.0
    silence_s: float = 2.0
    min_bytes: float = 4096.0
    _ways: dict[Direction, _OneWay] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        for key in ("memory_s", "silence_s"):
            if not 0 < getattr(self, key) < math.inf:
                raise ConfigError(f"bandwidth meter: {key} = {getattr(self, key)} must be above 0 and finite")
        if not self.min_bytes >= 0:
            raise ConfigError(f"bandwidth meter: min_bytes = {self.min_bytes} must be 0 or more")
        self._ways = {"up": _OneWay(self.first.up_bytes_per_s), "down": _OneWay(self.first.down_bytes_per_s)}

    def completed(self, direction: Direction, num_bytes: float, seconds: float, now_s: float) -> None:
        """Count a transfer that took `seconds`, latency included, and ended at `now_s`; nothing is under way then."""
        if not (num_bytes >= 0 and 0 <= seconds < math.inf):
            raise ConfigError(f"bandwidth meter: a transfer of {num_bytes} bytes in {seconds} s cannot be")
        way = self._way(direction)
        way.waiting_since_s = None
        carrying_s = seconds - self.first.latency_s
        if num_bytes < self.min_bytes or carrying_s <= 0:
            return
        fading = math.exp(-max(0.0, now_s - way.counted_s) / self.memory_s)
        share = min(1.0, self.memory_s / carrying_s)
        way.num_bytes = way.num_bytes * fading + num_bytes * share
        way.seconds = way.seconds * fading + carrying_s * share
        way.counted_s = now_s

    def waiting(self, direction: Direction, since_s: float, num_bytes: float) -> None:
        """Note that `num_bytes` are under way, or overdue, since `since_s`; a later call replaces an earlier one."""
        way = self._way(direction)
        way.waiting_since_s, way.waiting_bytes = since_s, max(1.0, num_bytes)

    def idle(self, direction: Direction) -> None:
        """Note that nothing is under way, so that silence means nothing."""
        self._way(direction).waiting_since_s = None

    def rates(self, now_s: float) -> LinkRates:
        """Return what the link carries, as far as can be known at `now_s`."""
        return LinkRates(up_bytes_per_s=self._rate(self._ways["up"], now_s),
                         down_bytes_per_s=self._rate(self._ways["down"], now_s), latency_s=self.first.latency_s)

    def _rate(self, way: _OneWay, now_s: float) -> float:
        rate = way.bytes_per_s
        if way.waiting_since_s is None:
            return rate
        waited_s = now_s - way.waiting_since_s - self.first.latency_s
        if waited_s * rate <= way.waiting_bytes:  # not late yet
            return rate
        late_s = waited_s - way.waiting_bytes / rate
        return 0.0 if late_s >= self.silence_s else way.waiting_bytes / waited_s

    def _way(self, direction: Direction) -> _OneWay:
        try:
            return self._ways[direction]
        except KeyError:
            raise ConfigError(f"bandwidth meter: direction {direction!r} is unknown; use up or down") from None
