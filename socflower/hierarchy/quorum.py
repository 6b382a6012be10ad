"""A synchronisation that a quorum of groups ends: late groups continue with their steps, and count when they arrive.

The quorum and the window after it are those of Decoupled DiLoCo (Douillard et al., arXiv 2604.21428), in which all
learners' work counts by its samples, whenever it arrives.
"""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from typing import Annotated

from pydantic import Field

from socflower.cluster import TaskGraph, Usage, VirtualClock
from socflower.cluster.virtual_clock import Pace
from socflower.errors import ConfigError
from socflower.field_rules import checked
from socflower.hierarchy.communication_groups import conflicts
from socflower.hierarchy.interval_costs import (
    ChangingSteps,
    IntervalCosts,
    rounding_s,
    with_groups,
)
from socflower.hierarchy.plan import Group, GroupPlan
from socflower.hierarchy.rebalancing import CapacitiesInUse
from socflower.hierarchy.sync_intervals import SyncInterval
from socflower.hierarchy.task_graphs import synchronisation_graph
from socflower.quantities import counted

LATE_ROUNDS = 10

_MOST_PRICED = 1000

QuorumFraction = Annotated[float, Field(gt=0, le=1)]
GraceSeconds = Annotated[float, Field(ge=0, le=1e9)]
LateRounds = Annotated[int, Field(gt=0, le=1_000_000)]


@checked
class Quorum:
    """When a synchronisation ends without the groups that are late.

    It is a fraction, not a number, since the number of groups may follow from other settings and changes while SoCs are
    preempted.

    Parameters
    ----------
    fraction : float
        Part of the groups, rounded up, that must have answered; groups that began in earlier rounds count as well. 1
        waits for all.
    grace_s : float
        Seconds after that in which other groups still count: virtual ones, or real ones on real machines.
    late_rounds : int
        A group that misses more synchronisations than this loses its work.
    """

    fraction: QuorumFraction = 1.0
    grace_s: GraceSeconds = 0.0
    late_rounds: LateRounds = LATE_ROUNDS

    def check(self) -> None:
        """Refuse settings of late groups if none can be late."""
        for key, default in (("grace_s", 0.0), ("late_rounds", LATE_ROUNDS)):
            if self.fraction == 1 and getattr(self, key) != default:
                raise ConfigError(
                    f"{key} = {getattr(self, key)} is for late groups, and quorum = 1 waits for all; "
                    "leave it out, or give a smaller quorum"
                )

    def num_groups(self, of: int) -> int:
        """Return how many of so many groups end a synchronisation."""
        # The exact decimal fraction: 0.7 of 10 is 7.
        return math.ceil(Fraction(repr(float(self.fraction))) * of)

    def fault(self, of: int, least_together: int = 1) -> str:
        """Return why no group of so many can be late, so that the quorum changes nothing; empty if one can.

        `least_together` is the size of the smallest set of groups that are late together.
        """
        if self.fraction < 1 and of > self.num_groups(of) > of - least_together:
            return (
                f"of {counted(of, 'group')} those that share an uplink are late together, at least "
                f"{least_together}, which leaves {of - least_together}; give a smaller quorum, or other groups"
            )
        if self.fraction < 1 and self.num_groups(of) == of:
            instead = f", or give at most {math.floor(100 * (of - 1) / of) / 100}" if of > 1 else ""
            return f"of {counted(of, 'group')} it is all of them; leave it out{instead}"
        return ""

    def ends_s(self, answers_s: Collection[float], num_groups: int) -> float:
        """Return when a synchronisation ends, from the times at which groups answer.

        With q of `num_groups` as the quorum, or all answers if there are fewer, it is the q-th answer plus the grace,
        or the last answer if that is earlier.
        """
        ordered = sorted(answers_s)
        last = min(self.num_groups(num_groups), len(ordered)) - 1
        return min(ordered[last] + self.grace_s, ordered[-1])


def run_to_quorum(
    work: IntervalCosts,
    interval: SyncInterval,
    clock: VirtualClock,
    quorum: Quorum,
    pace: Pace,
    *,
    late: Collection[int] = (),
    lost: Collection[int] = (),
    capacities: CapacitiesInUse | None = None,
) -> tuple[Usage, frozenset[int]]:
    """Run an interval on the clock until its synchronisation has ended; return the usage, and who is late after it.

    Groups in `late` continue with steps of earlier intervals, whose progress in `pace` is advanced.
    They also work while the others exchange data and models. Groups in `lost` have no model and do not count. Groups
    that share an uplink are late together, as the time of their steps is not known apart. Steps cost what the first one
    of the interval does. Uploads of groups that answer early overlap with the steps of the others; the last one begins
    when the grace is over. The heat of radios in an exchange beside late groups is not simulated.
    """
    plan = work.plan
    fresh = with_groups(plan, [group for group in plan.groups if group.group_id not in late])
    steps = ChangingSteps(work, clock, capacities or CapacitiesInUse(1.0), {}, interval.first_step)
    usage = Usage()
    pace.clear(fresh.participants)
    for soc in fresh.participants:
        pace.ended_s.pop(soc, None)
    if work.begins_with_deal(interval):
        num_bytes = work.num_samples / len(plan.participants) * work.profile.input_bytes
        deal = replace(work.distribution(fresh, num_bytes), participants=plan.participants)
        usage += _run_beside(steps, clock, pace, deal, clock.now_s, "deal data")
    pace.remaining |= dict.fromkeys(fresh.participants, interval.num_steps)
    begin_s = clock.now_s
    waited_for = [
        [group for group in together if group.group_id not in lost]
        for together in late_together(plan)
    ]

    def end_s(ends_s: Mapping[int, float]) -> float:
        answers_s: list[float] = []
        for together in waited_for:
            own_s = [_answer_s(group, pace, ends_s, begin_s) for group in together]
            answers_s += [max(own_s)] * len(own_s) if own_s else []
        at_s = quorum.ends_s(answers_s, len(plan.groups))
        # A group is new beside late ones with which it shares an uplink, since its work was lost.
        return min(at_s, *ends_s.values()) if math.inf in ends_s.values() else at_s

    usage += steps.advance(pace, f"to epoch {interval.epoch_end:g}", end_s)
    behind = _behind(plan, pace, waited_for, rounding_s(begin_s, clock.now_s))
    arrived = [group for own in waited_for for group in own if group.group_id not in behind]
    # A group that is lost stops here.
    pace.clear(
        soc for group in plan.groups if group.group_id not in behind for soc in group.members
    )
    if len(plan.groups) > 1 and arrived:
        answers_s = {group.leader: _answer_s(group, pace, {}, begin_s) for group in arrived}
        models, first_s = _models_of_arrived(
            work, arrived, answers_s, begin_s, clock.now_s, some_are_late=bool(behind)
        )
        usage += _run_beside(steps, clock, pace, models, first_s, "synchronisation")
    return usage, behind


def _behind(
    plan: GroupPlan, pace: Pace, waited_for: Sequence[Sequence[Group]], tolerance_s: float
) -> frozenset[int]:
    """Return the groups that have steps left, and those that share an uplink with them."""
    behind = {
        group.group_id
        for group in plan.groups
        for soc in group.members
        if pace.remaining[soc] or pace.ahead_s.get(soc, 0.0) > tolerance_s
    }
    return frozenset(
        group.group_id
        for together in waited_for
        for group in together
        if any(other.group_id in behind for other in together)
    )


def _models_of_arrived(
    work: IntervalCosts,
    arrived: Sequence[Group],
    answers_s: Mapping[int, float],
    begin_s: float,
    now_s: float,
    *,
    some_are_late: bool,
) -> tuple[TaskGraph, float]:
    """Return the exchange of the models of groups that have arrived, and when its first upload begins."""
    done_s = {leader: min(max(at_s, begin_s), now_s) for leader, at_s in answers_s.items()}
    if some_are_late:
        # The last upload begins when the grace is over.
        done_s[max(done_s, key=done_s.__getitem__)] = now_s
    first_s = min(done_s.values())
    if now_s - first_s <= rounding_s(begin_s, now_s):
        done_s, first_s = {}, now_s
    models = synchronisation_graph(
        with_groups(work.plan, arrived),
        work.exchange,
        work.cluster,
        models=work.models,
        delays_s={leader: at_s - first_s for leader, at_s in done_s.items()},
    )
    return replace(models, participants=work.plan.participants), first_s


def training_usage(
    work: IntervalCosts, intervals: Sequence[SyncInterval], clock: VirtualClock, quorum: Quorum
) -> Usage:
    """Return the usage of a whole training with a quorum; of a long one, in proportion to its first rounds."""
    usage, pace, began = Usage(), Pace({}), dict[int, int]()
    priced = intervals[:_MOST_PRICED]
    for number, interval in enumerate(priced, 1):
        own, late = run_to_quorum(work, interval, clock, quorum, pace, late=began)
        usage += own
        began = {ident: began.get(ident, number) for ident in late}
        began = {
            ident: first
            for ident, first in began.items()
            if number + 1 - first <= quorum.late_rounds
        }
    return usage * (len(intervals) / len(priced))


def late_together(plan: GroupPlan) -> list[list[Group]]:
    """Return the groups in sets that share uplinks, directly or through others, in order of their first group."""
    # See `communication_groups`.
    import networkx as nx

    sharing = nx.Graph(conflicts(plan.groups))
    by_id = {group.group_id: group for group in plan.groups}
    found = [sorted(ids) for ids in nx.connected_components(sharing)]
    return [[by_id[ident] for ident in ids] for ids in sorted(found)]


def _answer_s(group: Group, pace: Pace, ends_s: Mapping[int, float], begin_s: float) -> float:
    """Return when a group answers: after its steps, whose predicted ends are in `ends_s`."""
    if any(pace.remaining[soc] or pace.ahead_s.get(soc, 0.0) > 0.0 for soc in group.members):
        # Without a member that is present it does not.
        return max((ends_s[soc] for soc in group.members if soc in ends_s), default=math.inf)
    return max(pace.ended_s.get(soc, begin_s) for soc in group.members)


def _run_beside(
    steps: ChangingSteps,
    clock: VirtualClock,
    pace: Pace,
    graph: TaskGraph,
    since_s: float,
    label: str,
) -> Usage:
    """Run an exchange that began at `since_s`, during which late groups continue with their steps."""
    whole_s = clock.predicted_s(graph)
    usage = steps.advance(pace, "late groups", lambda _: since_s + whole_s)
    ahead_s = clock.now_s - since_s
    if ahead_s >= whole_s - rounding_s(since_s, clock.now_s):
        ahead_s = whole_s
    return usage + clock.run(graph, label=label, head_start_s=ahead_s)
