"""What an operator can choose between: each number of groups and each method, with its predicted cost.

A prediction is of epochs. More groups, and methods that synchronise seldom, learn less in an epoch; which choice
reaches a target first is what `socflower tune` finds by training.
"""

from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any

from socflower.cluster import Cluster
from socflower.cluster.cluster_file import doubtful_figures
from socflower.errors import ConfigError, InfeasiblePlan
from socflower.hierarchy import default_candidates
from socflower.quantities import counted, human_ratio, human_seconds
from socflower.scenario.predicted_epochs import samples_a_step
from socflower.scenario.predicted_training import predicted_training
from socflower.scenario.schema.scenario_file import Scenario
from socflower.strategies.presets import STRATEGIES, GroupStrategy, family_of

CLEARLY = 1.2
"""A choice that is quicker by more than this factor is named by the verdict."""

ALONE = "sgd"

# Planning a pipeline over more takes minutes; `strategy.name = "hybrid-pipeline"` does it.
_MOST_STAGES = 8
_ALL_COUNTS = 12
# The exchange of larger groups takes seconds to minutes to simulate.
_MOST_MEMBERS = 64
# Above it that of as many groups as SoCs does, too.
_MOST_SOCS = 2048


def group_counts(num_socs: int, num_boards: int, own: int) -> tuple[int, ...]:
    """Return the numbers of groups to show: the first twelve, powers of two, one a board, one a SoC, and `own`."""
    counts = {own, num_boards, num_socs, *default_candidates(num_socs)}
    counts |= set(range(1, min(num_socs, _ALL_COUNTS) + 1))
    return tuple(sorted(count for count in counts if count <= num_socs))


def with_choices(
    scenario: Scenario, cluster: Cluster, document: Mapping[str, Any]
) -> dict[str, Any]:
    """Return a plan document with `choices` and `choices_refused`, and the verdict on all of them.

    A choice has `strategy`, `groups` (None without groups), `num_socs`, `step_samples` between two updates of a model,
    `epoch_s`, `epoch_energy_j`, `training_s` and `training_energy_j` of all epochs, `memory_bytes` of the SoC that
    needs most, `speedup` over one SoC (None if that cannot train), and `is_planned`. `choices_refused` has why a
    method has none, by name; `warnings` what can hardly be meant of the cluster.
    """
    rows: list[dict[str, Any]] = []
    refused: dict[str, str] = {}
    own_groups = len(document["groups"])
    for name, groups, changed in _variants(scenario, cluster, own_groups):
        label = name if groups is None else f"{name}, {counted(groups, 'group')}"
        try:
            row = _choice(changed, groups)
        except (ConfigError, InfeasiblePlan) as error:
            refused[label] = str(error)
            continue
        is_own = name == scenario.strategy.name and groups in (None, own_groups)
        rows.append({"strategy": name, "groups": groups, **row, "is_planned": is_own})
    alone = next((row["epoch_s"] for row in rows if row["strategy"] == ALONE), None)
    for row in rows:
        row["speedup"] = alone and alone / row["epoch_s"]
    verdict = document["verdict"]
    return {
        **document,
        "choices": rows,
        "choices_refused": refused,
        "warnings": doubtful_figures(cluster),
        "verdict": verdict and _verdict(verdict, rows, document),
    }


def _variants(
    scenario: Scenario, cluster: Cluster, own_groups: int
) -> Iterator[tuple[str, int | None, Scenario]]:
    """Yield each method, and its number of groups if `[strategy]` decides it, as a scenario."""
    own, num_socs = scenario.strategy.name, scenario.strategy.socs or cluster.num_socs
    for name in dict.fromkeys((own, *family_of(own))):
        kind = STRATEGIES[name]
        if kind.is_pipeline and num_socs > _MOST_STAGES:
            continue
        try:
            under = scenario if name == own else scenario.under(name)
        except ConfigError:
            # It cannot be written with the other tables of the file, as a run would say.
            continue
        if not isinstance(kind, GroupStrategy) or kind.num_groups is not None or kind.is_alone:
            most = _MOST_SOCS
            if isinstance(kind, GroupStrategy) and kind.num_groups == 1:
                most = _MOST_MEMBERS
            if name in (own, ALONE) or num_socs <= most:
                yield name, None, under
            continue
        for count in group_counts(num_socs, len(cluster.boards), own_groups):
            is_small = num_socs <= _MOST_SOCS and num_socs <= _MOST_MEMBERS * count
            if is_small or (name == own and count == own_groups):
                strategy = under.strategy.replaced(groups=count)
                # One group has no leaders that exchange as the file says.
                with suppress(ConfigError):
                    changed = under.replaced(strategy=strategy)
                    yield name, count, changed


def _choice(scenario: Scenario, groups: int | None) -> dict[str, Any]:
    from socflower.scenario.schema.file import scenario_cluster

    planned = predicted_training(scenario, scenario_cluster(scenario))
    epochs = scenario.train.epochs
    return {
        "num_socs": len(planned.socs),
        "step_samples": samples_a_step(scenario),
        "epoch_s": planned.duration_s / epochs,
        "epoch_energy_j": planned.energy_j / epochs,
        "training_s": planned.duration_s,
        "training_energy_j": planned.energy_j,
        "memory_bytes": planned.memory_bytes,
    }


def _verdict(verdict: str, rows: list[dict[str, Any]], document: Mapping[str, Any]) -> str:
    """Return the verdict on the plan, and the quickest choice where it is clearly quicker than plan and one SoC."""
    ours, alone = document["predicted"]["epoch_s"], document["one_soc"]["epoch_s"]
    best = min(rows, key=lambda row: float(row["epoch_s"]))
    if min(ours, alone) <= CLEARLY * best["epoch_s"]:
        return verdict
    groups = best["groups"]
    what = (
        best["strategy"] if groups is None else f"{best['strategy']} in {counted(groups, 'group')}"
    )
    quickest = (
        f"the quickest epoch is that of {what}, {human_seconds(best['epoch_s'])}, "
        f"{human_ratio(alone / best['epoch_s'])} as fast as one SoC; `socflower tune` finds which choice learns soonest"
    )
    if ours < alone:
        return f"{verdict}; {quickest}"
    cause = document["slow_because"]
    return (
        f"this plan is slower than one SoC, {human_seconds(ours)} an epoch against {human_seconds(alone)}: {cause}; "
        f"{quickest}"
    )
