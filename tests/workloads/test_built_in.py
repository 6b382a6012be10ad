from dataclasses import replace

import pytest

from socflower.edgecloud.split_program import cut_shapes
from socflower.model_graph.cut_points import capture_split
from socflower.model_graph.layer_profile import profile_module
from socflower.pipeline.profiler.layers import read_model
from socflower.workloads.models.built_in import (
    built_in_cuts,
    built_in_pieces,
    built_in_profile,
    model_names,
)
from socflower.workloads.models.classifiers import BUILDERS, build_model
from socflower.workloads.sources import data_names, data_shape
from tests.one_line import refused

# One of the data sets for each form of images; all have ten classes.
DATA = {(data_shape(name).channels, data_shape(name).size): name for name in data_names()}


# Longer tables of the layers of another model here; the slow tests have them too.
DEEPER = ("vgg16", "vgg19", "resnet34", "inception-v3")

# Each model on one form of images, another one than the model before it; on the others it is slow.
CASES = [
    pytest.param(
        name,
        data,
        marks=() if (row + column) % len(DATA) == 0 and name not in DEEPER else pytest.mark.slow,
    )
    for row, name in enumerate(BUILDERS)
    for column, data in enumerate(DATA.values())
]


@pytest.mark.few_cells(3)
@pytest.mark.parametrize(("name", "data"), CASES)
def test_profile_cuts_and_pieces_without_torch_are_those_of_the_model(name: str, data: str) -> None:
    shape = data_shape(data)
    model = build_model(
        name,
        in_channels=shape.channels,
        image_size=shape.size,
        num_classes=shape.num_classes,
        seed=3,
    )
    captured = profile_module(model, (shape.channels, shape.size, shape.size), name)
    shipped = built_in_profile(name, shape.channels, shape.size)
    assert shipped == captured
    assert shipped.ran_on == captured.ran_on
    cuts = cut_shapes(capture_split(model, (shape.channels, shape.size, shape.size)), captured)
    assert built_in_cuts(name, shape.channels, shape.size) == [
        (cut.name, cut.num_layers, cut.feature_elements_per_sample, cut.front_state_bytes)
        for cut in cuts
    ]
    read = read_model(model, (shape.channels, shape.size, shape.size), name).model
    layers = read.layers
    pieces = built_in_pieces(name, "layers", shape.channels, shape.size)
    assert pieces == layers
    # Nodes compare the layers that they read with those that were planned.
    assert replace(read, layers=pieces).sha256 == read.sha256


def test_every_model_has_a_profile() -> None:
    assert model_names() == tuple(BUILDERS)


def test_an_unknown_model_is_refused() -> None:
    refused(lambda: built_in_profile("lenet", 1, 28), "model.name", "lenet", "lenet5")
