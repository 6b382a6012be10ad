"""Embeddings: rows of an int8 table, chosen by the numbers that the network reads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from socflower.errors import ConfigError
from socflower.precision.int8 import network as ir
from socflower.precision.int8.fixed_point import Int8Array, Int32Array, channel_stride
from socflower.precision.int8.operators.base import StepContext, Tensor, WeightedOperator
from socflower.precision.int8.requantisation import ZERO_EXPONENT

MOST_ROWS = 2**24
"""Inputs are float32, which holds so many different whole numbers."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Embedding(ir.Weighted):
    """The rows of `weight` (num_rows, channels) that the input's numbers name, as the channels of one pixel each.

    The row `padding_row` gets no gradient; -1 is none.
    """

    kind: ClassVar[str] = "embedding"
    num_rows: int
    padding_row: int = -1

    def weight_shape(self, in_channels: int) -> tuple[int, int, int, int]:
        """Return (rows, channels, 1, 1)."""
        return self.num_rows, self.shape[0], 1, 1

    def made_shape(self, inputs: Sequence[ir.Shape]) -> ir.Shape | None:
        """Return its own shape if it has a pixel for each number of the images, which it alone can read."""
        channels, height, width = inputs[0]
        fits = self.shape[1] * self.shape[2] == channels * height * width
        return self.shape if fits and self.inputs == (ir.INPUT,) else None


class EmbeddingOperator(WeightedOperator[Embedding]):
    """Copies of rows; the gradient of a row is the exact sum over its copies."""

    def __init__(self, node: Embedding, inputs: Sequence[Tensor], output: Tensor) -> None:
        self._weight_array = (1, 1, node.shape[0], channel_stride(node.num_rows))
        super().__init__(node, inputs, output, self._weight_array)

    def _rows(self) -> npt.NDArray[np.int64]:
        """Return the numbers of the rows, (pixels, samples). Raises ConfigError for one that does not exist."""
        images = self.inputs[0].images
        assert images is not None
        numbers = images.reshape(len(images), -1).T
        rows = numbers.astype(np.int64)
        known = self.node.num_rows
        wrong = (numbers != rows) | (rows < 0) | (rows >= known)
        if wrong.any():
            raise ConfigError(
                f"{self.node.name}: the inputs have {numbers[wrong][0]:g}; need whole numbers from 0 to {known - 1}"
            )
        return rows

    def _input_scale(self) -> float:
        """Return 1: the sums are of the output's gradient alone."""
        return 1.0

    def forward(self, step: StepContext) -> None:
        """Copy the rows; the exponent is that of the weight."""
        weight = self._weight(step)
        table = weight.data[0, 0, :, : self.node.num_rows].T
        data = self.output.data
        channels = self.node.shape[0]
        data[..., channels:] = 0
        data[..., :channels] = table[self._rows()].reshape(*data.shape[:3], channels)
        self.output.factor = 1.0
        self.output.exponent = weight.exponent

    def evaluate(self, step: StepContext) -> None:
        """Copy the rows; all images have the scale of the weight."""
        self.forward(step)
        self.output.by_image = np.full(self.output.batch, self.output.scale, dtype=np.float32)

    def backward(self, step: StepContext, into: Sequence[Int8Array | None]) -> Sequence[int]:
        """Update by the sums of the gradients of each row's copies; numbers of rows have no gradient."""
        if "weight" in self.node.trained:
            self._update_weight(step, self._weight_gradient)
        if into[0] is not None:
            into[0][...] = 0
        return [ZERO_EXPONENT]

    def _weight_gradient(self, gradient: Int32Array) -> tuple[int, int]:
        rows = self._rows().reshape(-1)
        dy = self.gradient[..., : self.node.shape[0]].reshape(len(rows), -1)
        sums = np.zeros((self.node.num_rows, dy.shape[1]), dtype=np.int64)
        # In the order of their rows, so that the copies of each are summed as one segment.
        order = np.argsort(rows, kind="stable")
        used, starts = np.unique(rows[order], return_index=True)
        sums[used] = np.add.reduceat(dy[order], starts, axis=0, dtype=np.int64)
        if self.node.padding_row >= 0:
            sums[self.node.padding_row] = 0
        gradient[...] = 0
        gradient[0, 0, :, : self.node.num_rows] = sums.T
        return int(np.abs(sums).max()), 0
