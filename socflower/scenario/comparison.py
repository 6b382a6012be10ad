"""Comparison of the same work under several strategies; finished results are reused."""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from socflower.engines.checkpoint import training_keys
from socflower.errors import ConfigError, TrainingFailed
from socflower.report.report import write_report
from socflower.report.summary import headline_of
from socflower.scenario.expectations import check_expectations
from socflower.scenario.planning import predicted_epochs
from socflower.scenario.prepared_run import PreparedRun, prepare
from socflower.scenario.runner import costs_to_accuracy, run_to_folder
from socflower.scenario.schema.config import Scenario
from socflower.scenario.schema.file import to_document
from socflower.scenario.schema.strategies import STRATEGIES, family_of
from socflower.wire.folders import exclusive_folder
from socflower.wire.saved_state import remove_partial, write_atomically

_ROW_KEYS = ("strategy", "seed", "final_accuracy", "virtual_s", "wall_s", "energy_j", "bytes", "weights_sha256",
             "target_accuracy", "time_to_accuracy_s", "energy_to_accuracy_j")
OnStart = Callable[[str], Callable[[dict[str, Any]], None]]


def compare(
    scenario: Scenario, strategies: Sequence[str], out: Path, *, engine: str = "local", num_workers: int | None = None,
    on_start: OnStart = lambda strategy: lambda entry: None,
) -> dict[str, Any]:
    """Run the scenario under each strategy and return the comparison document.

    Each strategy's result is in `out/<strategy>/`; an existing result of the same scenario and engine is reused, so
    that an interrupted comparison continues where it stopped. `comparison.json` and `report.html` contain all of them.
    The claims are checked for the first strategy against the others. Nothing of `predictions` was trained.
    """
    family = family_of(scenario.strategy.name)
    for name in strategies:
        if name not in STRATEGIES:
            raise ConfigError(f"--strategies {name}: unknown; use some of {', '.join(STRATEGIES)}")
        if name not in family:
            raise ConfigError(f"--strategies {name}: cannot run the workload of {scenario.strategy.name!r}; use some "
                              f"of {', '.join(family)}")
        if strategies.count(name) > 1:
            raise ConfigError(f"--strategies {name}: is named twice; name each once")
    # Prepare all before the first run, so that an error appears before any training.
    variants = {name: prepare(scenario.under(name), engine) for name in strategies}
    with exclusive_folder(out, f"--out {out}"):
        remove_partial(out)
        return _compare(scenario, variants, out, engine, num_workers, on_start)


def _compare(
    scenario: Scenario, variants: Mapping[str, PreparedRun], out: Path, engine: str, num_workers: int | None,
    on_start: OnStart,
) -> dict[str, Any]:
    results: list[dict[str, Any]] = []
    for name, variant in variants.items():
        result = _finished(out / name / "result.json", variant.scenario, engine)
        if result is None:
            try:
                result = run_to_folder(variant, out / name, engine, num_workers=num_workers, on_round=on_start(name))
            except TrainingFailed as error:
                done = f"; finished and kept in {out}: {', '.join([*variants][:len(results)])}" if results else ""
                raise TrainingFailed(f"{name}: {error}{done}") from None
        results.append(result)
    target = scenario.compare.target_accuracy or common_target(results)
    for result in results:
        result |= costs_to_accuracy(result, target)
        result["expectations"] = []
    results[0]["expectations"] = check_expectations(scenario.expect, results[0], results[1:])
    predictions = predicted_epochs(scenario, [*variants])
    document = {
        "schema": 1, "scenario": to_document(scenario), "engine": engine, "target_accuracy": target,
        "rows": [{key: result[key] for key in _ROW_KEYS} for result in results],
        "headline": headline_of(results), "expectations": results[0]["expectations"], "predictions": predictions,
    }
    write_atomically(out / "comparison.json", json.dumps(document, indent=1))
    write_report(out / "report.html", results, title=scenario.name, question=scenario.question,
                 predictions=predictions)
    return document


def common_target(results: Sequence[dict[str, Any]]) -> float | None:
    """Return the accuracy that all strategies are timed to: 0.01 below the lowest final one, so that all reach it.

    None if a result has no accuracy, as of a generator.
    """
    reached = [result["final_accuracy"] for result in results]
    return None if None in reached else max(0.0, min(map(float, reached)) - 0.01)


def _finished(path: Path, scenario: Scenario, engine: str) -> dict[str, Any] | None:
    try:
        result: dict[str, Any] = json.loads(path.read_text("utf-8"))
        same = result["engine"] == engine and \
            training_keys(result["scenario"]) == training_keys(to_document(scenario))
    except (OSError, ValueError, KeyError, TypeError):  # incomplete, or not a result
        return None
    return result if same else None
