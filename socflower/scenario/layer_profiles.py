"""Files with the measured seconds of a model's layers on one kind of device: `[pipeline] profiles`."""

from pathlib import Path
from typing import Annotated

import numpy as np
from pydantic import Field

from socflower.errors import ConfigError
from socflower.field_rules import OneOf, SchemaVersion, Text
from socflower.pipeline.problem import LayerSeconds, PipelineModel
from socflower.scenario.measured_file import read_measured, write_measured
from socflower.scenario.schema.file import scenario_cluster
from socflower.scenario.schema.pipeline import CUTS, PipelineConfig
from socflower.scenario.schema.scenario_file import Scenario
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


def write_profile(path: Path, profile: MeasuredLayers) -> None:
    """Write a profile; `ConfigError` if the file cannot be written."""
    write_measured(path, profile.model_dump(mode="json", by_alias=True))


def measured_seconds(
    scenario: Scenario, model: PipelineModel
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
        "sample": list(model.sample_shape),
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
        require_device(scenario, profile.device, f"{path}: device = {profile.device!r}")
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


def require_device(scenario: Scenario, device: str, where: str) -> None:
    """Raise ConfigError for a device that the scenario's cluster does not have."""
    kinds = sorted({board.device.name for board in scenario_cluster(scenario).boards})
    if device not in kinds:
        raise ConfigError(
            f"{where}: is no device of the cluster of {scenario.name}, which has {', '.join(kinds)}"
        )
