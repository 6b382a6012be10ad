"""The table [strategy.outer]: which strategies and keys there are, and what is refused."""

import inspect
from importlib import import_module

import pytest
from flwr.serverapp import strategy as flower

from socflower.scenario.planning import plan_scenario
from socflower.scenario.schema.file import from_document, parse_scenario, to_document
from socflower.scenario.schema.outer import OUTER_STRATEGIES
from socflower.scenario.schema.scenario_file import Scenario
from tests.one_line import refused


def scenario(strategy: dict[str, object], **tables: object) -> Scenario:
    document = {"cluster": {"boards": [2, 2]}, "strategy": strategy, **tables}
    return parse_scenario(document, name="case", question="", where="case")


@pytest.mark.parametrize("name", OUTER_STRATEGIES)
def test_every_strategy_is_a_class_of_flowers_or_an_sgd_step_that_takes_its_keys(name: str) -> None:
    kind, keys = OUTER_STRATEGIES[name]
    module, _, own = kind.rpartition(":")
    assert module or kind.lower() == name
    made = getattr(import_module(module) if module else flower, own)
    assert {*keys} <= {*inspect.signature(made).parameters}
    for key in keys:
        outer = {"name": name, "arguments": {key: -1.0}}
        refused(lambda outer=outer: scenario({"groups": 9, "outer": outer}), f"{key} = -1.0")


@pytest.mark.parametrize(
    ("outer", "named"),
    [
        ("fedadam", "[strategy.outer] must be a table, got 'fedadam'"),
        ({}, "[strategy.outer]: name is missing"),
        ({"name": "adam"}, "use one of fedavg, fedavgm, fedadam"),
        ({"name": "fedadam", "arguments": {"etta": 1.0}}, "'etta'"),
        (
            {"name": "fedadam", "arguments": {"server_momentum": 0.5}},
            "'server_momentum' (value 0.5)",
        ),
        ({"name": "fedavg", "arguments": {"eta": 0.5}}, "'eta' (value 0.5)"),
        ({"name": "fedadam", "arguments": {"eta": 0.0}}, "eta = 0.0"),
        ({"name": "fedadam", "arguments": {"tau": 0.0}}, "tau = 0.0"),
        ({"name": "fedadam", "arguments": {"beta_1": 1.0}}, "beta_1 = 1.0"),
        ({"name": "fedadam", "arguments": {"beta_2": -0.1}}, "beta_2 = -0.1"),
        ({"name": "qfedavg"}, "client_learning_rate"),
        ({"name": "krum", "arguments": {"num_malicious_nodes": 0.5}}, "a whole number"),
        ({"name": "krum"}, "outer.name = 'krum'"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(outer: object, named: str) -> None:
    refused(lambda: scenario({"outer": outer}), named)


@pytest.mark.parametrize("name", ["ring", "split-replay"])
def test_an_outer_strategy_is_for_several_groups(name: str) -> None:
    refused(lambda: scenario({"name": name, "outer": {"name": "fedavg"}}), "outer", repr(name))


def test_the_resolved_document_has_what_was_given_and_reads_back() -> None:
    given = scenario({"groups": 2, "outer": {"name": "fedadam", "arguments": {"eta": 0.02}}})
    assert to_document(given)["strategy"]["outer"] == {
        "name": "fedadam",
        "arguments": {"eta": 0.02},
    }
    assert from_document(to_document(given)).strategy == given.strategy
    assert "outer" not in to_document(scenario({"groups": 2}))["strategy"]


def test_fedprox_in_integers_is_refused() -> None:
    outer = {"name": "fedprox", "arguments": {"proximal_mu": 0.1}}
    integers = {"arithmetic": "int8"}
    refused(lambda: scenario({"outer": outer}, precision=integers), "'fedprox'", "'int8'")


def test_its_plan_is_that_without_the_outer_step_and_one_soc_is_compared_with() -> None:
    plans = [
        plan_scenario(scenario({"groups": 2, "leaders": "star", **outer}))
        for outer in ({}, {"outer": {"name": "fedadam"}})
    ]
    assert plans[0]["groups"] == plans[1]["groups"]
    ways = [plan["predicted"].pop("leaders_s") for plan in plans]
    assert plans[0]["predicted"] == plans[1]["predicted"]
    assert ways[0]["star"] == ways[1]["star"] and ways[0]["ring"] < ways[1]["ring"], (
        "the next model comes back"
    )


def test_strategies_to_compare_with_have_no_outer_step() -> None:
    given = scenario(
        {"groups": 2, "outer": {"name": "fedavgm", "arguments": {"server_momentum": 0.5}}}
    )
    assert [
        given.under(name).strategy.outer is None for name in ("socflow", "ring", "fedavg", "sgd")
    ] == [False, True, True, True]
    own = scenario({"name": "fedavg", "outer": {"name": "fedadam"}})
    assert own.under("fedavg").strategy.outer is not None
