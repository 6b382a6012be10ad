"""Scenarios that train in a fraction of a second on a few of the digits, and their results, trained once a process."""

import copy
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from socflower.cluster.cluster_file import SiteTable
from socflower.scenario import jobs
from socflower.scenario.runner import run_scenario, run_to_folder
from socflower.scenario.schema.config import EventConfig, StrategyConfig, TrainConfig
from socflower.scenario.schema.scenario_file import Scenario
from tests.few_digits import few_digits

Reference = Callable[[Scenario], Path]
"""The fixture `reference`: it returns the folder of a run that was never interrupted."""

BOARDS = (2, 2)
LENET_BYTES = 4 * 61_706
"""LeNet-5 on 28 x 28 pixels with 10 classes, float32."""


def small(
    name: str = "socflow",
    *,
    boards: tuple[int, ...] = BOARDS,
    groups: int | str = 2,
    epochs: int = 1,
    seed: int = 1,
    interval: float = 0.5,
    events: tuple[EventConfig, ...] = (),
    reply_timeout_s: float = 3600.0,
    batch_size: int = 32,
    site: SiteTable | None = None,
    **strategy: Any,
) -> Scenario:
    """Return a scenario that has as many steps on a few of the digits as on all of them in batches of 128."""
    return Scenario(
        seed=seed,
        name="small",
        question="Does it run?",
        cluster={"boards": boards},
        events=events,
        site=site,
        train=TrainConfig(
            epochs=epochs,
            batch_size=batch_size,
            learning_rate=0.05,
            reply_timeout_s=reply_timeout_s,
        ),
        strategy=StrategyConfig(
            name=name, groups=groups, sync_interval_epochs=interval, **strategy
        ),
    )


def small_result(name: str = "socflow", **changes: Any) -> dict[str, Any]:
    """Return the result of `small(name, **changes)`, run in this process on a few of the digits."""
    return copy.deepcopy(_run(name, tuple(sorted(changes.items()))))


@cache
def _run(name: str, changes: tuple[tuple[str, Any], ...]) -> dict[str, Any]:
    with few_digits():
        return run_scenario(small(name, **dict(changes)), num_workers=0)


def without_drawing(scenario: Scenario, out: Path, **settings: Any) -> dict[str, Any]:
    """Run into a folder; the report is an empty page, since drawing it takes longer than such a training."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jobs, "write_report", lambda path, *_, **__: path.touch())
        return run_to_folder(scenario, out, **{"num_workers": 0, **settings})
