"""Write docs/papers/NAME.md from what `socflower paper NAME --json` prints; `make papers` does so for each paper."""

import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from socflower.cli.paper import score_text, shown_cells
from socflower.paper.comparison import Paper, Row, command_of, read_paper, score
from socflower.paper.plots import ratio_plot

PAGES = Path(__file__).parent / "papers"


def main() -> None:
    """Read the document from the standard input, and write its page and picture."""
    document = json.load(sys.stdin)
    paper = read_paper(document["paper"])
    rows = {item["id"]: rows_of(paper, item) for item in document["items"]}
    (PAGES / f"{paper.name}.svg").write_bytes(
        ratio_plot(paper.name, [row for some in rows.values() for row in some])
    )
    (PAGES / f"{paper.name}.md").write_text("\n".join([*lines(paper, rows), ""]), "utf-8")


def rows_of(paper: Paper, item: Mapping[str, Any]) -> list[Row]:
    """Return the rows of an item as they were when they were printed."""
    cells = {cell.key: cell for cell in paper.item(item["id"]).cells}
    return [Row(cell=cells[row["key"]], ours=row["ours"]) for row in item["rows"]]


def lines(paper: Paper, rows: Mapping[str, list[Row]]) -> Iterator[str]:
    """Yield the lines of a paper's page."""
    yield f"# {paper.title}"
    yield f"\nMade by `make papers` from `socflower paper {paper.name}`, which computes all of it again."
    yield f"In all, {score_text(score([row for some in rows.values() for row in some]))}."
    yield f"\n![Numbers of ours over the paper's]({paper.name}.svg)"
    for item in filter(lambda item: item.id in rows, paper.items):
        yield f"\n## {item.title}\n\nPlace: {item.place}; **{item.state}**."
        if item.note:
            yield f"{item.note[0].upper()}{item.note[1:]}."
        yield f"`socflower paper {paper.name} --item {item.id}`"
        for file in item.stored:
            yield f"\nStored in [{file}](../results/{file}), made by `{command_of(file)}`."
        if rows[item.id]:
            yield "\n|cell|paper|ours|ours / paper|use|\n|---|---|---|---|---|"
        for row in rows[item.id]:
            texts = [row.cell.key, *shown_cells(row), row.cell.use]
            yield f"|{'|'.join(text.replace('|', ',') for text in texts)}|"


if __name__ == "__main__":
    main()
