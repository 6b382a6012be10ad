"""The table [strategy.outer]: which strategies and keys there are, and what is refused."""

import inspect

import pytest
from flwr.serverapp import strategy as flower

from socflower.errors import ConfigError
from socflower.scenario.planning import plan_scenario
from socflower.scenario.schema.config import Scenario
from socflower.scenario.schema.file import from_document, parse_scenario, to_document
from socflower.scenario.schema.outer import OUTER_STRATEGIES, OuterConfig


def scenario(strategy: dict[str, object]) -> Scenario:
    return parse_scenario(
        {"cluster": {"boards": [2, 2]}, "strategy": strategy},
        name="case",
        question="",
        where="case",
    )


@pytest.mark.parametrize("name", OUTER_STRATEGIES)
def test_every_strategy_is_a_class_of_flowers_that_takes_its_keys(name: str) -> None:
    kind, keys = OUTER_STRATEGIES[name]
    assert kind.lower() == name and {*keys} <= {
        *inspect.signature(getattr(flower, kind)).parameters
    }
    assert {*keys} <= {*OuterConfig.model_fields}


@pytest.mark.parametrize(
    ("strategy", "says"),
    [
        ({"outer": "fedadam"}, "[strategy.outer] must be a table, got 'fedadam'"),
        ({"outer": {}}, "[strategy.outer]: name is missing"),
        (
            {"outer": {"name": "adam"}},
            "name = 'adam' is unknown; use one of fedavg, fedavgm, fedadam",
        ),
        ({"outer": {"name": "fedadam", "etta": 1.0}}, "'etta'"),
        (
            {"outer": {"name": "fedadam", "server_momentum": 0.5}},
            "server_momentum is not for 'fedadam', which takes eta, beta_1, beta_2, tau",
        ),
        ({"outer": {"name": "fedavg", "eta": 0.5}}, "eta is not for 'fedavg'"),
        ({"outer": {"name": "fedadam", "eta": 0.0}}, "eta = 0.0 must be a number above 0"),
        (
            {"outer": {"name": "fedadam", "beta_1": 1.0}},
            "beta_1 = 1.0 must be a number of 0 or more and below 1",
        ),
        (
            {"outer": {"name": "qfedavg"}},
            "'qfedavg' needs client_learning_rate, the learning rate of the groups",
        ),
        (
            {"outer": {"name": "krum"}},
            "outer.name = 'krum' needs a number of groups, and groups is \"auto\"; give it",
        ),
        (
            {"name": "ring", "outer": {"name": "fedavg"}},
            "outer is for strategies with several groups, and name is 'ring'",
        ),
        (
            {"name": "fedavg", "outer": {"name": "fedavg"}},
            "several groups, and name is 'fedavg'; leave it out",
        ),
        (
            {"name": "split-replay", "outer": {"name": "fedavg"}},
            "several groups, and name is 'split-replay'",
        ),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(strategy: dict[str, object], says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        scenario(strategy)
    assert says in str(caught.value) and "\n" not in str(caught.value)


def test_the_resolved_document_has_what_was_given_and_reads_back() -> None:
    given = scenario({"groups": 2, "outer": {"name": "fedadam", "eta": 0.02}})
    assert to_document(given)["strategy"]["outer"] == {"name": "fedadam", "eta": 0.02}
    assert from_document(to_document(given)).strategy == given.strategy
    assert "outer" not in to_document(scenario({"groups": 2}))["strategy"]


def test_fedprox_in_integers_is_refused() -> None:
    with pytest.raises(
        ConfigError,
        match=r"'fedprox': the integer update of .* has no proximal term; use arithmetic",
    ):
        parse_scenario(
            {
                "cluster": {"boards": [2, 2]},
                "precision": {"arithmetic": "int8"},
                "strategy": {"outer": {"name": "fedprox", "proximal_mu": 0.1}},
            },
            name="case",
            question="",
            where="case",
        )


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
    given = scenario({"groups": 2, "outer": {"name": "fedavgm", "server_momentum": 0.5}})
    assert [
        given.under(name).strategy.outer is None for name in ("socflow", "ring", "fedavg", "sgd")
    ] == [False, True, True, True]
