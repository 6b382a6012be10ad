"""One round of SoCFlow as a value: made for its messages, read for its replies."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from socflower.hierarchy import Group, GroupPlan, IntervalCosts, SyncInterval, Turns

IN_PROCESS = "in process"
"""The transport inside groups whose members run in one client call."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Round:
    """All that a round needs between its messages and its replies."""

    server_round: int
    interval: SyncInterval
    plan: GroupPlan
    turns: Turns  # whether groups that share an uplink exchange in turn (F6), and the reason
    costs: IntervalCosts | None  # of this plan with these turns; None without a profile
    node_of: Mapping[int, int]  # by SoC of the plan
    transport: str  # of gradients inside groups: "gloo", "grpc", "grpc+tls", or "in process"
    group_of_node: Mapping[int, Group] = field(init=False)  # of all nodes that got a message

    def __post_init__(self) -> None:
        object.__setattr__(self, "group_of_node", {
            self.node_of[soc]: group for group in self.plan.groups
            for soc in (group.members if self.in_rings else (group.leader,))})

    @property
    def in_rings(self) -> bool:
        """Whether members are machines of their own, which exchange gradients in rings."""
        return self.transport != IN_PROCESS
