"""`[strategy]`: each key is read or refused by each strategy."""

from typing import Any

import pytest

from socflower.errors import ConfigError
from socflower.scenario.schema.config import StrategyConfig
from socflower.scenario.schema.file import parse_scenario
from socflower.strategies.presets import STRATEGIES, family_of

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
