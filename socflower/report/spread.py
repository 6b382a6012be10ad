"""Means and spread over the seeds of a comparison."""

from collections.abc import Mapping, Sequence
from statistics import fmean, stdev
from typing import Any

from socflower.quantities import finite
from socflower.report.quality import quality_of

COSTS = ("virtual_s", "predicted_s", "wall_s", "energy_j")


def means_of(results: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return one document per strategy, in the order of the results; none if no strategy has several seeds.

    Each of `COSTS`, and of the figures of the quality, is the mean over the seeds, under its key in a result; `spread`
    has the sample standard deviations (n - 1). Both are None if a seed has no such figure. `num_reached` counts the
    seeds that reached the target.
    """
    by_strategy: dict[Any, list[Mapping[str, Any]]] = {}
    for result in results:
        by_strategy.setdefault(result.get("strategy"), []).append(result)
    if not any(len(runs) > 1 for runs in by_strategy.values()):
        return []
    return [_means(strategy, runs) for strategy, runs in by_strategy.items()]


def _means(strategy: Any, runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    means: dict[str, float | None] = {}
    spread: dict[str, float | None] = {}
    quality = quality_of(runs)
    for figure in (quality.final_key, quality.time_key, quality.energy_key, *COSTS):
        values = [number for run in runs if (number := finite(run.get(figure))) is not None]
        known = len(values) == len(runs)
        means[figure] = fmean(values) if known else None
        spread[figure] = stdev(values) if known and len(values) > 1 else None
    tiers = runs[0].get("bytes", {})
    return {
        "strategy": strategy,
        "seeds": [run.get("seed") for run in runs],
        **means,
        "spread": spread,
        "bytes": {tier: fmean(float(run["bytes"][tier]) for run in runs) for tier in tiers},
        "num_reached": sum(finite(run.get(quality.time_key)) is not None for run in runs),
        "quality": quality.name,
        quality.target_key: runs[0].get(quality.target_key),
    }
