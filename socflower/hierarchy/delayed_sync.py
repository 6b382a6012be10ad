"""When groups synchronise: intervals in epochs, rounded to whole steps (F3, SoCFlow+ section 3.1).

Intervals are given in epochs, not as the paper's frequency. Their positions are rounded, not their lengths: 0.25
epochs of 97 steps give intervals of 24, 25, 24 and 24 steps, so that four of them make an epoch.

Groups of a server meet at every synchronisation, the servers of a site at every `server_interval`-th and at the last.
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

MOST_INTERVALS = 1_000_000
"""Limit of a schedule's length, above that of any real training; such a schedule takes a gigabyte of memory."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SyncInterval:
    """Steps of every group between two synchronisations, and the synchronisation at their end."""

    index: int
    first_step: int
    num_steps: int
    epoch_end: float  # epochs done at its end
    deal_epoch: int  # the latest epoch that began with a synchronisation of all, when data could change groups
    across_servers: bool = (
        True  # whether all groups synchronise at its end, or those of each server
    )


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
    initial: float = 0.25,
    doubling_epochs: int = 10,
    maximum: float = 2.0,
    server_interval: int = 1,
) -> tuple[SyncInterval, ...]:
    """Return the intervals of a training of `num_epochs`, in order, without gap or overlap (F3).

    `interval_epochs` is a number of epochs, or "decay": `initial`, doubled every `doubling_epochs` (the paper's
    GN), up to `maximum`; the start of an interval determines its length. Each has at least one step, and the last one
    ends with the training. Raises `ConfigError` for invalid values, and for more than
    `MOST_INTERVALS`.
    """
    cursor = _cursor(
        num_epochs,
        steps_per_epoch,
        interval_epochs,
        initial,
        doubling_epochs,
        maximum,
        server_interval,
    )
    least = cursor.total_steps / (
        cursor.longest * steps_per_epoch + 1
    )  # none has more steps, rounded up
    if least <= MOST_INTERVALS:
        shapes = sync_shapes(
            num_epochs,
            steps_per_epoch,
            interval_epochs,
            initial=initial,
            doubling_epochs=doubling_epochs,
            maximum=maximum,
            server_interval=server_interval,
        )
        least = Fraction(sum(count for _, count in shapes))
    if least > MOST_INTERVALS:
        raise _too_many(num_epochs, interval_epochs)
    return tuple(cursor.next() for _ in range(int(least)))


@plain_numbers
def sync_shapes(
    num_epochs: int,
    steps_per_epoch: int,
    interval_epochs: float | str,
    *,
    initial: float = 0.25,
    doubling_epochs: int = 10,
    maximum: float = 2.0,
    server_interval: int = 1,
) -> tuple[tuple[SyncInterval, int], ...]:
    """Return the distinct intervals of `sync_schedule`, the first of each kind, and how many of each kind there are.

    Two intervals are of one kind if they have equal numbers of steps, both or neither begin with data dealt anew, and
    both or neither end with all servers; the very first one is a kind of its own. Once intervals have stopped growing,
    their lengths are periodic, so the work does not depend on `num_epochs`.
    """
    cursor = _cursor(
        num_epochs,
        steps_per_epoch,
        interval_epochs,
        initial,
        doubling_epochs,
        maximum,
        server_interval,
    )
    firsts: dict[_Shape, SyncInterval] = {}
    counts: dict[_Shape, int] = {}
    walked: list[_Shape] = []
    reached: dict[
        tuple[Fraction, int, int], int
    ] = {}  # number of intervals before each place of the cursor
    skipped = False
    while not cursor.done:
        if walked and not skipped and cursor.interval == cursor.longest:
            place = cursor.place
            if place in reached:
                cycle = walked[reached[place] :]
                # One interval is left at least: the last one may differ, since all servers take part in it.
                times = (cursor.total_steps - cursor.first - 1) // sum(shape[0] for shape in cycle)
                for shape in cycle:
                    counts[shape] += times
                cursor.skip(times, cycle)
                skipped = True  # the remainder is no longer than a cycle
                continue
            reached[place] = len(walked)
        interval = cursor.next()
        shape = (
            interval.num_steps,
            interval.first_step == interval.deal_epoch * steps_per_epoch,
            interval.index == 0,
            interval.across_servers,
        )
        firsts.setdefault(shape, interval)
        counts[shape] = counts.get(shape, 0) + 1
        walked.append(shape)
        if len(walked) > MOST_INTERVALS:
            raise _too_many(num_epochs, interval_epochs)
    return tuple((interval, counts[shape]) for shape, interval in firsts.items())


_Shape: TypeAlias = tuple[int, bool, bool, bool]
"""Steps of an interval, whether data are dealt at its begin, whether it is the first of all, and across servers."""


class _IntervalCursor:
    """An iterator over the intervals, from its present position."""

    def __init__(
        self,
        num_epochs: int,
        steps_per_epoch: int,
        shortest: Fraction,
        longest: Fraction,
        doubling_epochs: int,
        server_interval: int,
    ) -> None:
        self.total_steps, self.first = num_epochs * steps_per_epoch, 0
        self._server_interval = server_interval
        self._steps_per_epoch, self._doubling_epochs = steps_per_epoch, doubling_epochs
        self._shortest, self.longest = shortest, longest
        self._position = Fraction(0)  # in epochs, as `first` is in steps
        self._index = self._deal_epoch = 0

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

        These are position and steps within the epoch, and synchronisations since all servers took part.
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
        if first % steps_per_epoch == 0 and self._index % self._server_interval == 0:
            self._deal_epoch = first // steps_per_epoch
        made = SyncInterval(
            index=self._index,
            first_step=first,
            num_steps=end - first,
            epoch_end=end / steps_per_epoch,
            deal_epoch=self._deal_epoch,
            across_servers=(self._index + 1) % self._server_interval == 0
            or end == self.total_steps,
        )
        self.first, self._index = end, self._index + 1
        return made

    def skip(self, times: int, cycle: Sequence[_Shape]) -> None:
        """Skip `times` repetitions of the intervals from here until this state is reached again."""
        num_steps = times * sum(shape[0] for shape in cycle)
        self.first += num_steps
        self._position += Fraction(num_steps, self._steps_per_epoch)
        self._index += times * len(cycle)
        if any(deals for _, deals, _, _ in cycle):
            self._deal_epoch += num_steps // self._steps_per_epoch


def _cursor(
    num_epochs: int,
    steps_per_epoch: int,
    interval_epochs: float | str,
    initial: float,
    doubling_epochs: int,
    maximum: float,
    server_interval: int,
) -> _IntervalCursor:
    """Return a cursor at the start of a training; `ConfigError` for invalid values."""
    require_range(
        "schedule",
        least=1,
        epochs=num_epochs,
        steps_per_epoch=steps_per_epoch,
        doubling_epochs=doubling_epochs,
        server_interval=server_interval,
    )
    shortest, longest = _lengths(interval_epochs, initial, maximum)
    if 2 * longest * steps_per_epoch < 1:
        shortest = longest = Fraction(
            1, steps_per_epoch
        )  # also one step each, without hundreds of digits
    return _IntervalCursor(
        num_epochs, steps_per_epoch, shortest, longest, doubling_epochs, server_interval
    )


def _too_many(num_epochs: int, interval_epochs: float | str) -> ConfigError:
    return ConfigError(
        f"schedule: epochs = {num_epochs} with sync_interval_epochs = {interval_epochs!r} make more "
        f"than {MOST_INTERVALS} rounds; train fewer epochs, or synchronise less often"
    )


def _lengths(
    interval_epochs: float | str, initial: float, maximum: float
) -> tuple[Fraction, Fraction]:
    """Return the shortest and the longest interval, in epochs; `ConfigError` for invalid values."""
    if isinstance(interval_epochs, str):
        if interval_epochs != DECAY:
            raise ConfigError(
                f"schedule: sync_interval_epochs = {interval_epochs!r} must be a number of epochs "
                f"or {DECAY!r}"
            )
        if not 0.0 < initial <= maximum < math.inf:
            raise ConfigError(f"schedule: need 0 < initial <= maximum, got {initial} and {maximum}")
        return _exact(initial), _exact(maximum)
    require_range("schedule", above=0.0, sync_interval_epochs=interval_epochs)
    return _exact(interval_epochs), _exact(interval_epochs)


def _exact(epochs: float) -> Fraction:
    """Return the exact decimal fraction of a number, so that ten times 0.1 is 1."""
    return Fraction(repr(float(epochs)))
