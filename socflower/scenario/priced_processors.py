"""The processors that a run's time and energy are priced on, and those that trained: trainers use CPUs only."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from socflower.cluster import Cluster, Device
from socflower.cluster.device_catalog import device
from socflower.scenario.schema.config import Scenario
from socflower.scenario.schema.file import scenario_cluster

_TRAINED_ON = "cpu"
_WHERE = {"local": "this machine's CPU", "simulation": "this machine's CPU", "deployment": "the nodes' CPUs"}


def priced_processors(scenario: Scenario) -> list[dict[str, Any]]:
    """Return the `priced` processors and the one that `trained` for each device type, clouds included."""
    devices = {board.device.name: board.device for board in scenario_cluster(scenario).boards}
    if scenario.is_split and scenario.strategy.name != "edge-only":
        devices.setdefault(scenario.split.cloud_device, device(scenario.split.cloud_device))
    return [{"device": each.name, "priced": _priced(each, scenario.precision.arithmetic), "trained": _TRAINED_ON}
            for each in devices.values()]


def gpu_notes(priced: Sequence[Mapping[str, Any]], engine: str | None) -> list[str]:
    """Return notes on processors other than CPUs and NPUs that are priced in FP32.

    Without an engine the notes are for a plan. The substitute for an NPU has its own note.
    """
    names = ", ".join(sorted(f"{entry['device']}'s {entry['priced'][0]}" for entry in priced if _is_untrained(entry)))
    if not names:
        return []
    if engine is None:
        return [f"priced as {names}; a run trains on CPUs: no trainer uses a GPU"]
    kind = "predicted" if engine == "deployment" else "virtual"
    return [f"GPU: CPU FP32. Training ran on {_WHERE[engine]}, since no trainer uses a GPU; {kind} time and energy are "
            f"those of {names}."]


def cluster_gpu_notes(cluster: Cluster, engine: str | None) -> list[str]:
    """Return the same notes for the clients of any Flower app, which are priced in FP32."""
    return gpu_notes(_priced_devices(board.device for board in cluster.boards), engine)


def priced_line(priced: Sequence[Mapping[str, Any]]) -> str | None:
    """Return a short text on which processor trained instead of the priced ones; None if they are the same."""
    names = ", ".join(sorted(f"{entry['device']}'s {entry['priced'][0]}" for entry in priced if _is_untrained(entry)))
    return f"{names}; trained on the CPU" if names else None


def _priced_devices(devices: Iterable[Device]) -> list[dict[str, Any]]:
    kinds = {each.name: each for each in devices}
    return [{"device": each.name, "priced": _priced(each, "fp32"), "trained": _TRAINED_ON} for each in kinds.values()]


def _priced(each: Device, arithmetic: str) -> list[str]:
    if arithmetic == "int8":
        return [each.int8_processor or each.default_processor]
    beside = each.accelerator if arithmetic == "mixed" else None
    return [each.default_processor, *([beside] if beside else [])]


def _is_untrained(entry: Mapping[str, Any]) -> bool:
    """Return whether FP32 is priced on a processor that no trainer uses, by the processor's name."""
    return not str(entry["priced"][0]).startswith((_TRAINED_ON, "npu"))
