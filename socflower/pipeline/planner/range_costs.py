"""Costs for Algorithm 2 (F32) of every range of layers on every range of devices in an order.

Ranges of layers are numbered by their first cut, then by their last cut. Ranges with the same first cut are neighbours,
so a minimum over last cuts is one `reduceat`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

import numpy as np

from socflower.pipeline.planner.allocation import Allocation, Allocator, DeviceClass, LayerRanges
from socflower.pipeline.problem import Floats, Ints, PipelineDevice, PipelineProblem


@dataclass(frozen=True, slots=True)
class StageCosts:
    """Costs of a stage on a group of devices, by range of layers; infinite for a range that does not fit."""

    # E_f + E_b.
    both_s: Floats
    # E_b.
    backward_s: Floats
    # All-reduce and update.
    after_s: Floats
    # The largest share of a micro-batch.
    most_share: Floats


class RangeCosts:
    """The costs of groups of consecutive devices in `order`, of stages between the cuts `bounds`.

    `which` is "all" ranges, the "first" (they begin with the first layer) or the "last" (they end with the last layer).
    """

    def __init__(
        self,
        problem: PipelineProblem,
        order: Sequence[PipelineDevice],
        bounds: Ints,
        which: str,
    ) -> None:
        model = problem.model
        self._problem, self._order, self.bounds = problem, order, bounds
        last = len(bounds) - 1
        if which == "first":
            first_cut, stop_cut = np.zeros(last, np.int64), np.arange(1, last + 1)
        elif which == "last":
            first_cut, stop_cut = np.arange(last), np.full(last, last)
        else:
            first_cut, stop_cut = np.triu_indices(last + 1, 1)
        self.first_cut, self.stop_cut = first_cut.astype(np.int64), stop_cut.astype(np.int64)
        self.row_starts = np.flatnonzero(np.diff(self.first_cut, prepend=-1))
        self.row_lengths = np.diff(np.append(self.row_starts, len(first_cut)))
        self.ranges = LayerRanges.of(problem, bounds[first_cut], bounds[stop_cut])
        self._weight = model.trained_bytes(bounds[first_cut], bounds[stop_cut])
        self._reduced = self._weight > 0.0
        # Of one sample, by cut: the mean of both directions, which may be coded differently.
        self.cut_bytes = model.entering_bytes[bounds] * (problem.sent_part / 2.0)
        self._allocator = Allocator(self.ranges, problem.micro_batch_size)
        classes = [DeviceClass.of(device) for device in order]
        self._classes = list(dict.fromkeys(classes))
        self._class_of = [self._classes.index(each) for each in classes]
        # By the number of devices of each class: with and without limits by activations in flight.
        self._free: dict[tuple[int, ...], Allocation] = {}
        self._limited: dict[tuple[tuple[int, ...], int], Allocation] = {}
        self._most: dict[tuple[float, int], Ints] = {}
        self._stages: dict[tuple[int, int, int], StageCosts] = {}
        self._links = _Links(problem, order)

    def stage(self, begin: int, end: int, in_flight: int) -> StageCosts:
        """Return the costs on devices `begin` to `end` - 1 of the order."""
        key = (begin, end, in_flight)
        if key not in self._stages:
            found = self.allocation(begin, end, in_flight)
            num = found.num_devices
            slowest = self._links.least(begin, end)
            message_s = self._problem.cluster.message_s
            # A range without devices or samples has infinite costs already; here it only must not divide by 0.
            size = np.maximum(num, 1)
            group = self._order[begin:end]
            byte_s = max(device.byte_s for device in group)
            round_s = self._weight / size * (1.0 / slowest + 2.0 * byte_s) + message_s
            after_s = np.where(self._reduced, 2.0 * (size - 1) * round_s, 0.0)
            after_s += max(device.update_s(1.0) for device in group) * self._weight
            self._stages[key] = StageCosts(
                found.forward_s + found.backward_s,
                found.backward_s,
                after_s,
                found.most_share.astype(np.float64),
            )
        return self._stages[key]

    def allocation(self, begin: int, end: int, in_flight: int) -> Allocation:
        """Return the samples of Algorithm 1 for a group of devices."""
        key = self._counts(begin, end)
        if (key, in_flight) not in self._limited:
            classes, counts = self.members(begin, end)
            if key not in self._free:
                # With nothing in flight, only weights and optimiser state count against the budgets.
                self._free[key] = self._allocator.allocate(classes, counts, 0)
            self._limited[key, in_flight] = self._limit(self._free[key], classes, counts, in_flight)
        return self._limited[key, in_flight]

    def members(self, begin: int, end: int) -> tuple[list[DeviceClass], list[int]]:
        """Return the classes of a group of devices and how many it has of each."""
        counts = self._counts(begin, end)
        present = [index for index, count in enumerate(counts) if count]
        return [self._classes[index] for index in present], [counts[index] for index in present]

    def devices_by_class(self, begin: int, end: int) -> list[list[PipelineDevice]]:
        """Return a group's devices by class, in the order of `members`."""
        return [
            [self._order[index] for index in range(begin, end) if self._class_of[index] == number]
            for number, count in enumerate(self._counts(begin, end))
            if count
        ]

    def transfer_s(
        self,
        begin: int,
        end: int,
        head_ends: Ints,
        most_shares: Floats,
        cut: Ints,
    ) -> Floats:
        """Return E_f of the transfer behind a group, by range, to a stage that ends at `head_ends` of the order.

        The bytes of `most_shares`, the larger of the largest shares on either side, pass one device's link; all bytes
        may pass one link between boards. Both ends count messages as if all shares of a stage were equal.
        """
        port, trunk = self._links.between(begin, end)
        index = head_ends - end - 1
        samples = self._problem.micro_batch_size
        per_byte = np.maximum(most_shares / port[index], samples / trunk[index])
        width, widths = end - begin, np.maximum(head_ends - end, 1)
        messages = -(-(widths + width - 1) // np.minimum(widths, width))
        message_s = self._problem.cluster.message_s * messages
        return np.asarray(self.cut_bytes[cut] * per_byte + message_s)

    def _counts(self, begin: int, end: int) -> tuple[int, ...]:
        own = self._class_of[begin:end]
        return tuple(own.count(number) for number in range(len(self._classes)))

    def _limit(
        self,
        free: Allocation,
        classes: Sequence[DeviceClass],
        counts: Sequence[int],
        in_flight: int,
    ) -> Allocation:
        """Return the allocation under the budgets with K in flight; only ranges that exceed one are allotted again."""
        fits = np.ones(len(self._weight), bool)
        for each, count, total in zip(classes, counts, free.totals, strict=True):
            key = (each.memory_bytes, in_flight)
            if key not in self._most:
                self._most[key] = self.ranges.most_samples(*key)
            fits &= -(-total // count) <= self._most[key]
        again = np.nonzero(~fits & np.isfinite(free.forward_s))[0]
        if not len(again):
            return free
        allocator = Allocator(self.ranges.take(again), self._problem.micro_batch_size)
        part, arrays = allocator.allocate(classes, counts, in_flight), []
        for name in Allocation.__slots__:
            array = getattr(free, name).copy()
            array[..., again] = getattr(part, name)
            arrays.append(array)
        return Allocation(*arrays)


class _Links:
    """Bandwidths between groups of consecutive devices of an order."""

    def __init__(self, problem: PipelineProblem, order: Sequence[PipelineDevice]) -> None:
        links, size = problem.cluster.link_bytes_per_s, len(order)
        self._port, self._trunk = np.full((size, size), inf), np.full((size, size), inf)
        for i, source in enumerate(order):
            for j, target in enumerate(order):
                if i != j:
                    path = problem.cluster.path(source.soc, target.soc)
                    first, *between, last = (links[link] for link in path)
                    self._port[i, j] = min(first, last)
                    self._trunk[i, j] = min(between, default=inf)
        self._pair = np.minimum(self._port, self._trunk)
        self._between: dict[tuple[int, int], tuple[Floats, Floats]] = {}

    def least(self, begin: int, end: int) -> float:
        """Return the least bandwidth between two devices of a group."""
        return float(self._pair[begin:end, begin:end].min())

    def between(self, begin: int, end: int) -> tuple[Floats, Floats]:
        """Return the least bandwidths from a group to the devices that follow it, up to each of them.

        The first array is of the devices' own links, the second one of links between boards.
        """
        key = (begin, end)
        if key not in self._between:
            found = []
            for matrix in (self._port, self._trunk):
                towards = matrix[begin:end, end:].min(axis=0)
                found.append(np.minimum.accumulate(towards) if len(towards) else towards)
            self._between[key] = (found[0], found[1])
        return self._between[key]
