"""Functions of single elements in int8: a table of 255 values, and a table of 255 slopes for the gradient.

An int8 tensor holds at most 255 different numbers, q times its scale, so a function of one element is a table. Its
values are computed in float64 and rounded to 21 bits of the largest; then they are rounded to int8 as any accumulator
(F14), with the maximum of the values that the tensor really has. The gradient is dy times a slope of 21 bits, rounded
in the same way.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar

import numpy as np

from socflower import _int8
from socflower.precision.int8 import network as ir
from socflower.precision.int8.fixed_point import DoubleArray, Int8Array, scaled_integers
from socflower.precision.int8.operators.base import Operator, StepContext
from socflower.precision.int8.operators.pointwise_functions import FUNCTIONS

_TABLE_BITS = 21
_TABLE_SIZE = 256


@dataclass(frozen=True, kw_only=True, slots=True)
class LookupTable(ir.Node):
    """A function of `pointwise_functions.FUNCTIONS`, applied to each element."""

    kind: ClassVar[str] = "table"
    function: str
    arguments: tuple[float, ...] = ()

    def check(self) -> str:
        """Refuse a function that is not known, or is called with another number of arguments."""
        function = FUNCTIONS.get(self.function)
        if function is None:
            return f"an unknown function {self.function!r}; known are {', '.join(FUNCTIONS)}"
        fits = len(self.arguments) == function.num_arguments
        if fits and all(map(math.isfinite, self.arguments)):
            return ""
        return f"arguments {self.arguments}; {self.function} takes {function.num_arguments} finite ones"

    @property
    def is_non_negative(self) -> bool:
        """Whether no value of the function is negative."""
        clamps = self.function in ("clamp", "clip") and self.arguments[0] >= 0.0
        return clamps or FUNCTIONS[self.function].non_negative


@lru_cache(maxsize=256)
def _tabulated(
    function: str, arguments: tuple[float, ...], scale: float
) -> tuple[DoubleArray, DoubleArray]:
    """Return the values and slopes at q * scale for each byte q; -128, which never occurs, has 0."""
    slopes = np.zeros(_TABLE_SIZE)
    known = FUNCTIONS[function]
    for q in range(-127, 128):
        slopes[q % _TABLE_SIZE] = known.slope(q * scale, arguments)
    return _values_at(function, arguments, scale), slopes


def _values_at(function: str, arguments: tuple[float, ...], scale: float) -> DoubleArray:
    """Return the values at q * scale for each byte q; each image of an evaluation has a scale of its own."""
    known = FUNCTIONS[function]
    values = np.zeros(_TABLE_SIZE)
    for q in range(-127, 128):
        values[q % _TABLE_SIZE] = known.value(q * scale, arguments)
    return values


class TableOperator(Operator[LookupTable]):
    """A function of single elements."""

    def forward(self, step: StepContext) -> None:
        """Round the table to int8, and look each element up."""
        x = self.inputs[0]
        values, _ = _tabulated(self.node.function, self.node.arguments, x.scale)
        exponent, (table,) = scaled_integers(_TABLE_BITS, (values, 0))
        channels = x.shape[0]
        occurring = np.empty(_TABLE_SIZE, np.uint8)
        _int8.bytes_seen(x.data, channels, occurring)
        largest = int(np.abs(table[occurring > 0]).max())
        rounding = step.algorithm.forward.rounding
        rounded = np.empty(_TABLE_SIZE, np.int8)

        def run(out: Int8Array | None, shift: int) -> int:
            if out is not None:
                _int8.requantise(step.engine, table, rounded, shift, rounding)
                _int8.look_up(step.engine, x.data, rounded, out)
                out[..., channels:] = 0
            return largest

        self.output.factor = 1.0
        self.output.exponent = self._round(step, "forward", exponent, run, self.output.data)

    def evaluate(self, step: StepContext) -> None:
        """Look each element up in its image's table of float64."""
        x = self.inputs[0]
        made = np.empty((*x.array_shape[:3], x.shape[0]))
        for image, scale in enumerate(x.by_image.tolist()):
            known = _values_at(self.node.function, self.node.arguments, scale)
            made[:, :, image] = known[x.data[:, :, image, : x.shape[0]].view(np.uint8)]
        self._store_by_image(step, made)

    def backward(self, step: StepContext, into: Sequence[Int8Array | None]) -> Sequence[int]:
        """Multiply by the slopes."""
        x = self.inputs[0]
        target = into[0]
        if target is None:
            return [0]
        _, slopes = _tabulated(self.node.function, self.node.arguments, x.scale)
        exponent, (table,) = scaled_integers(_TABLE_BITS, (slopes, 0))
        rounding = step.algorithm.backward.rounding
        operands = (step.engine, self.gradient, x.data, table)

        def run(out: Int8Array | None, shift: int) -> int:
            return _int8.table_gradient(*operands, out, shift, rounding, x.mask)

        exponent += self.output.gradient_exponent
        return [self._round(step, "backward", exponent, run, target)]
