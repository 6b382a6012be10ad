"""SoCFlow: group count, mapping, communication groups, delayed synchronisation, aggregation, and task graphs.

Pure planners: from `cluster` values to frozen plans, and from plans to task graphs.
"""

from socflower.hierarchy.averaging import first_non_finite, weighted_average
from socflower.hierarchy.batch_shares import split_batch
from socflower.hierarchy.communication_groups import communication_groups, conflicts
from socflower.hierarchy.exchange.choice import Exchanges, choose_exchanges, unpredicted_exchanges
from socflower.hierarchy.exchange.coding_bytes import gradient_coding
from socflower.hierarchy.exchange.collective_tasks import Exchange
from socflower.hierarchy.exchange.gradients import GradientExchange
from socflower.hierarchy.group_count import (
    GroupCountChoice,
    choose_by_floor,
    choose_by_time,
    default_candidates,
)
from socflower.hierarchy.interval_costs import Fragment, IntervalCosts, Phase
from socflower.hierarchy.mapping.integrity_greedy import integrity_greedy, map_groups
from socflower.hierarchy.mapping.placement import GroupPlacement
from socflower.hierarchy.plan import Group, GroupPlan, plan_groups, plan_over
from socflower.hierarchy.quorum import Quorum, run_to_quorum
from socflower.hierarchy.rebalancing import CapacitiesInUse, Rebalancing, reordered
from socflower.hierarchy.sync_intervals import (
    SyncInterval,
    group_steps_per_epoch,
    sync_schedule,
    sync_shapes,
)
from socflower.hierarchy.task_graphs import (
    deal_graph,
    dispatch_graph,
    exchange_graph,
    step_graph,
    synchronisation_graph,
)
from socflower.hierarchy.uplink_turns import StepTimes, UplinkTurns, choose_turns, step_times

__all__ = [
    "CapacitiesInUse",
    "Exchange",
    "Exchanges",
    "Fragment",
    "GradientExchange",
    "Group",
    "GroupCountChoice",
    "GroupPlacement",
    "GroupPlan",
    "IntervalCosts",
    "Phase",
    "Quorum",
    "Rebalancing",
    "StepTimes",
    "SyncInterval",
    "UplinkTurns",
    "choose_by_floor",
    "choose_by_time",
    "choose_exchanges",
    "choose_turns",
    "communication_groups",
    "conflicts",
    "deal_graph",
    "default_candidates",
    "dispatch_graph",
    "exchange_graph",
    "first_non_finite",
    "gradient_coding",
    "group_steps_per_epoch",
    "integrity_greedy",
    "map_groups",
    "plan_groups",
    "plan_over",
    "reordered",
    "run_to_quorum",
    "split_batch",
    "step_graph",
    "step_times",
    "sync_schedule",
    "sync_shapes",
    "synchronisation_graph",
    "unpredicted_exchanges",
    "weighted_average",
]
