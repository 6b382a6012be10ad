"""The report's section on edge and cloud: the link, the cut, and the staleness of gradients."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from socflower.quantities import MISSING, finite, human_seconds, percent
from socflower.report.page import details, figure, section, table, text
from socflower.report.plots import as_svg, curve_legend, line_style, report_style, scale_x
from socflower.report.summary import Run

_MAX_POINTS = 700  # of a line; more would exceed a screen's resolution
_MBIT_PER_BYTE = 8e-6


@dataclass(frozen=True, slots=True)
class CutCurve:
    """The cut of a run's first edge from each time on; the last time is the end of the run."""

    style: int
    label: str
    at_s: tuple[float, ...]
    cut: tuple[float, ...]


def split_section(runs: Sequence[Run]) -> str:
    """Return the section; empty if no result has a cloud."""
    shown = [run for run in runs if run.table("split")]
    if not shown:
        return ""
    return section("edge-cloud", "Edge and cloud", _figures(shown), _totals(shown),
                   *(details(f"Moves of the cut: {text(run.label)}", moves)
                     for run in shown if (moves := _moves(run))))


def cut_curve(run: Run) -> CutCurve | None:
    """Return a run's cut over virtual time; None if its result has none."""
    history = run.table("split").get("cuts_over_time")
    moments = [(float(at_s), float(cut)) for at_s, cut in history or ()
               if finite(at_s) is not None and finite(cut) is not None]
    if not moments:
        return None
    at_s, cut = zip(*moments, strict=True)
    return CutCurve(run.style, run.label, at_s, cut)


def link_rates(run: Run) -> list[tuple[float, float, float]]:
    """Return (seconds, Mbit/s up, Mbit/s down) of the first edge's link; of long runs every n-th sample."""
    moments = [tuple(float(value) for value in moment) for moment in run.table("split").get("link_over_time") or ()
               if len(moment) == 3 and all(finite(value) is not None for value in moment)]
    every = max(1, math.ceil(len(moments) / _MAX_POINTS))
    return [(at_s, up * _MBIT_PER_BYTE, down * _MBIT_PER_BYTE) for at_s, up, down in moments[::every]]


def _figures(runs: Sequence[Run]) -> str:
    curves = [curve for run in runs if (curve := cut_curve(run)) is not None]
    rates = next((rates for run in runs if (rates := link_rates(run))), [])
    if not curves and not rates:
        return '<p class="note">No link and no cut were recorded.</p>'
    names = next((run.table("split").get("cut_names") or [] for run in runs), [])
    alt = "The link and the cut over virtual time. " + "; ".join(
        f"{curve.label}: begins with {_cut_name(curve.cut[0], names)}, ends with {_cut_name(curve.cut[-1], names)}"
        for curve in curves)
    with report_style():
        drawing = Figure(figsize=(10.6, 4.8), layout="constrained")
        link, cut = drawing.subplots(2, 1, sharex=True)
        _draw_link(link, rates)
        for curve in curves:
            cut.step(curve.at_s, curve.cut, where="post", **line_style(curve.style))
        cut.set_ylabel("cut after layer")
        cut.yaxis.set_major_locator(MaxNLocator(7, integer=True))
        cut.yaxis.set_major_formatter(FuncFormatter(lambda value, _: _cut_name(value, names)))
        cut.set_xlim(left=0)
        scale_x(cut, "s", False)
        svg = as_svg(drawing, alt, "edge-cloud")
    return figure(svg, curve_legend([(curve.style, curve.label) for curve in curves]))


def _draw_link(axes: Axes, rates: Sequence[tuple[float, float, float]]) -> None:
    if rates:
        at_s, up, down = zip(*rates, strict=True)
        axes.step(at_s, up, where="post", color="#0550ae", linewidth=1.3, label="up")
        axes.step(at_s, down, where="post", color="#59636e", linewidth=1.3, dashes=(4, 2), label="down")
        axes.legend(loc="upper right", ncols=2)
    axes.set_ylabel("link (Mbit/s)")
    axes.set_ylim(bottom=0)


def _totals(runs: Sequence[Run]) -> str:
    rows = []
    for run in runs:
        split: Mapping[str, Any] = run.table("split")
        mean = finite(split.get("mean_staleness"))
        rows.append([
            text(run.label), text(split.get("start", MISSING)), text(split.get("end", MISSING)),
            text(split.get("num_moves", MISSING)), MISSING if mean is None else f"{mean:.2f}",
            text(split.get("max_staleness", MISSING)), *(percent(split.get("busy", {}).get(key))
                                                         for key in ("edge", "up", "cloud", "down"))])
    return table("Staleness is how many batches had gone forward since the one whose gradient was applied", [
        "Strategy", "First deployment", "Last deployment", "Moves", "Mean staleness", "Most", "Edge busy", "Up link",
        "Cloud", "Down link"], rows, numeric=range(3, 10))


def _moves(run: Run) -> str:
    moves = run.table("split").get("moves") or []
    if not moves:
        return ""
    return table("What moved when, and what moving the layers took", [
        "Virtual time", "Edge", "Batch", "From", "To", "Moving took"],
        [[human_seconds(move.get("at_s")), text(move.get("edge", 0)), text(move.get("batch", "")),
          text(move.get("from", "")), text(move.get("to", "")), human_seconds(move.get("migration_s"))]
         for move in moves], numeric=(0, 1, 2, 5))


def _cut_name(value: float, names: Sequence[str]) -> str:
    index = round(value)
    if index == len(names) and names:
        return "edge alone"
    return names[index] if 0 <= index < len(names) else ""
