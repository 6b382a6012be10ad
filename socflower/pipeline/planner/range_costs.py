"""What Algorithm 2 asks for again and again: costs of every range of layers on every range of devices in an order.

Ranges of layers are numbered by their first cut, then by their last: those that begin with the same cut are neighbours,
so that a minimum over last cuts is one `reduceat`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

import numpy as np

from socflower.pipeline.planner.allocation import Allocation, Allocator, DeviceClass, LayerRanges
from socflower.pipeline.problem import Floats, Ints, PipelineDevice, PipelineProblem


@dataclass(frozen=True, slots=True)
class StageCosts:
    """A stage of every range of layers on a group of devices: arrays over ranges; infinite where it does not fit."""

    both_s: Floats  # E_f + E_b
    backward_s: Floats  # E_b
    after_s: Floats  # all-reduce and update
    most_share: Floats  # the largest share of a micro-batch


class RangeCosts:
    """The costs of groups of consecutive devices in `order`, of stages between the cuts `bounds`.

    `which` ranges: "all", "first", those that begin with the first layer, or "last", those that end with the last one.
    """

    def __init__(
        self, problem: PipelineProblem, order: Sequence[PipelineDevice], bounds: Ints, which: str
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
        self._weight = (
            model.weight_prefix[bounds[stop_cut]] - model.weight_prefix[bounds[first_cut]]
        )
        self._reduced = self._weight > 0.0
        # Of one sample, by cut; the mean of both directions, which differ where only one of them is coded.
        self.cut_bytes = model.entering_bytes[bounds] * (problem.sent_part / 2.0)
        self._allocator = Allocator(self.ranges, problem.micro_batch_size)
        classes = [DeviceClass.of(device) for device in order]
        self._classes = list(dict.fromkeys(classes))
        self._class_of = [self._classes.index(each) for each in classes]
        self._free: dict[
            tuple[int, ...], Allocation
        ] = {}  # by numbers of devices of each class: limits of K aside
        self._limited: dict[tuple[tuple[int, ...], int], Allocation] = {}
        self._most: dict[tuple[float, int], Ints] = {}
        self._stages: dict[tuple[int, int, int], StageCosts] = {}
        self._links = _Links(problem, order)

    def stage(self, begin: int, end: int, in_flight: int) -> StageCosts:
        """Return the costs on devices `begin` up to, without, `end` of the order."""
        key = (begin, end, in_flight)
        if key not in self._stages:
            found = self.allocation(begin, end, in_flight)
            num = found.num_devices
            slowest = self._links.least(begin, end)
            message_s = self._problem.cluster.message_s
            # Without devices or samples, the range is infeasible and costs are infinite already.
            size = np.maximum(num, 1)
            byte_s = max(device.byte_s for device in self._order[begin:end])
            round_s = self._weight / size * (1.0 / slowest + 2.0 * byte_s) + message_s
            after_s = np.where(self._reduced, 2.0 * (size - 1) * round_s, 0.0)
            after_s += (
                max(self._order[index].update_s(1.0) for index in range(begin, end)) * self._weight
            )
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
                # With nothing in flight, only weights and optimiser limit where devices can take part.
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
        self, begin: int, end: int, head_ends: Ints, most_shares: Floats, cut: Ints
    ) -> Floats:
        """Return E_f of the communication step behind a group, by range: to a stage on the devices up to `head_ends`.

        `most_shares` are the larger of the largest shares on either side: their bytes pass one device's link. All
        bytes may pass one link between boards. The number of messages at an end is that of equal widths.
        """
        port, trunk = self._links.between(begin, end)
        index = head_ends - end - 1
        per_byte = np.maximum(
            most_shares / port[index], self._problem.micro_batch_size / trunk[index]
        )
        widths = np.maximum(head_ends - end, 1)
        messages = -(-(widths + (end - begin) - 1) // np.minimum(widths, end - begin))
        return np.asarray(
            self.cut_bytes[cut] * per_byte + self._problem.cluster.message_s * messages
        )

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
        """Return the allocation under the budgets with K in flight; only what exceeds one is allotted again."""
        fits = np.ones(len(self._weight), bool)
        for each, count, total in zip(classes, counts, free.totals, strict=True):
            key = (each.memory_bytes, in_flight)
            if key not in self._most:
                self._most[key] = self.ranges.most_samples(*key)
            fits &= -(-total // count) <= self._most[key]
        again = np.nonzero(~fits & np.isfinite(free.forward_s))[0]
        if not len(again):
            return free
        part = Allocator(self.ranges.take(again), self._problem.micro_batch_size).allocate(
            classes, counts, in_flight
        )
        totals, arrays = free.totals.copy(), []
        totals[:, again] = part.totals
        for name in ("forward_s", "backward_s", "most_share", "num_devices"):
            array = getattr(free, name).copy()
            array[again] = getattr(part, name)
            arrays.append(array)
        return Allocation(totals, *arrays)


class _Links:
    """Bandwidths between groups of consecutive devices of an order."""

    def __init__(self, problem: PipelineProblem, order: Sequence[PipelineDevice]) -> None:
        links, size = problem.cluster.link_bytes_per_s, len(order)
        self._port, self._trunk = np.full((size, size), inf), np.full((size, size), inf)
        for i, source in enumerate(order):
            for j, target in enumerate(order):
                if i != j:
                    first, *between, last = (
                        links[link] for link in problem.cluster.path(source.soc, target.soc)
                    )
                    self._port[i, j] = min(first, last)
                    self._trunk[i, j] = min(between, default=inf)
        self._pair = np.minimum(self._port, self._trunk)
        self._between: dict[tuple[int, int], tuple[Floats, Floats]] = {}

    def least(self, begin: int, end: int) -> float:
        """Return the least bandwidth between two devices of a group."""
        return float(self._pair[begin:end, begin:end].min())

    def between(self, begin: int, end: int) -> tuple[Floats, Floats]:
        """Return the least bandwidths from a group to those that follow, up to each: at the devices, and between."""
        key = (begin, end)
        if key not in self._between:
            found = []
            for matrix in (self._port, self._trunk):
                towards = matrix[begin:end, end:].min(axis=0)
                found.append(np.minimum.accumulate(towards) if len(towards) else towards)
            self._between[key] = (found[0], found[1])
        return self._between[key]
