"""`socflower run` killed at random moments and run again ends as if nothing had happened."""

import random
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.command_line import Socflower
from tests.engines.deployment.interrupted_runs import Runs


def some_rounds_later(runs: Runs, rng: random.Random) -> Callable[[], bool]:
    """Return a moment after the next checkpoint, anywhere in a round."""
    before, delay_s, since_s = runs.newest(), rng.uniform(0.0, 0.4), [0.0]

    def moment() -> bool:
        if runs.newest() <= before:
            return False
        since_s[0] = since_s[0] or time.monotonic()
        return time.monotonic() >= since_s[0] + delay_s

    return moment


def anywhere(rng: random.Random) -> Callable[[], bool]:
    """Return a moment that may come before training begins."""
    end_s = time.monotonic() + rng.uniform(0.0, 9.0)
    return lambda: time.monotonic() >= end_s


def while_writing(runs: Runs) -> Callable[[], bool]:
    """Return a moment at which a checkpoint of the server's is being written."""
    return lambda: any(runs.out.glob("checkpoint/.*.part"))


# In make test one run is interrupted (test_ctrl_c.py), and others go on in process (test_resume.py).
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_two_kills_change_nothing(socflower: Socflower, tmp_path: Path) -> None:
    """One of them while a checkpoint is being written. Who goes on after it has never had a worker."""
    runs, rng = Runs(tmp_path, epochs=5), random.Random(3)
    assert runs.kill_when(some_rounds_later(runs, rng))
    assert not (runs.out / "result.json").exists()
    assert runs.kill_when(while_writing(runs))
    said = runs.finish_here(socflower)
    assert f"resuming {runs.out} after round " in said and " of 20; --fresh" in said
    resumed = runs.assert_as_uninterrupted()
    assert 1 <= len(resumed) <= 2 and resumed == sorted(resumed)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_twenty_kills_change_nothing(tmp_path: Path) -> None:
    runs, rng = Runs(tmp_path, epochs=16), random.Random(20)
    num_killed = 0
    for attempt in range(20):
        moments = (some_rounds_later(runs, rng), anywhere(rng), while_writing(runs))
        num_killed += runs.kill_when(moments[attempt % 3])
    assert num_killed == 20
    runs.finish()
    runs.assert_as_uninterrupted()
