"""SoCs that their users need: a scenario's event makes them leave within a round, and come back later."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from socflower.errors import TrainingFailed
from socflower.scenario.prepared_run import prepare
from socflower.scenario.runner import run_scenario
from socflower.scenario.schema.config import EventConfig
from socflower.scenario.schema.file import parse_scenario
from socflower.toml_file import read_table
from tests.one_line import refused
from tests.scenario.small_runs import small, small_result

pytestmark = pytest.mark.usefixtures("on_few_digits")


def preempt(soc: int, server_round: int, rounds: int = 1, at: float = 0.5) -> EventConfig:
    return EventConfig(kind="preempt", soc=soc, round=server_round, rounds=rounds, at=at)


def kinds(result: dict[str, Any]) -> list[list[str]]:
    return [[event["kind"] for event in entry["events"]] for entry in result["rounds"]]


def test_a_soc_leaves_is_planned_without_and_comes_back() -> None:
    result = small_result(boards=(4, 4), epochs=3, interval=0.5, events=(preempt(1, 2, rounds=2),))
    assert kinds(result) == [
        [],
        [],
        ["preempted"],
        ["replanned"],
        ["returned"],
        ["replanned"],
        [],
    ]
    texts = [event["text"] for entry in result["rounds"] for event in entry["events"]]
    assert texts[:2] == [
        "group 0: SoC 1 was preempted by its user",
        "new plan: 2 groups of 7 SoCs, without 1",
    ]
    assert texts[-1] == "new plan: 2 groups of 8 SoCs"


def test_a_spare_soc_stands_in_and_stays_when_the_other_one_is_back() -> None:
    result = small_result(
        boards=(3, 3), socs=4, use_spares=True, epochs=3, events=(preempt(1, 2), preempt(0, 4))
    )
    texts = [event["text"] for entry in result["rounds"] for event in entry["events"]]
    plans = [text for text in texts if text.startswith("new plan")]
    assert plans == [
        "new plan: 2 groups of 4 SoCs, without 1, with 2 instead",
        # Then SoC 1, which is back, is the spare one on the board of SoC 0.
        "new plan: 2 groups of 4 SoCs, without 0",
    ]


@pytest.mark.parametrize(
    ("strategy", "said"),
    [
        ({"socs": 4, "reshuffle": False}, "reshuffle"),
        ({"socs": 4, "preemption": "groups"}, "preemption"),
        ({}, "socs"),
        ({"name": "fedavg", "socs": 4}, "fedavg"),
        ({"name": "tree-fedavg", "socs": 4}, "tree-fedavg"),
    ],
)
def test_spare_socs_that_could_not_stand_in_are_refused(
    strategy: dict[str, Any], said: str
) -> None:
    document = {
        "schema": 1,
        "cluster": {"boards": [3, 3]},
        "strategy": {"groups": 2, "sync_interval_epochs": 0.5, "use_spares": True, **strategy},
    }

    def check() -> None:
        prepare(parse_scenario(document, name="spares", question="", where="spares"))

    refused(check, "use_spares", said)


def test_leaving_costs_time_but_not_the_gradient_of_a_group() -> None:
    """The members that stay take over the whole batch (F4): the round's weights differ by rounding only."""
    left, undisturbed = (
        small_result(boards=(4, 4), epochs=1, interval=0.5, events=events)
        for events in ((preempt(1, 1, at=0.0),), ())
    )
    assert left["rounds"][1]["loss"] == pytest.approx(undisturbed["rounds"][1]["loss"], rel=1e-3)
    assert left["rounds"][1]["events"]


def test_a_group_all_of_whose_socs_leave_is_left_out_and_the_others_go_on() -> None:
    events = tuple(preempt(soc, 1) for soc in (0, 1))
    result = small_result(epochs=2, interval=1.0, events=events)
    assert kinds(result)[1] == ["preempted", "preempted", "group-left"]
    assert "replanned" in kinds(result)[2]
    assert np.isfinite(result["final_accuracy"])


def test_fedavg_takes_no_notice() -> None:
    result = small_result("fedavg", events=(preempt(1, 1),))
    assert kinds(result) == [[], []]
    assert result["weights_sha256"] == small_result("fedavg")["weights_sha256"]


def test_with_nobody_left_the_training_ends_with_a_line() -> None:
    nobody = small(events=tuple(preempt(soc, 1) for soc in range(4)))
    refused(lambda: run_scenario(nobody, num_workers=0), "preempted", error=TrainingFailed)


@pytest.mark.parametrize(
    ("kind", "key", "value"),
    [("preempt", "rounds", 0), ("preempt", "at", 1.0), ("nan", "rounds", 2)],
)
def test_events_that_cannot_be_are_refused(kind: str, key: str, value: float) -> None:
    event = {"kind": kind, "soc": 0, "round": 1, key: value}
    refused(lambda: read_table(EventConfig, event, "x"), key)


def test_the_trained_model_can_be_kept(tmp_path: Path) -> None:
    file = tmp_path / "model.npz"
    run_scenario(small(), num_workers=0, model_to=file)
    with np.load(file) as arrays:
        assert sum(arrays[name].size for name in arrays.files) == 61_706
        assert all(np.isfinite(arrays[name]).all() for name in arrays.files)
