"""When groups synchronise: intervals in epochs, rounded to whole steps (F3, SoCFlow+ section 3.1).

The interval is stored, not the paper's frequency. Positions, not lengths, are rounded: 0.25 epochs of 97 steps
give intervals of 24, 25, 24 and 24 steps, so that four of them are an epoch.
"""

import math
from dataclasses import dataclass
from fractions import Fraction

from socflower.errors import ConfigError

DECAY = "decay"
"""The paper's schedule: frequent synchronisation at first, doubled intervals later."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SyncInterval:
    """Steps of every group between two synchronisations; the second one ends it."""

    index: int
    first_step: int
    num_steps: int
    epoch_end: float  # epochs done at its end
    deal_epoch: int  # the newest epoch that began with a synchronisation: when data could last change groups


def group_steps_per_epoch(num_samples: int, num_groups: int, batch_size: int) -> int:
    """Return ceil(ceil(n / N) / batch): all groups take the same number of steps, also those with less data."""
    for name, value in (("num_samples", num_samples), ("num_groups", num_groups), ("batch_size", batch_size)):
        if value < 1:
            raise ConfigError(f"schedule: {name} must be 1 or more, got {value}")
    most_samples = -(-num_samples // num_groups)
    return -(-most_samples // batch_size)


def sync_schedule(
    num_epochs: int, steps_per_epoch: int, interval_epochs: float | str, *,
    initial: float = 0.25, doubling_epochs: int = 10, maximum: float = 2.0,
) -> tuple[SyncInterval, ...]:
    """Return the intervals of a training of `num_epochs`, in order, without gap or overlap (F3).

    `interval_epochs` is a number of epochs, or "decay": `initial`, doubled every `doubling_epochs` (the paper's
    GN), up to `maximum`; an interval has the length that holds where it begins. Each has at least one step, and
    the last one is cut where training ends. Raises `ConfigError` for values that cannot be.
    """
    for name, value in (("epochs", num_epochs), ("steps_per_epoch", steps_per_epoch),
                        ("doubling_epochs", doubling_epochs)):
        if value < 1:
            raise ConfigError(f"schedule: {name} must be 1 or more, got {value}")
    if isinstance(interval_epochs, str):
        if interval_epochs != DECAY:
            raise ConfigError(f"schedule: sync_interval_epochs = {interval_epochs!r} must be a number of epochs "
                              f"or {DECAY!r}")
        if not 0.0 < initial <= maximum < math.inf:
            raise ConfigError(f"schedule: need 0 < initial <= maximum, got {initial} and {maximum}")
        shortest, longest = _exact(initial), _exact(maximum)
    else:
        if not 0.0 < interval_epochs < math.inf:
            raise ConfigError(f"schedule: sync_interval_epochs = {interval_epochs} must be above 0 and finite")
        shortest = longest = _exact(interval_epochs)
    total_steps = num_epochs * steps_per_epoch
    intervals: list[SyncInterval] = []
    position, first = Fraction(0), 0  # in epochs, in steps
    deal_epoch = 0
    while first < total_steps:
        interval = min(shortest * 2 ** (int(position) // doubling_epochs), longest)
        position += interval
        end = math.floor(position * steps_per_epoch + Fraction(1, 2))
        if end <= first:
            # An interval below one step would never get on: it is one step, and the next begins where it ends.
            end = first + 1
            position = Fraction(end, steps_per_epoch)
        end = min(end, total_steps)
        if first % steps_per_epoch == 0:
            deal_epoch = first // steps_per_epoch
        intervals.append(SyncInterval(index=len(intervals), first_step=first, num_steps=end - first,
                                      epoch_end=end / steps_per_epoch, deal_epoch=deal_epoch))
        first = end
    return tuple(intervals)


def _exact(epochs: float) -> Fraction:
    """Return the decimal fraction that was written, so that ten times 0.1 is 1."""
    return Fraction(repr(float(epochs)))
