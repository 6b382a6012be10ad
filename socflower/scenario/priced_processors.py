"""Which processors a run's time and energy are those of, and which trained: trainers use CPUs only."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from socflower.cluster import Cluster, Device
from socflower.cluster.device_catalog import device
from socflower.scenario.schema.config import Scenario
from socflower.scenario.schema.file import scenario_cluster

_TRAINED_ON = "cpu"
_WHERE = {"local": "this machine's CPU", "simulation": "this machine's CPU", "deployment": "the nodes' CPUs"}


def priced_processors(scenario: Scenario) -> list[dict[str, Any]]:
    """Return for each kind of device, clouds included, the processors that are `priced`, and what `trained` instead."""
    devices = {board.device.name: board.device for board in scenario_cluster(scenario).boards}
    if scenario.is_split and scenario.strategy.name != "edge-only":
        devices.setdefault(scenario.split.cloud_device, device(scenario.split.cloud_device))
    return [{"device": each.name, "priced": _priced(each, scenario.precision.arithmetic), "trained": _TRAINED_ON}
            for each in devices.values()]


def gpu_notes(priced: Sequence[Mapping[str, Any]], engine: str | None) -> list[str]:
    """Return what a reader of figures should know of processors other than CPUs and NPUs that are priced in FP32.

    Without an engine it is a plan. What stands in for an NPU has a note of its own.
    """
    names = ", ".join(sorted(f"{entry['device']}'s {entry['priced'][0]}" for entry in priced if _is_elsewhere(entry)))
    if not names:
        return []
    if engine is None:
        return [f"priced as {names}; a run trains on CPUs: no trainer uses a GPU"]
    kind = "predicted" if engine == "deployment" else "virtual"
    return [f"GPU: CPU FP32. Training ran on {_WHERE[engine]}, since no trainer uses a GPU; {kind} time and energy are "
            f"those of {names}."]


def cluster_gpu_notes(cluster: Cluster, engine: str | None) -> list[str]:
    """Return the same for clients of a foreign app, which are priced in FP32."""
    return gpu_notes(_of(board.device for board in cluster.boards), engine)


def priced_line(priced: Sequence[Mapping[str, Any]]) -> str | None:
    """Return in a few words what trained in place of what is priced; None if it is the same."""
    names = ", ".join(sorted(f"{entry['device']}'s {entry['priced'][0]}" for entry in priced if _is_elsewhere(entry)))
    return f"{names}; trained on the CPU" if names else None


def _of(devices: Iterable[Device]) -> list[dict[str, Any]]:
    kinds = {each.name: each for each in devices}
    return [{"device": each.name, "priced": _priced(each, "fp32"), "trained": _TRAINED_ON} for each in kinds.values()]


def _priced(each: Device, arithmetic: str) -> list[str]:
    if arithmetic == "int8":
        return [each.int8_processor or each.default_processor]
    beside = each.accelerator if arithmetic == "mixed" else None
    return [each.default_processor, *([beside] if beside else [])]


def _is_elsewhere(entry: Mapping[str, Any]) -> bool:
    """Whether the processor that FP32 is priced on is none of those that train; a name says what a processor is."""
    return not str(entry["priced"][0]).startswith((_TRAINED_ON, "npu"))
