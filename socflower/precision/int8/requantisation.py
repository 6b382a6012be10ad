"""Rounding of accumulators to int8, with a known exponent or after a maximum search; and when to search (rescaling).

The shift follows from the bit length of the largest magnitude; Mandheling's Listing 1 takes the largest count of
leading zeros, which is that of the smallest. Rounding can carry a value to 128, so values saturate at 127 afterwards.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from socflower import _int8
from socflower.errors import TrainingFailed, require_range
from socflower.plain_numbers import plain_numbers
from socflower.precision.algorithm import Rounding
from socflower.precision.int8.batch_share import BatchShare
from socflower.precision.int8.fixed_point import shift_for


@plain_numbers
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

    __slots__ = (
        "_batch",
        "_due",
        "_last_change",
        "_num_changes",
        "_policy",
        "exponent",
        "num_looks",
    )

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
        return [
            self.exponent,
            self.num_looks,
            self._batch,
            self._due,
            self._last_change,
            self._num_changes,
        ]

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
        mean = max(
            self._last_change / self._num_changes,
            (self._batch - self._last_change) / (self._num_changes + 1),
        )
        return max(1, int(mean / 2))


MAX_SHIFT = 30
MAX_EXPONENT = 90
"""Beyond 2^90 float32 arithmetic on the scales would overflow; networks that converge stay far below."""

ZERO_EXPONENT = -7
"""Exponent of all-zero tensors; their accumulator's exponent would decrease from layer to layer."""

Int8Array = npt.NDArray[np.int8]
Int32Array = npt.NDArray[np.int32]


def round_elementwise(
    name: str,
    share: BatchShare,
    tracker: ScaleTracker | None,
    acc_exponent: int,
    run: Callable[[bool, int], int],
) -> int:
    """Store the result of `run(store, shift)` and return the exponent of the stored values.

    `run` returns the largest magnitude of the share before rounding; it is cheap enough to compute twice, so nothing
    wider than int8 is ever stored.
    """
    known = _known_shift(tracker, acc_exponent)
    if known is not None and not share.saturates(_saturates(run(True, known), known)):
        return _use_known_exponent(tracker, acc_exponent + known)
    largest = int(share.most(run(False, 0)))
    shift = shift_for(largest)
    run(True, shift)
    return _record_exponent(name, tracker, acc_exponent + shift, largest)


def round_product(
    name: str,
    engine: _int8.Engine,
    share: BatchShare,
    tracker: ScaleTracker | None,
    acc_exponent: int,
    run: Callable[[Int8Array | Int32Array, int], int],
    out: Int8Array,
    accumulators: Int32Array,
    rounding: Rounding,
) -> int:
    """Store the result of `run(destination, shift)` in `out` and return the exponent of the stored values.

    A product is too costly to compute twice: without a known exponent its int32 values go to `accumulators`
    (shaped as `out`); this is the cost of the search for a new exponent (Mandheling §3.4).
    """
    known = _known_shift(tracker, acc_exponent)
    if known is not None and not share.saturates(_saturates(run(out, known), known)):
        return _use_known_exponent(tracker, acc_exponent + known)
    largest = int(share.most(run(accumulators, 0)))
    shift = shift_for(largest)
    _int8.requantise(engine, accumulators, out, shift, rounding)
    return _record_exponent(name, tracker, acc_exponent + shift, largest)


def _known_shift(tracker: ScaleTracker | None, acc_exponent: int) -> int | None:
    known = None if tracker is None else tracker.known()
    if known is None or not 0 <= known - acc_exponent <= MAX_SHIFT:
        return None
    return known - acc_exponent


def _saturates(largest: int, shift: int) -> bool:
    return largest >> shift > 127


def _use_known_exponent(tracker: ScaleTracker | None, exponent: int) -> int:
    assert tracker is not None
    tracker.end_batch()
    return exponent


def _record_exponent(name: str, tracker: ScaleTracker | None, exponent: int, largest: int) -> int:
    if largest == 0:  # any exponent is right for zeros, so the tracker does not store one
        if tracker is None:
            return ZERO_EXPONENT
        tracker.end_batch()
        return ZERO_EXPONENT if tracker.exponent is None else tracker.exponent
    if abs(exponent) > MAX_EXPONENT:
        raise TrainingFailed(
            f"{name}: values reach {largest} * 2^{exponent}, beyond what int8 training can scale; lower the learning "
            "rate, or load an earlier checkpoint"
        )
    if tracker is not None:
        tracker.found(exponent)
    return exponent
