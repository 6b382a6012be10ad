"""When a layer's exponent is recomputed: self-adaptive rescaling (F16, Mandheling §3.4).

Finding an exponent means storing int32 accumulators until their maximum is known. With a known exponent, a kernel
rounds each block before it stores it. Exponents change rarely once training has settled, so each one is searched
for only in some batches.
"""

from __future__ import annotations

from dataclasses import dataclass

from socflower.errors import require_range


@dataclass(frozen=True, kw_only=True, slots=True)
class RescalingPolicy:
    """With `adaptive` False every exponent is searched in every batch, as always in the first `warm_up_batches`."""

    adaptive: bool = True
    warm_up_batches: int = 100

    def __post_init__(self) -> None:
        require_range("rescaling", least=1, warm_up_batches=self.warm_up_batches)


class ScaleTracker:
    """The exponent of one tensor, and the batch of the next search for it.

    The period is max(1, half the mean interval between the changes seen so far); before a first change, half the
    batches since the beginning. Saturation causes a search at once.
    """

    __slots__ = ("_batch", "_due", "_last_change", "_num_changes", "_policy", "exponent", "num_looks")

    def __init__(self, policy: RescalingPolicy) -> None:
        self._policy = policy
        self._batch = 0
        self._due = 0
        self._last_change = 0
        self._num_changes = 0
        self.exponent: int | None = None
        self.num_looks = 0

    def to_json(self) -> list[int | None]:
        """Return the state as plain values."""
        return [self.exponent, self.num_looks, self._batch, self._due, self._last_change, self._num_changes]

    @classmethod
    def from_json(cls, policy: RescalingPolicy, values: list[int]) -> ScaleTracker:
        """Return the tracker that `to_json` described."""
        tracker = cls(policy)
        tracker.exponent, tracker.num_looks = values[0], values[1]
        tracker._batch, tracker._due, tracker._last_change, tracker._num_changes = values[2:]
        return tracker

    def known(self) -> int | None:
        """Return the exponent to use for this batch, or None if it must be searched."""
        return self.exponent if self._batch < self._due else None

    def end_batch(self) -> None:
        """Count a batch for which the known exponent was used."""
        self._batch += 1

    def found(self, exponent: int) -> None:
        """Store the exponent found in this batch, and count the batch."""
        if self.exponent is not None and exponent != self.exponent:
            self._num_changes += 1
            self._last_change = self._batch
        self.exponent = exponent
        self.num_looks += 1
        if self._policy.adaptive and self._batch + 1 >= self._policy.warm_up_batches:
            self._due = self._batch + self._period()
        else:
            self._due = self._batch + 1
        self._batch += 1

    def _period(self) -> int:
        if self._num_changes == 0:
            return max(1, (self._batch + 1) // 2)
        # The time since the last change is an open interval: it counts once it makes the mean longer.
        mean = max(self._last_change / self._num_changes, (self._batch - self._last_change) / (self._num_changes + 1))
        return max(1, int(mean / 2))
