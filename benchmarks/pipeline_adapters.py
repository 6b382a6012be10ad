"""LoRA adapters of a small GPT over four unequal processes at 100 Mbit/s, against the fastest of them alone.

The GPT of 1.3 million parameters in six blocks is trained here on the modules of Python's standard library, then
frozen; adapters of rank 8 on its attention learn the English of `help("topics")`, with AdamW, in mini-batches of 16
windows of 128 bytes, with seeds 1, 2, 3 for adapters and mini-batches. Devices, links and planner are those of `bench
pipeline`. Both trainings see the same tokens in the same order. The loss is measured on English that is not trained on.

`ok`: the pipeline's adapters equal those of the same plan in one process, bit for bit, and its loss equals that of one
device within 1e-3 nats a byte.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch import nn

from benchmarks.harness import Row, less_is_better, more_is_better, note, peer_notes
from benchmarks.pipeline import (
    interval_s,
    is_right,
    predicted_s,
    problem_of,
    text_of,
    trained_and_predicted,
    with_messages,
)
from benchmarks.pipeline_contest.adapters import save_base, test_loss, workload
from benchmarks.pipeline_contest.launch import Devices
from benchmarks.pipeline_contest.work import (
    CORES,
    Profile,
    Profiled,
    Train,
    Workload,
    has_devices,
    rack,
)
from socflower.pipeline.plan import Plan
from socflower.pipeline.planner.baselines import fastest_device
from socflower.pipeline.planner.selection import (
    Planned,
    PlannerSettings,
    micro_batch_choices,
    plan_pipeline,
)
from socflower.pipeline.problem import PipelineProblem

MBIT = 100
MINI_BATCH, SIZES = 16, (1, 2, 4)
SEEDS = (1, 2, 3)
# Updates of the adapters, and windows of code for the base.
_NUM_UPDATES, _NUM_WINDOWS = 60, 4096
_QUICK = (4, 64)
_LOSS_TOLERANCE = 1e-3


def run(quick: bool = False) -> list[Row]:
    """Return rows of samples a second, losses and predictions; none if the testbed cannot be built."""
    if not has_devices():
        return []
    num_updates, num_windows = _QUICK if quick else (_NUM_UPDATES, _NUM_WINDOWS)
    with TemporaryDirectory() as folder:
        base = Path(folder) / "base.pt"
        peer_notes["loss of the base on code, nats a byte"] = save_base(base, num_windows)
        # As on the devices: another number of threads rounds differently.
        torch.set_num_threads(1)
        return [
            row
            for seed in (SEEDS[:1] if quick else SEEDS)
            for row in rows_of(
                workload(base, seed),
                seed,
                num_updates,
                test_loss,
                f"{num_updates * MINI_BATCH * 128} tokens",
            )
        ]


def rows_of(
    trained: Workload,
    seed: int,
    num_updates: int,
    loss_of: Callable[[nn.Module], float],
    what: str,
    mini_batch: int = MINI_BATCH,
) -> list[Row]:
    """Train by the quickest plan with stages and on the fastest device; return rows of samples a second and losses."""
    with Devices(rack(MBIT * 1_000_000), CORES, trained.prepared) as devices:
        planned, alone = _planned(devices, trained, mini_batch)
        runs = [
            _run(devices, trained, seed, num_updates, loss_of, *each)
            for each in ((planned.problem, planned.plan), alone)
        ]
    start = loss_of(trained.build())
    (ours_s, ours_loss, ours_said, ok), (alone_s, alone_loss, alone_said, _) = runs
    case = f"seed {seed}, {MBIT} Mbit/s, {what}"
    ours, same = f"ours, {text_of(planned.plan)}", abs(ours_loss - alone_loss) < _LOSS_TOLERANCE
    return [
        more_is_better(
            f"{case}: {ours}",
            mini_batch / ours_s,
            "one device",
            mini_batch / alone_s,
            "samples/s",
            ok=ok,
        ),
        less_is_better(
            f"{case}: test loss, {start:.3f} before",
            ours_loss,
            "one device",
            alone_loss,
            "nats a byte",
            ok=same,
        ),
        *(
            less_is_better(f"{case}: {name}: an update", own_s, "predicted", said_s, "s", ok=ok)
            for name, own_s, said_s in (
                (ours, ours_s, ours_said),
                ("one device", alone_s, alone_said),
            )
        ),
    ]


def _planned(
    devices: Devices, trained: Workload, mini_batch: int
) -> tuple[Planned, tuple[PipelineProblem, Plan]]:
    """Return the quickest plan with stages, and the problem and plan of the fastest device."""
    profiled: dict[int, Profiled] = devices.do(Profile(workload=trained, batches=SIZES, repeats=3))
    problem = replace(
        with_messages(devices, trained, problem_of(trained, profiled, MBIT, SIZES), MBIT),
        micro_batch_size=SIZES[0],
        num_micro_batches=mini_batch // SIZES[0],
    )
    best = plan_pipeline(problem, PlannerSettings(micro_batch_sizes=SIZES))
    # If one device is quickest, the next best plan with several stages shows by how much.
    planned = next(
        (each for each in (best, *best.alternatives) if len(each.plan.pipelines[0].stages) > 1),
        best,
    )
    note(f"planned: {text_of(best.plan)}, trained: {text_of(planned.plan)}")
    alone = min(
        ((sized, fastest_device(sized)) for sized in micro_batch_choices(problem, SIZES)),
        key=lambda each: predicted_s(*each),
    )
    return planned, alone


def _run(
    devices: Devices,
    trained: Workload,
    seed: int,
    num_updates: int,
    loss_of: Callable[[nn.Module], float],
    problem: PipelineProblem,
    plan: Plan,
) -> tuple[float, float, float, bool]:
    """Return an update's seconds, the final loss, the predicted seconds, and whether the weights are right."""
    work = Train(workload=trained, plan=plan, num_updates=num_updates, seed=seed)
    answers, said_s = trained_and_predicted(devices, work, problem)
    model = trained.build()
    model.load_state_dict(
        {
            name: torch.from_numpy(array)
            for each in answers.values()
            for name, array in each.weights.items()
        },
        strict=False,
    )
    update_s, loss = interval_s(answers), loss_of(model)
    note(f"{text_of(plan)}: {update_s:.3f} s, predicted {said_s:.3f}, loss {loss:.4f}")
    return update_s, loss, said_s, is_right(work, answers)
