"""The processors that a run's time and energy are priced on, and the devices that trained, as the clients say."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from socflower.cluster import Cluster, Device
from socflower.cluster.device_catalog import device
from socflower.scenario.schema.file import scenario_cluster
from socflower.scenario.schema.scenario_file import Scenario

_CPU = "cpu"
_WHERE = {
    "local": "this machine's CPU",
    "simulation": "this machine's CPU",
    "deployment": "the nodes' CPUs",
}
_NO_ACCELERATOR = "as their trainers' device says, or for lack of an accelerator"


def priced_processors(
    scenario: Scenario,
    trained_on: Mapping[str, Sequence[int]] | None = None,
) -> list[dict[str, Any]]:
    """Return the `priced` processors and the devices that `trained` for each device type, clouds included.

    `trained_on` has the SoCs by the device that trained; before a run it is the scenario's device. A cloud's half
    trains where the edges' halves do, unless it has a machine of its own, which does not report it.
    """
    cluster, arithmetic = scenario_cluster(scenario), scenario.precision.arithmetic
    entries = _entries(
        cluster, arithmetic, trained_on or {scenario.train.device: range(cluster.num_socs)}
    )
    if scenario.pipeline is not None and scenario.pipeline.int8_socs:
        _add_int8_stages(entries, cluster, scenario.pipeline.int8_socs)
    if scenario.kind.uses_cloud and scenario.strategy.name != "edge-only":
        cloud, known = scenario.split.cloud_device, {entry["device"] for entry in entries}
        if cloud not in known:
            entries.append(
                {
                    "device": cloud,
                    "priced": _priced(device(cloud), "fp32"),
                    "trained": entries[0]["trained"],
                }
            )
    return entries


def gpu_notes(priced: Sequence[Mapping[str, Any]], engine: str | None) -> list[str]:
    """Return notes on processors other than CPUs and NPUs that are priced in FP32, and did not train.

    Without an engine the notes are for a plan. The substitute for an NPU has its own note.
    """
    names = _untrained_names(priced)
    if not names:
        return []
    if engine is None:
        return [f"priced as {names}; a run trains on CPUs, unless [train] device is an accelerator"]
    kind = "predicted" if engine == "deployment" else "virtual"
    some = sorted(
        {soc for entry in priced if _is_untrained(entry) for soc in entry.get("socs_on_cpu", ())}
    )
    who = f"SoCs {', '.join(map(str, some))}" if some else "All clients"
    return [
        f"GPU: CPU FP32. {who} trained on {_WHERE[engine]}, {_NO_ACCELERATOR}; {kind} time and energy are those of "
        f"{names}."
    ]


def cluster_gpu_notes(
    cluster: Cluster, engine: str, trained_on: Mapping[str, Sequence[int]]
) -> list[str]:
    """Return the same notes for the clients of any Flower app, which are priced in FP32."""
    return gpu_notes(_entries(cluster, "fp32", trained_on), engine)


def priced_line(priced: Sequence[Mapping[str, Any]]) -> str | None:
    """Return a short text if a CPU trained instead of the priced processors; None if none did."""
    names = _untrained_names(priced)
    return f"{names}; trained on the CPU" if names else None


def _entries(
    cluster: Cluster, arithmetic: str, trained_on: Mapping[str, Iterable[int]]
) -> list[dict[str, Any]]:
    """Return an entry for each device type; it lists the SoCs that trained on a CPU if others did not."""
    known = {board.device.name: board.device for board in cluster.boards}
    by_type: dict[str, dict[str, list[int]]] = {name: {} for name in known}
    for label, socs in trained_on.items():
        for soc in socs:
            if 0 <= soc < cluster.num_socs:
                by_type[cluster.device_of(soc).name].setdefault(label, []).append(soc)
    entries = []
    for name, each in known.items():
        labels = by_type[name]
        entry = {
            "device": name,
            "priced": _priced(each, arithmetic),
            "trained": " and ".join(sorted(labels)) or "none",
        }
        entries.append(
            entry | ({"socs_on_cpu": labels[_CPU]} if _CPU in labels and len(labels) > 1 else {})
        )
    return entries


def _add_int8_stages(
    entries: Sequence[dict[str, Any]], cluster: Cluster, socs: Sequence[int] | str
) -> None:
    """Put the int8 processor first for devices whose stages compute in int8; the other one updates weights."""
    in_int8 = range(cluster.num_socs) if isinstance(socs, str) else socs
    kinds = {
        cluster.device_of(soc).name: cluster.device_of(soc)
        for soc in in_int8
        if soc < cluster.num_socs
    }
    for entry in entries:
        processor = kinds[entry["device"]].int8_processor if entry["device"] in kinds else None
        if processor:
            entry["priced"] = [processor, *entry["priced"]]


def _priced(each: Device, arithmetic: str) -> list[str]:
    if arithmetic == "int8":
        return [each.int8_processor or each.default_processor]
    beside = each.accelerator if arithmetic == "mixed" else None
    return [each.default_processor, *([beside] if beside else [])]


def _untrained_names(priced: Sequence[Mapping[str, Any]]) -> str:
    return ", ".join(
        sorted(
            f"{entry['device']}'s {entry['priced'][0]}" for entry in priced if _is_untrained(entry)
        )
    )


def _is_untrained(entry: Mapping[str, Any]) -> bool:
    """Return whether FP32 is priced on an accelerator, by the processor's name, and a client trained on a CPU."""
    return _CPU in entry["trained"].split(" and ") and not str(entry["priced"][0]).startswith(
        (_CPU, "npu")
    )
