"""`socflower paper`: a paper's tables and figures beside ours."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from socflower.cli.options import Json
from socflower.cli.process import prints_to_stderr
from socflower.cli.terminal import OUT, print_json, print_text
from socflower.errors import ConfigError

# Importing planners and models takes long, so only the command does.
if TYPE_CHECKING:
    from socflower.paper.records import Item, Paper, PaperScore, Row


def paper(
    name: Annotated[str, typer.Argument(help="asteroid.")],
    table: Annotated[int | None, typer.Option(help="One table.")] = None,
    figure: Annotated[int | None, typer.Option(help="One figure.")] = None,
    item: Annotated[str | None, typer.Option(help="One by its name.")] = None,
    show_list: Annotated[
        bool, typer.Option("--list", help="Only list them, with their states.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Compute a paper's tables and figures anew, beside the published numbers."""
    from socflower.paper.records import compare_item, read_paper, score

    chosen = [
        *(f"table-{number}" for number in [table] if number is not None),
        *(f"figure-{number}" for number in [figure] if number is not None),
        *([] if item is None else [item]),
    ]
    found = read_paper(name)
    if len(chosen) + show_list > 1:
        raise ConfigError("paper: give one of --table, --figure, --item and --list")
    if show_list:
        _print_list(found, as_json)
        return
    items = [found.item(chosen[0])] if chosen else list(found.items)
    documents: list[dict[str, Any]] = []
    rows: list[Row] = []
    for each in items:
        with prints_to_stderr():
            own = compare_item(found, each)
        rows += own
        if as_json:
            documents.append(
                {
                    **_item_document(each),
                    "rows": [row.to_document() for row in own],
                    "score": score(own).to_document(),
                }
            )
        else:
            _print_item(OUT, found, each, own)
    if as_json:
        print_json(
            {
                "schema": 1,
                "paper": found.name,
                "items": documents,
                "score": score(rows).to_document(),
            }
        )
    elif len(items) > 1:
        print_text(f"all: {_score_text(score(rows))}", OUT, "bold")


def _item_document(item: "Item") -> dict[str, Any]:
    return {
        "id": item.id,
        "title": item.title,
        "place": item.place,
        "state": item.state,
        "note": item.note,
    }


def _print_list(found: "Paper", as_json: bool) -> None:
    if as_json:
        print_json(
            {
                "schema": 1,
                "paper": found.name,
                "title": found.title,
                "items": [
                    {**_item_document(item), "num_cells": len(item.cells)} for item in found.items
                ],
            }
        )
        return
    print_text(found.title, OUT, "bold")
    table = Table("name", "state", "what", header_style="bold")
    for item in found.items:
        table.add_row(item.id, item.state, escape(item.title))
    OUT.print(table)


def _print_item(console: Console, found: "Paper", item: "Item", rows: Sequence["Row"]) -> None:
    table = Table(
        "cell",
        "paper",
        "ours",
        "ours / paper",
        "use",
        header_style="bold",
        title_justify="left",
        title=f"{item.id}: {escape(item.title)}",
    )
    for row in rows:
        unit = f" {row.cell.unit}" if row.cell.unit else ""
        if row.cell.says is not None:
            held = (
                row.ours if isinstance(row.ours, str) else "holds" if row.holds else "does not hold"
            )
            table.add_row(
                escape(row.cell.key),
                "stated" if row.cell.says else "denied",
                held,
                "",
                row.cell.use,
            )
            continue
        ours = row.ours if isinstance(row.ours, str) else f"{row.ours:.3g}{unit}"
        table.add_row(
            escape(row.cell.key),
            "" if row.cell.value is None else f"{row.cell.value:g}{unit}",
            ours,
            "" if row.ratio is None else f"{row.ratio:.2f}",
            row.cell.use,
        )
    console.print(table)
    if item.note:
        print_text(f"note: {item.note}", console, "dim")
    print_text(
        f"{_score_text(_score(rows))}; again: socflower paper {found.name} --item {item.id}",
        console,
    )


def _score(rows: Sequence["Row"]) -> "PaperScore":
    from socflower.paper.records import score

    return score(rows)


def _score_text(own: "PaperScore") -> str:
    """Return a score as a sentence."""
    parts = []
    if own.typical_factor is not None:
        without = f", {own.num_without} without a number" if own.num_without else ""
        parts.append(
            f"{own.num_numbers} scored numbers{without}, at the median {own.typical_factor:.2f} times off, at "
            f"most {own.worst_factor:.2f}"
        )
    if own.num_statements:
        parts.append(f"{own.num_held} of {own.num_statements} statements hold")
    return "; ".join(parts) or "nothing is scored"
