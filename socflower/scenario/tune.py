"""`socflower tune`: which method, on how many SoCs, with which settings, at the least time and energy to a target.

Candidates come from `candidates_of`, with the predicted cost of an epoch. They train a part of a training at a time:
first one of each arithmetic, then always the candidate that is expected to reach the target at the least time, or
energy, by what all have shown so far (`EpochModel`). So one that falls behind waits, and others begin or continue
(Swersky, Snoek and Adams, Freeze-Thaw Bayesian Optimization, 2014). The search ends when its epochs are used up, or
when every other candidate has cost more than one that has reached the target. The epochs that a candidate needed, times
the predicted cost of its settings' epochs, are the time and energy of each of its settings; the chosen setting is
trained itself.
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
from socflower.scenario.candidates import (
    Candidate,
    PredictedCosts,
    Setting,
    candidates_of,
    front,
    unbeaten,
)
from socflower.scenario.comparison import OnStart, finished
from socflower.scenario.epoch_model import EpochModel
from socflower.scenario.halving import ENERGY, TIME
from socflower.scenario.schema.config import ARITHMETICS
from socflower.scenario.schema.scenario_file import Scenario
from socflower.scenario.tuning import described
from socflower.strategies.presets import STRATEGIES, GroupStrategy
from socflower.wire.folders import exclusive_folder
from socflower.wire.saved_state import write_atomically

Run: TypeAlias = Callable[[Scenario, str, Ending], Mapping[str, Any]]
"""(scenario, label, when it ends) -> the result of a training."""
_OTHER = {TIME: ENERGY, ENERGY: TIME}
_KEYS = {TIME: "time_s", ENERGY: "energy_j"}
# Parts of the scenario's epochs: what a candidate trains at a time, and the search for each unit of its budget.
_PART, _OF_BUDGET = 1 / 16, 1 / 4
# How many times its budget a search may have until the first candidate reaches the target.
_UNTIL_REACHED = 2
# The error, or the loss, falls as epochs^(-1 / _SLOWNESS), as the LeNets of `bench tune-regret` had it.
_SLOWNESS = 1.25
# Standard deviations of the logarithm of epochs to the target: if it was reached, and what each factor of e to it adds.
_KNOWN, _BY_E_FOLD = 0.1, 0.2


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
    over_predicted: PredictedCosts
    # Whether the training ended in an error.
    failed: bool = False

    @property
    def deviation(self) -> float:
        """The standard deviation of the logarithm of `needed`."""
        is_known = math.isfinite(self.needed) and self.epochs > 0
        return _KNOWN + _BY_E_FOLD * abs(math.log(self.needed / self.epochs)) if is_known else 1.0

    def costs(self) -> list[PredictedCosts]:
        """Return what each setting costs to the target."""
        return [self._cost_of(setting) for setting in self.candidate.settings]

    def _cost_of(self, setting: Setting) -> PredictedCosts:
        predicted = setting.epoch.times(self.needed)
        return PredictedCosts(
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
    `run` trains in this process or others. Without that of the chosen setting, all trainings have at most as many
    epochs as a quarter of `budget` whole ones, or twice as many if none has reached the target by then. Raises
    `ConfigError` for a scenario without a target and for a small budget, `TrainingFailed` if no candidate reached it.
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
                f"tune: none of {len(search.tried)} candidates reached {quality.goal(target)} with --budget "
                f"{budget} and at most {scenario.train.epochs} epochs; give a larger budget, or more epochs"
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
    """Raise `ConfigError` for a budget with which nothing can be compared."""
    if budget < 2:
        raise ConfigError(f"tune: budget = {budget}; give 2 or more")


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
    setting: Setting, predicted: PredictedCosts, quality: Quality, target: float, run: Run
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
        self._num_epochs, self._run, self._prefer = float(scenario.train.epochs), run, prefer
        self._quality, self._target = quality, target
        self._latest: dict[str, Trained] = {}
        self.history: list[dict[str, Any]] = []

    @property
    def tried(self) -> list[Trained]:
        """The candidates that have been trained."""
        return list(self._latest.values())

    @property
    def reached(self) -> list[Trained]:
        """The candidates that have reached the target."""
        return [each for each in self._latest.values() if each.reached]

    def run(self, candidates: Sequence[Candidate], budget: int) -> None:
        """Train for what is preferred, and with the epochs that are left for the other end of the front."""
        model, num_epochs = EpochModel(candidates), budget * _OF_BUDGET * self._num_epochs
        for wanted in (self._prefer, _OTHER[self._prefer]):
            while (candidate := self._most_promising(model, candidates, wanted)) is not None:
                spent = sum(each.epochs for each in self._latest.values())
                most = num_epochs if self.reached else _UNTIL_REACHED * num_epochs
                if spent + self._after_part(candidate) - self._epochs_of(candidate) > most:
                    return
                self._train(candidate)

    def _most_promising(
        self, model: EpochModel, candidates: Sequence[Candidate], wanted: str
    ) -> Candidate | None:
        """Return the candidate to train farther: one of each arithmetic, then what is expected to cost least.

        None if each one that could train farther would have cost more after a round than one that reached the target.
        """
        latest = {
            index: self._latest[each.key]
            for index, each in enumerate(candidates)
            if each.key in self._latest
        }
        of_epoch = np.array([self._cost_of_epoch(each, wanted) for each in candidates])
        at_least = of_epoch * [
            self._epochs_of(each) + _round_epochs(each.trained.scenario) for each in candidates
        ]
        best = min(
            (getattr(own, _KEYS[wanted]) for each in self.reached for own in each.costs()),
            default=math.inf,
        )
        may_win = [
            index
            for index, each in enumerate(candidates)
            if at_least[index] < best and self._can_go_farther(each)
        ]
        untried = [index for index in model.middles() if index in may_win and index not in latest]
        if untried:
            return candidates[min(untried, key=lambda index: of_epoch[index])]
        if not may_win:
            return None
        belief = model.after(
            {index: each.needed for index, each in latest.items()},
            {index: each.deviation for index, each in latest.items()},
        )
        expected = np.maximum(np.exp(belief.mean) * of_epoch, at_least)
        return candidates[min(may_win, key=lambda index: expected[index])]

    def _cost_of_epoch(self, candidate: Candidate, wanted: str) -> float:
        """Return the least cost of an epoch over the settings: as predicted, or as it was found to be."""
        latest, key = self._latest.get(candidate.key), _KEYS[wanted]
        over: float = 1.0 if latest is None else getattr(latest.over_predicted, key)
        least: float = min(getattr(setting.epoch, key) for setting in candidate.settings)
        return over * least

    def _epochs_of(self, candidate: Candidate) -> float:
        latest = self._latest.get(candidate.key)
        return 0.0 if latest is None else latest.epochs

    def _after_part(self, candidate: Candidate) -> float:
        """Return a candidate's epochs after another part, which has one round or more."""
        part = max(_PART * self._num_epochs, _round_epochs(candidate.trained.scenario))
        return min(self._epochs_of(candidate) + part, self._num_epochs)

    def _can_go_farther(self, candidate: Candidate) -> bool:
        latest = self._latest.get(candidate.key)
        return latest is None or (
            not latest.reached and not latest.failed and latest.epochs < self._num_epochs
        )

    def _train(self, candidate: Candidate) -> None:
        """Train a candidate for another part, or to the target."""
        epochs = self._after_part(candidate)
        trained = _trained(candidate, epochs, self._target, self._quality, self._run)
        self._latest[candidate.key] = trained
        self.history.append(_entry(trained))


def _round_epochs(scenario: Scenario) -> float:
    """Return the epochs of a round, after which a model is evaluated; 0 if rounds become longer."""
    if not isinstance(scenario.kind, GroupStrategy):
        return float(scenario.train.local_epochs)
    interval = scenario.interval_epochs
    return 0.0 if isinstance(interval, str) else interval


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
            over_predicted=PredictedCosts(time_s=1.0, energy_j=1.0),
            failed=True,
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
        over_predicted=PredictedCosts(
            time_s=_ratio(result["virtual_s"], predicted.time_s),
            energy_j=_ratio(result["energy_j"], predicted.energy_j),
        ),
    )


def _ratio(measured: float, predicted: float) -> float:
    """Return how many times as much was measured; 1 for nothing."""
    return measured / predicted if predicted else 1.0


def projected_over(value: float | None, target: float, quality: Quality) -> float:
    """Return how many times as many epochs are projected, 1 or more."""
    if value is None:
        return math.inf
    if quality is ACCURACY:
        value, target = 1.0 - value, 1.0 - target
    return math.pow(max(1.0, value / max(1e-9, target)), _SLOWNESS)


def _settings_of(trained: Sequence[Trained]) -> list[tuple[Setting, PredictedCosts]]:
    """Return all settings of candidates that reached the target, with what they cost."""
    return [
        pair for each in trained for pair in zip(each.candidate.settings, each.costs(), strict=True)
    ]


def _named(setting: Setting) -> dict[str, Any]:
    return {"strategy": setting.strategy, **setting.choice}


def _label(setting: Setting) -> str:
    return "_".join(f"{key}-{value}" for key, value in _named(setting).items())


def _entry(trained: Trained) -> dict[str, Any]:
    return {
        **_named(trained.candidate.trained),
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
