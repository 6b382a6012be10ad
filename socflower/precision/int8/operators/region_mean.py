"""Means over regions of an image, of any size and number: global, adaptive and unevenly padded average pooling."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from socflower.precision.int8 import network as ir
from socflower.precision.int8.fixed_point import Int8Array
from socflower.precision.int8.operators.base import StepContext, Tensor, WideOperator
from socflower.precision.int8.operators.pooling import AVERAGE_BITS

Regions = tuple[tuple[int, int], ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class RegionMean(ir.Node):
    """For each pair of a region of rows and one of columns, (first, end), their sum divided by the divisors' product.

    The divisor of a region is its length, unless padding counts as well.
    """

    kind: ClassVar[str] = "region-mean"
    keeps_sign: ClassVar[bool] = True
    rows: Regions
    columns: Regions
    row_divisors: tuple[int, ...]
    column_divisors: tuple[int, ...]

    def made_shape(self, inputs: Sequence[ir.Shape]) -> ir.Shape | None:
        """Return the numbers of regions, if all of them lie in the input."""
        channels, height, width = inputs[0]
        for size, regions in ((height, self.rows), (width, self.columns)):
            if any(not 0 <= first < end <= size for first, end in regions):
                return None
        return channels, len(self.rows), len(self.columns)

    def check(self) -> str:
        """Refuse regions without a divisor."""
        counts = (len(self.rows), len(self.columns))
        divisors = (*self.row_divisors, *self.column_divisors)
        if counts == (len(self.row_divisors), len(self.column_divisors)) and min(divisors) > 0:
            return ""
        return f"divisors {divisors}; each region needs one of 1 or more"


class RegionMeanOperator(WideOperator[RegionMean]):
    """Exact sums over regions; quotients are rounded to 2^-14 of the input's unit, half away from zero."""

    def __init__(self, node: RegionMean, inputs: Sequence[Tensor], output: Tensor) -> None:
        super().__init__(node, inputs, output)
        rows = np.array(node.row_divisors, dtype=np.int64)
        columns = np.array(node.column_divisors, dtype=np.int64)
        self._divisors = np.multiply.outer(rows, columns)[..., None, None]
        # A region may be larger than its divisor says, if the user gives the divisor.
        self._most = (127 << AVERAGE_BITS) * (
            _most_per_divisor(node.rows, node.row_divisors)
            * _most_per_divisor(node.columns, node.column_divisors)
        )
        height, width = self.inputs[0].shape[1:]
        self._most_back = (127 << AVERAGE_BITS) * (
            _most_at_once(node.rows, height) * _most_at_once(node.columns, width)
        )

    def forward(self, step: StepContext) -> None:
        """Sum each region, divide, round."""
        x = self.inputs[0]
        quotients = _divided(self._sums(), self._divisors)
        self.output.factor = x.factor
        self.output.exponent = self._round_sums(
            step,
            "forward",
            x.exponent - AVERAGE_BITS,
            quotients,
            self.output.data,
            most=self._most,
        )

    def evaluate(self, step: StepContext) -> None:
        """Sum each region exactly, divide, round."""
        by_image = self.inputs[0].by_image.astype(np.float64)[:, None]
        self._store_by_image(step, self._sums() * by_image / self._divisors)

    def _sums(self) -> npt.NDArray[np.int64]:
        """Return the sum of each region, (rows, columns, batch, channels)."""
        x = self.inputs[0]
        values = x.data[..., : x.shape[0]]
        rows = np.stack(
            [values[a:b].sum(axis=0, dtype=np.int64) for a, b in self.node.rows], axis=0
        )
        return np.stack([rows[:, a:b].sum(axis=1) for a, b in self.node.columns], axis=1)

    def backward(self, step: StepContext, into: Sequence[Int8Array | None]) -> Sequence[int]:
        """Divide each gradient, and distribute it over its region."""
        x = self.inputs[0]
        target = into[0]
        if target is None:
            return [0]
        channels, height, width = x.shape
        shares = _divided(self.gradient[..., :channels].astype(np.int64), self._divisors)
        rows = np.zeros((height, *shares.shape[1:]), dtype=np.int64)
        for share, (first, end) in zip(shares, self.node.rows, strict=True):
            rows[first:end] += share
        sums = np.zeros((height, width, *shares.shape[2:]), dtype=np.int64)
        for index, (first, end) in enumerate(self.node.columns):
            sums[:, first:end] += rows[:, index : index + 1]
        exponent = self.output.gradient_exponent - AVERAGE_BITS
        return [
            self._round_sums(
                step, "backward", exponent, sums, target, most=self._most_back, mask=x.mask
            )
        ]


def _divided(sums: npt.NDArray[np.int64], divisors: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Return sums * 2^14 / divisors, rounded half away from zero."""
    magnitudes = np.abs(sums) << (AVERAGE_BITS + 1)
    quotients: npt.NDArray[np.int64] = (magnitudes + divisors) // (2 * divisors)
    return np.sign(sums) * quotients


def _most_per_divisor(regions: Regions, divisors: Sequence[int]) -> int:
    """Return the largest quotient of a region's length and its divisor, rounded up."""
    pairs = zip(regions, divisors, strict=True)
    return max(-((first - end) // divisor) for (first, end), divisor in pairs)


def _most_at_once(regions: Regions, size: int) -> int:
    """Return the most regions that share one position."""
    counts = np.zeros(size, dtype=int)
    for first, end in regions:
        counts[first:end] += 1
    return int(counts.max())
