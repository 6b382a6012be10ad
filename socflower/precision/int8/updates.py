"""Update rules: how a gradient changes a parameter (the fourth element of a training algorithm)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from socflower import _int8
from socflower.precision.algorithm import (
    MOST_SHIFT,
    Fp32Update,
    IntegerUpdate,
    OutsideUpdate,
    Rounding,
    TrainingAlgorithm,
)
from socflower.precision.int8.fixed_point import FloatArray, Int32Array, shift_for
from socflower.precision.int8.parameters import Vector, Weight, largest_by_channel
from socflower.precision.int8.requantisation import (
    MAX_EXPONENT,
    exponent_within_float32,
)
from socflower.precision.int8.stalling import StallWatch

_PLAIN_SGD = Fp32Update()
"""The update of vectors beside int8 weights."""


@dataclass(frozen=True, slots=True)
class Rate:
    """A learning rate, for gradients that are sums over so many samples."""

    learning_rate: float
    num_samples: int

    @property
    def of_sum(self) -> float:
        """Factor of a gradient in a step of plain SGD."""
        return self.learning_rate / self.num_samples


def update_weight(
    name: str,
    engine: _int8.Engine,
    algorithm: TrainingAlgorithm,
    weight: Weight,
    gradient: Int32Array,
    *,
    largest: int,
    gradient_scale: FloatArray,
    rate: Rate,
    progress: float,
    stalls: StallWatch,
) -> None:
    """Update `weight` with an int32 gradient whose real value is gradient * gradient_scale, one for each channel.

    Under an outside update only `weight.gradient` changes: it becomes the gradient times the rate.

    `largest` is the gradient's largest magnitude; `stalls` notes whether an integer update changes anything. Raises
    TrainingFailed, with `name`, when FP32 weights have diverged.
    """
    rule = algorithm.update
    if isinstance(rule, IntegerUpdate):
        shift, is_certain = _integer_step(rule, weight, gradient, largest, progress)
        in_doubt = not is_certain and not stalls.has_moved
        before = weight.data.copy() if in_doubt else None
        _int8.update_weight(engine, weight.data, gradient, shift, rule.rounding)
        stalls.has_moved |= largest > 0 if before is None else bool((before != weight.data).any())
        return
    if isinstance(rule, OutsideUpdate):
        assert weight.gradient is not None
        scale = gradient_scale * np.float32(rate.of_sum)
        _int8.export_gradient(engine, gradient, weight.gradient, scale)
        return
    if rule.gradient_bits is not None:
        gradient, shift = _rounded(engine, gradient, largest, rule.gradient_bits)
        gradient_scale = gradient_scale * np.float32(2.0**shift)
    _update_master(name, engine, rule, weight, gradient, gradient_scale, rate)
    if (bits := algorithm.forward.mantissa_bits) is not None:
        _int8.round_elements(engine, weight.data, bits)


def _update_master(
    name: str,
    engine: _int8.Engine,
    rule: Fp32Update,
    weight: Weight,
    gradient: Int32Array,
    gradient_scale: FloatArray,
    rate: Rate,
) -> None:
    """Update the FP32 copy of `weight`, and quantise it again."""
    assert weight.master is not None
    if rule.momentum and weight.velocity is None:
        weight.velocity = np.zeros_like(weight.master)
    is_plain = not rule.momentum and not rule.weight_decay
    # As `descend` for vectors: plain SGD multiplies once.
    inverse, learning_rate = (
        (rate.of_sum, 1.0) if is_plain else (1.0 / rate.num_samples, rate.learning_rate)
    )
    # Exponents seldom change, so the weights are rounded at the one that they have, in the same pass.
    exponent = weight.exponent
    has_unit = weight.channel_units is None and rule.weight_bits is None
    is_rounded = has_unit and abs(exponent) <= MAX_EXPONENT
    largest_weight = _int8.descend(
        engine,
        weight.master,
        weight.velocity if rule.momentum else None,
        gradient.reshape(weight.master.shape),
        gradient_scale,
        inverse,
        learning_rate,
        rule.momentum,
        rule.weight_decay,
        weight.data if is_rounded else None,
        exponent if is_rounded else 0,
    )
    if weight.channel_units is not None:
        per_real = weight.fit(name, largest_by_channel(weight.master))
        _int8.quantise_by_channel(engine, weight.master, per_real, weight.data)
        return
    weight.exponent = exponent_within_float32(name, largest_weight)
    # After that check: the range of the rounded masters would hide that they have diverged.
    if rule.weight_bits is not None:
        largest_weight = _in_fixed_point(weight.master, rule.weight_bits)
        weight.exponent = exponent_within_float32(name, largest_weight)
    if not is_rounded or weight.exponent != exponent:
        _int8.quantise(engine, weight.master, weight.data, weight.exponent)


# Weights count as if their mean magnitude, over padded channels too, were this at least: zeros have to begin.
_LEAST_MEAN = 4


def _integer_step(
    rule: IntegerUpdate, weight: Weight, gradient: Int32Array, largest: int, progress: float
) -> tuple[int, bool]:
    """Return how far the gradient is shifted, and whether its largest element then changes its weight."""
    if rule.relative is None:
        bits = rule.bits_at(progress)
        return min(MOST_SHIFT, shift_for(largest, bits)), bits >= 1
    weights = max(_int8.sum_of_magnitudes(weight.data), _LEAST_MEAN * weight.data.size)
    shift = rule.relative_shift(progress, _int8.sum_of_magnitudes(gradient), weights)
    return shift, largest >> shift > 0


def _rounded(
    engine: _int8.Engine, gradient: Int32Array, largest: int, bits: int
) -> tuple[Int32Array, int]:
    """Return a gradient rounded to `bits` bits of magnitude, in units of 2^shift, and the shift."""
    shift = min(MOST_SHIFT, shift_for(largest, bits))
    rounded = np.empty(gradient.shape, dtype=np.int8)
    _int8.requantise(engine, gradient, rounded, shift, Rounding.PSEUDO_STOCHASTIC)
    return rounded.astype(np.int32), shift


def _in_fixed_point(values: FloatArray, bits: int) -> float:
    """Round numbers to multiples of 2^(1 - bits) between -1 and 1, in place; return the largest magnitude."""
    per_unit = np.float32(2.0 ** (bits - 1))
    most = 1 - 1 / per_unit
    np.multiply(values, per_unit, out=values)
    np.rint(values, out=values)
    np.divide(values, per_unit, out=values)
    np.clip(values, -most, most, out=values)
    return float(np.abs(values).max(initial=0.0))


def update_vector(
    algorithm: TrainingAlgorithm, vector: Vector, gradient: FloatArray, rate: Rate
) -> None:
    """Update a vector by SGD; under an outside update store the gradient."""
    rule = algorithm.update
    if isinstance(rule, OutsideUpdate):
        assert vector.gradient is not None
        np.multiply(gradient, np.float32(rate.of_sum), out=vector.gradient)
        return
    sgd = rule if isinstance(rule, Fp32Update) else _PLAIN_SGD
    vector.velocity = descend(vector.data, vector.velocity, gradient, rate, sgd)


def descend(
    values: FloatArray,
    velocity: FloatArray | None,
    gradient: FloatArray,
    rate: Rate,
    rule: Fp32Update,
) -> FloatArray | None:
    """Do a step of torch.optim.SGD on `values` in place and return the velocity; `gradient` is overwritten.

    velocity = momentum * velocity + mean gradient + weight_decay * values, values -= learning_rate * velocity.
    """
    if not rule.momentum and not rule.weight_decay:
        gradient *= np.float32(rate.of_sum)
        values -= gradient
        return velocity
    gradient *= np.float32(1.0 / rate.num_samples)
    if rule.weight_decay:
        gradient += np.float32(rule.weight_decay) * values
    if rule.momentum:
        if velocity is None:
            velocity = np.zeros_like(values)
        velocity *= np.float32(rule.momentum)
        velocity += gradient
        gradient = velocity
    values -= np.float32(rate.learning_rate) * gradient
    return velocity
