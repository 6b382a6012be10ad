"""Planning anew while SoCs are away: users need them, or they died."""

from collections.abc import Collection, Sequence

from socflower.cluster import Cluster
from socflower.errors import InfeasiblePlan
from socflower.hierarchy.plan import GroupPlan, plan_groups


def plan_without(
    whole: GroupPlan, cluster: Cluster, capacities: Sequence[float], away: Collection[int],
) -> GroupPlan:
    """Return a plan of those of `whole`'s SoCs that are not away, by the same rules (F5, F6); `whole` if all are there.

    As many groups as before, or as SoCs where those are fewer. SoCs that `whole` leaves idle stay idle: they have no
    nodes. `capacities` has one entry for each SoC of the cluster. Raises `InfeasiblePlan` if all are away.
    """
    present = [soc for soc in whole.participants if soc not in away]
    if len(present) == len(whole.participants):
        return whole
    if not present:
        raise InfeasiblePlan("no SoC is left to train: all are gone, or wanted by their users")
    there = set(present)
    return plan_groups(cluster, min(len(whole.groups), len(present)), None,
                       [capacity if soc in there else 0.0 for soc, capacity in enumerate(capacities)])
