"""The report's plot of edge and cloud: the link and the cut over virtual time."""

import math
from collections.abc import Sequence

from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from socflower.quantities import finite
from socflower.report.plots import (
    Curve,
    Plot,
    as_svg,
    curve_legend,
    line_style,
    report_style,
    scale_x,
)
from socflower.report.summary import LabelledRun

# Of a line; more would exceed a screen's resolution.
_MAX_POINTS = 700
_MBIT_PER_BYTE = 8e-6


def cut_curve(run: LabelledRun) -> Curve | None:
    """Return the cut of a run's first edge from each time on, and at its end; None if it has none."""
    moments = [
        (float(at_s), float(cut))
        for at_s, cut in run.split.get("cuts_over_time") or ()
        if finite(at_s) is not None and finite(cut) is not None
    ]
    if not moments:
        return None
    at_s, cut = zip(*moments, strict=True)
    return Curve(style=run.style, label=run.label, xs=at_s, ys=cut)


def link_rates(run: LabelledRun) -> list[tuple[float, float, float]]:
    """Return (seconds, Mbit/s up, Mbit/s down) of the first edge's link; every n-th sample of a long run."""
    moments = [
        tuple(float(value) for value in moment)
        for moment in run.split.get("link_over_time") or ()
        if len(moment) == 3 and all(finite(value) is not None for value in moment)
    ]
    every = max(1, math.ceil(len(moments) / _MAX_POINTS))
    return [
        (at_s, up * _MBIT_PER_BYTE, down * _MBIT_PER_BYTE) for at_s, up, down in moments[::every]
    ]


def cut_plot(runs: Sequence[LabelledRun]) -> Plot | None:
    """Return the link of the first run that recorded one above the cuts of all; None if nothing was recorded."""
    curves = [curve for run in runs if (curve := cut_curve(run)) is not None]
    rates = next((rates for run in runs if (rates := link_rates(run))), [])
    if not curves and not rates:
        return None
    names = next((run.split.get("cut_names") or [] for run in runs), [])
    ends = []
    for curve in curves:
        first, last = _cut_name(curve.ys[0], names), _cut_name(curve.ys[-1], names)
        ends.append(f"{curve.label}: begins with {first}, ends with {last}")
    alt = f"The link and the cut over virtual time. {'; '.join(ends)}"
    with report_style():
        drawing = Figure(figsize=(10.6, 4.8), layout="constrained")
        link, cut = drawing.subplots(2, 1, sharex=True)
        if rates:
            at_s, up, down = zip(*rates, strict=True)
            link.step(at_s, up, where="post", color="#0550ae", linewidth=1.3, label="up")
            link.step(
                at_s,
                down,
                where="post",
                color="#59636e",
                linewidth=1.3,
                dashes=(4, 2),
                label="down",
            )
            link.legend(loc="upper right", ncols=2)
        link.set_ylabel("link (Mbit/s)")
        link.set_ylim(bottom=0)
        for curve in curves:
            cut.step(curve.xs, curve.ys, where="post", **line_style(curve.style))
        cut.set_ylabel("cut after layer")
        cut.yaxis.set_major_locator(MaxNLocator(7, integer=True))
        cut.yaxis.set_major_formatter(FuncFormatter(lambda value, _: _cut_name(value, names)))
        cut.set_xlim(left=0)
        scale_x(cut, "s", False)
        return Plot(as_svg(drawing, alt, "edge-cloud"), curve_legend(curves))


def _cut_name(value: float, names: Sequence[str]) -> str:
    index = round(value)
    if index == len(names) and names:
        return "edge alone"
    return names[index] if 0 <= index < len(names) else ""
