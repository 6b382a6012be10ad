"""The time until a pipeline of real processes trains again after the loss of a board, and its speed afterwards.

Four processes train a perceptron of 8.4 MB in stages, over gloo on this machine; every fourth update, a stage on one
board is copied to the next stage's board. One process is killed, or stopped so that it hangs, in a randomly drawn pass.
`ours` are the median seconds from the moment at which another process noticed to the first update of the remaining
pipeline; a hung process is noticed after a heartbeat of two seconds. The peer plans with the whole planner, whose time
on this machine is added; moving layers is the same for both. `ok`: all weights have the bits of a run that was planned
to continue without that board from the update to which the others returned.

Rows of throughput compare the plan that survivors compute (F33) with the planner's plan for the remaining boards, both
in virtual time, over random clusters.
"""

import random
import re
import statistics
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from flwr.app import ArrayRecord
from torch import Tensor

from benchmarks.harness import Row, less_is_better
from benchmarks.recovery_boards import app
from socflower.flower_adapter import begin_run
from socflower.peers.ring.settings import RingSettings
from socflower.pipeline.plan import Plan
from socflower.pipeline.planner.selection import plan_pipeline, predict
from socflower.pipeline.problem import PipelineProblem
from socflower.pipeline.replanning import recovered, replanned
from socflower.pipeline.runtime.group import train_pipeline
from socflower.strategies.group_grid import GroupGrid
from socflower.strategies.hybrid_pipeline import HybridPipeline
from socflower.strategies.settings import TrainingSchedule
from tests.pipeline.problems import random_problem
from tests.process_grid import ProcessGrid
from tests.strategies.pipeline_app import node_configs

HEARTBEAT_S = 2.0
BACKUP_STEPS = 4
_PEER = "with the whole planner"
_FAULTS = ("dies-at-forward", "dies-at-backward", "stops-at-backward")


def run(quick: bool = False) -> list[Row]:
    """Return rows of boards lost at random moments; each case runs three times, with `quick` once."""
    begin_run(1)
    dice = random.Random(1)
    rows = []
    for name, plan in app.plans().items():
        lost = [
            stage
            for stage in plan.stages
            if len(stage.devices) == (1 if name == "four stages" else 2)
        ]
        for fault in _FAULTS:
            tries = [
                _lose(plan, dice.choice(dice.choice(lost).devices), fault, dice.randint(20, 60))
                for _ in range(1 if quick else 3)
            ]
            ours, planner_s = (
                statistics.median(values)
                for values in zip(*((each[0], each[1]) for each in tries), strict=True)
            )
            rows.append(
                less_is_better(
                    f"{name}, a board {fault.replace('-', ' ')}",
                    ours,
                    _PEER,
                    ours + planner_s,
                    "s",
                    ok=all(each[2] for each in tries),
                )
            )
    return [*rows, *_throughput(dice, 4 if quick else 12)]


def _lose(plan: Plan, soc: int, fault: str, at: int) -> tuple[float, float, bool]:
    """Return the seconds until the next update, those of the whole planner, and whether the weights are right."""
    strategy = HybridPipeline(
        problem=app.problem(),
        plan=plan,
        backup_steps=BACKUP_STEPS,
        schedule=TrainingSchedule(
            num_samples=app.NUM_SAMPLES, batch_size=app.BATCH, num_epochs=1, interval_epochs=1.0
        ),
        rings=RingSettings(heartbeat_s=HEARTBEAT_S, rendezvous_s=30.0, leader_grace_s=10.0),
    )
    with ProcessGrid(app.client_app, node_configs({soc: {fault: at}}, count=4)) as grid:
        result = strategy.start(
            GroupGrid(grid), ArrayRecord(app.perceptron().state_dict()), num_rounds=1, timeout=120
        )
    (report,) = strategy.reports
    said = " ".join(event.text for event in report.events)
    step, again_s = (
        re.search(r"continues from update (\d+)", said),
        re.search(r"training again after ([\d.]+) s", said),
    )
    if step is None or again_s is None:
        raise RuntimeError(f"board {soc} was not lost: {said}")
    present = {*plan.socs} - {soc}
    started_s = time.perf_counter()
    plan_pipeline(_without(app.problem(), present))
    planner_s = time.perf_counter() - started_s
    return (
        float(again_s[1]),
        planner_s,
        _equal(
            dict(result.arrays.to_torch_state_dict()),
            _planned_so(strategy, plan, present, int(step[1])),
        ),
    )


def _planned_so(
    strategy: HybridPipeline, plan: Plan, present: set[int], step: int
) -> dict[str, Tensor]:
    model, task, state = (
        app.perceptron(),
        strategy.method.messages.task(strategy.plan.groups[0], strategy.method.sync.intervals[0]),
        None,
    )
    if step:
        state = train_pipeline(
            model, app.vectors(), replace(task, num_steps=step), plan, app.trainer()
        ).end.state
    train_pipeline(
        model,
        app.vectors(),
        replace(task, first_step=step, num_steps=task.num_steps - step),
        recovered(plan, app.problem(), present),
        app.trainer(),
        state,
    )
    return dict(model.state_dict())


def _equal(ours: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return ours.keys() == other.keys() and all(
        torch.equal(ours[name], other[name]) for name in ours
    )


def _without(problem: PipelineProblem, present: set[int]) -> PipelineProblem:
    return replace(
        problem, devices=tuple(device for device in problem.devices if device.soc in present)
    )


def _throughput(dice: random.Random, count: int) -> Iterator[Row]:
    """Yield the median and the worst of light plan / planner, in samples per second, over losses of a board."""
    ratios, right = [], True
    for _ in range(count):
        problem = random_problem(
            np.random.default_rng(dice.randrange(1 << 30)), 12, dice.randint(3, 5)
        )
        planned = plan_pipeline(problem)
        for soc in planned.plan.socs:
            present = {device.soc for device in problem.devices} - {soc}
            left = _without(problem, present)
            light: Any = replanned(planned.plan, problem.model, present)
            if len(present) < 2:
                continue
            heavy = plan_pipeline(left)
            size = light.pipelines[0].micro_batch_size
            sized = replace(
                left, micro_batch_size=size, num_micro_batches=problem.mini_batch_size // size
            )
            own = predict(sized, light, within_memory=False)
            right &= light.num_samples == planned.plan.num_samples
            ratios.append(
                (own.num_samples / own.step_s)
                / (heavy.prediction.num_samples / heavy.prediction.step_s)
            )
    for name, value in (("median", statistics.median(ratios)), ("worst", min(ratios))):
        yield Row(
            case=f"throughput of the light plan, part of the whole planner's, {len(ratios)} losses, {name}",
            ours=value,
            peer="the whole planner's",
            peer_value=1.0,
            unit="",
            ratio=value,
            limit=1.0,
            ok=right,
        )
