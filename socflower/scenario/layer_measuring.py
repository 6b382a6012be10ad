"""Measures the seconds of a model's layers on this machine, for `[pipeline] profiles`."""

from collections.abc import Sequence

import torch

from socflower.engines.names import MAX_WORKERS, require_count
from socflower.errors import ConfigError
from socflower.model_graph.torch_device import resolve_device
from socflower.pipeline.profiler.int8_parts import require_int8
from socflower.pipeline.profiler.layers import Granularity, read_model
from socflower.pipeline.profiler.measuring import DEFAULT_BATCHES, measure_layers
from socflower.scenario.layer_profiles import KIND, MeasuredLayer, MeasuredLayers, require_device
from socflower.scenario.pipeline_workload import pipeline_workload
from socflower.scenario.schema.pipeline import PipelineConfig
from socflower.scenario.schema.scenario_file import Scenario


def measured_profile(
    scenario: Scenario,
    device: str,
    *,
    batches: Sequence[int] = DEFAULT_BATCHES,
    repeats: int = 3,
    threads: int = 1,
    accelerator: str = "none",
    arithmetic: str = "fp32",
) -> MeasuredLayers:
    """Return the seconds of a pipeline scenario's layers on this machine, which is a `device` of its cluster.

    `accelerator` is the device of torch that computes, or "none" for the CPU, on which `arithmetic` may be "int8".
    Raises ConfigError for another scenario, for a device that its cluster does not have, and for layers without int8
    kernels.
    """
    if not scenario.kind.is_pipeline:
        raise scenario.mistake("strategy", "name", "layers are measured for 'hybrid-pipeline'")
    require_device(scenario, device, f"--name {device}")
    require_count("--threads", threads, 1, MAX_WORKERS)
    module, example, _ = pipeline_workload(scenario)
    table = scenario.pipeline or PipelineConfig()
    read = read_model(module, example, scenario.model.name, granularity=Granularity(table.cuts))
    # Threads are set before measuring, since torch keeps them for the process.
    torch.set_num_threads(threads)
    if arithmetic == "int8":
        if accelerator != "none":
            raise ConfigError(f"--accelerator {accelerator}: int8 runs on the CPU; leave one out")
        require_int8(read, module)
    where = "cpu" if accelerator == "none" else resolve_device(accelerator, "--accelerator")
    seconds = measure_layers(
        module.to(where),
        example,
        batches,
        chain=read.chain,
        device=device,
        repeats=repeats,
        in_int8=arithmetic == "int8",
    )
    layers = zip(read.model.layers, seconds.forward_s, seconds.backward_s, strict=True)
    return MeasuredLayers(
        kind=KIND,
        device=device,
        model=scenario.model.name,
        cuts=table.cuts,
        arithmetic=arithmetic,
        sample=read.model.sample_shape,
        batches=seconds.batches,
        layers=tuple(
            MeasuredLayer(
                name=layer.name,
                forward_s=tuple(forward_s.tolist()),
                backward_s=tuple(backward_s.tolist()),
            )
            for layer, forward_s, backward_s in layers
        ),
    )
