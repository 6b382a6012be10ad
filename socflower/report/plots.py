"""The report's plots by matplotlib (without pyplot) as SVG; equal inputs give equal bytes.

Letters remain text (small, selectable, in the page's font); the layout reserves space for DejaVu Sans, a wide font.
"""

import io
import math
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import matplotlib
from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import (
    FixedLocator,
    FuncFormatter,
    LogLocator,
    MaxNLocator,
    NullFormatter,
    NullLocator,
)

from socflower.quantities import human_joules, human_seconds, percent, significant
from socflower.report.quality import ACCURACY, Quality
from socflower.report.summary import printable

PARTS = ("compute", "synchronisation", "update", "idle", "cooling")
"""Parts of time and energy; cooling is the energy of the fans."""

# Okabe and Ito's colours without their yellow, which is too light for a line on white.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
_MARKERS = ("o", "s", "^", "D", "v", "P", "X")
# The same shapes for the legend, around (15, 7).
_SWATCHES = (
    "M11 7a4 4 0 1 0 8 0a4 4 0 1 0-8 0Z",
    "M11.4 3.4h7.2v7.2h-7.2Z",
    "M15 2.5L19.5 11H10.5Z",
    "M15 1.8L20.2 7L15 12.2L9.8 7Z",
    "M15 11.5L19.5 3H10.5Z",
    "M13.3 2.5h3.4v2.8h2.8v3.4h-2.8v2.8h-3.4v-2.8h-2.8v-3.4h2.8Z",
    "M11 4L13 2L15 4.6L17 2L19 4L17 7L19 10L17 12L15 9.4L13 12L11 10L13 7Z",
)
_HATCHES = {
    "": "",
    "\\\\\\\\": "M-2 -2L16 16M4 -4L22 14M-8 2L10 20",
    "////": "M-2 16L16 -2M4 18L22 0M-8 12L10 -6",
    "----": "M0 3.5H18M0 7H18M0 10.5H18",
}
_DASHES: tuple[tuple[float, ...], ...] = ((), (5, 2), (1.5, 1.5))
# Fill, hatch and text colour of each part; hatches distinguish the bars in greyscale.
_PART_STYLE = {
    "compute": ("#0072B2", "", "#fff"),
    "synchronisation": ("#E69F00", "", "#000"),
    "update": ("#009E73", "\\\\\\\\", "#000"),
    "idle": ("#DDE0E3", "////", "#000"),
    "cooling": ("#56B4E9", "----", "#000"),
}
_LOG_SPAN = 8.0
_NICE_S = (
    1e-3,
    1e-2,
    0.1,
    1,
    3,
    10,
    30,
    60,
    180,
    600,
    1800,
    3600,
    3 * 3600,
    6 * 3600,
    12 * 3600,
    86400,
    2 * 86400,
    7 * 86400,
    30 * 86400,
    90 * 86400,
    365 * 86400,
)
_STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "socflower",
    "text.parse_math": False,
    "font.family": "DejaVu Sans",
    "font.size": 10.5,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#59636e",
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#e3e6ea",
    "xtick.color": "#3b4249",
    "ytick.color": "#3b4249",
    "hatch.linewidth": 0.6,
    "path.simplify": True,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Curve:
    """One strategy's points in drawing order; `style` selects its colour, marker and dash in all plots."""

    style: int
    label: str
    xs: tuple[float, ...]
    ys: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class LegendEntry:
    """A line with dash and marker (paths of SVG), or with `hatch` a filled part."""

    name: str
    colour: str
    dash: str = ""
    marker: str = ""
    hatch: str | None = None


@dataclass(frozen=True, slots=True)
class Plot:
    """A picture, its legend, which the page shows above it as text, and a narrow version for small screens."""

    svg: Markup
    legend: Sequence[LegendEntry]
    narrow: Markup | None = None


@contextmanager
def report_style() -> Iterator[None]:
    """Apply the report's matplotlib settings within the context, independent of the user's matplotlibrc."""
    with matplotlib.rc_context(), warnings.catch_warnings():
        # The browser's fonts draw the letters; a glyph missing in DejaVu only makes its width approximate.
        warnings.filterwarnings("ignore", message="Glyph .* missing")
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(_STYLE)
        yield


def line_style(style: int) -> dict[str, Any]:
    """Return matplotlib's arguments for the line of a strategy."""
    return {
        "color": _colour(style),
        "linewidth": 2,
        "marker": _MARKERS[style % len(_MARKERS)],
        "markersize": 7,
        "markeredgecolor": "#fff",
        "markeredgewidth": 0.7,
        "dashes": _dash(style) or (None, None),
    }


def needs_log(curves: Sequence[Curve]) -> bool:
    """Return whether the curves' ranges differ more than 8-fold: short curves would be invisible on a linear axis."""
    ends = [max(curve.xs) for curve in curves if curve.xs]
    return len(ends) > 1 and min(ends) > 0 and max(ends) / min(ends) > _LOG_SPAN


def quality_plot(
    curves: Sequence[Curve],
    *,
    quantity: str,
    targets: Sequence[float],
    alt: str,
    prefix: str,
    of: Quality = ACCURACY,
    label: str | None = None,
    noun: str | None = None,
) -> Plot:
    """Return accuracy, loss, or with `label` another share, over virtual time, energy or epochs.

    `quantity` is "s", "J" or "epoch", and `noun` its name if not the default one.
    """
    log = needs_log(curves)

    def drawn(size: tuple[float, float], max_ticks: int) -> Figure:
        drawing = Figure(figsize=size, layout="constrained")
        axes = drawing.add_subplot()
        for curve in curves:
            _draw_curve(axes, curve, log)
        if not log:
            axes.set_xlim(left=0)
        for target in targets:
            axes.axhline(target, color="#59636e", linewidth=1.2, dashes=(4, 3), zorder=1)
        axes.set_ylabel(label or of.label)
        _scale_y(axes, of)
        scale_x(axes, quantity, log, noun=noun, max_ticks=max_ticks)
        return drawing

    legend = curve_legend(curves, [f"target {of.shown(each)}" for each in targets])
    with report_style():
        wide = as_svg(drawn((10.6, 4.4), 8), alt, prefix)
        narrow = as_svg(drawn((4.6, 3.7), 4), alt, f"{prefix}-narrow")
    return Plot(wide, legend, narrow)


def _draw_curve(axes: Axes, curve: Curve, log: bool) -> None:
    points = [(x, y) for x, y in zip(curve.xs, curve.ys, strict=True) if x > 0 or not log]
    xs, ys = [x for x, _ in points], [y for _, y in points]
    # Markers on all of 500 rounds would overlap; the last point always has one.
    every = max(1, math.ceil(len(points) / 12))
    marked = sorted({*range(0, len(points), every), len(points) - 1})
    axes.plot(xs, ys, markevery=marked, **line_style(curve.style))


def _scale_y(axes: Axes, of: Quality) -> None:
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: of.tick(value)))
    axes.yaxis.set_major_locator(MaxNLocator(8, steps=[1, 2, 5, 10], integer=False))
    lowest, highest = axes.get_ylim()
    if highest - lowest < of.least_span:
        # Otherwise the ticks would need decimals, and noise would resemble progress.
        middle = (lowest + highest) / 2
        axes.set_ylim(middle - of.least_span / 2, middle + of.least_span / 2)


def breakdown_plot(
    rows: Sequence[tuple[str, Mapping[str, float]]],
    parts: Sequence[str],
    *,
    quantity: str,
    alt: str,
    prefix: str,
) -> Plot:
    """Return totals and stacked shares of some of `PARTS`, one row per strategy.

    Totals that differ more than 8-fold are on a logarithmic axis.
    """
    bars = _Bars(rows, parts, quantity)
    legend = []
    for part, (fill, hatch, _) in _PART_STYLE.items():
        if part in parts:
            legend.append(LegendEntry(part, fill, hatch=_HATCHES[hatch]))
    with report_style():
        wide = as_svg(bars.drawn(is_narrow=False), alt, prefix)
        narrow = as_svg(bars.drawn(is_narrow=True), alt, f"{prefix}-narrow")
    return Plot(wide, legend, narrow)


class _Bars:
    """The bars of a breakdown."""

    def __init__(
        self, rows: Sequence[tuple[str, Mapping[str, float]]], parts: Sequence[str], quantity: str
    ) -> None:
        self._rows, self._parts, self._quantity = rows, parts, quantity
        self._sums = [math.fsum(values[part] for part in parts) for _, values in rows]

    def drawn(self, *, is_narrow: bool) -> Figure:
        """Return totals beside shares, or above them if it is narrow."""
        height = 1.15 + 0.46 * len(self._rows)
        size = (4.6, 2 * height) if is_narrow else (10.6, height)
        drawing = Figure(figsize=size, layout="constrained")
        if is_narrow:
            total, share = drawing.subplots(2, 1)
        else:
            total, share = drawing.subplots(1, 2, width_ratios=(1, 1.25))
            share.tick_params(labelleft=False)
        self._draw_totals(total, 3 if is_narrow else 5)
        self._draw_shares(share)
        labels = [_short(label, 14 if is_narrow else 30) for label, _ in self._rows]
        for axes in (total, share):
            axes.grid(visible=False, axis="y")
            axes.set_yticks(range(len(labels)), labels)
            axes.set_ylim(len(labels) - 0.5, -0.5)
            axes.tick_params(left=False, axis="y")
        return drawing

    def _draw_totals(self, axes: Axes, max_ticks: int) -> None:
        """Draw the sums; parts cannot be stacked on a logarithmic axis, which shows small sums beside large ones."""
        for row, total in enumerate(self._sums):
            axes.barh(row, total, height=0.62, color="#8a939c")
        above_0 = [total for total in self._sums if total > 0]
        log = bool(above_0) and max(above_0) / min(above_0) > _LOG_SPAN
        if log:
            axes.set_xlim(min(above_0) / 3, max(above_0) * 1.5)
        else:
            axes.set_xlim(0, 1.04 * max(above_0, default=0.0) or 1.0)
        noun = "SoC time" if self._quantity == "s" else "energy"
        scale_x(axes, self._quantity, log, noun=noun, max_ticks=max_ticks)

    def _draw_shares(self, axes: Axes) -> None:
        for row, (_, values) in enumerate(self._rows):
            left = 0.0
            for part in self._parts:
                share = values[part] / (self._sums[row] or 1.0)
                _draw_part(axes, row, part, left, share)
                left += share
        axes.set_xlim(0, 1)
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: percent(value, 0)))
        axes.set_xlabel("share of each strategy's own total")


def _draw_part(axes: Axes, row: int, part: str, left: float, share: float) -> None:
    fill, hatch, ink = _PART_STYLE[part]
    axes.barh(
        row,
        share,
        left=left,
        height=0.62,
        color=fill,
        hatch=hatch,
        edgecolor="#fff",
        linewidth=0.8,
    )
    # Smaller parts have no room for their percentage.
    if share < 0.07:
        return
    axes.text(
        left + share / 2,
        row,
        percent(share, 0),
        ha="center",
        va="center",
        color=ink,
        fontsize=9.5,
        bbox={"facecolor": fill, "edgecolor": "none", "pad": 1.2} if hatch else None,
    )


def curve_legend(curves: Sequence[Curve], levels: Sequence[str] = ()) -> list[LegendEntry]:
    """Return the legend of curves, and of horizontal lines by their names."""
    entries = []
    for curve in curves:
        dash = " ".join(f"{2 * step:g}" for step in _dash(curve.style))
        swatch = _SWATCHES[curve.style % len(_SWATCHES)]
        entries.append(LegendEntry(curve.label, _colour(curve.style), dash, swatch))
    return entries + [LegendEntry(name, "#59636e", "5 3.5") for name in levels]


def _colour(style: int) -> str:
    return _COLOURS[style % len(_COLOURS)]


def _dash(style: int) -> tuple[float, ...]:
    return _DASHES[style // len(_COLOURS) % len(_DASHES)]


def scale_x(
    axes: Axes, quantity: str, log: bool, *, noun: str | None = None, max_ticks: int = 8
) -> None:
    """Label the x-axis in the unit that fits its largest value, or with readable units if it is logarithmic."""
    name = noun or {"s": "virtual time", "J": "energy", "epoch": "epoch"}[quantity]
    if log:
        axes.set_xlabel(f"{name}, logarithmic")
        _scale_log(axes, quantity, max_ticks)
        return
    low, high = axes.get_xlim()
    divisor, unit = _unit(max(abs(low), abs(high)), quantity)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value / divisor:g}"))
    # Ticks are chosen in the printed unit: 30 min, not 1,666.7 s.
    axes.xaxis.set_major_locator(_UnitLocator(divisor, max_ticks))
    axes.set_xlabel(f"{name} ({unit})" if unit else name)


def _scale_log(axes: Axes, quantity: str, max_ticks: int) -> None:
    axes.set_xscale("log")
    readable: Any = {"s": human_seconds, "J": human_joules}.get(quantity, significant)
    low, high = axes.get_xlim()
    nice = [tick for tick in _NICE_S if low <= tick <= high]
    while len(nice) > max_ticks + 2:
        nice = nice[::2]
    is_nice = quantity == "s" and len(nice) >= 2
    locator = FixedLocator(nice) if is_nice else LogLocator(numticks=max_ticks + 1)
    axes.xaxis.set_major_locator(locator)
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: tick(readable(value))))


class _UnitLocator(MaxNLocator):
    """Places ticks at round numbers of a unit other than the axis's own."""

    def __init__(self, divisor: float, max_ticks: int) -> None:
        super().__init__(max_ticks, steps=[1, 2, 2.5, 5, 10])
        self._divisor = divisor

    def tick_values(self, vmin: float, vmax: float) -> list[float]:
        """Return the ticks in the axis's own unit."""
        ticks = super().tick_values(vmin / self._divisor, vmax / self._divisor)
        return [tick * self._divisor for tick in ticks]


def _unit(largest: float, quantity: str) -> tuple[float, str]:
    if quantity == "epoch":
        return 1.0, ""
    if quantity == "s":
        steps = (
            (1.0, "s", 180.0),
            (60.0, "min", 3 * 3600.0),
            (3600.0, "h", 4 * 86400.0),
            (86400.0, "d", math.inf),
        )
    else:
        steps = ((1.0, "J", 2e3), (1e3, "kJ", 2e6), (1e6, "MJ", 2e9), (1e9, "GJ", math.inf))
    return next((divisor, unit) for divisor, unit, limit in steps if not largest >= limit)


def tick(label: str) -> str:
    """Return a tick without watt-hours and zero decimals, which only tables need."""
    label = label.split(" (", maxsplit=1)[0]
    return re.sub(r" 00 (min|s|h)$", "", re.sub(r"(\d)\.0+ ", r"\1 ", label))


def _short(label: str, limit: int = 30) -> str:
    return label if len(label) <= limit else label[: limit - 1] + "…"


def as_svg(drawing: Figure, alt: str, prefix: str) -> Markup:
    """Return the figure as an `<svg>` element for a page, with unique ids and without date and external addresses."""
    buffer = io.StringIO()
    drawing.savefig(
        buffer, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None}
    )
    svg = buffer.getvalue()
    svg = svg[svg.index("<svg") :].strip()
    svg = re.sub(r"<!--.*?-->\s*|<metadata>.*?</metadata>\s*", "", svg, flags=re.DOTALL)
    # Only ids with references are kept; the prefix keeps them distinct from those of other plots on the page.
    used = set(re.findall(r'(?:href="#|url\(#)([^")]+)', svg))

    def own_id(match: re.Match[str]) -> str:
        return f' id="{prefix}-{match[1]}"' if match[1] in used else ""

    svg = re.sub(r' id="([^"]+)"', own_id, svg)
    svg = re.sub(r'(href="#|url\(#)', rf"\g<1>{prefix}-", svg)
    # Its style sheet `* {stroke-linejoin: ...}` would apply to the whole page.
    svg = re.sub(r'<style type="text/css">.*?</style>', "", svg, flags=re.DOTALL)
    svg = re.sub(r' transform="rotate\(-0 [^"]*\)"', "", svg)
    svg = re.sub(r"'?DejaVu Sans'?(, [^;\"]*)?", "system-ui, 'DejaVu Sans', sans-serif", svg)
    opening = Markup(
        '<svg role="img" aria-label="{}" stroke-linejoin="round" stroke-linecap="butt"'
    )
    return opening.format(printable(alt)) + Markup(svg[len("<svg") :])
