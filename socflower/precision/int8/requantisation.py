"""Rounding of accumulators to int8, with a known exponent or after a maximum search; and when to search (rescaling).

The shift follows from the bit length of the largest magnitude; Mandheling's Listing 1 takes the largest count of
leading zeros, which is that of the smallest. Rounding can carry a value to 128, so values saturate at 127 afterwards.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from typing import Annotated, Any

import numpy as np
import numpy.typing as npt
from pydantic import Field

from socflower import _int8
from socflower.errors import TrainingFailed
from socflower.field_rules import checked
from socflower.precision.algorithm import MOST_SHIFT, Rounding
from socflower.precision.int8.batch_share import BatchShare
from socflower.precision.int8.fixed_point import Int8Array, Int32Array, exponent_for, shift_for


@checked
class RescalingPolicy:
    """When the exponent of a tensor is searched again (F16).

    It is searched in each of the first `warm_up_batches`, and then at intervals that follow from all its changes, or
    from its `last_intervals` between changes as in Mandheling §3.4. With `adaptive` False it is searched in every
    batch.
    """

    adaptive: bool = True
    warm_up_batches: Annotated[int, Field(ge=1)] = 100
    last_intervals: Annotated[int, Field(ge=1)] | None = None


class ScaleTracker:
    """The exponent of one tensor, and the batch of the next search for it (F16).

    The period is max(1, half the mean interval between changes); before a first change, half the batches since the
    beginning. The mean is that of the last intervals that the policy names, or of all of them; then the time since the
    last change counts too, once it makes the mean longer. Saturation causes a search at once.
    """

    __slots__ = (
        "_batch",
        "_due",
        "_last_change",
        "_num_changes",
        "_policy",
        "_recent_changes",
        "exponent",
        "is_wide",
        "num_looks",
        "reach",
    )

    def __init__(self, policy: RescalingPolicy) -> None:
        self._policy = policy
        self._batch = 0
        self._due = 0
        self._last_change = 0
        self._num_changes = 0
        # Batches of the last changes, if the policy counts some intervals only; the first interval began with 0.
        self._recent_changes = [0]
        self.exponent: int | None = None
        # Whether the tensor was int16 after the last search (`round_gradient16`).
        self.is_wide = False
        # The exponent fits this part of the largest magnitude.
        self.reach = 1.0
        self.num_looks = 0

    def to_json(self) -> list[Any]:
        """Return the state as plain values."""
        return [getattr(self, name) for name in _SAVED]

    @classmethod
    def from_json(cls, policy: RescalingPolicy, values: list[Any]) -> ScaleTracker:
        """Return the tracker that `to_json` described."""
        tracker = cls(policy)
        for name, value in zip(_SAVED, values, strict=True):
            setattr(tracker, name, value)
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
            if (num_intervals := self._policy.last_intervals) is not None:
                changes = [*self._recent_changes, self._batch]
                self._recent_changes = changes[-num_intervals - 1 :]
        self.exponent = exponent
        self.num_looks += 1
        is_warm = self._policy.adaptive and self._batch + 1 >= self._policy.warm_up_batches
        self._due = self._batch + (self._period() if is_warm else 1)
        self._batch += 1

    def _period(self) -> int:
        if self._num_changes == 0:
            return max(1, (self._batch + 1) // 2)
        if self._policy.last_intervals is not None:
            first, *later = self._recent_changes
            return max(1, (self._last_change - first) // (2 * len(later)))
        closed = self._last_change / self._num_changes
        # The time since the last change is an open interval: it counts once it makes the mean longer.
        with_open = (self._batch - self._last_change) / (self._num_changes + 1)
        return max(1, int(max(closed, with_open) / 2))


_SAVED = (
    "exponent",
    "is_wide",
    "num_looks",
    "_batch",
    "_due",
    "_last_change",
    "_num_changes",
    "_recent_changes",
)


class ScaleTrackers:
    """The trackers of a model's tensors, by operator and role."""

    def __init__(self, policy: RescalingPolicy) -> None:
        self._policy = policy
        self._trackers: dict[tuple[str, str], ScaleTracker] = {}

    def tracker(self, name: str, role: str) -> ScaleTracker:
        """Return the tracker of a tensor, made at its first use."""
        tracker = self._trackers.get((name, role))
        if tracker is None:
            tracker = self._trackers[name, role] = ScaleTracker(self._policy)
        return tracker

    def copy(self) -> ScaleTrackers:
        """Return trackers with the same state, which later batches change independently."""
        other = ScaleTrackers(self._policy)
        other._trackers = {key: copy.copy(tracker) for key, tracker in self._trackers.items()}
        return other

    def to_json(self) -> list[Any]:
        """Return the state as plain values: [name, role, values of the tracker]."""
        return [[*key, tracker.to_json()] for key, tracker in self._trackers.items()]

    def restore(self, document: Sequence[Any]) -> None:
        """Replace all trackers by those that `to_json` described."""
        self._trackers = {
            (name, role): ScaleTracker.from_json(self._policy, values)
            for name, role, values in document
        }


_INT32_MAX = 2**31 - 1
MAX_EXPONENT = 90
"""Beyond 2^90 float32 arithmetic on the scales would overflow; networks that converge stay far below."""

ZERO_EXPONENT = -7
"""Exponent of all-zero tensors; their accumulator's exponent would decrease from layer to layer."""


def exponent_within_float32(name: str, largest: float) -> int:
    """Return the exponent of weights or gradients of this largest magnitude (F13).

    Raises TrainingFailed, with `name`, for a NaN, an infinity and values beyond 2^90.
    """
    if not largest <= 2.0**MAX_EXPONENT:
        raise TrainingFailed(
            f"{name}: values reach {largest:.3g}, the end of float32; lower the learning rate"
        )
    return max(exponent_for(largest), -MAX_EXPONENT)


def require_exponent(name: str, largest: str, exponent: int) -> None:
    """Raise TrainingFailed for a tensor, of this largest magnitude, whose exponent is beyond +-90."""
    if abs(exponent) > MAX_EXPONENT:
        raise TrainingFailed(
            f"{name}: values reach {largest}, beyond int8's scales; lower the learning rate"
        )


def round_elementwise(
    name: str,
    share: BatchShare,
    tracker: ScaleTracker | None,
    acc_exponent: int,
    run: Callable[[Int8Array | None, int], int],
    out: Int8Array,
) -> int:
    """Store the result of `run(out, shift)` and return the exponent of the stored values.

    `run` returns the largest magnitude of the share before rounding, and stores nothing in None. It is cheap enough to
    compute twice, so nothing wider than int8 is ever stored.
    """
    known = _known_shift(tracker, acc_exponent)
    if known is not None and not share.saturates(_saturates(tracker, run(out, known), known)):
        return _use_known_exponent(tracker, acc_exponent + known)
    largest = int(share.most(run(None, 0)))
    shift = shift_for(_reached(tracker, largest))
    run(out, shift)
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
    if known is not None and not share.saturates(_saturates(tracker, run(out, known), known)):
        return _use_known_exponent(tracker, acc_exponent + known)
    largest = int(share.most(run(accumulators, 0)))
    shift = shift_for(_reached(tracker, largest))
    _int8.requantise(engine, accumulators, out, shift, rounding)
    return _record_exponent(name, tracker, acc_exponent + shift, largest)


def round_gradient16(
    name: str,
    engine: _int8.Engine,
    share: BatchShare,
    tracker: ScaleTracker | None,
    acc_exponent: int,
    accumulators: Int32Array,
    out: Int8Array,
    wide_above: float,
) -> tuple[int, Int8Array | None]:
    """Store a gradient's accumulators to the nearest int8; return its exponent and, for int16, 256 times what is left.

    The width changes when the exponent is searched (`BackwardRule.wide_above`).
    """

    def run(into: Int8Array | None, shift: int) -> int:
        return _int8.requantise(engine, accumulators, into, shift, Rounding.NEAREST)

    num_looks = 0 if tracker is None else tracker.num_looks
    exponent = round_elementwise(name, share, tracker, acc_exponent, run, out)
    shift = max(0, exponent - acc_exponent)
    is_wide = tracker is not None and tracker.is_wide
    if tracker is None or tracker.num_looks != num_looks:
        is_wide = changes_mean(share, accumulators, out, shift, wide_above)
        if tracker is not None:
            tracker.is_wide = is_wide
    return exponent, low_half(engine, accumulators, out, shift) if is_wide else None


def changes_mean(
    share: BatchShare, exact: npt.NDArray[Any], rounded: Int8Array, shift: int, above: float
) -> bool:
    """Return whether log2(1 + |change| / mean) of the mean magnitude is above a threshold (Zhang et al. 2020, QEM)."""
    own = [np.abs(each, dtype=np.int64).sum() for each in (exact, rounded)]
    mean, rounded_mean = share.total(np.array(own, dtype=np.int64))
    return bool(abs(mean - math.ldexp(rounded_mean, shift)) > (2.0**above - 1.0) * mean)


def low_half(
    engine: _int8.Engine, accumulators: Int32Array, high: Int8Array, shift: int
) -> Int8Array:
    """Return int8 in units of 2^(shift - 8), nearest to what rounding to units of 2^shift has left."""
    left = accumulators - (high.astype(np.int32) << shift)
    low = np.empty_like(high)
    if shift < 8:
        left <<= 8 - shift
    _int8.requantise(engine, left, low, max(0, shift - 8), Rounding.NEAREST)
    return low


def fit_int32(
    share: BatchShare, sums: npt.NDArray[np.integer[Any]], most: int, out: Int32Array
) -> int:
    """Write exact integers (..., channels) to (..., channel stride) int32; return how far they were shifted right.

    Integers of more than 31 bits, which only a bound `most` beyond them allows, are rounded to 30 bits of magnitude,
    half away from zero.
    """
    drop = 0
    if most > _INT32_MAX:
        magnitudes = np.abs(sums)
        own_bits = int(magnitudes.max(initial=0)).bit_length()
        drop = max(0, int(share.most(float(own_bits))) - 30)
    if drop:
        sums = np.sign(sums) * ((magnitudes + (1 << (drop - 1))) >> drop)
    channels = sums.shape[-1]
    out[..., :channels] = sums
    out[..., channels:] = 0
    return drop


def _known_shift(tracker: ScaleTracker | None, acc_exponent: int) -> int | None:
    known = None if tracker is None else tracker.known()
    if known is None or not 0 <= known - acc_exponent <= MOST_SHIFT:
        return None
    return known - acc_exponent


def _saturates(tracker: ScaleTracker | None, largest: int, shift: int) -> bool:
    return _reached(tracker, largest) >> shift > 127


def _reached(tracker: ScaleTracker | None, largest: int) -> int:
    return largest if tracker is None else int(tracker.reach * largest)


def _use_known_exponent(tracker: ScaleTracker | None, exponent: int) -> int:
    assert tracker is not None
    tracker.end_batch()
    return exponent


def _record_exponent(name: str, tracker: ScaleTracker | None, exponent: int, largest: int) -> int:
    if largest == 0:
        # Any exponent is right for zeros, so the tracker does not store one.
        if tracker is None:
            return ZERO_EXPONENT
        tracker.end_batch()
        return ZERO_EXPONENT if tracker.exponent is None else tracker.exponent
    require_exponent(name, f"{largest} * 2^{exponent}", exponent)
    if tracker is not None:
        tracker.found(exponent)
    return exponent
