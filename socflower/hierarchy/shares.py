"""Shares of a group's batch: who computes how many samples, and what each mean gradient weighs (F4)."""

import math
from collections.abc import Sequence

from socflower.errors import ConfigError


def split_batch(batch_size: int, capacities: Sequence[float]) -> tuple[int, ...]:
    """Return how many samples each member takes: D * C_i / sum C, rounded by largest remainders (F4).

    The shares sum to `batch_size`, and each is its quota rounded down or up. Ties go to the earlier member, so
    all members compute the same split. A member without capacity gets no samples. Raises `ConfigError` for a
    negative batch, and for capacities that are negative, not finite, or all zero.
    """
    if batch_size < 0:
        raise ConfigError(f"shares: batch_size must not be negative, got {batch_size}")
    if not all(0.0 <= capacity < math.inf for capacity in capacities):
        raise ConfigError(f"shares: capacities must be finite and not negative, got {list(capacities)}")
    largest = max(capacities, default=0.0)
    if not largest > 0.0:
        raise ConfigError(f"shares: no member has capacity for {batch_size} samples, got {list(capacities)}; "
                          "give at least one above 0")
    relative = [capacity / largest for capacity in capacities]  # their sum cannot overflow
    total = sum(relative)
    quotas = [batch_size * capacity / total for capacity in relative]
    shares = [math.floor(quota) for quota in quotas]
    by_remainder = sorted((index for index, capacity in enumerate(relative) if capacity),
                          key=lambda index: (shares[index] - quotas[index], index))
    for index in by_remainder[:batch_size - sum(shares)]:
        shares[index] += 1
    return tuple(shares)


def member_weights(shares: Sequence[int]) -> tuple[float, ...]:
    """Return D_i / sum D: the weight of each member's mean gradient in the group's gradient (F4).

    With these weights one step over uneven shares equals one step over the whole batch. Raises `ConfigError` if
    there are no samples or fewer than none.
    """
    total = sum(shares)
    if total < 1 or min(shares) < 0:
        raise ConfigError(f"shares: need samples, none negative, to weigh members by, got {list(shares)}")
    return tuple(share / total for share in shares)
