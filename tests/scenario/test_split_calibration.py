"""K and bits from a budget of loss: scenarios whose training begins with its own trials."""

from pathlib import Path
from typing import Any

import pytest

from socflower.errors import InfeasiblePlan
from socflower.scenario.app.split_cloud import _scenario
from socflower.scenario.prepared_run import prepare
from socflower.scenario.runner import run_scenario
from socflower.scenario.schema.file import from_document, to_document
from socflower.scenario.schema.scenario_file import Scenario
from socflower.scenario.split_planning import plan_split
from socflower.scenario.split_setting import SplitSetting
from tests.one_line import refused
from tests.scenario.small_runs import without_drawing
from tests.scenario.test_resume import assert_ends_as, resume, stop_after
from tests.scenario.test_split_runs import CONSTANT, split

SHIPPED = Path(__file__).parents[2] / "scenarios" / "split_calibrated.toml"
pytestmark = pytest.mark.usefixtures("on_few_digits")
ALL = {"window": "auto", "bits": "auto", "gradient_bits": "auto"}
SLOW_LINK = {"bytes_per_s": [5e5, 1e6]}
SMALL_BATCHES = {"batch_size": 4, "epochs": 2, "learning_rate": 0.005}


def calibrated(budget: float = 1e6, **settings: Any) -> Scenario:
    """Return a scenario of small batches that calibrates K and bits, if no others are named."""
    is_named = "loss_budget" in settings or "auto" in settings.values()
    auto = {} if is_named else ALL
    train = {**SMALL_BATCHES, **settings.pop("train", {})}
    link = SLOW_LINK if settings.get("link", "constant") == "constant" else {}
    return split(**{"train": train, "loss_budget": budget, **link, **auto, **settings})


def ran(scenario: Scenario) -> dict[str, Any]:
    return run_scenario(scenario, num_workers=0)


def require_sound(result: dict[str, Any]) -> dict[str, Any]:
    """Require what holds of every calibration; return its record."""
    found = dict(result["warm_up"])
    losses, exact = found["loss"], next(iter(found["loss"].values()))
    assert losses[found["chosen"]] <= (1 + found["loss_budget"]) * exact
    assert sum(found["seconds"].values()) <= 0.25 * result["virtual_s"]
    first, second = result["rounds"][1:3]
    # The trial that goes on is the first round, and all trials are in the clock when the second one begins.
    assert first["loss"] == losses[found["chosen"]]
    assert second["virtual_s"] > found["virtual_s"] >= first["virtual_s"]
    assert found["virtual_s"] == pytest.approx(sum(found["seconds"].values()))
    assert result["split"]["max_staleness"] <= found["window"]
    return found


@pytest.mark.slow
def test_a_huge_budget_takes_the_quickest_and_goes_on_from_its_trial() -> None:
    scenario = calibrated()
    result = ran(scenario)
    found = require_sound(result)
    plan = SplitSetting(scenario).trial_plan
    assert found["chosen"] == plan.codecs[1].name and found["window"] > 0
    exact = SplitSetting(scenario).with_codec(plan.codecs[0], 0)
    assert result["virtual_s"] < 0.8 * exact.predicted_s(exact.total_batches)


@pytest.mark.slow
@pytest.mark.parametrize("budget", [0.0, 1e-9, 1e6])
def test_the_chosen_codec_trains_to_the_bits_of_a_run_that_is_given_it(budget: float) -> None:
    """Its halves and optimisers go on from its own trial, whatever trained after it at the same node."""
    steps = {"window": [[0.0, 0.0]], "adapt": False, "cut": "4", "train": {"momentum": 0.9}}
    found = ran(calibrated(budget, bits="auto", **steps))
    width, tried = found["warm_up"]["bits"], [*found["warm_up"]["seconds"]]
    plain = ran(calibrated(bits=[width], loss_budget=None, **steps))
    assert found["weights_sha256"] == plain["weights_sha256"]
    if not budget:
        assert (width, tried, found["virtual_s"]) == (32, [], plain["virtual_s"])
    else:
        is_last = found["warm_up"]["chosen"] == tried[-1]
        assert len(tried) == 3 and is_last == (budget > 1)
        assert found["virtual_s"] > plain["virtual_s"]


KINDS = {
    "one edge, diagonal feedback": {"error_feedback": "diagonal"},
    "moving cut": {
        "link": "wifi",
        "bytes_per_s": None,
        "latency_s": 0.0,
        "segments": [[0.3, 3e5, 3e5], [9.0, 2e6, 2e6]],
    },
    "averaged halves": {"edges": 2, "train": {"batch_size": 2}},
    "shared half": {"edges": 2, "cloud_model": "shared", "train": {"batch_size": 2}},
    "shared uplink, one processor": {
        "edges": 2,
        "shared_bytes_per_s": [5e5, 5e5],
        "cloud_processors": 1,
        "train": {"batch_size": 2},
    },
    "frozen front": {"frozen": "1"},
    "reverse": {"model": "digit-generator", "classes": [1], "train": {"batch_size": 2}},
    "int8 edge": {"precision": {"arithmetic": "int8"}, "train": {"optimizer": None}},
    "groups of batches": {"grouped": True},
    "mixed edge": {"precision": {"arithmetic": "mixed"}},
    "joined parties": {
        "model": "click-model",
        "images": "clicks",
        "edges": 2,
        "train": {"batch_size": 256, "epochs": 2, "learning_rate": 0.05},
    },
    "heat and users": {
        "edges": 2,
        "train": {"batch_size": 2},
        "tables": {
            "thermal": {"fan": "fixed", "rpm": 3250, "hot_boards": {"0": 0.01}, "ambient_c": 33.0},
            "background_load": {"games": "tidal", "low": 0.5, "high": 0.6, "mean_session_s": 300},
        },
    },
    "a peer that waits": {"name": "split"},
    "a peer that does not": {"name": "pipelined"},
}
QUICK = ("moving cut",)


@pytest.mark.parametrize(
    "kind",
    [pytest.param(kind, marks=[] if kind in QUICK else [pytest.mark.slow]) for kind in KINDS],
)
def test_a_calibration_goes_together_with_every_kind_of_split_and_is_resumed(
    kind: str, tmp_path: Path
) -> None:
    settings = dict(KINDS[kind])
    train = {key: each for key, each in settings.pop("train", {}).items() if each is not None}
    tables = settings.pop("tables", {})
    document = to_document(calibrated(**settings, train=train))
    scenario = from_document({**document, **tables})
    without_drawing(scenario, tmp_path / "whole")
    stop_after(scenario, tmp_path / "cut", 2)
    assert resume(scenario, tmp_path / "cut")["resumed_from"] == [2]
    result = assert_ends_as(tmp_path / "whole", tmp_path / "cut")
    found = require_sound(result)
    assert found["window"] == 0 or settings.get("name") != "split"


def test_without_a_budget_of_loss_a_short_training_runs_too() -> None:
    settings = {"train": {"batch_size": 32, "epochs": 1}}
    result = ran(calibrated(0.0, **settings))
    assert result["warm_up"]["chosen"] == "k0b32g32" and result["split"]["max_staleness"] == 0


def test_edges_alone_have_nothing_to_calibrate() -> None:
    result = ran(calibrated(name="edge-only", train={"batch_size": 32, "epochs": 1}))
    assert not result["warm_up"]["seconds"] and result["warm_up"]["num_rounds"] == 0


def test_a_plan_says_that_a_run_calibrates() -> None:
    assert any("calibrates" in note for note in plan_split(calibrated())["notes"])


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({**ALL, "loss_budget": None}, ["window = 'auto'", "loss_budget"]),
        ({"loss_budget": 0.1}, ["loss_budget = 0.1", "auto"]),
        ({**ALL, "loss_budget": -1.0}, ["loss_budget = -1"]),
        ({**ALL, "loss_budget": 0.1, "delta": True}, ["delta = True"]),
        ({"bits": "auto", "loss_budget": 0.1, "codec_for": "ours"}, ["codec_for = 'ours'"]),
        ({"bits": "least", "loss_budget": 0.1}, ["bits"]),
        (
            {**ALL, "loss_budget": 0.1, "edges": 2, "event": [{"soc": 1, "round": 1}]},
            ["window = 'auto'", "[[event]]"],
        ),
    ],
)
def test_what_is_not_calibrated_is_one_line(settings: dict[str, Any], named: list[str]) -> None:
    refused(lambda: split(**settings), *named)


def test_a_training_that_is_too_short_and_a_deployment_are_refused_before_they_start() -> None:
    short = split(**{**CONSTANT, **SLOW_LINK}, **ALL, loss_budget=0.1)
    refused(lambda: prepare(short), "14 batches", error=InfeasiblePlan)
    refused(lambda: prepare(calibrated(), "deployment"), "window = 'auto'", "--engine local")


def test_a_cloud_does_not_serve_what_is_not_given() -> None:
    refused(lambda: _scenario(SHIPPED, ["edgecloud.bits=[8]"]), "window = 'auto'")
