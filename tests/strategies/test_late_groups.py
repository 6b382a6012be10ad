"""Groups that are late for a quorum: their change counts once, by its samples, in the round in which it arrives."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Message
from flwr.serverapp.strategy import FedAvg
from hypothesis import given, settings
from hypothesis import strategies as st

from socflower.cluster import DeviceDynamics, parse_cluster
from socflower.hierarchy import Quorum
from socflower.precision.processor_costs import Int8Pricing, MixedPricing
from socflower.sim import EventClock
from socflower.strategies.baselines import RingAllReduce
from socflower.strategies.local_sgd import DiLoCo
from socflower.strategies.methods.late_groups import added, change_of
from socflower.strategies.reply_events import ARRIVED, LATE, LATE_DROPPED
from socflower.strategies.socflow import SoCFlow
from tests.one_line import refused
from tests.strategies.fake_messages import FakeGrid, answer, answer_error, model, values
from tests.strategies.options import grouped
from tests.strategies.test_socflow import PROFILE, task_of
from tests.toy_clusters import Weather

SLOW = (1.0, 0.3, 1.0, 1.0)
LATE_EVENTS = (LATE, ARRIVED, LATE_DROPPED)


def strategy(speeds: Sequence[float] = SLOW, kind: type[SoCFlow] = SoCFlow, **changes: Any) -> Any:
    """Four SoCs, each a group; eight rounds of five steps, and three of the groups are a quorum."""
    cluster = parse_cluster({"boards": [2, 2]})
    dynamics = cast(DeviceDynamics, Weather((0.0, list(speeds), ())))
    options: dict[str, Any] = {
        "cluster": cluster,
        "groups": 4,
        "num_samples": 200,
        "batch_size": 10,
        "num_epochs": 8,
        "interval_epochs": 1.0,
        "reshuffle": False,
        "quorum": Quorum(fraction=0.75),
        "model_profile": PROFILE,
        "clock": EventClock(cluster, dynamics),
    }
    if kind is not SoCFlow:
        del options["groups"]
    made = kind(**grouped(**(options | changes)))
    # As after `start`: no strategy is around it.
    made._is_started = True
    return made


def rounds(
    of: Any, first: int, last: int, arrays: ArrayRecord
) -> list[tuple[dict[int, float], list[tuple[str, int]], ArrayRecord]]:
    """Train as clients that add 2 ** group * round; return who was asked, events, and the model of each round."""
    done = []
    for number in range(first, last + 1):
        sent = of.configure_train(number, arrays, ConfigRecord({}), FakeGrid())
        asked = {task_of(message).group_id: change(number, message) for message in sent}
        begin = values(arrays)[0]
        replies = [
            answer(message, begin + change(number, message), samples(message)) for message in sent
        ]
        arrays = of.aggregate_train(number, replies)[0]
        events = [
            (event.kind, event.group_id)
            for event in of.reports[-1].events
            if event.kind in LATE_EVENTS
        ]
        done.append((asked, events, arrays))
    return done


def change(number: int, message: Message) -> float:
    return float(2 ** task_of(message).group_id * number)


def samples(message: Message) -> int:
    return 10 * (1 + task_of(message).group_id)


def test_the_next_model_is_the_mean_of_all_that_arrive() -> None:
    """Against the formula, with what the events say of who is late when."""
    w, pending = 0.0, dict[int, float]()
    for asked, events, arrays in rounds(strategy(), 1, 8, model()):
        assert not asked.keys() & pending.keys()
        arriving = dict(asked)
        for kind, group in events:
            if kind == LATE:
                pending[group] = arriving.pop(group)
            elif kind == ARRIVED:
                arriving[group] = pending.pop(group)
            else:
                pending.pop(group)
        weights = {group: 10 * (1 + group) for group in arriving}
        w = sum(weights[group] * (w + arriving[group]) for group in arriving) / sum(
            weights.values()
        )
        assert values(arrays) == pytest.approx([w] * 3, rel=1e-6)
        w = values(arrays)[0]
    assert not pending


@settings(max_examples=15, deadline=None)
@given(
    speeds=st.lists(st.sampled_from([0.15, 0.4, 0.7, 1.0]), min_size=4, max_size=4),
    fraction=st.sampled_from([0.25, 0.5, 0.75]),
    late_rounds=st.integers(1, 4),
)
def test_the_work_of_a_late_group_counts_exactly_once(
    speeds: Sequence[float], fraction: float, late_rounds: int
) -> None:
    of = strategy(speeds, quorum=Quorum(fraction=fraction, late_rounds=late_rounds))
    asked = counted = dropped = 0
    for begun, events, _ in rounds(of, 1, 8, model()):
        asked += sum(10 * (1 + group) for group in begun)
        dropped += sum(10 * (1 + group) for kind, group in events if kind == LATE_DROPPED)
        counted += sum(10 * (1 + group) for group in begun if (LATE, group) not in events) + sum(
            10 * (1 + group) for kind, group in events if kind == ARRIVED
        )
    assert counted + dropped == asked
    if min(speeds) == max(speeds):
        assert not dropped and counted == 8 * 100


def test_replies_in_any_order_make_the_same_model() -> None:
    results = []
    for order in (1, -1):
        of, arrays = strategy(), model()
        for number in range(1, 6):
            sent = of.configure_train(number, arrays, ConfigRecord({}), FakeGrid())
            replies = [answer(each, 0.1 * change(number, each), samples(each)) for each in sent]
            arrays = of.aggregate_train(number, replies[::order])[0]
        results.append(values(arrays))
    assert results[0] == results[1]


def test_a_quorum_of_all_is_no_quorum() -> None:
    whole, none = strategy(quorum=Quorum()), strategy(quorum=Quorum(fraction=1))
    for (_, events, one), (_, _, other) in zip(
        rounds(whole, 1, 8, model()), rounds(none, 1, 8, model()), strict=True
    ):
        assert not events and values(one) == values(other)
    assert whole.method.work.clock.usage == none.method.work.clock.usage
    assert "late" not in whole.state


def test_an_outer_strategy_gets_the_same_models() -> None:
    """FedAvg's mean of them is ours."""
    plain, outer = strategy(), strategy(outer=FedAvg(fraction_evaluate=0.0))
    for (*_, one), (*_, other) in zip(
        rounds(plain, 1, 8, model()), rounds(outer, 1, 8, model()), strict=True
    ):
        assert values(other) == pytest.approx(values(one), rel=1e-6)


def test_a_method_with_as_many_groups_as_socs_has_late_ones() -> None:
    of = strategy(kind=DiLoCo)
    assert any(events for _, events, _ in rounds(of, 1, 8, model()))


def test_the_optimiser_of_a_late_group_goes_on() -> None:
    """Its next task says how many steps the others have done meanwhile."""
    of, arrays, missed = strategy(), model(), []
    for number in range(1, 7):
        sent = of.configure_train(number, arrays, ConfigRecord({}), FakeGrid())
        missed += [
            (number, task_of(each).group_id, task_of(each).missed_steps)
            for each in sent
            if task_of(each).missed_steps
        ]
        arrays = of.aggregate_train(number, [answer(each, 1.0) for each in sent])[0]
    # It began in round 1, arrives in round 3 and trains again in round 4.
    assert missed == [(4, 1, 10)]


@pytest.mark.few_cells(2)
@pytest.mark.parametrize("after", range(1, 8))
def test_a_resumed_training_has_late_groups(after: int) -> None:
    whole, begun, resumed = strategy(), strategy(), strategy()
    expected = rounds(whole, 1, 8, model())
    halfway = rounds(begun, 1, after, model())
    resumed.resume_from(after, **begun.state)
    resumed.method.work.clock.restore(begun.method.work.clock.state())
    ours = rounds(resumed, after + 1, 8, halfway[-1][2])
    assert [(asked, events, values(arrays)) for asked, events, arrays in ours] == [
        (asked, events, values(arrays)) for asked, events, arrays in expected[after:]
    ]
    assert resumed.method.work.clock.usage == whole.method.work.clock.usage


def test_real_groups_that_were_late_are_lost_with_the_server() -> None:
    """What they began with is not kept: nobody could tell their answers from others'."""
    begun, resumed = strategy(), strategy()
    rounds(begun, 1, 1, model())
    (ident, work), *_ = begun.method.late.held.items()
    begun.method.late.held[ident] = replace(work, change=None, base=model())
    resumed.resume_from(1, **begun.state)
    asked, events, _ = rounds(resumed, 2, 2, model())[0]
    assert ident in asked and (LATE_DROPPED, ident) in events


def test_nodes_of_late_groups_do_not_evaluate() -> None:
    of = strategy()
    rounds(of, 1, 1, model())
    assert 1 not in of.method.outer_models.nodes(of.round, FakeGrid()).soc_of_node.values()


def test_a_group_that_is_too_late_begins_again() -> None:
    of = strategy(quorum=Quorum(fraction=0.75, late_rounds=1))
    (_, first, _), (asked, second, _), (again, *_) = rounds(of, 1, 3, model())
    assert (first, second) == ([(LATE, 1)], [(LATE_DROPPED, 1)])
    assert 1 not in asked and 1 in again


def test_work_that_the_end_of_the_training_cuts_off_is_an_event() -> None:
    last = rounds(strategy(num_epochs=2), 1, 2, model())[-1]
    assert last[1] == [(LATE_DROPPED, 1)]


def test_a_group_that_fails_is_not_waited_for() -> None:
    """Of four, one is slow and one is lost: the two that are left are all that can answer in time."""
    of = strategy(tolerate_client_errors=True)
    sent = of.configure_train(1, model(), ConfigRecord({}), FakeGrid())
    replies = [answer(message, 1.0) for message in sent[:3]]
    of.aggregate_train(1, [*replies, answer_error(sent[3], 2, "broken")])
    kinds = {(event.kind, event.group_id) for event in of.reports[-1].events}
    assert ("client-raised", 3) in kinds
    asked = of.configure_train(2, model(), ConfigRecord({}), FakeGrid())
    assert 3 in [task_of(message).group_id for message in asked]


def test_a_new_plan_drops_late_work_of_groups_that_it_changes() -> None:
    of = strategy()
    rounds(of, 1, 1, model())
    sent = of.configure_train(2, model(), ConfigRecord({}), FakeGrid((10, 30, 40)))
    of.aggregate_train(2, [answer(message, 1.0) for message in sent])
    assert LATE_DROPPED in [event.kind for event in of.reports[-1].events]


def test_without_a_clock_all_arrive() -> None:
    of = strategy(clock=None)
    assert not any(events for _, events, _ in rounds(of, 1, 8, model()))


def test_infinite_constants_and_counters_stay() -> None:
    def record(*numbers: float) -> ArrayRecord:
        return ArrayRecord(
            {
                "mask": Array(np.array([-np.inf, numbers[0]], np.float32)),
                "count": Array(np.array(int(numbers[1]), np.int64)),
            }
        )

    got = added(
        {name: array.numpy() for name, array in record(5, 10).items()},
        change_of(record(3, 7), record(1, 4)),
    )
    assert got["mask"].tolist() == [-np.inf, 7.0]
    assert got["count"].tolist() == 13 and got["count"].dtype == np.int64


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"groups": 1}, "quorum"),
        ({"quorum": Quorum(fraction=0.9)}, "all of them"),
        ({"quorum": 0.5}, "Quorum(…)"),
        ({"leaders": "ring"}, "leaders = 'ring'"),
        ({"leader_compression": "int8", "leaders": "ring"}, "leader_compression"),
        ({"pricing": Int8Pricing()}, "int8"),
        ({"pricing": MixedPricing(rule="paper")}, "mixed"),
        ({"kind": RingAllReduce}, "quorum"),
    ],
)
def test_what_a_quorum_does_not_go_with_is_refused(changes: dict[str, Any], named: str) -> None:
    refused(lambda: strategy(**changes), named)


def test_a_strategy_around_it_is_refused() -> None:
    of = strategy()
    of._is_started = False
    refused(lambda: rounds(of, 1, 1, model()), "quorum = 0.75", "around")
