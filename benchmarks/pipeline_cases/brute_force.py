"""Plans by brute force over all groupings, cuts and allocations of small problems: references for planners."""

from collections.abc import Iterator, Sequence
from itertools import combinations, pairwise, product
from math import inf

from socflower.pipeline.plan import PipelinePlan, Stage
from socflower.pipeline.problem import PipelineDevice, PipelineProblem
from socflower.pipeline.schedule.order import ASTEROID


def compositions(total: int, parts: int, least: int = 1) -> Iterator[tuple[int, ...]]:
    """Yield all ways to write `total` as a sum of `parts` numbers of at least `least`."""
    for inner in combinations(range(total - parts * (least - 1) - 1), parts - 1):
        yield tuple(
            after - before + least - 1
            for before, after in pairwise((-1, *inner, total - parts * (least - 1) - 1))
        )


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
    problem: PipelineProblem,
    order: Sequence[PipelineDevice],
    *,
    all_shares: bool = False,
) -> Iterator[PipelinePlan]:
    """Yield every plan whose stages take the devices in this order; devices with a best share of 0 are left out.

    Each stage has its best allocation or, with `all_shares`, every allocation within the budgets.
    """
    num_layers = problem.model.num_layers
    for num_stages in range(1, min(len(order), num_layers) + 1):
        for widths in compositions(len(order), num_stages):
            for depths in compositions(num_layers, num_stages):
                yield from plans_of(problem, order, widths, depths, all_shares=all_shares)


def plans_of(
    problem: PipelineProblem,
    order: Sequence[PipelineDevice],
    widths: Sequence[int],
    depths: Sequence[int],
    *,
    all_shares: bool = False,
) -> Iterator[PipelinePlan]:
    """Yield the plans whose stages have `widths` devices of the order and `depths` layers."""
    choices: list[list[Stage]] = []
    begin = first = 0
    counts = ASTEROID.counts(len(widths), problem.num_micro_batches)
    for width, depth, in_flight in zip(widths, depths, counts, strict=True):
        group, last = order[begin : begin + width], first + int(depth) - 1
        choices.append(list(_stages(problem, first, last, group, in_flight, all_shares)))
        begin, first = begin + int(width), last + 1
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
    all_shares: bool,
) -> Iterator[Stage]:
    if all_shares:
        every = compositions(problem.micro_batch_size, len(group), least=1)
    else:
        seconds, shares = best_shares(problem, first, last, group, in_flight)
        every = iter([shares] if seconds < inf else [])
    for shares in every:
        members = [(device, share) for device, share in zip(group, shares, strict=True) if share]
        stage = Stage(
            first_layer=first,
            last_layer=last,
            devices=tuple(device.soc for device, _ in members),
            shares=tuple(share for _, share in members),
            in_flight=in_flight,
        )
        if all(
            stage.memory_bytes(problem, share) <= device.memory_bytes for device, share in members
        ):
            yield stage
