"""The front of time against energy to a target, as the pages of `tune` and `compare --front` and the README draw it."""

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from socflower.quantities import human_joules, human_seconds
from socflower.report.plots import (
    Curve,
    LegendEntry,
    Plot,
    as_svg,
    curve_legend,
    line_style,
    report_style,
    tick,
)

_NICE = (1.0, 2.0, 3.0, 5.0, 7.0)
"""The ticks of a decade, as many as fit; seconds beyond a minute have those of `_NICE_S`."""
_NICE_S = (60, 120, 300, 600, 1800, 3600, 2 * 3600, 6 * 3600, 12 * 3600, 86400, 7 * 86400)
_MOST_TICKS = 9
_LINE = "#59636e"


def front_plot(rows: Sequence[Mapping[str, Any]]) -> Plot:
    """Return the plot of a page, with a legend of the strategies; see `draw_front` for the rows."""
    names = list(dict.fromkeys(str(row["strategy"]) for row in rows))
    with report_style():
        drawing = Figure(figsize=(8.0, 4.4), layout="constrained")
        draw_front(drawing.add_subplot(), rows)
        alt = "Energy over time to the target; a line through what nothing dominates"
        svg = as_svg(drawing, alt, "front")
    curves = [Curve(style=style, label=name, xs=(), ys=()) for style, name in enumerate(names)]
    return Plot(svg, [*curve_legend(curves), LegendEntry("the front", _LINE)])


def draw_front(
    axes: Axes,
    rows: Sequence[Mapping[str, Any]],
    *,
    colours: Sequence[str] = (),
    line: str = _LINE,
) -> None:
    """Draw time against energy to a target on logarithmic axes, a point for each row.

    A row has `strategy`, `time_s`, `energy_j` and `on_front`; what is dominated is a hollow point. With `runs`, pairs
    of seconds and joules, the point is their mean, and thin lines lead to each. A strategy's marker is that of its
    place among the strategies, its colour the one in `colours`, or that of all plots. `line` is the front's colour.
    """
    best = sorted((row["time_s"], row["energy_j"]) for row in rows if row["on_front"])
    axes.plot(
        [time_s for time_s, _ in best],
        [energy_j for _, energy_j in best],
        color=line,
        linewidth=1.2,
        zorder=1,
    )
    names = list(dict.fromkeys(str(row["strategy"]) for row in rows))
    for style, name in enumerate(names):
        look = {**line_style(style), **({"color": colours[style]} if colours else {})}
        _draw_points(axes, [row for row in rows if row["strategy"] == name], look)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel("virtual time to the target, logarithmic")
    axes.set_ylabel("energy to the target, logarithmic")
    _set_ticks(axes)


def _draw_points(axes: Axes, rows: Sequence[Mapping[str, Any]], look: Mapping[str, Any]) -> None:
    """Draw a strategy's points, above the lines to their runs."""
    colour = look["color"]
    for row in rows:
        for time_s, energy_j in row.get("runs", ()):
            xs, ys = [row["time_s"], time_s], [row["energy_j"], energy_j]
            axes.plot(xs, ys, color=colour, linewidth=1, alpha=0.6)
            axes.plot(xs[1:], ys[1:], color=colour, marker=".", markersize=6, alpha=0.6)
    hollow = {"markerfacecolor": "none", "markeredgecolor": colour, "markeredgewidth": 1.6}
    for is_best, more in ((False, hollow), (True, {})):
        drawn = [row for row in rows if row["on_front"] == is_best]
        axes.plot(
            [row["time_s"] for row in drawn],
            [row["energy_j"] for row in drawn],
            **{**look, "linewidth": 0, "zorder": 3, **more},
        )


def _set_ticks(axes: Axes) -> None:
    """Place and name ticks in readable units, as many as fit."""
    low, high = axes.get_xlim()
    times = [*_decades(low, min(high, 60.0)), *(each for each in _NICE_S if low <= each <= high)]
    for axis, ticks, shown in (
        (axes.xaxis, times, human_seconds),
        (axes.yaxis, _decades(*axes.get_ylim()), human_joules),
    ):
        while len(ticks) > _MOST_TICKS:
            ticks = ticks[::2]
        axis.set_major_locator(FixedLocator(ticks))
        axis.set_minor_locator(NullLocator())
        axis.set_major_formatter(FuncFormatter(lambda value, _, shown=shown: tick(shown(value))))


def _decades(low: float, high: float) -> list[float]:
    """Return the ticks between two limits above 0: steps of decades, of fewer steps for many decades."""
    found: list[float] = []
    for steps in (_NICE, (1.0, 2.0, 5.0), (1.0,)):
        exponents = range(-9, 13)
        ticks = [step * 10.0**exponent for exponent in exponents for step in steps]
        found = [each for each in ticks if low <= each < high]
        if len(found) <= _MOST_TICKS:
            break
    return found
