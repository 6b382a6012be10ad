"""The pages stay short, and their tables fit a screen."""

from pathlib import Path

import pytest

from tests.test_doc_blocks import PAGES, ROOT

README = ROOT / "README.md"


def test_all_written_pages_together_have_at_most_25000_words() -> None:
    """All but the changelog, which only grows, and what is made from the code: the reference and the papers."""
    words = {
        str(page.relative_to(ROOT)): len(page.read_text("utf-8").split())
        for page in PAGES
        if page.name != "CHANGELOG.md" and page.parent.name not in ("reference", "papers")
    }
    assert sum(words.values()) <= 25_000, sorted(words.items(), key=lambda entry: -entry[1])


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_a_page_and_its_tables_are_not_cut_off(page: Path) -> None:
    """A row has at most 160 characters; of the README, which has at most 130 lines, 120."""
    lines = page.read_text("utf-8").splitlines()
    most = 120 if page == README else 160
    assert page != README or len(lines) <= 130
    assert [
        f"{page.relative_to(ROOT)}:{number}: {len(line)} characters"
        for number, line in enumerate(lines, 1)
        if line.lstrip().startswith("|") and len(line) > most
    ] == []
