"""A parameter or buffer that `forward` reads by name: positions, scales, class tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from socflower import _int8
from socflower.precision.int8 import network as ir
from socflower.precision.int8.fixed_point import DoubleArray, Int8Array, quantise
from socflower.precision.int8.operators.base import Operator, StepContext, Tensor
from socflower.precision.int8.requantisation import ZERO_EXPONENT, exponent_within_float32
from socflower.precision.int8.updates import update_vector


@dataclass(frozen=True, kw_only=True, slots=True)
class ParameterValue(ir.Node):
    """The elements of a tensor of the module as channels of one pixel, the same for each sample.

    It is kept as a float32 vector and rounded to int8 in each pass. A `buffer` is not trained.
    """

    kind: ClassVar[str] = "parameter"
    buffer: bool = False

    @property
    def parameters(self) -> tuple[str, ...]:
        """The tensor, unless it is a buffer."""
        return () if self.buffer else self.vectors

    @property
    def vectors(self) -> tuple[str, ...]:
        """The tensor."""
        return ("value",)

    def made_shape(self, inputs: Sequence[ir.Shape]) -> ir.Shape | None:
        """Return its own shape if that is a vector; it reads nothing."""
        return self.shape if not inputs and self.shape[1:] == (1, 1) else None


class ParameterValueOperator(Operator[ParameterValue]):
    """The rounded values; their gradient is summed over the batch."""

    def __init__(self, node: ParameterValue, inputs: Sequence[Tensor], output: Tensor) -> None:
        super().__init__(node, inputs, output)
        self._sums = np.zeros((2, output.array_shape[3]), dtype=np.int64)

    def forward(self, step: StepContext) -> None:
        """Round to nearest."""
        name = f"{self.node.name}.value"
        values = step.parameters.vectors[name].data
        largest = float(np.abs(values).max())
        exponent = exponent_within_float32(name, largest) if largest else ZERO_EXPONENT
        rounded = np.empty(values.shape, np.int8)
        quantise(values, exponent, rounded)
        self.output.data[...] = rounded
        self.output.factor = 1.0
        self.output.exponent = exponent

    def evaluate(self, step: StepContext) -> None:
        """Round to nearest, for all images at the same scale."""
        self.forward(step)
        self.output.by_image = np.full(self.output.batch, self.output.scale, dtype=np.float32)

    def backward(self, step: StepContext, into: Sequence[Int8Array | None]) -> Sequence[int]:
        """Sum the gradient over the batch, update."""
        if not self.node.trained:
            return []
        dy = self.gradient
        exponent = self.output.gradient_exponent
        _int8.channel_sums(step.engine, dy, dy, None, self._sums[0], self._sums[1])
        vector = step.parameters.vectors[f"{self.node.name}.value"]
        rate = step.rate

        def update(sums: DoubleArray) -> None:
            gradient = np.ldexp(sums, exponent).astype(np.float32)
            update_vector(step.algorithm, vector, gradient, rate)

        step.share.add(self._sums[0].astype(np.float64), update)
        return []
