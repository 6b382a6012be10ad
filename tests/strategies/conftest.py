"""What every test of a strategy needs of Flower."""

import pytest

from socflower.flower_adapter import begin_run
from socflower.strategies import group_grid


@pytest.fixture(autouse=True)
def run_of_flower() -> None:
    """Messages can only be made in a process that has a run."""
    begin_run(1)


@pytest.fixture(autouse=True)
def replies_are_asked_for_often(monkeypatch: pytest.MonkeyPatch) -> None:
    """A reply costs a call here, and no connection to a SuperLink: rounds need not wait for the next look at it."""
    monkeypatch.setattr(group_grid, "_PULL_INTERVAL_S", 0.02)
    monkeypatch.setattr(group_grid, "_NODE_CHECK_INTERVAL_S", 0.3)
