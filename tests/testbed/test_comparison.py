"""What the table says of measurements that are made up here: right ones, wrong ones, and groups that drift."""

import json
from itertools import accumulate
from typing import Any

import pytest

from tests.testbed.cases import (
    COMPUTING_IN_TURN,
    CONTENDING,
    FREE,
    INSIDE,
    RACK,
    SMALL_BYTES,
    TOLERANCE,
    Case,
)
from tests.testbed.comparison import Row, compare, gains
from tests.testbed.measure import document, line, main
from tests.testbed.prediction import predicted_steps_s
from tests.testbed.testbed import RunResult
from tests.testbed.topology import GOODPUT, MESSAGE_S


def result_of(case: Case, factor: float, *, apart_s: float = 0.0, right: bool = True) -> RunResult:
    """Return a result in which every step took `factor` times what the simulator says, but for a very slow first."""
    run = case.run("gloo", SMALL_BYTES)
    socs: list[dict[str, Any]] = [{"soc": soc, "ring": None} for soc in range(RACK.num_socs)]
    for ring, steps in enumerate(predicted_steps_s(RACK, run)):
        ends = list(accumulate((factor * step for step in steps), initial=1000.0 + ring * apart_s))
        for place, soc in enumerate(run.rings[ring]):
            # Members end a little apart; what counts is the last one.
            socs[soc] = {
                "soc": soc,
                "ring": ring,
                "ends_s": [end - 0.001 * place for end in ends],
                "right": right,
                "cpu_s": 0.1,
            }
    return RunResult(run=run, socs=tuple(socs))


@pytest.mark.parametrize(
    ("factor", "ok"), [(1.0, True), (1.04, True), (0.96, True), (1.07, False), (0.93, False)]
)
def test_a_measurement_must_be_within_five_percent(factor: float, ok: bool) -> None:
    (row,) = compare(RACK, INSIDE, result_of(INSIDE, factor))
    assert row.error == pytest.approx(1 / factor - 1, abs=1e-4) and row.ok is ok
    assert len(row.steps_s) == 8 and row.cpu_s == pytest.approx(0.4)


def test_wrong_sums_are_never_well() -> None:
    assert [
        row.ok for row in compare(RACK, CONTENDING, result_of(CONTENDING, 1.0, right=False))
    ] == [False, False]


def test_drifting_groups_must_lie_within_the_bracket() -> None:
    rows = compare(RACK, FREE, result_of(FREE, 1.0))
    (low_s, high_s) = rows[0].bracket_s or (0.0, 0.0)
    assert high_s == pytest.approx(rows[0].closed_form_s, rel=0.01) and low_s < 0.75 * high_s
    assert all(row.ok and row.measured_s == pytest.approx(high_s) for row in rows)
    assert not any(row.ok for row in compare(RACK, FREE, result_of(FREE, 1.1)))
    assert not any(row.ok for row in compare(RACK, FREE, result_of(FREE, 0.6)))


def test_drifting_groups_are_simulated_as_far_apart_as_they_are_found() -> None:
    row = compare(RACK, FREE, result_of(FREE, 1.0, apart_s=0.2))[0]
    assert row.bracket_s is not None and row.simulated_s == pytest.approx(
        row.bracket_s[1] - 0.2, rel=0.01
    )


def test_turns_must_gain_and_not_more_than_the_simulator_says() -> None:
    def gained(free: float, in_turn: float) -> bool:
        rows: list[Row] = [
            *compare(RACK, FREE, result_of(FREE, free)),
            *compare(RACK, COMPUTING_IN_TURN, result_of(COMPUTING_IN_TURN, in_turn)),
        ]
        (gain,) = gains(rows)
        assert gain.measured == pytest.approx(free / in_turn * gain.bracket[1], rel=1e-3)
        assert gain.bracket[0] == pytest.approx(1.0, abs=0.01) and gain.bracket[1] == pytest.approx(
            1.44, abs=0.02
        )
        return gain.ok

    assert gained(1.0, 1.0) and not gained(1.0, 1.4) and not gained(1.1, 1.0)
    assert gains(compare(RACK, FREE, result_of(FREE, 1.0))) == []


def test_the_document_says_what_the_simulator_was_told_and_a_line_what_was_missed() -> None:
    rows = compare(RACK, INSIDE, result_of(INSIDE, 1.07))
    written = json.loads(json.dumps(document(rows, [])))
    assert written["schema"] == 1 and written["rack"]["soc_bit_per_s"] == 100_000_000
    assert (written["goodput"], written["message_s"], written["tolerance"]) == (
        GOODPUT,
        MESSAGE_S,
        TOLERANCE,
    )
    assert written["rows"][0]["members"] == [0, 1, 2, 3] and not written["rows"][0]["ok"]
    assert line(rows[0]).startswith(
        "inside, gloo, 4 MB, ring 0 of 4: 0.540 s, simulated 0.505 s, -6.5%;"
    )
    assert line(rows[0]).endswith("MISSED")


def test_measuring_says_why_it_cannot(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["measure"])
    monkeypatch.setattr("tests.testbed.measure.missing", lambda: "no network namespaces here")
    assert main() == 2 and capsys.readouterr().err == "no network namespaces here\n"
