"""Plans by brute force over all groupings, cuts and allocations of small problems: references for planners."""

from collections.abc import Iterator, Sequence
from itertools import product
from math import inf

from benchmarks.pipeline_cases.best_plans import compositions
from socflower.pipeline.plan import PipelinePlan, Stage
from socflower.pipeline.problem import PipelineDevice, PipelineProblem
from socflower.pipeline.schedule.order import ASTEROID


def best_shares(
    problem: PipelineProblem,
    first: int,
    last: int,
    devices: Sequence[PipelineDevice],
    in_flight: int,
) -> tuple[float, tuple[int, ...]]:
    """Return the least seconds of the slowest device (Eq. 7) over all allocations within the budgets, and one."""
    best: tuple[float, tuple[int, ...]] = (inf, ())
    for shares in compositions(problem.micro_batch_size, len(devices), least=0):
        stage_s = 0.0
        for device, share in zip(devices, shares, strict=True):
            needed = problem.model.state_bytes(
                first, last, problem.optimizer_copies
            ) + in_flight * share * problem.model.kept_bytes(first, last)
            if share and needed > device.memory_bytes:
                break
            stage_s = max(stage_s, sum(problem.pass_s(device, first, last, share)))
        else:
            best = min(best, (stage_s, shares))
    return best


def plans_of_order(
    problem: PipelineProblem, order: Sequence[PipelineDevice]
) -> Iterator[PipelinePlan]:
    """Yield every plan whose stages take the devices in this order, with every allocation within the budgets."""
    num_layers = problem.model.num_layers
    for num_stages in range(1, min(len(order), num_layers) + 1):
        for widths in compositions(len(order), num_stages):
            for depths in compositions(num_layers, num_stages):
                yield from _plans_of(problem, order, widths, depths)


def _plans_of(
    problem: PipelineProblem,
    order: Sequence[PipelineDevice],
    widths: Sequence[int],
    depths: Sequence[int],
) -> Iterator[PipelinePlan]:
    """Yield the plans whose stages have `widths` devices of the order and `depths` layers."""
    choices: list[list[Stage]] = []
    begin = first = 0
    counts = ASTEROID.counts(len(widths), problem.num_micro_batches)
    for width, depth, in_flight in zip(widths, depths, counts, strict=True):
        group, last = order[begin : begin + width], first + depth - 1
        choices.append(list(_stages(problem, first, last, group, in_flight)))
        begin, first = begin + width, last + 1
    for stages in product(*choices):
        yield PipelinePlan(
            stages=stages,
            micro_batch_size=problem.micro_batch_size,
            num_micro_batches=problem.num_micro_batches,
        )


def _stages(
    problem: PipelineProblem,
    first: int,
    last: int,
    group: Sequence[PipelineDevice],
    in_flight: int,
) -> Iterator[Stage]:
    for shares in compositions(problem.micro_batch_size, len(group)):
        stage = Stage(
            first_layer=first,
            last_layer=last,
            devices=tuple(device.soc for device in group),
            shares=shares,
            in_flight=in_flight,
        )
        if all(
            stage.memory_bytes(problem, share) <= device.memory_bytes
            for device, share in zip(group, shares, strict=True)
        ):
            yield stage
