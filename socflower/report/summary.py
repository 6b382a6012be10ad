"""The results of a report: their names, the ratios between them, and their claims."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from socflower.errors import ConfigError
from socflower.quantities import MISSING, finite, human_bytes, human_joules, human_seconds, percent, plain_number

# By the suffix of an expectation's name; the plain number is shown as in the scenario file.
_READABLE = {"_s": human_seconds, "_j": human_joules, "_bytes": human_bytes, "accuracy": percent}
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
    if len(set(labels)) < len(labels):
        labels = [f"{label} (seed {printable(result.get('seed', MISSING))})" if labels.count(label) > 1 else label
                  for label, result in zip(labels, results, strict=True)]
    distinct = [f"{label} #{labels[:index].count(label) + 1}" if labels.count(label) > 1 else label
                for index, label in enumerate(labels)]
    return tuple(Run(label=label, style=index, result=result)
                 for index, (label, result) in enumerate(zip(distinct, results, strict=True)))


def targets_of(runs: Iterable[Run]) -> list[float]:
    """Return the distinct target accuracies, in ascending order."""
    return sorted({target for run in runs if (target := finite(run.get("target_accuracy"))) is not None})


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """The basis of ratios: a time that all runs have, and the baseline run."""

    time_key: str
    time_name: str
    baseline: Run

    def speed_up(self, run: Run) -> float | None:
        """Return how many times faster than the baseline a run is."""
        return _ratio(self.baseline.get(self.time_key), run.get(self.time_key))

    def energy_saving(self, run: Run) -> float | None:
        """Return how many times less energy than the baseline a run takes."""
        return _ratio(self.baseline.get("energy_j"), run.get("energy_j"))

    def best(self, runs: Sequence[Run]) -> Run | None:
        """Return the run to name in one sentence, if it is faster than the baseline; others than the first if needed.

        Only strategies that reached the target count. The first strategy is the subject of the scenario; the others are
        its baselines.
        """
        able = [run for run in runs if finite(run.get("target_accuracy")) is None
                or finite(run.get("time_to_accuracy_s")) is not None]
        best = runs[0] if runs[0] in able else max(able, key=lambda run: self.speed_up(run) or 0.0, default=None)
        return best if best is not None and (self.speed_up(best) or 0.0) > 1.0 else None


def comparison_of(runs: Sequence[Run], baseline: str | None) -> Comparison | None:
    """Return the basis of comparison of several runs; the default baseline is the slowest run.

    The time is the time to accuracy if every run reached the target. Raises `ConfigError` for an unknown baseline.
    """
    named = [run for run in runs if baseline in (run.label, run.get("strategy"))]
    if baseline is not None and not named:
        known = ", ".join(run.label for run in runs)
        raise ConfigError(f"report: no result for baseline {baseline!r}; there are {known}")
    if len(runs) < 2:
        return None
    if all(finite(run.get("time_to_accuracy_s")) is not None for run in runs):
        key, name = "time_to_accuracy_s", "time to the target accuracy"
    elif any(finite(run.get("virtual_s")) is not None for run in runs):
        key, name = "virtual_s", "virtual time"
    else:
        key, name = "wall_s", "wall time"
    slowest = max(runs, key=lambda run: finite(run.get(key)) or 0.0)
    return Comparison(time_key=key, time_name=name, baseline=named[0] if named else slowest)


def _ratio(reference: Any, own: Any) -> float | None:
    above, below = finite(reference), finite(own)
    return above / below if above and below else None


def claims_of(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """Return all expectations: name, label of the run, `holds`, and pairs of plain and readable value."""
    claims = []
    for run in runs:
        for claim in run.rows("expectations"):
            name, values = str(claim.get("name", MISSING)), (claim.get("expected"), claim.get("observed"))
            plain = [plain_number(value) for value in values]
            if plain[0] == plain[1] and values[0] != values[1]:
                # Equal after rounding: 0.8 expected, 0.79999999 observed must not read "0.8, 0.8, fails".
                plain = [str(value) for value in values]
            readable = next((helper for suffix, helper in _READABLE.items() if name.endswith(suffix)), None)
            expected, observed = ((text, "" if readable is None or finite(value) is None else readable(value))
                                  for text, value in zip(plain, values, strict=True))
            claims.append({"name": name, "label": run.label, "expected": expected, "observed": observed,
                           "holds": claim.get("holds")})
    return claims


def verdict_on(claims: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Return the verdict on all claims in one line, and its kind; `holds` is None if a strategy did not run."""
    holds = [claim["holds"] for claim in claims]
    failed, unchecked = holds.count(False), holds.count(None)
    if failed:
        return {"kind": "fails", "text": f"✗ {failed} of {len(holds)} expectations "
                                         f"{'fails' if failed == 1 else 'fail'}."}
    if unchecked:
        return {"kind": "unknown", "text": f"? {len(holds) - unchecked} of {len(holds)} expectations hold, {unchecked} "
                                           "could not be checked: the strategy compared with did not run."}
    said = {1: "The expectation holds.", 2: "Both expectations hold."}.get(
        len(holds), f"All {len(holds)} expectations hold.")
    return {"kind": "holds", "text": f"✓ {said}"}
