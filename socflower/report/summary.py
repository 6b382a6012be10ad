"""The results of a report: their names, the ratios between them, and their expectations."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from socflower.quantities import (
    MISSING,
    finite,
    human_bytes,
    human_joules,
    human_ratio,
    human_seconds,
    percent,
    plain_number,
)
from socflower.report.quality import Quality, quality_of

# By the suffix of an expectation's name; the plain number is shown as in the scenario file.
_READABLE = {"_s": human_seconds, "_j": human_joules, "_bytes": human_bytes, "accuracy": percent}
_SPELT_OUT = {"sgd": "one SoC (sgd)"}
# In a table; result.json has all rounds.
_MAX_ROUNDS = 200


def printable(value: object) -> str:
    """Return a value as text without lone surrogates and control characters."""
    plain = str(value).encode("utf-8", "replace").decode("utf-8")
    return "".join(char if char.isprintable() or char in " \n\t" else "\ufffd" for char in plain)


@dataclass(frozen=True, kw_only=True, slots=True)
class LabelledRun:
    """One result with its label and its plot style, which are the same in the whole report."""

    label: str
    style: int
    result: Mapping[str, Any]

    def get(self, key: str) -> Any:
        """Return an entry of the result document, None if it is missing."""
        return self.result.get(key)

    def table(self, key: str) -> Mapping[str, Any]:
        """Return a table of the result document, empty if it is missing or null."""
        value = self.result.get(key)
        return value if isinstance(value, Mapping) else {}

    def rows(self, key: str) -> Sequence[Mapping[str, Any]]:
        """Return a list of the result document, empty if it is missing or null."""
        return self.result.get(key) or ()

    @property
    def heat(self) -> Mapping[str, Any]:
        """The run's table of heat; empty if there is none."""
        return self.table("heat")

    @property
    def split(self) -> Mapping[str, Any]:
        """The run's table of edge and cloud; empty if there is none."""
        return self.table("split")

    @property
    def is_app(self) -> bool:
        """Whether a Flower app ran, not a scenario."""
        return self.get("app") is not None

    @property
    def metric_names(self) -> list[tuple[str, str]]:
        """The metrics of an app's rounds, by source and name."""
        names: dict[tuple[str, str], None] = {}
        for row in self.rows("rounds"):
            for source in ("server", "evaluate", "train"):
                names |= dict.fromkeys((source, name) for name in row.get(source) or ())
        return list(names)

    @property
    def is_predicted(self) -> bool:
        """Whether the run is a deployment, whose virtual time is only predicted."""
        return finite(self.get("virtual_s")) is None and finite(self.get("predicted_s")) is not None

    @property
    def shown_rounds(self) -> tuple[int, Sequence[Mapping[str, Any]]]:
        """The stride of the rounds shown in a table, and these rounds; the last one is always shown."""
        rounds = self.rows("rounds")
        stride = math.ceil(len(rounds) / _MAX_ROUNDS)
        return stride, rounds[::-1][::stride][::-1]


def name_runs(results: Sequence[Mapping[str, Any]]) -> tuple[LabelledRun, ...]:
    """Return the results under distinct names: the strategy, then its seed, then a running number."""
    labels = [printable(result.get("strategy") or "unnamed") for result in results]
    labels = [_SPELT_OUT.get(label, label) for label in labels]
    # Seeds and numbers are added only if names would be equal.
    if len(set(labels)) < len(labels):
        seeds = [printable(result.get("seed", MISSING)) for result in results]
        labels = [
            f"{label} (seed {seed})" if labels.count(label) > 1 else label
            for label, seed in zip(labels, seeds, strict=True)
        ]
    distinct = [
        f"{label} #{labels[:index].count(label) + 1}" if labels.count(label) > 1 else label
        for index, label in enumerate(labels)
    ]
    # The seeds of a strategy look the same.
    looks = distinct
    if distinct == labels:
        looks = [printable(result.get("strategy")) for result in results]
    styles = {look: index for index, look in enumerate(dict.fromkeys(looks))}
    return tuple(
        LabelledRun(label=label, style=styles[look], result=result)
        for label, look, result in zip(distinct, looks, results, strict=True)
    )


def quality_of_runs(runs: Iterable[LabelledRun]) -> Quality:
    """Return the metric by which the runs are compared."""
    return quality_of([run.result for run in runs])


def targets_of(runs: Sequence[LabelledRun]) -> list[float]:
    """Return the distinct targets of that metric, in ascending order."""
    key = quality_of_runs(runs).target_key
    return sorted({target for run in runs if (target := finite(run.get(key))) is not None})


@dataclass(frozen=True, kw_only=True, slots=True)
class Alternative:
    """A run compared with the first one; a ratio above 1 means that it takes more, None that a figure is missing."""

    run: LabelledRun
    time_ratio: float | None
    energy_ratio: float | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """The first run, which is the scenario's subject, compared with each of the others.

    Times and energies are those until the target is reached; if there is no target, those of whole runs.
    """

    time_key: str
    energy_key: str
    target: float | None
    quality: Quality
    subject: LabelledRun
    alternatives: Sequence[Alternative]

    @property
    def in_wall_time(self) -> bool:
        """Whether the times are wall times, since a run has no virtual time."""
        return self.time_key == "wall_s" or any(
            finite(run.get("virtual_s")) is None
            for run in (self.subject, *(each.run for each in self.alternatives))
        )

    @property
    def best(self) -> Alternative | None:
        """The quickest of the others; None if none of them reached the target."""
        able = {
            time_s: each
            for each in reversed(self.alternatives)
            if (time_s := finite(each.run.get(self.time_key))) is not None
        }
        return able[min(able)] if able else None

    def headline(self) -> str:
        """Return a sentence that says which is faster: the subject or the best of the others."""
        goal = "the end" if self.target is None else self.quality.goal(self.target)
        clock = "wall time" if self.in_wall_time else "virtual time"
        own = finite(self.subject.get(self.time_key))
        best = self.best
        if own is None:
            others = "neither did any other"
            if best is not None:
                time = human_seconds(best.run.get(self.time_key))
                others = f"{best.run.label} did, in {time} of {clock}"
            return f"{self.subject.label} never reached {goal}; {others}."
        verb = "takes" if self.target is None else f"reaches {goal} in"
        text = f"{self.subject.label} {verb} {human_seconds(own)} of {clock}"
        if best is None:
            return f"{text}; no other strategy reached it."
        ratio, theirs = best.time_ratio, human_seconds(best.run.get(self.time_key))
        if ratio is None:
            return f"{text}, {best.run.label} {theirs}."
        if ratio >= 1.0:
            return f"{text}, {human_ratio(ratio)} as fast as the best alternative: {best.run.label} takes {theirs}."
        return f"{text}; {best.run.label} is {human_ratio(1.0 / ratio)} as fast and takes {theirs}."


def comparison_of(runs: Sequence[LabelledRun]) -> Comparison | None:
    """Return the comparison of the first run with the others; None if there are no others.

    It is by the time to the target if there is one target and a run has reached it, else by the whole time.
    """
    if len(runs) < 2:
        return None
    subject, target, quality = runs[0], None, quality_of_runs(runs)
    targets = targets_of(runs)
    has_reached = any(finite(run.get(quality.time_key)) is not None for run in runs)
    if len(targets) == 1 and has_reached:
        time_key, energy_key, target = quality.time_key, quality.energy_key, targets[0]
    elif all(finite(run.get("virtual_s")) is not None for run in runs):
        time_key, energy_key = "virtual_s", "energy_j"
    else:
        time_key, energy_key = "wall_s", "energy_j"
    return Comparison(
        time_key=time_key,
        energy_key=energy_key,
        target=target,
        quality=quality,
        subject=subject,
        alternatives=[
            Alternative(
                run=run,
                time_ratio=_ratio(run.get(time_key), subject.get(time_key)),
                energy_ratio=_ratio(run.get(energy_key), subject.get(energy_key)),
            )
            for run in runs[1:]
        ],
    )


def headline_of(results: Sequence[Mapping[str, Any]]) -> str | None:
    """Return the sentence that says which result is faster; None for a single result."""
    comparison = comparison_of(name_runs(results))
    return None if comparison is None else comparison.headline()


def _ratio(theirs: Any, own: Any) -> float | None:
    above, below = finite(theirs), finite(own)
    return above / below if above and below else None


def claims_of(runs: Sequence[LabelledRun]) -> list[dict[str, Any]]:
    """Return all expectations: name, label of the run, `holds`, and pairs of plain and readable value."""
    claims = []
    for run in runs:
        for claim in run.rows("expectations"):
            name = str(claim.get("name", MISSING))
            values = (claim.get("expected"), claim.get("observed"))
            plain = [plain_number(value) for value in values]
            if plain[0] == plain[1] and values[0] != values[1]:
                # Equal after rounding: 0.8 expected, 0.79999999 observed must not read "0.8, 0.8, fails".
                plain = [str(value) for value in values]
            helpers = (helper for suffix, helper in _READABLE.items() if name.endswith(suffix))
            readable = next(helpers, None)
            expected, observed = (
                (text, "" if readable is None or finite(value) is None else readable(value))
                for text, value in zip(plain, values, strict=True)
            )
            claims.append(
                {
                    "name": name,
                    "label": run.label,
                    "expected": expected,
                    "observed": observed,
                    "holds": claim.get("holds"),
                }
            )
    return claims


def verdict_on(claims: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Return the verdict on all claims in one line, and its kind; `holds` is None if a strategy did not run."""
    holds = [claim["holds"] for claim in claims]
    failed, unchecked = holds.count(False), holds.count(None)
    if failed:
        verb = "fails" if failed == 1 else "fail"
        return {"kind": "fails", "text": f"✗ {failed} of {len(holds)} expectations {verb}."}
    if unchecked:
        checked = f"{len(holds) - unchecked} of {len(holds)} expectations hold"
        why = "could not be checked: the strategy compared with did not run."
        return {"kind": "unknown", "text": f"? {checked}, {unchecked} {why}"}
    said = {1: "The expectation holds.", 2: "Both expectations hold."}.get(
        len(holds), f"All {len(holds)} expectations hold."
    )
    return {"kind": "holds", "text": f"✓ {said}"}


def prediction_table(predictions: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """Return the strategies of predicted epochs, and a row for each workload: its name, seconds, joules, gains.

    Seconds and joules are lists by strategy, at equal samples a step: with the settings of the comparison, and with
    each strategy's best. The gains are the speed of the first strategy relative to the best other one.
    """
    strategies = list(dict.fromkeys(str(each["strategy"]) for each in predictions))
    named = ("model", "data", "batch_size", "arithmetic")
    rows: dict[tuple[str, ...], dict[str, Mapping[str, Any]]] = {}
    for each in predictions:
        workload = tuple(str(each[key]) for key in named)
        rows.setdefault(workload, {})[str(each["strategy"])] = each
    table = []
    for workload, by_name in rows.items():
        first, *others = (by_name[name] for name in strategies)
        row: dict[str, Any] = dict(zip(named, workload, strict=True))
        for key in ("equal_epoch_s", "best_epoch_s", "best_epoch_energy_j"):
            row[key] = [each[key] for each in (first, *others)]
        row["best"] = [
            ", ".join(f"{key} = {value}" for key, value in each["best"].items())
            for each in (first, *others)
        ]
        for gain, key in (("equal_gain", "equal_epoch_s"), ("best_gain", "best_epoch_s")):
            known = [each[key] for each in others if each[key]]
            row[gain] = _ratio(min(known, default=None), first[key])
        row["step_samples"] = first["step_samples"]
        table.append(row)
    return {"strategies": strategies, "rows": table}
