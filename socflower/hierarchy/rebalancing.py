"""Re-balancing: shares in a group follow measured capacities (F4), and SoCs of one board change groups (F20)."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any

from pydantic import Field

from socflower.cluster import Cluster
from socflower.errors import ConfigError, require_range
from socflower.field_rules import checked
from socflower.hierarchy.mapping.placement import balance_capacities
from socflower.hierarchy.plan import GroupPlan, require_one_per_soc


@checked
class Rebalancing:
    """Settings of re-balancing by measured capacities, and its tolerance (F20).

    With `within_groups`, shares of a group's batch are adapted every `steps` steps (0: only between intervals). With
    `across_groups`, SoCs of one board change groups between intervals; shares are adapted then in any case, since
    otherwise no swap would make a group faster. A capacity that differs by at most `tolerance`, relative, from the one
    in use counts as unchanged, and a change of groups must speed up the slowest one by more than `tolerance`.
    """

    within_groups: bool = True
    across_groups: bool = True
    steps: Annotated[int, Field(ge=0)] = 10
    tolerance: Annotated[float, Field(gt=0, lt=1)] = 0.05


@dataclass(slots=True)
class CapacitiesInUse:
    """The assumed fraction of nominal capacity of each SoC; 1 for SoCs without an entry in `parts`."""

    tolerance: float
    parts: dict[int, float] = field(default_factory=dict)

    def part(self, soc: int) -> float:
        """Return the fraction of a SoC."""
        return self.parts.get(soc, 1.0)

    def is_off(self, measured: Mapping[int, float]) -> bool:
        """Whether a measured fraction differs from the one in use by more than the tolerance."""
        return any(self._is_off(soc, part) for soc, part in measured.items())

    def take(self, measured: Mapping[int, float]) -> list[int]:
        """Use the measured fractions that differ by more than the tolerance; return their SoCs."""
        moved = [soc for soc, part in measured.items() if self._is_off(soc, part)]
        for soc in moved:
            self.parts[soc] = measured[soc]
        return moved

    def _is_off(self, soc: int, part: float) -> bool:
        named: dict[str, Any] = {f"capacity of SoC {soc}": part}
        require_range("re-balancing", above=0.0, **named)
        return abs(part / self.part(soc) - 1.0) > self.tolerance


def reordered(
    plan: GroupPlan, cluster: Cluster, capacities: Sequence[float], min_gain: float = 0.0
) -> GroupPlan:
    """Return the plan after swaps of SoCs of one board that even out the groups' capacities (F20).

    The number of SoCs of each group on each board is unchanged, and so are contention and communication groups (F5,
    F6). Leaders stay in their groups, since they hold the optimiser state. Returns `plan` itself unless the slowest
    group gains more than `min_gain`. `capacities` has one entry for each SoC of the cluster.
    """
    require_one_per_soc("re-balancing", cluster, capacities)
    board_of = {soc: cluster.board_of(soc) for soc in plan.participants}
    leaders = {group.leader for group in plan.groups}
    present = [group.members for group in plan.groups]
    members = balance_capacities(present, board_of, capacities, fixed=leaders)
    before = slowest(capacities, present)
    if slowest(capacities, members) <= before * (1.0 + min_gain):
        return plan
    groups = tuple(
        replace(group, members=tuple(sorted(socs)))
        for group, socs in zip(plan.groups, members, strict=True)
    )
    return replace(plan, groups=groups)


def slowest(capacities: Sequence[float], groups: Iterable[Sequence[int]]) -> float:
    """Return the capacity of the slowest group."""
    return min(sum(capacities[soc] for soc in group) for group in groups)


def with_members(plan: GroupPlan, members: Sequence[Sequence[int]]) -> GroupPlan:
    """Return the plan with `members`, an earlier result of `reordered`, in group order."""
    groups = tuple(
        replace(group, members=tuple(socs))
        for group, socs in zip(plan.groups, members, strict=True)
    )
    socs = sorted(soc for group in groups for soc in group.members)
    is_led = all(group.leader in group.members for group in groups)
    if socs != list(plan.participants) or not is_led:
        raise ConfigError(
            f"re-balancing: members {[list(socs) for socs in members]} are not those of this plan"
        )
    return replace(plan, groups=groups)


def without_members(plan: GroupPlan, taken: Iterable[int]) -> GroupPlan:
    """Return the plan without SoCs taken by users; a group without remaining members is left out.

    It serves the virtual clock: a real ring also continues without such members until the next plan.
    """
    gone = set(taken)
    if not gone.intersection(plan.participants):
        return plan
    groups = []
    for group in plan.groups:
        members = tuple(soc for soc in group.members if soc not in gone)
        if members:
            leader = group.leader if group.leader in members else members[0]
            groups.append(replace(group, members=members, leader=leader))
    participants = tuple(soc for soc in plan.participants if soc not in gone)
    return replace(plan, groups=tuple(groups), participants=participants)
