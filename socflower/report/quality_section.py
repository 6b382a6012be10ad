"""Accuracy or loss over time and energy in a report, and the figures of mixed precision over epochs."""

from collections.abc import Sequence
from typing import Any

from socflower.quantities import finite, human_joules, human_seconds, percent, plain_number
from socflower.report.plots import Curve, Plot, needs_log, quality_plot
from socflower.report.quality import Quality
from socflower.report.summary import LabelledRun, targets_of


def quality_over_time(runs: Sequence[LabelledRun], quality: Quality) -> dict[str, Any]:
    """Return heading, note and plot; a deployment has wall time instead of virtual time."""
    since = (
        "the app began"
        if any(run.is_app for run in runs)
        else "the command, Flower included, began"
    )
    name = quality.name.capitalize()
    for key, quantity, noun, note in (
        ("virtual_s", "s", "virtual time", ""),
        ("wall_s", "s", "wall time", f"Real time since {since}."),
        ("epoch", "epoch", "epochs", "There is no virtual time on this engine."),
    ):
        plot = _quality_plot(runs, quality, key, quantity, noun)
        if plot is not None:
            return {"heading": f"{name} over {noun}", "note": note, "plot": plot}
    note = _without_quality(runs, quality)
    return {"heading": f"{name} over virtual time", "note": note, "plot": None}


def _without_quality(runs: Sequence[LabelledRun], quality: Quality) -> str:
    """Return why no run has the quality; apps give the reason, since they may have metrics of other names."""
    reasons = [
        f"{run.label}: {reason}."
        for run in runs
        if (reason := run.table("unknown").get(quality.final_key)) is not None
    ]
    return " ".join(reasons) or f"No {quality.name} was measured."


def without_energy(runs: Sequence[LabelledRun], quality: Quality) -> str:
    """Return why nothing can be drawn over energy."""
    if not any(_curve(run, "round", quality.name).xs for run in runs):
        return _without_quality(runs, quality)
    having = "an accuracy" if quality.name == "accuracy" else "a loss"
    return f"No energy was accounted for in the rounds that have {having}."


def quality_over_energy(runs: Sequence[LabelledRun], quality: Quality) -> Plot | None:
    """Return the plot over joules; None without energies."""
    curves = [_curve(run, "energy_j", quality.name) for run in runs]
    if not any(x > 0 for each in curves for x in each.xs):
        return None
    return _quality_plot(runs, quality, "energy_j", "J", "energy")


def _quality_plot(
    runs: Sequence[LabelledRun], quality: Quality, key: str, quantity: str, over: str
) -> Plot | None:
    curves = [curve for run in runs if (curve := _curve(run, key, quality.name)).xs]
    if not curves:
        return None
    readable = {"s": human_seconds, "J": human_joules, "epoch": plain_number}[quantity]
    ends = [
        f"{curve.label}: {quality.shown(curve.ys[-1])} after {readable(curve.xs[-1])}"
        for curve in curves
    ]
    scale = ", logarithmic" if needs_log(curves) else ""
    alt = f"{quality.name.capitalize()} over {over}{scale}. {'; '.join(ends)}"
    return quality_plot(
        curves,
        quantity=quantity,
        targets=targets_of(runs),
        alt=alt,
        of=quality,
        prefix=f"{quality.name}-{quantity}",
        noun="wall time" if over == "wall time" else None,
    )


def mixing_plots(runs: Sequence[LabelledRun]) -> list[Plot]:
    """Return the CPU's share of the samples and the confidence in int8; none without mixed precision."""
    plots = []
    for key, noun, label in (
        ("cpu_share", "The CPUs' share of the samples (gamma)", "share of the CPU"),
        ("alpha", "Confidence in int8 (alpha)", "cosine of the logits"),
        ("copy_similarity", "Similarity of the quantised copy", "cosine of the logits"),
    ):
        curves = [curve for run in runs if (curve := _curve(run, "epoch", of=key)).xs]
        if curves:
            ends = [f"{curve.label}: {percent(curve.ys[-1])} at the end" for curve in curves]
            alt = f"{noun} over epochs. {'; '.join(ends)}"
            plots.append(
                quality_plot(curves, quantity="epoch", targets=(), alt=alt, prefix=key, label=label)
            )
    return plots


def _curve(run: LabelledRun, key: str, of: str) -> Curve:
    """Return the curve of the rounds that have both the quantity `key` and the figure `of`, such as the accuracy."""
    points = []
    for row in run.rows("rounds"):
        x, y = finite(row.get(key)), finite(row.get(of))
        if x is not None and y is not None:
            points.append((x, y))
    xs, ys = tuple(x for x, _ in points), tuple(y for _, y in points)
    return Curve(style=run.style, label=run.label, xs=xs, ys=ys)
