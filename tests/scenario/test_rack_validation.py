"""Predictions against measured trainings: the line through rounds, the trainings of a rack, and what is refused."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from socflower.scenario.rack_validation import (
    MOST_LOCAL_SOCS,
    compared,
    rack_trainings,
    round_times,
)
from tests.command_line import Socflower, is_mistake
from tests.one_line import refused

LENGTHS = (0.25, 0.25, 0.25, 0.5, 0.5, 1.0, 2.0)
SECONDS = st.floats(0.1, 100.0)


@pytest.fixture
def rack(tmp_path: Path) -> Path:
    path = tmp_path / "rack.toml"
    path.write_text('[cluster]\nboards = 3\nsocs_per_board = 2\ndevice = "raspberry-pi-4b"\n')
    return path


@given(epoch_s=SECONDS, round_s=SECONDS, late_s=SECONDS, late=st.integers(0, 2))
def test_one_disturbed_round_does_not_move_the_line(
    epoch_s: float, round_s: float, late_s: float, late: int
) -> None:
    rounds = [
        {
            "epochs": length,
            "predicted_s": length * epoch_s / 2,
            "measured_s": round_s + length * epoch_s + (late_s if index == late else 0.0),
        }
        for index, length in enumerate(LENGTHS)
    ]
    found = compared(rounds)
    assert found["epoch"]["measured_s"] == pytest.approx(epoch_s, rel=1e-6)
    assert found["epoch"]["ratio"] == pytest.approx(2.0, rel=1e-6)
    assert found["epoch"]["spread"] == pytest.approx(0.0, abs=1e-6)
    assert found["round"]["measured_s"] == pytest.approx(round_s, abs=1e-6)
    assert found["round"]["predicted_s"] == 0.0 and found["round"]["ratio"] is None


def test_the_first_round_and_those_of_unknown_time_are_left_out() -> None:
    rounds = [
        {"epoch": epoch, "predicted_s": 2 * epoch, "wall_s": wall_s}
        for epoch, wall_s in (
            (0.0, 1.0),
            (0.25, 30.0),
            (0.5, 33.0),
            (1.0, None),
            (2.0, 40.0),
            (4.0, 50.0),
        )
    ]
    assert list(round_times(rounds)) == [
        {"epochs": 0.25, "predicted_s": 0.5, "measured_s": 3.0},
        {"epochs": 2.0, "predicted_s": 4.0, "measured_s": 10.0},
    ]


@pytest.mark.parametrize(
    ("socs", "shapes"),
    [
        (1, [(1, 1)]),
        (2, [(1, 1), (2, 1)]),
        (5, [(1, 1), (5, 1), (5, 2)]),
        (6, [(1, 1), (6, 1), (6, 3)]),
    ],
)
def test_trainings_add_one_cause_after_the_other(
    rack: Path, socs: int, shapes: list[tuple[int, int]]
) -> None:
    overrides = [f"strategy.socs={socs}", "model.name=lenet5"]
    found = [each.scenario for each in rack_trainings(rack, overrides)]
    assert [(each.strategy.socs, each.strategy.groups) for each in found] == shapes
    assert {each.model.name for each in found} == {"lenet5"}


@pytest.mark.parametrize(
    "override", ["strategy.groups=2", "train.epochs=9", "cluster.boards=1", "model.factory=a:b"]
)
def test_a_key_that_the_comparison_decides_is_refused(rack: Path, override: str) -> None:
    refused(lambda: rack_trainings(rack, [override]), override)


@pytest.mark.parametrize("socs", ["0", "7", "'two'", "1.5", "true"])
def test_socs_that_the_rack_lacks_are_refused(rack: Path, socs: str) -> None:
    refused(lambda: rack_trainings(rack, [f"strategy.socs={socs}"]), "strategy.socs", 6)


def test_mistakes_are_one_line_before_anything_starts(
    socflower: Socflower, rack: Path, tmp_path: Path
) -> None:
    is_mistake(socflower("validate", tmp_path / "none.toml"), "none.toml")
    is_mistake(socflower("validate", tmp_path), tmp_path)
    is_mistake(socflower("validate", rack, "--superlink", "10.0.0.1:9"), "--superlink-ca")
    is_mistake(socflower("validate", rack, "--set", "model.name=lenet6"), "lenet6")
    rack.write_text("[cluster]\nboards = 10\n")
    is_mistake(socflower("validate", rack), 50, MOST_LOCAL_SOCS, "--superlink")
    rack.write_text("[model]\nname = 'lenet5'\n")
    is_mistake(socflower("validate", rack), rack, "model")
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_a_local_rack_of_processes_gets_a_report_without_paths(
    socflower: Socflower, rack: Path, tmp_path: Path
) -> None:
    rack.write_text('[cluster]\nboards = [2]\ndevice = "x86-core"\n')
    ran = socflower("validate", rack, "--set", "model.name=lenet5", "--out", "out")
    assert ran.status == 0 and "validation.json" in ran.out
    text = Path("out/validation.json").read_text("utf-8")
    assert str(tmp_path) not in text and "127.0.0.1" not in text
    one_soc, one_group = json.loads(text)["trainings"]
    assert [one_soc["num_socs"], one_group["num_socs"]] == [1, 2]
    for row in (one_soc, one_group):
        assert row["accuracy"] > 0.8 and row["restarts"] == row["events"] == 0
        assert sum(each["epochs"] for each in row["rounds"]) == pytest.approx(4.75, rel=0.02)
        assert all(each["measured_s"] > 0.0 for each in row["rounds"])
        assert row["epoch"]["predicted_s"] > 0.0
