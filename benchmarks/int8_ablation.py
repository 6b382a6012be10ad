"""The gain of each technique of int8 training, switched off one at a time (Mandheling, Figure 10).

    socflower bench int8-ablation [--quick] [--json]

`ours` is the median training step with the technique, the peer the same step without it. Answers must be equal except
for rescaling, which may keep an exponent for several batches.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import nn

from benchmarks.harness import Row, less_is_better, measure_interleaved
from socflower.precision import NITI, EngineSettings, Int8Model, RescalingPolicy
from socflower.precision.int8.batch_splitting import best_blocks, profile_batch_blocks
from socflower.precision.operator_costs import profile_operators
from socflower.workloads.models.classifiers import build_model

SHAPE = (3, 32, 32)
# The steady state of training, reached after three batches.
SETTLED = RescalingPolicy(warm_up_batches=3)


@dataclass(frozen=True, kw_only=True, slots=True)
class StepWorkload:
    model: str
    batch: int
    steps: int


FULL = (
    StepWorkload(model="vgg11", batch=64, steps=9),
    StepWorkload(model="resnet18", batch=64, steps=5),
    StepWorkload(model="vgg-small", batch=512, steps=5),
)
QUICK = (StepWorkload(model="resnet8", batch=32, steps=3),)


def run(quick: bool) -> list[Row]:
    """Time every workload with and without each technique."""
    torch.set_num_threads(1)
    rows = []
    for workload in QUICK if quick else FULL:
        rows += [rescaling(workload), seldom_rescaling(workload)]
        rows += [batch_splitting(workload), graph_reuse(workload)]
    rows.append(placement(batch=16 if quick else 64, steps=3 if quick else 9))
    return rows


def rescaling(workload: StepWorkload) -> Row:
    """Compare exponents that are searched from time to time with a search in every batch."""
    always = RescalingPolicy(adaptive=False)
    return compare(
        workload, "rescaling", EngineSettings(rescaling=SETTLED), EngineSettings(rescaling=always)
    )


def seldom_rescaling(workload: StepWorkload) -> Row:
    """Compare the same by the last eight intervals between changes, as Mandheling has it."""
    last = replace(SETTLED, last_intervals=8)
    always = RescalingPolicy(adaptive=False)
    return compare(
        workload,
        "Mandheling's rescaling, by the last 8 intervals",
        EngineSettings(rescaling=last),
        EngineSettings(rescaling=always),
    )


def batch_splitting(workload: StepWorkload) -> Row:
    """Compare micro-batches chosen from a profile with whole batches."""
    model = int8(workload, EngineSettings(batch_blocks={}))
    blocks = best_blocks(profile_batch_blocks(model.graph, workload.batch, model.engine))
    with_blocks = EngineSettings(rescaling=SETTLED, batch_blocks=blocks)
    name = f"batch splitting ({len(blocks)} layers split)"
    return compare(workload, name, with_blocks, EngineSettings(rescaling=SETTLED))


def graph_reuse(workload: StepWorkload) -> Row:
    """Compare operators and buffers that are kept between steps with ones built in every step."""
    settings = EngineSettings(rescaling=SETTLED)
    return compare(workload, "graph reuse", settings, replace(settings, reuse_graph=False))


def compare(workload: StepWorkload, technique: str, on: EngineSettings, off: EngineSettings) -> Row:
    models = [int8(workload, settings) for settings in (on, off)]
    images, labels = batch_of(workload.batch)
    steps = [stepper(model, images, labels) for model in models]
    # Past the warm-up of rescaling.
    for _ in range(4):
        for step in steps:
            step()
    timings = measure_interleaved(steps, repeats=workload.steps)
    with_s, without_s = (timing.median_s for timing in timings)
    same = "rescaling" in technique or equal(*models)
    return less_is_better(
        f"{technique}, {workload.model}, batch {workload.batch}, {models[0].engine.kernel}",
        1e3 * with_s,
        "without it",
        1e3 * without_s,
        "ms per training step",
        ok=same,
    )


def placement(batch: int, steps: int) -> Row:
    """Compare a placement that counts the cost of switching (F17) with each operator on its faster side."""
    torch.manual_seed(0)
    module = nn.Sequential(
        nn.Conv2d(3, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 3, padding=1), nn.GELU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(4096, 64), nn.ReLU(),
        nn.Linear(64, 10),
    )  # fmt: skip
    profile = profile_operators(module, SHAPE, batch)
    greedy = tuple(entry.name for entry in profile.latencies if entry.cpu_s < entry.npu_s)
    images, labels = batch_of(batch)
    settings = EngineSettings(rescaling=SETTLED)
    models = [
        Int8Model.from_module(
            module,
            input_shape=SHAPE,
            algorithm=NITI,
            settings=settings,
            fp32_operators=names,
        )
        for names in (profile.placement.on_cpu, greedy)
    ]
    functions = [stepper(model, images, labels) for model in models]
    before = models[0].evaluate(images, labels).loss
    timings = measure_interleaved(functions, repeats=steps, warmup=5)
    with_s, without_s = (timing.median_s for timing in timings)
    return less_is_better(
        f"placement {profile.placement.path()}, GELU network, batch {batch}, {models[0].engine.kernel}",
        1e3 * with_s,
        f"FP32 where it is quicker alone: {', '.join(greedy)}",
        1e3 * without_s,
        "ms per training step",
        ok=models[0].evaluate(images, labels).loss < before,
    )


def int8(workload: StepWorkload, settings: EngineSettings) -> Int8Model:
    module = build_model(workload.model, in_channels=3, image_size=32, num_classes=10, seed=0)
    return Int8Model.from_module(module, input_shape=SHAPE, algorithm=NITI, settings=settings)


def batch_of(batch: int) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(0)
    labels = random.integers(0, 10, batch, dtype=np.int32)
    images = random.standard_normal((batch, *SHAPE), dtype=np.float32)
    # Images that depend on their labels can be learnt.
    images[:, 0] += labels[:, None, None] / 5.0
    return images, labels


def stepper(model: Int8Model, images: np.ndarray, labels: np.ndarray) -> Callable[[], object]:
    return lambda: model.train_step(images, labels, learning_rate=0.001, progress=0.9)


def equal(a: Int8Model, b: Int8Model) -> bool:
    mine, theirs = a.arrays(), b.arrays()
    return all(np.array_equal(mine[name], theirs[name]) for name in mine)
