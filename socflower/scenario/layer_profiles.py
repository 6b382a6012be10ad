"""Files with the measured seconds of a model's layers on one kind of device: `[pipeline] profiles`."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
from pydantic import Field

from socflower.engines.names import MAX_WORKERS, require_count
from socflower.errors import ConfigError
from socflower.field_rules import OneOf, SchemaVersion, Text
from socflower.model_graph.graph import Example
from socflower.model_graph.torch_device import resolve_device
from socflower.pipeline.problem import LayerSeconds, PipelineModel
from socflower.pipeline.profiler.int8_parts import require_int8
from socflower.pipeline.profiler.layers import Granularity, read_model
from socflower.pipeline.profiler.measuring import DEFAULT_BATCHES, measure_layers
from socflower.scenario.measured_file import read_measured, write_measured
from socflower.scenario.pipeline_workload import pipeline_workload
from socflower.scenario.schema.config import Scenario
from socflower.scenario.schema.file import scenario_cluster
from socflower.scenario.schema.pipeline import CUTS, PipelineConfig
from socflower.toml_file import Table, read_table

KIND = "layer-seconds"

Seconds = Annotated[float, Field(ge=0)]
Batch = Annotated[int, Field(gt=0, le=1_000_000)]


class MeasuredLayer(Table):
    """A layer's seconds, by batch."""

    name: Text
    forward_s: tuple[Seconds, ...] = Field(min_length=1)
    backward_s: tuple[Seconds, ...] = Field(min_length=1)


class MeasuredLayers(Table):
    """The file: a device's seconds of each layer of a model."""

    schema_version: SchemaVersion = Field(1, alias="schema")
    kind: Annotated[str, OneOf((KIND,))]
    device: Text
    model: Text
    cuts: Annotated[str, OneOf(CUTS)]
    arithmetic: Annotated[str, OneOf(("fp32", "int8"))] = "fp32"
    # The shape of the model's input, without the batch.
    sample: tuple[int, ...]
    batches: tuple[Batch, ...] = Field(min_length=1)
    layers: tuple[MeasuredLayer, ...] = Field(min_length=1, alias="layer")

    def check(self) -> None:
        """Refuse batches that do not rise, and seconds of other numbers of batches."""
        if list(self.batches) != sorted(set(self.batches)):
            raise ConfigError(f"batches = {list(self.batches)}: must rise")
        num_batches = len(self.batches)
        for layer in self.layers:
            for key in ("forward_s", "backward_s"):
                num_seconds = len(getattr(layer, key))
                if num_seconds != num_batches:
                    raise ConfigError(
                        f"layer {layer.name!r}: {key} has {num_seconds} seconds for {num_batches} batches"
                    )

    def seconds(self) -> LayerSeconds:
        """Return the table as a value."""
        return LayerSeconds(
            device=self.device,
            batches=self.batches,
            forward_s=np.array([layer.forward_s for layer in self.layers]),
            backward_s=np.array([layer.backward_s for layer in self.layers]),
        )


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
    if not scenario.is_pipeline:
        raise scenario.mistake("strategy", "name", "layers are measured for 'hybrid-pipeline'")
    _require_device(scenario, device, f"--name {device}")
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
        sample=_sample_shape(example),
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


def write_profile(path: Path, profile: MeasuredLayers) -> None:
    """Write a profile; `ConfigError` if the file cannot be written."""
    write_measured(path, profile.model_dump(mode="json", by_alias=True))


def measured_seconds(
    scenario: Scenario, model: PipelineModel, example: Example
) -> dict[str, dict[str, LayerSeconds]]:
    """Return the seconds of `[pipeline] profiles` by arithmetic, "fp32" and "int8", and kind of device.

    Raises ConfigError that names the file and the key: for what is no profile, for one of another model, sample, cuts
    or layers, for a device that the cluster does not have, and for two of one device.
    """
    table = scenario.pipeline or PipelineConfig()
    every: dict[str, dict[str, LayerSeconds]] = {"fp32": {}, "int8": {}}
    ours = {
        "model": scenario.model.name,
        "cuts": table.cuts,
        "sample": list(_sample_shape(example)),
    }
    for name in table.profiles:
        path = Path(name)
        profile = read_table(
            MeasuredLayers, read_measured(path, "socflower profile --layers"), name
        )
        theirs = {"model": profile.model, "cuts": profile.cuts, "sample": list(profile.sample)}
        for key, value in theirs.items():
            if value != ours[key]:
                raise ConfigError(
                    f"{path}: {key} = {value!r}, and {scenario.name} plans {ours[key]!r}; measure again"
                )
        _require_layers(path, profile, model)
        _require_device(scenario, profile.device, f"{path}: device = {profile.device!r}")
        found = every[profile.arithmetic]
        if profile.device in found:
            raise ConfigError(f"{path}: device = {profile.device!r} has two profiles; keep one")
        found[profile.device] = profile.seconds()
    return every


def _require_layers(path: Path, profile: MeasuredLayers, model: PipelineModel) -> None:
    """Raise ConfigError for other layers than the model's, or in another order."""
    layers = [layer.name for layer in profile.layers]
    expected = [layer.name for layer in model.layers]
    if layers == expected:
        return
    missing = [name for name in expected if name not in layers]
    what = f"{missing[0]!r} is missing" if missing else "they are in another order"
    raise ConfigError(
        f"{path}: layer: {what}, of the {len(expected)} layers of {model.name}; measure again"
    )


def _require_device(scenario: Scenario, device: str, where: str) -> None:
    kinds = sorted({board.device.name for board in scenario_cluster(scenario).boards})
    if device not in kinds:
        raise ConfigError(
            f"{where}: is no device of the cluster of {scenario.name}, which has {', '.join(kinds)}"
        )


def _sample_shape(example: Example) -> tuple[int, ...]:
    return tuple(example.shape[1:]) if isinstance(example, torch.Tensor) else tuple(example)
