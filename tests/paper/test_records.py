"""Cells of papers, what is computed for them, and how near it is."""

import json
import math

import pytest

from socflower.errors import ConfigError
from socflower.paper.asteroid.items import COMPUTE
from socflower.paper.records import PAPERS, Cell, Item, Row, compare_item, read_paper, score
from tests.command_line import Socflower


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
    assert {cell.use for cell in paper.item("table-1").cells} == {"calibration"}
    used = [cell.key for cell in paper.item("table-4").cells if cell.use == "calibration"]
    assert used == ["efficientnet-b1/B/1000/device"]
    assert {cell.use for cell in paper.item("table-2").cells if cell.value is not None} == {
        "not comparable",
        "other reading",
    }


@pytest.mark.parametrize("item_id", ["table-1", "figure-5", "figure-6", "table-8"])
def test_items_compute_ours_for_every_cell(item_id: str) -> None:
    paper = read_paper("asteroid")
    rows = compare_item(paper, paper.item(item_id))
    assert [row.cell for row in rows] == list(paper.item(item_id).cells)
    if item_id == "table-1":
        assert all(
            0.99 < row.ratio < 1.15 for row in rows if row.ratio is not None
        )  # fixed costs come on top
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
    assert len(over_devices) == 12 and all(
        0.6 < ratio < 1.2 for ratio in over_devices if ratio is not None
    )


def test_a_score_is_of_scored_cells_alone() -> None:
    def row(ours: float | bool | str, **cell: object) -> Row:
        return Row(cell=Cell.model_validate({"key": "k", **cell}), ours=ours)

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
    found = score(rows)
    assert (found.num_numbers, found.num_without, found.num_statements, found.num_held) == (
        3,
        1,
        2,
        1,
    )
    assert found.typical_factor == pytest.approx(
        math.sqrt(8.0)
    ) and found.worst_factor == pytest.approx(4.0)
    assert score([]).typical_factor is None


def test_where_the_paper_prints_nothing_or_ours_is_a_text_there_is_neither_ratio_nor_verdict() -> (
    None
):
    for own, ours in (
        ({"use": "not printed"}, 3.0),
        ({"value": 2.0}, "out of memory"),
        ({"says": True}, "no data"),
    ):
        row = Row(cell=Cell.model_validate({"key": "k", **own}), ours=ours)
        assert row.ratio is None and row.holds is None
        assert row.to_document()["paper"] == own.get("value", own.get("says"))


def test_cells_and_items_that_cannot_be_are_refused() -> None:
    for cell in ({}, {"value": 1.0, "says": True}, {"value": 1.0, "use": "not printed"}):
        with pytest.raises(ValueError, match="needs either value or says, or neither"):
            Cell.model_validate({"key": "k", **cell})
    with pytest.raises(ValueError, match="at least 1 item"):
        Item.model_validate(
            {"id": "i", "title": "t", "place": "p", "state": "compared", "cell": ()}
        )
    with pytest.raises(
        ConfigError, match=rf"paper 'other' is unknown; there are {', '.join(PAPERS)}"
    ):
        read_paper("other")


def test_the_command_lists_refuses_and_compares(socflower: Socflower) -> None:
    listed = socflower("paper", "asteroid", "--list", "--json")
    assert listed.status == 0
    items = json.loads(listed.out)["items"]
    assert {item["id"]: item["state"] for item in items}["table-1"] == "calibration"
    assert "figure-14" in socflower("paper", "asteroid", "--list").out
    shown = json.loads(socflower("paper", "asteroid", "--figure", "5", "--json").out)
    assert (
        shown["items"][0]["score"]["num_held"] == 3
        and shown["items"][0]["rows"][0]["holds"] is True
    )
    assert "3 of 3 statements hold" in socflower("paper", "asteroid", "--figure", "5").out
    for arguments, message in (
        (("--figure", "3"), "has no 'figure-3'"),
        (("--figure", "5", "--list"), "give one of"),
    ):
        ran = socflower("paper", "asteroid", *arguments)
        assert ran.status == 2 and message in ran.err and len(ran.err.strip().splitlines()) == 1
