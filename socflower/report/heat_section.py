"""The report's section on heat: the hottest SoC, the clocks and the fans over virtual time."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from socflower.quantities import MISSING, finite, human_joules, human_seconds, percent
from socflower.report.page import figure, section, table, text
from socflower.report.plots import as_svg, curve_legend, line_style, report_style, scale_x
from socflower.report.summary import Run
from socflower.thermal.model.governor import snapdragon_governor

_KEYS = ("at_s", "hottest_c", "mean_clock", "rpm")
_MAX_POINTS = 700  # of a line; more would exceed a screen's resolution


@dataclass(frozen=True, slots=True)
class HeatCurves:
    """A run's temperatures, clocks and fan speeds over virtual time; all tuples have the length of `at_s`."""

    style: int
    label: str
    at_s: tuple[float, ...]
    hottest_c: tuple[float, ...]
    mean_clock: tuple[float, ...]
    rpm: tuple[float, ...]


def heat_section(runs: Sequence[Run]) -> str:
    """Return the section; empty if no result has heat."""
    shown = [run for run in runs if run.table("heat")]
    if not shown:
        return ""
    parts = [_figures([curves for run in shown if (curves := heat_curves(run)) is not None]), _totals(shown)]
    return section("heat", "Heat", *parts)


def heat_curves(run: Run) -> HeatCurves | None:
    """Return a run's curves, or None if it has none; times with unknown values are left out."""
    history = run.table("heat").get("history")
    if not isinstance(history, Mapping):
        return None
    moments = [moment for moment in zip(*(history.get(key) or () for key in _KEYS), strict=False)
               if all(finite(value) is not None for value in moment)]
    if not moments:
        return None
    at_s, hottest_c, mean_clock, rpm = zip(*_thinned(moments), strict=True)
    return HeatCurves(run.style, run.label, at_s, hottest_c, mean_clock, rpm)


def _thinned(moments: Sequence[tuple[float, ...]]) -> list[tuple[float, ...]]:
    """Return at most `_MAX_POINTS` samples: of each period the one with the hottest SoC."""
    stretch = math.ceil(len(moments) / _MAX_POINTS)
    return [max(moments[begin:begin + stretch], key=lambda moment: moment[1])
            for begin in range(0, len(moments), stretch)]


def _figures(curves: Sequence[HeatCurves]) -> str:
    if not curves:
        return '<p class="note">Users came and went; nothing could get hot.</p>'
    trips_c = snapdragon_governor().trip_c
    legend = curve_legend([(each.style, each.label) for each in curves],
                          [f"{trip_c:g} °C" for trip_c in trips_c], noun="clocks fall at ")
    hot = "The hottest SoC over virtual time. " + "; ".join(
        f"{each.label}: at most {max(each.hottest_c):.1f} °C, {each.hottest_c[-1]:.1f} °C after "
        f"{human_seconds(each.at_s[-1])}" for each in curves)
    fast = "Mean clock and fan speed over virtual time. " + "; ".join(
        f"{each.label}: clock at least {percent(min(each.mean_clock))} of the highest, fans up to "
        f"{max(each.rpm):,.0f} rpm" for each in curves)
    return "\n".join((figure(_temperature_plot(curves, trips_c, hot), legend),
                      figure(_speed_plot(curves, fast), curve_legend([(each.style, each.label) for each in curves]))))


def _temperature_plot(curves: Sequence[HeatCurves], trips_c: Sequence[float], alt: str) -> str:
    with report_style():
        drawing = Figure(figsize=(10.6, 3.4), layout="constrained")
        axes = drawing.add_subplot()
        _draw(axes, curves, lambda each: each.hottest_c)
        for trip_c in trips_c:
            axes.axhline(trip_c, color="#59636e", linewidth=1.2, dashes=(4, 3), zorder=1)
        axes.set_ylabel("hottest SoC (°C)")
        axes.yaxis.set_major_locator(MaxNLocator(7, steps=[1, 2, 5, 10], integer=True))
        scale_x(axes, "s", False)
        return as_svg(drawing, alt, "heat-c")


def _speed_plot(curves: Sequence[HeatCurves], alt: str) -> str:
    with report_style():
        drawing = Figure(figsize=(10.6, 4.4), layout="constrained")
        clock, fan = drawing.subplots(2, 1, sharex=True)
        _draw(clock, curves, lambda each: each.mean_clock)
        clock.set_ylabel("mean clock")
        clock.yaxis.set_major_formatter(FuncFormatter(lambda value, _: percent(value, 0)))
        clock.set_ylim(min(0.6, *(min(each.mean_clock) for each in curves)) - 0.05, 1.05)
        _draw(fan, curves, lambda each: each.rpm)
        fan.set_ylabel("fans (rpm)")
        fan.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
        fan.set_ylim(0.0, 1.08 * max(max(each.rpm) for each in curves))
        scale_x(fan, "s", False)
        return as_svg(drawing, alt, "heat-speed")


def _draw(axes: Axes, curves: Sequence[HeatCurves], values: Callable[[HeatCurves], Sequence[float]]) -> None:
    for each in curves:
        every = max(1, math.ceil(len(each.at_s) / 8))
        axes.plot(each.at_s, values(each), markevery=every, **line_style(each.style))
    axes.set_xlim(left=0)


def _totals(runs: Sequence[Run]) -> str:
    rows = []
    for run in runs:
        heat: Mapping[str, Any] = run.table("heat")
        peak_c = finite(heat.get("peak_c"))
        rows.append([text(run.label), MISSING if peak_c is None else f"{peak_c:.1f} °C",
                     percent(heat.get("slowdown")), human_joules(heat.get("cooling_j"))])
    return table("Slower than planned for a rack that stays cold and has no users", [
        "Strategy", "Hottest SoC", "Slower than cold and alone", "Energy of fans"], rows, numeric=range(1, 4))
