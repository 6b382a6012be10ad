"""What an operator can choose between, whether a window of hours will do, and figures that cannot be meant."""

import json
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from socflower.cluster.cluster_file import doubtful_figures, load_cluster
from socflower.engines.ending import Ending, next_time
from socflower.errors import ConfigError
from socflower.scenario.choices import CLEARLY, group_counts
from socflower.scenario.schema.file import load_scenario, scenario_cluster
from socflower.scenario.window import planned_window, window_lines
from tests.command_line import Socflower, is_mistake

PIS = '[cluster]\nboards = 1\nsocs_per_board = 12\ndevice = "raspberry-pi-4b"\n'


@pytest.fixture
def pis(tmp_path: Path) -> Path:
    file = tmp_path / "pis.toml"
    file.write_text(PIS)
    return file


def planned(socflower: Socflower, command: str, *words: object) -> dict[str, Any]:
    ran = socflower(f"plan {command} --json", *words)
    assert ran.status in (0, 1), ran.err
    return dict(json.loads(ran.out))


def test_twelve_pis_are_not_told_that_one_is_quicker(socflower: Socflower, pis: Path) -> None:
    document = planned(socflower, f"{pis}")
    rows = document["choices"]
    three = next(row for row in rows if row["groups"] == 3)
    assert three["speedup"] == pytest.approx(3.36, abs=0.01)
    assert {row["groups"] for row in rows} >= {None, *range(1, 13)}
    assert {"ring", "fedavg", "sgd", "local-sgd"} <= {row["strategy"] for row in rows}
    (own,) = [row for row in rows if row["is_planned"]]
    assert own["epoch_s"] == document["predicted"]["epoch_s"] and own["speedup"] < 1
    assert own["training_s"] == pytest.approx(10 * own["epoch_s"])
    assert own["memory_bytes"] == document["predicted"]["memory_bytes"]
    best = min(row["epoch_s"] for row in rows)
    assert document["one_soc"]["epoch_s"] > CLEARLY * best
    assert (
        "one SoC is quicker" not in document["verdict"] and "quickest epoch" in document["verdict"]
    )
    said = socflower(f"plan {pis} --price-per-kwh 0.3").out
    assert "price" in said and "a Raspberry Pi" in said and "is a slot" in said


def test_counts_are_all_of_few_and_powers_of_two_of_many() -> None:
    assert group_counts(5, 1, 5) == (1, 2, 3, 4, 5)
    assert group_counts(60, 12, 7) == (*range(1, 13), 16, 32, 60)


def test_a_window_says_with_how_many_socs_and_by_what_margin(pis: Path) -> None:
    scenario = load_scenario(pis, ["train.epochs=20000", "strategy.groups=4"])
    cluster = scenario_cluster(scenario)
    evening, morning = datetime(2026, 11, 27, 22), datetime(2026, 11, 28, 6)
    window = planned_window(scenario, cluster, evening, morning)
    first = window["choices"][0]
    assert window["fits"] and window["window_s"] == 8 * 3600 and first["num_socs"] == 12
    assert first["margin_s"] == 8 * 3600 - first["training_s"] > 0 and first["fan_rpm"] is None
    assert "will do: with 12 SoCs" in next(window_lines(window, 20000))
    short = planned_window(scenario, cluster, evening, evening.replace(minute=10))
    assert not short["fits"] and len(short["choices"]) == 1
    assert short["choices"][0]["epochs"] == int(20000 * 600 / first["training_s"])
    assert "will not do" in next(window_lines(short, 20000))


@pytest.mark.slow
def test_a_short_window_needs_faster_fans_than_a_long_one() -> None:
    file = Path(__file__).parents[2] / "scenarios" / "hot_board.toml"
    scenario = load_scenario(file, ["train.epochs=20", "thermal.hot_boards={}"])
    cluster, begin = scenario_cluster(scenario), datetime(2026, 11, 27, 20)
    short, whole = (
        planned_window(scenario, cluster, begin, begin.replace(hour=hour))["choices"][0]
        for hour in (21, 23)
    )
    assert short["fits"] and whole["fits"] and whole["fan_rpm"] == 1100 < short["fan_rpm"]


def test_the_next_time_is_today_or_tomorrow() -> None:
    now = datetime(2026, 11, 27, 22, 30)
    assert next_time("--deadline", "23:00", now) == datetime(2026, 11, 27, 23)
    assert next_time("--deadline", "22:30", now) == datetime(2026, 11, 28, 22, 30)
    for wrong in ("24:00", "6", "06:60", "tomorrow"):
        with pytest.raises(ConfigError, match="--deadline"):
            next_time("--deadline", wrong, now)


def test_a_run_ends_while_its_results_can_still_be_written() -> None:
    ending = Ending(deadline_s=1000.0)
    assert not ending.leaves_no_round(900.0, 60.0) and ending.leaves_no_round(901.0, 60.0)
    assert not Ending().leaves_no_round(1e12, 1e6)


def test_figures_that_cannot_be_meant_are_named(
    socflower: Socflower, tmp_path: Path, pis: Path
) -> None:
    odd = tmp_path / "odd.toml"
    odd.write_text(
        """[cluster]
socs_per_board = 4
device = "odd"
soc_bytes_per_s = 1.0
[device.odd]
idle_w = { value = 9.0, source = "assumption: x" }
network_w = { value = 0.5, source = "assumption: x" }
memory_bytes = { value = 4.0, source = "assumption: x" }
memory_bytes_per_s = { value = 4e9, source = "assumption: x" }
layer_overhead_s = { value = 6e-05, source = "assumption: x" }
[device.odd.processor.cpu]
flops_per_s = { value = 1e9, source = "assumption: x" }
active_w = { value = 3.0, source = "assumption: x" }
"""
    )
    lines = " ".join(doubtful_figures(load_cluster(odd)))
    assert (
        "a link of a soc has 1 bytes" in lines
        and "memory_bytes = 4" in lines
        and "active_w" in lines
    )
    assert doubtful_figures(load_cluster(pis)) == []
    # Less memory than the model has weights is refused, with both numbers.
    is_mistake(socflower(f"plan {odd}"), "memory", "odd")


def test_a_start_without_a_deadline_is_refused(socflower: Socflower, pis: Path) -> None:
    is_mistake(socflower(f"plan {pis} --start 22:00"), "--start 22:00")
    is_mistake(socflower(f"run {pis} --deadline soon"), "--deadline soon")


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_run_with_a_deadline_keeps_model_and_checkpoint_and_resumes(
    socflower: Socflower, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The deadline is so near that one round is trained; without it the same command resumes after that one."""
    monkeypatch.setattr("socflower.engines.ending._CLOSING_S", 24 * 3600.0)
    monkeypatch.setattr(
        Ending,
        "leaves_no_round",
        lambda self, now_s, longest_s: longest_s > 0.5 and bool(self.deadline_s),
    )
    case = tmp_path / "case.toml"
    case.write_text(
        PIS.replace("12", "2")
        + "[train]\nepochs = 3\n[strategy]\nname = 'socflow'\ngroups = 2\n[expect]\nmax_events = 0\n"
    )
    command = f"run {case} --out {tmp_path}/out --workers 0 --json"
    early = json.loads(socflower(f"{command} --deadline 06:00").out)
    assert early["ended_after"] is not None and early["ended_after"] < 3
    assert {"model.npz", "checkpoint"} <= {path.name for path in (tmp_path / "out").iterdir()}
    whole = json.loads(socflower(command).out)
    assert whole["ended_after"] is None and whole["resumed_from"] == [early["ended_after"]]
