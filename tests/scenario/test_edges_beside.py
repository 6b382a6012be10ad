"""Edges of a split training beside groups: data, weights, time and what is refused before anything starts."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from socflower.scenario.edges_beside import edges_beside
from socflower.scenario.planning import plan_scenario
from socflower.scenario.runner import run_scenario
from socflower.scenario.schema.config import DataConfig, Scenario
from socflower.scenario.schema.file import load_scenario
from socflower.scenario.schema.split import EdgeCloudConfig
from tests.command_line import Socflower
from tests.scenario.small_runs import small

EVERYTHING = Path(__file__).parents[2] / "scenarios" / "everything.toml"
BESIDE = EdgeCloudConfig(edges=1, edge_device="raspberry-pi-4b", gradient_bits=8)


def trained(scenario: Scenario, tmp_path: Path) -> tuple[dict[str, Any], dict[str, np.ndarray[Any, Any]]]:
    result = run_scenario(scenario, num_workers=0, model_to=tmp_path / "model.npz")
    with np.load(tmp_path / "model.npz") as model:
        return result, dict(model)


@pytest.mark.usefixtures("on_few_digits")
def test_a_round_is_the_groups_alone_and_the_edge_alone_averaged_by_samples(tmp_path: Path) -> None:
    """Each trains its own data from the same start; the round takes as long as the slower one alone."""
    whole = small(interval=1.0).replaced(edgecloud=BESIDE)
    edges = edges_beside(whole).scenario

    def alone(scenario: Scenario, factory: str) -> tuple[dict[str, Any], dict[str, np.ndarray[Any, Any]]]:
        own = DataConfig(factory=f"tests.scenario.beside_data:{factory}", arguments={"num_parts": 3})
        return trained(scenario.replaced(data=own), tmp_path)

    both, model = trained(whole, tmp_path)
    groups, of_groups = alone(whole.replaced(edgecloud=None), "groups")
    edge, of_edge = alone(edges, "edge")
    assert len(both["rounds"]) == 2
    for name, weights in model.items():
        np.testing.assert_allclose(weights, (667 * of_groups[name] + 333 * of_edge[name]) / 1000, atol=1e-6)
    assert both["virtual_s"] == pytest.approx(max(groups["virtual_s"], edge["virtual_s"]), rel=1e-9)
    assert both["bytes"]["wan"] == edge["bytes"]["wan"] > 0.0
    assert both["bytes"]["intra_board"] == pytest.approx(groups["bytes"]["intra_board"])
    assert both["energy_j"] > groups["energy_j"] + edge["energy_j"]
    assert both["trained_on"] == {"cpu": [0, 1, 2, 3, 4]}


@pytest.mark.slow
def test_simulation_trains_the_same_weights() -> None:
    scenario = small(interval=0.5, batch_size=128).replaced(edgecloud=BESIDE.replaced(edges=2))
    local, simulation = (run_scenario(scenario, engine, num_workers=1 if engine == "local" else None)
                         for engine in ("local", "simulation"))
    assert local["weights_sha256"] == simulation["weights_sha256"]


def test_the_plan_has_the_groups_and_the_edges() -> None:
    plan = plan_scenario(load_scenario(EVERYTHING))
    assert len(plan["groups"]) == 4 and [edge["device"] for edge in plan["edges"]["edges"]] == ["raspberry-pi-4b"]


@pytest.mark.parametrize(("changes", "says"), [
    (("edgecloud.edges=0",), "edge_device = 'raspberry-pi-4b' is of edges beside groups, and edges is 0"),
    (("edgecloud.edges=0", 'edgecloud.edge_device=""'), "beside whose groups it needs edges = 1 or more"),
    (('strategy.name="ring"', "strategy.server_interval=1"), "edges = 1 are beside the groups of 'socflow', and"),
    (('strategy.name="split-replay"', "event=[]", 'precision.arithmetic="fp32"', "strategy.server_interval=1"),
     "edges = 1 are beside the groups of 'socflow', and [strategy] name is 'split-replay'"),
    (('strategy.groups="auto"', "strategy.server_interval=1"), "has as many samples as a group"),
    (('strategy.outer={name="fedadam"}', "strategy.server_interval=1"), "without the edges'; leave one of the two out"),
    (('data.partition="dirichlet"',), "and [data] partition is 'dirichlet'; use"),
    (("edgecloud.round_epochs=0.5",), "round_epochs = 0.5: the rounds of edges beside groups end with the groups'"),
    (("edgecloud.classes=[1, 2]",), "[edgecloud] classes is for training without groups"),
    (('edgecloud.edge_device="no-such"',), "no-such"),
    (('edgecloud.cut="no-such"',), "the model can be cut after"),
    (("event=[{kind='preempt', soc=16, round=1}]",), "[[event]] soc = 16, but SoCs are 0 to 15"),
])
def test_what_cannot_be_beside_groups_is_refused(socflower: Socflower, changes: tuple[str, ...], says: str) -> None:
    refused = socflower("run", str(EVERYTHING), *(part for each in changes for part in ("--set", each)))
    assert refused.status == 2 and refused.out == ""
    assert says in refused.err and refused.err.count("\n") == 1


def test_a_deployment_is_refused_with_the_reason(socflower: Socflower) -> None:
    refused = socflower("run", str(EVERYTHING), "--engine", "deployment")
    assert refused.status == 2 and "a real cloud keeps its half between rounds" in refused.err
