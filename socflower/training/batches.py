"""The samples of each step: a pure function of the seed, the same on every engine."""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from socflower.hierarchy import split_batch
from socflower.wire.message_keys import GroupTask
from socflower.workloads.data_source import DataSource

Indices = NDArray[np.int64]


class BatchSchedule:
    """The samples of each member of a group in each step; every member can compute it locally.

    With `task.reshuffle`, `num_samples` is the size of the whole data set: in epoch `deal_epoch` it is permuted and
    divided among the groups in nearly equal parts, later epochs permute the group's part, and a step's batch is divided
    among the present members by capacity (F4). Without it, `num_samples` are the sizes of the members' own data, and a
    step uses a part of each present member's permutation. In both cases an epoch uses each sample once, in
    `steps_per_epoch` batches whose sizes differ by at most one per member.
    """

    def __init__(self, task: GroupTask, num_samples: Sequence[int]) -> None:
        self._task = task
        self._num_samples = tuple(num_samples)
        self._epoch = -1
        # Of the current epoch, by step; one list for the group, or one per member.
        self._batches: list[list[Indices]] = []

    def batch(self, step: int) -> list[Indices]:
        """Return a step's indices: one array for the group, or one per member into its own data."""
        num_steps = self._task.steps_per_epoch
        epoch, within = divmod(step, num_steps)
        if epoch != self._epoch:
            self._epoch = epoch
            self._batches = [np.array_split(order, num_steps) for order in self._orders(epoch)]
        return [batches[within] for batches in self._batches]

    def shares(
        self,
        step: int,
        present: Sequence[int],
        capacities: Sequence[float] | None = None,
        due: Collection[int] = (),
    ) -> list[Indices]:
        """Return a step's indices for each of the present members, which are positions in `task.members`.

        With `task.reshuffle`, `capacities` of the present members replace the task's, and members in `due` (indices
        into `present`) get at least one sample. Without it shares are fixed, and both arguments are ignored.
        """
        batch = self.batch(step)
        if not self._task.reshuffle:
            return [batch[member] for member in present]
        if capacities is None:
            capacities = [self._task.capacities[member] for member in present]
        sizes = ensure_one_sample(split_batch(len(batch[0]), capacities), due)
        return np.split(batch[0], np.cumsum(sizes)[:-1])

    def _orders(self, epoch: int) -> list[Indices]:
        task = self._task
        if not task.reshuffle:
            return [
                np.random.default_rng([task.seed, epoch, partition]).permutation(size)
                for partition, size in zip(task.partitions, self._num_samples, strict=True)
            ]
        (num_samples,) = self._num_samples
        order = np.random.default_rng([task.seed, task.deal_epoch]).permutation(num_samples)
        dealt = np.array_split(order, task.num_groups)[task.group_id]
        if epoch == task.deal_epoch:
            return [dealt]
        return [np.random.default_rng([task.seed, epoch, task.group_id]).permutation(dealt)]


def own_steps(task: GroupTask, data: DataSource) -> GroupTask:
    """Return the task with as many steps as its data take, for a member that trains for local epochs."""
    if not task.local_epochs:
        return task
    steps_per_epoch = max(1, -(-len(data) // task.batch_size))
    first_epoch = task.first_step // task.steps_per_epoch
    return replace(
        task,
        steps_per_epoch=steps_per_epoch,
        first_step=first_epoch * steps_per_epoch,
        num_steps=task.local_epochs * steps_per_epoch,
        total_steps=task.total_steps // task.steps_per_epoch * steps_per_epoch,
    )


def sample_key(task: GroupTask, step: int, member: int | None = None) -> tuple[int, ...]:
    """Return the key of the random numbers in a step's samples: seed, epoch and, without `reshuffle`, the partition.

    `step` counts from the task's first one; `member` is a position in `task.members`, whose own data are read.
    """
    epoch = (task.first_step + step) // task.steps_per_epoch
    if member is None or task.reshuffle:
        return (task.seed, epoch)
    return (task.seed, epoch, task.partitions[member])


def ensure_one_sample(sizes: Sequence[int], due: Collection[int]) -> tuple[int, ...]:
    """Return shares in which members in `due` without a sample get one from the largest share, the first among equals.

    A member's last sample is never taken: if a batch is too small for all, some members get none.
    """
    changed = list(sizes)
    for member in sorted(due):
        largest = changed.index(max(changed))
        if not changed[member] and changed[largest] > 1:
            changed[member] += 1
            changed[largest] -= 1
    return tuple(changed)


def group_batches(task: GroupTask, num_samples: int) -> Iterator[Indices]:
    """Yield the indices of each of the task's steps, one array per step, for tasks with `reshuffle`."""
    schedule = BatchSchedule(task, [num_samples])
    for step in range(task.first_step, task.first_step + task.num_steps):
        yield schedule.batch(step)[0]


def interval_rows(task: GroupTask) -> Indices:
    """Return the numbers of the samples that a group's interval reads, ascending, for tasks with `reshuffle`."""
    return np.unique(np.concatenate(list(group_batches(task, task.num_samples))))


def local_batches(
    num_samples: int,
    batch_size: int,
    num_epochs: int,
    seed: Sequence[int],
    first_epoch: int,
) -> Iterator[Indices]:
    """Yield the batches of a client that trains alone: `num_epochs` permutations of its own samples."""
    for epoch in range(first_epoch, first_epoch + num_epochs):
        order = np.random.default_rng([*seed, epoch]).permutation(num_samples)
        yield from np.array_split(order, -(-num_samples // batch_size))
