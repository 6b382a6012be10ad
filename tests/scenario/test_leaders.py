"""How leaders exchange models: in every way the same but for last bits, in another time, with other bytes."""

import pytest
from flwr.serverapp.strategy import FedAdam, FedMedian

from socflower.cluster import parse_cluster
from socflower.errors import ConfigError
from socflower.scenario.planning import plan_scenario
from socflower.scenario.prepared_run import prepare
from socflower.scenario.runner import run_scenario
from socflower.scenario.schema.config import Scenario
from socflower.scenario.schema.file import parse_scenario
from socflower.strategies.settings import ExchangeSettings, TrainingSchedule
from socflower.strategies.socflow import SoCFlow
from tests.scenario.small_runs import small

pytestmark = pytest.mark.usefixtures("on_few_digits")

LEADERS = ("star", "ring", "tree", "auto")


def with_leaders(leaders: str) -> Scenario:
    return small(leaders=leaders, groups=3)


def test_the_hub_has_one_model_of_all_ways_but_the_star() -> None:
    results = {leaders: run_scenario(with_leaders(leaders), num_workers=0) for leaders in LEADERS}
    weights = {leaders: result["weights_sha256"] for leaders, result in results.items()}
    assert len({weights[leaders] for leaders in ("star", "ring", "tree")}) == 3  # they sum in other orders
    assert weights["auto"] == weights[results["auto"]["plan"]["leaders"]]
    model = plan_scenario(with_leaders("star"))
    num_groups, num_synchronisations = len(model["groups"]), len(results["star"]["rounds"]) - 1
    for leaders, result in results.items():
        models = 2 * num_groups if result["plan"]["leaders"] == "star" else 1
        assert result["bytes"]["hub"] == num_synchronisations * models * model["model"]["trained_bytes"], leaders
    plan = plan_scenario(with_leaders("auto"))
    assert plan["leaders"] == results["auto"]["plan"]["leaders"]
    assert plan["leaders_s"][plan["leaders"]] == min(plan["leaders_s"].values()) == plan["predicted"]["sync_s"]
    assert results["auto"]["virtual_s"] == min(result["virtual_s"] for result in results.values())
    for leaders in ("star", "ring", "tree"):
        assert plan_scenario(with_leaders(leaders))["predicted"]["sync_s"] == plan["leaders_s"][leaders]


def test_what_needs_each_groups_model_has_the_star() -> None:
    def asked(leaders: str) -> Scenario:
        tables = {"strategy": {"groups": 2, "leaders": leaders, "outer": {"name": "fedmedian"}}}
        return parse_scenario(tables, name="case", question="", where="case")

    assert plan_scenario(asked("auto"))["leaders"] == "star"
    with pytest.raises(ConfigError, match=r"\[strategy\] leaders = 'ring' gives the hub the mean .*'fedmedian' needs "
                                          "each of them; use 'star'"):
        asked("ring")
    prepare(with_leaders("tree"), "deployment")


def test_so_in_an_app() -> None:
    def strategy(outer: object, leaders: str) -> SoCFlow:
        return SoCFlow(cluster=parse_cluster({"boards": [3, 3]}), groups=3, outer=outer,
                       schedule=TrainingSchedule(num_samples=60, batch_size=4, num_epochs=1),
                       exchange=ExchangeSettings(leaders=leaders))

    assert strategy(FedAdam(), "ring").exchanges.leaders.kind == "ring"
    assert strategy(FedMedian(), "auto").exchanges.leaders.kind == "star"
    with pytest.raises(ConfigError, match=r"SoCFlow: leaders = 'ring' .* outer = FedMedian\(…\) needs each of them"):
        strategy(FedMedian(), "ring")
    with pytest.raises(ConfigError, match="ExchangeSettings: leaders = 'mesh' is unknown; use 'auto', 'ring'"):
        ExchangeSettings(leaders="mesh")
