"""Update rules: how a gradient changes a parameter (the fourth element of a training algorithm)."""

from __future__ import annotations

import numpy as np

from socflower import _int8
from socflower.precision.algorithm import (
    Fp32Update,
    IntegerUpdate,
    OutsideUpdate,
    TrainingAlgorithm,
)
from socflower.precision.int8.fixed_point import FloatArray, Int32Array, shift_for
from socflower.precision.int8.parameters import Vector, Weight
from socflower.precision.int8.requantisation import MAX_SHIFT, exponent_within_float32


def update_weight(
    name: str,
    engine: _int8.Engine,
    algorithm: TrainingAlgorithm,
    weight: Weight,
    gradient: Int32Array,
    *,
    largest: int,
    gradient_scale: float,
    learning_rate: float,
    progress: float,
    scratch: FloatArray,
) -> None:
    """Update `weight` with an int32 gradient whose real value is gradient * gradient_scale.

    Under an outside update only `weight.gradient` changes: it becomes `learning_rate` times the gradient.

    `largest` is the gradient's largest magnitude; `scratch` holds as many float32 as the weight. Raises
    TrainingFailed, with `name`, when FP32 weights have diverged.
    """
    rule = algorithm.update
    if isinstance(rule, IntegerUpdate):
        shift = min(MAX_SHIFT, shift_for(largest, rule.bits_at(progress)))
        _int8.update_weight(engine, weight.data, gradient, shift, rule.rounding)
        return
    if isinstance(rule, OutsideUpdate):
        assert weight.gradient is not None
        _int8.export_gradient(engine, gradient, weight.gradient, gradient_scale * learning_rate)
        return
    assert weight.master is not None
    step = scratch[: gradient.size].reshape(gradient.shape)
    np.multiply(gradient, np.float32(gradient_scale), out=step, casting="unsafe")
    _descend(weight.master, weight, step, learning_rate, rule.momentum)
    weight.exponent = exponent_within_float32(name, _int8.max_magnitude(weight.master))
    _int8.quantise(engine, weight.master, weight.data, weight.exponent)


def update_vector(
    algorithm: TrainingAlgorithm,
    vector: Vector,
    gradient: FloatArray,
    learning_rate: float,
) -> None:
    """Update a vector by SGD, with the momentum of an FP32 update; under an outside update store the gradient."""
    rule = algorithm.update
    if isinstance(rule, OutsideUpdate):
        assert vector.gradient is not None
        np.multiply(gradient, np.float32(learning_rate), out=vector.gradient)
        return
    momentum = rule.momentum if isinstance(rule, Fp32Update) else 0.0
    _descend(vector.data, vector, gradient, learning_rate, momentum)


def _descend(
    values: FloatArray,
    holder: Weight | Vector,
    gradient: FloatArray,
    learning_rate: float,
    momentum: float,
) -> None:
    """values -= learning_rate * velocity, velocity = momentum * velocity + gradient; `gradient` is overwritten."""
    if momentum > 0.0:
        if holder.velocity is None:
            holder.velocity = np.zeros_like(values)
        holder.velocity *= np.float32(momentum)
        holder.velocity += gradient
        np.multiply(holder.velocity, np.float32(learning_rate), out=gradient)
    else:
        gradient *= np.float32(learning_rate)
    values -= gradient
