"""Time every operator of a network on this machine, in int8 and in FP32, and place it on a side (F17)."""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import nn

from socflower.plain_numbers import plain_numbers
from socflower.precision.algorithm import REAL_SCALES, TrainingAlgorithm
from socflower.precision.fp32_equivalents import fp32_equivalent
from socflower.precision.int8 import network as ir
from socflower.precision.int8.batch_share import BatchShare
from socflower.precision.int8.batch_splitting import median_seconds
from socflower.precision.int8.fixed_point import to_real
from socflower.precision.int8.fp32_operator import to_int8
from socflower.precision.int8.model import EngineSettings, Int8Model
from socflower.precision.int8.operators.base import Tensor
from socflower.precision.int8.requantisation import RescalingPolicy
from socflower.precision.predicted_placement import OperatorLatency, OperatorPlacement, place


@dataclass(frozen=True, kw_only=True, slots=True)
class OperatorProfile:
    """Latencies of a network's operators for one batch size, and the best placement.

    `switches_s` has the seconds of changing the side after each operator but the last.
    """

    batch: int
    kernel: str
    latencies: tuple[OperatorLatency, ...]
    switches_s: tuple[float, ...]
    placement: OperatorPlacement


@plain_numbers
def profile_operators(
    module: nn.Module,
    input_shape: ir.Shape,
    batch: int,
    *,
    algorithm: TrainingAlgorithm = REAL_SCALES,
    settings: EngineSettings | None = None,
    repeats: int = 5,
) -> OperatorProfile:
    """Time forward and backward of every operator on both sides, and place the operators (F17).

    An operator without an int8 kernel has infinite NPU latency; one that is a part of a module is timed in the step,
    with its conversions. A fused ReLU counts towards the operator that it is fused into. A switch is the time of
    converting the tensor between two operators to FP32 and its gradient to int8.
    """
    # Rescaling is settled from the second batch on, and both sides use the same number of threads.
    settings = replace(settings or EngineSettings(), rescaling=RescalingPolicy(warm_up_batches=1))
    model = Int8Model.from_module(
        module, input_shape=input_shape, algorithm=algorithm, settings=settings, unsupported="fp32"
    )
    modules = dict(module.named_modules())
    graph = model.graph
    threads_before = torch.get_num_threads()
    torch.set_num_threads(settings.num_threads)
    try:
        step_s = _step_seconds(model, batch, repeats)
        latencies = [_latency(node, graph, modules, step_s, repeats, batch) for node in graph.nodes]
        before_last = graph.nodes[:-1]
        switches_s = tuple(_switch_seconds(node.shape, batch, repeats) for node in before_last)
    finally:
        torch.set_num_threads(threads_before)
    return OperatorProfile(
        batch=batch,
        kernel=str(model.engine.kernel),
        latencies=tuple(latencies),
        switches_s=switches_s,
        placement=place(latencies, switches_s),
    )


def _latency(
    node: ir.Node,
    graph: ir.Graph,
    modules: dict[str, nn.Module],
    step_s: dict[str, float],
    repeats: int,
    batch: int,
) -> OperatorLatency:
    """Return the seconds of an operator on both sides; `step_s` are those in a step of the int8 model."""
    in_step_s = step_s[node.name]
    if not isinstance(node, ir.Fp32):
        cpu_s = _fp32_seconds(node, graph, modules, batch, repeats)
        return OperatorLatency(name=node.name, cpu_s=cpu_s, npu_s=in_step_s)
    cpu_s = _fp32_seconds(node, graph, modules, batch, repeats) if node.path else in_step_s
    return OperatorLatency(name=node.name, cpu_s=cpu_s, npu_s=math.inf)


def island_share(model: Int8Model, batch: int, *, repeats: int = 3) -> float:
    """Return the fraction of a training step that this machine spends in FP32 islands, conversions included.

    It trains on random images, so the model must not be used afterwards.
    """
    step_s = _step_seconds(model, batch, repeats)
    return sum(step_s[name] for name in model.islands) / sum(step_s.values())


def _step_seconds(model: Int8Model, batch: int, repeats: int) -> dict[str, float]:
    """Return the median seconds of each operator in a training step at a learning rate of 0."""
    graph = model.graph
    random = np.random.default_rng(0)
    images = random.standard_normal((batch, *graph.input_shape), dtype=np.float32)
    labels = random.integers(0, graph.num_classes, batch, dtype=np.int32)
    runs: list[dict[str, float]] = []
    for _ in range(repeats + 3):
        timings: dict[str, float] = {}
        model.train_step(images, labels, learning_rate=0.0, timings=timings, progress=0.0)
        runs.append(timings)
    # The first runs build graphs and search exponents.
    return {
        node.name: statistics.median(run.get(node.name, 0.0) for run in runs[3:])
        for node in graph.nodes
    }


def _fp32_seconds(
    node: ir.Node, graph: ir.Graph, modules: dict[str, nn.Module], batch: int, repeats: int
) -> float:
    generator = torch.Generator().manual_seed(0)
    inputs = []
    for value in node.inputs:
        # In the layout that Fp32Operator gives a module.
        shape = (batch, *graph.shape_of(value))
        inputs.append(torch.randn(shape, generator=generator).requires_grad_())
    compute = fp32_equivalent(node, graph, modules, batch)

    def step() -> None:
        output = compute(inputs)
        torch.autograd.backward(output, torch.ones_like(output))

    return median_seconds(step, repeats)


def _switch_seconds(shape: ir.Shape, batch: int, repeats: int) -> float:
    tensor = Tensor(shape=shape, batch=batch)
    share = BatchShare(batch)
    data = np.ones(tensor.array_shape, dtype=np.int8)

    def step() -> None:
        real = to_real(data, -7, shape)
        to_int8("switch", share, torch.from_numpy(real), shape, data)

    return median_seconds(step, repeats)
