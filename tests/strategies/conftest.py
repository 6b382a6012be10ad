"""What every test of a strategy needs of Flower."""

import pytest

from socflower.engines.local.flower_internals import begin_run


@pytest.fixture(autouse=True)
def run_of_flower() -> None:
    """Messages can only be made in a process that has a run."""
    begin_run(1)
