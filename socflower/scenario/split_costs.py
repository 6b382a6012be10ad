"""What a batch of a split scenario costs at every cut, by the catalogue; built-in models need no torch for it."""

from collections.abc import Sequence

from socflower.cluster import Device, ModelProfile
from socflower.edgecloud.plan.cuts import SplitCosts
from socflower.edgecloud.plan.device_costs import CutShape, split_costs
from socflower.precision.processor_costs import MERGE_PASSES, REQUANTISE_PASSES, MixedPricing
from socflower.scenario.costs import model_profile
from socflower.scenario.schema.scenario_file import Scenario
from socflower.workloads.models.built_in import built_in_cuts, model_names
from socflower.workloads.sources import data_names, data_shape


def is_built_in(scenario: Scenario) -> bool:
    """Return whether the model is built in as it is: for all classes of built-in data, without frozen layers."""
    split = scenario.split
    return (
        not (scenario.factories or split.classes or split.frozen or scenario.model.pretrained)
        and scenario.model.name in model_names()
        and scenario.data.name in data_names()
    )


def built_in_costs(scenario: Scenario, device: Device, cloud: Device) -> SplitCosts:
    """Return the costs of a built-in model on an edge's device and on the cloud."""
    shape = data_shape(scenario.data.name)
    cuts = [
        CutShape(
            name=name,
            num_layers=num_layers,
            feature_elements_per_sample=elements,
            front_state_bytes=float(state_bytes),
        )
        for name, num_layers, elements, state_bytes in built_in_cuts(
            scenario.model.name, shape.channels, shape.size
        )
    ]
    return layered_costs(scenario, model_profile(scenario), cuts, device, cloud)


def layered_costs(
    scenario: Scenario,
    profile: ModelProfile,
    cuts: Sequence[CutShape],
    device: Device,
    cloud: Device,
    *,
    num_frozen: int = 0,
    reverse: bool = False,
) -> SplitCosts:
    """Return the costs of a model that is cut between layers; nothing up to the first `num_frozen` cuts is trained."""
    batch_size, arithmetic = scenario.train.batch_size, scenario.precision.arithmetic
    in_int8, shares = arithmetic == "int8", None
    if arithmetic == "mixed":
        pricing = MixedPricing(rule=scenario.precision.rule)
        shares = pricing.samples(scenario.model.name, device, batch_size)
    return split_costs(
        profile,
        cuts,
        device,
        cloud,
        batch_size,
        reverse=reverse,
        edge_processor=device.int8_processor if in_int8 else None,
        edge_value_bytes=1.0 if in_int8 else 4.0,
        edge_shares=shares,
        merge_passes=MERGE_PASSES + REQUANTISE_PASSES,
        frozen_layers=cuts[num_frozen - 1].num_layers if num_frozen else 0,
        gradient_bits=scenario.split.widths(scenario.strategy.name)[1],
    )
