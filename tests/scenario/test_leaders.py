"""How leaders exchange models: in every way the same but for last bits, in another time, with other bytes."""

from typing import Any

import pytest
from flwr.serverapp.strategy import FedAdam, FedMedian
from rich.console import Console

from socflower.cli.plan import print_plan
from socflower.cluster import parse_cluster
from socflower.cluster.cluster_file import ClusterTable, SiteTable
from socflower.scenario.planning import plan_scenario
from socflower.scenario.prepared_run import prepare
from socflower.scenario.runner import run_scenario
from socflower.scenario.schema.config import PrecisionConfig
from socflower.scenario.schema.file import parse_scenario, scenario_cluster
from socflower.scenario.schema.scenario_file import Scenario
from socflower.strategies.settings import ExchangeSettings, TrainingSchedule
from socflower.strategies.socflow import SoCFlow
from tests.one_line import refused
from tests.scenario.small_runs import small

pytestmark = pytest.mark.usefixtures("on_few_digits")

LEADERS = ("star", "ring", "tree", "auto")


def with_leaders(leaders: str) -> Scenario:
    return small(leaders=leaders, groups=3)


@pytest.mark.slow
def test_the_hub_has_one_model_of_all_ways_but_the_star() -> None:
    results = {leaders: run_scenario(with_leaders(leaders), num_workers=0) for leaders in LEADERS}
    weights = {leaders: result["weights_sha256"] for leaders, result in results.items()}
    assert (
        len({weights[leaders] for leaders in ("star", "ring", "tree")}) == 3
    )  # they sum in other orders
    assert weights["auto"] == weights[results["auto"]["plan"]["leaders"]]
    model = plan_scenario(with_leaders("star"))
    num_groups, num_synchronisations = len(model["groups"]), len(results["star"]["rounds"]) - 1
    for leaders, result in results.items():
        models = 2 * num_groups if result["plan"]["leaders"] == "star" else 1
        assert (
            result["bytes"]["hub"]
            == num_synchronisations * models * model["model"]["trained_bytes"]
        ), leaders
    plan = plan_scenario(with_leaders("auto"))
    assert plan["leaders"] == results["auto"]["plan"]["leaders"]
    assert (
        plan["leaders_s"][plan["leaders"]]
        == min(plan["leaders_s"].values())
        == plan["predicted"]["sync_s"]
    )
    assert results["auto"]["virtual_s"] == min(result["virtual_s"] for result in results.values())
    for leaders in ("star", "ring", "tree"):
        assert (
            plan_scenario(with_leaders(leaders))["predicted"]["sync_s"]
            == plan["leaders_s"][leaders]
        )


def test_what_needs_each_groups_model_has_the_star() -> None:
    def asked(leaders: str) -> Scenario:
        tables = {"strategy": {"groups": 2, "leaders": leaders, "outer": {"name": "fedmedian"}}}
        return parse_scenario(tables, name="case", question="", where="case")

    assert plan_scenario(asked("auto"))["leaders"] == "star"
    refused(lambda: asked("ring"), "[strategy] leaders = 'ring'", "'fedmedian'")
    prepare(with_leaders("tree"), "deployment")


@pytest.mark.parametrize(
    ("leaders", "precision"),
    [
        ("tree", {}),
        # The mixed one has int8's gradients, too.
        pytest.param("ring", {"arithmetic": "int8"}, marks=pytest.mark.slow),
        ("ring", {"arithmetic": "mixed"}),
    ],
    ids=str,
)
def test_what_is_compressed_is_priced_trains_on_and_is_in_the_documents(
    leaders: str,
    precision: dict[str, str],
) -> None:
    scenario = small(
        leaders=leaders,
        groups=3,
        leader_compression="int8",
        site=SiteTable(servers=2),
    ).replaced(
        precision=PrecisionConfig(**precision),
        cluster=ClusterTable(socs_per_board=2, soc_bytes_per_s=2.5e6),
    )
    result, plan = run_scenario(scenario, num_workers=0), plan_scenario(scenario)
    assert result["plan"]["leader_compression"] == plan["leader_compression"] == "int8"
    exact = scenario.replaced(strategy=scenario.strategy.replaced(leader_compression="none"))
    assert plan["predicted"]["sync_s"] < plan_scenario(exact)["predicted"]["sync_s"]
    uncompressed = run_scenario(exact, num_workers=0)
    assert result["virtual_s"] < uncompressed["virtual_s"]
    assert result["weights_sha256"] != uncompressed["weights_sha256"]
    assert result["final_accuracy"] == pytest.approx(uncompressed["final_accuracy"], abs=0.15)


def asked(**strategy: Any) -> Scenario:
    return parse_scenario({"strategy": strategy}, name="case", question="", where="case.toml")


@pytest.mark.parametrize(
    ("strategy", "named"),
    [
        ({"leaders": "star"}, "leader_compression = 'int8'"),
        ({"leaders": "ring", "leader_compression": "int2"}, "none, fp16, int8"),
        ({"leaders": "auto", "outer": {"name": "krum"}}, "'krum'"),
        ({"leaders": "auto", "outer": {"name": "fedmedian"}}, "'fedmedian'"),
        ({"leaders": "ring", "server_interval": 2}, "server_interval = 2"),
    ],
)
def test_what_cannot_be_compressed_is_one_line(strategy: dict[str, Any], named: str) -> None:
    compressed = {"groups": 2, "leader_compression": "int8", **strategy}
    refused(lambda: asked(**compressed), named)


def test_more_groups_than_eight_bits_can_sum_are_refused_before_anything_starts() -> None:
    strategy = {"groups": 64, "leaders": "ring", "leader_compression": "int8"}
    tables = {"cluster": {"boards": 64, "socs_per_board": 1}, "strategy": strategy}
    scenario = parse_scenario(tables, name="case", question="", where="case")
    refused(lambda: plan_scenario(scenario), "'int8'", "63", "64")


def test_so_in_an_app() -> None:
    def strategy(outer: object, leaders: str) -> SoCFlow:
        return SoCFlow(
            cluster=parse_cluster({"boards": [3, 3]}),
            groups=3,
            outer=outer,
            schedule=TrainingSchedule(num_samples=60, batch_size=4, num_epochs=1),
            exchange=ExchangeSettings(leaders=leaders),
        )

    assert strategy(FedAdam(), "ring").method.describe().exchanges.leaders.kind == "ring"
    assert strategy(FedMedian(), "auto").method.describe().exchanges.leaders.kind == "star"
    refused(lambda: strategy(FedMedian(), "ring"), "leaders = 'ring'", "FedMedian")
    refused(lambda: ExchangeSettings(leaders="mesh"), "leaders = 'mesh'", "ring")


@pytest.mark.parametrize(
    ("strategy", "why"),
    [
        ({"name": "ring"}, "name = 'ring'"),
        ({"name": "sgd"}, "name = 'sgd'"),
        ({"name": "fedavg"}, "name = 'fedavg'"),
        ({"name": "split-replay"}, "name = 'split-replay'"),
        ({"groups": 1}, "groups is 1"),
    ],
    ids=str,
)
@pytest.mark.parametrize(("key", "value"), [("leaders", "tree"), ("leader_compression", "int8")])
def test_what_no_leader_reads_is_refused_in_one_line_unless_it_is_the_default(
    strategy: dict[str, Any], why: str, key: str, value: str
) -> None:
    refused(lambda: asked(**strategy, **{key: value}), f"[strategy] {key} = '{value}'", why)
    assert asked(**strategy, leaders="auto", leader_compression="none") is not None


def test_a_comparison_leaves_the_leaders_out_of_strategies_that_have_none() -> None:
    scenario = small(leaders="ring", groups=3, leader_compression="int8")
    for name in ("ring", "sgd", "fedavg"):
        own = scenario.under(name).strategy
        assert (own.name, own.leaders, own.leader_compression, own.outer) == (
            name,
            "auto",
            "none",
            None,
        )
    assert scenario.under("socflow").strategy == scenario.strategy
    assert plan_scenario(scenario)["one_soc"]["epoch_s"] > 0


def test_a_plan_says_that_a_star_cannot_be_compressed(capsys: pytest.CaptureFixture[str]) -> None:
    for compression, said in (("int8", "in int8 (as a "), ("none", "as a star")):
        scenario = small(leaders="auto", groups=3, leader_compression=compression)
        print_plan(Console(width=250), scenario_cluster(scenario), plan_scenario(scenario))
        line = next(
            line
            for line in capsys.readouterr().out.splitlines()
            if line.startswith("a synchronisation")
        )
        assert said in line and ("; a star cannot be compressed)" in line) == (
            compression != "none"
        )
        assert "as a star" not in line or compression == "none"
