"""Runs whose clients train in worker processes: they change nothing, and one that dies is a group without a reply.

Workers load all of the digits. They are forked from one server, which loads torch once for all tests of this file.
"""

from functools import cache
from pathlib import Path
from typing import Any

import pytest

from socflower.scenario.runner import run_scenario
from socflower.scenario.schema.config import EventConfig, PrecisionConfig
from socflower.scenario.schema.scenario_file import Scenario
from tests.scenario.small_runs import small, without_drawing
from tests.scenario.test_resume import assert_ends_as, resume, stop_after

SCENARIOS: dict[str, Scenario] = {
    "socflow": small(interval=0.5, batch_size=128),
    "fedavg": small("fedavg", batch_size=128),
    # Alpha is measured on many, so that training has few steps.
    "mixed": small(batch_size=128).replaced(
        precision=PrecisionConfig(arithmetic="mixed", held_out=3400)
    ),
}


@cache
def in_this_process(name: str) -> dict[str, Any]:
    return run_scenario(SCENARIOS[name], num_workers=0)


@pytest.mark.parametrize(
    "name",
    ["socflow", *(pytest.param(name, marks=pytest.mark.slow) for name in ("fedavg", "mixed"))],
)
def test_worker_processes_change_nothing(name: str) -> None:
    """Betas come from the catalogue, alphas from the held-out samples: no stopwatch decides a weight."""
    processes = run_scenario(SCENARIOS[name], num_workers=2)
    for key in ("weights_sha256", "virtual_s", "energy_j", "rounds"):
        assert processes[key] == in_this_process(name)[key]


@pytest.mark.slow
def test_the_number_of_workers_may_differ_before_and_after(tmp_path: Path) -> None:
    """From processes to this one, and from this one to processes."""
    scenario = small(interval=1.0, epochs=3, batch_size=512)
    without_drawing(scenario, tmp_path / "reference")
    stop_after(scenario, tmp_path / "out", 1, num_workers=2)
    stop_after(scenario, tmp_path / "out", 2, num_workers=0)
    resume(scenario, tmp_path / "out", num_workers=2)
    assert assert_ends_as(tmp_path / "reference", tmp_path / "out")["resumed_from"] == [1, 2]


def test_a_client_whose_process_dies_is_dropped_and_reported() -> None:
    result = run_scenario(
        small(events=(EventConfig(kind="die", soc=2, round=1),), batch_size=128), num_workers=2
    )
    assert [bool(entry["events"]) for entry in result["rounds"]] == [False, True, False]
    (report,) = result["rounds"][1]["events"]
    assert report["kind"] == "no-reply"
    assert "group 1, SoC 2" in report["text"] and "the client's process died" in report["text"]
    # What was dropped is the same whichever way the group failed.
    raised = small(
        events=(EventConfig(kind="raise", soc=2, round=1),),
        tolerate_client_errors=True,
        batch_size=128,
    )
    assert result["weights_sha256"] == run_scenario(raised, num_workers=0)["weights_sha256"]


@pytest.mark.slow
def test_a_client_that_hangs_is_given_up_on_and_reported() -> None:
    # In round 2, when the workers are up, and long: only the fault may be slower, on a loaded machine too.
    result = run_scenario(
        small(
            events=(EventConfig(kind="hang", soc=0, round=2),), reply_timeout_s=60.0, batch_size=128
        ),
        num_workers=2,
    )
    assert [report["kind"] for report in result["rounds"][2]["events"]] == ["no-reply"]
    assert "group 0, SoC 0" in result["rounds"][2]["events"][0]["text"]
    assert len(result["rounds"]) == 3
