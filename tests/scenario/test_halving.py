"""Successive halving, and the belief by which its candidates are chosen."""

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from socflower.scenario.candidates import PredictedCosts, candidates_of
from socflower.scenario.epoch_model import EpochModel
from socflower.scenario.halving import NUM_RUNGS, halve, part_of_rung, ranked
from tests.scenario.small_runs import small


@dataclass(frozen=True)
class Known:
    """A candidate whose cost is known from the beginning."""

    time_s: float
    energy_j: float

    def costs(self) -> list[PredictedCosts]:
        return [PredictedCosts(time_s=self.time_s, energy_j=self.energy_j)]


known = st.builds(Known, st.floats(0.1, 10.0), st.floats(0.1, 10.0))


@given(first=st.lists(known, min_size=1, max_size=20), prefer=st.sampled_from(["time", "energy"]))
def test_what_is_preferred_is_never_left_out(first: list[Known], prefer: str) -> None:
    last = halve(first, lambda each, rung: each, prefer)
    key = "time_s" if prefer == "time" else "energy_j"
    best = min(getattr(each, key) for each in first)
    assert best in [getattr(each, key) for each in last]
    assert len(last) <= max(2, -(-len(first) // 4))


@given(tried=st.lists(known, min_size=1, max_size=20))
def test_a_ranking_has_each_candidate_once(tried: list[Known]) -> None:
    assert sorted(ranked(tried, "time")) == list(range(len(tried)))


def test_each_rung_is_twice_as_long_and_the_last_one_whole() -> None:
    parts = [part_of_rung(rung) for rung in range(NUM_RUNGS)]
    assert parts[-1] == 1.0
    assert all(later == 2 * part for part, later in pairwise(parts))


@pytest.mark.slow
@pytest.mark.usefixtures("on_few_digits")
def test_a_belief_is_sure_of_what_was_seen_and_doubts_what_is_far_from_it() -> None:
    candidates, _ = candidates_of(small(epochs=4), ("socflow", "sgd"), ("fp32", "int8"))
    model = EpochModel(candidates)
    first, *others = model.middles()
    assert others
    seen = dict.fromkeys((first, *others), 4.0)
    deviations = dict.fromkeys(seen, 0.25)
    before, after = model.after({first: 4.0}, deviations), model.after(seen, deviations)
    assert (after.deviation <= before.deviation + 1e-9).all()
    for index in seen:
        assert after.deviation[index] == pytest.approx(0.25, abs=0.05)
    # What has been seen alike everywhere is expected everywhere.
    np.testing.assert_allclose(after.mean, np.log(4.0))
    lower = model.after({**seen, first: 1.0}, deviations)
    assert lower.mean[first] < after.mean[first]
