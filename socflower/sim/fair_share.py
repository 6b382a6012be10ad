"""Max-min fairness: how flows that cross shared resources divide them."""

from collections.abc import Hashable, Mapping, Sequence
from typing import TypeVar

Resource = TypeVar("Resource", bound=Hashable)

SAME_SHARE = 1e-12
"""Relative difference below which two resources saturate together, so that symmetric flows get equal rates."""


def max_min_rates(paths: Sequence[Sequence[Resource]], capacities: Mapping[Resource, float]) -> list[float]:
    """Return the max-min fair rate of each flow, in the capacities' unit.

    `paths[f]` holds the resources that flow f crosses, at least one. No flow can get more without taking from
    one that has no more than it: every flow crosses a saturated resource on which no flow is faster.
    Progressive filling: all rates rise together; where a resource saturates, its flows stop rising.
    """
    crossing: dict[Resource, list[int]] = {}
    for flow, path in enumerate(paths):
        assert path, f"flow {flow} crosses no resource, so its rate has no bound"
        for resource in path:
            crossing.setdefault(resource, []).append(flow)
    left = {resource: capacities[resource] for resource in crossing}
    rising = {resource: len(flows) for resource, flows in crossing.items()}
    rates = [-1.0] * len(paths)
    while rising:
        shares = {resource: left[resource] / count for resource, count in rising.items()}
        # Rounding may bring a later share a hair under an earlier one; a rate is never negative.
        level = max(min(shares.values()), 0.0)
        for resource, share in shares.items():
            if share > level * (1.0 + SAME_SHARE):
                continue
            for flow in crossing[resource]:
                if rates[flow] < 0.0:
                    rates[flow] = level
                    for crossed in paths[flow]:
                        left[crossed] -= level
                        rising[crossed] -= 1
        rising = {resource: count for resource, count in rising.items() if count}
    return rates
