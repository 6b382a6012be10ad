"""The page of a pipeline's plan: one update over virtual time, the stages, and the times of other plans."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from socflower.quantities import human_seconds
from socflower.report.plots import LegendEntry, Plot, as_svg, report_style
from socflower.report.report import render
from socflower.wire.saved_state import write_atomically

_COLOURS = {"forward": "#0072B2", "backward": "#E69F00"}
_MOST_PASSES = 4_000
"""Limit of a picture that can be read and opened; the page says how many later passes are only in the trace."""

_ROOM_FOR_NUMBER = 0.016
"""Fraction of the picture's width that a micro-batch's number needs."""


class DrawnPass(NamedTuple):
    """A forward or backward pass of a micro-batch on a device; seconds count from the beginning of the update."""

    # The row of the pass.
    device: str
    # "forward" or "backward".
    kind: str
    micro_batch: int
    start_s: float
    end_s: float


def write_pipeline_report(
    path: Path,
    document: Mapping[str, Any],
    passes: Sequence[DrawnPass],
    *,
    title: str,
    question: str,
) -> None:
    """Write the page atomically; `document` is that of `plan_of_pipeline`, `passes` are those of one update."""
    drawn = sorted(passes, key=lambda each: each.start_s)[:_MOST_PASSES]
    path.parent.mkdir(parents=True, exist_ok=True)
    page = render(
        "pipeline.html.j2",
        title=title,
        question=question.strip(),
        plan=document,
        timeline=timeline_plot(drawn, document["predicted"]["step_s"]),
        num_left_out=len(passes) - len(drawn),
    )
    write_atomically(path, page)


def timeline_plot(passes: Sequence[DrawnPass], step_s: float) -> Plot:
    """Return the passes of an update of `step_s` as bars, a row for each device in order of its first pass."""
    rows = {device: row for row, device in enumerate(dict.fromkeys(each.device for each in passes))}
    end_s = max([step_s, *(each.end_s for each in passes)])
    alt = (
        f"Forward and backward passes of micro-batches on {len(rows)} devices over "
        f"{human_seconds(end_s)} of virtual time"
    )
    with report_style():
        drawing = Figure(figsize=(10.6, 1.1 + 0.42 * len(rows)), layout="constrained")
        axes = drawing.subplots()
        axes.grid(visible=False, axis="y")
        for each in passes:
            row, width_s = rows[each.device], each.end_s - each.start_s
            axes.barh(
                row,
                width_s,
                left=each.start_s,
                height=0.74,
                color=_COLOURS[each.kind],
                edgecolor="#fff",
                linewidth=0.5,
            )
            if width_s >= _ROOM_FOR_NUMBER * end_s:
                axes.text(
                    each.start_s + width_s / 2,
                    row,
                    str(each.micro_batch),
                    ha="center",
                    va="center",
                    color="#fff" if each.kind == "forward" else "#000",
                    fontsize=8,
                )
        axes.set_yticks(range(len(rows)), list(rows))
        axes.set_ylim(len(rows) - 0.5, -0.5)
        axes.set_xlim(0.0, end_s)
        axes.tick_params(left=False, axis="y")
        axes.xaxis.set_major_locator(MaxNLocator(6))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: human_seconds(value)))
        axes.set_xlabel("virtual time of an update")
        legend = [
            LegendEntry(f"{kind} pass", colour, hatch="") for kind, colour in _COLOURS.items()
        ]
        return Plot(as_svg(drawing, alt, "pipeline"), legend)
