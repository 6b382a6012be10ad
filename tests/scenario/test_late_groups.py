"""`[strategy] quorum`: what is predicted is what runs, and what does not go with it is refused in a line."""

from typing import Any

import pytest

from socflower.cluster.cluster_file import BoardTable, ClusterTable
from socflower.scenario.planning import plan_scenario
from socflower.scenario.runner import run_scenario
from socflower.scenario.schema.file import parse_scenario
from socflower.scenario.schema.scenario_file import Scenario
from tests.one_line import refused
from tests.scenario.small_runs import small


def late(**strategy: Any) -> Scenario:
    """Two phones and a Raspberry Pi, each a group; two of them are a quorum."""
    settings = {"groups": 3, "epochs": 2, "quorum": 0.6, **strategy}
    return small(**settings).replaced(
        cluster=ClusterTable(),
        boards=(BoardTable(socs=2), BoardTable(device="raspberry-pi-4b")),
    )


def kinds(result: dict[str, Any]) -> set[str]:
    return {event["kind"] for entry in result["rounds"] for event in entry["events"]}


@pytest.mark.usefixtures("on_few_digits")
def test_a_slow_device_is_late_and_the_plan_predicts_the_time() -> None:
    result, waiting = (run_scenario(late(quorum=quorum), num_workers=0) for quorum in (0.6, 1.0))
    assert {"late", "arrived"} <= kinds(result)
    assert result["plan"]["leaders"] == "star"
    assert not {"late", "arrived"} & kinds(waiting)
    assert result["virtual_s"] < 0.8 * waiting["virtual_s"]
    predicted = plan_scenario(late())["predicted"]
    assert predicted["epoch_s"] * 2 == pytest.approx(result["virtual_s"], rel=1e-6)


@pytest.mark.slow
def test_local_and_simulation_give_equal_weights() -> None:
    pytest.importorskip("ray", reason="the engine simulation needs socflower[simulation]")
    whole = late(batch_size=128)
    local, simulated = run_scenario(whole), run_scenario(whole, "simulation")
    assert "arrived" in kinds(local)
    for key in ("weights_sha256", "virtual_s", "energy_j"):
        assert simulated[key] == local[key], key


def test_a_comparison_leaves_the_quorum_out_of_strategies_without_several_groups() -> None:
    for name in ("ring", "sgd", "fedavg"):
        assert late(grace_s=0.1).under(name).strategy.quorum == 1.0
    assert late().under("diloco").strategy.quorum == 0.6


@pytest.mark.parametrize(
    ("tables", "named"),
    [
        ({"groups": 1}, ("quorum = 0.5", "1 group")),
        ({"groups": 2, "quorum": 0.9}, ("quorum = 0.9", "all of them")),
        ({"groups": "auto"}, ("quorum = 0.5", "'auto'")),
        ({"name": "ring"}, ("quorum = 0.5", "'ring'")),
        ({"name": "fedavg"}, ("quorum = 0.5", "'fedavg'")),
        ({"name": "split-replay"}, ("quorum = 0.5", "'split-replay'")),
        ({"name": "hybrid-pipeline"}, ("quorum",)),
        ({"name": "tree-fedavg"}, ("quorum = 0.5", "'tree-fedavg'")),
        ({"name": "post-local-sgd"}, ("quorum = 0.5", "'post-local-sgd'")),
        (
            {"name": "streaming-diloco", "sync_interval_epochs": 0.5},
            ("quorum = 0.5", "'streaming-diloco'"),
        ),
        ({"groups": 4, "leaders": "tree"}, ("leaders = 'tree'", "quorum = 0.5")),
        ({"groups": 4, "leaders": "ring"}, ("leaders = 'ring'", "quorum = 0.5")),
        ({"groups": 4, "server_interval": 2}, ("server_interval = 2", "quorum")),
        ({"groups": 4, "quorum": 1, "grace_s": 2}, ("grace_s = 2", "quorum")),
        ({"groups": 4, "quorum": 1, "grace_s": 2.0}, ("grace_s = 2.0", "quorum")),
        ({"groups": 4, "quorum": 0}, ("quorum = 0",)),
        ({"groups": 4, "quorum": 2}, ("quorum = 2",)),
    ],
    ids=str,
)
def test_what_a_quorum_does_not_go_with_is_refused(
    tables: dict[str, Any], named: tuple[str, ...]
) -> None:
    strategy = {"quorum": 0.5, **tables}
    refused(
        lambda: parse_scenario({"strategy": strategy}, name="case", question="", where="case.toml"),
        *named,
    )


def test_so_are_other_numbers_than_fp32() -> None:
    tables = {"strategy": {"groups": 4, "quorum": 0.5}, "precision": {"arithmetic": "int8"}}
    refused(
        lambda: parse_scenario(tables, name="case", question="", where="case.toml"),
        "quorum = 0.5",
        "int8",
    )


def test_groups_of_a_strategy_with_its_own_number_are_counted_in_the_plan() -> None:
    tables = {
        "cluster": {"boards": 1, "socs_per_board": 2},
        "strategy": {"name": "diloco", "quorum": 0.9},
    }
    scenario = parse_scenario(tables, name="case", question="", where="case.toml")
    refused(lambda: plan_scenario(scenario), "quorum = 0.9", "2 groups")
