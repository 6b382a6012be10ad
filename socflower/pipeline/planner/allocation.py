"""Samples of a micro-batch for each device of a stage: Algorithm 1 (F31), for many ranges of layers at once.

Minimise the slowest device's forward and backward seconds (Eq. 7) under each device's memory budget. Phase 1 allots in
proportion to capacity, again and again among those whose memory is not full. Phase 2 moves a sample from the slowest
device to that which would then take least, as long as it would take less than the slowest does now. Seconds never fall
with samples, so what phase 2 ends with is optimal: if all devices could be faster than the slowest, one of those that
had more samples there could take one more here. (The paper stops at the first move that does not lower the maximum,
also where several devices are equally slow.)

Devices of one kind with one budget form a class; a class has a total, of which its devices have equal shares or one
sample more. The arrays below are of classes x ranges.
"""

from collections.abc import Sequence
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


@dataclass(frozen=True, slots=True)
class LayerRanges:
    """Ranges of layers from `first` up to, without, `stop`, with what each needs of memory and sends."""

    first: Ints
    stop: Ints
    state_bytes: Floats  # MOD + OPT
    kept_bytes: Floats  # ACT of one sample
    forward_bytes: Floats  # of one sample, over both cuts
    backward_bytes: Floats

    @classmethod
    def of(cls, problem: PipelineProblem, first: Ints, stop: Ints) -> "LayerRanges":
        """Return ranges of a model's layers."""
        model = problem.model
        weight = model.weight_prefix[stop] - model.weight_prefix[first]
        frozen = model.frozen_prefix[stop] - model.frozen_prefix[first]
        kept = (
            model.entering_bytes[first]
            + model.activation_prefix[stop]
            - model.activation_prefix[first]
        )
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
        return LayerRanges(
            self.first[which],
            self.stop[which],
            self.state_bytes[which],
            self.kept_bytes[which],
            self.forward_bytes[which],
            self.backward_bytes[which],
        )

    def most_samples(self, memory_bytes: float, in_flight: int) -> Ints:
        """Return the greatest share within a budget; 0 where not even one sample fits (F28)."""
        room = np.maximum(memory_bytes - self.state_bytes, -1.0)
        with np.errstate(divide="ignore", invalid="ignore"):
            most = np.floor(room * (1.0 + 1e-12) / (in_flight * self.kept_bytes))
        most = np.where(room < 0.0, 0.0, np.where(self.kept_bytes > 0.0, most, _MANY))
        return np.minimum(most, _MANY).astype(np.int64)


@dataclass(frozen=True, slots=True)
class Allocation:
    """Totals of samples by class and range, and what they take; infinite where the budgets hold too few samples."""

    totals: Ints  # [class][range]
    forward_s: Floats  # [range]: of the slowest device
    backward_s: Floats
    most_share: Ints  # [range]: the largest share
    num_devices: Ints  # [range]: that have samples


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
        limits = (
            np.array(
                [
                    np.minimum(ranges.most_samples(each.memory_bytes, in_flight), size)
                    for each in classes
                ]
            )
            * num
        )
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
        """Allot in proportion to capacity within the limits, and what rounding leaves one by one."""
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

    def _phase_2(self, seconds: "_Seconds", num: Ints, limits: Ints, totals: Ints) -> None:
        """Move samples from the slowest to the fastest, in place."""
        rows, own_seconds = np.arange(totals.shape[1]), seconds
        while len(rows):
            own = totals[:, rows]
            now_s = own_seconds.total(-(-own // num))
            following_s = np.where(
                own < limits[:, rows],
                own_seconds.total(np.minimum(own // num + 1, self._size)),
                inf,
            )
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
        self._both = [
            forward + backward
            for forward, backward in zip(self._forward, self._backward, strict=True)
        ]
        columns = [forward.shape[1] for forward, _ in tables]
        self._first = [ranges.first * width for width in columns]
        self._stop = [ranges.stop * width for width in columns]
        # Of a sample, for what crosses the cuts.
        self._forward_s = [each.byte_s * ranges.forward_bytes for each in classes]
        self._backward_s = [each.byte_s * ranges.backward_bytes for each in classes]

    def rows(self, rows: Ints) -> "_Seconds":
        """Return the same for some of the ranges."""
        some = object.__new__(_Seconds)
        some._forward, some._backward, some._both = self._forward, self._backward, self._both
        some._first = [each[rows] for each in self._first]
        some._stop = [each[rows] for each in self._stop]
        some._forward_s = [each[rows] for each in self._forward_s]
        some._backward_s = [each[rows] for each in self._backward_s]
        return some

    def total(self, shares: Ints) -> Floats:
        """Return forward and backward seconds of a share of each class."""
        return np.array(
            [
                table.take(stop + share)
                - table.take(first + share)
                + share * (forward_s + backward_s)
                for table, first, stop, share, forward_s, backward_s in zip(
                    self._both,
                    self._first,
                    self._stop,
                    shares,
                    self._forward_s,
                    self._backward_s,
                    strict=True,
                )
            ]
        )

    def passes(self, shares: Ints) -> tuple[Floats, Floats]:
        """Return the slowest class's forward seconds, and the slowest class's backward seconds (Eq. 8)."""
        found = []
        for tables, sent in ((self._forward, self._forward_s), (self._backward, self._backward_s)):
            each_s = [
                table.take(stop + share) - table.take(first + share) + share * sample_s
                for table, first, stop, share, sample_s in zip(
                    tables, self._first, self._stop, shares, sent, strict=True
                )
            ]
            found.append(np.max(each_s, axis=0))
        return found[0], found[1]


def class_shares(total: int, count: int) -> list[int]:
    """Return the shares of a class's devices: equal, the first ones one sample more where they do not divide."""
    share, more = divmod(total, count)
    return [share + (index < more) for index in range(count)]
