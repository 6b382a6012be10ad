"""How a mini-batch becomes micro-batches, and which of their samples each device of a stage takes."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from socflower.hierarchy import split_batch
from socflower.pipeline.plan import PipelinePlan, Plan, Slice, intervals, slices_between


@dataclass(frozen=True)
class MicroBatch:
    """One micro-batch of a pipeline: a range of the pipeline's samples in a mini-batch."""

    plan: PipelinePlan
    number: int
    first: int  # of the pipeline's samples
    size: int

    @cached_property
    def shares(self) -> tuple[tuple[int, ...], ...]:
        """The samples of each device, by stage; in a micro-batch that is smaller than planned some may get none."""
        return tuple(split_batch(self.size, stage.shares) for stage in self.plan.stages)

    def interval(self, stage: int, rank: int) -> tuple[int, int]:
        """Return the samples (first, stop) of the micro-batch that a device takes."""
        return intervals(self.shares[stage])[rank]

    def slices(self, stage: int) -> tuple[Slice, ...]:
        """Return what the devices of a stage send to those of the next one."""
        return slices_between(self.shares[stage], self.shares[stage + 1])


def micro_batches(plan: PipelinePlan, num_samples: int) -> tuple[MicroBatch, ...]:
    """Return the micro-batches of so many samples: as few as the plan's size allows, and nearly equal.

    The last mini-batches of an epoch may be smaller than planned. Equal parts rather than a small rest, since layers
    that depend on the batch need more than a sample.
    """
    count = max(1, -(-num_samples // plan.micro_batch_size)) if num_samples else 0
    bounds = (
        [
            num_samples // count * number + min(number, num_samples % count)
            for number in range(count + 1)
        ]
        if count
        else [0]
    )
    return tuple(
        MicroBatch(plan, number, bounds[number], bounds[number + 1] - bounds[number])
        for number in range(count)
    )


def samples_by_pipeline(plan: Plan, num_samples: int) -> tuple[int, ...]:
    """Return how many of a mini-batch's samples each pipeline of a plan trains, in their order."""
    return split_batch(num_samples, [pipeline.num_samples for pipeline in plan.pipelines])


def offsets(sizes: Sequence[int]) -> tuple[int, ...]:
    """Return where each of consecutive ranges begins."""
    return tuple(first for first, _ in intervals(sizes))
