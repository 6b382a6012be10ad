"""Fig. 15: the gains of planning between and inside stages, of 1F1B and of the rule for K_p."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import inf

import numpy as np

from socflower.paper.asteroid.methods import SETTINGS, asteroid, peer_of
from socflower.paper.asteroid.settings import TX2, problem_of
from socflower.pipeline.plan import PipelinePlan
from socflower.pipeline.planner.allocation import class_shares
from socflower.pipeline.planner.selection import algorithm_2, plan_pipeline, predict
from socflower.pipeline.problem import LayerSeconds, PipelineProblem
from socflower.pipeline.profiler.layers import Granularity
from socflower.pipeline.schedule.order import RULES

_BOUNDLESS = 1e30


def figure_15() -> Mapping[str, float | bool | str]:
    """Return whether each statement holds: planning on environment C, 1F1B and K_p on three TX2, at 100 Mbps."""
    gains = [_gains(name) for name in ("efficientnet-b1", "mobilenet-v2")]
    problem = problem_of(
        "efficientnet-b1",
        (TX2,) * 3,
        100,
        micro_batch_size=96,
        num_micro_batches=16,
        granularity=Granularity.BLOCKS,
    )
    straight = peer_of(problem, "pipeline-parallel").plan
    assert isinstance(straight, PipelinePlan)
    with_rule = {}
    for name, rule in RULES.items():
        counts = rule.counts(len(straight.stages), problem.num_micro_batches)
        with_rule[name] = _with_counts(straight, counts)
    memory = {name: _peak_bytes(problem, plan) for name, plan in with_rule.items()}
    per_s = {
        name: predict(problem, plan, within_memory=False).samples_per_s
        for name, plan in with_rule.items()
    }
    gpipe = _with_counts(straight, [problem.num_micro_batches] * len(straight.stages))
    # Conventional data parallelism computes its share of the mini-batch at once.
    last, share = problem.model.num_layers - 1, problem.mini_batch_size // 3
    kept_bytes = share * problem.model.kept_bytes(0, last)
    parallel_bytes = problem.model.state_bytes(0, last, 1.0) + kept_bytes
    return {
        "planning between stages boosts throughput": all(between > 1.0 for between, _ in gains),
        "planning inside stages boosts it further": all(inside > 1.0 for _, inside in gains),
        "1F1B keeps less than backward after forward": memory["asteroid"]
        < _peak_bytes(problem, gpipe),
        "1F1B keeps less than data parallelism": memory["asteroid"] < parallel_bytes,
        "throughput of K = 2(P - p) - 1 is comparable to a and c": all(
            per_s["asteroid"] >= 0.95 * per_s[other] for other in ("a", "c")
        ),
        "its memory is less than that of a and c": all(
            memory["asteroid"] < memory[other] for other in ("a", "c")
        ),
    }


def _gains(name: str) -> tuple[float, float]:
    """Return the gain of planning between stages over no planning, and of planning inside stages over that.

    No planning means that all devices count as the mean one, with boundless links and memory. With planning between
    stages alone, the devices of a stage have equal shares.
    """
    problem = problem_of(name, "C", 100)
    naive = algorithm_2(_alike(problem)).plan
    naive_s = predict(problem, naive, within_memory=False).step_s
    best, evened = asteroid(name, "C", 100), inf
    for planned in (best, *best.alternatives, plan_pipeline(problem, SETTINGS)):
        if isinstance(planned.plan, PipelinePlan):
            even = predict(planned.problem, _even(planned.plan), within_memory=False)
            evened = min(evened, even.step_s)
    return naive_s / evened, evened / best.prediction.step_s


def _alike(problem: PipelineProblem) -> PipelineProblem:
    kinds = [device.seconds for device in problem.devices]
    mean = LayerSeconds(
        device="mean",
        batches=kinds[0].batches,
        estimated=True,
        forward_s=np.mean([kind.forward_s for kind in kinds], axis=0),
        backward_s=np.mean([kind.backward_s for kind in kinds], axis=0),
    )
    boards = tuple(
        replace(board, soc_bytes_per_s=1e15, uplink_bytes_per_s=1e15)
        for board in problem.cluster.boards
    )
    devices = tuple(
        replace(device, seconds=mean, memory_bytes=_BOUNDLESS) for device in problem.devices
    )
    return replace(problem, cluster=replace(problem.cluster, boards=boards), devices=devices)


def _even(plan: PipelinePlan) -> PipelinePlan:
    stages = []
    for stage in plan.stages:
        shares = class_shares(plan.micro_batch_size, len(stage.devices))
        stages.append(replace(stage, shares=tuple(shares)))
    return replace(plan, stages=tuple(stages))


def _with_counts(plan: PipelinePlan, counts: Sequence[int]) -> PipelinePlan:
    stages = [
        replace(stage, in_flight=count) for stage, count in zip(plan.stages, counts, strict=True)
    ]
    return replace(plan, stages=tuple(stages))


def _peak_bytes(problem: PipelineProblem, plan: PipelinePlan) -> float:
    return max(
        stage.memory_bytes(problem, share) for stage in plan.stages for share in stage.shares
    )
