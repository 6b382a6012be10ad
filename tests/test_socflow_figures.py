"""Tiny trainings of the benchmark behind SoCFlow+'s Figs. 2c, 10 and 14."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from benchmarks import socflow_figures
from socflower.cluster import parse_cluster
from socflower.engines.ending import Ending
from socflower.paper.socflow_plus.predictions import RING, rack
from socflower.strategies.presets import STRATEGIES

HALF_AN_EPOCH = Ending(most_epochs=0.5)


@pytest.fixture(autouse=True)
def elsewhere(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(socflow_figures, "FOLDER", tmp_path)


def trained(**changes: Mapping[str, Any]) -> dict[str, Any]:
    scenario = socflow_figures._scenario(num_socs=16, changes=changes, epochs=1)
    return socflow_figures._trained(scenario, HALF_AN_EPOCH)


def test_only_time_depends_on_mapping_and_turns() -> None:
    kind = socflow_figures._in_sequence_kind()
    with patch.dict(STRATEGIES, {socflow_figures.IN_SEQUENCE: kind}):
        in_sequence = trained(strategy={"name": socflow_figures.IN_SEQUENCE, "uplink_turns": False})
    mapped = trained(strategy={"uplink_turns": False})
    assert in_sequence["weights"] == mapped["weights"] and mapped["accuracy"] > 0.3
    assert in_sequence["seconds"] > mapped["seconds"] > 0.0
    assert in_sequence["joules"] > mapped["joules"] > 0.0


def test_a_finished_training_is_read_from_its_file(monkeypatch: pytest.MonkeyPatch) -> None:
    scenario = socflow_figures._scenario(RING, 8, epochs=1)
    first = socflow_figures._trained(scenario, Ending(most_epochs=0.1))
    monkeypatch.setattr(socflow_figures, "run_job", None)
    assert socflow_figures._trained(scenario, Ending(most_epochs=0.1)) == first


def test_groups_in_sequence_take_all_socs_in_their_order() -> None:
    cluster = parse_cluster(rack(32))
    plan = socflow_figures.planned_in_sequence(cluster, 8)
    members = [soc for group in plan.groups for soc in group.members]
    assert members == list(range(32)) == list(plan.participants)
    assert {len(group.members) for group in plan.groups} == {4}
    assert plan.contention == 2 and len(plan.communication_groups) == 2
