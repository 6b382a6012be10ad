"""Seconds of layers on devices that are not at hand, from the catalogue's rates; no measurement of single layers.

A device trains a sample in `training FLOPs / rate(model)`, the rate being that of the whole model where the catalogue
has a measurement of it. These seconds are divided among the layers in proportion to a roofline: operations by the
device's general rate, plus the bytes that are moved by its memory bandwidth. Normalisation, activation and depthwise
convolution multiply little, and take much of the time of a MobileNet. Each operation costs a fixed time besides, which
makes small batches less efficient (paper Fig. 6).
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Literal, TypeAlias

import numpy as np
from torch import nn

from socflower.cluster import Cluster, Device
from socflower.cluster.cost_model import UPDATE_PASSES
from socflower.cluster.device_catalog import usable_memory_bytes
from socflower.errors import ConfigError, require_range
from socflower.model_graph.graph import Example
from socflower.pipeline.problem import (
    Floats,
    LayerSeconds,
    PipelineDevice,
    PipelineModel,
    PipelineProblem,
)
from socflower.pipeline.profiler.int8_parts import require_int8
from socflower.pipeline.profiler.layers import Granularity, read_model
from socflower.plain_numbers import plain_numbers
from socflower.precision.processor_costs import REQUANTISE_PASSES

Int8Socs: TypeAlias = Sequence[int] | Literal["auto"]

FORWARD_MOVES, BACKWARD_MOVES = 2.0, 4.0
"""How often a kept activation is written or read: forward once each; backward twice, and so is its gradient."""

PARTS = (4, 8, 16, 32)
"""Of a mini-batch, that are micro-batches by default."""

_BATCHES = (1, 65_536)  # seconds are linear between them


def estimate_seconds(
    model: PipelineModel, device: Device, *, processor: str | None = None
) -> LayerSeconds:
    """Return the seconds of each layer of a model on a device of the catalogue.

    `forward(l, β) = β·T·w_f(l) / Σ(w_f + w_b) + o·num_operations(l) / 3`, and the same for the backward pass with
    two thirds, with T = training FLOPs / rate, o the device's cost of a layer in all passes, and
    `w = FLOPs / general rate + moves · bytes / memory bandwidth`.
    Raises ConfigError for an unknown processor.
    """
    chosen = device.processor(processor or device.default_processor)
    forward_w = _roofline(model, device, chosen.flops_per_s, forward=True)
    backward_w = _roofline(model, device, chosen.flops_per_s, forward=False)
    total_w = float(forward_w.sum() + backward_w.sum())
    flops = sum(layer.forward_flops + layer.backward_flops for layer in model.layers)
    sample_s = flops / chosen.rate(model.name)
    scale = sample_s / total_w if total_w else 0.0
    fixed_s = device.layer_overhead_s * np.array(
        [layer.num_operations for layer in model.layers], np.float64
    )
    sizes = np.array(_BATCHES, np.float64)
    return LayerSeconds(
        device=device.name,
        batches=_BATCHES,
        estimated=True,
        forward_s=np.outer(forward_w * scale, sizes) + fixed_s[:, None] / 3.0,
        backward_s=np.outer(backward_w * scale, sizes) + fixed_s[:, None] * 2.0 / 3.0,
    )


def estimated_problem(
    model: PipelineModel,
    cluster: Cluster,
    *,
    micro_batch_size: int,
    num_micro_batches: int,
    optimizer_copies: float = 1.0,
    socs: Sequence[int] | None = None,
    measured: Mapping[str, LayerSeconds] | None = None,
    int8_socs: Int8Socs = (),
    measured_int8: Mapping[str, LayerSeconds] | None = None,
) -> PipelineProblem:
    """Return the problem of training a model on a cluster's devices (`socs`: on some of them).

    The seconds of a kind of device are those of `measured`, else estimated; those of `int8_socs`, by their fastest int8
    processor, are of `measured_int8` or estimated too. Their update rounds the masters anew besides.

    The budget of a device is its memory less what system and runtime take. Raises ConfigError for a SoC that is not
    there, or is among `int8_socs` and has no int8 processor, and if "auto" finds none.
    """
    found = list(range(cluster.num_socs) if socs is None else socs)
    if not found:
        raise ConfigError(
            f"pipeline: no device of cluster {cluster.name} takes part; name at least one"
        )
    in_int8 = _int8_socs(cluster, found, int8_socs)
    seconds = {(name, False): own for name, own in (measured or {}).items()}
    seconds |= {(name, True): own for name, own in (measured_int8 or {}).items()}
    devices = []
    for soc in found:
        kind, is_int8 = cluster.device_of(soc), soc in in_int8
        processor = kind.int8_processor or "" if is_int8 else ""
        if (kind.name, is_int8) not in seconds:
            estimated = estimate_seconds(model, kind, processor=processor or None)
            seconds[kind.name, is_int8] = (
                replace(estimated, device=f"{kind.name}'s {processor}") if is_int8 else estimated
            )
        passes = 1.0 + REQUANTISE_PASSES / UPDATE_PASSES if is_int8 else 1.0
        devices.append(
            PipelineDevice(
                soc=soc,
                name=kind.name,
                seconds=seconds[kind.name, is_int8],
                memory_bytes=usable_memory_bytes(kind),
                update_bytes_per_s=kind.memory_bytes_per_s / passes,
                int8_processor=processor,
            )
        )
    return PipelineProblem(
        model=model,
        devices=tuple(devices),
        cluster=cluster,
        micro_batch_size=micro_batch_size,
        num_micro_batches=num_micro_batches,
        optimizer_copies=optimizer_copies,
    )


@plain_numbers
def pipeline_problem(
    module: nn.Module,
    example: Example,
    cluster: Cluster,
    *,
    batch_size: int,
    name: str = "",
    cuts: str = "layers",
    optimizer_copies: float = 1.0,
    num_socs: int | None = None,
    int8_socs: Int8Socs = (),
) -> PipelineProblem:
    """Return what a pipeline of a model on a cluster is planned for, with seconds estimated from the catalogue.

    Parameters
    ----------
    module : nn.Module
        The model, of one input tensor; only shapes are read.
    example : Tensor or tuple of int
        A batch of inputs, of which the first sample is used, or the shape of one float32 sample.
    cluster : Cluster
        Its devices, with their memory, and its links.
    batch_size : int
        Samples of one update of the weights, over all devices.
    cuts : str
        "layers", "blocks" or "operations": where the model may be cut.
    optimizer_copies : float
        Optimiser state by trained weights: 1 for SGD with momentum, 2 for Adam.
    num_socs : int, optional
        How many of the cluster's slots take part; default all.
    int8_socs : sequence of int, or "auto"
        Whose stages compute in int8, on the device's fastest int8 processor, while masters and optimiser stay in FP32;
        "auto": of all that have one. Any layers may come to them, so every layer must have int8 kernels.

    Raises
    ------
    ConfigError
        If the model cannot be cut, or int8 has no kernels for it, and for a device without an int8 processor.
    """
    require_range("pipeline", least=1, batch_size=batch_size)
    if cuts not in {each.value for each in Granularity}:
        raise ConfigError(
            f"pipeline: cuts = {cuts!r} is unknown; use {', '.join(each.value for each in Granularity)}"
        )
    read = read_model(module, example, name or type(module).__name__, granularity=Granularity(cuts))
    if int8_socs:
        require_int8(read, module)
    size = default_micro_batches(batch_size)[0]
    return estimated_problem(
        read.model,
        cluster,
        socs=None if num_socs is None else range(num_socs),
        micro_batch_size=size,
        num_micro_batches=batch_size // size,
        optimizer_copies=optimizer_copies,
        int8_socs=int8_socs,
    )


def default_micro_batches(batch_size: int) -> tuple[int, ...]:
    """Return the sizes of micro-batches that planners try by default: whole parts of the mini-batch."""
    return tuple(batch_size // part for part in PARTS if batch_size % part == 0) or (batch_size,)


def _int8_socs(cluster: Cluster, socs: Sequence[int], wanted: Int8Socs) -> frozenset[int]:
    """Return the devices that compute in int8; `ConfigError` for one that cannot, and if "auto" finds none."""
    able = {soc: cluster.device_of(soc).int8_processor for soc in socs}
    names = ", ".join(sorted({cluster.device_of(soc).name for soc in socs}))
    if wanted == "auto":
        found = frozenset(soc for soc, processor in able.items() if processor)
        if not found:
            raise ConfigError(
                f"pipeline: int8_socs = 'auto', and no device has an int8 processor among {names}; leave "
                "it out, or give a device one in its profile"
            )
        return found
    if isinstance(wanted, str) or not isinstance(wanted, Iterable):
        raise ConfigError(
            f'pipeline: int8_socs = {wanted!r} is unknown; use "auto" or the numbers of SoCs'
        )
    for soc in wanted:
        if soc not in able:
            raise ConfigError(
                f"pipeline: int8_socs has SoC {soc}, which takes no part; SoCs are "
                f"{', '.join(map(str, socs))}"
            )
        if not able[soc]:
            raise ConfigError(
                f"pipeline: int8_socs has SoC {soc}, and {cluster.device_of(soc).name} has no int8 "
                "processor; leave it out, or give it one in its profile"
            )
    return frozenset(wanted)


def _roofline(model: PipelineModel, device: Device, flops_per_s: float, *, forward: bool) -> Floats:
    moves = FORWARD_MOVES if forward else BACKWARD_MOVES
    flops = [layer.forward_flops if forward else layer.backward_flops for layer in model.layers]
    moved = [moves * layer.activation_bytes for layer in model.layers]
    return np.array(flops) / flops_per_s + np.array(moved) / device.memory_bytes_per_s
