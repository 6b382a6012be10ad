"""Settings of a wrong type are refused in one line that names the value, and not taken for something else."""

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest

from socflower.cluster import parse_cluster
from socflower.peers.ring.settings import RingSettings
from socflower.strategies.baselines import RingAllReduce, SingleDevice
from socflower.strategies.group_grid import GroupGrid
from socflower.strategies.settings import Costs, ExchangeSettings, Grouping, TrainingSchedule
from socflower.strategies.socflow import SoCFlow
from tests.one_line import refused
from tests.strategies.test_socflow import socflow


def schedule(**changes: Any) -> TrainingSchedule:
    return TrainingSchedule(**({"num_samples": 100, "batch_size": 10, "num_epochs": 2} | changes))


def strategy(kind: Callable[..., SoCFlow] = SoCFlow, **changes: Any) -> SoCFlow:
    return kind(
        **({"cluster": parse_cluster({"boards": [2, 2]}), "schedule": schedule()} | changes)
    )


WRONG: list[tuple[Callable[..., object], str, list[object]]] = [
    (schedule, "reshuffle", ["false", 0, np.True_]),
    (schedule, "seed", ["8", [], None, True]),
    (schedule, "num_samples", [True]),
    (schedule, "batch_size", [np.float64(8.0)]),
    (schedule, "interval_epochs", [None]),
    (Grouping, "num_groups", ["8"]),
    (Grouping, "num_socs", [2.5]),
    (Costs, "pricing", [None]),
    (Costs, "model_profile", ["x"]),
    (Costs, "clock", [3]),
    (ExchangeSettings, "overlap_buckets", [True]),
    (RingSettings, "heartbeat_s", ["8"]),
    (RingSettings, "rendezvous_s", [None]),
    (GroupGrid, "grid", [None]),
    (strategy, "cluster", [None]),
    (strategy, "schedule", [3]),
    (strategy, "costs", [None]),
    (strategy, "exchange", [None, RingSettings()]),
    (strategy, "rings", [3]),
    (strategy, "rebalancing", [True]),
    (strategy, "tolerate_client_errors", ["no"]),
    (strategy, "groups", ["8", 2.5, True]),
]


@pytest.mark.parametrize(("make", "key", "values"), WRONG)
def test_a_setting_of_a_wrong_type_is_refused(
    make: Callable[..., object], key: str, values: list[object]
) -> None:
    for value in values:
        refused(partial(make, **{key: value}), f"{key} = ")


@pytest.mark.parametrize("kind", [RingAllReduce, SingleDevice])
def test_the_comparators_refuse_a_schedule_that_is_none(kind: type[SoCFlow]) -> None:
    refused(lambda: strategy(kind, schedule=3), f"{kind.__name__}", "TrainingSchedule")


@pytest.mark.parametrize(
    ("arguments", "state", "text"),
    [
        (["1"], {}, "server_round"),
        ([1.5], {}, "server_round"),
        ([True], {}, "server_round"),
        ([1], {"away": [99]}, "resume_from"),
        ([1], {"planned_without": [99]}, "planned_without"),
    ],
)
def test_a_resume_from_what_cannot_be_is_refused_and_changes_nothing(
    arguments: list[Any], state: dict[str, Any], text: str
) -> None:
    ours = socflow()
    refused(lambda: ours.resume_from(*arguments, **state), text)
    assert ours.resumed_after == 0 and ours.state["away"] == []
