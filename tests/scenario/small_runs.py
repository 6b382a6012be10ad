"""Scenarios that train in a second on the embedded digits, and their results, trained once a process."""

import copy
from functools import cache
from typing import Any

from socflower.scenario.runner import run_scenario
from socflower.scenario.schema.config import EventConfig, Scenario, StrategyConfig, TrainConfig

BOARDS = (2, 2)
LENET_BYTES = 4 * 61_706
"""LeNet-5 on 28 x 28 pixels with 10 classes, float32."""


def small(
    name: str = "socflow", *, boards: tuple[int, ...] = BOARDS, groups: int | str = 2, epochs: int = 1, seed: int = 1,
    interval: float = 0.5, events: tuple[EventConfig, ...] = (), reply_timeout_s: float = 3600.0, **strategy: Any,
) -> Scenario:
    """Return a scenario of 4,000 digits in batches of 128."""
    return Scenario(
        seed=seed, name="small", question="Does it run?", cluster={"boards": boards}, events=events,
        train=TrainConfig(epochs=epochs, batch_size=128, learning_rate=0.05, reply_timeout_s=reply_timeout_s),
        strategy=StrategyConfig(name=name, groups=groups, sync_interval_epochs=interval, **strategy))


def small_result(name: str = "socflow", **changes: Any) -> dict[str, Any]:
    """Return the result of `small(name, **changes)`, run in this process."""
    return copy.deepcopy(_run(name, tuple(sorted(changes.items()))))


@cache
def _run(name: str, changes: tuple[tuple[str, Any], ...]) -> dict[str, Any]:
    return run_scenario(small(name, **dict(changes)), num_workers=0)
