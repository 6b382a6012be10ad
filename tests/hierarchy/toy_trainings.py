"""Training intervals of a model of one layer."""

from typing import Any

from socflower.cluster import Cluster
from socflower.hierarchy import GroupPlan, IntervalCosts, plan_groups
from tests.toy_clusters import toy_profile


def interval_costs(cluster: Cluster, plan: GroupPlan | int, **changes: Any) -> IntervalCosts:
    """Return the costs of a plan, or of so many groups: ten steps an epoch, each with turns on shared uplinks."""
    values: dict[str, Any] = {
        "cluster": cluster,
        "plan": plan_groups(cluster, plan) if isinstance(plan, int) else plan,
        "profile": toy_profile(1e8, 4e6, 2),
        "num_samples": 640,
        "batch_size": 32,
        "steps_per_epoch": 10,
        "uplink_turns": True,
    }
    return IntervalCosts(**(values | changes))
