"""The page of `socflower tune`: all settings that reached the target, by time and energy, and their front."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from socflower.report.front import front_plot
from socflower.report.report import render
from socflower.wire.saved_state import write_atomically


def write_tune_report(path: Path, document: Mapping[str, Any], settings: Sequence[str]) -> None:
    """Write the page atomically; `settings` are those of each row of the document's, for people."""
    rows = [
        {**row, "shown": shown} for row, shown in zip(document["settings"], settings, strict=True)
    ]
    rows.sort(key=lambda row: float(row["time_s"]))
    title = f"{document['scenario']}: which method"
    page = render("tune.html.j2", title=title, tuned=document, rows=rows, plot=front_plot(rows))
    write_atomically(path, page)
