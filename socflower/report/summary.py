"""The results of a report: their names, the ratios between them, and their claims."""

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
_MAX_ROUNDS = 200  # in a table; result.json has all


def printable(value: object) -> str:
    """Return a value as text without lone surrogates and control characters."""
    plain = str(value).encode("utf-8", "replace").decode("utf-8")
    return "".join(char if char.isprintable() or char in " \n\t" else "\ufffd" for char in plain)


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
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
        """What is known of heat; empty without."""
        return self.table("heat")

    @property
    def split(self) -> Mapping[str, Any]:
        """What is known of edge and cloud; empty without."""
        return self.table("split")

    @property
    def is_app(self) -> bool:
        """Whether the run is of a Flower app, not of a scenario."""
        return self.get("app") is not None

    @property
    def metric_names(self) -> list[tuple[str, str]]:
        """The metrics of an app's rounds, by source and name."""
        return list(
            dict.fromkeys(
                (source, name)
                for row in self.rows("rounds")
                for source in ("server", "evaluate", "train")
                for name in row.get(source) or ()
            )
        )

    @property
    def is_predicted(self) -> bool:
        """Whether the run is of a deployment, whose virtual time is a prediction."""
        return finite(self.get("virtual_s")) is None and finite(self.get("predicted_s")) is not None

    @property
    def shown_rounds(self) -> tuple[int, Sequence[Mapping[str, Any]]]:
        """Every how many rounds one is shown in a table, and these; the last one always."""
        rounds = self.rows("rounds")
        stride = math.ceil(len(rounds) / _MAX_ROUNDS)
        return stride, rounds[::-1][::stride][::-1]


def name_runs(results: Sequence[Mapping[str, Any]]) -> tuple[Run, ...]:
    """Return the results under distinct names: the strategy, then its seed, then a running number."""
    labels = [printable(result.get("strategy") or "unnamed") for result in results]
    labels = [_SPELT_OUT.get(label, label) for label in labels]
    if len(set(labels)) < len(labels):
        labels = [
            f"{label} (seed {printable(result.get('seed', MISSING))})"
            if labels.count(label) > 1
            else label
            for label, result in zip(labels, results, strict=True)
        ]
    distinct = [
        f"{label} #{labels[:index].count(label) + 1}" if labels.count(label) > 1 else label
        for index, label in enumerate(labels)
    ]
    # The seeds of a strategy look the same.
    looks = (
        [printable(result.get("strategy")) for result in results]
        if distinct == labels
        else distinct
    )
    styles = {look: index for index, look in enumerate(dict.fromkeys(looks))}
    return tuple(
        Run(label=label, style=styles[look], result=result)
        for label, look, result in zip(distinct, looks, results, strict=True)
    )


def quality_of_runs(runs: Iterable[Run]) -> Quality:
    """Return what the runs are judged by."""
    return quality_of([run.result for run in runs])


def targets_of(runs: Sequence[Run]) -> list[float]:
    """Return the distinct targets of what the runs are judged by, in ascending order."""
    key = quality_of_runs(runs).target_key
    return sorted({target for run in runs if (target := finite(run.get(key))) is not None})


@dataclass(frozen=True, kw_only=True, slots=True)
class Alternative:
    """Another run beside the first one; ratios above 1 mean that it takes more, None that it has no such figure."""

    run: Run
    time_ratio: float | None
    energy_ratio: float | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """The first run, which is the scenario's subject, against each of the others.

    Times are those to the target, energies those spent until then; of whole runs where there is no target.
    """

    time_key: str
    energy_key: str
    target: float | None
    quality: Quality
    subject: Run
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
        able = [
            each for each in self.alternatives if finite(each.run.get(self.time_key)) is not None
        ]
        return min(able, key=lambda each: finite(each.run.get(self.time_key)) or 0.0, default=None)

    def headline(self) -> str:
        """Return in a sentence who is quicker: the subject or the best of the others."""
        goal = "the end" if self.target is None else self.quality.goal(self.target)
        clock = "wall time" if self.in_wall_time else "virtual time"
        own = finite(self.subject.get(self.time_key))
        best = self.best
        if own is None:
            others = (
                "neither did any other"
                if best is None
                else f"{best.run.label} did, in {human_seconds(best.run.get(self.time_key))} of {clock}"
            )
            return f"{self.subject.label} never reached {goal}; {others}."
        text = (
            f"{self.subject.label} {f'reaches {goal} in' if self.target is not None else 'takes'} "
            f"{human_seconds(own)} of {clock}"
        )
        if best is None:
            return f"{text}; no other strategy reached it."
        ratio, theirs = best.time_ratio, human_seconds(best.run.get(self.time_key))
        if ratio is None:
            return f"{text}, {best.run.label} {theirs}."
        if ratio >= 1.0:
            return f"{text}, {human_ratio(ratio)} as fast as the best alternative: {best.run.label} takes {theirs}."
        return f"{text}; {best.run.label} is {human_ratio(1.0 / ratio)} as fast and takes {theirs}."


def comparison_of(runs: Sequence[Run]) -> Comparison | None:
    """Return the comparison of the first run with the others; None if there are no others.

    By the time to the target, if there is one target that a run has reached; else by the whole time.
    """
    if len(runs) < 2:
        return None
    subject, target, quality = runs[0], None, quality_of_runs(runs)
    if len(targets_of(runs)) == 1 and any(
        finite(run.get(quality.time_key)) is not None for run in runs
    ):
        time_key, energy_key, target = quality.time_key, quality.energy_key, targets_of(runs)[0]
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
    """Return the sentence that says who is quicker; None for a single result."""
    comparison = comparison_of(name_runs(results))
    return None if comparison is None else comparison.headline()


def _ratio(theirs: Any, own: Any) -> float | None:
    above, below = finite(theirs), finite(own)
    return above / below if above and below else None


def claims_of(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """Return all expectations: name, label of the run, `holds`, and pairs of plain and readable value."""
    claims = []
    for run in runs:
        for claim in run.rows("expectations"):
            name, values = (
                str(claim.get("name", MISSING)),
                (claim.get("expected"), claim.get("observed")),
            )
            plain = [plain_number(value) for value in values]
            if plain[0] == plain[1] and values[0] != values[1]:
                # Equal after rounding: 0.8 expected, 0.79999999 observed must not read "0.8, 0.8, fails".
                plain = [str(value) for value in values]
            readable = next(
                (helper for suffix, helper in _READABLE.items() if name.endswith(suffix)), None
            )
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
        return {
            "kind": "fails",
            "text": f"✗ {failed} of {len(holds)} expectations "
            f"{'fails' if failed == 1 else 'fail'}.",
        }
    if unchecked:
        return {
            "kind": "unknown",
            "text": f"? {len(holds) - unchecked} of {len(holds)} expectations hold, {unchecked} "
            "could not be checked: the strategy compared with did not run.",
        }
    said = {1: "The expectation holds.", 2: "Both expectations hold."}.get(
        len(holds), f"All {len(holds)} expectations hold."
    )
    return {"kind": "holds", "text": f"✓ {said}"}


def prediction_table(predictions: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """Return the strategies of predicted epochs and a row for each workload: its name, seconds, joules, gain.

    Seconds, joules and samples a step are by strategy. The gain is how many times as fast the first strategy is as the
    best other one, the equal gain the same at equal samples a step.
    """
    strategies = list(dict.fromkeys(str(each["strategy"]) for each in predictions))
    rows: dict[tuple[str, ...], dict[str, Mapping[str, Any]]] = {}
    for each in predictions:
        key = (
            str(each["model"]),
            str(each["data"]),
            str(each["batch_size"]),
            str(each["arithmetic"]),
        )
        rows.setdefault(key, {})[str(each["strategy"])] = each
    return {
        "strategies": strategies,
        "rows": [
            {
                "model": key[0],
                "data": key[1],
                "batch_size": key[2],
                "arithmetic": key[3],
                "epoch_s": [by_name[name]["epoch_s"] for name in strategies],
                "epoch_energy_j": [by_name[name]["epoch_energy_j"] for name in strategies],
                "step_samples": [by_name[name]["step_samples"] for name in strategies],
                **{
                    gain: _ratio(
                        min(
                            (by_name[name][key] for name in strategies[1:] if by_name[name][key]),
                            default=None,
                        ),
                        by_name[strategies[0]][key],
                    )
                    for gain, key in (("gain", "epoch_s"), ("equal_gain", "equal_epoch_s"))
                },
            }
            for key, by_name in rows.items()
        ],
    }
