"""Integer training algorithms: the four elements of Mandheling §3.2 as one dataclass.

An algorithm is a value whose elements name rules of the engine. To add an algorithm of the same family, add a value
here; a new rule is a function beside the ones in `updates.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from enum import IntEnum
from typing import Annotated, Any, Literal

from pydantic import Field

from socflower.errors import ConfigError
from socflower.field_rules import checked
from socflower.plain_numbers import plain_numbers


class Rounding(IntEnum):
    """How the low bits of an int32 accumulator are rounded off; the values are those of the native engine."""

    NEAREST = 0
    PSEUDO_STOCHASTIC = 1


MOST_SHIFT = 30
"""Kernels shift an int32 accumulator by at most so many bits."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OperatorTranslation:
    """Forward: every FP32 operator becomes its int8 kernel, maximum search and rounding shift (F13, F14).

    With `real` scales a BatchNorm reads the int32 accumulators of the convolution before it, so that the two round
    once, and its result and that of an addition have a real number as scale, with which the largest value is 127; with
    a `reach` below 1 that part of the largest value is 127, and values beyond saturate.

    With `mantissa_bits` M, from 1 to 4, values that products read and weights are rounded once more, to numbers with M
    mantissa and 2 exponent bits. The pixels of a sample's channel have a common scale, one of 5 - M powers of two, as
    have the taps of a weight between two channels. An int8 holds them exactly, in units of the tensor's scale.

    `replacements` translates modules of your own: by their class, a function that returns for such a module the torch
    module to train in its place, with state of the same names and shapes. It may hold operators that int8 has.
    """

    rounding: Rounding = Rounding.NEAREST
    scales: Literal["power-of-two", "real"] = "power-of-two"
    reach: float = 1.0
    mantissa_bits: int | None = None
    replacements: Mapping[type, Callable[[Any], Any]] = field(default_factory=dict, hash=False)


@dataclass(frozen=True, kw_only=True, slots=True)
class BackwardRule:
    """Backward: int8 errors of one exponent, int32 weight gradients. `loss` is the gradient of the logits.

    A pseudo-stochastic carry follows from the accumulator's low bits. BatchNorm's input gradient is a function of two
    int8 numbers in each channel, so equal ones are rounded equally and errors do not average out. With `dithered` its
    carry follows from a random number for each element.

    With `wide_above` the gradient of a convolution's or a linear layer's result is int16 while int8 changes its mean
    magnitude m by more than so much, as log2(1 + |change of m| / m), so that small gradients are not lost. The
    gradient that a BatchNorm or a sum of gradients reads stays int8. Exponents fit the part `reach` of the largest
    magnitude; values beyond saturate. `mantissa_bits` as in `OperatorTranslation`, of every gradient and rounded up or
    down at random.
    """

    rounding: Rounding = Rounding.PSEUDO_STOCHASTIC
    loss: Literal["integer", "fp32"] = "integer"
    dithered: bool = False
    wide_above: float | None = None
    reach: float = 1.0
    mantissa_bits: int | None = None


@checked
class IntegerUpdate:
    """w := saturate(w - round(gradient to `bits` bits)), in int8: NITI (F18).

    The bits replace the learning rate: `bits[i]` applies from the fraction `starts[i]` of training on. With 0 bits
    or fewer, only the carry of the pseudo-stochastic rounding changes a weight.

    With `relative`, and without bits, the step of each layer follows from its weights: the finest power of two at which
    the magnitudes of the change sum up to at most so much of the weights', which falls linearly to 0 at the end of
    training.
    """

    bits: tuple[Annotated[int, Field(ge=-8, le=7)], ...] = (5, 4, 3)
    starts: tuple[Annotated[float, Field(ge=0.0, lt=1.0)], ...] = (0.0, 0.5, 0.75)
    rounding: Rounding = Rounding.PSEUDO_STOCHASTIC
    relative: Annotated[float, Field(gt=0.0, le=1.0)] | None = None

    def check(self) -> None:
        """Raise `ConfigError` unless every number of bits has a start, rising from 0, or steps are `relative`."""
        if self.relative is not None:
            if self.bits or self.starts:
                raise ConfigError(f"relative steps take no bits, got {self.bits} and {self.starts}")
            return
        rises = list(self.starts) == sorted(self.starts)
        if not rises or self.starts[:1] != (0.0,) or len(self.bits) != len(self.starts):
            raise ConfigError(f"bits {self.bits} need as many starts, rising from 0: {self.starts}")

    def bits_at(self, progress: float) -> int:
        """Return the gradient bits at a fraction of training in [0, 1] (F18)."""
        num_begun = sum(progress >= start for start in self.starts)
        return self.bits[num_begun - 1]

    def relative_shift(self, progress: float, gradient: int, weights: int) -> int:
        """Return the shift of a relative step, from the sums of the magnitudes of gradient and weights."""
        assert self.relative is not None
        most = self.relative * (1.0 - progress) * weights
        if gradient <= most:
            return 0
        # The least shift with gradient <= most * 2^shift; by the bits of the quotient, so that machines agree.
        mantissa, exponent = math.frexp(gradient / most) if most else (1.0, MOST_SHIFT)
        return min(MOST_SHIFT, exponent - (mantissa == 0.5))


@checked
class Fp32Update:
    """SGD on FP32 master weights, as torch.optim.SGD; every step rounds the int8 weights from them again.

    With `gradient_bits` a weight's gradient is first rounded to so many bits of magnitude, pseudo-stochastically. With
    `weight_bits` the masters are fixed-point numbers of so many bits, sign included, between -1 and 1.
    """

    momentum: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.0
    weight_decay: Annotated[float, Field(ge=0.0)] = 0.0
    gradient_bits: Annotated[int, Field(ge=1, le=7)] | None = None
    weight_bits: Annotated[int, Field(ge=9, le=24)] | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class OutsideUpdate:
    """An outside trainer holds the weights (F12): it passes them to the engine and receives their gradients.

    The int8 weights are the trainer's weights, rounded up or down at random so that their expectation is exact. With
    rounding to nearest, a change of a master by less than half a quantum could leave the int8 weight unchanged. The
    engine itself updates only BatchNorm's running statistics.
    """


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingAlgorithm:
    """A mixed-precision training algorithm: operator translation, backward rule, weight type, update rule.

    The scale and offset of BatchNorm and the biases are FP32 under every algorithm and use plain SGD: they are
    less than a hundredth of the parameters, and the integer update's step is too coarse for them.
    """

    name: str
    forward: OperatorTranslation
    backward: BackwardRule
    weight: Literal["int8", "fp32"]
    update: IntegerUpdate | Fp32Update | OutsideUpdate

    def __post_init__(self) -> None:
        if (self.weight == "int8") != isinstance(self.update, IntegerUpdate):
            raise ConfigError(f"algorithm {self.name}: only int8 weights take an IntegerUpdate")
        for part in ("forward", "backward"):
            reach = getattr(self, part).reach
            if not 0.0 < reach <= 1.0:
                raise ConfigError(
                    f"algorithm {self.name}: {part} reach = {reach} must lie in (0, 1]"
                )
        self._check_elements()
        is_plain = self.backward.rounding is Rounding.NEAREST and self.forward.scales != "real"
        if self.backward.wide_above is not None and not is_plain:
            raise ConfigError(
                f"algorithm {self.name}: wide_above = {self.backward.wide_above} needs rounding to nearest and "
                "scales that are powers of two"
            )

    def _check_elements(self) -> None:
        """Raise `ConfigError` for mantissa bits that int8 or another element of the algorithm does not allow."""
        for part in ("forward", "backward"):
            bits = getattr(self, part).mantissa_bits
            if bits is not None and not 1 <= bits <= 4:
                raise ConfigError(
                    f"algorithm {self.name}: {part} mantissa_bits = {bits} must lie in 1 to 4"
                )
        if self.forward.mantissa_bits is not None and not isinstance(self.update, Fp32Update):
            raise ConfigError(
                f"algorithm {self.name}: forward mantissa_bits = {self.forward.mantissa_bits} needs an Fp32Update, "
                "which rounds the weights in every step"
            )
        if self.backward.mantissa_bits is not None and self.backward.wide_above is not None:
            raise ConfigError(
                f"algorithm {self.name}: backward mantissa_bits = {self.backward.mantissa_bits} is for int8, and "
                f"wide_above = {self.backward.wide_above} makes gradients int16; leave one of them out"
            )


NITI = TrainingAlgorithm(
    name="niti",
    forward=OperatorTranslation(rounding=Rounding.NEAREST),
    backward=BackwardRule(rounding=Rounding.PSEUDO_STOCHASTIC, loss="integer"),
    weight="int8",
    update=IntegerUpdate(),
)
"""Wang et al. 2020: all values are int8, weights included."""

RELATIVE_NITI = replace(
    NITI, name="niti-relative", update=IntegerUpdate(bits=(), starts=(), relative=0.02)
)
"""NITI with steps that follow from the weights, so that no gradient bits are to be chosen for a network."""

OCTO = TrainingAlgorithm(
    name="octo",
    forward=OperatorTranslation(rounding=Rounding.NEAREST, scales="real", reach=0.95),
    backward=BackwardRule(
        rounding=Rounding.PSEUDO_STOCHASTIC, loss="fp32", dithered=True, reach=0.95
    ),
    weight="int8",
    update=RELATIVE_NITI.update,
)
"""Zhou et al. 2021: values beyond 95 % of the largest saturate, in both passes; int8 weights.

Of its compensation, which it learns beside the network for every element of a convolution's result, there is what a
convolution's own bias can learn.
"""

ADAPTIVE_FIXED_POINT = TrainingAlgorithm(
    name="adaptive-fixed-point",
    forward=OperatorTranslation(rounding=Rounding.NEAREST),
    backward=BackwardRule(rounding=Rounding.PSEUDO_STOCHASTIC, loss="integer"),
    weight="fp32",
    update=Fp32Update(),
)
"""Zhang et al. 2020: int8 forward and backward pass, FP32 master weights.

Theirs switches gradients to int16 where int8 is too coarse, as `ADAPTIVE_INT16` does.
"""

ADAPTIVE_INT16 = replace(
    ADAPTIVE_FIXED_POINT,
    name="adaptive-int16",
    backward=BackwardRule(rounding=Rounding.NEAREST, loss="fp32", wide_above=0.03),
)
"""Zhang et al. 2020 with their rounding to nearest, and int16 for gradients by their threshold."""

WAGEUBN = TrainingAlgorithm(
    name="wageubn",
    forward=OperatorTranslation(rounding=Rounding.NEAREST),
    backward=BackwardRule(rounding=Rounding.PSEUDO_STOCHASTIC, loss="integer"),
    weight="fp32",
    update=Fp32Update(momentum=0.75, gradient_bits=7, weight_bits=24),
)
"""Yang et al. 2020: int8 everywhere, gradients of weights included, and an update of 24 bits.

Theirs also rounds BatchNorm's and the optimiser's own numbers, to 10 to 24 bits; here these are FP32.
"""

REAL_SCALES = TrainingAlgorithm(
    name="real-scales",
    forward=OperatorTranslation(rounding=Rounding.NEAREST, scales="real"),
    backward=BackwardRule(rounding=Rounding.PSEUDO_STOCHASTIC, loss="fp32", dithered=True),
    weight="fp32",
    update=Fp32Update(momentum=0.9),
)
"""Made for FP32's learning rate: FP32 master weights, real scales, unbiased gradients."""

MLS_FORMAT = replace(
    REAL_SCALES,
    name="mls-format",
    forward=replace(REAL_SCALES.forward, mantissa_bits=1),
    backward=replace(REAL_SCALES.backward, mantissa_bits=1),
)
"""Zhong et al. 2020, multi-level scaling, with their elements for CIFAR-10.

A group's scale is 1, 1/2, 1/4 or 1/8 of the tensor's, so that int8 holds its product with an element, and int8 products
are exact. Their scales of groups have 8 exponent bits and a mantissa bit. With their 4 mantissa bits for ImageNet int8
has no room for scales of groups. They round values at random too, not to nearest; here a gradient's tensor has a power
of two as scale, and images and logits stay int8.
"""

HANDED_OUT_GRADIENTS = replace(REAL_SCALES, name="handed-out-gradients", update=OutsideUpdate())
"""The passes of `REAL_SCALES`, with an `OutsideUpdate`."""

ALGORITHMS: dict[str, TrainingAlgorithm] = {
    a.name: a
    for a in (
        REAL_SCALES,
        NITI,
        RELATIVE_NITI,
        OCTO,
        ADAPTIVE_FIXED_POINT,
        ADAPTIVE_INT16,
        WAGEUBN,
        MLS_FORMAT,
    )
}


@plain_numbers
def int8_algorithm(
    name: str,
    momentum: float | None = None,
    gradient_bits: tuple[int, ...] | None = None,
    *,
    weight_decay: float = 0.0,
) -> TrainingAlgorithm:
    """Return a known algorithm with these settings.

    `momentum` (default: the algorithm's own) and `weight_decay` apply to an update of FP32 weights, `gradient_bits` to
    an update of int8 weights. Raises ConfigError on other names, impossible values, and a setting that the algorithm's
    update does not have.
    """
    algorithm = ALGORITHMS.get(name)
    if algorithm is None:
        raise ConfigError(f"int8 algorithm {name!r} is unknown; use one of {', '.join(ALGORITHMS)}")
    in_fp32 = isinstance(algorithm.update, Fp32Update)
    if gradient_bits is not None if in_fp32 else momentum or weight_decay:
        raise ConfigError(
            f"int8 algorithm {name}: momentum = {momentum} and weight_decay = {weight_decay} are for FP32 weights, "
            f"and gradient_bits = {gradient_bits} for niti; leave out what {name} does not have"
        )
    settings: dict[str, Any] = {"weight_decay": weight_decay} if in_fp32 else {}
    if in_fp32 and momentum is not None:
        settings["momentum"] = momentum
    if gradient_bits is not None:
        settings["bits"] = gradient_bits
    return replace(algorithm, update=replace(algorithm.update, **settings))
