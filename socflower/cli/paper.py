"""`socflower paper`: a paper's tables and figures beside ours."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from socflower.cli.options import Json
from socflower.cli.process import prints_to_stderr
from socflower.cli.terminal import OUT, print_json, print_text
from socflower.errors import ConfigError
from socflower.wire.saved_state import write_atomically

# Importing planners and models takes long, so only the command does.
if TYPE_CHECKING:
    from socflower.paper.comparison import Item, Paper, PaperScore, Row


def paper(
    name: Annotated[
        str, typer.Argument(help="socflow, socflow-plus, asteroid, edge-cloud or mandheling.")
    ],
    table: Annotated[int | None, typer.Option(help="One table.")] = None,
    figure: Annotated[int | None, typer.Option(help="One figure.")] = None,
    item: Annotated[str | None, typer.Option(help="One by its name.")] = None,
    show_list: Annotated[
        bool, typer.Option("--list", help="Only list them, with their states.")
    ] = False,
    plot: Annotated[
        Path | None, typer.Option(help="SVG: numbers of ours over the paper's.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Compute a paper's tables and figures again, beside the published numbers."""
    from socflower.paper.comparison import compare_item, read_paper, score

    numbered = {"table": table, "figure": figure}
    chosen = [f"{kind}-{number}" for kind, number in numbered.items() if number is not None]
    chosen += [] if item is None else [item]
    found = read_paper(name)
    if len(chosen) + show_list > 1:
        raise ConfigError("paper: give one of --table, --figure, --item and --list")
    if show_list and plot is not None:
        raise ConfigError("paper: --list computes nothing that --plot could draw; leave one out")
    if show_list:
        _print_list(found, as_json)
        return
    items = found.numbered(chosen[0]) if chosen else found.items
    if plot is not None and not any(cell.value for item in items for cell in item.cells):
        raise ConfigError(f"--plot: {chosen[0]} has no numbers in the paper's text; leave it out")
    if plot is not None and not plot.absolute().parent.is_dir():
        raise ConfigError(f"--plot {plot}: there is no folder {plot.parent}; name one that exists")
    documents: list[dict[str, Any]] = []
    rows: list[Row] = []
    for each in items:
        with prints_to_stderr():
            own = compare_item(found, each)
        rows += own
        if as_json:
            own_rows, own_score = [row.to_document() for row in own], score(own).to_document()
            documents.append({**_item_document(each), "rows": own_rows, "score": own_score})
        else:
            _print_item(OUT, found, each, own)
    if plot is not None:
        # Drawing needs matplotlib, which nothing else here does.
        from socflower.paper.plots import ratio_plot

        write_atomically(plot, ratio_plot(chosen[0] if chosen else found.name, rows))
    total = score(rows)
    if as_json:
        document = {"schema": 1, "paper": found.name, "items": documents}
        print_json({**document, "score": total.to_document()})
    elif len(items) > 1:
        print_text(f"all: {score_text(total)}", OUT, "bold")


def _item_document(item: "Item") -> dict[str, Any]:
    keys = ("id", "title", "place", "state", "note", "stored")
    return {key: getattr(item, key) for key in keys}


def _print_list(found: "Paper", as_json: bool) -> None:
    if as_json:
        items = [{**_item_document(item), "num_cells": len(item.cells)} for item in found.items]
        print_json({"schema": 1, "paper": found.name, "title": found.title, "items": items})
        return
    print_text(found.title, OUT, "bold")
    table = Table("name", "state", "what", "why", header_style="bold")
    for item in found.items:
        why = item.note if item.state in ("differs", "not comparable") else ""
        table.add_row(item.id, item.state, escape(item.title), escape(why))
    OUT.print(table)


def _print_item(console: Console, found: "Paper", item: "Item", rows: Sequence["Row"]) -> None:
    heads = ("cell", "paper", "ours", "ours / paper", "use")
    title = f"{item.id}: {item.title}"
    if rows:
        table = Table(*heads, header_style="bold", title_justify="left", title=escape(title))
        for row in rows:
            table.add_row(escape(row.cell.key), *shown_cells(row), row.cell.use)
        console.print(table)
    else:
        print_text(f"{title}: {item.state}", console, "bold")
    if item.note:
        print_text(f"note: {item.note}", console, "dim")
    for file in item.stored:
        print_text(f"stored: docs/results/{file}, by `{_command_of(file)}`", console, "dim")
    if not rows:
        return
    again = f"again: socflower paper {found.name} --item {item.id}"
    print_text(f"{score_text(_score(rows))}; {again}", console)


def shown_cells(row: "Row") -> tuple[str, str, str]:
    """Return what the paper says, what was computed, and the ratio of both."""
    cell, ours = row.cell, row.ours
    if cell.says is not None:
        held = "holds" if row.holds else "does not hold"
        return "stated" if cell.says else "denied", ours if isinstance(ours, str) else held, ""
    unit = f" {cell.unit}" if cell.unit else ""
    return (
        "" if cell.value is None else f"{cell.value:g}{unit}",
        ours if isinstance(ours, str) else f"{ours:.3g}{unit}",
        "" if row.ratio is None else f"{row.ratio:.2f}",
    )


def _command_of(file: str) -> str:
    from socflower.paper.comparison import command_of

    return command_of(file)


def _score(rows: Sequence["Row"]) -> "PaperScore":
    from socflower.paper.comparison import score

    return score(rows)


def score_text(own: "PaperScore") -> str:
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
