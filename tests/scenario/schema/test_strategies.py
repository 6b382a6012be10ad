"""The registry of strategies: every target is there, and nothing without groups passes for a strategy with them."""

from importlib import import_module

import pytest

from socflower import SoCFlow
from socflower.scenario.schema.strategies import (
    STRATEGIES,
    GroupStrategy,
    family_of,
    group_strategy,
)
from tests.one_line import refused


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(kind, id=name)
        for name, kind in STRATEGIES.items()
        if isinstance(kind, GroupStrategy)
    ],
)
def test_every_target_is_a_strategy_with_groups(kind: GroupStrategy) -> None:
    module, _, name = kind.target.partition(":")
    assert issubclass(getattr(import_module(module), name), SoCFlow)


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
