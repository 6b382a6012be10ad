"""Comparison of the same work under several strategies and seeds; finished results are reused."""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from socflower.engines.checkpoint import training_keys
from socflower.engines.ending import Ending
from socflower.engines.run_log import NO_LOGGING, RoundLogging
from socflower.errors import ConfigError, InfeasiblePlan, TrainingFailed
from socflower.report.quality import FIGURES, TARGETS, Quality, costs_to_target
from socflower.report.spread import means_of
from socflower.report.summary import headline_of
from socflower.scenario.caveats import caveats_of
from socflower.scenario.expectations import check_expectations, claims_without
from socflower.scenario.predicted_epochs import epochs_by_fusion, predicted_epochs
from socflower.scenario.predicted_methods import (
    Front,
    PredictedMethods,
    front_of,
    predicted_methods,
    require_front,
)
from socflower.scenario.prepared_run import PreparedRun, prepare
from socflower.scenario.schema.file import to_document
from socflower.scenario.schema.scenario_file import Scenario
from socflower.scenario.search import (
    NOT_REACHED,
    Choice,
    Cost,
    Search,
    first_choice,
    is_over,
    moves_of,
    pattern_search,
    require_target,
)
from socflower.scenario.tuning import Tuning, best_of, described, search_seed, with_choice
from socflower.strategies.presets import STRATEGIES, family_of
from socflower.wire.folders import exclusive_folder
from socflower.wire.saved_state import remove_partial, write_atomically

_ROW_KEYS = (
    "strategy",
    "seed",
    *FIGURES,
    "virtual_s",
    "wall_s",
    "energy_j",
    "bytes",
    "weights_sha256",
)
# Mistakes are found before `runner` and `report` import torch, Flower and matplotlib, which takes long.
OnStart = Callable[[str], Callable[[dict[str, Any]], None]]


def parse_seeds(text: str) -> tuple[int, ...]:
    """Return the seeds of `--seeds 1,2,3`; `ConfigError` unless they are different whole numbers."""
    parts = [part.strip() for part in text.split(",")]
    are_seeds = all(part.isdecimal() and int(part) < 2**32 for part in parts)
    if not are_seeds or len(set(map(int, parts))) < len(parts):
        raise ConfigError(f"--seeds {text}: write different whole numbers up to 4294967295")
    return tuple(map(int, parts))


def failed_run(label: str, error: TrainingFailed, out: Path, done: Sequence[str]) -> TrainingFailed:
    """Return the error of a comparison in which a run failed, with the runs that are finished and kept."""
    kept = f"; finished and kept in {out}: {'; '.join(done)}" if done else ""
    return TrainingFailed(f"{label}: {error}{kept}")


def compare(
    scenario: Scenario,
    strategies: Sequence[str],
    out: Path,
    *,
    engine: str = "local",
    num_workers: int | None = None,
    on_start: OnStart = lambda strategy: lambda entry: None,
    seeds: Sequence[int] = (),
    tuning: Tuning | Search | None = None,
    until_target: bool = False,
    front: Front | None = None,
    logging: RoundLogging = NO_LOGGING,
) -> dict[str, Any]:
    """Run the scenario under each strategy, and each of `seeds`, and return the comparison document.

    Each result is in `out/<strategy>/`, with `seeds` in `out/<strategy>/seed-<seed>/`; an existing result of the same
    scenario and engine is reused, so that an interrupted comparison continues where it stopped. `comparison.json` and
    `report.html` contain all of them. The claims are checked for the first strategy against the others, for each seed.
    `predictions` are of workloads that were not trained; `caveats` names settings that would have helped the others.
    With `tuning` each strategy first trains with each of its values, or with those that a search of so many trainings
    tries, in `out/tune/`, and then with the best one. `until_target` ends each run at the target of `[compare]`, after
    which only its cost would grow. With `front` all methods are predicted, and of `strategies` those on the front
    of time against energy to the target train, the first one, and one SoC; claims against the others are not checked.
    `logging` writes the rounds of each run into its folder.
    """
    own = scenario.strategy.name
    for name in strategies:
        for fits, why in (
            (name in STRATEGIES, f"unknown; use some of {', '.join(STRATEGIES)}"),
            (name in family_of(own), f"cannot run the workload of {own!r}"),
            (strategies.count(name) == 1, "is named twice; name each once"),
        ):
            if not fits:
                raise ConfigError(f"--strategies {name}: {why}")
    comparison = _Comparison(
        scenario,
        tuple(strategies),
        out,
        engine,
        num_workers,
        on_start,
        tuple(seeds),
        tuning,
        until_target,
        front,
        logging,
    )
    comparison.check()
    with exclusive_folder(out, f"--out {out}"):
        # A killed comparison may have left half-written files.
        remove_partial(out)
        return comparison.run()


class _Comparison:
    """The runs of one comparison; `done` names the finished ones."""

    def __init__(
        self,
        scenario: Scenario,
        strategies: tuple[str, ...],
        out: Path,
        engine: str,
        num_workers: int | None,
        on_start: OnStart,
        seeds: tuple[int, ...],
        tuning: Tuning | Search | None,
        until_target: bool,
        front: Front | None,
        logging: RoundLogging,
    ) -> None:
        self._scenario = scenario
        self._strategies, self._seeds, self._tuning = strategies, seeds, tuning
        self._until_target, self._front = until_target, front
        self._out, self._engine = out, engine
        self._num_workers, self._on_start = num_workers, on_start
        self._logging = logging
        self._done: list[str] = []
        self._search_seed = search_seed(scenario, seeds or (scenario.seed,))
        self._prepared: dict[str, PreparedRun] = {}
        self._predictions: list[dict[str, Any]] = []
        self._methods: PredictedMethods | None = None

    def check(self) -> None:
        """Prepare all runs, so that an error appears before any training; then choose those on the front."""
        if self._front is not None:
            require_front(self._scenario)
            if self._tuning is not None:
                raise ConfigError(
                    "--front predicts with the scenario's settings; leave out --tune and --search"
                )
        if isinstance(self._tuning, Search):
            self._tuning.require_target(self._scenario, self._engine)
        if self._until_target:
            self._require_target()
        for name in self._strategies:
            under = self._scenario.under(name)
            if isinstance(self._tuning, Tuning):
                for choice in self._tuning.choices(name):
                    tried = self._tuning.variant(under, choice)
                    prepare(tried.replaced(seed=self._search_seed), self._engine)
            for seed in self._seeds:
                prepare(under.replaced(seed=seed), self._engine)
            # With seeds every run has a scenario of its own, so that no prepared one can be reused.
            if not self._seeds:
                self._prepared[name] = prepare(under, self._engine)
        if self._front is not None:
            self._methods = predicted_methods(
                self._scenario, self._strategies, on_method=self._front.on_method
            )
            self._strategies = self._methods.trained
        self._predictions = predicted_epochs(self._scenario, self._strategies)
        if self._front is not None and self._methods is not None:
            self._front.on_predicted(self._methods)

    def _require_target(self) -> None:
        """Raise `ConfigError` if no run could end at a target."""
        name = "--until-target"
        require_target(self._scenario, f"{name}: ends each run at its target")
        if self._engine == "deployment":
            raise ConfigError(f"{name}: --engine deployment trains to the end; use local")

    def run(self) -> dict[str, Any]:
        """Run what is not finished, and write comparison and report."""
        found = {name: self._search(name) for name in self._strategies} if self._tuning else {}
        by_seed = [
            [self._reported(name, seed, found) for name in self._strategies]
            for seed in self._seeds or (self._scenario.seed,)
        ]
        results = [result for runs in by_seed for result in runs]
        quality, target = self._scenario.compare.target_of(results)
        # Without a target of the scenario's, all are timed to a quality that all have reached.
        if target is None:
            target = quality.common_target(results)
        for result in results:
            result |= costs_to_target(result, quality, target)
            result["expectations"] = []
        expect = self._scenario.expect
        if self._methods is not None:
            expect = claims_without(expect, self._methods.left_out)
        for subject, *others in by_seed:
            claims = check_expectations(expect, subject, others)
            subject["expectations"] = [
                {**claim, **({"seed": subject["seed"]} if self._seeds else {})} for claim in claims
            ]
        return self._write(results, quality, found)

    def _write(
        self, results: list[dict[str, Any]], quality: Quality, found: Mapping[str, Any]
    ) -> dict[str, Any]:
        means, predictions = means_of(results), self._predictions
        caveats = caveats_of({name: self._variant(name, found) for name in self._strategies})
        tuning: dict[str, Any] | None = None
        if self._tuning is not None:
            tuning = {"key": self._tuning.key, "seed": self._search_seed, "strategies": found}
        methods: dict[str, Any] | None = None
        if self._methods is not None:
            methods = {**self._methods.to_document(), "front": front_of(results, quality)}
        document = {
            "schema": 1,
            "scenario": to_document(self._scenario),
            "engine": self._engine,
            "quality": quality.name,
            **{key: results[0][key] for key in TARGETS},
            "rows": [{key: result.get(key) for key in _ROW_KEYS} for result in results],
            "means": means,
            "headline": headline_of(means or results),
            "caveats": caveats,
            "tuning": tuning,
            "expectations": [claim for result in results for claim in result["expectations"]],
            "predictions": predictions,
            "methods": methods,
            "fusions": epochs_by_fusion(self._scenario, self._strategies),
        }
        write_atomically(self._out / "comparison.json", json.dumps(document, indent=1))
        from socflower.report.report import write_report

        write_report(
            self._out / "report.html",
            results,
            title=self._scenario.name,
            question=self._scenario.question,
            predictions=predictions,
            methods=methods,
            means=means,
            tuning=tuning,
            caveats=caveats,
        )
        return document

    def _search(self, name: str) -> dict[str, Any]:
        """Return the best combination of the search for a strategy, and what each came to."""
        if isinstance(self._tuning, Search):
            return self._search_by_moves(name, self._tuning)
        assert self._tuning is not None
        choices = self._tuning.choices(name)
        tried = [self._try(name, choice) for choice in choices]
        quality, target = self._scenario.compare.target_of(tried)
        results = [result | costs_to_target(result, quality, target) for result in tried]
        best = choices[best_of(results, quality)]
        return {
            "chosen": self._tuning.value(best),
            "settings": best,
            "tried": [
                {"value": self._tuning.value(choice), **_figures(result, quality)}
                for choice, result in zip(choices, results, strict=True)
            ],
        }

    def _search_by_moves(self, name: str, search: Search) -> dict[str, Any]:
        """Return the same of a search by moves.

        A training ends at the target, or when it takes longer than the best so far.
        """
        under = self._scenario.under(name)
        tried: dict[str, dict[str, Any]] = {}
        quality, target = self._scenario.compare.target_of([])
        assert target is not None

        def cost_of(choice: Choice, best: Cost) -> Cost | None:
            limit_s = best[0] if math.isfinite(best[0]) else None
            ending = Ending(quality=quality.name, target=target, most_virtual_s=limit_s)
            try:
                result = self._try(name, choice, ending)
            except (ConfigError, InfeasiblePlan):
                return None
            except TrainingFailed:
                return NOT_REACHED
            result |= costs_to_target(result, quality, target)
            tried[described(choice)] = _figures(result, quality)
            reached_s = result[quality.time_key]
            # Of two that are as quick the first stays: a search for quality would end in longer and longer trainings.
            if reached_s is not None:
                return reached_s, 0.0
            return math.inf, quality.rank(result[quality.final_key])

        found = pattern_search(first_choice(under), moves_of(under), cost_of, search.budget)
        return {
            "chosen": described(found.best.choice),
            "settings": dict(found.best.choice),
            "is_done": found.is_done,
            "tried": [
                {"value": described(trial.choice), **tried.get(described(trial.choice), {})}
                for trial in found.trials
            ],
        }

    def _try(
        self, name: str, choice: Mapping[str, Any], ending: Ending | None = None
    ) -> dict[str, Any]:
        """Return the result of a strategy's training with a combination, by the seed of the search."""
        variant = with_choice(self._scenario.under(name), choice).replaced(seed=self._search_seed)
        folder = "_".join(f"{key}-{value}" for key, value in choice.items()) or "as-it-is"
        label = ", ".join(f"{key} {value}" for key, value in choice.items())
        return self._run(
            variant, self._out / "tune" / name / folder, f"{name}, {label}", ending=ending
        )

    def _variant(self, name: str, found: Mapping[str, Any]) -> Scenario:
        """Return the scenario under a strategy, with what a search has found for it."""
        under = self._scenario.under(name)
        return with_choice(under, found[name]["settings"]) if found else under

    def _reported(self, name: str, seed: int, found: Mapping[str, Any]) -> dict[str, Any]:
        variant = self._variant(name, found).replaced(seed=seed)
        folder = self._out / name
        ending: Ending | None = None
        if self._until_target:
            quality, target = self._scenario.compare.target_of([])
            assert target is not None
            ending = Ending(quality=quality.name, target=target)
        if self._seeds:
            return self._run(variant, folder / f"seed-{seed}", f"{name}, seed {seed}", ending)
        prepared = self._prepared[name]
        return self._run(variant if self._tuning else prepared, folder, name, ending)

    def _run(
        self,
        run: Scenario | PreparedRun,
        folder: Path,
        label: str,
        ending: Ending | None = None,
    ) -> dict[str, Any]:
        """Return the result in a folder if it is of this scenario, else run it."""
        scenario = run.scenario if isinstance(run, PreparedRun) else run
        result = finished(folder / "result.json", scenario, self._engine, ending)
        if result is None:
            from socflower.scenario.runner import run_to_folder

            prepared = run if isinstance(run, PreparedRun) else prepare(run, self._engine)
            try:
                result = run_to_folder(
                    prepared,
                    folder,
                    self._engine,
                    num_workers=self._num_workers,
                    on_round=self._on_start(label),
                    logging=self._logging,
                    ending=ending,
                )
            except TrainingFailed as error:
                raise failed_run(label, error, self._out, self._done) from None
        else:
            self._logging.write(folder, result["rounds"])
        self._done.append(label)
        return result


def _figures(result: Mapping[str, Any], quality: Quality) -> dict[str, Any]:
    """Return what a training of a search came to."""
    return {key: result[key] for key in (quality.final_key, quality.time_key)}


def finished(
    path: Path, scenario: Scenario, engine: str, ending: Ending | None
) -> dict[str, Any] | None:
    """Return the result in a file if it is one of this training, to its end or as far as `ending` asks."""
    try:
        result: dict[str, Any] = json.loads(path.read_text("utf-8"))
        same = result["engine"] == engine and training_keys(result["scenario"]) == training_keys(
            to_document(scenario)
        )
        ended_early = result.get("ended_after") is not None
        is_enough = not ended_early or (
            ending is not None and is_over(ending, result["rounds"][-1])
        )
    except (OSError, ValueError, KeyError, TypeError):
        # The file is incomplete, or is no result.
        return None
    return result if same and is_enough else None
