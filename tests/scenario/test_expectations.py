"""Claims: each quantity, each bound, each strategy to compare with, and what nobody can check."""

from typing import Any

import pytest

from socflower.scenario.expectations import check_expectations, require_known_claims
from socflower.scenario.schema.file import parse_scenario
from socflower.scenario.schema.scenario_file import Scenario
from tests.one_line import refused

RESULT: dict[str, Any] = {
    "strategy": "socflow",
    "final_accuracy": 0.9,
    "virtual_s": 10.0,
    "energy_j": 50.0,
    "wall_s": 3.0,
    "time_to_accuracy_s": 4.0,
    "bytes": {"intra_board": 1.0, "inter_board": 20.0, "hub": 300.0, "wan": 0.0},
    "rounds": [
        {"events": [], "alpha": 1.0},
        {"alpha": 0.5, "events": [{"kind": "no-reply", "text": "…"}] * 2},
    ],
    "plan": {"contention": 2, "communication_groups": [[0], [1], [2]], "groups": [{}, {}, {}, {}]},
    "breakdown": {"soc_seconds": {"compute": 30.0, "idle": 10.0}},
}
OTHER: dict[str, Any] = {
    **RESULT,
    "strategy": "ring",
    "final_accuracy": 0.92,
    "virtual_s": 40.0,
    "energy_j": 100.0,
    "time_to_accuracy_s": 12.0,
}


def check(claim: str, expected: float, *others: dict[str, Any], **changes: Any) -> dict[str, Any]:
    (outcome,) = check_expectations({claim: expected}, {**RESULT, **changes}, others)
    return outcome


@pytest.mark.parametrize(
    ("quantity", "observed"),
    [
        ("accuracy", 0.9),
        ("virtual_s", 10.0),
        ("energy_j", 50.0),
        ("wall_s", 3.0),
        ("hub_bytes", 300.0),
        ("inter_board_bytes", 20.0),
        ("events", 2.0),
        ("idle_fraction", 0.25),
        ("alpha_span", 0.5),
        ("contention", 2),
        ("communication_groups", 3),
        ("groups", 4),
    ],
)
def test_both_bounds_of_each_quantity_of_a_run(quantity: str, observed: float) -> None:
    require_known_claims({f"min_{quantity}": 1, f"max_{quantity}": 1.5}, "case")
    for bound, slack in (("min", -0.1), ("max", 0.1)):
        claim = f"{bound}_{quantity}"
        same = check(claim, observed)
        assert list(same.values()) == [claim, observed, observed, True]
        assert list(same) == ["name", "expected", "observed", "holds"]
        assert check(claim, observed + slack)["holds"] is True
        assert check(claim, observed - slack)["holds"] is False


@pytest.mark.parametrize(
    ("quantity", "observed"),
    [
        ("accuracy_gap_to_ring", 0.02),
        ("speedup_over_ring", 4.0),
        ("energy_gain_over_ring", 2.0),
        ("time_to_accuracy_gain_over_ring", 3.0),
    ],
)
def test_a_comparative_claim_is_checked_against_the_other_and_unknown_without_it(
    quantity: str,
    observed: float,
) -> None:
    require_known_claims({f"min_{quantity}": observed, f"max_{quantity}": observed}, "case")
    outcome = check(f"min_{quantity}", observed - 0.01, OTHER)
    assert outcome["observed"] == pytest.approx(observed)
    assert outcome["holds"] is True
    assert check(f"max_{quantity}", observed - 0.01, OTHER)["holds"] is False
    alone = check(f"min_{quantity}", observed)
    assert alone["observed"] is None and alone["holds"] is None
    assert check(f"min_{quantity}", observed, {**OTHER, "strategy": "sgd"})["holds"] is None


def test_what_was_never_reached_does_not_hold() -> None:
    never = check("min_time_to_accuracy_gain_over_ring", 1.0, OTHER, time_to_accuracy_s=None)
    assert (never["observed"], never["holds"]) == (None, False)
    assert check("max_virtual_s", 10.0, virtual_s=None)["holds"] is False
    assert check("min_speedup_over_ring", 1.0, OTHER, virtual_s=0.0)["holds"] is False


@pytest.mark.parametrize("quantity", ["contention", "communication_groups", "groups"])
def test_a_run_without_a_plan_claims_nothing_of_it(quantity: str) -> None:
    assert check(f"max_{quantity}", 5, plan=None)["holds"] is False


def test_claims_come_back_in_the_order_of_the_file() -> None:
    claims = {"max_energy_j": 1.0, "min_accuracy": 0.1, "min_speedup_over_sgd": 2.0}
    assert [outcome["name"] for outcome in check_expectations(claims, RESULT)] == list(claims)
    assert check_expectations({}, RESULT) == []


@pytest.mark.parametrize(
    ("claim", "named"),
    [
        ("min_acuracy", "did you mean 'min_accuracy'?"),
        ("max_speedup_over_rings", "'max_speedup_over_ring'?"),
        ("min_speedup_over_magic", "'min_speedup_over_magic'"),
        ("accuracy", "'accuracy'"),
        ("zzz", "min_ or max_"),
    ],
)
def test_an_unknown_claim_is_named(claim: str, named: str) -> None:
    refused(lambda: require_known_claims({claim: 1}, "case"), "claim", named)


@pytest.mark.parametrize("value", ["0.9", True, [0.9], None])
def test_a_claim_is_a_number(value: object) -> None:
    refused(lambda: parsed({"min_accuracy": value}), "case [expect] min_accuracy = ", value)


def test_the_table_is_a_table() -> None:
    refused(lambda: parsed(["min_accuracy"]), "[expect]")


def parsed(expect: object) -> Scenario:
    return parse_scenario({"expect": expect}, name="case", question="", where="case")
