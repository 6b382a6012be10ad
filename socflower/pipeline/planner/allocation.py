"""Samples of a micro-batch for each device of a stage: Algorithm 1 (F31), for many ranges of layers at once.

The allocation minimises the slowest device's forward and backward seconds (Eq. 7) under each device's memory budget.
Phase 1 allots in proportion to capacity, repeatedly among the devices whose memory is not full. Phase 2 moves a sample
from the slowest device to the device that would then take least, as long as that one stays faster than the slowest was.
Seconds never fall with samples, so the result is optimal: if all devices could be faster than the slowest, one of those
with more samples in the better allocation could take one more here. (The paper stops at the first move that does not
lower the maximum, also if several devices are equally slow.)

Devices of one kind with one budget form a class. The devices of a class have equal shares of its total, or one sample
more. The arrays below have the shape [class][range].
"""

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass
from math import inf

import numpy as np

from socflower.pipeline.problem import Floats, Ints, LayerSeconds, PipelineDevice, PipelineProblem

_MANY = 1 << 40


@dataclass(frozen=True, slots=True)
class DeviceClass:
    """Devices that are equal for the planner."""

    seconds: LayerSeconds
    memory_bytes: float
    update_bytes_per_s: float
    byte_s: float

    @classmethod
    def of(cls, device: PipelineDevice) -> "DeviceClass":
        """Return a device's class."""
        return cls(device.seconds, device.memory_bytes, device.update_bytes_per_s, device.byte_s)


def by_class(devices: Sequence[PipelineDevice]) -> dict[DeviceClass, list[PipelineDevice]]:
    """Return devices by their class, both in the order of their first coming."""
    found: dict[DeviceClass, list[PipelineDevice]] = {}
    for device in devices:
        found.setdefault(DeviceClass.of(device), []).append(device)
    return found


@dataclass(frozen=True, slots=True)
class LayerRanges:
    """Ranges of layers, `first` to `stop` - 1, with the memory that each needs and the bytes that it sends."""

    first: Ints
    stop: Ints
    # MOD + OPT.
    state_bytes: Floats
    # ACT of one sample.
    kept_bytes: Floats
    # Of one sample, over both cuts.
    forward_bytes: Floats
    backward_bytes: Floats

    @classmethod
    def of(cls, problem: PipelineProblem, first: Ints, stop: Ints) -> "LayerRanges":
        """Return ranges of a model's layers."""
        model = problem.model
        weight = model.trained_bytes(first, stop)
        frozen = model.untrained_bytes(first, stop)
        activations = model.activation_prefix
        kept = model.entering_bytes[first] + activations[stop] - activations[first]
        crossing = model.cut_bytes[first] + model.cut_bytes[stop]
        return cls(
            first,
            stop,
            (2.0 + problem.optimizer_copies) * weight + frozen,
            kept,
            crossing * problem.activation_part,
            crossing * problem.gradient_part,
        )

    def take(self, which: Ints) -> "LayerRanges":
        """Return some of them."""
        return LayerRanges(*(getattr(self, name)[which] for name in self.__slots__))

    def most_samples(self, memory_bytes: float, in_flight: int) -> Ints:
        """Return the greatest share within a budget (F28); 0 if not even one sample fits."""
        room = np.maximum(memory_bytes - self.state_bytes, -1.0)
        per_sample = in_flight * self.kept_bytes
        with np.errstate(divide="ignore", invalid="ignore"):
            most = np.floor(room * (1.0 + 1e-12) / per_sample)
        # With nothing in flight a budget that the weights alone fill holds any number.
        most = np.where(room < 0.0, 0.0, np.where(per_sample > 0.0, most, _MANY))
        return np.minimum(most, _MANY).astype(np.int64)


@dataclass(frozen=True, slots=True)
class Allocation:
    """Samples by class and range, and their seconds; seconds are infinite if budgets hold too few samples."""

    # [class][range]; the other arrays are [range].
    totals: Ints
    # Of the slowest device.
    forward_s: Floats
    backward_s: Floats
    # The largest share of a device.
    most_share: Ints
    # Devices that have samples.
    num_devices: Ints


class Allocator:
    """Algorithm 1 for one model and micro-batch size."""

    def __init__(self, ranges: LayerRanges, micro_batch_size: int) -> None:
        self._ranges, self._size = ranges, micro_batch_size

    def allocate(
        self, classes: Sequence[DeviceClass], counts: Sequence[int], in_flight: int
    ) -> Allocation:
        """Return the allocation of every range to `counts` devices of the classes."""
        ranges, size = self._ranges, self._size
        num = np.array(counts, np.int64)[:, None]
        most = [ranges.most_samples(each.memory_bytes, in_flight) for each in classes]
        limits = np.minimum(np.array(most), size) * num
        seconds = _Seconds(classes, ranges, size)
        if len(classes) == 1:
            totals = np.full((1, len(ranges.first)), size, np.int64)
        else:
            totals = self._phase_1(seconds, num, limits)
            self._phase_2(seconds, num, limits, totals)
        feasible = limits.sum(axis=0) >= size
        top = -(-totals // num)
        forward_s, backward_s = seconds.passes(np.minimum(top, size))
        forward_s[~feasible] = backward_s[~feasible] = inf
        return Allocation(
            totals, forward_s, backward_s, top.max(axis=0), np.minimum(totals, num).sum(axis=0)
        )

    def _phase_1(self, seconds: "_Seconds", num: Ints, limits: Ints) -> Ints:
        """Allot in proportion to capacity within the limits, and then the rest after rounding one by one."""
        size = self._size
        totals = np.zeros_like(limits)
        with np.errstate(divide="ignore"):
            capacity = num / np.maximum(seconds.total(np.full_like(limits, size)), 1e-300)
        for _ in range(len(num)):
            left = size - totals.sum(axis=0)
            open_capacity = np.where(totals < limits, capacity, 0.0)
            whole = np.maximum(open_capacity.sum(axis=0), 1e-300)
            more = np.minimum((open_capacity / whole * left).astype(np.int64), limits - totals)
            totals += more
            if not more.any() or (totals < limits).all():
                break
        while True:
            left = size - totals.sum(axis=0)
            rows = np.nonzero((left > 0) & (totals < limits).any(axis=0))[0]
            if not len(rows):
                return totals
            own = totals[:, rows]
            following = seconds.rows(rows).total(np.minimum(own // num + 1, size))
            best = np.where(own < limits[:, rows], following, inf).argmin(axis=0)
            totals[best, rows] += 1

    def _phase_2(
        self,
        seconds: "_Seconds",
        num: Ints,
        limits: Ints,
        totals: Ints,
    ) -> None:
        """Move samples from the slowest to the fastest, in place."""
        rows, own_seconds = np.arange(totals.shape[1]), seconds
        while len(rows):
            own = totals[:, rows]
            now_s = own_seconds.total(-(-own // num))
            one_more_s = own_seconds.total(np.minimum(own // num + 1, self._size))
            following_s = np.where(own < limits[:, rows], one_more_s, inf)
            slowest, fastest = now_s.argmax(axis=0), following_s.argmin(axis=0)
            each = np.arange(len(rows))
            moves = following_s[fastest, each] < now_s[slowest, each] * (1.0 - 1e-12)
            rows, slowest, fastest = rows[moves], slowest[moves], fastest[moves]
            totals[slowest, rows] -= 1
            totals[fastest, rows] += 1
            own_seconds = seconds.rows(rows)


class _Seconds:
    """Seconds of shares by class and range, from prefix sums over layers."""

    def __init__(self, classes: Sequence[DeviceClass], ranges: LayerRanges, size: int) -> None:
        tables = [each.seconds.prefixes(size) for each in classes]
        self._forward = [np.ascontiguousarray(forward).ravel() for forward, _ in tables]
        self._backward = [np.ascontiguousarray(backward).ravel() for _, backward in tables]
        self._both = list(map(np.add, self._forward, self._backward))
        columns = [forward.shape[1] for forward, _ in tables]
        self._first = [ranges.first * width for width in columns]
        self._stop = [ranges.stop * width for width in columns]
        # Seconds of one sample for the bytes that cross the cuts.
        self._forward_s = [each.byte_s * ranges.forward_bytes for each in classes]
        self._backward_s = [each.byte_s * ranges.backward_bytes for each in classes]

    def rows(self, rows: Ints) -> "_Seconds":
        """Return the same for some of the ranges."""
        some = copy(self)
        for name in ("_first", "_stop", "_forward_s", "_backward_s"):
            setattr(some, name, [each[rows] for each in getattr(self, name)])
        return some

    def total(self, shares: Ints) -> Floats:
        """Return forward and backward seconds of a share of each class."""
        sent_s = list(map(np.add, self._forward_s, self._backward_s))
        return self._of(self._both, sent_s, shares)

    def passes(self, shares: Ints) -> tuple[Floats, Floats]:
        """Return the slowest class's forward seconds, and the slowest class's backward seconds (Eq. 8)."""
        forward_s = self._of(self._forward, self._forward_s, shares)
        backward_s = self._of(self._backward, self._backward_s, shares)
        return np.max(forward_s, axis=0), np.max(backward_s, axis=0)

    def _of(self, tables: Sequence[Floats], sent_s: Sequence[Floats], shares: Ints) -> Floats:
        found = []
        for number, (table, share) in enumerate(zip(tables, shares, strict=True)):
            computed_s = table.take(self._stop[number] + share)
            computed_s -= table.take(self._first[number] + share)
            found.append(computed_s + share * sent_s[number])
        return np.array(found)


def class_shares(total: int, count: int) -> list[int]:
    """Return equal shares of a class's devices; the first ones have one sample more if the total does not divide."""
    share, more = divmod(total, count)
    return [share + (index < more) for index in range(count)]
