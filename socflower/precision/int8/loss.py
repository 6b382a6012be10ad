"""Cross-entropy: its value in float64 for reports, its gradient with respect to int8 logits for training."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from socflower import _int8
from socflower.precision.algorithm import BackwardRule
from socflower.precision.int8.requantisation import Int8Array

GRADIENT_EXPONENT = -7
"""softmax - one-hot lies in [-1, 1]; it is kept in units of 2^-7."""


def real_logits(logits: Int8Array, exponent: int, num_classes: int) -> npt.NDArray[np.float64]:
    """Return (batch, classes) real logits of a (1, 1, batch, channel stride) tensor."""
    return np.ldexp(logits[0, 0, :, :num_classes].astype(np.float64), exponent)


def mean_cross_entropy(real: npt.NDArray[np.float64], labels: npt.NDArray[np.int32]) -> float:
    """Return the mean of -log softmax at the label."""
    shifted = real - real.max(axis=1, keepdims=True)
    log_sum = np.log(np.exp(shifted).sum(axis=1))
    return float(np.mean(log_sum - shifted[np.arange(len(labels)), labels]))


def write_logits_gradient(
    rule: BackwardRule, logits: Int8Array, exponent: int, labels: npt.NDArray[np.int32], num_classes: int,
    out: Int8Array,
) -> int:
    """Write softmax(logits) - one-hot(labels), per sample, as int8 and return its exponent.

    The `integer` rule uses only integer arithmetic (NITI §3.3); `fp32` computes in float64 and rounds to nearest.
    """
    if rule.loss == "integer":
        _int8.softmax_gradient(logits, exponent, labels, out, num_classes, rule.rounding)
        return GRADIENT_EXPONENT
    real = real_logits(logits, exponent, num_classes)
    powers = np.exp(real - real.max(axis=1, keepdims=True))
    gradient = powers / powers.sum(axis=1, keepdims=True)
    gradient[np.arange(len(labels)), labels] -= 1.0
    out[...] = 0
    rounded = np.clip(np.rint(np.ldexp(gradient, -GRADIENT_EXPONENT)), -127, 127)
    out[0, 0, :, :num_classes] = rounded.astype(np.int8)
    return GRADIENT_EXPONENT
