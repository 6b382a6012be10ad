"""Settings of a wrong type are refused in one line that names the value, and not taken for something else."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from socflower.cluster import parse_cluster
from socflower.errors import ConfigError
from socflower.peers.ring.settings import RingSettings
from socflower.strategies.comparators import RingAllReduce, SingleDevice
from socflower.strategies.group_grid import GroupGrid
from socflower.strategies.settings import Costs, ExchangeSettings, Grouping, TrainingSchedule
from socflower.strategies.socflow import SoCFlow
from tests.strategies.test_socflow import socflow

COUNT = "a whole number, 1 or more"


def schedule(**changes: Any) -> TrainingSchedule:
    return TrainingSchedule(**({"num_samples": 100, "batch_size": 10, "num_epochs": 2} | changes))


def strategy(kind: Callable[..., SoCFlow] = SoCFlow, **changes: Any) -> SoCFlow:
    return kind(
        **({"cluster": parse_cluster({"boards": [2, 2]}), "schedule": schedule()} | changes)
    )


WRONG: list[tuple[Callable[..., object], str, object, str]] = [
    (schedule, "reshuffle", "false", "TrainingSchedule: reshuffle = 'false' must be True or False"),
    (schedule, "reshuffle", 0, "TrainingSchedule: reshuffle = 0 must be True or False"),
    (schedule, "reshuffle", np.True_, "must be True or False"),
    (schedule, "seed", "8", "TrainingSchedule: seed = '8' must be a whole number"),
    (schedule, "seed", [], "seed = [] must be a whole number"),
    (schedule, "seed", None, "seed = None must be"),
    (schedule, "seed", True, "seed = True must be"),
    (schedule, "num_samples", True, f"num_samples = True must be {COUNT}"),
    (schedule, "batch_size", np.float64(8.0), f"batch_size = 8.0 must be {COUNT}"),
    (
        schedule,
        "interval_epochs",
        None,
        "TrainingSchedule: interval_epochs = None must be a number above 0",
    ),
    (Grouping, "num_groups", "8", f"Grouping: num_groups = '8' must be {COUNT}"),
    (Grouping, "num_socs", 2.5, f"Grouping: num_socs = 2.5 must be {COUNT}, or None for all"),
    (Costs, "pricing", None, "Costs: pricing = None must be a Pricing"),
    (Costs, "model_profile", "x", "Costs: model_profile = 'x' must be a ModelProfile"),
    (Costs, "clock", 3, "Costs: clock = 3 must be a VirtualClock"),
    (
        ExchangeSettings,
        "overlap_buckets",
        True,
        f"ExchangeSettings: overlap_buckets = True must be {COUNT}",
    ),
    (
        RingSettings,
        "heartbeat_s",
        "8",
        "RingSettings: heartbeat_s = '8' must be a number above 0 and at most 10000000",
    ),
    (
        RingSettings,
        "rendezvous_s",
        None,
        "RingSettings: rendezvous_s = None must be a number above 0 and at most 10000000",
    ),
    (GroupGrid, "grid", None, "GroupGrid: grid = None must be the Grid"),
    (strategy, "cluster", None, "SoCFlow: cluster = None must be a Cluster"),
    (strategy, "schedule", 3, "SoCFlow: schedule = 3 must be TrainingSchedule(…)"),
    (strategy, "costs", None, "SoCFlow: costs = None must be Costs(…)"),
    (strategy, "exchange", None, "SoCFlow: exchange = None must be ExchangeSettings(…)"),
    (strategy, "exchange", RingSettings(), "must be ExchangeSettings(…)"),
    (strategy, "rings", 3, "SoCFlow: rings = 3 must be RingSettings(…)"),
    (strategy, "rebalancing", True, "SoCFlow: rebalancing = True must be Rebalancing(…) or None"),
    (
        strategy,
        "tolerate_client_errors",
        "no",
        "SoCFlow: tolerate_client_errors = 'no' must be True or False",
    ),
    *(
        (
            strategy,
            "groups",
            groups,
            f"SoCFlow: groups = {groups!r} must be a whole number, Grouping(…) or a GroupPlan",
        )
        for groups in ("8", None, 2.5, True)
    ),
]


@pytest.mark.parametrize(("make", "key", "value", "text"), WRONG)
def test_a_setting_of_a_wrong_type_is_refused(
    make: Callable[..., object], key: str, value: object, text: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        make(**{key: value})
    assert text in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("kind", [RingAllReduce, SingleDevice])
def test_the_comparators_refuse_a_schedule_that_is_none(kind: type[SoCFlow]) -> None:
    with pytest.raises(
        ConfigError, match=rf"{kind.__name__}: schedule = 3 must be TrainingSchedule"
    ):
        strategy(kind, schedule=3)


@pytest.mark.parametrize(
    ("arguments", "state", "text"),
    [
        (["1"], {}, "resume_from: server_round = '1' must be a whole number"),
        ([1.5], {}, "resume_from: server_round = 1.5 must be"),
        ([True], {}, "resume_from: server_round = True must be"),
        ([1], {"away": [99]}, "resume_from: away has 99, which is no SoC of the plan"),
        ([1], {"planned_without": [99]}, "resume_from: planned_without has 99"),
    ],
)
def test_a_resume_from_what_cannot_be_is_refused_and_changes_nothing(
    arguments: list[Any],
    state: dict[str, Any],
    text: str,
) -> None:
    ours = socflow()
    with pytest.raises(ConfigError) as caught:
        ours.resume_from(*arguments, **state)
    assert text in str(caught.value) and "\n" not in str(caught.value)
    assert ours.resumed_after == 0 and ours.state["away"] == []
