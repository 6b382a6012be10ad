"""The registry of strategies: every target is there, and nothing without groups passes for a strategy with them."""

from importlib import import_module
from typing import Any

import pytest

from socflower import SoCFlow
from socflower.errors import ConfigError
from socflower.scenario.schema.config import StrategyConfig
from socflower.scenario.schema.file import parse_scenario
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


_OF_ONE_KEY: dict[str, Any] = {
    "groups": 2,
    "group_rule": "paper",
    "socs": 3,
    "sync_interval_epochs": 0.5,
    "doubling_epochs": 2,
    "post_local_epochs": 1,
    "server_interval": 2,
    "reshuffle": False,
    "dispatch": True,
    "uplink_turns": False,
    "overlap_buckets": 4,
    "exchange": "server",
    "compression": "fp16",
    "leaders": "ring",
    "leader_compression": "int4",
    "fusion": "per-tensor",
    "quorum": 0.5,
    "grace_s": 1.0,
    "preemption": "groups",
    "use_spares": True,
    "tolerate_client_errors": True,
    "rebalance": "both",
    "rebalance_steps": 2,
    "streaming": {"fragments": 2},
    "outer": {"name": "fedadam"},
}


def test_every_key_has_a_value_above() -> None:
    assert set(_OF_ONE_KEY) == set(StrategyConfig.model_fields) - {"name"}


@pytest.mark.parametrize("name", STRATEGIES)
def test_a_key_is_read_or_refused_by_its_name(name: str) -> None:
    cluster = {"boards": 2, "socs_per_board": 2}
    more = {"edgecloud": {}} if name in family_of("splitfed") else {}
    for key, value in _OF_ONE_KEY.items():
        for groups in ({}, {"groups": 2} if key != "groups" else {}):
            strategy = {"name": name, **groups, key: value}
            document = {"cluster": cluster, "strategy": strategy, "site": {"servers": 2}, **more}
            try:
                parse_scenario(document, name="case", question="", where="case")
            except ConfigError as error:
                line = str(error)
                assert "\n" not in line
                assert any(
                    f"[strategy] {named}" in line or f"[strategy.{named}]" in line
                    for named in strategy
                ), line
