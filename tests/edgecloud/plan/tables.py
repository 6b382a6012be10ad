"""Costs of made-up split models, and links in one line."""

from typing import Any

from socflower.edgecloud.links.bandwidth_profile import LinkRates
from socflower.edgecloud.plan.cuts import CutCost, SplitCosts


def link(up: float, down: float | None = None, latency_s: float = 0.0) -> LinkRates:
    down = up if down is None else down
    return LinkRates(up_bytes_per_s=up, down_bytes_per_s=down, latency_s=latency_s)


def cut(
    forward_s: float,
    backward_s: float,
    cloud_s: float,
    elements: int,
    weight_bytes: float,
    **more: Any,
) -> CutCost:
    return CutCost(
        **{"name": "relu", **more},
        edge_forward_s=forward_s,
        edge_backward_s=backward_s,
        cloud_s=cloud_s,
        feature_elements=elements,
        front_weight_bytes=weight_bytes,
    )


def costs(*cuts: CutCost, edge_only_s: float = 5.0, **more: Any) -> SplitCosts:
    values = {"model": "m", "batch_size": 4, **more}
    return SplitCosts(cuts=cuts, edge_only_s=edge_only_s, **values)
