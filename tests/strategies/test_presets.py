"""The presets: each class fixes what its entry says, and nothing without groups passes for a strategy with them."""

from dataclasses import replace
from importlib import import_module
from typing import Any

import pytest

from socflower import SoCFlow
from socflower.cluster import parse_cluster
from socflower.hierarchy import Quorum, plan_groups
from socflower.strategies.presets import (
    STRATEGIES,
    GroupStrategy,
    family_of,
    group_strategy,
)
from socflower.strategies.settings import ExchangeSettings, Grouping, TrainingSchedule
from tests.one_line import refused

GROUPED = [name for name, kind in STRATEGIES.items() if isinstance(kind, GroupStrategy)]
CLUSTER = parse_cluster({"boards": [2, 2]})


def _class_of(kind: GroupStrategy) -> type[SoCFlow]:
    module, _, name = kind.target.partition(":")
    found: type[SoCFlow] = getattr(import_module(module), name)
    return found


@pytest.mark.parametrize("name", GROUPED)
def test_a_class_fixes_what_its_entry_says(name: str) -> None:
    """The optimiser is the client's, so a preset may share the class of one with another optimiser."""
    kind = group_strategy(name)
    own = _class_of(kind).preset
    assert replace(own, about=kind.about, optimizer=kind.optimizer) == kind


def test_an_entry_without_a_class_is_a_baseline() -> None:
    preset = GroupStrategy(num_groups=1, interval_epochs=1.0, compression="int8")
    schedule = TrainingSchedule(num_samples=100, batch_size=10, num_epochs=3)
    strategy = SoCFlow(cluster=CLUSTER, schedule=schedule, preset=preset)
    (group,) = strategy.plan.groups
    task = strategy.method.messages.task(group, strategy.method.sync.intervals[0])
    assert (strategy.num_rounds, task.members) == (3, (0, 1, 2, 3))
    assert task.compression.startswith("int8")


@pytest.mark.parametrize(
    ("name", "settings", "named"),
    [
        ("ring", {"groups": 2}, "groups = 2"),
        ("ring", {"groups": plan_groups(CLUSTER, 2)}, "groups = 2"),
        ("sgd", {"groups": Grouping(num_socs=3)}, "3 SoCs"),
        ("ring", {"exchange": ExchangeSettings(exchange="server")}, "exchange = 'server'"),
        ("hipress", {"exchange": ExchangeSettings(compression="int8")}, "compression = 'int8'"),
        ("tree-fedavg", {"exchange": ExchangeSettings(leaders="ring")}, "leaders = 'ring'"),
        ("streaming-diloco", {"groups": 2}, "groups"),
        ("tree-fedavg", {"quorum": Quorum(fraction=0.5)}, "quorum"),
    ],
)
def test_a_preset_refuses_other_values_than_its_own(
    name: str, settings: dict[str, Any], named: str
) -> None:
    make = _class_of(group_strategy(name))
    schedule = TrainingSchedule(num_samples=100, batch_size=10, num_epochs=3, interval_epochs=1.0)
    refused(lambda: make(cluster=CLUSTER, schedule=schedule, **settings), named)


def test_families_are_those_with_a_cloud_and_those_without() -> None:
    assert {"socflow", "ring", "ps", "fedavg", "sgd", "hybrid-pipeline"} < set(family_of("ring"))
    assert set(family_of("splitfed")) == set(STRATEGIES) - set(family_of("ring"))


@pytest.mark.parametrize(
    ("name", "named"), [("fedavg", "'socflow', 'ring', 'ps'"), ("splitfed", "no groups")]
)
def test_what_has_no_groups_is_refused_with_those_that_have(name: str, named: str) -> None:
    refused(lambda: group_strategy(name), named)


@pytest.mark.parametrize(
    ("asked", "one_group"), [(0.25, 0.25), (1.0, 1.0), (2.0, 1.0), ("decay", 1.0)]
)
def test_one_group_is_evaluated_as_often_as_groups_and_at_least_once_an_epoch(
    asked: float | str,
    one_group: float,
) -> None:
    for name in ("ring", "sgd"):
        assert group_strategy(name).sync_interval_epochs(asked) == one_group
    assert group_strategy("socflow").sync_interval_epochs(asked) == asked
