"""What a model's operators cost on this machine, in int8 and in FP32, and where each should run."""

import math
import os
import tempfile
from pathlib import Path
from typing import Any

from socflower import _int8
from socflower.errors import ConfigError
from socflower.precision import EngineSettings, Int8Model
from socflower.precision.batch_splitting import best_blocks, profile_batch_blocks
from socflower.precision.profiling import profile_operators
from socflower.workloads import build_model, data_shape


def profile_device(
    model: str, data: str, *, batch_size: int, num_threads: int, kernel: str, repeats: int
) -> dict[str, Any]:
    """Return the document of `socflower profile`: seconds per operator on both sides, micro-batches, placement.

    Raises ConfigError on a model, data set or kernel that is not there.
    """
    if batch_size < 1 or num_threads < 1 or repeats < 1:
        raise ConfigError(
            f"profile: batch size, threads and repeats must be 1 or more, got {batch_size}, {num_threads}, {repeats}"
        )
    shape = data_shape(data)
    image = (shape.channels, shape.size, shape.size)
    module = build_model(
        model, in_channels=shape.channels, image_size=shape.size, num_classes=shape.num_classes, seed=1
    )
    settings = EngineSettings(num_threads=num_threads, kernel=kernel)
    operators = profile_operators(module, image, batch_size, settings=settings, repeats=repeats)
    int8 = Int8Model.from_module(module, input_shape=image, settings=settings)
    blocks = best_blocks(profile_batch_blocks(int8.graph, batch_size, int8.engine, repeats=repeats))
    sides = dict(zip(operators.placement.operators, operators.placement.sides, strict=True))
    return {
        "schema": 1,
        "model": model,
        "data": data,
        "batch_size": batch_size,
        "num_threads": num_threads,
        "kernel": operators.kernel,
        "kernels_available": _int8.available_kernels(),
        "operators": [
            {
                "name": latency.name,
                "kind": int8.graph.node(latency.name).kind,
                "int8_s": None if math.isinf(latency.npu_s) else latency.npu_s,
                "fp32_s": latency.cpu_s,
                "side": "int8" if sides[latency.name] == "npu" else "fp32",
                "batch_block": blocks.get(latency.name, 0),
            }
            for latency in operators.latencies
        ],
        "switches_s": list(operators.switches_s),
        "placement": operators.placement.path().replace("npu[", "int8[").replace("cpu[", "fp32["),
        "step_s": operators.placement.latency_s,
        "fp32_step_s": sum(latency.cpu_s for latency in operators.latencies),
    }


def write_profile(document: str, path: Path) -> None:
    """Write the document under a temporary name and rename it. Raises ConfigError where that cannot be done."""
    try:
        descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.name, suffix=".part")
        with os.fdopen(descriptor, "w") as file:
            file.write(document)
        os.replace(temporary, path)
    except OSError as error:
        raise ConfigError(f"profile: cannot write {path}: {error.strerror}") from None
