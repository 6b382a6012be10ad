"""When groups synchronise: intervals in epochs, rounded to whole steps (F3, SoCFlow+ section 3.1).

Intervals are given in epochs, not as the paper's frequency. Their positions are rounded, not their lengths: 0.25
epochs of 97 steps give intervals of 24, 25, 24 and 24 steps, so that four of them make an epoch.

With "decay" the interval that starts at epoch e has min(1/4 · 2^⌊e / GN⌋, 2) epochs, where GN is `doubling_epochs`.

Groups of a server exchange models at every synchronisation; the servers of a site exchange them at every
`server_interval`-th synchronisation and at the last.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import TypeAlias

from socflower.errors import ConfigError, require_range
from socflower.plain_numbers import plain_numbers

DECAY = "decay"
"""The paper's schedule: frequent synchronisation at first, doubled intervals later."""

SHORTEST, LONGEST = Fraction(1, 4), Fraction(2)
"""Epochs of the first and of the longest intervals of the paper's schedule."""

DOUBLING_EPOCHS = 10
"""Epochs after which the paper's intervals are doubled (GN), unless a schedule has another number."""

MOST_INTERVALS = 1_000_000
"""Limit of a schedule's length, above that of any real training; such a schedule takes a gigabyte of memory."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SyncInterval:
    """Steps of every group between two synchronisations, and the synchronisation at their end."""

    index: int
    first_step: int
    num_steps: int
    # Epochs done at its end.
    epoch_end: float
    # The latest epoch that began with a synchronisation of all groups, when data could change groups.
    deal_epoch: int
    # Whether all groups synchronise at its end, or only those of each server.
    across_servers: bool = True


@plain_numbers
def group_steps_per_epoch(num_samples: int, num_groups: int, batch_size: int) -> int:
    """Return ceil(ceil(n / N) / batch): all groups take the same number of steps, even with less data."""
    require_range(
        "schedule", least=1, num_samples=num_samples, num_groups=num_groups, batch_size=batch_size
    )
    most_samples = -(-num_samples // num_groups)
    return -(-most_samples // batch_size)


@plain_numbers
def sync_schedule(
    num_epochs: int,
    steps_per_epoch: int,
    interval_epochs: float | str,
    *,
    server_interval: int = 1,
    doubling_epochs: int = DOUBLING_EPOCHS,
) -> tuple[SyncInterval, ...]:
    """Return the intervals of a training of `num_epochs`, in order, without gap or overlap (F3).

    `interval_epochs` is a number of epochs, or "decay": a quarter of an epoch at first, doubled every `doubling_epochs`
    (GN), at most two epochs; the start of an interval determines its length. Each interval has at least one step, and
    the last one ends with the training. Raises `ConfigError` for invalid values, and for more than `MOST_INTERVALS`.
    """
    cursor = _IntervalCursor(
        num_epochs, steps_per_epoch, interval_epochs, server_interval, doubling_epochs
    )
    # No interval has more steps than the longest one, rounded up.
    num_intervals = cursor.total_steps / (cursor.longest * steps_per_epoch + 1)
    # Only then is it worth counting them exactly: the count walks along the intervals.
    if num_intervals <= MOST_INTERVALS:
        shapes = sync_shapes(
            num_epochs,
            steps_per_epoch,
            interval_epochs,
            server_interval=server_interval,
            doubling_epochs=doubling_epochs,
        )
        num_intervals = Fraction(sum(count for _, count in shapes))
    cursor.require_few(num_intervals)
    return tuple(cursor.next() for _ in range(int(num_intervals)))


@plain_numbers
def sync_shapes(
    num_epochs: int,
    steps_per_epoch: int,
    interval_epochs: float | str,
    *,
    server_interval: int = 1,
    doubling_epochs: int = DOUBLING_EPOCHS,
    changes: Sequence[int] = (),
) -> tuple[tuple[SyncInterval, int], ...]:
    """Return the distinct kinds of intervals of `sync_schedule`: the first of each kind, and how many there are.

    Two intervals are of one kind if they have equal numbers of steps, both or neither begin with data dealt again, and
    both or neither end with all servers; the very first interval is a kind of its own. So is each one that begins
    before the last of `changes`, the steps at which the cost of a step changes. Once intervals have stopped growing,
    their lengths are periodic, so the work does not depend on `num_epochs`.
    """
    cursor = _IntervalCursor(
        num_epochs, steps_per_epoch, interval_epochs, server_interval, doubling_epochs
    )
    firsts: dict[_Shape, SyncInterval] = {}
    counts: dict[_Shape, int] = {}
    walked: list[_Shape] = []
    # Number of intervals before each place of the cursor, until a period has been skipped.
    reached: dict[tuple[Fraction, int, int], int] | None = {}
    settled = True
    while not cursor.done:
        is_periodic = settled and cursor.interval == cursor.longest
        if reached is not None and walked and is_periodic:
            if cursor.place in reached:
                cycle = walked[reached[cursor.place] :]
                times = cursor.skip(cycle)
                for shape in cycle:
                    counts[shape] += times
                # The remainder is no longer than a cycle.
                reached = None
                continue
            reached[cursor.place] = len(walked)
        interval = cursor.next()
        settled = interval.first_step >= max(changes, default=0)
        shape = (
            interval.num_steps,
            interval.first_step == interval.deal_epoch * steps_per_epoch,
            interval.index if interval.index == 0 or not settled else None,
            interval.across_servers,
        )
        firsts.setdefault(shape, interval)
        counts[shape] = counts.get(shape, 0) + 1
        walked.append(shape)
        cursor.require_few(len(walked))
    return tuple((interval, counts[shape]) for shape, interval in firsts.items())


_Shape: TypeAlias = tuple[int, bool, int | None, bool]
"""Steps, whether data are dealt at the start, the index if it is a kind of its own, and whether all servers end it."""


class _IntervalCursor:
    """An iterator over the intervals of a training, from its present position; refuses invalid values."""

    def __init__(
        self,
        num_epochs: int,
        steps_per_epoch: int,
        interval_epochs: float | str,
        server_interval: int,
        doubling_epochs: int,
    ) -> None:
        require_range(
            "schedule",
            least=1,
            epochs=num_epochs,
            steps_per_epoch=steps_per_epoch,
            server_interval=server_interval,
            doubling_epochs=doubling_epochs,
        )
        self._asked = f"epochs = {num_epochs} with sync_interval_epochs = {interval_epochs!r}"
        self._shortest, self.longest = _lengths(interval_epochs)
        # Intervals of less than half a step are also one step each; their fractions may have hundreds of digits.
        if 2 * self.longest * steps_per_epoch < 1:
            self._shortest = self.longest = Fraction(1, steps_per_epoch)
        self.total_steps, self.first = num_epochs * steps_per_epoch, 0
        self._steps_per_epoch, self._server_interval = steps_per_epoch, server_interval
        self._doubling_epochs = doubling_epochs
        # In epochs, as `first` is in steps.
        self._position = Fraction(0)
        self._index = self._deal_epoch = 0

    def require_few(self, num_intervals: Fraction | int) -> None:
        """Raise `ConfigError` for more than `MOST_INTERVALS`."""
        if num_intervals > MOST_INTERVALS:
            raise ConfigError(f"schedule: {self._asked} make more than {MOST_INTERVALS} rounds")

    @property
    def done(self) -> bool:
        """Whether training has ended."""
        return self.first >= self.total_steps

    @property
    def interval(self) -> Fraction:
        """Epochs of the interval that begins here."""
        # The exponent is limited, since the power's digits would otherwise grow with the length of training.
        doublings = min(int(self._position) // self._doubling_epochs, 64)
        return min(self._shortest * (1 << doublings), self.longest)

    @property
    def place(self) -> tuple[Fraction, int, int]:
        """The state that determines all later intervals once they stop growing.

        It has the position and the steps within the epoch, and the synchronisations since all servers took part.
        """
        epoch = int(self._position)
        return (
            self._position - epoch,
            self.first - epoch * self._steps_per_epoch,
            self._index % self._server_interval,
        )

    def next(self) -> SyncInterval:
        """Return the present interval, and advance to the next."""
        first, steps_per_epoch = self.first, self._steps_per_epoch
        self._position += self.interval
        end = math.floor(self._position * steps_per_epoch + Fraction(1, 2))
        if end <= first:
            # An interval below one step would make no progress: it is one step, and the next begins at its end.
            end = first + 1
            self._position = Fraction(end, steps_per_epoch)
        end = min(end, self.total_steps)
        # Data may change groups only after all servers have synchronised, at the start of an epoch.
        if first % steps_per_epoch == 0 and self._index % self._server_interval == 0:
            self._deal_epoch = first // steps_per_epoch
        is_turn_of_servers = (self._index + 1) % self._server_interval == 0
        made = SyncInterval(
            index=self._index,
            first_step=first,
            num_steps=end - first,
            epoch_end=end / steps_per_epoch,
            deal_epoch=self._deal_epoch,
            across_servers=is_turn_of_servers or end == self.total_steps,
        )
        self.first, self._index = end, self._index + 1
        return made

    def skip(self, cycle: Sequence[_Shape]) -> int:
        """Skip repetitions of the intervals from here until this state is reached again; return how many.

        At least one interval is left: the last one may differ, since all servers take part in it.
        """
        cycle_steps = sum(shape[0] for shape in cycle)
        times = (self.total_steps - self.first - 1) // cycle_steps
        self.first += times * cycle_steps
        self._position += Fraction(times * cycle_steps, self._steps_per_epoch)
        self._index += times * len(cycle)
        if any(deals for _, deals, _, _ in cycle):
            self._deal_epoch += times * cycle_steps // self._steps_per_epoch
        return times


def _lengths(interval_epochs: float | str) -> tuple[Fraction, Fraction]:
    """Return the shortest and the longest interval, in epochs; `ConfigError` for invalid values."""
    if interval_epochs == DECAY:
        return SHORTEST, LONGEST
    if isinstance(interval_epochs, str):
        raise ConfigError(f"schedule: sync_interval_epochs = {interval_epochs!r} must be {DECAY!r}")
    require_range("schedule", above=0.0, sync_interval_epochs=interval_epochs)
    # The exact decimal fraction, so that ten times 0.1 is 1.
    length = Fraction(repr(float(interval_epochs)))
    return length, length
