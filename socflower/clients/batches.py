"""Which samples a group trains on in which step: a pure function of the seed, the same on every engine."""

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from socflower.cluster.protocol import GroupTask

Indices = NDArray[np.int64]


def group_batches(task: GroupTask, num_samples: int) -> Iterator[Indices]:
    """Yield the sample indices of each of the task's steps, one array per step.

    With `task.reshuffle`, `num_samples` counts the whole data set: `deal_epoch` permutes it and deals it to the groups
    in nearly equal runs. Without, it counts the group's own samples. Every later epoch permutes what the group has.
    Either way an epoch uses each sample once, in `steps_per_epoch` batches whose sizes differ by at most one.
    """
    epoch, batches = -1, [np.empty(0, np.int64)]
    for step in range(task.first_step, task.first_step + task.num_steps):
        if step // task.steps_per_epoch != epoch:
            epoch = step // task.steps_per_epoch
            batches = np.array_split(_epoch_order(task, epoch, num_samples), task.steps_per_epoch)
        yield batches[step % task.steps_per_epoch]


def _epoch_order(task: GroupTask, epoch: int, num_samples: int) -> Indices:
    own = np.random.default_rng([task.seed, epoch, task.group_id])
    if not task.reshuffle:
        return own.permutation(num_samples)
    order = np.random.default_rng([task.seed, task.deal_epoch]).permutation(num_samples)
    dealt = np.array_split(order, task.num_groups)[task.group_id]
    return dealt if epoch == task.deal_epoch else own.permutation(dealt)


def local_batches(
    num_samples: int, batch_size: int, num_epochs: int, seed: Sequence[int], first_epoch: int,
) -> Iterator[Indices]:
    """Yield the batches of a client that trains alone: `num_epochs` permutations of its own samples."""
    for epoch in range(first_epoch, first_epoch + num_epochs):
        order = np.random.default_rng([*seed, epoch]).permutation(num_samples)
        yield from np.array_split(order, -(-num_samples // batch_size))
