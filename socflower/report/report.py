"""The report of a run or a comparison: one HTML file that needs neither a network nor socflower."""

import itertools
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from socflower.errors import ConfigError
from socflower.quantities import MISSING, counted, finite, human_joules, human_seconds, percent, plain_number
from socflower.report.board_picture import board_picture, communication_letters, letter, picture_legend
from socflower.report.heat_section import heat_section
from socflower.report.page import details, figure, listing, page, section, table, text
from socflower.report.plots import PARTS, Curve, accuracy_plot, breakdown_plot, curve_legend, needs_log, part_legend
from socflower.report.split_section import split_section
from socflower.report.summary import Run, expectations, name_runs, summary, targets_of
from socflower.wire.saved_state import write_atomically

_MAX_LISTED = 30  # groups that are listed in a sentence
_MAX_ROUNDS = 200
_MAX_EVENTS = 500
"""Longer lists are cut with a note, so that browsers can open the file; result.json has all entries."""


def write_report(
    path: Path, results: Sequence[Mapping[str, Any]], *, title: str, question: str = "",
    baseline: str | None = None,
) -> None:
    """Write the report of one or several result documents atomically.

    Ratios are relative to `baseline`, a strategy's name, or by default to the slowest result. Equal arguments give
    equal bytes. Raises `ConfigError` without results, or if no result has the baseline's name.
    """
    content = render_report(results, title=title, question=question, baseline=baseline)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, content)


def render_report(
    results: Sequence[Mapping[str, Any]], *, title: str, question: str = "", baseline: str | None = None
) -> str:
    """Return the HTML that `write_report` writes."""
    if not results:
        raise ConfigError("report: needs at least one result, got none")
    runs = name_runs(results)
    asked = f'<p class="question">{text(question.strip())}</p>' if question.strip() else ""
    return page(title, "\n".join(part for part in (
        f"<h1>{text(title)}</h1>", asked,
        section("summary", "Summary", summary(runs, baseline)),
        section("expectations", "Expectations", expectations(runs)),
        _accuracy_over_time(runs),
        _accuracy_over_energy(runs),
        _mixing(runs),
        heat_section(runs),
        split_section(runs),
        _breakdowns(runs),
        _groups(runs),
        _events(runs),
        _scenario(runs),
        _provenance(runs),
    ) if part))


def _accuracy_over_time(runs: Sequence[Run]) -> str:
    curves = [_curve(run, "virtual_s") for run in runs]
    rounds = "\n".join(details(f"Rounds of {text(run.label)} as a table", _rounds_table(run))
                       for run in runs if run.rows("rounds"))
    if any(curve.xs for curve in curves):
        return section("time", "Accuracy over virtual time", _accuracy_figure(runs, curves, "s"), rounds)
    # A deployment has wall time instead of virtual time.
    curves = [_curve(run, "wall_s") for run in runs]
    if any(curve.xs for curve in curves):
        return section("time", "Accuracy over wall time",
                       '<p class="note">Real time since the command began, the start of Flower included.</p>',
                       _accuracy_figure(runs, curves, "s", "wall time"), rounds)
    curves = [_curve(run, "epoch") for run in runs]
    if any(curve.xs for curve in curves):
        return section("time", "Accuracy over epochs",
                       '<p class="note">There is no virtual time on this engine.</p>',
                       _accuracy_figure(runs, curves, "epoch"), rounds)
    return section("time", "Accuracy over virtual time", '<p class="note">No accuracy was measured.</p>', rounds)


def _accuracy_over_energy(runs: Sequence[Run]) -> str:
    curves = [_curve(run, "energy_j") for run in runs]
    if not any(x > 0 for curve in curves for x in curve.xs):
        return section("energy", "Accuracy over energy",
                       '<p class="note">No energy was accounted for, or no accuracy was measured.</p>')
    return section("energy", "Accuracy over energy", _accuracy_figure(runs, curves, "J"))


def _mixing(runs: Sequence[Run]) -> str:
    """Return the CPU's share of the samples and the confidence in int8; empty without mixed precision."""
    figures = []
    for key, noun, label in (("cpu_share", "The CPUs' share of the samples (gamma)", "share of the CPU"),
                             ("alpha", "Confidence in int8 (alpha)", "cosine of the logits")):
        shown = [(run, curve) for run in runs if (curve := _curve(run, "epoch", of=key)).xs]
        if not shown:
            continue
        alt = f"{noun} over epochs. " + "; ".join(f"{run.label}: {percent(curve.ys[-1])} at the end"
                                                  for run, curve in shown)
        svg = accuracy_plot([curve for _, curve in shown], quantity="epoch", targets=(), alt=alt, prefix=key,
                            label=label)
        figures.append(figure(svg, curve_legend([(run.style, run.label) for run, _ in shown], [])))
    return section("mixing", "CPU and NPU", *figures) if figures else ""


def _curve(run: Run, key: str, of: str = "accuracy") -> Curve:
    """Return the curve of the rounds that have both the quantity `key` and the share `of`, such as the accuracy."""
    points = [(x, y) for row in run.rows("rounds")
              if (x := finite(row.get(key))) is not None and (y := finite(row.get(of))) is not None]
    return Curve(style=run.style, xs=tuple(x for x, _ in points), ys=tuple(y for _, y in points))


def _accuracy_figure(
    runs: Sequence[Run], curves: Sequence[Curve], quantity: str, noun: str | None = None,
) -> str:
    shown = [(run, curve) for run, curve in zip(runs, curves, strict=True) if curve.xs]
    targets = targets_of(runs)
    over = noun or {"s": "virtual time", "J": "energy", "epoch": "epochs"}[quantity]
    readable = {"s": human_seconds, "J": human_joules, "epoch": plain_number}[quantity]
    alt = f"Accuracy over {over}" + (", logarithmic. " if needs_log(curves) else ". ") + "; ".join(
        f"{run.label}: {percent(curve.ys[-1])} after {readable(curve.xs[-1])}" for run, curve in shown)
    svg = accuracy_plot([curve for _, curve in shown], quantity=quantity, targets=targets, alt=alt,
                        prefix=f"accuracy-{quantity}", noun=noun)
    return figure(svg, curve_legend([(run.style, run.label) for run, _ in shown], [percent(t) for t in targets]))


def _rounds_table(run: Run) -> str:
    rows = run.rows("rounds")
    stride = math.ceil(len(rows) / _MAX_ROUNDS)
    # Counted from the end, so that the last round is always included.
    kept = list(rows[::-1][::stride])[::-1]
    note = f"Every {stride}th of {len(rows)} rounds." if stride > 1 else ""
    times = {"Wall time": "wall_s", "Predicted time": "predicted_s"} if _is_deployed(run) \
        else {"Virtual time": "virtual_s"}
    return table(note, ["Round", "Epoch", "Accuracy", "Loss", *times, "Energy"], [
        [text(row.get("round", MISSING)), text(plain_number(row.get("epoch"))), percent(row.get("accuracy")),
         text(plain_number(row.get("loss"))), *(human_seconds(row.get(key)) for key in times.values()),
         human_joules(row.get("energy_j"))]
        for row in kept], numeric=range(5 + len(times)))


def _is_deployed(run: Run) -> bool:
    """Return whether the run is of a deployment, whose virtual time is a prediction."""
    return finite(run.get("virtual_s")) is None and finite(run.get("predicted_s")) is not None


def _breakdowns(runs: Sequence[Run]) -> str:
    parts = [_breakdown(runs, "soc_seconds", "s", "SoC time", "SoC time, summed over the SoCs that take part"),
             _breakdown(runs, "energy_j", "J", "Energy", "Energy, summed over the SoCs that take part; cooling is the "
                        "fans'")]
    if not any(parts):
        return section("breakdown", "Where time and energy go", '<p class="note">No breakdown was recorded.</p>')
    return section("breakdown", "Where time and energy go", *parts)


def _breakdown(runs: Sequence[Run], key: str, quantity: str, noun: str, caption: str) -> str:
    rows: list[tuple[str, dict[str, float]]] = []
    for run in runs:
        values = run.table("breakdown").get(key)
        if isinstance(values, Mapping):
            # Negative values are clipped to 0, since a bar cannot be negative.
            rows.append((run.label, {part: max(0.0, finite(values.get(part)) or 0.0) for part in PARTS}))
    shown = [part for part in PARTS if part != "cooling" or any(parts[part] for _, parts in rows)]
    rows = [(label, {part: parts[part] for part in shown}) for label, parts in rows]
    if not any(value for _, parts in rows for value in parts.values()):
        return ""
    readable = human_seconds if quantity == "s" else human_joules
    alt = f"{noun} by part. " + "; ".join(
        f"{label}: " + ", ".join(f"{part} {readable(parts[part])}" for part in shown) for label, parts in rows)
    numbers = table(caption, ["Strategy", *(part.capitalize() for part in shown), "Total"], [
        [text(label), *(readable(parts[part]) for part in shown), readable(math.fsum(parts.values()))]
        for label, parts in rows], numeric=range(1, 2 + len(shown)))
    svg = breakdown_plot(rows, quantity=quantity, alt=alt, prefix=f"parts-{quantity}")
    return f"<h3>{noun}</h3>\n{figure(svg, part_legend(shown))}\n{numbers}"


def _groups(runs: Sequence[Run]) -> str:
    """Return one picture per distinct plan; strategies with the same plan share a picture."""
    plans: dict[str, tuple[Mapping[str, Any], list[str]]] = {}
    for run in runs:
        plan = run.table("plan")
        if plan.get("groups") and plan.get("slots_per_board"):
            key = json.dumps(plan, sort_keys=True, default=str)
            plans.setdefault(key, (plan, []))[1].append(run.label)
    if not plans:
        return section("groups", "Groups on boards",
                       '<p class="note">No strategy of this report forms groups.</p>')
    parts: list[str] = []
    for index, (plan, labels) in enumerate(plans.values()):
        prefix = f"boards-{index}"
        heading = f"<h3>{text(', '.join(labels))}</h3>" if len(runs) > 1 else ""
        groups = plan["groups"]
        letters = communication_letters(plan)
        parts += [heading, _plan_note(plan), figure(board_picture(plan, prefix), picture_legend(plan, prefix)),
                  details("The group as a table" if len(groups) == 1 else f"The {len(groups)} groups as a table", table(
                      "", ["Group", "Leader", "SoCs", "Boards", "Split", "Communication group"],
                      [[text(group.get("id", MISSING)), text(group.get("leader", MISSING)),
                        text(ranges(group.get("members") or ())), text(ranges(group.get("boards") or ())),
                        "yes" if group.get("split") else "no", letters.get(str(group.get("id")), MISSING)]
                       for group in groups]))]
    return section("groups", "Groups on boards", *parts)


def _plan_note(plan: Mapping[str, Any]) -> str:
    groups = plan["groups"]
    split = sum(1 for group in groups if group.get("split"))
    note = f"{counted(len(groups), 'group')}, {split or 'none'} of them split over boards. "
    if split:
        note += f"At most {text(plan.get('contention', MISSING))} split groups share a board's uplink. "
    parts = plan.get("communication_groups") or []
    turns = "take turns" if plan.get("sequenced", True) else "run freely, without turns"
    if len(parts) > 1 and len(groups) > _MAX_LISTED:
        note += f"Communication groups {turns}: " + ", ".join(
            f"{letter(index)} with {counted(len(part), 'group')}" for index, part in enumerate(parts)
        ) + "; see the table."
    elif len(parts) > 1:
        note += f"Communication groups {turns}: " + "; ".join(
            f"{letter(index)} = groups {text(ranges(part))}" for index, part in enumerate(parts)) + "."
    elif parts:
        note += "One communication group: all groups synchronise at once."
    return f"<p>{note}</p>"


def ranges(numbers: Iterable[Any]) -> str:
    """Return numbers with consecutive ones joined: [0, 1, 2, 7] -> "0–2, 7"; other values are listed."""
    values = list(numbers)
    if not all(isinstance(value, int) for value in values):
        return ", ".join(str(value) for value in values)
    runs = [[value for _, value in run] for _, run in itertools.groupby(
        enumerate(sorted(values)), key=lambda pair: pair[1] - pair[0])]
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}–{run[-1]}" for run in runs)


def _events(runs: Sequence[Run]) -> str:
    deployed = bool(runs) and all(_is_deployed(run) for run in runs)
    rows = [[text(run.label), text(row.get("round", MISSING)), human_seconds(row.get("wall_s" if deployed else
                                                                                     "virtual_s")),
             text(event.get("kind", MISSING)), text(event.get("text", ""))]
            for run in runs for row in run.rows("rounds") for event in row.get("events") or ()]
    rows += [[text(run.label), text(restart.get("after_round", MISSING)), MISSING, "restart",
              text(restart.get("cause", ""))] for run in runs for restart in run.rows("restarts")]
    if not rows:
        return section("events", "Events", '<p class="note">Nothing out of the ordinary happened.</p>')
    cut = len(rows) > _MAX_EVENTS
    note = f"The first {_MAX_EVENTS} of {len(rows)} events; result.json has all." if cut else ""
    shown = table(note, ["Strategy", "Round", "Wall time" if deployed else "Virtual time", "Kind", "What happened"],
                  rows[:_MAX_EVENTS], numeric=(1, 2))
    folded = details(counted(len(rows), "event"), shown, is_open=len(rows) <= 20)
    return section("events", "Events", folded)


def _scenario(runs: Sequence[Run]) -> str:
    """Return the resolved scenario, only once if all strategies ran the same."""
    scenarios: dict[str, tuple[Any, list[str]]] = {}
    for run in runs:
        key = json.dumps(run.get("scenario"), sort_keys=True, default=str)
        scenarios.setdefault(key, (run.get("scenario"), []))[1].append(run.label)
    return section("scenario", "Resolved scenario", *(
        details("As it ran, defaults included" + (f": {text(', '.join(labels))}" if len(scenarios) > 1 else ""),
                listing(scenario)) for scenario, labels in scenarios.values()))


def _provenance(runs: Sequence[Run]) -> str:
    """Return the facts that are needed to repeat and examine the run."""
    facts = {"Engine": "engine", "Seed": "seed", "Kernels": "kernels", "Processors": "processors",
             "Transports": "transports", "Weights, SHA-256": "weights_sha256", "Notes": "notes",
             "Result schema": "schema"}

    def show(run: Run, key: str) -> str:
        shown = _flat(run.get(key))
        return f"<code>{shown}</code>" if key == "weights_sha256" else shown

    shown = table("", ["Strategy", *facts], [
        [text(run.label), *(show(run, key) for key in facts.values())] for run in runs])
    perfetto = (
        '<p>Every computation and transfer in virtual time is in <code>trace.json</code>, next to the '
        '<code>result.json</code> of the strategy: open '
        '<a href="https://ui.perfetto.dev" rel="noreferrer">ui.perfetto.dev</a>, choose “Open trace file” and '
        'pick it. The trace stays on your machine.</p>')
    return section("provenance", "How it ran", shown, perfetto)


def _flat(value: Any) -> str:
    """Return a value, table or list as one line of HTML."""
    if value is None or value in ({}, [], ""):
        return MISSING
    if isinstance(value, Mapping):
        return "; ".join(f"{text(key)}: {_flat(item)}" for key, item in value.items())
    if isinstance(value, list | tuple):
        return "; ".join(_flat(item) for item in value)
    return text(value)
