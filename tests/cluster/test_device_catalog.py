"""Every figure of the hardware has a source, and the measured ones give back what was measured."""

from typing import Any

import pytest

from socflower.cluster import ModelProfile, device, device_names, step_cost
from socflower.cluster.device_catalog import catalog, link_bytes_per_s, message_s
from socflower.model_graph.layer_profile import profile_module
from socflower.workloads.models.classifiers import build_model
from tests.one_line import refused

EPOCHS, SAMPLES = 150, 50_000


def figures(table: Any, where: str = "") -> list[tuple[str, Any]]:
    if not isinstance(table, dict):
        return [(where, table)]
    if "value" in table:
        return [(where, table)]
    return [entry for key, value in table.items() for entry in figures(value, f"{where}.{key}")]


def test_every_figure_has_a_source() -> None:
    for where, figure in figures(catalog()):
        if where.endswith(("schema", ".number_format", ".shares")):
            continue
        assert isinstance(figure, dict), f"{where} is a bare value"
        assert len(figure["source"]) > 10, where


def test_all_devices_of_the_design_are_there_and_can_be_made() -> None:
    assert device_names() == (
        "snapdragon-865",
        "snapdragon-888",
        "snapdragon-750g",
        "snapdragon-8gen1",
        "jetson-nano",
        "jetson-tx2",
        "jetson-nx",
        "raspberry-pi-4b",
        "x86-core",
        "gpu-v100",
        "gpu-a100",
        "gpu-rtx-2080-ti",
    )
    for name in device_names():
        made = device(name)
        assert made.idle_w < made.processor(made.default_processor).active_w
        assert made.processor(made.default_processor).number_format == "fp32"


def cifar_model(name: str) -> ModelProfile:
    return profile_module(
        build_model(name, in_channels=3, image_size=32, num_classes=10, seed=1), (3, 32, 32), name
    )


@pytest.mark.few_cells(2)
@pytest.mark.parametrize(
    ("model", "processor", "hours", "watt_hours"),
    [
        ("vgg11", "cpu", 29.13, 187.0),
        ("vgg11", "cpu-int8", 24.77, 153.3),
        ("vgg11", "npu", 7.50, 31.4),
        ("resnet18", "cpu", 223.55, 1435.0),
        ("resnet18", "cpu-int8", 135.71, 840.0),
        ("resnet18", "npu", 35.68, 149.3),
    ],
)
def test_one_soc_alone_takes_what_mandheling_measured(
    model: str,
    processor: str,
    hours: float,
    watt_hours: float,
) -> None:
    """Mandheling Table 8: 150 epochs of CIFAR-10 on one Snapdragon 888. Updates and layer overhead, which the table
    holds within its hours, come on top here: they weigh most where training is fastest."""
    soc = device("snapdragon-888")
    batch = 64
    cost = step_cost(cifar_model(model), soc, batch, processor)
    predicted_h = (cost.compute_s + cost.update_s) * EPOCHS * SAMPLES / batch / 3600
    tolerance = 0.06 if processor == "npu" else 0.02
    assert predicted_h == pytest.approx(hours, rel=tolerance)
    assert predicted_h * soc.processor(processor).active_w == pytest.approx(
        watt_hours, rel=tolerance
    )


@pytest.mark.few_cells(2)
@pytest.mark.parametrize(
    ("model", "processor", "hours", "tolerance"),
    [
        ("vgg11", "cpu", 29.1, 0.02),
        ("vgg11", "npu", 7.5, 0.06),
        ("resnet18", "cpu", 233.0, 0.05),
        ("resnet18", "npu", 36.0, 0.06),
    ],
)
def test_a_snapdragon_865_takes_nearly_what_socflow_plus_prints_for_it(
    model: str, processor: str, hours: float, tolerance: float
) -> None:
    """SoCFlow+ 1 and 2.2, which has no number of epochs: that of Mandheling's Table 8."""
    cost = step_cost(cifar_model(model), device("snapdragon-865"), 64, processor)
    predicted_h = (cost.compute_s + cost.update_s) * EPOCHS * SAMPLES / 64 / 3600
    assert predicted_h == pytest.approx(hours, rel=tolerance)


def test_what_mandheling_measured_is_said_of_the_phone_that_it_was_measured_on() -> None:
    """Table 8 is of a Xiaomi 11 Pro, a Snapdragon 888 (4.3); no figure of another phone was measured there."""
    for where, figure in figures(catalog()["device"]):
        measured = isinstance(figure, dict) and figure["source"].startswith("Mandheling Table 8")
        assert not measured or where.startswith(".snapdragon-888.")


def test_the_smallest_phone_gains_as_mandheling_says() -> None:
    """Mandheling 4.2: at least 2.08 times in time and 3.21 times in energy over MNN in FP32, on this phone."""
    cpu, npu = (device("snapdragon-750g").processor(name) for name in ("cpu", "npu"))
    faster = npu.flops_per_s / cpu.flops_per_s
    assert faster == pytest.approx(2.08, rel=0.01)
    assert faster * cpu.active_w / npu.active_w == pytest.approx(3.21, rel=0.01)


def test_network_constants_are_those_fitted_to_the_paper() -> None:
    assert 0.33e-3 <= message_s() <= 0.49e-3
    assert 120e6 <= link_bytes_per_s() <= 131e6


def test_an_unknown_device_is_named_with_those_there_are() -> None:
    refused(lambda: device("snapdragon-86"), "'snapdragon-86'", "snapdragon-865", *device_names())


def test_each_figure_of_the_catalogue_is_read_by_the_reader_of_profiles() -> None:
    assert device("snapdragon-865").processor("cpu-int8").shares == "cpu"
    assert device("snapdragon-865").processor("npu").rate("vgg11") == 254.8e9
    assert not any(
        processor.timings
        for name in device_names()
        for processor in device(name).processors.values()
    )
