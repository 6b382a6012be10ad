"""The report's plots of heat: the hottest SoC, the clocks and the fans over virtual time."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from socflower.quantities import finite, human_seconds, percent
from socflower.report.plots import (
    Curve,
    LegendEntry,
    Plot,
    as_svg,
    curve_legend,
    line_style,
    report_style,
    scale_x,
)
from socflower.report.summary import LabelledRun
from socflower.thermal.model.governor import snapdragon_governor

_KEYS = ("at_s", "hottest_c", "mean_clock", "rpm")
# Of a line; more would exceed a screen's resolution.
_MAX_POINTS = 700


@dataclass(frozen=True, slots=True)
class HeatCurves:
    """A run's temperatures, clocks and fan speeds over virtual time; all tuples are as long as `at_s`."""

    style: int
    label: str
    at_s: tuple[float, ...]
    hottest_c: tuple[float, ...]
    mean_clock: tuple[float, ...]
    rpm: tuple[float, ...]


def heat_plots(runs: Sequence[LabelledRun]) -> list[Plot]:
    """Return the plots of temperature, and of clock and fans; none if no run has a history."""
    curves = [curves for run in runs if (curves := heat_curves(run)) is not None]
    return [_temperature_plot(curves), _speed_plot(curves)] if curves else []


def heat_curves(run: LabelledRun) -> HeatCurves | None:
    """Return a run's curves, None if it has none; times with unknown values are left out.

    In a long run, several moments are shown by the one with the hottest SoC.
    """
    history = run.heat.get("history")
    if not isinstance(history, Mapping):
        return None
    moments = [
        moment
        for moment in zip(*(history.get(key) or () for key in _KEYS), strict=False)
        if all(finite(value) is not None for value in moment)
    ]
    if not moments:
        return None
    stretch = math.ceil(len(moments) / _MAX_POINTS)
    starts = range(0, len(moments), stretch)
    hottest = [
        max(moments[start : start + stretch], key=lambda moment: moment[1]) for start in starts
    ]
    at_s, hottest_c, mean_clock, rpm = zip(*hottest, strict=True)
    return HeatCurves(run.style, run.label, at_s, hottest_c, mean_clock, rpm)


def _temperature_plot(curves: Sequence[HeatCurves]) -> Plot:
    alt = "The hottest SoC over virtual time. " + "; ".join(
        f"{each.label}: at most {max(each.hottest_c):.1f} °C, {each.hottest_c[-1]:.1f} °C after "
        f"{human_seconds(each.at_s[-1])}"
        for each in curves
    )
    trips_c = snapdragon_governor().trip_c
    with report_style():
        drawing = Figure(figsize=(10.6, 3.4), layout="constrained")
        axes = drawing.add_subplot()
        legend = _draw(
            axes,
            curves,
            lambda each: each.hottest_c,
            [f"clocks fall at {trip_c:g} °C" for trip_c in trips_c],
        )
        for trip_c in trips_c:
            axes.axhline(trip_c, color="#59636e", linewidth=1.2, dashes=(4, 3), zorder=1)
        axes.set_ylabel("hottest SoC (°C)")
        axes.yaxis.set_major_locator(MaxNLocator(7, steps=[1, 2, 5, 10], integer=True))
        scale_x(axes, "s", False)
        return Plot(as_svg(drawing, alt, "heat-c"), legend)


def _speed_plot(curves: Sequence[HeatCurves]) -> Plot:
    alt = "Mean clock and fan speed over virtual time. " + "; ".join(
        f"{each.label}: clock at least {percent(min(each.mean_clock))} of the highest, fans up to "
        f"{max(each.rpm):,.0f} rpm"
        for each in curves
    )
    with report_style():
        drawing = Figure(figsize=(10.6, 4.4), layout="constrained")
        clock, fan = drawing.subplots(2, 1, sharex=True)
        _draw(clock, curves, lambda each: each.mean_clock)
        clock.set_ylabel("mean clock")
        clock.yaxis.set_major_formatter(FuncFormatter(lambda value, _: percent(value, 0)))
        clock.set_ylim(min(0.6, *(min(each.mean_clock) for each in curves)) - 0.05, 1.05)
        legend = _draw(fan, curves, lambda each: each.rpm)
        fan.set_ylabel("fans (rpm)")
        fan.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
        fan.set_ylim(0.0, 1.08 * max(max(each.rpm) for each in curves))
        scale_x(fan, "s", False)
        return Plot(as_svg(drawing, alt, "heat-speed"), legend)


def _draw(
    axes: Axes,
    curves: Sequence[HeatCurves],
    values: Callable[[HeatCurves], tuple[float, ...]],
    levels: Sequence[str] = (),
) -> list[LegendEntry]:
    """Draw a quantity of each run, and return the legend."""
    lines = []
    for each in curves:
        line = Curve(style=each.style, label=each.label, xs=each.at_s, ys=values(each))
        every = max(1, math.ceil(len(line.xs) / 8))
        axes.plot(line.xs, line.ys, markevery=every, **line_style(line.style))
        lines.append(line)
    axes.set_xlim(left=0)
    return curve_legend(lines, levels)
