"""Division of a mini-batch into micro-batches, and of these among the devices of a stage."""

from dataclasses import dataclass
from functools import cached_property

from socflower.hierarchy import split_batch
from socflower.pipeline.plan import PipelinePlan, Plan, Slice, intervals, slices_between


@dataclass(frozen=True)
class MicroBatch:
    """One micro-batch of a pipeline: a range of the pipeline's samples in a mini-batch."""

    plan: PipelinePlan
    number: int
    # Its first sample, in the pipeline's samples of the mini-batch.
    first: int
    size: int

    @cached_property
    def shares(self) -> tuple[tuple[int, ...], ...]:
        """The samples of each device, by stage; in a micro-batch smaller than planned, some devices may have none."""
        return tuple(split_batch(self.size, stage.shares) for stage in self.plan.stages)

    def interval(self, stage: int, rank: int) -> tuple[int, int]:
        """Return the samples (first, stop) of the micro-batch that a device takes."""
        return intervals(self.shares[stage])[rank]

    def rows(self, stage: int, rank: int) -> slice:
        """Return the samples of a device, in the pipeline's samples of the mini-batch."""
        first, stop = self.interval(stage, rank)
        return slice(self.first + first, self.first + stop)

    def slices(self, stage: int) -> tuple[Slice, ...]:
        """Return the samples that the devices of a stage send to those of the next stage."""
        return slices_between(self.shares[stage], self.shares[stage + 1])


def micro_batches(plan: PipelinePlan, num_samples: int) -> tuple[MicroBatch, ...]:
    """Return the micro-batches of so many samples: as few as the plan's size allows, and nearly equal.

    The last mini-batches of an epoch may be smaller than planned. They are divided equally, since BatchNorm needs more
    samples than a small rest would have.
    """
    count = -(-num_samples // plan.micro_batch_size)
    found, first = [], 0
    for number in range(count):
        size = num_samples // count + (number < num_samples % count)
        found.append(MicroBatch(plan, number, first, size))
        first += size
    return tuple(found)


def samples_by_pipeline(plan: Plan, num_samples: int) -> tuple[int, ...]:
    """Return how many of a mini-batch's samples each pipeline of a plan trains, in their order."""
    return split_batch(num_samples, [pipeline.num_samples for pipeline in plan.pipelines])
