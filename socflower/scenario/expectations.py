"""The claims of a scenario's `[expect]` table, checked against what was observed."""

import math
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from operator import itemgetter
from typing import Any, TypeAlias

from socflower.did_you_mean import did_you_mean
from socflower.errors import ConfigError
from socflower.scenario.schema.pipeline import CLAIMED
from socflower.strategies.presets import STRATEGIES

Result: TypeAlias = Mapping[str, Any]


def _part(result: Result, part: str, key: str) -> float | None:
    """Return a figure of a part that not every result has, such as "heat"."""
    return (result.get(part) or {}).get(key)


def _bytes_of(result: Result, tier: str) -> float:
    return float(result["bytes"][tier])


def _ratio(numerator: float | None, denominator: float | None) -> float | None:
    return numerator / denominator if numerator is not None and denominator else None


def _gain(ours: Result, other: Result, key: str) -> float | None:
    return _ratio(other[key], ours[key])


def _over_ours(document: Result, peer: str) -> float | None:
    """Return how many times as long a peer's step takes as that of our plan."""
    return next((row["over_ours"] for row in document["peers"] if row["name"] == peer), None)


def _calibration_share(result: Result) -> float | None:
    """Return the part of the time that the trials of a warm-up took, the one that went on included."""
    warm_up = result["warm_up"]
    return None if warm_up is None else sum(warm_up["seconds"].values()) / result["virtual_s"]


_RUN_QUANTITIES: Mapping[str, Callable[[Result], float | None]] = {
    "accuracy": lambda result: result["final_accuracy"],
    "loss": lambda result: result["rounds"][-1]["loss"],
    **{key: itemgetter(key) for key in ("virtual_s", "energy_j", "wall_s")},
    **{f"{tier}_bytes": partial(_bytes_of, tier=tier) for tier in ("hub", "inter_board", "wan")},
    "events": lambda result: float(sum(len(entry["events"]) for entry in result["rounds"])),
    "alpha_span": lambda result: _alpha_span(result["rounds"]),
    "idle_fraction": lambda result: _idle_fraction(result["breakdown"]["soc_seconds"]),
    **{key: partial(_part, part="heat", key=key) for key in ("peak_c", "cooling_j", "slowdown")},
    **{
        key: partial(_part, part="split", key=key)
        for key in ("mean_staleness", "max_staleness", "staleness_spread")
    },
    "moves": lambda result: _part(result, "split", "num_moves"),
    "calibration_share": _calibration_share,
    # FedAvg has no plan, and that of a pipeline no groups.
    "contention": lambda result: _part(result, "plan", "contention"),
    "communication_groups": lambda result: _count(result, "communication_groups"),
    "groups": lambda result: _count(result, "groups"),
}
_COMPARED_QUANTITIES: Mapping[str, Callable[[Result, Result], float | None]] = {
    "accuracy_gap_to": lambda ours, other: _difference(
        other["final_accuracy"], ours["final_accuracy"]
    ),
    "loss_gap_to": lambda ours, other: _difference(
        ours["rounds"][-1]["loss"], other["rounds"][-1]["loss"]
    ),
    "speedup_over": lambda ours, other: _ratio(_time_s(other), _time_s(ours)),
    **{
        f"{cost}_gain_over": partial(_gain, key=key)
        for cost, key in (
            ("time_to_accuracy", "time_to_accuracy_s"),
            ("energy_to_accuracy", "energy_to_accuracy_j"),
            ("time_to_loss", "time_to_loss_s"),
            ("energy_to_loss", "energy_to_loss_j"),
            ("energy", "energy_j"),
        )
    },
}


_PLAN_QUANTITIES: Mapping[str, Callable[[Result], float | None]] = {
    "stages": lambda document: max(len(pipeline["stages"]) for pipeline in document["pipelines"]),
    "pipelines": lambda document: len(document["pipelines"]),
    "devices": lambda document: document["num_devices"],
    "step_s": lambda document: document["predicted"]["step_s"],
    "samples_per_s": lambda document: document["predicted"]["samples_per_s"],
    "energy_j_per_sample": lambda document: document["predicted"]["energy_j_per_sample"],
    **{f"speedup_over_{peer}": partial(_over_ours, peer=peer) for peer in CLAIMED},
}
"""Of plans of pipelines, whose claims `socflower plan` checks."""


def _count(result: Result, key: str) -> float | None:
    found = (result["plan"] or {}).get(key)
    return None if found is None else float(len(found))


def _alpha_span(rounds: Sequence[Result]) -> float | None:
    """Return how far the confidence in int8 models of their own went in a run (F9); None without them."""
    alphas = [entry["alpha"] for entry in rounds if "alpha" in entry]
    return max(alphas) - min(alphas) if alphas else None


def _idle_fraction(soc_seconds: Mapping[str, float]) -> float | None:
    return _ratio(soc_seconds.get("idle", 0.0), sum(soc_seconds.values()))


def check_plan(expect: Mapping[str, float], document: Result) -> list[dict[str, Any]]:
    """Return each claim on the plan of a pipeline, with the observed value."""
    return [
        _bounded(key, expected, _PLAN_QUANTITIES[key.partition("_")[2]](document))
        for key, expected in expect.items()
        if is_of_plan(key)
    ]


def is_of_plan(claim: str) -> bool:
    """Whether a claim of a pipeline is on its plan, which `socflower plan` checks, and not on a run."""
    return claim.partition("_")[2] in _PLAN_QUANTITIES


def require_known_claims(expect: Mapping[str, float], where: str, *, of_plan: bool = False) -> None:
    """Raise `ConfigError` for an unknown claim on a run, or if `of_plan` on the plan of a pipeline."""
    compared = [f"{kind}_{other}" for kind in _COMPARED_QUANTITIES for other in STRATEGIES]
    names = (*(_PLAN_QUANTITIES if of_plan else ()), *_RUN_QUANTITIES, *compared)
    known = [f"{bound}_{name}" for bound in ("min", "max") for name in names]
    for key, value in expect.items():
        if key not in known:
            form = f"claims begin with min_ or max_, as in min_{names[0]}"
            hint = did_you_mean(key, known, form)
            raise ConfigError(f"{where} [expect]: unknown claim {key!r} (value {value!r}); {hint}")


def check_expectations(
    expect: Mapping[str, float],
    result: Result,
    others: Sequence[Result] = (),
) -> list[dict[str, Any]]:
    """Return each claim with the observed value; `holds` is None if its other strategy did not run."""
    by_strategy = {other["strategy"]: other for other in others}
    # Plans of pipelines are compared with methods of these names too; other runs have no such plan.
    own = STRATEGIES.get(str(result.get("strategy")))
    is_pipeline = own is not None and own.is_pipeline
    return [
        _check(key, expected, result, by_strategy)
        for key, expected in expect.items()
        if not (is_pipeline and is_of_plan(key))
    ]


def claims_without(expect: Mapping[str, float], left_out: Collection[str]) -> dict[str, float]:
    """Return the claims that do not compare with one of the strategies `left_out`."""
    compared = {f"{kind}_{other}" for kind in _COMPARED_QUANTITIES for other in left_out}
    return {key: value for key, value in expect.items() if key.partition("_")[2] not in compared}


def strategies_of_claims(expect: Mapping[str, float]) -> tuple[str, ...]:
    """Return the strategies that claims compare with, in the order of the catalogue."""
    return tuple(name for name in STRATEGIES if len(claims_without(expect, [name])) < len(expect))


SOURCES = ("server", "evaluate", "train")
"""The sources of an app's metrics in a round."""

_APP_FIGURES = {
    "accuracy": "final_accuracy",
    "loss": "final_loss",
    "virtual_s": "virtual_s",
    "energy_j": "energy_j",
    "wall_s": "wall_s",
    "hub_bytes": "bytes",
    "inter_board_bytes": "bytes",
}
"""What claims on apps call the figures that every result has, and under which key it has them."""

_CLAIM = re.compile(r"\s*([^\s<>=]+)\s*(>=|<=)\s*(\S+)\s*")


@dataclass(frozen=True, kw_only=True, slots=True)
class AppClaim:
    """A claim of `--expect` on an app: a figure of its result, or a metric of its last round that has it."""

    quantity: str
    # Either ">=" or "<=".
    bound: str
    expected: float

    @property
    def name(self) -> str:
        """The claim's name, as that of a scenario's."""
        return f"{'min' if self.bound == '>=' else 'max'}_{self.quantity}"


def parse_claims(texts: Sequence[str]) -> tuple[AppClaim, ...]:
    """Return the claims of `--expect 'accuracy>=0.9'`; `ConfigError` for another form."""
    claims = []
    for text in texts:
        found = _CLAIM.fullmatch(text)
        try:
            expected = float(found[3]) if found else math.nan
        except ValueError:
            expected = math.nan
        if not found or not math.isfinite(expected):
            raise ConfigError(
                f"--expect {text}: write 'METRIC>=NUMBER' or 'METRIC<=NUMBER', in quotes for the shell"
            )
        claims.append(AppClaim(quantity=found[1], bound=found[2], expected=expected))
    return tuple(claims)


def refuse_unknown_metrics(claims: Sequence[AppClaim], sources: Iterable[str]) -> None:
    """Raise `ConfigError` for a claim on a metric that an app with these source texts cannot have.

    Its name is nowhere in them, and it resembles one that is, or it is a claim of scenarios. Names may be composed by
    the app or come from other packages; such a claim fails at the end if there is no such metric.
    """
    texts = list(sources)
    quoted = (name for text in texts for name in re.findall(r"[\"']([\w-]+)[\"']", text))
    known = dict.fromkeys((*_APP_FIGURES, *quoted))
    for claim in claims:
        name = claim.quantity.rpartition("/")[2]
        if name in known or any(name in text for text in texts):
            continue
        if why := _why_unknown(name, list(known), texts):
            raise ConfigError(f"--expect {claim.quantity}{claim.bound}{claim.expected:g}: {why}")


def _why_unknown(name: str, known: Sequence[str], texts: Sequence[str]) -> str:
    """Return why a metric that no source text names cannot be meant; empty if the app may compose its name."""
    bound, _, bare = name.partition("_")
    if bound in ("min", "max") and bare:
        return f"write '{bare}>=...' or '{bare}<=...'; min_ and max_ are of scenarios"
    is_compared = any(name.startswith(f"{kind}_") for kind in _COMPARED_QUANTITIES)
    if name in _RUN_QUANTITIES or is_compared:
        return f"is a claim of scenarios; an app has its metrics, and {', '.join(_APP_FIGURES)}"
    words = re.findall(r"[a-z]+", name.lower())
    # All words of the name occur, so that the app may compose it.
    if all(any(word in text.lower() for text in texts) for word in words):
        return ""
    meant = did_you_mean(name, known, similarity=0.75)
    return meant and f"the app's code does not have {name!r}; {meant}"


def check_app_claims(
    claims: Sequence[AppClaim], result: Result
) -> tuple[list[dict[str, Any]], list[str]]:
    """Return each claim with the observed value, and a note on each one whose value is unknown; that one fails."""
    documents, notes = [], []
    for claim in claims:
        observed, reason = _app_figure(claim.quantity, result)
        holds = observed is not None and (
            observed >= claim.expected if claim.bound == ">=" else observed <= claim.expected
        )
        documents.append(
            {"name": claim.name, "expected": claim.expected, "observed": observed, "holds": holds}
        )
        if observed is None:
            notes.append(f"--expect {claim.quantity}: {reason}")
    return documents, notes


def _app_figure(quantity: str, result: Result) -> tuple[float | None, str]:
    """Return a figure of the result, or a metric of the last round that has it; or None, and why it is unknown.

    Of a metric that has several sources, that of the server comes before the clients' evaluation, and that before the
    clients' training; `train/NAME` names the source.
    """
    rounds = result["rounds"][::-1]
    if quantity in _APP_FIGURES:
        key = _APP_FIGURES[quantity]
        value = result[key]
        if quantity == "loss" and value is None and rounds:
            # Without an evaluation the loss is that of training.
            value = rounds[0]["loss"]
        if isinstance(value, Mapping):
            value = value[quantity.removesuffix("_bytes")]
        return (
            (None, result["unknown"].get(key, "is unknown"))
            if value is None
            else (float(value), "")
        )
    source, _, name = quantity.rpartition("/")
    for entry in rounds:
        for each in (source,) if source else SOURCES:
            if name in (metrics := entry.get(each) or {}):
                value = metrics[name]
                return (
                    (float(value), "")
                    if isinstance(value, int | float)
                    else (
                        None,
                        f"is no finite number in round {entry['round']}, the last one that has it",
                    )
                )
    known = dict.fromkeys(
        name for entry in result["rounds"] for each in SOURCES for name in entry.get(each, ())
    )
    return None, (
        f"the app has no such metric; it has {', '.join(known) or 'none'}, and the result "
        f"{', '.join(_APP_FIGURES)}"
    )


def _check(
    key: str, expected: float, result: Result, others: Mapping[str, Result]
) -> dict[str, Any]:
    quantity = key.partition("_")[2]
    if quantity in _RUN_QUANTITIES:
        observed = _RUN_QUANTITIES[quantity](result)
    else:
        kind, _, other = quantity.rpartition("_")
        if other not in others:
            return {"name": key, "expected": expected, "observed": None, "holds": None}
        observed = _COMPARED_QUANTITIES[kind](result, others[other])
    return _bounded(key, expected, observed)


def _bounded(key: str, expected: float, observed: float | None) -> dict[str, Any]:
    holds = observed is not None
    if observed is not None:
        holds = observed >= expected if key.startswith("min_") else observed <= expected
    return {"name": key, "expected": expected, "observed": observed, "holds": holds}


def _time_s(result: Result) -> float | None:
    """Return the time by which runs of one engine are compared: virtual time, or wall time on a deployment."""
    virtual_s: float | None = result["virtual_s"]
    return result["wall_s"] if virtual_s is None else virtual_s


def _difference(left: float | None, right: float | None) -> float | None:
    return None if left is None or right is None else left - right
