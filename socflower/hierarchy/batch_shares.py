"""Shares of a group's batch: each member's number of samples (F4), and the rates that shares follow (F20).

Shares in proportion to measured rates make all members end a step together. Member i takes t_i = a_i + b_i n_i
seconds for n_i of a batch's N samples: a_i is the fixed cost of a step, b_i the cost of a sample. Its measured rate is
n_i / t_i, and the new shares are n_i' = N (n_i / t_i) / sum_j (n_j / t_j) = n_i T / t_i, where
T = N / sum_j (n_j / t_j) lies between the shortest and the longest t. So

    t_i' - T = (a_i / t_i) (t_i - T).

The distance from T keeps its sign and shrinks by the fraction of fixed costs in a member's time: times approach each
other monotonically, without overshoot, and are equal after one step without fixed costs. Since samples are whole, this
ends where each t_i is within the mean time of one sample, t_i / n_i, of T.
"""

import math
import statistics
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from socflower.errors import ConfigError, require_range


def split_batch(batch_size: int, capacities: Sequence[float]) -> tuple[int, ...]:
    """Return how many samples each member takes: D * C_i / sum C, rounded by largest remainders (F4).

    The shares sum to `batch_size`, and each is its quota rounded down or up. Ties go to the earlier member, so
    all members compute the same split. A member without capacity gets no samples. Raises `ConfigError` for a
    negative batch, and for capacities that are negative, not finite, or all zero.
    """
    require_range("shares", least=0, batch_size=batch_size)
    require_capacities("shares", capacities)
    largest = max(capacities)
    # Relative to the largest, so that the sum cannot overflow.
    relative = [capacity / largest for capacity in capacities]
    total = sum(relative)
    quotas = [batch_size * capacity / total for capacity in relative]
    shares = [math.floor(quota) for quota in quotas]
    able = [index for index, capacity in enumerate(relative) if capacity]
    by_remainder = sorted(able, key=lambda index: (shares[index] - quotas[index], index))
    # The rounded-down quotas leave fewer samples than there are members.
    for index in by_remainder[: batch_size - sum(shares)]:
        shares[index] += 1
    return tuple(shares)


def require_capacities(where: str, capacities: Collection[float]) -> None:
    """Raise `ConfigError` unless capacities are finite and not negative, and one is above 0."""
    if not any(capacities) or not all(0.0 <= capacity < math.inf for capacity in capacities):
        raise ConfigError(
            f"{where}: capacities {list(capacities)} must be 0 or more, finite, and one above 0"
        )


_SETTLED = 0.2
"""After shares have moved, a remaining distance above this fraction of the threshold is corrected at once."""

_MAX_FOLLOW_UPS = 4
"""Most successive moves without patience; after that, patience applies again."""

_FIRST_PROBE, _LAST_PROBE = 8, 128
"""Observations between probes of a member without samples: at first and at most; each failed probe doubles them."""


@dataclass(slots=True)
class _Member:
    # Basis of the shares; as given until the first move, then in samples per second.
    rate: float
    # Samples per second, observed under the present shares.
    recent: list[float] = field(default_factory=list)
    # Observations in a row without samples.
    num_idle: int = 0
    probe_after: int = _FIRST_PROBE

    @property
    def is_due(self) -> bool:
        return self.rate > 0.0 and self.num_idle >= self.probe_after

    def postpone_probe(self, probe_after: int) -> None:
        self.num_idle, self.probe_after = 0, min(probe_after, _LAST_PROBE)
        self.recent.clear()


class CapacityFilter:
    """Rates of members that follow only lasting changes (F20); deterministic in the observations.

    A member's rate is the median of its newest `window` observations. Shares are constant until some member's fraction
    of all rates has differed from its accepted fraction by more than `threshold`, relative and in either direction, for
    `patience` successive observations. Then all rates are accepted, and again every few observations until they agree
    to a fifth of the threshold, since fixed costs weigh more in small shares. So unequal shares cost at most about
    `threshold` of a step.

    A member without samples for eight observations is due for a probe: the shares must give it at least one sample. If
    it is no faster than assumed, the next probe comes after twice as many observations, at most 128; otherwise it stays
    due until it has been observed often enough. A member with nominal capacity 0 is always left out.

    Shares are also constant until all members with samples have been observed `enough` times under them: the median of
    three observations ignores one outlier. If each observation is the median of many steps, as in `RingOutcome.rates`,
    `enough` and `patience` may be 1.

    Parameters
    ----------
    nominal : mapping of int to float
        Initial relative capacities, by member; finite, not negative, and one at least above 0.
    """

    def __init__(
        self,
        nominal: Mapping[int, float],
        *,
        threshold: float = 0.10,
        patience: int = 2,
        window: int = 5,
        enough: int = 3,
    ) -> None:
        require_capacities("nominal", nominal.values())
        require_range("capacities", above=0.0, threshold=threshold)
        require_range("capacities", least=1, patience=patience, enough=enough)
        require_range("capacities", least=enough, window=window)
        self._threshold, self._patience = threshold, patience
        self._window, self._enough = window, enough
        self._members = {ident: _Member(rate) for ident, rate in nominal.items()}
        self._num_away = self._num_follow_ups = 0
        self.num_noted = 0
        """Calls of `note` so far: of two filters of one group, the one with more has all observations of the other."""
        self.num_moves = 0
        """How often `capacities` has changed."""

    def capacities(self) -> dict[int, float]:
        """Return the accepted rates, relative to each other, for every member."""
        return {ident: member.rate for ident, member in self._members.items()}

    @property
    def due(self) -> frozenset[int]:
        """Members that must get at least one sample, so that they are observed again."""
        return frozenset(ident for ident, member in self._members.items() if member.is_due)

    def note(self, passes: Mapping[int, tuple[float, float]]) -> bool:
        """Add one observation of each present member: its samples, and the seconds that they took.

        Returns whether `capacities` have changed. Invalid observations, such as samples in no time, are ignored. Raises
        `ConfigError` for an unknown member.
        """
        unknown = passes.keys() - self._members.keys()
        if unknown:
            raise ConfigError(f"capacities: {sorted(unknown)} are not of {sorted(self._members)}")
        self.num_noted += 1
        observed: set[int] = set()
        # Sorted, so that the result does not depend on the order of the replies.
        for ident in sorted(passes):
            if self._observe(self._members[ident], *passes[ident]):
                observed.add(ident)
        self._end_failed_probes(observed)
        return self._decide({ident for ident in observed if self._members[ident].recent})

    def state(self) -> dict[str, Any]:
        """Return the state for `restore`, as plain JSON."""
        return {
            "members": [[ident, asdict(member)] for ident, member in self._members.items()],
            "away": self._num_away,
            "follow_ups": self._num_follow_ups,
            "noted": self.num_noted,
            "moves": self.num_moves,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore the state of another filter of the same members; raises `ConfigError` for other members."""
        members = {ident: _Member(**values) for ident, values in state["members"]}
        if members.keys() != self._members.keys():
            raise ConfigError(f"capacities: {sorted(members)} are not {sorted(self._members)}")
        self._members = members
        self._num_away, self._num_follow_ups = state["away"], state["follow_ups"]
        self.num_noted, self.num_moves = state["noted"], state["moves"]

    def _observe(self, member: _Member, num_samples: float, seconds: float) -> bool:
        """Record an observation; return whether it was valid."""
        if num_samples == 0.0:
            member.num_idle += 1
            return False
        rate = num_samples / seconds if num_samples > 0.0 and seconds > 0.0 else 0.0
        if not 0.0 < rate < math.inf:
            return False
        # A member that is due stays so until its probe has succeeded or failed.
        if not member.is_due:
            member.num_idle, member.probe_after = 0, _FIRST_PROBE
        member.recent = [*member.recent, rate][-self._window :]
        return True

    def _end_failed_probes(self, observed: set[int]) -> None:
        scale = self._scale({ident for ident in observed if not self._members[ident].is_due})
        for ident in observed:
            member = self._members[ident]
            if member.is_due and member.recent[-1] <= (1.0 + self._threshold) * scale * member.rate:
                member.postpone_probe(2 * member.probe_after)

    def _decide(self, ready: set[int]) -> bool:
        """Move if it is due. Every member that had samples must have enough observations."""
        fewest = min((len(self._members[ident].recent) for ident in ready), default=0)
        if len(ready) < 2 or fewest < self._enough:
            return False
        away = self._distance(ready)
        # Fixed costs weigh more in small shares, so the first move is only an approximation.
        if self._num_follow_ups:
            is_settled = away <= _SETTLED * self._threshold
            self._num_follow_ups = 0 if is_settled else self._num_follow_ups - 1
            moves = self._num_follow_ups > 0
        else:
            self._num_away = self._num_away + 1 if away > self._threshold else 0
            moves = self._num_away >= self._patience
            if moves:
                self._num_follow_ups = 1 + _MAX_FOLLOW_UPS
        if moves:
            self._move(ready)
        return moves

    def _distance(self, ready: set[int]) -> float:
        """Return the largest relative distance of a member's fraction of the rates from its accepted one."""
        order = sorted(ready)
        accepted = _parts([self._members[ident].rate for ident in order])
        measured = _parts([_median(self._members[ident].recent) for ident in order])
        largest = 0.0
        for old, new in zip(accepted, measured, strict=True):
            largest = max(largest, max(old / new, new / old) - 1.0 if old and new else math.inf)
        return largest

    def _move(self, ready: set[int]) -> None:
        """Accept the rates of `ready`; the others keep their rates relative to these."""
        scale = self._scale(ready)
        for ident, member in self._members.items():
            if ident in ready:
                member.rate = _median(member.recent)
                member.postpone_probe(_FIRST_PROBE)
            else:
                # Absent members keep their place relative to the others.
                member.rate *= scale
                member.recent.clear()
        self._num_away = 0
        self.num_moves += 1

    def _scale(self, ready: set[int]) -> float:
        """Return samples per second of one unit of accepted capacity, by the members that were observed."""
        order = [ident for ident in sorted(ready) if self._members[ident].rate]
        if not order:
            return 1.0
        observed = math.fsum(_median(self._members[ident].recent) for ident in order)
        return observed / math.fsum(self._members[ident].rate for ident in order)


def _median(rates: list[float]) -> float:
    return statistics.median_low(rates)


def _parts(rates: list[float]) -> list[float]:
    largest = max(rates, default=0.0)
    if not largest > 0.0:
        return rates
    # Relative to the largest, so that the sum cannot overflow.
    relative = [rate / largest for rate in rates]
    total = math.fsum(relative)
    return [rate / total for rate in relative]
