"""The pages of papers have every item of the lists, the published numbers, and ours as commands print them."""

import json
import re
import runpy
import sys
from io import StringIO
from pathlib import Path

import pytest

from socflower.cli.paper import shown_cells
from socflower.paper.comparison import Row, compare_item, read_paper
from tests.command_line import Socflower
from tests.test_doc_blocks import NUMBER, as_number

DOCS = Path(__file__).parents[1] / "docs"
PAPERS = [page.stem for page in sorted((DOCS / "papers").glob("*.md"))]
TOLERANCE = 0.05


def rows_of(text: str) -> list[list[str]]:
    return [line.strip("|").split("|") for line in text.splitlines() if line.startswith("|")]


@pytest.mark.parametrize("name", PAPERS)
def test_a_page_has_every_item_with_its_state_and_the_papers_numbers(name: str) -> None:
    paper, page = read_paper(name), (DOCS / "papers" / f"{name}.md").read_text("utf-8")
    states = re.findall(r"^Place: .*\*\*([\w ]+)\*\*\.$", page, re.MULTILINE)
    assert states == [item.state for item in paper.items], "run make papers"
    cells = [cell for item in paper.items for cell in item.cells]
    rows = [row for row in rows_of(page) if row[0] not in ("cell", "---")]
    expected = [
        [cell.key.replace("|", ","), shown_cells(Row(cell=cell, ours=""))[0], cell.use]
        for cell in cells
    ]
    assert [[row[0], row[1], row[4]] for row in rows] == expected, "run make papers"


@pytest.mark.slow
@pytest.mark.timeout(2700)
@pytest.mark.parametrize("name", PAPERS)
def test_our_numbers_of_a_page_are_what_is_computed(name: str) -> None:
    paper, page = read_paper(name), (DOCS / "papers" / f"{name}.md").read_text("utf-8")
    shown = [row[2] for row in rows_of(page) if row[0] not in ("cell", "---")]
    now = [
        shown_cells(row)[1].replace("|", ",")
        for item in paper.items
        for row in compare_item(paper, item)
    ]
    assert [one for one in zip(shown, now, strict=True) if not are_near(*one)] == []


def are_near(shown: str, now: str) -> bool:
    """Whether two texts have the same words, and numbers within 5 %, as results differ between processors."""
    numbers = [[as_number(text) for text in re.findall(NUMBER, side)] for side in (shown, now)]
    return re.split(NUMBER, shown) == re.split(NUMBER, now) and all(
        abs(one - other) <= TOLERANCE * abs(one) for one, other in zip(*numbers, strict=True)
    )


def test_a_page_is_made_of_what_the_command_prints(
    socflower: Socflower, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    document = json.loads(socflower("paper socflow --item latency --json").out)
    main = runpy.run_path(str(DOCS / "paper_pages.py"))
    monkeypatch.setitem(main["main"].__globals__, "PAGES", tmp_path)
    monkeypatch.setattr(sys, "stdin", StringIO(json.dumps(document)))
    main["main"]()
    assert "|least|2.3 x|2.08 x|0.90|calibration|" in (tmp_path / "socflow.md").read_text("utf-8")
    assert (tmp_path / "socflow.svg").read_bytes().startswith(b"<?xml")
