"""What `compare --front` predicts of every method before anything trains, and which of them it trains.

The epochs that a method needed to the target in earlier trainings, times the predicted cost of an epoch with the same
settings, are its time and energy to the target, as in `socflower tune`. Of methods without such trainings only epochs
are predicted: their settings were never searched, and epochs of different methods do not learn the same.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from socflower.errors import ConfigError, InfeasiblePlan
from socflower.report.quality import Quality
from socflower.scenario.candidates import with_front
from socflower.scenario.predicted_epochs import epochs_of, samples_a_step
from socflower.scenario.schema.file import scenario_cluster
from socflower.scenario.schema.scenario_file import Scenario
from socflower.strategies.presets import STRATEGIES, family_of

ALONE = "sgd"
"""One SoC, with which the front is always compared."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PredictedMethods:
    """Every method's prediction.

    A row has `strategy`, the keys of `epochs_of`, and with epochs to the target `epochs_to_target`, `time_s` and
    `energy_j`, else None, and `on_front`. `refused` has why a method has no row, `trained` the strategies to train,
    `left_out` those that were compared without `--front` and are dominated, or have no epochs to the target.
    """

    # At which all are compared.
    step_samples: int
    rows: tuple[Mapping[str, Any], ...]
    refused: Mapping[str, str]
    trained: tuple[str, ...]
    left_out: tuple[str, ...]

    def to_document(self) -> dict[str, Any]:
        """Return plain values."""
        return {
            "step_samples": self.step_samples,
            "rows": [dict(row) for row in self.rows],
            "refused": dict(self.refused),
            "trained": list(self.trained),
            "left_out": list(self.left_out),
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class Front:
    """That a comparison trains the front alone, and whom it tells: of each method before its prediction, and of all."""

    on_method: Callable[[str], None] = lambda name: None
    on_predicted: Callable[[PredictedMethods], None] = lambda methods: None


def require_front(scenario: Scenario) -> None:
    """Raise `ConfigError` for a scenario without a front that can be predicted."""
    if scenario.kind.uses_cloud:
        raise ConfigError(
            f"--front: predicts strategies without a cloud, and this one has strategy.name = "
            f"{scenario.strategy.name!r}; leave it out"
        )
    if not scenario.compare.epochs_to_target:
        raise ConfigError(
            "--front: predicts time and energy to the target by [compare.epochs_to_target], which is missing; give it, "
            "or use `socflower tune`"
        )


def predicted_methods(
    scenario: Scenario,
    strategies: Sequence[str],
    *,
    others: Sequence[str] | None = None,
    on_method: Callable[[str], None] = lambda name: None,
) -> PredictedMethods:
    """Return the prediction of `strategies`, which are compared, and of `others`: all that can run the workload.

    Equal samples a step are those of the first of `strategies`, which always trains, as does one SoC. See
    `require_front` for scenarios without a front that can be predicted.
    """
    step_samples = samples_a_step(scenario.under(strategies[0]))
    if others is None:
        others = family_of(scenario.strategy.name)
    rows: list[dict[str, Any]] = []
    refused: dict[str, str] = {}
    for name in dict.fromkeys((*strategies, *others)):
        on_method(name)
        try:
            row = _row(scenario, name, step_samples)
        except (ConfigError, InfeasiblePlan) as error:
            refused[name] = str(error)
            continue
        if name not in strategies:
            row |= dict.fromkeys(("epochs_to_target", "time_s", "energy_j"))
        rows.append(row)
    judged = judge(rows)
    always = {strategies[0], ALONE}
    best = {row["strategy"] for row in judged if row["on_front"]}
    trained = tuple(name for name in strategies if name in always | best)
    return PredictedMethods(
        step_samples=step_samples,
        rows=tuple(judged),
        refused=refused,
        trained=trained,
        left_out=tuple(name for name in strategies if name not in trained),
    )


def judge(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return rows with `on_front`: whether no other row dominates it, of those whose `time_s` is known."""
    known = with_front([row for row in rows if row["time_s"] is not None])
    best = {row["strategy"] for row in known if row["on_front"]}
    return [{**row, "on_front": row["strategy"] in best} for row in rows]


def _row(scenario: Scenario, name: str, step_samples: int) -> dict[str, Any]:
    """Return a strategy's prediction."""
    own = dict(scenario.compare.train.get(name, {}))
    if STRATEGIES[name].is_pipeline and name != scenario.strategy.name:
        # [train] batch_size is of a group, and a pipeline's batch of all SoCs.
        own = {"batch_size": step_samples, **own}
    under = scenario.under(name, own)
    epochs = epochs_of(under, scenario_cluster(under), step_samples)
    needed = scenario.compare.epochs_to_target.get(name)
    return {
        "strategy": name,
        **epochs,
        "epochs_to_target": needed,
        "time_s": needed and needed * epochs["epoch_s"],
        "energy_j": needed and needed * epochs["epoch_energy_j"],
    }


def front_of(results: Sequence[Mapping[str, Any]], quality: Quality) -> list[dict[str, Any]]:
    """Return what each strategy's trainings took to the target, and which means no other strategy dominates.

    A row has `strategy`, `time_s`, `energy_j`, `on_front`, and `runs`, pairs of seconds and joules, if there are
    several. Strategies with a training that missed the target have none.
    """
    costs: dict[str, list[tuple[float | None, float | None]]] = {}
    for result in results:
        reached = result[quality.time_key], result[quality.energy_key]
        costs.setdefault(result["strategy"], []).append(reached)
    rows: list[dict[str, Any]] = []
    for name, pairs in costs.items():
        runs = [(time, energy) for time, energy in pairs if time is not None and energy is not None]
        if len(runs) < len(pairs):
            continue
        time_s, energy_j = (fmean(each) for each in zip(*runs, strict=True))
        shown = {"runs": runs} if len(runs) > 1 else {}
        rows.append({"strategy": name, "time_s": time_s, "energy_j": energy_j, **shown})
    return with_front(rows)
