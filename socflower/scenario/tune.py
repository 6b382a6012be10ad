"""`socflower tune`: which method, on how many SoCs, with which settings, at the least time and energy to a target.

Candidates come from `candidates_of`, with the predicted cost of an epoch. So many of them as asked for train the first
part of the scenario's epochs; those whose projected time and energy to the target are nearest to the front train twice
as far, and so on, until the last ones train to the target. The epochs that a candidate needed, times the predicted cost
of its settings' epochs, are the time and energy of each of its settings; the chosen setting is trained itself.
"""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import tomli_w

from socflower.engines.ending import Ending
from socflower.errors import ConfigError, TrainingFailed
from socflower.quantities import finite
from socflower.report.quality import ACCURACY, Quality
from socflower.scenario.candidates import Candidate, Costs, Setting, by_fronts, candidates_of, front
from socflower.scenario.comparison import OnStart, finished
from socflower.scenario.schema.config import Scenario
from socflower.scenario.schema.strategies import STRATEGIES, GroupStrategy
from socflower.scenario.tuning import described
from socflower.wire.folders import exclusive_folder
from socflower.wire.saved_state import write_atomically

TIME, ENERGY = "time", "energy"
Run: TypeAlias = Callable[[Scenario, str, Ending], Mapping[str, Any]]
"""(scenario, label, when it ends) -> the result of a training."""
_RUNGS = 4
"""How many trainings the last candidates have, each twice as far as the one before."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Trained:
    """A candidate, and how far it came."""

    candidate: Candidate
    epochs: float
    # The epochs to the target; as projected, if it was not reached.
    needed: float
    reached: bool
    value: float | None

    def costs(self) -> list[Costs]:
        """Return what each setting costs to the target."""
        return [setting.epoch.times(self.needed) for setting in self.candidate.settings]


def tune(
    scenario: Scenario,
    strategies: Sequence[str],
    out: Path,
    run: Run,
    *,
    budget: int,
    prefer: str = TIME,
) -> dict[str, Any]:
    """Search, and return the document.

    It is also in `out/tune.json`, the chosen scenario in `out/chosen.toml`, and the front in `out/report.html`.
    `run` trains in this process or others; `budget` candidates are trained at all. Raises `ConfigError` for a scenario
    without a target and for a small budget, `TrainingFailed` if no candidate reached the target.
    """
    quality, target = target_of(scenario)
    if budget < 2:
        raise ConfigError(f"tune: budget = {budget}; give 2 or more candidates to train")
    found, refused = candidates_of(scenario, strategies)
    if not found:
        raise ConfigError(f"tune: no strategy fits: {next(iter(refused.values()))}")
    with exclusive_folder(out, f"--out {out}"):
        finalists, history = _halve(
            _drawn(found, budget, scenario.seed), scenario, target, quality, run
        )
        rows = _settings_of(finalists)
        if not rows:
            raise TrainingFailed(
                f"tune: none of {budget} candidates reached {quality.goal(target)} in {scenario.train.epochs} epochs; "
                "give more epochs, or a larger --budget"
            )
        best = front([costs for _, costs in rows])
        chosen = best[0] if prefer == TIME else best[-1]
        setting, predicted = rows[chosen]
        confirmed = run(setting.scenario, "chosen", Ending(quality=quality.name, target=target))
        own = {
            **_named(setting),
            "predicted_time_s": predicted.time_s,
            "predicted_energy_j": predicted.energy_j,
            "time_s": confirmed["virtual_s"],
            "energy_j": confirmed["energy_j"],
            "reached": quality.reaches(confirmed[quality.final_key], target),
        }
        document = {
            "schema": 1,
            "scenario": scenario.name,
            "quality": quality.name,
            "target": target,
            "prefer": prefer,
            "num_candidates": len(found),
            "refused": refused,
            "trainings": history,
            "settings": [
                {
                    **_named(setting),
                    "time_s": costs.time_s,
                    "energy_j": costs.energy_j,
                    "on_front": index in best,
                }
                for index, (setting, costs) in enumerate(rows)
            ],
            "chosen": own,
        }
        write_atomically(out / "tune.json", json.dumps(document, indent=1))
        write_atomically(out / "chosen.toml", chosen_file(setting.scenario, own))
        # Importing matplotlib takes long.
        from socflower.report.tune_report import write_tune_report

        settings = [described(own.choice) for own, _ in rows]
        write_tune_report(out / "report.html", document, settings)
    return document


def runner(out: Path, engine: str, num_workers: int | None, on_start: OnStart) -> Run:
    """Return what trains scenarios into folders of their own; a finished training is not repeated."""

    def run(scenario: Scenario, label: str, ending: Ending) -> Mapping[str, Any]:
        # Flower and torch are imported only where something trains.
        from socflower.scenario.runner import run_to_folder

        folder = out / "trainings" / label
        kept = finished(folder / "result.json", scenario, engine, ending)
        if kept is not None:
            return kept
        return run_to_folder(
            scenario,
            folder,
            engine,
            num_workers=num_workers,
            on_round=on_start(label),
            ending=ending,
        )

    return run


def tuned_strategies() -> tuple[str, ...]:
    """Return the strategies that are tuned by default: all with a plan of groups."""
    return tuple(name for name, kind in STRATEGIES.items() if isinstance(kind, GroupStrategy))


def target_of(scenario: Scenario) -> tuple[Quality, float]:
    """Return what is to be reached; `ConfigError` for a scenario without a target."""
    quality, target = scenario.compare.target_of([])
    if target is None:
        raise ConfigError(
            "tune looks for the least time and energy to a target; give [compare] target_accuracy or target_loss"
        )
    return quality, target


def _drawn(candidates: Sequence[Candidate], budget: int, seed: int) -> list[Candidate]:
    """Return so many candidates, in equal parts of each strategy, drawn by the seed."""
    draws = np.random.default_rng((seed, len(candidates)))
    by_strategy: dict[str, list[Candidate]] = {}
    for index in draws.permutation(len(candidates)):
        own = candidates[index]
        by_strategy.setdefault(own.settings[0].strategy, []).append(own)
    drawn: list[Candidate] = []
    while len(drawn) < min(budget, len(candidates)):
        drawn += [own.pop() for own in by_strategy.values() if own]
    return drawn[:budget]


def _halve(
    candidates: Sequence[Candidate],
    scenario: Scenario,
    target: float,
    quality: Quality,
    run: Run,
) -> tuple[list[Trained], list[dict[str, Any]]]:
    """Train candidates farther and farther, and half of them each time; return the last ones, and all trainings."""
    left, history = list(candidates), []
    trained: list[Trained] = []
    for rung in range(_RUNGS):
        epochs = scenario.train.epochs / 2 ** (_RUNGS - 1 - rung)
        trained = [_train(each, epochs, target, quality, run) for each in left]
        history += [_entry(each, rung) for each in trained]
        costs = [min(each.costs(), key=lambda own: own.time_s) for each in trained]
        frugal = [min(each.costs(), key=lambda own: own.energy_j) for each in trained]
        # In turn those that are quickest and those that are most frugal at their best.
        order = _in_turn(by_fronts(costs), by_fronts(frugal))
        if rung < _RUNGS - 1:
            left = [trained[index].candidate for index in order[: max(2, math.ceil(len(left) / 2))]]
    return [each for each in trained if each.reached], history


def _in_turn(first: Sequence[int], second: Sequence[int]) -> list[int]:
    """Return the elements of both orders, alternating, each once."""
    return list(dict.fromkeys(each for pair in zip(first, second, strict=True) for each in pair))


def _train(
    candidate: Candidate, epochs: float, target: float, quality: Quality, run: Run
) -> Trained:
    """Train a candidate's quickest setting so many epochs at most, or to the target."""
    setting = candidate.settings[0]
    ending = Ending(quality=quality.name, target=target, most_epochs=epochs)
    try:
        rounds = run(setting.scenario, _label(setting), ending)["rounds"]
    except TrainingFailed:
        return Trained(candidate=candidate, epochs=0.0, needed=math.inf, reached=False, value=None)
    good = next((each for each in rounds if quality.reaches(each[quality.name], target)), None)
    last = rounds[-1] if good is None else good
    value = finite(last[quality.name])
    needed = last["epoch"] if good else last["epoch"] * _behind(value, target, quality)
    return Trained(
        candidate=candidate,
        epochs=last["epoch"],
        needed=needed,
        reached=good is not None,
        value=value,
    )


def _behind(value: float | None, target: float, quality: Quality) -> float:
    """Return how many times as many epochs are projected: the error, or the loss, falls as 1 over the epochs."""
    if value is None:
        return math.inf
    if quality is ACCURACY:
        return (1.0 - value) / max(1e-9, 1.0 - target)
    return value / max(1e-9, target)


def _settings_of(trained: Sequence[Trained]) -> list[tuple[Setting, Costs]]:
    """Return all settings of candidates that reached the target, with what they cost."""
    return [
        pair for each in trained for pair in zip(each.candidate.settings, each.costs(), strict=True)
    ]


def _named(setting: Setting) -> dict[str, Any]:
    return {"strategy": setting.strategy, **setting.choice}


def _label(setting: Setting) -> str:
    return "_".join(f"{key}-{value}" for key, value in _named(setting).items())


def _entry(trained: Trained, rung: int) -> dict[str, Any]:
    return {
        **_named(trained.candidate.settings[0]),
        "rung": rung,
        "epochs": trained.epochs,
        "value": trained.value,
        "reached": trained.reached,
        "projected_epochs": finite(trained.needed),
    }


def chosen_file(scenario: Scenario, chosen: Mapping[str, Any]) -> str:
    """Return a scenario file with the chosen settings, without claims and comparisons."""
    document = scenario.model_dump(
        mode="json",
        by_alias=True,
        exclude_defaults=True,
        exclude_none=True,
        exclude={"compare", "expect", "name", "question", "folder", "code"},
    )
    said = f"{chosen['time_s']:.4g} virtual s and {chosen['energy_j']:.4g} J to the target"
    return f"# Chosen for {scenario.name}: {said}.\n{tomli_w.dumps({'schema': 1, **document})}"
