"""Trainings in racks that get hot and have users: they repeat, resume, tell what heat did; weights are no other."""

import json
import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from socflower.report.heat_section import heat_curves
from socflower.report.report import render_report
from socflower.report.summary import name_runs
from socflower.scenario.expectations import check_expectations
from socflower.scenario.runner import run_scenario
from socflower.scenario.schema.file import load_scenario
from socflower.scenario.schema.scenario_file import Scenario
from socflower.thermal.model.governor import snapdragon_governor
from tests.command_line import Socflower
from tests.scenario.small_runs import without_drawing
from tests.scenario.test_resume import assert_ends_as, resume, stop_after

pytestmark = pytest.mark.usefixtures("on_few_digits")

SCENARIOS = Path(__file__).parents[2] / "scenarios"
HOT = ("rebalanced_shares", ("train.epochs=2", "thermal.fan=passive", "thermal.cool_c=33.5"))
GAMES = ("tidal_games", ("train.epochs=2",))
WINDOWS = (
    "idle_windows",
    (
        "train.epochs=3",
        "background_load.start_hour=3.92",
        "background_load.idle_windows=[[1, 4], [5, 24]]",
    ),
)
ALL = pytest.mark.parametrize(
    "case",
    [
        pytest.param(HOT, id=HOT[0]),
        *(pytest.param(case, id=case[0], marks=pytest.mark.slow) for case in (GAMES, WINDOWS)),
    ],
)

Case = tuple[str, tuple[str, ...]]


def scenario(case: Case, *more: str) -> Scenario:
    name, overrides = case
    return load_scenario(SCENARIOS / f"{name}.toml", [*overrides, "expect={}", *more])


@cache
def result(case: Case, *more: str) -> dict[str, Any]:
    return run_scenario(scenario(case, *more), num_workers=0)


def training_of(document: dict[str, Any]) -> dict[str, Any]:
    return {
        key: value for key, value in document.items() if key not in ("wall_s", "scenario", "seed")
    }


# ------------------------------------------------------------------------------------------------ repeatable
@pytest.mark.slow
@ALL
def test_equal_seeds_give_equal_weights_and_virtual_time(case: Case) -> None:
    again = run_scenario(scenario(case), num_workers=0)
    assert training_of(again) == training_of(result(case))


@ALL
def test_another_seed_draws_other_seats_and_games(case: Case) -> None:
    other = result(case, "seed=99")
    assert other["weights_sha256"] != result(case)["weights_sha256"]
    assert other["virtual_s"] != result(case)["virtual_s"]


@ALL
def test_an_interrupted_run_with_heat_ends_as_the_undisturbed_one(
    case: Case, tmp_path: Path
) -> None:
    """After every single round, by files alone: temperatures, clocks, fans, games, shares, groups."""
    of, out = scenario(case), tmp_path / "out"
    without_drawing(of, tmp_path / "reference")
    last = len(result(case)["rounds"]) - 1
    for server_round in range(1, last + 1):
        stop_after(of, out, server_round)
    assert resume(of, out)["resumed_from"] == list(range(1, last + 1))
    assert_ends_as(tmp_path / "reference", out)


# --------------------------------------------------------------------------------------------- what heat does
@pytest.mark.parametrize(
    ("case", "more"),
    [
        (HOT, ("strategy.rebalance=off",)),
        (HOT, ("thermal.ambient_c=5", "thermal.start_c=5")),
        (GAMES, ("strategy.rebalance=off",)),
        # Shares and groups alone: what "both" does at once, as above.
        pytest.param(GAMES, ("strategy.rebalance=shares",), marks=pytest.mark.slow),
        pytest.param(
            (GAMES[0], (*GAMES[1], "strategy.rebalance=off")),
            ("strategy.rebalance=groups",),
            marks=pytest.mark.slow,
        ),
    ],
)
def test_heat_and_rebalancing_change_time_and_not_weights(
    case: Case, more: tuple[str, ...]
) -> None:
    """One process computes a group's whole batch, so not even a bit differs."""
    ours, other = result(case), result(case, *more)
    assert ours["weights_sha256"] == other["weights_sha256"]
    assert ours["virtual_s"] != other["virtual_s"]


def test_socs_change_groups_where_games_make_some_slow() -> None:
    events = [event for entry in result(GAMES)["rounds"] for event in entry["events"]]
    assert [event["kind"] for event in events] == ["re-balanced"]
    assert "SoCs 11, 16 change groups on their boards" in events[0]["text"]


def test_rebalancing_wins_back_time_that_heat_costs() -> None:
    off, both = (
        result(HOT, f"strategy.rebalance={mode}")["heat"]["slowdown"] for mode in ("off", "both")
    )
    assert 0.0 < both < off


def test_a_cold_rack_is_not_slower() -> None:
    cold = result(HOT, "thermal.ambient_c=5", "thermal.start_c=5")["heat"]
    assert cold["slowdown"] == pytest.approx(0.0, abs=1e-9)
    assert cold["peak_c"] < snapdragon_governor().trip_c[0]
    assert set(cold["history"]["mean_clock"]) == {1.0}


def test_the_result_tells_of_heat() -> None:
    document = result(HOT)
    heat, history = document["heat"], document["heat"]["history"]
    assert set(heat) == {"peak_c", "cooling_j", "slowdown", "history"}
    assert set(history) == {"at_s", "hottest_c", "mean_clock", "rpm", "fan_w"}
    assert len({len(values) for values in history.values()}) == 1
    assert history["at_s"][0] == 0.0 and history["at_s"] == sorted(set(history["at_s"]))
    assert history["at_s"][-1] <= document["virtual_s"]
    assert heat["peak_c"] >= max(history["hottest_c"])
    assert heat["cooling_j"] == pytest.approx(document["breakdown"]["energy_j"]["cooling"])
    assert document["energy_j"] == pytest.approx(sum(document["breakdown"]["energy_j"].values()))
    for entry in document["rounds"]:
        assert {"hottest_c", "mean_clock", "fan_rpm"} <= set(entry)
        assert entry["hottest_c"] <= heat["peak_c"] and 0.0 < entry["mean_clock"] <= 1.0
    assert json.loads(json.dumps(document)) == document


def test_users_alone_make_no_heat_and_turn_no_fans() -> None:
    document = result(GAMES)
    heat = document["heat"]
    assert (heat["peak_c"], heat["cooling_j"], heat["history"]) == (None, 0.0, None)
    assert document["heat"]["slowdown"] > 0.1
    assert document["breakdown"]["energy_j"]["cooling"] == 0.0
    assert all("hottest_c" not in entry for entry in document["rounds"])


@pytest.mark.slow
def test_nobody_trains_outside_of_the_window() -> None:
    """The window closes after 5 minutes of work and opens an hour later."""
    document = result(WINDOWS)
    assert document["virtual_s"] > 1.2 * 3600.0
    assert document["breakdown"]["soc_seconds"]["idle"] >= 0.95 * 3600.0 * 6
    always = result(WINDOWS, "background_load.idle_windows=[]", "background_load.games=none")
    assert always["heat"]["slowdown"] == pytest.approx(0.0, abs=0.01)


def test_socs_that_players_take_are_planned_without() -> None:
    crowded = result(WINDOWS, "background_load.low=0.4", "background_load.high=0.5")
    events = [event["kind"] for entry in crowded["rounds"] for event in entry["events"]]
    assert "replanned" in events


# -------------------------------------------------------------------------------------------------- the claims
def test_claims_about_heat_hold_or_fail_by_what_was_observed() -> None:
    document = result(HOT)
    heat = document["heat"]
    for name in ("peak_c", "cooling_j", "slowdown"):
        claims = {f"max_{name}": heat[name] - 1e-6, f"min_{name}": heat[name]}
        assert [claim["holds"] for claim in check_expectations(claims, document)] == [False, True]


@pytest.mark.parametrize(
    "without", [{"heat": None}, {}, {"heat": {"peak_c": None, "cooling_j": 0.0}}]
)
def test_a_claim_about_heat_fails_where_nothing_could_get_hot(without: dict[str, Any]) -> None:
    document = {key: value for key, value in result(HOT).items() if key != "heat"} | without
    (claim,) = check_expectations({"max_peak_c": 100.0}, document)
    assert (claim["observed"], claim["holds"]) == (None, False)


# -------------------------------------------------------------------------------------------------- the report
def rendered(*documents: dict[str, Any]) -> str:
    return render_report(documents, title="A title")


def test_the_report_shows_the_hottest_soc_clocks_and_fans() -> None:
    html = rendered(result(HOT))
    headings = re.findall(r'<h2 id="(\w+)"', html)
    at = headings.index("heat")
    assert headings[at - 1] in ("mixing", "energy") and headings[at + 1] == "breakdown"
    peak_c = result(HOT)["heat"]["peak_c"]
    labels = re.findall(r'role="img" aria-label="([^"]*)"', html)
    (hottest,) = [label for label in labels if label.startswith("The hottest SoC over virtual")]
    assert f"socflow: at most {max(result(HOT)['heat']['history']['hottest_c']):.1f} °C" in hottest
    assert any(label.startswith("Mean clock and fan speed over virtual time") for label in labels)
    assert f"{peak_c:.1f} °C</td>" in html
    assert "clocks fall at 35 °C" in html and "clocks fall at 39.5 °C" in html
    assert ">Cooling</th>" in html and "<span>cooling</span>" in html


def test_reports_without_heat_have_no_trace_of_it() -> None:
    cold = {key: value for key, value in result(HOT).items() if key != "heat"}
    cold["breakdown"] = {
        name: {part: value for part, value in parts.items() if part != "cooling"}
        for name, parts in cold["breakdown"].items()
    }
    html = rendered(cold, {**cold, "strategy": "ring", "heat": None})
    assert (
        'id="heat"' not in html and "ooling</th>" not in html and "<span>cooling</span>" not in html
    )


def test_a_report_beside_a_strategy_without_heat_keeps_each_ones_look() -> None:
    cold = {**result(GAMES), "strategy": "ring", "heat": None}
    html = rendered(cold, result(HOT))
    (section,) = re.findall(r'<section aria-labelledby="heat">.*?</section>', html, flags=re.DOTALL)
    assert "<span>socflow</span>" in section and "<span>ring</span>" not in section
    assert "#D55E00" in section and "#0072B2" not in section  # the second's colour


@pytest.mark.parametrize(
    "history",
    [
        None,
        {},
        {"at_s": []},
        {"at_s": [0.0], "hottest_c": [None], "mean_clock": [1.0], "rpm": [1e3]},
        "hot",
    ],
)
def test_a_history_that_says_nothing_is_no_curve(history: object) -> None:
    (run,) = name_runs([{"strategy": "socflow", "heat": {"history": history}}])
    assert heat_curves(run) is None


def test_long_histories_keep_their_hottest_moment() -> None:
    values = {"at_s": [5.0 * index for index in range(4000)]}
    for name, value in (("mean_clock", 1.0), ("rpm", 3e3), ("hottest_c", 30.0)):
        values[name] = [value] * 4000
    values["hottest_c"][2345] = 41.0
    (run,) = name_runs([{"strategy": "socflow", "heat": {"history": values}}])
    curves = heat_curves(run)
    assert curves is not None and len(curves.at_s) <= 700
    assert max(curves.hottest_c) == 41.0 and curves.at_s[curves.hottest_c.index(41.0)] == 5.0 * 2345


# ------------------------------------------------------------------------------------------- the command line
@pytest.mark.slow
def test_the_table_of_run_has_rows_for_heat_and_a_claim_that_heat_breaks_makes_the_status_1(
    socflower: Socflower,
) -> None:
    claims = "expect={max_peak_c=100,max_cooling_j=0}"
    ran = socflower(f"run rebalanced_shares --workers 0 --set train.epochs=1 --set {claims}")
    assert ran.status == 1, ran.err
    for row in (
        r"hottest SoC +│ \d\d\.\d °C",
        r"slower than cold and alone +│ \d+\.\d%",
        r"energy of fans +│ \d",
    ):
        assert re.search(row, ran.out), ran.out
    assert "holds  max_peak_c = 100" in ran.out and "FAILS  max_cooling_j = 0" in ran.out


@pytest.mark.slow
def test_a_plan_tells_what_its_heat_will_cost(socflower: Socflower) -> None:
    ran = socflower("plan tidal_games")
    assert ran.status == 0 and "°C" not in ran.out
    assert "with heat and users the training takes" in ran.out
    hot = socflower("plan failed_fan")
    said = " ".join(hot.out.split())
    assert hot.status == 0 and re.search(r"slower than without, at most \d\d\.\d °C", said)
