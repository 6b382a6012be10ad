"""Cells of papers, what is computed for them, and how near it is."""

import json
import math
from functools import partial

import pytest

from socflower.paper.asteroid.items import COMPUTE
from socflower.paper.comparison import (
    PAPERS,
    Cell,
    Item,
    Row,
    compare_item,
    read_paper,
    score,
    verdict,
)
from tests.command_line import Socflower
from tests.one_line import refused


def test_every_item_of_the_issue_is_listed_with_its_place_and_state() -> None:
    paper = read_paper("asteroid")
    assert {item.id for item in paper.items} == {
        *(f"table-{number}" for number in (1, 2, 4, 7, 8)),
        *(f"figure-{number}" for number in (1, 5, 6, 12, 13, 14, 15, 16, 17, 18)),
        "equations",
        "energy",
    }
    assert set(COMPUTE) == {item.id for item in paper.items}
    assert all(item.place for item in paper.items)


def test_cells_of_the_calibration_are_not_scored() -> None:
    """Table 1, and the one cell of Table 4 from which the Jetson NX is inferred."""
    paper = read_paper("asteroid")
    used = {
        cell.key: cell.use
        for item in ("table-1", "table-2", "table-4")
        for cell in paper.item(item).cells
    }
    table_1 = {cell.key for cell in paper.item("table-1").cells}
    calibrating = {key for key, use in used.items() if use == "calibration"}
    assert calibrating == {*table_1, "efficientnet-b1/B/1000/device"}
    printed = {cell.use for cell in paper.item("table-2").cells if cell.value is not None}
    assert printed == {"not comparable", "other reading"}


# tests/pipeline/profiler/test_profiler.py compares the times of Table 1.
@pytest.mark.parametrize(
    "item_id",
    [
        pytest.param("table-1", marks=pytest.mark.slow),
        pytest.param("figure-5", marks=pytest.mark.slow),
        "figure-6",
        "table-8",
    ],
)
def test_items_compute_ours_for_every_cell(item_id: str) -> None:
    paper = read_paper("asteroid")
    rows = compare_item(paper, paper.item(item_id))
    assert [row.cell for row in rows] == list(paper.item(item_id).cells)
    if item_id == "table-1":
        # Fixed costs come on top.
        assert all(0.99 < row.ratio < 1.15 for row in rows if row.ratio is not None)
    assert all(row.holds for row in rows if row.cell.says is not None)


@pytest.mark.slow
@pytest.mark.timeout(2400)
def test_all_items_are_computed_and_half_of_the_numbers_are_within_a_third() -> None:
    paper = read_paper("asteroid")
    rows = [row for item in paper.items for row in compare_item(paper, item)]
    found = score(rows)
    assert found.typical_factor is not None and found.typical_factor < 1.5
    assert found.num_held >= 15
    by_key = {row.cell.key: row for row in rows}
    assert by_key["bytes of the task graph equal Eqs. 1 and 2"].holds
    over_devices = [row.ratio for key, row in by_key.items() if key.endswith("/device")]
    fitting = [ratio for ratio in over_devices if ratio is not None]
    assert len(over_devices) == 12 and 0.6 < min(fitting) <= max(fitting) < 1.2


def row(ours: float | bool | str, **cell: object) -> Row:
    return Row(cell=Cell.model_validate({"key": "k", **cell}), ours=ours)


def test_a_score_is_of_scored_cells_alone() -> None:
    rows = [
        row(2.0, value=1.0),
        row(0.25, value=1.0),
        row("out of memory", value=1.0),
        row(True, says=True),
        row(False, says=True),
        row(100.0, value=1.0, use="calibration"),
        row(9.0, value=1.0, use="other reading"),
        row(3.0, use="not printed"),
    ]
    assert score(rows).to_document() == {
        "num_numbers": 3,
        "num_without": 1,
        "typical_factor": pytest.approx(math.sqrt(8.0)),
        "worst_factor": pytest.approx(4.0),
        "num_statements": 2,
        "num_held": 1,
    }
    assert score([]).typical_factor is None


@pytest.mark.parametrize(
    "one",
    [
        row(3.0, use="not printed"),
        row("out of memory", value=2.0),
        row("no data", says=True),
    ],
)
def test_of_what_is_not_printed_and_of_texts_there_is_neither_ratio_nor_verdict(one: Row) -> None:
    assert one.ratio is None and one.holds is None
    printed = one.cell.value if one.cell.says is None else one.cell.says
    assert one.to_document()["paper"] == printed


def test_an_item_is_reproduced_if_all_that_is_scored_is_near_and_holds() -> None:
    near, far = row(1.2, value=1.0), row(1.3, value=1.0)
    fitted, other = row(9.0, value=1.0, use="calibration"), row(9.0, value=1.0, use="other reading")
    assert verdict([near, other, row(True, says=True)]) == "reproduced"
    for wrong in (far, row("none", value=1.0), row(False, says=True)):
        assert verdict([near, wrong]) == "differs"
    assert verdict([fitted, other]) == "calibration"
    assert verdict([other]) == verdict([]) == "not comparable"


def test_cells_and_items_that_cannot_be_are_refused() -> None:
    for cell in ({}, {"value": 1.0, "says": True}, {"value": 1.0, "use": "not printed"}):
        with pytest.raises(ValueError, match="value or says"):
            row(1.0, **cell)
    empty = {"id": "i", "title": "t", "place": "p", "state": "compared", "cell": ()}
    with pytest.raises(ValueError, match="at least one cell"):
        Item.model_validate(empty)
    with pytest.raises(ValueError, match="says why"):
        Item.model_validate(empty | {"state": "not comparable"})
    refused(lambda: read_paper("other"), "other", *PAPERS)
    refused(lambda: read_paper("asteroid").item("figure-3"), "figure-3", "figure-5")


def test_the_command_lists_refuses_and_compares(socflower: Socflower) -> None:
    asteroid = partial(socflower, "paper", "asteroid")
    listed = asteroid("--list", "--json")
    assert listed.status == 0
    states = {item["id"]: item["state"] for item in json.loads(listed.out)["items"]}
    assert states["table-1"] == "calibration"
    assert "figure-14" in asteroid("--list").out
    (shown,) = json.loads(asteroid("--figure", "5", "--json").out)["items"]
    assert shown["score"]["num_held"] == 3 and shown["rows"][0]["holds"] is True
    assert "3 of 3 statements hold" in asteroid("--figure", "5").out
    for arguments, named in ((("3",), "figure-3"), (("5", "--list"), "--list")):
        ran = asteroid("--figure", *arguments)
        assert (ran.status, ran.err.count("\n")) == (2, 1) and named in ran.err
