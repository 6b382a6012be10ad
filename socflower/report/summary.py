"""The summary of a report: one row per strategy, with ratios to a baseline; then the expectations."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from socflower.errors import ConfigError
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
from socflower.report.page import badge, printable, table, text

_TIERS = {"intra_board": "intra-board", "inter_board": "inter-board", "hub": "hub", "wan": "WAN"}
# By the suffix of an expectation's name; the plain number is shown as in the scenario file.
_READABLE = {"_s": human_seconds, "_j": human_joules, "_bytes": human_bytes, "accuracy": percent}


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


@dataclass(frozen=True, kw_only=True, slots=True)
class _Comparison:
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


def summary(runs: Sequence[Run], baseline: str | None) -> str:
    """Return the table of totals, with ratios to the baseline if there are several runs."""
    comparison = _comparison(runs, baseline)
    targets = targets_of(runs)
    head = ["Strategy", "Final accuracy", "Virtual time",
            f"Time to {percent(targets[0])}" if len(targets) == 1 else "Time to target accuracy", "Energy"]
    if comparison:
        head += ["Speed\N{NON-BREAKING HYPHEN}up", "Energy ratio"]
    head += [*(f"Bytes {name}" for name in _TIERS.values()), "Wall time"]
    rows: list[list[str]] = []
    for run in runs:
        row = [text(run.label), percent(run.get("final_accuracy")), _virtual_time(run), _time_to_target(run),
               _with_small(human_joules(run.get("energy_j")))]
        if comparison:
            mark = "<small>baseline</small>" if run is comparison.baseline else ""
            ratios = comparison.speed_up(run), comparison.energy_saving(run)
            row += [human_ratio(ratio) + mark for ratio in ratios]
        row += [human_bytes(run.table("bytes").get(tier)) for tier in _TIERS]
        rows.append([*row, human_seconds(run.get("wall_s"))])
    return "\n".join([_headline(runs, comparison), table("", head, rows, numeric=range(1, len(head))),
                      _explanation(comparison)])


def targets_of(runs: Iterable[Run]) -> list[float]:
    """Return the distinct target accuracies, in ascending order."""
    return sorted({target for run in runs if (target := finite(run.get("target_accuracy"))) is not None})


def expectations(runs: Sequence[Run]) -> str:
    """Return the verdict in one line, then each claim with its observed value."""
    claims = [(run, claim) for run in runs for claim in run.rows("expectations")]
    if not claims:
        return '<p class="note">The scenario expects nothing: it has no [expect] table.</p>'
    rows = []
    for run, claim in claims:
        name = str(claim.get("name", MISSING))
        expected, observed = _claim_values(name, claim.get("expected"), claim.get("observed"))
        rows.append([text(name), text(run.label), expected, observed, badge(claim.get("holds"))])
    return _verdict([claim.get("holds") for _, claim in claims]) + table(
        "", ["Expectation", "Strategy", "Expected", "Observed", "Verdict"], rows)


def _verdict(holds: Sequence[bool | None]) -> str:
    """Return the verdict in one line; None stands for a claim about a strategy that did not run."""
    failed, unchecked = holds.count(False), holds.count(None)
    if failed:
        return (f'<p class="verdict fails">✗ {failed} of {len(holds)} expectations '
                f'{"fails" if failed == 1 else "fail"}.</p>\n')
    if unchecked:
        return (f'<p class="verdict unknown">? {len(holds) - unchecked} of {len(holds)} expectations hold, '
                f"{unchecked} could not be checked: the strategy compared with did not run.</p>\n")
    said = {1: "The expectation holds.", 2: "Both expectations hold."}.get(
        len(holds), f"All {len(holds)} expectations hold.")
    return f'<p class="verdict holds">✓ {said}</p>\n'


def _comparison(runs: Sequence[Run], baseline: str | None) -> _Comparison | None:
    """Return the basis of comparison; the default baseline is the slowest run.

    The time is the time to accuracy if every run reached the target.
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
    return _Comparison(time_key=key, time_name=name, baseline=named[0] if named else slowest)


def _ratio(reference: Any, own: Any) -> float | None:
    above, below = finite(reference), finite(own)
    return above / below if above and below else None


def _headline(runs: Sequence[Run], comparison: _Comparison | None) -> str:
    """Return the result in one sentence if one strategy is faster than the baseline."""
    # Only strategies that reached the target count.
    able = [run for run in runs if finite(run.get("target_accuracy")) is None
            or finite(run.get("time_to_accuracy_s")) is not None]
    if comparison is None or not able:
        return ""
    # The first strategy is the subject of the scenario; the others are its baselines.
    best = runs[0] if runs[0] in able else max(able, key=lambda run: comparison.speed_up(run) or 0.0)
    gain = comparison.speed_up(best)
    if gain is None or gain <= 1.0:
        return ""
    other, key = comparison.baseline, comparison.time_key
    return (f"<p><strong>{text(best.label)}</strong> is <strong>{human_ratio(gain)}</strong> as fast as "
            f"{text(other.label)} by {comparison.time_name}: {human_seconds(best.get(key))} instead of "
            f"{human_seconds(other.get(key))}, at a final accuracy of "
            f"{percent(best.get('final_accuracy'))} against {percent(other.get('final_accuracy'))}.</p>")


def _explanation(comparison: _Comparison | None) -> str:
    ratios = "" if comparison is None else (
        f" Speed-up compares {comparison.time_name}, energy ratio the energy of the whole run, both with "
        f"{text(comparison.baseline.label)}: above 1 is better than it.")
    return ('<p class="note">Virtual time is what the cluster would have needed, wall time what this computation '
            f"took. Bytes count once, by the highest tier they cross.{ratios}</p>")


def _virtual_time(run: Run) -> str:
    shown = human_seconds(run.get("virtual_s"))
    if shown == MISSING and finite(run.get("predicted_s")) is not None:
        return f"{MISSING}<small>predicted {human_seconds(run.get('predicted_s'))}</small>"
    return shown


def _time_to_target(run: Run) -> str:
    reached = finite(run.get("time_to_accuracy_s"))
    if reached is None and finite(run.get("target_accuracy")) is not None:
        return "not reached"
    return human_seconds(reached)


def _with_small(shown: str) -> str:
    """Return an energy with its watt-hours on a separate line, which keeps the column narrow."""
    joules, _, watt_hours = shown.partition(" (")
    return f"{joules}<small>{watt_hours.rstrip(')')}</small>" if watt_hours else joules


def _claim_values(name: str, expected: Any, observed: Any) -> tuple[str, str]:
    """Return both values of a claim as in the scenario file, and in a readable form if the unit is known."""
    bare = [plain_number(expected), plain_number(observed)]
    if bare[0] == bare[1] and expected != observed:
        # Equal after rounding: 0.8 expected, 0.79999999 observed must not read "0.8, 0.8, fails".
        bare = [str(expected), str(observed)]
    readable = next((helper for suffix, helper in _READABLE.items() if name.endswith(suffix)), None)

    def show(value: str, raw: Any) -> str:
        if readable is None or finite(raw) is None:
            return text(value)
        return f"{text(value)} <small>{readable(raw)}</small>"

    return show(bare[0], expected), show(bare[1], observed)
