"""The part of a batch that a model computes: all of it, or the share of one member of a ring.

In int8 arithmetic the samples of a batch depend on each other by maxima, which give the exponents, and by sums of
integers: those of gradients and of BatchNorm's statistics. The members of a ring exchange both, so n members with a
share each compute the same bits as one model with the whole batch, for any shares (F4). Only operators on the FP32 side
sum floating-point gradients, whose last bits depend on the shares.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from socflower.precision.int8.fixed_point import AnyArray, DoubleArray, Int32Array

_INT32_MAX = 2**31 - 1


class BatchPeers(Protocol):
    """The members of a ring; all of them call `sum` with arrays of one type and size, in the same order.

    `rank`, 0 to `size` - 1, is the order of their shares in the batch.
    """

    rank: int
    size: int

    def sum(self, values: AnyArray) -> None:
        """Replace a contiguous array of one dimension, of int32 or float64, by its sum over the members."""
        ...

    def poll(self) -> None:
        """Raise if the step is to end now; called at every layer."""
        ...


def gather(peers: BatchPeers, own: Sequence[float] | DoubleArray) -> DoubleArray:
    """Return the numbers of all members, (members, numbers), by rank."""
    table = np.zeros((peers.size, len(own)))
    table[peers.rank] = own
    peers.sum(table.reshape(-1))
    return table


class BatchShare:
    """The whole batch; updates are made during the backward pass, as soon as a gradient is known.

    `first` is the position of the share's first sample in the batch of `num_samples`.
    """

    first = 0
    is_empty = False
    # Whether it is the whole batch, so that no other member has to do what this one does.
    is_whole = True

    def __init__(self, num_samples: int) -> None:
        self.num_samples = num_samples

    def most(self, own: float) -> float:
        """Return the maximum over the batch of a number that is 0 or more."""
        return own

    def each_most(self, own: DoubleArray) -> DoubleArray:
        """Return the maximum over the batch of each element."""
        return own

    def saturates(self, own: bool) -> bool:
        """Return whether a tensor saturates at a known exponent, for any sample of the batch."""
        return own

    def total(self, own: npt.NDArray[np.int64]) -> DoubleArray:
        """Return sums over the batch; they are below 2^53, so float64 has them exactly."""
        return own.astype(np.float64)

    def change(self, make: Callable[[], None]) -> None:
        """Make a change that follows from values of the whole batch, after earlier updates."""
        make()

    def add(self, own: AnyArray, update: Callable[[AnyArray], None]) -> None:
        """Call `update` with the sum of `own`, of any floating-point type, over the batch."""
        update(own)

    def overflowed(self, error: OverflowError) -> int:
        """Raise the error of a gradient that leaves int32, or return a number in place of its largest magnitude."""
        raise error

    def add_integers(
        self, own: Int32Array, largest: int, update: Callable[[Int32Array, int], None]
    ) -> None:
        """Call `update` with the sum of `own`, whose largest magnitude is `largest`, and that of the sum."""
        update(own, largest)


class JointShare(BatchShare):
    """A member's share in one pass. Nothing is changed before `apply`, so that a pass can be repeated.

    Whether a tensor saturates at the exponent that it has had is almost always no. Unless `cautious`, members assume
    so for each tensor, and agree once at the end of the pass on whether it held: `held`. If not, the pass is repeated
    cautiously.
    """

    is_whole = False

    def __init__(self, peers: BatchPeers, sizes: Sequence[int], *, cautious: bool) -> None:
        super().__init__(sum(sizes))
        self.is_empty = not sizes[peers.rank]
        self.first = 0 if self.is_empty else sum(sizes[: peers.rank])
        self._peers = peers
        self._cautious = cautious
        self._has_saturated = False
        self._changes: list[Callable[[], None]] = []
        self._gradients: list[tuple[AnyArray, Callable[[AnyArray], None]]] = []
        self._integers: list[tuple[Int32Array, int, Callable[[Int32Array, int], None]]] = []

    def most(self, own: float) -> float:
        """Return the maximum over all members."""
        return float(gather(self._peers, [0.0 if self.is_empty else own]).max())

    def each_most(self, own: DoubleArray) -> DoubleArray:
        """Return the maxima over all members that have samples."""
        table = gather(
            self._peers, np.full(own.size, -np.inf) if self.is_empty else own.reshape(-1)
        )
        most: DoubleArray = table.max(axis=0)
        return most.reshape(own.shape)

    def saturates(self, own: bool) -> bool:
        """Return whether it saturates at any member; unless cautious, note it and return False."""
        if self._cautious:
            return self.most(float(own)) > 0.0
        self._peers.poll()
        self._has_saturated = self._has_saturated or (own and not self.is_empty)
        return False

    def held(self) -> bool:
        """Return whether no tensor of any member has saturated unseen."""
        return self._cautious or self.most(float(self._has_saturated)) == 0.0

    def total(self, own: npt.NDArray[np.int64]) -> DoubleArray:
        """Return the sums over all members."""
        sums = own.astype(np.float64).reshape(-1)
        if self.is_empty:
            sums[...] = 0.0
        self._peers.sum(sums)
        return sums.reshape(own.shape)

    def change(self, make: Callable[[], None]) -> None:
        """Note the change for `apply`."""
        self._changes.append(make)

    def add(self, own: AnyArray, update: Callable[[AnyArray], None]) -> None:
        """Note a gradient for `exchange`."""
        self._gradients.append((np.zeros_like(own) if self.is_empty else own.copy(), update))

    def overflowed(self, error: OverflowError) -> int:
        """Return a magnitude at which `exchange` raises, at every member and not at this one alone."""
        return _INT32_MAX + 1

    def add_integers(
        self, own: Int32Array, largest: int, update: Callable[[Int32Array, int], None]
    ) -> None:
        """Note an integer gradient for `exchange`."""
        if self.is_empty:
            own = np.zeros_like(own)
            largest = 0
        else:
            own = own.copy()
        self._integers.append((own, largest, update))

    def exchange(self) -> None:
        """Sum the gradients over all members.

        Raises `OverflowError` at every member if an integer sum might not fit in int32.
        """
        bounds = np.array([float(largest) for _, largest, _ in self._integers])
        gradients = [own for own, _ in self._gradients]
        bounds, *totals = self._summed([bounds, *gradients], np.float64)
        worst = bounds.max(initial=0.0)
        if worst > _INT32_MAX:
            raise OverflowError(
                f"weight gradient: its sum may reach {worst:.0f}, beyond int32; use a smaller batch"
            )
        integers = [own for own, _, _ in self._integers]
        if integers:
            totals += self._summed(integers, np.int32)
        for own, total in zip([*gradients, *integers], totals, strict=True):
            own[...] = total

    def _summed(self, arrays: Sequence[AnyArray], dtype: type) -> list[AnyArray]:
        """Return the sums of the arrays over all members, in one exchange."""
        flat: AnyArray = np.concatenate([array.reshape(-1) for array in arrays], dtype=dtype)
        self._peers.sum(flat)
        ends = np.cumsum([array.size for array in arrays])
        parts = np.split(flat, ends[:-1])
        return [part.reshape(array.shape) for part, array in zip(parts, arrays, strict=True)]

    def apply(self) -> None:
        """Make all changes and updates, after `exchange`."""
        for total, update in self._gradients:
            update(total)
        for integers, _, update_integers in self._integers:
            update_integers(integers, max(int(integers.max()), -int(integers.min())))
        for make in self._changes:
            make()
