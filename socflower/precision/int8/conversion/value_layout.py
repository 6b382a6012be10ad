"""How the dimensions of a torch tensor lie in an int8 tensor (height, width, batch, channels).

A dimension of the torch tensor (the batch left out) is a product of *factors*, from the outermost to the innermost.
Each factor is a part of the rows, of the columns or of the channels of the int8 tensor. So a view, a transposition and
a flattening move no value: they only change which factors a dimension consists of. Values move when an operator needs
another arrangement (`rearrangement`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from socflower.precision.int8.network import Shape

Sizes = tuple[int, ...]
Dims = tuple[Sizes, ...]


@dataclass(frozen=True, slots=True)
class ValueLayout:
    """The factors of each torch dimension, by size, and the places of all factors in the int8 tensor.

    Factors are numbered in the order of `dims`; `rows`, `columns` and `channels` hold numbers, the outermost first.
    """

    dims: Dims
    rows: tuple[int, ...]
    columns: tuple[int, ...]
    channels: tuple[int, ...]

    @property
    def sizes(self) -> Sizes:
        """Size of each factor."""
        return tuple(size for dim in self.dims for size in dim)

    @property
    def form(self) -> Sizes:
        """Shape of the torch tensor, without the batch."""
        return tuple(math.prod(dim) for dim in self.dims)

    @property
    def shape(self) -> Shape:
        """Shape (channels, height, width) of the int8 tensor."""
        return self._size(self.channels), self._size(self.rows), self._size(self.columns)

    @property
    def places(self) -> tuple[int, ...]:
        """The factors in the order of the int8 tensor: rows, columns, channels."""
        return (*self.rows, *self.columns, *self.channels)

    def _size(self, factors: Iterable[int]) -> int:
        return math.prod(self.sizes[factor] for factor in factors)

    def factors_of(self, dim: int) -> tuple[int, ...]:
        """Return the factors of a dimension."""
        before = sum(len(other) for other in self.dims[:dim])
        return tuple(range(before, before + len(self.dims[dim])))

    def renumbered(self, dims: Dims, new_numbers: Sequence[Sequence[int]]) -> ValueLayout:
        """Return a layout in which each factor has become those that `new_numbers` lists for it."""

        def moved(factors: tuple[int, ...]) -> tuple[int, ...]:
            return tuple(number for factor in factors for number in new_numbers[factor])

        return ValueLayout(dims, moved(self.rows), moved(self.columns), moved(self.channels))

    def permuted(self, order: Sequence[int]) -> ValueLayout:
        """Return the layout after torch's `permute` of the dimensions."""
        factors = [factor for dim in order for factor in self.factors_of(dim)]
        new_numbers = [[factors.index(factor)] for factor in range(len(factors))]
        return self.renumbered(tuple(self.dims[dim] for dim in order), new_numbers)

    def viewed(self, form: Sequence[int]) -> ValueLayout | None:
        """Return the layout after torch's `reshape`, None if a new dimension would cut a factor unevenly."""
        divided = _divided(self.sizes, form)
        return None if divided is None else self.renumbered(*divided)

    def refined(self, dims: Dims) -> ValueLayout | None:
        """Return the layout with the factors of each dimension divided as in `dims`, None if they do not fit."""
        if self.form != tuple(math.prod(dim) for dim in dims):
            return None
        made: list[Sizes] = []
        numbers: list[list[int]] = []
        count = 0
        for own, other in zip(self.dims, dims, strict=True):
            divided = _divided(own, _common_cuts(own, other))
            if divided is None:
                return None
            new_dims, new_numbers = divided
            flat = tuple(size for dim in new_dims for size in dim)
            made.append(flat)
            numbers += [[count + number for number in part] for part in new_numbers]
            count += len(flat)
        return self.renumbered(tuple(made), numbers)

    def order(self) -> npt.NDArray[np.int64]:
        """Return, for each element of an int8 tensor (rows, columns, channels), its index in the torch tensor."""
        index = np.arange(math.prod(self.form)).reshape(self.sizes or (1,))
        return index.transpose(self.places).reshape(-1) if self.sizes else index


def _common_cuts(own: Sizes, other: Sizes) -> Sizes:
    """Return sizes whose boundaries are those of both; they multiply to the same number."""
    inner = sorted({*np.cumprod(own[::-1]).tolist(), *np.cumprod(other[::-1]).tolist(), 1})
    cuts = []
    for fine, coarse in pairwise(inner):
        if coarse % fine:
            # The caller finds that these do not fit.
            return (0,)
        cuts.append(coarse // fine)
    return tuple(reversed(cuts))


def _divided(sizes: Sizes, form: Sequence[int]) -> tuple[Dims, list[list[int]]] | None:
    """Divide factors so that each size of `form` is a product of whole ones.

    Returns the factors of each new dimension, and for each old factor the numbers of those it is divided into.
    """
    if math.prod(sizes) != math.prod(form):
        return None
    dims: list[list[int]] = [[] for _ in form]
    numbers: list[list[int]] = [[] for _ in sizes]
    count = 0
    factor = 0
    left_of_factor = sizes[0] if sizes else 1
    for dim, size in enumerate(form):
        left_of_dim = size
        while left_of_dim > 1:
            while left_of_factor == 1:
                factor += 1
                left_of_factor = sizes[factor]
            # A part is taken from the outer side of the factor.
            part = math.gcd(left_of_dim, left_of_factor)
            is_whole = part in (left_of_dim, left_of_factor)
            if not is_whole:
                return None
            dims[dim].append(part)
            numbers[factor].append(count)
            count += 1
            left_of_dim //= part
            left_of_factor //= part
    return tuple(map(tuple, dims)), numbers


def images(form: Sequence[int]) -> ValueLayout:
    """Return the layout of (n, c, h, w), (n, c, length) and (n, features); others have all dimensions as channels."""
    dims = tuple((size,) for size in form)
    match len(form):
        case 3:
            return ValueLayout(dims, (1,), (2,), (0,))
        case 2:
            return ValueLayout(dims, (), (1,), (0,))
    return ValueLayout(dims, (), (), tuple(range(len(form))))


def tokens(form: Sequence[int], num_last: int = 1) -> ValueLayout:
    """Return the layout with the last dimensions as channels and the others as pixels of one column each."""
    dims = tuple((size,) for size in form)
    first = len(form) - num_last
    return ValueLayout(dims, tuple(range(first)), (), tuple(range(first, len(form))))


def flat(form: Sequence[int]) -> ValueLayout:
    """Return the layout with all dimensions as channels, in their order."""
    return tokens(form, len(form))


def like(layout: ValueLayout, form: Sequence[int]) -> ValueLayout | None:
    """Return the layout of a tensor that is broadcast to one of `layout`: its sizes are the same or 1."""
    dims: list[Sizes] = []
    for size, dim in zip(form, layout.dims, strict=True):
        if size not in (1, math.prod(dim)):
            return None
        dims.append(dim if size > 1 else (1,) * len(dim))
    return ValueLayout(tuple(dims), layout.rows, layout.columns, layout.channels)


def rearrangement(source: ValueLayout, target: ValueLayout) -> dict[str, Any] | None:
    """Return the settings of the `Rearrange` node between two layouts of one tensor, None if it cannot be stated."""
    finer = source.refined(target.dims)
    wanted = target.refined(source.dims)
    if finer is None or wanted is None:
        return None
    sizes = tuple(finer.sizes[factor] for factor in finer.places)
    order = tuple(finer.places.index(factor) for factor in wanted.places)
    num_pixels = len(finer.rows) + len(finer.columns)
    made_pixels = len(wanted.rows) + len(wanted.columns)
    return {"sizes": sizes, "order": order, "num_pixels": (num_pixels, made_pixels)}


def same_places(one: ValueLayout, other: ValueLayout) -> bool:
    """Return whether every element of a tensor lies in the same place under both layouts."""
    if one == other:
        return True
    return one.shape == other.shape and bool(np.array_equal(one.order(), other.order()))
