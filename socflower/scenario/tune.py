"""`socflower tune`: which method, on how many SoCs, with which settings, at the least time and energy to a target.

Candidates come from `candidates_of`, with the predicted cost of an epoch. So many of them as asked for train the first
part of the scenario's epochs: one of each arithmetic, and then those that are expected to be quickest, or most frugal,
by what the others needed (`EpochModel`). Those whose projected time and energy to the target are nearest to the front
train twice as far, and so on, until the last ones train to the target. None trains longer than until another one
dominates it. The epochs that a candidate needed, times the predicted cost of its settings' epochs, are the time and
energy of each of its settings; the chosen setting is trained itself.
"""

import json
import math
import shutil
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
from socflower.scenario.candidates import Candidate, Costs, Setting, candidates_of, front, unbeaten
from socflower.scenario.comparison import OnStart, finished
from socflower.scenario.epoch_model import EpochModel
from socflower.scenario.halving import ENERGY, TIME, halve, part_of_rung
from socflower.scenario.schema.config import ARITHMETICS
from socflower.scenario.schema.scenario_file import Scenario
from socflower.scenario.schema.strategies import STRATEGIES
from socflower.scenario.tuning import described
from socflower.wire.folders import exclusive_folder
from socflower.wire.saved_state import write_atomically

Run: TypeAlias = Callable[[Scenario, str, Ending], Mapping[str, Any]]
"""(scenario, label, when it ends) -> the result of a training."""
# How many standard deviations below its mean a candidate's cost is hoped to be, when it is chosen to be trained.
_HOPE = 0.5
# Every so many candidates one is chosen for what is not preferred, so that the front has two ends.
_FOR_THE_OTHER = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class Trained:
    """A candidate, and how far it came."""

    candidate: Candidate
    epochs: float
    # The epochs to the target; as projected, if it was not reached.
    needed: float
    reached: bool
    value: float | None
    # How many times as much as predicted its epochs have cost: mixed training measures how much int8 may compute.
    over_predicted: Costs

    def costs(self) -> list[Costs]:
        """Return what each setting costs to the target."""
        return [self._cost_of(setting) for setting in self.candidate.settings]

    def _cost_of(self, setting: Setting) -> Costs:
        predicted = setting.epoch.times(self.needed)
        return Costs(
            time_s=predicted.time_s * self.over_predicted.time_s,
            energy_j=predicted.energy_j * self.over_predicted.energy_j,
        )


def tune(
    scenario: Scenario,
    strategies: Sequence[str],
    out: Path,
    run: Run,
    *,
    budget: int,
    prefer: str = TIME,
    arithmetics: Sequence[str] = ARITHMETICS,
) -> dict[str, Any]:
    """Search, and return the document.

    It is also in `out/tune.json`, the chosen scenario in `out/chosen.toml`, and the front in `out/report.html`.
    `run` trains in this process or others; `budget` candidates are trained at all. Raises `ConfigError` for a scenario
    without a target and for a small budget, `TrainingFailed` if no candidate reached the target.
    """
    target_of(scenario)
    require_budget(budget)
    every, refused = candidates_of(scenario, strategies, arithmetics)
    if not every:
        raise ConfigError(f"tune: no strategy fits: {next(iter(refused.values()))}")
    return tune_among(scenario, every, refused, out, run, budget=budget, prefer=prefer)


def tune_among(
    scenario: Scenario,
    every: Sequence[Candidate],
    refused: Mapping[str, str],
    out: Path,
    run: Run,
    *,
    budget: int,
    prefer: str = TIME,
) -> dict[str, Any]:
    """Search among candidates of the scenario; see `tune`. `refused` says why strategies have none."""
    quality, target = target_of(scenario)
    found = unbeaten(every)
    with exclusive_folder(out, f"--out {out}"):
        search = _Search(scenario, quality, target, run, prefer)
        search.run(found, budget)
        rows = _settings_of(search.reached)
        if not rows:
            raise TrainingFailed(
                f"tune: none of {budget} candidates reached {quality.goal(target)} in {scenario.train.epochs} epochs; "
                "give more epochs, or a larger --budget"
            )
        best = front([costs for _, costs in rows])
        chosen = best[0] if prefer == TIME else best[-1]
        own = _confirmed(*rows[chosen], quality, target, run)
        document = {
            "schema": 1,
            "scenario": scenario.name,
            "quality": quality.name,
            "target": target,
            "prefer": prefer,
            "num_candidates": len(found),
            "refused": dict(refused),
            "trainings": search.history,
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
        settings = [described(each.choice) for each, _ in rows]
        write_files(out, document, settings, chosen_file(rows[chosen][0].scenario, own))
        _remove_checkpoints(out)
    return document


def require_budget(budget: int) -> None:
    """Raise `ConfigError` for fewer candidates than can be halved."""
    if budget < 2:
        raise ConfigError(f"tune: budget = {budget}; give 2 or more candidates to train")


def write_files(
    out: Path, document: Mapping[str, Any], settings: Sequence[str], chosen: str
) -> None:
    """Write document, chosen settings and report; `settings` are those of each row, for people."""
    write_atomically(out / "tune.json", json.dumps(document, indent=1))
    write_atomically(out / "chosen.toml", chosen)
    # Importing matplotlib takes long.
    from socflower.report.tune_report import write_tune_report

    write_tune_report(out / "report.html", document, settings)


def _confirmed(
    setting: Setting, predicted: Costs, quality: Quality, target: float, run: Run
) -> dict[str, Any]:
    """Return the chosen setting with what it cost when it was trained itself."""
    ending = Ending(quality=quality.name, target=target)
    confirmed = run(setting.scenario, _label(setting), ending)
    return {
        **_named(setting),
        "predicted_time_s": predicted.time_s,
        "predicted_energy_j": predicted.energy_j,
        "time_s": confirmed["virtual_s"],
        "energy_j": confirmed["energy_j"],
        "reached": quality.reaches(confirmed[quality.final_key], target),
    }


def _remove_checkpoints(out: Path) -> None:
    """Remove what trainings keep to go farther."""
    for folder in (out / "trainings").glob("*/checkpoint"):
        shutil.rmtree(folder)


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
            # A training that goes farther continues where it ended.
            resumable=True,
        )

    return run


def tuned_strategies() -> tuple[str, ...]:
    """Return the strategies that are tuned by default: all without a cloud."""
    return tuple(name for name, kind in STRATEGIES.items() if not kind.uses_cloud)


def target_of(scenario: Scenario) -> tuple[Quality, float]:
    """Return what is to be reached; `ConfigError` for a scenario without a target."""
    quality, target = scenario.compare.target_of([])
    if target is None:
        raise ConfigError(
            "tune looks for the least time and energy to a target; give [compare] target_accuracy or target_loss"
        )
    return quality, target


class _Search:
    """The trainings of a search, and what they have shown."""

    def __init__(
        self, scenario: Scenario, quality: Quality, target: float, run: Run, prefer: str
    ) -> None:
        self._scenario, self._run, self._prefer = scenario, run, prefer
        self._quality, self._target = quality, target
        self._latest: dict[str, Trained] = {}
        self.history: list[dict[str, Any]] = []

    @property
    def reached(self) -> list[Trained]:
        """The candidates that have reached the target."""
        return [each for each in self._latest.values() if each.reached]

    def run(self, candidates: Sequence[Candidate], budget: int) -> None:
        """Train so many candidates a little, and the better half of them farther, again and again."""
        first = self._first_rung(candidates, min(budget, len(candidates)))
        halve(first, lambda each, rung: self._train(each.candidate, rung), self._prefer)

    def _first_rung(self, candidates: Sequence[Candidate], budget: int) -> list[Trained]:
        """Return so many candidates, trained a little: one of each arithmetic, then the most promising ones."""
        model, tried = EpochModel(candidates), {}
        costs = [_least_costs(each) for each in candidates]
        middles = sorted(
            model.middles(), key=lambda index: getattr(costs[index], _KEYS[self._prefer])
        )
        for index in middles[: max(1, budget // 2)]:
            tried[index] = self._train(candidates[index], 0)
        while len(tried) < budget:
            belief = model.after({index: each.needed for index, each in tried.items()})
            is_for_other = len(tried) % _FOR_THE_OTHER == _FOR_THE_OTHER - 1
            wanted = self._prefer
            if is_for_other:
                wanted = ENERGY if wanted == TIME else TIME
            epoch = np.array([getattr(each, _KEYS[wanted]) for each in costs])
            hoped = np.log(epoch) + belief.mean - _HOPE * belief.deviation
            hoped[list(tried)] = math.inf
            index = int(hoped.argmin())
            tried[index] = self._train(candidates[index], 0)
        return list(tried.values())

    def _train(self, candidate: Candidate, rung: int) -> Trained:
        """Train a candidate through a rung at most: to the target, or until another one dominates it."""
        before = self._latest.get(candidate.key)
        if before is not None and before.reached:
            return before
        epochs = min(self._scenario.train.epochs * part_of_rung(rung), self._most_epochs(candidate))
        trained = _trained(candidate, epochs, self._target, self._quality, self._run)
        self._latest[candidate.key] = trained
        self.history.append(_entry(trained, rung))
        return trained

    def _most_epochs(self, candidate: Candidate) -> float:
        """Return the epochs after which each setting of a candidate has cost more than one that reached the target."""
        best = [costs for each in self.reached for costs in each.costs()]
        if not best:
            return math.inf
        return max(
            min(
                max(own.time_s / setting.epoch.time_s, own.energy_j / setting.epoch.energy_j)
                for own in best
            )
            for setting in candidate.settings
        )


_KEYS = {TIME: "time_s", ENERGY: "energy_j"}


def _least_costs(candidate: Candidate) -> Costs:
    """Return the least time and the least energy of an epoch, be they of different settings."""
    epochs = [setting.epoch for setting in candidate.settings]
    return Costs(
        time_s=min(epoch.time_s for epoch in epochs),
        energy_j=min(epoch.energy_j for epoch in epochs),
    )


def _trained(
    candidate: Candidate, epochs: float, target: float, quality: Quality, run: Run
) -> Trained:
    """Train a candidate so many epochs at most, or to the target."""
    setting = candidate.trained
    ending = Ending(quality=quality.name, target=target, most_epochs=epochs)
    try:
        result = run(setting.scenario, _label(setting), ending)
    except TrainingFailed:
        return Trained(
            candidate=candidate,
            epochs=0.0,
            needed=math.inf,
            reached=False,
            value=None,
            over_predicted=Costs(time_s=1.0, energy_j=1.0),
        )
    rounds = result["rounds"]
    good = next((each for each in rounds if quality.reaches(each[quality.name], target)), None)
    last = rounds[-1] if good is None else good
    value = finite(last[quality.name])
    predicted = setting.epoch.times(rounds[-1]["epoch"])
    return Trained(
        candidate=candidate,
        epochs=last["epoch"],
        needed=last["epoch"] if good else last["epoch"] * projected_over(value, target, quality),
        reached=good is not None,
        value=value,
        over_predicted=Costs(
            time_s=_ratio(result["virtual_s"], predicted.time_s),
            energy_j=_ratio(result["energy_j"], predicted.energy_j),
        ),
    )


def _ratio(measured: float, predicted: float) -> float:
    """Return how many times as much was measured; 1 for nothing."""
    return measured / predicted if predicted else 1.0


def projected_over(value: float | None, target: float, quality: Quality) -> float:
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
        **_named(trained.candidate.trained),
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
