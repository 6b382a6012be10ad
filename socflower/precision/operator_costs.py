"""Time every operator of a network on this machine, in int8 and in FP32, and place it on a side (F17)."""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import nn

from socflower.plain_numbers import plain_numbers
from socflower.precision.algorithm import NITI, TrainingAlgorithm
from socflower.precision.int8 import network as ir
from socflower.precision.int8.batch_splitting import median_seconds
from socflower.precision.int8.model import EngineSettings, Int8Model
from socflower.precision.int8.requantisation import RescalingPolicy
from socflower.precision.operator_placement import OperatorLatency, OperatorPlacement, place


@dataclass(frozen=True, kw_only=True, slots=True)
class OperatorProfile:
    """Latencies of a network's operators for one batch size and of switches between them; the best placement."""

    batch: int
    kernel: str
    latencies: tuple[OperatorLatency, ...]
    switches_s: tuple[float, ...]  # after each operator but the last
    placement: OperatorPlacement


@plain_numbers
def profile_operators(
    module: nn.Module,
    input_shape: ir.Shape,
    batch: int,
    *,
    algorithm: TrainingAlgorithm = NITI,
    settings: EngineSettings | None = None,
    repeats: int = 5,
) -> OperatorProfile:
    """Time forward and backward of every operator on both sides, and place the operators.

    An operator without an int8 kernel has infinite NPU latency. A fused ReLU counts towards the operator that it is
    fused into. A switch is the time of converting the tensor between two operators to FP32 and its gradient to int8.
    """
    # Rescaling is settled from the second batch on, and both sides use the same number of threads.
    settings = replace(settings or EngineSettings(), rescaling=RescalingPolicy(warm_up_batches=1))
    threads_before = torch.get_num_threads()
    torch.set_num_threads(settings.num_threads)
    try:
        return _profile(module, input_shape, batch, algorithm, settings, repeats)
    finally:
        torch.set_num_threads(threads_before)


def _profile(
    module: nn.Module,
    input_shape: ir.Shape,
    batch: int,
    algorithm: TrainingAlgorithm,
    settings: EngineSettings,
    repeats: int,
) -> OperatorProfile:
    model = Int8Model.from_module(
        module, input_shape=input_shape, algorithm=algorithm, settings=settings, unsupported="fp32"
    )
    random = np.random.default_rng(0)
    images = random.standard_normal((batch, *input_shape), dtype=np.float32)
    labels = random.integers(0, model.graph.num_classes, batch, dtype=np.int32)
    runs: list[dict[str, float]] = []
    for _ in range(repeats + 3):
        timings: dict[str, float] = {}
        model.train_step(images, labels, learning_rate=0.0, timings=timings, progress=0.0)
        runs.append(timings)
    modules = dict(module.named_modules())
    latencies = []
    for node in model.graph.nodes:
        fp32_s = _fp32_seconds(node, model.graph, modules, batch, repeats)
        int8_s = statistics.median(run[node.name] for run in runs[3:])
        latencies.append(
            OperatorLatency(
                name=node.name,
                cpu_s=fp32_s,
                npu_s=math.inf if isinstance(node, ir.Fp32) else int8_s,
            )
        )
    switches_s = tuple(
        _switch_seconds(node.shape, batch, repeats) for node in model.graph.nodes[:-1]
    )
    return OperatorProfile(
        batch=batch,
        kernel=str(model.engine.kernel),
        latencies=tuple(latencies),
        switches_s=switches_s,
        placement=place(latencies, switches_s),
    )


def _fp32_seconds(
    node: ir.Node, graph: ir.Graph, modules: dict[str, nn.Module], batch: int, repeats: int
) -> float:
    generator = torch.Generator().manual_seed(0)
    inputs = [  # in the layout that Fp32Operator gives a module
        torch.randn(batch, *graph.shape_of(value), generator=generator).requires_grad_()
        for value in node.inputs
    ]

    def step() -> None:
        output = _run_fp32(node, modules, inputs)
        torch.autograd.backward(output, torch.ones_like(output))

    return median_seconds(step, repeats)


def _run_fp32(
    node: ir.Node, modules: dict[str, nn.Module], inputs: list[torch.Tensor]
) -> torch.Tensor:
    if isinstance(node, ir.Add):
        output = inputs[0] + inputs[1]
    elif isinstance(node, ir.Relu):
        output = torch.relu(inputs[0])
    elif isinstance(node, ir.MaxPool):
        output = nn.functional.max_pool2d(inputs[0], node.kernel, node.stride, node.padding)
    elif isinstance(node, ir.Dropout):
        dropout = nn.functional.dropout2d if node.channelwise else nn.functional.dropout
        output = dropout(inputs[0], node.p)
    elif isinstance(node, ir.AveragePool):
        output = nn.functional.avg_pool2d(inputs[0], node.kernel, node.stride, node.padding)
    else:
        linear = isinstance(node, ir.Convolution) and node.linear
        path = node.path if isinstance(node, ir.Fp32) else node.name
        output = modules[path](inputs[0].flatten(1) if linear else inputs[0])
    return torch.relu(output) if getattr(node, "relu", False) else output


def _switch_seconds(shape: ir.Shape, batch: int, repeats: int) -> float:
    from socflower.precision.int8.batch_share import BatchShare
    from socflower.precision.int8.fixed_point import to_real
    from socflower.precision.int8.fp32_operator import to_int8
    from socflower.precision.int8.operators import Tensor

    tensor, share = Tensor(shape=shape, batch=batch), BatchShare(batch)
    data = np.ones(tensor.array_shape, dtype=np.int8)

    def step() -> None:
        real = to_real(data, -7, shape)
        to_int8("switch", share, torch.from_numpy(real), shape, data)

    return median_seconds(step, repeats)
