"""Seconds of layers on other devices, estimated from the rates of the catalogue.

A device trains a sample in `training FLOPs / rate(model)`; the catalogue has the rates of some whole models. These
seconds are divided among the layers in proportion to a roofline: operations by the device's general rate, plus
moved bytes by its memory bandwidth. (Normalisation, activation and depthwise convolution multiply little, but take much
of the time of a MobileNet.) Each operation also costs a fixed time, so small batches are less efficient (paper Fig. 6).
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Literal, TypeAlias

import numpy as np

from socflower.cluster import Cluster, Device
from socflower.cluster.cost_model import UPDATE_PASSES
from socflower.cluster.device_catalog import usable_memory_bytes
from socflower.errors import ConfigError
from socflower.pipeline.problem import (
    Floats,
    LayerSeconds,
    PipelineDevice,
    PipelineModel,
    PipelineProblem,
)
from socflower.precision.processor_costs import REQUANTISE_PASSES

Int8Socs: TypeAlias = Sequence[int] | Literal["auto"]

FORWARD_MOVES, BACKWARD_MOVES = 2.0, 4.0
"""How often a kept activation is moved: written and read once forward; backward twice each, as is its gradient."""

PARTS = (4, 8, 16, 32)
"""Default numbers of micro-batches of a mini-batch."""

# Seconds are linear between these batches.
_BATCHES = (1, 65_536)


def estimate_seconds(
    model: PipelineModel, device: Device, *, processor: str | None = None
) -> LayerSeconds:
    """Return the seconds of each layer of a model on a device of the catalogue.

    `forward(l, β) = β·T·w_f(l) / Σ(w_f + w_b) + o·num_operations(l) / 3`, and the same for the backward pass with
    two thirds, with T = training FLOPs / rate, o the device's cost of a layer in all passes, and
    `w = FLOPs / general rate + moves · bytes / memory bandwidth`.
    Raises `ConfigError` for an unknown processor.
    """
    chosen = device.processor(processor or device.default_processor)
    forward_w = _roofline(model, device, chosen.flops_per_s, forward=True)
    backward_w = _roofline(model, device, chosen.flops_per_s, forward=False)
    total_w = float(forward_w.sum() + backward_w.sum())
    flops = sum(layer.training_flops for layer in model.layers)
    sample_s = flops / chosen.rate(model.name)
    scale = sample_s / total_w if total_w else 0.0
    operations = [layer.num_operations for layer in model.layers]
    fixed_s = device.layer_overhead_s * np.array(operations, np.float64)
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
    """Return the problem of training a model on a cluster's devices, or on those of `socs`.

    The seconds of a kind of device are those of `measured`, or else estimated. Devices of `int8_socs` compute on their
    fastest int8 processor; their seconds are those of `measured_int8`, or else estimated. Their update also rounds the
    masters. The budget of a device is its memory less that of system and runtime.

    Raises `ConfigError` for a SoC that does not exist, for one of `int8_socs` without an int8 processor, and if "auto"
    finds none.
    """
    found = list(range(cluster.num_socs) if socs is None else socs)
    if not found:
        raise ConfigError(f"pipeline: no device of cluster {cluster.name}; name at least one")
    in_int8 = _int8_socs(cluster, found, int8_socs)
    seconds = {(name, False): own for name, own in (measured or {}).items()}
    seconds |= {(name, True): own for name, own in (measured_int8 or {}).items()}
    devices = []
    for soc in found:
        kind, key = cluster.device_of(soc), (cluster.device_of(soc).name, soc in in_int8)
        processor, passes = "", 1.0
        if soc in in_int8:
            processor = kind.int8_processor or ""
            passes += REQUANTISE_PASSES / UPDATE_PASSES
        if key not in seconds:
            own = estimate_seconds(model, kind, processor=processor or None)
            name = f"{kind.name}'s {processor}" if processor else kind.name
            seconds[key] = replace(own, device=name)
        devices.append(
            PipelineDevice(
                soc=soc,
                name=kind.name,
                seconds=seconds[key],
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


def default_micro_batches(batch_size: int) -> tuple[int, ...]:
    """Return the default sizes of micro-batches for planners: parts of the mini-batch, or the next smaller divisors.

    Single samples are left out, since BatchNorm needs more.
    """
    divisors = [size for size in range(2, batch_size + 1) if batch_size % size == 0]
    fitting = [[size for size in divisors if size * part <= batch_size] for part in PARTS]
    return tuple(dict.fromkeys(sizes[-1] for sizes in fitting if sizes)) or (batch_size,)


def _int8_socs(cluster: Cluster, socs: Sequence[int], wanted: Int8Socs) -> frozenset[int]:
    """Return the devices that compute in int8, and raise the `ConfigError` of `estimated_problem`."""
    able = [soc for soc in socs if cluster.device_of(soc).int8_processor]
    if wanted == "auto" and able:
        return frozenset(able)
    if isinstance(wanted, str) or not isinstance(wanted, Iterable) or (not able and wanted):
        names = sorted({cluster.device_of(soc).name for soc in socs})
        raise ConfigError(
            f'pipeline: int8_socs = {wanted!r} must be SoCs or "auto", with an int8 processor in {names}'
        )
    for soc in wanted:
        if soc not in able:
            raise ConfigError(f"pipeline: int8_socs has SoC {soc}; use int8 processors of {able}")
    return frozenset(wanted)


def _roofline(
    model: PipelineModel,
    device: Device,
    flops_per_s: float,
    *,
    forward: bool,
) -> Floats:
    moves = FORWARD_MOVES if forward else BACKWARD_MOVES
    flops = [layer.forward_flops if forward else layer.backward_flops for layer in model.layers]
    moved = [moves * layer.kept_bytes for layer in model.layers]
    return np.array(flops) / flops_per_s + np.array(moved) / device.memory_bytes_per_s
