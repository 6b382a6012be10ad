"""The report of a run or a comparison: one HTML file that needs neither a network nor socflower.

The page itself is in `templates/`, which get plain values; all values are escaped.
"""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from socflower.errors import ConfigError
from socflower.quantities import (
    MISSING,
    counted,
    finite,
    human_bytes,
    human_joules,
    human_ratio,
    human_seconds,
    percent,
    plain_number,
)
from socflower.report.board_picture import board_picture, communication_letters, letter
from socflower.report.front import front_plot
from socflower.report.heat_section import heat_plots
from socflower.report.plots import PARTS, breakdown_plot
from socflower.report.quality_section import (
    mixing_plots,
    quality_over_energy,
    quality_over_time,
    without_energy,
)
from socflower.report.split_section import cut_plot
from socflower.report.summary import (
    LabelledRun,
    claims_of,
    comparison_of,
    name_runs,
    prediction_table,
    printable,
    quality_of_runs,
    targets_of,
    verdict_on,
)
from socflower.wire.saved_state import write_atomically

_MAX_LISTED = 30
"""Groups that are listed in a sentence; of more, only the numbers."""

_MAX_EVENTS = 500
"""Longer lists are cut with a note, so that browsers can open the file; result.json has all entries."""


def write_report(path: Path, results: Sequence[Mapping[str, Any]], **parts: Any) -> None:
    """Write atomically what `render_report` returns of the same results and parts."""
    content = render_report(results, **parts)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, content)


def render_report(
    results: Sequence[Mapping[str, Any]],
    *,
    title: str,
    question: str = "",
    predictions: Sequence[Mapping[str, Any]] = (),
    methods: Mapping[str, Any] | None = None,
    means: Sequence[Mapping[str, Any]] = (),
    tuning: Mapping[str, Any] | None = None,
    caveats: Sequence[str] = (),
) -> str:
    """Return the report of one or several result documents as HTML.

    The first result is compared with each of the others; if there are `means` over several seeds, the means are
    compared. `predictions` are predicted epochs; `methods`, `tuning` and `caveats` are those of a comparison document.
    Equal arguments give equal texts. Raises `ConfigError` if there are no results.
    """
    if not results:
        raise ConfigError("report: needs at least one result, got none")
    runs = name_runs(results)
    means_by_name = name_runs(means)
    comparison = comparison_of(means_by_name or runs)
    claims, quality = claims_of(runs), quality_of_runs(runs)
    return _ENVIRONMENT.get_template("report.html.j2").render(
        title=title,
        question=question.strip(),
        missing=MISSING,
        runs=runs,
        targets=targets_of(runs),
        means=means_by_name,
        tuning=tuning,
        quality=quality,
        caveats=caveats,
        has_servers=any("inter_server" in run.table("bytes") for run in runs),
        comparison=comparison,
        claims=claims,
        verdict=verdict_on(claims),
        predictions=prediction_table(predictions),
        methods=methods,
        front=front_plot(methods["front"]) if methods and methods["front"] else None,
        over_time=quality_over_time(runs, quality),
        over_energy=quality_over_energy(runs, quality),
        without_energy=without_energy(runs, quality),
        mixing=mixing_plots(runs),
        without_groups=_without_groups(runs),
        has_apps=any(run.is_app for run in runs),
        heat_plots=heat_plots(runs),
        cut_plot=cut_plot(runs),
        breakdowns=_breakdowns(runs),
        plans=_plans(runs),
        events=_events(runs),
        scenarios=_scenarios(runs),
    )


def render(template: str, **values: Any) -> str:
    """Return a page of this package's templates; all values are escaped."""
    return _ENVIRONMENT.get_template(template).render(missing=MISSING, **values)


# ----------------------------------------------------------------------------------------------- how values are shown
def ranges(numbers: Iterable[Any] | None) -> str:
    """Return numbers with consecutive ones joined: [0, 1, 2, 7] -> "0–2, 7"; other values are listed."""
    values = list(numbers or ())
    if not all(isinstance(value, int) for value in values):
        return ", ".join(str(value) for value in values)
    runs: list[list[int]] = []
    for value in sorted(values):
        if runs and value == runs[-1][-1] + 1:
            runs[-1].append(value)
        else:
            runs.append([value])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}–{run[-1]}" for run in runs)


def _one_line(value: Any) -> str:
    """Return a value, table or list as one line."""
    if value is None or value in ({}, [], ""):
        return MISSING
    if isinstance(value, Mapping):
        return "; ".join(f"{key}: {_one_line(item)}" for key, item in value.items())
    if isinstance(value, list | tuple):
        return "; ".join(_one_line(item) for item in value)
    return str(value)


def _energy(joules: Any) -> tuple[str, str]:
    """Return an energy and its watt-hours; the table has them below each other, so that the column is narrow."""
    shown, _, watt_hours = human_joules(joules).partition(" (")
    return shown, watt_hours.rstrip(")")


def _fixed(value: Any, digits: int, unit: str = "") -> str:
    number = finite(value)
    return MISSING if number is None else f"{number:.{digits}f}{unit}"


def _finalize(value: Any) -> Any:
    return value if isinstance(value, Markup) else printable(value)


# An unknown name in a template is an error, not an empty text.
_ENVIRONMENT = Environment(
    loader=PackageLoader("socflower.report"),
    autoescape=True,
    undefined=StrictUndefined,
    finalize=_finalize,
    trim_blocks=True,
    lstrip_blocks=True,
)
_ENVIRONMENT.filters |= {
    "bytes": human_bytes,
    "counted": counted,
    "energy": _energy,
    "fixed": _fixed,
    "g": "{:g}".format,
    "joules": human_joules,
    "number": plain_number,
    "one_line": _one_line,
    "percent": percent,
    "ranges": ranges,
    "ratio": human_ratio,
    "seconds": human_seconds,
}


# ------------------------------------------------------------------------------------------------- values of sections
def _breakdowns(runs: Sequence[LabelledRun]) -> list[dict[str, Any]]:
    """Return plot and rows of time and energy by part, as far as they were recorded."""
    over_socs = "summed over the SoCs that take part"
    made = (
        _breakdown(runs, "soc_seconds", "s", "SoC time", over_socs),
        _breakdown(
            runs, "energy_j", "J", "Energy", f"{over_socs}; cooling is the energy of the fans"
        ),
    )
    return [each for each in made if each is not None]


def _breakdown(
    runs: Sequence[LabelledRun], key: str, quantity: str, noun: str, note: str
) -> dict[str, Any] | None:
    readable = human_seconds if quantity == "s" else human_joules
    rows = []
    for run in runs:
        values = run.table("breakdown").get(key)
        if isinstance(values, Mapping):
            # Negative values become 0, since a bar cannot be negative.
            own = {part: max(0.0, finite(values.get(part)) or 0.0) for part in PARTS}
            rows.append((run.label, own))
    if not any(any(values.values()) for _, values in rows):
        return None
    is_cooled = any(values["cooling"] for _, values in rows)
    parts = [part for part in PARTS if part != "cooling" or is_cooled]
    in_words, table = [], []
    for label, values in rows:
        shown = [readable(values[part]) for part in parts]
        words = [f"{part} {each}" for part, each in zip(parts, shown, strict=True)]
        in_words.append(f"{label}: {', '.join(words)}")
        table.append([label, *shown, readable(math.fsum(values[part] for part in parts))])
    alt = f"{noun} by part. {'; '.join(in_words)}"
    return {
        "noun": noun,
        "caption": f"{noun}, {note}",
        "parts": parts,
        "plot": breakdown_plot(rows, parts, quantity=quantity, alt=alt, prefix=f"parts-{quantity}"),
        "rows": table,
    }


def _plans(runs: Sequence[LabelledRun]) -> list[dict[str, Any]]:
    """Return the distinct plans; strategies with the same plan share a picture."""
    plans: dict[str, tuple[Mapping[str, Any], list[str]]] = {}
    for run in runs:
        plan = run.table("plan")
        if plan.get("groups") and plan.get("slots_per_board"):
            key = json.dumps(plan, sort_keys=True, default=str)
            plans.setdefault(key, (plan, []))[1].append(run.label)
    return [
        {
            "labels": labels,
            "note": _plan_note(plan),
            "groups": plan["groups"],
            "letters": communication_letters(plan),
            "picture": board_picture(plan, f"boards-{index}"),
        }
        for index, (plan, labels) in enumerate(plans.values())
    ]


def _without_groups(runs: Sequence[LabelledRun]) -> str:
    """Return the sentence that replaces the groups' pictures; an unknown strategy may form groups."""
    unknown = [
        run.label
        for run in runs
        if run.is_app and run.get("plan") is None and "strategy" in run.table("unknown")
    ]
    if unknown:
        return f"The strategy of {', '.join(unknown)} is not known, nor whether it forms groups."
    return "No strategy of this report forms groups."


def _plan_note(plan: Mapping[str, Any]) -> str:
    groups = plan["groups"]
    split = sum(1 for group in groups if group.get("split"))
    note = f"{counted(len(groups), 'group')}, {split or 'none'} of them split over boards. "
    if split:
        note += f"At most {plan.get('contention', MISSING)} split groups share a board's uplink. "
    parts = plan.get("communication_groups") or []
    turns = "take turns" if plan.get("uplink_turns", True) else "run freely, without turns"
    if len(parts) > 1 and len(groups) > _MAX_LISTED:
        sizes = [f"{letter(i)} with {counted(len(part), 'group')}" for i, part in enumerate(parts)]
        note += f"Communication groups {turns}: {', '.join(sizes)}; see the table."
    elif len(parts) > 1:
        lists = [f"{letter(i)} = groups {ranges(part)}" for i, part in enumerate(parts)]
        note += f"Communication groups {turns}: {'; '.join(lists)}."
    elif parts:
        note += "One communication group: all groups synchronise at once."
    return note


def _events(runs: Sequence[LabelledRun]) -> dict[str, Any]:
    deployed = all(run.is_predicted for run in runs)
    rows: list[list[Any]] = []
    for run in runs:
        for row in run.rows("rounds"):
            at = human_seconds(row.get("wall_s" if deployed else "virtual_s"))
            for event in row.get("events") or ():
                rows.append([run.label, row.get("round", MISSING), at, *_event(event)])
    for run in runs:
        for event in () if run.rows("rounds") else run.rows("events"):
            rows.append([run.label, MISSING, MISSING, *_event(event)])
    for run in runs:
        for restart in run.rows("restarts"):
            after, cause = restart.get("after_round", MISSING), restart.get("cause", "")
            rows.append([run.label, after, MISSING, "restart", cause])
    note = ""
    if len(rows) > _MAX_EVENTS:
        note = f"The first {_MAX_EVENTS} of {len(rows)} events; result.json has all."
    return {
        "num_events": len(rows),
        "rows": rows[:_MAX_EVENTS],
        "note": note,
        "time": "Wall time" if deployed else "Virtual time",
    }


def _event(event: Mapping[str, Any]) -> tuple[Any, Any]:
    return event.get("kind", MISSING), event.get("text", "")


def _scenarios(runs: Sequence[LabelledRun]) -> list[tuple[str, list[str]]]:
    """Return the distinct resolved scenarios as JSON, and the labels of their runs."""
    scenarios: dict[str, tuple[Any, list[str]]] = {}
    for run in runs:
        key = json.dumps(run.get("scenario"), sort_keys=True, default=str)
        scenarios.setdefault(key, (run.get("scenario"), []))[1].append(run.label)
    return [
        (json.dumps(_as_json(scenario), indent=2, ensure_ascii=False), labels)
        for scenario, labels in scenarios.values()
    ]


def _as_json(value: Any) -> Any:
    """Return a value that JSON can represent; NaN, infinity and other types become text."""
    if isinstance(value, dict):
        return {str(key): _as_json(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_as_json(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value if isinstance(value, str | int | float | bool | None) else str(value)
