"""A folder of scenarios under several seeds: which commands check its claims, and what their table says."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from socflower.scenario.schema.file import load_scenario
from socflower.scenario.suite import TIGHT, Suite, claims_of, run_suite, scenario_files_in
from tests.command_line import Socflower, is_mistake

SCENARIOS = Path(__file__).parents[2] / "scenarios"
TINY = """# Do two groups of two SoCs learn digits?
seed = 3
[cluster]
boards = 2
socs_per_board = 2
device = "raspberry-pi-4b"
[model]
name = "lenet5"
[data]
name = "digits"
[train]
epochs = 1
batch_size = 64
[strategy]
name = "socflow"
groups = 2
[expect]
"""


def claim(name: str, expected: float, observed: float | None) -> dict[str, object]:
    held = observed is not None
    if observed is not None:
        held = observed >= expected if name.startswith("min_") else observed <= expected
    return {"name": name, "expected": expected, "observed": observed, "holds": held}


def test_a_claims_margin_is_that_of_the_worst_seed() -> None:
    (lower,) = claims_of([claim("min_accuracy", 0.8, value) for value in (0.9, 0.84, 0.96)])
    assert lower["margin"] == pytest.approx(0.05) and lower["holds"]
    # Mean 0.9, standard deviation 0.06.
    assert lower["spreads"] == pytest.approx(0.1 / 0.06) and lower["is_tight"] == (
        TIGHT > 0.1 / 0.06
    )
    (upper,) = claims_of([claim("max_virtual_s", 34.0, value) for value in (30.0, 36.0)])
    assert upper["margin"] == pytest.approx(-2 / 34) and not upper["holds"]
    (zero,) = claims_of([claim("max_events", 0.0, 0.0)])
    assert (zero["margin"], zero["spreads"], zero["is_tight"]) == (0.0, None, False)
    (unknown,) = claims_of([claim("min_peak_c", 30.0, None)])
    assert unknown["margin"] is None and not unknown["holds"]
    (unchecked,) = claims_of([{**claim("min_speedup_ring", 2.0, None), "holds": None}])
    assert not unchecked["holds"]


def test_claims_about_others_are_compared_and_claims_of_plans_are_planned(tmp_path: Path) -> None:
    suite = Suite(files=(), out=tmp_path, seeds=(1, 2), overrides=("train.epochs=1",))

    def words(name: str) -> tuple[str, ...]:
        file = SCENARIOS / f"{name}.toml"
        return suite.words(file, load_scenario(file))

    split = words("split_cross_silo")
    assert split[0] == "compare" and split[split.index("--seeds") + 1] == "1,2"
    names = split[split.index("--strategies") + 1].split(",")
    assert names[0] == load_scenario(SCENARIOS / "split_cross_silo.toml").strategy.name
    assert "split" in names
    assert words("planned/pipeline_pays")[0] == "plan"
    alone, dead = words("auto_groups"), words("dead_client")
    assert (alone[-1], dead[-1]) == ("0", "2")
    file = SCENARIOS / "dead_client.toml"
    dead_client = load_scenario(file)
    died, hung = dead_client.events
    two_hang = dead_client.replaced(events=(hung, hung.replaced(soc=died.soc)))
    assert suite.words(file, two_hang)[-1] == "3"
    assert "," not in alone[alone.index("--strategies") + 1]


def test_a_folder_with_a_project_is_an_app_and_files_of_a_suite_have_names_of_their_own() -> None:
    assert len(scenario_files_in(SCENARIOS)) > 40
    assert scenario_files_in(SCENARIOS / "quickstart_app") == ()


def test_a_refused_file_is_a_row_and_fails_the_suite(socflower: Socflower, tmp_path: Path) -> None:
    folder = tmp_path / "suite"
    folder.mkdir()
    (folder / "broken.toml").write_text("[cluster\n")
    (folder / "unknown.toml").write_text("[strategy]\nname = 'none'\n")
    ran = socflower(f"run {folder} --seeds 1,2 --out {tmp_path}/out --json")
    document = json.loads(ran.out)
    assert ran.status == 1 and not document["holds"] and document["seeds"] == [1, 2]
    assert [row["name"] for row in document["rows"]] == ["broken", "unknown"]
    assert all(row["error"] and row["command"] is None for row in document["rows"])
    assert document == json.loads((tmp_path / "out" / "suite.json").read_text())


def test_options_of_one_run_are_refused(socflower: Socflower, tmp_path: Path) -> None:
    is_mistake(socflower(f"run {SCENARIOS} --engine local --out {tmp_path}/out"), "--engine")
    is_mistake(socflower(f"run {SCENARIOS} --seeds 1,1 --out {tmp_path}/out"), "--seeds 1,1")
    app = SCENARIOS / "quickstart_app"
    is_mistake(socflower(f"run {app} --seeds 1 --out {tmp_path}/out"), "--seeds 1", app)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_suite_runs_two_at_a_time_and_a_claim_that_fails_fails_it(
    socflower: Socflower, tmp_path: Path
) -> None:
    folder = tmp_path / "suite"
    folder.mkdir()
    (folder / "holds.toml").write_text(f"{TINY}min_accuracy = 0.2\nmax_events = 0\n")
    (folder / "fails.toml").write_text(f"{TINY}min_speedup_over_sgd = 100.0\n")
    ran = socflower(f"run {folder} --seeds 1,2 --workers 2 --out {tmp_path}/out")
    assert ran.status == 1 and "FAILS  fails: min_speedup_over_sgd 100" in ran.out
    fails, holds = json.loads((tmp_path / "out" / "suite.json").read_text())["rows"]
    assert holds["holds"] and len(holds["claims"][0]["observed"]) == 2 and holds["cpu_s"] > 0
    assert not fails["holds"] and fails["error"] is None and fails["claims"][0]["margin"] < 0
    # Finished trainings are used again, so that their processor time is not known.
    again = socflower(f"run {folder} --seeds 1,2 --out {tmp_path}/out --json")
    assert [row["cpu_s"] for row in json.loads(again.out)["rows"]] == [None, None]


def test_what_has_ended_is_in_the_file_before_the_next_ends(tmp_path: Path) -> None:
    files = tuple(tmp_path / f"{name}.toml" for name in ("first", "second"))
    for file in files:
        file.write_text("[cluster\n")
    in_file: list[list[str]] = []

    def note(_: object) -> None:
        document = json.loads((tmp_path / "out" / "suite.json").read_text())
        assert document["num_missing"] == 2 - len(document["rows"]) and not document["holds"]
        in_file.append([row["name"] for row in document["rows"]])

    run_suite(Suite(files=files, out=tmp_path / "out"), on_row=note)
    assert in_file == [["first"], ["first", "second"]]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_ctrl_c_ends_the_processes_and_says_what_has_ended(tmp_path: Path) -> None:
    folder = tmp_path / "suite"
    folder.mkdir()
    (folder / "bad.toml").write_text("[cluster\n")
    (folder / "long.toml").write_text(TINY.replace("epochs = 1", "epochs = 500"))
    command = [sys.executable, "-c", "from socflower.cli.main import main; main()"]
    words = ["run", str(folder), "--seeds", "1", "--out", str(tmp_path / "out")]
    with subprocess.Popen([*command, *words], stderr=subprocess.PIPE, text=True) as suite:
        while not list((tmp_path / "out").glob("long/**/.socflower.lock")) and suite.poll() is None:
            time.sleep(0.2)
        os.kill(suite.pid, signal.SIGINT)
        _, said = suite.communicate(timeout=60)
    assert suite.returncode == 130 and "interrupted; 1 of 2 scenarios ended" in said
    document = json.loads((tmp_path / "out" / "suite.json").read_text())
    assert [row["name"] for row in document["rows"]] == ["bad"] and document["num_missing"] == 1
    left = subprocess.run(["pgrep", "-f", str(folder)], capture_output=True, text=True, check=False)
    assert left.stdout == ""
