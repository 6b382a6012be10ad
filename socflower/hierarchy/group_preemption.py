"""What a user who takes a SoC ends: the work of that SoC, or of its whole logical group (SoCFlow+ section 3).

With `SOCS` a group continues without the SoC, and the next plan divides the SoCs that are left into as many groups.
With `GROUPS` the group is terminated: its interval is lost, its SoCs are released, and it returns at the first
synchronisation at which none of them is taken. Other groups keep their members, and nothing is planned again. One group
always stays: it continues as with `SOCS`.
"""

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import replace

from socflower.hierarchy.communication_groups import communication_groups
from socflower.hierarchy.plan import Group, GroupPlan

SOCS, GROUPS = "socs", "groups"
PREEMPTIONS = (SOCS, GROUPS)


def terminated_groups(
    groups: Sequence[Group], taken: Collection[int], *, one_stays: bool
) -> list[Group]:
    """Return the groups that are terminated when users have `taken` some SoCs, in their order.

    If `one_stays` and all would be, the group that keeps most of its members is not, the first of equal ones. If every
    member of every group is taken, as outside the hours of training, nobody is left to continue without them: all wait,
    and none is terminated.
    """
    left = {group.group_id: len(set(group.members).difference(taken)) for group in groups}
    if not any(left.values()):
        return []
    broken = [group for group in groups if left[group.group_id] < len(group.members)]
    if one_stays and len(broken) == len(groups):
        broken.remove(max(broken, key=lambda group: (left[group.group_id], -group.group_id)))
    return broken


def plan_of_whole_groups(whole: GroupPlan, away: Collection[int]) -> GroupPlan | None:
    """Return the plan of the groups of `whole` without a member that is away; None if there is no such group.

    Groups keep members and leader and are numbered again; `whole` itself is returned if none is away.
    """
    kept = [group for group in whole.groups if not set(group.members).intersection(away)]
    if len(kept) == len(whole.groups):
        return whole
    if not kept:
        return None
    groups = tuple(replace(group, group_id=number) for number, group in enumerate(kept))
    split = Counter(board for group in groups if group.split for board in group.boards)
    contention = max(split.values(), default=0)
    return GroupPlan(
        groups=groups,
        communication_groups=communication_groups(groups),
        contention=contention,
        slots_per_board=whole.slots_per_board,
        participants=tuple(sorted(soc for group in groups for soc in group.members)),
        # Fewer groups of the same members: their contention is at most that of `whole`, but may not be the least.
        proven_optimal=contention == 0,
    )
