"""The tables of the pages fit a screen."""

from pathlib import Path

import pytest

from tests.test_doc_blocks import OLD_PAGES

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
PAGES = [page for page in [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]
         if str(page.relative_to(ROOT)) not in OLD_PAGES | {"docs/scenario-keys.md"}]  # which becomes another page


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_no_row_of_a_table_is_cut_off(page: Path) -> None:
    most = 120 if page == README else 160
    rows = enumerate(page.read_text("utf-8").splitlines(), 1)
    assert [f"{page.relative_to(ROOT)}:{number}: {len(row)} characters" for number, row in rows
            if row.lstrip().startswith("|") and len(row) > most] == []
