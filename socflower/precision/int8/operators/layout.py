"""Operators that move values and compute nothing: other arrangements, parts of a tensor, and concatenation."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, TypeVar

import numpy as np
import numpy.typing as npt

from socflower.precision.int8 import network as ir
from socflower.precision.int8.fixed_point import Int8Array
from socflower.precision.int8.operators.base import StepContext, WideOperator, copy_masked
from socflower.precision.int8.operators.elementwise import MAX_ADD_SHIFT, aligned

Axis = Literal["rows", "columns", "channels"]
_ARRAY_AXIS = {"rows": 0, "columns": 1, "channels": 3}
_SHAPE_AXIS = {"channels": 0, "rows": 1, "columns": 2}

ZERO = -1
"""The index of `Select` that makes a zero."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Rearrange(ir.Node):
    """A transposition of the factors of pixels and channels (`value_layout`).

    `sizes` are the input's factors, pixels before channels; `order` lists them as the output has them; `num_pixels` are
    the numbers of factors of the pixels, in the input and in the output.
    """

    kind: ClassVar[str] = "rearrange"
    keeps_sign: ClassVar[bool] = True
    sizes: tuple[int, ...]
    order: tuple[int, ...]
    num_pixels: tuple[int, int]

    def made_shape(self, inputs: Sequence[ir.Shape]) -> ir.Shape | None:
        """Return its own shape if the factors multiply to it and to the input's."""
        made = [self.sizes[factor] for factor in self.order]
        read, made_first = self.num_pixels
        channels, height, width = inputs[0]
        fits = (
            (math.prod(self.sizes[:read]), math.prod(self.sizes[read:]))
            == (height * width, channels)
            and (math.prod(made[:made_first]), math.prod(made[made_first:]))
            == (self.shape[1] * self.shape[2], self.shape[0])
            and sorted(self.order) == list(range(len(self.sizes)))
        )
        return self.shape if fits else None


@dataclass(frozen=True, kw_only=True, slots=True)
class Select(ir.Node):
    """Parts of a tensor by index, along each axis: slices, padding, repetition. An index of -1 makes zeros."""

    kind: ClassVar[str] = "select"
    keeps_sign: ClassVar[bool] = True
    channels: tuple[int, ...]
    rows: tuple[int, ...]
    columns: tuple[int, ...]

    def made_shape(self, inputs: Sequence[ir.Shape]) -> ir.Shape | None:
        """Return the numbers of indices, if all of them are in the input."""
        indices = (self.channels, self.rows, self.columns)
        for size, chosen in zip(inputs[0], indices, strict=True):
            if not chosen or min(chosen) < ZERO or max(chosen) >= size:
                return None
        return len(self.channels), len(self.rows), len(self.columns)


@dataclass(frozen=True, kw_only=True, slots=True)
class Concat(ir.Node):
    """Tensors one after the other along an axis."""

    kind: ClassVar[str] = "concat"
    keeps_sign: ClassVar[bool] = True
    axis: Axis

    def made_shape(self, inputs: Sequence[ir.Shape]) -> ir.Shape | None:
        """Return the shape with the sum of the sizes along the axis."""
        along = _SHAPE_AXIS.get(self.axis)
        if along is None:
            return None
        made = list(inputs[0])
        made[along] = sum(shape[along] for shape in inputs)
        others = {shape[:along] + shape[along + 1 :] for shape in inputs}
        return (made[0], made[1], made[2]) if len(others) == 1 else None


MoveT = TypeVar("MoveT", bound=ir.Node)


class _MovingOperator(WideOperator[MoveT]):
    """An operator that copies values at their scales."""

    def forward(self, step: StepContext) -> None:
        """Copy; the scale does not change."""
        x = self.inputs[0]
        self._copy(x.data)
        self.output.exponent = x.exponent
        self.output.factor = x.factor

    def evaluate(self, step: StepContext) -> None:
        """Copy; the scales do not change."""
        x = self.inputs[0]
        self._copy(x.data)
        self.output.by_image = x.by_image

    @abstractmethod
    def _copy(self, values: Int8Array) -> None:
        """Write the values to the output."""


class RearrangeOperator(_MovingOperator[Rearrange]):
    """Transpose."""

    def _copy(self, values: Int8Array) -> None:
        node = self.node
        self._move(values, self.output.data, node.sizes, node.order, node.num_pixels)

    def backward(self, step: StepContext, into: Sequence[Int8Array | None]) -> Sequence[int]:
        """Copy the gradient back."""
        target = into[0]
        if target is not None:
            node = self.node
            sizes = tuple(node.sizes[factor] for factor in node.order)
            back = tuple(node.order.index(factor) for factor in range(len(sizes)))
            self._move(self.gradient, target, sizes, back, (node.num_pixels[1], node.num_pixels[0]))
            copy_masked(target, self.inputs[0].mask, target)
        return [self.output.gradient_exponent]

    @staticmethod
    def _move(
        source: Int8Array,
        out: Int8Array,
        sizes: tuple[int, ...],
        order: tuple[int, ...],
        num_pixels: tuple[int, int],
    ) -> None:
        read, made = num_pixels
        batch = source.shape[2]
        channels = math.prod(sizes[read:])
        # The batch lies between pixels and channels, on both sides.
        factors = source[..., :channels].reshape(*sizes[:read], batch, *sizes[read:])
        positions = [factor + (factor >= read) for factor in order]
        positions.insert(made, read)
        moved = factors.transpose(positions)
        made_channels = math.prod(sizes[factor] for factor in order[made:])
        out[..., :made_channels] = moved.reshape(*out.shape[:3], made_channels)
        out[..., made_channels:] = 0


class SelectOperator(_MovingOperator[Select]):
    """Copy by index; the gradient of an element is the sum over its copies."""

    def __init__(self, node: Select, inputs: Sequence[Any], output: Any) -> None:
        super().__init__(node, inputs, output)
        self._axes = [
            (_ARRAY_AXIS[axis], np.array(getattr(node, axis)), size)
            for axis, size in zip(
                ("channels", "rows", "columns"), self.inputs[0].shape, strict=True
            )
        ]
        self._repeats = 1
        for _, chosen, _ in self._axes:
            found = chosen[chosen != ZERO]
            self._repeats *= int(np.bincount(found).max(initial=0)) if found.size else 0
        channels, rows, columns = (_as_slice(chosen) for _, chosen, _ in self._axes)
        # A part without gaps, of an array (h, w, batch, channels); None: it has gaps.
        self._part = None
        if channels is not None and rows is not None and columns is not None:
            self._part = (rows, columns, slice(None), channels)

    def _copy(self, values: Int8Array) -> None:
        part: Int8Array = values[..., : self.inputs[0].shape[0]]
        if self._part is not None:
            part = part[self._part]
        else:
            for axis, chosen, _ in self._axes:
                part = np.take(part, chosen, axis=axis, mode="wrap")
                _zero_at(part, axis, chosen == ZERO)
        self.output.data[..., : part.shape[3]] = part
        self.output.data[..., part.shape[3] :] = 0

    def backward(self, step: StepContext, into: Sequence[Int8Array | None]) -> Sequence[int]:
        """Sum the gradients of the copies of each element; without repetitions they stay exact."""
        target = into[0]
        exponent = self.output.gradient_exponent
        if target is None:
            return [0]
        x = self.inputs[0]
        own = self.gradient[..., : self.output.shape[0]]
        if self._part is not None:
            target[...] = 0
            target[self._part] = own
            copy_masked(target, x.mask, target)
            return [exponent]
        sums: npt.NDArray[np.integer[Any]] = own
        for axis, chosen, size in self._axes:
            sums = _sum_by_index(sums, axis, chosen, size)
        if self._repeats <= 1:
            target[..., : x.shape[0]] = sums
            target[..., x.shape[0] :] = 0
            copy_masked(target, x.mask, target)
            return [exponent]
        most = 127 * self._repeats
        return [self._round_sums(step, "backward", exponent, sums, target, most=most, mask=x.mask)]


def _as_slice(index: npt.NDArray[np.int64]) -> slice | None:
    """Return the range of indices that rise by one; None for others."""
    first, last = int(index[0]), int(index[-1])
    rises = first != ZERO and np.array_equal(index, np.arange(first, last + 1))
    return slice(first, last + 1) if rises else None


def _zero_at(array: Int8Array, axis: int, where: npt.NDArray[np.bool_]) -> None:
    if where.any():
        np.moveaxis(array, axis, 0)[where] = 0


def _sum_by_index(
    values: npt.NDArray[np.integer[Any]], axis: int, index: npt.NDArray[np.int64], size: int
) -> npt.NDArray[np.integer[Any]]:
    """Return for each i below `size` the sum of the values whose index along the axis is i."""
    if _as_slice(index) == slice(0, size):
        return values
    kept = np.flatnonzero(index != ZERO)
    order = kept[np.argsort(index[kept], kind="stable")]
    present, starts = np.unique(index[order], return_index=True)
    moved = np.moveaxis(values, axis, 0)
    made = np.zeros((size, *moved.shape[1:]), dtype=np.int64)
    if present.size:
        made[present] = np.add.reduceat(moved[order], starts, axis=0, dtype=np.int64)
    return np.moveaxis(made, 0, axis)


class ConcatOperator(WideOperator[Concat]):
    """Concatenation of tensors of different exponents."""

    def forward(self, step: StepContext) -> None:
        """Align the exponents, and round at a common one; under real scales, round at the scale that fits best."""
        if step.has_real_scales:
            self._join_real(step)
            return
        tensors = [(x.data, x.exponent) for x in self.inputs]
        low, shifts = aligned(step.share, *tensors)
        parts = [
            np.left_shift(x.data[..., : x.shape[0]], shift, dtype=np.int32)
            for x, shift in zip(self.inputs, shifts, strict=True)
        ]
        sums = np.concatenate(parts, axis=_ARRAY_AXIS[self.node.axis])
        most = 127 << MAX_ADD_SHIFT
        self.output.exponent = self._round_sums(
            step, "forward", low, sums, self.output.data, most=most
        )

    def _join_real(self, step: StepContext) -> None:
        output = self.output
        parts = [x.data[..., : x.shape[0]] for x in self.inputs]
        largest = max(
            x.scale * float(np.abs(part).max()) for x, part in zip(self.inputs, parts, strict=True)
        )
        if not self._set_real_scale(step, step.share.most(largest)):
            return
        rounded = [
            np.clip(np.rint(part * (x.scale / output.scale)), -127, 127)
            for x, part in zip(self.inputs, parts, strict=True)
        ]
        output.data[..., : output.shape[0]] = np.concatenate(
            rounded, axis=_ARRAY_AXIS[self.node.axis]
        )
        output.data[..., output.shape[0] :] = 0

    def evaluate(self, step: StepContext) -> None:
        """Join the real values, round."""
        values = [x.each_image() for x in self.inputs]
        self._store_by_image(step, np.concatenate(values, axis=_ARRAY_AXIS[self.node.axis]))

    def backward(self, step: StepContext, into: Sequence[Int8Array | None]) -> Sequence[int]:
        """Copy each part of the gradient to its input."""
        axis = self.node.axis
        first = 0
        for x, target in zip(self.inputs, into, strict=True):
            size = x.shape[_SHAPE_AXIS[axis]]
            if target is not None:
                gradient = self.gradient[..., : self.output.shape[0]]
                part = np.moveaxis(gradient, _ARRAY_AXIS[axis], 0)[first : first + size]
                target[..., : x.shape[0]] = np.moveaxis(part, 0, _ARRAY_AXIS[axis])
                target[..., x.shape[0] :] = 0
                copy_masked(target, x.mask, target)
            first += size
        return [self.output.gradient_exponent] * len(self.inputs)
