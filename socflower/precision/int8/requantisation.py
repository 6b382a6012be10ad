"""Rounding of accumulators to int8: at once with a known exponent, otherwise after a maximum search."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from socflower import _int8
from socflower.errors import TrainingFailed
from socflower.precision.algorithm import Rounding
from socflower.precision.int8.fixed_point import shift_for
from socflower.precision.int8.rescaling import ScaleTracker

MAX_SHIFT = 30
MAX_EXPONENT = 90
"""Beyond 2^90 float32 arithmetic on the scales would overflow; networks that converge stay far below."""

ZERO_EXPONENT = -7
"""Exponent of all-zero tensors; their accumulator's exponent would decrease from layer to layer."""

Int8Array = npt.NDArray[np.int8]
Int32Array = npt.NDArray[np.int32]


def round_elementwise(
    name: str, tracker: ScaleTracker | None, acc_exponent: int, run: Callable[[bool, int], int]
) -> int:
    """Store the result of `run(store, shift)` and return the exponent of the stored values.

    `run` returns the largest magnitude before rounding; it is cheap enough to compute twice, so nothing wider than
    int8 is ever stored.
    """
    known = _known_shift(tracker, acc_exponent)
    if known is not None and not _saturates(run(True, known), known):
        return _use_known_exponent(tracker, acc_exponent + known)
    largest = run(False, 0)
    shift = shift_for(largest)
    run(True, shift)
    return _record_exponent(name, tracker, acc_exponent + shift, largest)


def round_product(
    name: str, engine: _int8.Engine, tracker: ScaleTracker | None, acc_exponent: int,
    run: Callable[[Int8Array | Int32Array, int], int], out: Int8Array, accumulators: Int32Array, rounding: Rounding,
) -> int:
    """Store the result of `run(destination, shift)` in `out` and return the exponent of the stored values.

    A product is too costly to compute twice: without a known exponent its int32 values go to `accumulators`
    (shaped as `out`); this is the cost of the search for a new exponent (Mandheling §3.4).
    """
    known = _known_shift(tracker, acc_exponent)
    if known is not None and not _saturates(run(out, known), known):
        return _use_known_exponent(tracker, acc_exponent + known)
    largest = run(accumulators, 0)
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
