"""`socflower tune FOLDER`: which run config of a Flower app reaches a target soonest, or with the least energy.

Every combination of the values of `--vary` is a candidate; all, or as many as asked for, run for an eighth of the app's
rounds. Those whose projected time and energy to the target are nearest to the front run twice as many, and so on, until
the last ones run them all. An app may do with its number of rounds what it likes, so each of these runs is a whole one.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import tomli_w

from socflower.engines.local.run_app import load_flower_app
from socflower.errors import ConfigError, TrainingFailed
from socflower.report.quality import Quality, costs_to_target
from socflower.scenario.app_comparison import kept_or_run
from socflower.scenario.app_folder import AppRun, OnNotice, run_app_folder, run_config
from socflower.scenario.candidates import PredictedCosts, front
from socflower.scenario.halving import TIME, halve, part_of_rung
from socflower.scenario.tune import projected_over, require_budget, write_files
from socflower.scenario.tuning import described, key_and_values
from socflower.toml_file import parse_value
from socflower.wire.folders import exclusive_folder

ROUNDS = "num-server-rounds"
"""The key of a run config with the number of rounds, as Flower's templates call it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AppSearch:
    """What is varied, and what is to be reached."""

    # Each key of the run config with its values, as they are written.
    axes: tuple[tuple[str, tuple[str, ...]], ...]
    quality: Quality
    target: float
    budget: int
    prefer: str = TIME
    rounds_key: str = ROUNDS

    def choices(self) -> list[dict[str, str]]:
        """Return every combination of the keys' values; the last key changes first."""
        keys = [key for key, _ in self.axes]
        values = [own for _, own in self.axes]
        return [dict(zip(keys, each, strict=True)) for each in product(*values)]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Tried:
    """A run config, and how far it came."""

    choice: Mapping[str, str]
    num_rounds: int
    value: float | None
    reached: bool
    # To the target; as projected, if it was not reached.
    cost: PredictedCosts

    def costs(self) -> list[PredictedCosts]:
        """Return the cost to the target."""
        return [self.cost]


def parse_axes(texts: Sequence[str]) -> tuple[tuple[str, tuple[str, ...]], ...]:
    """Return the keys and values of `--vary KEY=VALUE,VALUE`; `ConfigError` for none, and for a key given twice."""
    axes: dict[str, tuple[str, ...]] = {}
    for text in texts:
        key, values = key_and_values("--vary", text)
        if key in axes:
            raise ConfigError(f"--vary {text}: {key} is given twice; give all its values at once")
        axes[key] = tuple(values)
    if not axes:
        raise ConfigError("tune: an app folder needs --vary KEY=VALUE,VALUE of its run config")
    return tuple(axes.items())


def tune_app(
    run: AppRun,
    search: AppSearch,
    out: Path,
    *,
    on_notice: OnNotice = lambda line: None,
    run_one: Callable[..., dict[str, Any]] = run_app_folder,
) -> dict[str, Any]:
    """Search, and return the document, which is also in `out/tune.json`, with a report.

    `out/chosen.toml` is the chosen run config, as `flwr run --run-config` takes it. Raises `ConfigError` for a key that
    the app does not have, `TrainingFailed` if no run config reached the target.
    """
    require_budget(search.budget)
    trials = _Trials(run, search, out, on_notice, run_one)
    with exclusive_folder(out, f"--out {out}"):
        trials.check()
        first = [trials.run_for(choice, 0) for choice in _drawn(search)]
        halve(first, lambda each, rung: trials.run_for(each.choice, rung), search.prefer)
        rows = trials.reached()
        if not rows:
            raise TrainingFailed(
                f"tune: none of {len(first)} run configs reached {search.quality.goal(search.target)} in "
                f"{search.rounds_key} = {trials.most_rounds}; give more rounds with --set"
            )
        best = front([each.cost for each in rows])
        chosen = rows[best[0] if search.prefer == TIME else best[-1]]
        own = _named(run, chosen)
        document = {
            "schema": 1,
            "scenario": run.title,
            "quality": search.quality.name,
            "target": search.target,
            "prefer": search.prefer,
            "num_candidates": len(search.choices()),
            "refused": {},
            "notes": trials.notes,
            "trainings": trials.history,
            "settings": [
                {**_named(run, each), "on_front": index in best} for index, each in enumerate(rows)
            ],
            "chosen": {**own, "reached": True},
        }
        config = trials.config_of(chosen)
        said = f"{own['time_s']:.4g} virtual s and {own['energy_j']:.4g} J to the target"
        text = f"# Chosen for {run.title}: {said}.\n{tomli_w.dumps(config)}"
        write_files(out, document, [described(each.choice) for each in rows], text)
    return document


class _Trials:
    """The runs of a search; equal ones are not repeated."""

    def __init__(
        self,
        run: AppRun,
        search: AppSearch,
        out: Path,
        on_notice: OnNotice,
        run_one: Callable[..., dict[str, Any]],
    ) -> None:
        self._app, self._search, self._out = run, search, out
        self._on_notice, self._run_one = on_notice, run_one
        self._latest: dict[str, _Tried] = {}
        self.history: list[dict[str, Any]] = []
        self.notes: list[str] = []
        config = run_config(load_flower_app(run.folder), run.overrides)
        key = search.rounds_key
        rounds = config.get(key)
        if isinstance(rounds, bool) or not isinstance(rounds, int) or rounds < 1:
            raise ConfigError(
                f"--rounds-key {key}: is no whole number of the run config; name one of {', '.join(config)}"
            )
        if key in dict(search.axes):
            raise ConfigError(f"--vary {key}: is the number of rounds, which the search varies")
        self.most_rounds = rounds

    def check(self) -> None:
        """Raise `ConfigError` for an app that cannot run, and for values that it does not take."""
        for choice in self._search.choices():
            self._variant(choice, self.most_rounds).check()

    def run_for(self, choice: Mapping[str, str], rung: int) -> _Tried:
        """Run the app with a choice for a rung's part of its rounds; one that reached the target runs no more."""
        before = self._latest.get(described(choice))
        if before is not None and before.reached:
            return before
        num_rounds = max(1, math.ceil(self.most_rounds * part_of_rung(rung)))
        variant = self._variant(choice, num_rounds)
        folder = self._out / "trainings"
        try:
            result = kept_or_run(variant, folder, self._on_notice, self._run_one)
        except TrainingFailed as error:
            self._on_notice(f"{variant.title}: {error}")
            never = PredictedCosts(time_s=math.inf, energy_j=math.inf)
            tried = _Tried(
                choice=choice, num_rounds=num_rounds, value=None, reached=False, cost=never
            )
        else:
            self.notes = list(dict.fromkeys([*self.notes, *result["notes"]]))
            tried = self._read(choice, num_rounds, result)
        self._latest[described(choice)] = tried
        self.history.append(
            {
                **_parsed(choice),
                "rung": rung,
                "rounds": num_rounds,
                "value": tried.value,
                "reached": tried.reached,
            }
        )
        return tried

    def reached(self) -> list[_Tried]:
        """Return the run configs that reached the target."""
        return [each for each in self._latest.values() if each.reached]

    def config_of(self, tried: _Tried) -> dict[str, Any]:
        """Return the whole run config of a run."""
        variant = self._variant(tried.choice, tried.num_rounds)
        return run_config(load_flower_app(variant.folder), variant.overrides)

    def _variant(self, choice: Mapping[str, str], num_rounds: int) -> AppRun:
        settings = {**choice, self._search.rounds_key: str(num_rounds)}
        own = tuple(f"{key}={value}" for key, value in settings.items())
        return replace(
            self._app,
            label=", ".join(own),
            overrides=(*self._app.overrides, *own),
        )

    def _read(
        self, choice: Mapping[str, str], num_rounds: int, result: Mapping[str, Any]
    ) -> _Tried:
        """Return what a run came to, with its cost to the target, or a projection of that."""
        quality, target = self._search.quality, self._search.target
        found = costs_to_target(result, quality, target)
        value, reached_s = result.get(quality.final_key), found[quality.time_key]
        if value is None:
            raise ConfigError(
                f"{result['label']}: the app reports no {quality.name} of its model; give it an evaluate_fn"
            )
        if reached_s is not None:
            cost = PredictedCosts(time_s=reached_s, energy_j=found[quality.energy_key] or 0.0)
        else:
            spent = PredictedCosts(time_s=result["virtual_s"], energy_j=result["energy_j"] or 0.0)
            cost = spent.times(projected_over(value, target, quality))
        return _Tried(
            choice=choice,
            num_rounds=num_rounds,
            value=value,
            reached=reached_s is not None,
            cost=cost,
        )


def _drawn(search: AppSearch) -> list[dict[str, str]]:
    """Return all combinations, or as many as the budget has, drawn without a pattern."""
    choices = search.choices()
    if len(choices) <= search.budget:
        return choices
    order = np.random.default_rng(len(choices)).permutation(len(choices))
    return [choices[index] for index in sorted(order[: search.budget])]


def _parsed(choice: Mapping[str, str]) -> dict[str, Any]:
    return {key: parse_value(value) for key, value in choice.items()}


def _named(run: AppRun, tried: _Tried) -> dict[str, Any]:
    return {
        "strategy": run.title,
        **_parsed(tried.choice),
        "time_s": tried.cost.time_s,
        "energy_j": tried.cost.energy_j,
    }
