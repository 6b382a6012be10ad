"""The page of `socflower tune`: all settings that reached the target, by time and energy, and their front."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

from socflower.quantities import human_joules, human_seconds
from socflower.report.plots import Curve, Plot, as_svg, curve_legend, line_style, report_style
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


def front_plot(rows: Sequence[Mapping[str, Any]]) -> Plot:
    """Return time against energy to the target, a point for each setting; the front is a line."""
    names = list(dict.fromkeys(str(row["strategy"]) for row in rows))
    best = [row for row in rows if row["on_front"]]
    with report_style():
        drawing = Figure(figsize=(8.0, 4.4), layout="constrained")
        axes = drawing.add_subplot()
        axes.plot(
            [row["time_s"] for row in best],
            [row["energy_j"] for row in best],
            color="#59636e",
            linewidth=1.2,
            zorder=1,
        )
        for style, name in enumerate(names):
            own = [row for row in rows if row["strategy"] == name]
            axes.plot(
                [row["time_s"] for row in own],
                [row["energy_j"] for row in own],
                **{**line_style(style), "linewidth": 0},
            )
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: human_seconds(value)))
        axes.yaxis.set_major_formatter(
            FuncFormatter(lambda value, _: human_joules(value).partition(" (")[0])
        )
        axes.set_xlabel("virtual time to the target, logarithmic")
        axes.set_ylabel("energy to the target, logarithmic")
        curves = [Curve(style=style, label=name, xs=(), ys=()) for style, name in enumerate(names)]
        svg = as_svg(drawing, "Energy over time to the target, for each setting", "front")
    return Plot(svg, curve_legend(curves))
