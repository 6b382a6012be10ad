"""A quorum on the clock: who is late, how long a synchronisation takes, and that all work is priced once."""

from collections.abc import Sequence
from typing import Any, cast

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from socflower.cluster import Activity, Cluster, DeviceDynamics, Usage
from socflower.cluster.virtual_clock import Pace
from socflower.errors import ConfigError
from socflower.hierarchy import IntervalCosts, Quorum, run_to_quorum, sync_schedule
from socflower.hierarchy.quorum import late_together
from socflower.sim import EventClock
from tests.hierarchy.toy_trainings import interval_costs
from tests.one_line import refused
from tests.toy_clusters import Weather, same_usage, toy_cluster, toy_profile

INTERVALS = sync_schedule(3, 10, 0.5)


def constant(speeds: Sequence[float]) -> DeviceDynamics:
    return cast(DeviceDynamics, Weather((0.0, list(speeds), ())))


def work(speeds: Sequence[float], **changes: Any) -> tuple[IntervalCosts, EventClock]:
    """Each SoC is a group, at a constant speed."""
    cluster: Cluster = toy_cluster((len(speeds),), link=1e8)
    clock = EventClock(cluster, constant(speeds))
    values = {"uplink_turns": False, "reshuffle": False, "profile": toy_profile(1e8, 4e5)}
    return interval_costs(cluster, len(speeds), **(values | changes)), clock


def trained(
    speeds: Sequence[float], quorum: Quorum, **changes: Any
) -> tuple[list[Usage], list[list[int]]]:
    """Return the usage of each round, and who was late after it."""
    costs, clock = work(speeds, **changes)
    pace, usages, rounds = Pace({}), list[Usage](), list[list[int]]()
    late: frozenset[int] = frozenset()
    for interval in INTERVALS:
        usage, late = run_to_quorum(costs, interval, clock, quorum, pace, late=late)
        usages.append(usage)
        rounds.append(sorted(late))
    assert clock.now_s == pytest.approx(sum(usage.duration_s for usage in usages))
    return usages, rounds


def whole(speeds: Sequence[float], **changes: Any) -> list[Usage]:
    costs, clock = work(speeds, **changes)
    return [costs.run(interval, clock) for interval in INTERVALS]


SPEEDS = st.lists(st.sampled_from([0.2, 0.3, 0.5, 0.9, 1.0]), min_size=2, max_size=5)


def test_a_very_slow_soc_does_not_set_the_pace() -> None:
    slow = (1.0, 1.0, 1.0, 0.26)
    usages, late = trained(slow, Quorum(fraction=0.75))
    # It has done five steps when the others have done twenty, but for what synchronisations take.
    assert late == [[3], [3], [3], [], [3], [3]]
    fast = whole((1.0, 1.0, 1.0, 1.0))
    assert sum(usage.duration_s for usage in usages) == pytest.approx(
        sum(usage.duration_s for usage in fast), rel=0.05
    )
    assert sum(usage.duration_s for usage in whole(slow)) > 3.0 * sum(
        usage.duration_s for usage in usages
    )


def test_at_equal_speeds_nobody_is_late_and_it_costs_the_same() -> None:
    equal = (0.5,) * 4
    usages, late = trained(equal, Quorum(fraction=0.5), reshuffle=True)
    assert late == [[]] * len(INTERVALS)
    for usage, expected in zip(usages, whole(equal, reshuffle=True), strict=True):
        same_usage(usage, expected)


def test_a_grace_that_is_long_enough_waits_for_all() -> None:
    slow = (1.0, 1.0, 0.5)
    usages, late = trained(slow, Quorum(fraction=0.5, grace_s=1e6))
    assert late == [[]] * len(INTERVALS)
    for usage, expected in zip(usages, whole(slow), strict=True):
        assert usage.duration_s == pytest.approx(expected.duration_s, rel=0.01)


def test_who_answers_in_the_grace_counts() -> None:
    # Five steps of 32 samples at 3e8 FLOPs take 48 s on the fast SoCs.
    slow = (1.0, 1.0, 0.9, 0.5)
    for grace_s, late in ((0.0, [2, 3]), (10.0, [3])):
        assert trained(slow, Quorum(fraction=0.5, grace_s=grace_s))[1][0] == late


@settings(max_examples=30, deadline=None)
@given(speeds=SPEEDS, fraction=st.sampled_from([0.2, 0.5, 0.75]))
def test_steps_are_priced_once_whenever_they_are_done(
    speeds: Sequence[float], fraction: float
) -> None:
    """The seconds of computing are those of the steps that were done; each SoC is counted for the whole time."""
    costs, clock = work(speeds)
    pace, done, late = Pace({}), 0.0, frozenset[int]()
    total = Usage()
    for interval in INTERVALS:
        for soc, speed in enumerate(speeds):
            if soc not in late:
                done += interval.num_steps / speed
        usage, late = run_to_quorum(
            costs, interval, clock, Quorum(fraction=fraction), pace, late=late
        )
        total += usage
    for soc, speed in enumerate(speeds):
        done -= pace.remaining[soc] / speed
    assert total.soc_seconds[Activity.COMPUTE] == pytest.approx(done * costs.costs[0].compute_s)
    # A step is priced as it begins.
    left_s = sum(pace.ahead_s.values())
    assert sum(total.soc_seconds.values()) - left_s == pytest.approx(len(speeds) * total.duration_s)


@settings(max_examples=30, deadline=None)
@given(speeds=SPEEDS, fraction=st.sampled_from([0.2, 0.4, 0.6]), grace_s=st.sampled_from([0, 30]))
def test_the_first_round_ends_as_by_hand(
    speeds: Sequence[float], fraction: float, grace_s: float
) -> None:
    assume(Quorum(fraction=fraction).num_groups(len(speeds)) < len(speeds))
    costs, clock = work(speeds, profile=toy_profile(1e8, 0.0))
    quorum = Quorum(fraction=fraction, grace_s=grace_s)
    cost = costs.costs[0]
    ends = [5 * (cost.compute_s / speed + cost.update_s / speed) for speed in speeds]
    at_s = min(sorted(ends)[quorum.num_groups(len(speeds)) - 1] + grace_s, max(ends))
    usage, late = run_to_quorum(costs, INTERVALS[0], clock, quorum, Pace({}))
    assert usage.duration_s == pytest.approx(at_s)
    assert sorted(late) == [soc for soc, end in enumerate(ends) if end > at_s * (1 + 1e-9)]


def test_groups_that_share_an_uplink_are_late_together() -> None:
    # Groups 0 and 2 are split, with board 1 in common.
    cluster = toy_cluster((5, 5, 5), link=1e8)
    costs = interval_costs(cluster, 5, reshuffle=False, profile=toy_profile(1e8, 4e5))
    shared = [[group.group_id for group in own] for own in late_together(costs.plan)]
    assert shared == [[0, 2], [1], [3], [4]]
    slow = costs.plan.groups[2].members[0]
    clock = EventClock(cluster, constant([0.5 if soc == slow else 1.0 for soc in range(15)]))
    _, late = run_to_quorum(costs, INTERVALS[0], clock, Quorum(fraction=0.6), Pace({}))
    assert sorted(late) == [0, 2]
    assert "uplink" in Quorum(fraction=0.75).fault(5, 2)


@pytest.mark.parametrize(
    ("fraction", "of", "needed"), [(0.7, 10, 7), (0.5, 3, 2), (0.01, 5, 1), (1, 4, 4), (0.75, 1, 1)]
)
def test_a_quorum_is_rounded_up(fraction: float, of: int, needed: int) -> None:
    assert Quorum(fraction=fraction).num_groups(of) == needed


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"fraction": 0}, "fraction"),
        ({"fraction": 1.5}, "fraction"),
        ({"grace_s": 3}, "grace_s = 3"),
        ({"late_rounds": 2}, "late_rounds = 2"),
        ({"fraction": 0.5, "grace_s": -1}, "grace_s"),
        ({"fraction": 0.5, "late_rounds": 0}, "late_rounds"),
    ],
)
def test_what_no_quorum_is_is_refused(values: dict[str, Any], named: str) -> None:
    refused(lambda: Quorum(**values), named, error=ConfigError)
