"""Functions of one number and their derivatives, from which the tables of int8 operators are made.

Each is a function of (x, arguments). Derivatives are torch's, also at the points where the function has a corner.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

Arguments = tuple[float, ...]
_Formula = Callable[[float, Arguments], float]


@dataclass(frozen=True, slots=True)
class PointwiseFunction:
    """A function, its derivative, the number of its arguments, and whether its values are never negative."""

    value: _Formula
    slope: _Formula
    num_arguments: int = 0
    non_negative: bool = False


def _sigmoid(x: float) -> float:
    # Of a negative number, so that `exp` does not overflow.
    power = math.exp(-abs(x))
    return (1.0 if x >= 0.0 else power) / (1.0 + power)


def _sigmoid_slope(x: float) -> float:
    power = math.exp(-abs(x))
    return power / (1.0 + power) ** 2


def _normal(x: float) -> float:
    """Return the distribution function of the standard normal distribution."""
    return 0.5 * math.erfc(-x / math.sqrt(2.0))


def _normal_density(x: float) -> float:
    return math.exp(-0.5 * x * x) / math.sqrt(2.0 * math.pi)


_GELU_CUBE = 0.044715


def _gelu_angle(x: float) -> float:
    return math.sqrt(2.0 / math.pi) * (x + _GELU_CUBE * x**3)


def _tanh_gelu_slope(x: float) -> float:
    tangent = math.tanh(_gelu_angle(x))
    inner = math.sqrt(2.0 / math.pi) * (1.0 + 3.0 * _GELU_CUBE * x * x)
    return 0.5 * (1.0 + tangent) + 0.5 * x * (1.0 - tangent * tangent) * inner


def _softplus(x: float) -> float:
    return max(x, 0.0) + math.log1p(math.exp(-abs(x)))


def _mish_slope(x: float) -> float:
    tangent = math.tanh(_softplus(x))
    return tangent + x * (1.0 - tangent * tangent) * _sigmoid(x)


def _clamped(x: float, least: float, most: float) -> float:
    return min(max(x, least), most)


def _hardswish_slope(x: float) -> float:
    if x <= -3.0:
        return 0.0
    return 1.0 if x >= 3.0 else x / 3.0 + 0.5


FUNCTIONS: dict[str, PointwiseFunction] = {
    "sigmoid": PointwiseFunction(
        lambda x, _: _sigmoid(x), lambda x, _: _sigmoid_slope(x), non_negative=True
    ),
    "tanh": PointwiseFunction(lambda x, _: math.tanh(x), lambda x, _: 1.0 - math.tanh(x) ** 2),
    "gelu": PointwiseFunction(
        lambda x, _: x * _normal(x), lambda x, _: _normal(x) + x * _normal_density(x)
    ),
    "gelu-tanh": PointwiseFunction(
        lambda x, _: 0.5 * x * (1.0 + math.tanh(_gelu_angle(x))), lambda x, _: _tanh_gelu_slope(x)
    ),
    "silu": PointwiseFunction(
        lambda x, _: x * _sigmoid(x), lambda x, _: _sigmoid(x) + x * _sigmoid_slope(x)
    ),
    "mish": PointwiseFunction(
        lambda x, _: x * math.tanh(_softplus(x)), lambda x, _: _mish_slope(x)
    ),
    "softplus": PointwiseFunction(
        lambda x, a: _softplus(a[0] * x) / a[0], lambda x, a: _sigmoid(a[0] * x), 1, True
    ),
    "hardswish": PointwiseFunction(
        lambda x, _: x * _clamped(x + 3.0, 0.0, 6.0) / 6.0, lambda x, _: _hardswish_slope(x)
    ),
    "hardsigmoid": PointwiseFunction(
        lambda x, _: _clamped(x + 3.0, 0.0, 6.0) / 6.0,
        lambda x, _: 1.0 / 6.0 if -3.0 < x < 3.0 else 0.0,
        non_negative=True,
    ),
    # (least, most): the derivative of torch's clamp is 1 at the ends, that of its hardtanh is 0.
    "clip": PointwiseFunction(
        lambda x, a: _clamped(x, a[0], a[1]), lambda x, a: 1.0 if a[0] <= x <= a[1] else 0.0, 2
    ),
    "clamp": PointwiseFunction(
        lambda x, a: _clamped(x, a[0], a[1]), lambda x, a: 1.0 if a[0] < x < a[1] else 0.0, 2
    ),
    # (slope below 0)
    "leaky-relu": PointwiseFunction(
        lambda x, a: x if x > 0.0 else a[0] * x, lambda x, a: 1.0 if x > 0.0 else a[0], 1
    ),
    # (alpha, scale): SELU is an ELU too.
    "elu": PointwiseFunction(
        lambda x, a: a[1] * (x if x > 0.0 else a[0] * math.expm1(x)),
        lambda x, a: a[1] * (1.0 if x > 0.0 else a[0] * math.exp(x)),
        2,
    ),
    # (factor, offset)
    "affine": PointwiseFunction(lambda x, a: a[0] * x + a[1], lambda x, a: a[0], 2),
    "square": PointwiseFunction(lambda x, _: x * x, lambda x, _: 2.0 * x, non_negative=True),
    "abs": PointwiseFunction(
        lambda x, _: abs(x), lambda x, _: math.copysign(1.0, x) if x else 0.0, non_negative=True
    ),
}
