"""The plan of a scenario with a cloud, without training: the edges' cuts, and what a batch takes at each cut."""

import math
from dataclasses import replace
from typing import Any

from socflower.edgecloud.links.bandwidth_profile import LinkRates
from socflower.edgecloud.plan.baselines import TECHNIQUES, ablation
from socflower.edgecloud.plan.cost_model import period_s, training_s
from socflower.edgecloud.plan.cuts import SplitCosts, SplitPlan
from socflower.edgecloud.plan.device_costs import training_energy_j
from socflower.edgecloud.plan.party import Party
from socflower.edgecloud.plan.phases import Phases, phases, window_limit
from socflower.quantities import counted
from socflower.scenario.priced_processors import gpu_notes, priced_processors
from socflower.scenario.schema.scenario_file import Scenario
from socflower.scenario.split_setting import SplitSetting


def plan_split(scenario: Scenario) -> dict[str, Any]:
    """Return the plan document: each edge's cut, and T1 to T4, memory and batch time of every cut on the mean link."""
    setting = SplitSetting(scenario)
    what = (
        f"{scenario.model.name} on {scenario.data.name}, {counted(scenario.train.epochs, 'epoch')} of "
        f"{counted(setting.batches_per_epoch, 'batch', 'batches')} of {scenario.train.batch_size}"
    )
    edges = [_edge(setting, edge, party) for edge, party in enumerate(setting.parties())]
    notes = ["planned on each link's mean rates; a run follows the link as it changes"]
    if scenario.strategy.name == "split-replay" and scenario.split.adapt and setting.num_edges == 1:
        notes.append("the cut moves with the link (adapt = false keeps it)")
    if setting.schedule.grouped:
        notes.append("batches go in groups of K + 1, each of which waits for the one before")
    if scenario.split.shared_bytes_per_s is not None:
        notes.append("each edge is planned with an even share of the uplink")
    if scenario.split.cloud_processors is not None:
        notes.append(
            "planned as if the cloud were free; a run shares its "
            f"{counted(scenario.split.cloud_processors, 'processor')}"
        )
    if scenario.split.calibrated:
        keys = ", ".join(scenario.split.calibrated)
        notes.append(f"planned with K = 0 and 32 bits for {keys}, which a run calibrates")
    notes += gpu_notes(priced_processors(scenario), None)
    return {
        "schema": 1,
        "work": what,
        "mode": setting.mode,
        "window": [list(step) for step in setting.schedule.steps],
        "edges": edges,
        "cut": edges[0]["deployment"]["cut_name"],
        "predicted": {key: max(edge[key] for edge in edges) for key in ("batch_s", "epoch_s")}
        | {"epoch_energy_j": sum(edge["epoch_energy_j"] for edge in edges)},
        "notes": notes,
    }


def _edge(setting: SplitSetting, edge: int, party: Party) -> dict[str, Any]:
    costs, rates = party.costs, setting.planned_rates(party.bandwidth_profile.mean_rates())
    device, reverse = setting.cluster.device_of(edge), setting.is_reverse
    chosen = replace(party.split_plan, window=party.k(0))

    def mean_s(served: Phases, split_plan: SplitPlan) -> float:
        limit = window_limit(costs, split_plan)
        return period_s(served, limit, grouped=split_plan.grouped)

    def row(index: int) -> dict[str, Any]:
        split_plan = replace(chosen, cut=index)
        served = phases(costs, split_plan, rates, reverse=reverse)
        return {
            "name": costs.cuts[index].name,
            "feature_bytes": costs.feature_bytes(index, 32),
            "edge_s": served.edge_s,
            "up_s": _finite(served.up_s),
            "cloud_s": served.cloud_s,
            "down_s": _finite(served.down_s),
            "batch_s": _finite(mean_s(served, split_plan)),
            "edge_memory_bytes": costs.cuts[index].edge_memory_bytes,
        }

    served, limit = phases(costs, chosen, rates, reverse=reverse), window_limit(costs, chosen)
    batches = setting.batches_per_epoch
    epoch_s = training_s(served, batches, limit, grouped=chosen.grouped)
    return {
        "device": device.name,
        "link": {
            "up_bytes_per_s": rates.up_bytes_per_s,
            "down_bytes_per_s": rates.down_bytes_per_s,
            "latency_s": rates.latency_s,
        },
        "deployment": {
            "cut": chosen.cut,
            "cut_name": None if chosen.cut is None else costs.cuts[chosen.cut].name,
            "bits": chosen.bits,
            "window": chosen.window,
            "text": costs.describe(chosen),
        },
        "cuts": [row(index) for index in range(len(costs.cuts))],
        "gains": _gains(setting, costs, rates),
        "edge_only_s": costs.edge_only_s,
        "batch_s": _finite(mean_s(served, chosen)),
        "epoch_s": _finite(epoch_s),
        "epoch_energy_j": training_energy_j(
            device,
            served,
            batches,
            limit,
            costs.edge_processor,
            costs.edge_beside,
            grouped=chosen.grouped,
        ),
    }


def _gains(setting: SplitSetting, costs: SplitCosts, rates: LinkRates) -> dict[str, Any]:
    """Return how much faster each technique makes an epoch: added to JointDNN alone, and as the last one of ours."""
    if setting.scenario.strategy.name != "split-replay" or setting.is_joined:
        return {}
    times = ablation(
        costs,
        rates,
        num_batches=setting.batches_per_epoch,
        window=setting.schedule.window(0, setting.total_batches),
        grouped=setting.schedule.grouped,
        bits=setting.widths,
        reverse=setting.is_reverse,
    )
    none, every = frozenset[str](), frozenset(TECHNIQUES)
    return {
        "joint_dnn_epoch_s": _finite(times[none]),
        "epoch_s": _finite(times[every]),
        "techniques": [
            {
                "name": name,
                "alone": _finite(times[none]) / _finite(times[frozenset({name})]),
                "last": _finite(times[every - {name}]) / _finite(times[every]),
            }
            for name in TECHNIQUES
        ],
    }


def _finite(seconds: float) -> float:
    """Return seconds that JSON can represent: a link without bandwidth takes 1e12 s."""
    return seconds if math.isfinite(seconds) else 1e12
