"""The number of groups, chosen by the first rounds of the training itself (F2)."""

import math
import random
from collections.abc import Callable, Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from socflower.errors import TrainingFailed
from socflower.hierarchy import (
    GroupCountChoice,
    choose_by_floor,
    choose_by_time,
    default_candidates,
)
from socflower.hierarchy.group_count import Measured
from tests.one_line import refused

CHANCE = 0.1


class Curve:
    """A training whose score after a time is known, in rounds of equal length."""

    def __init__(
        self, score: Callable[[float], float], *, run_s: float, epochs: int = 20, rounds: int = 80
    ) -> None:
        self.score, self.run_s = score, run_s
        self._epochs, self._rounds, self.done = epochs, rounds, 0

    @property
    def seconds(self) -> float:
        return self.run_s * self.done / self._rounds

    @property
    def next_s(self) -> float:
        return self.run_s / self._rounds if self.done < self._rounds else math.inf

    def advance(self) -> Measured:
        self.done += 1
        epoch = self._epochs * self.done / self._rounds
        return Measured(seconds=self.seconds, epoch=epoch, score=self.score(self.seconds))

    def time_to(self, target: float) -> float:
        ends_s = [self.run_s * number / self._rounds for number in range(1, self._rounds + 1)]
        return next((end_s for end_s in ends_s if self.score(end_s) >= target), math.inf)


def saturating(most: float, tau_s: float) -> Callable[[float], float]:
    return lambda now_s: CHANCE + (most - CHANCE) * (1 - math.exp(-now_s / tau_s))


def stuck(now_s: float) -> float:
    return CHANCE


def spent_s(trials: Mapping[int, Curve]) -> float:
    return sum(trial.seconds for trial in trials.values())


def accuracies(*scores: float) -> dict[int, Curve]:
    """Trainings of one round an epoch in 1, 2, 4, … groups, with these scores after each."""
    return {
        1 << number: Curve(lambda now_s, score=score: score, run_s=1.0, epochs=9, rounds=9)
        for number, score in enumerate(scores)
    }


# ----------------------------------------------------------------------------------------------- after equal time
curves = st.builds(
    lambda most, tau_s, run_s, ends_s, bad: Curve(
        lambda now_s: (
            saturating(most, tau_s)(now_s)
            if bad is None
            else bad
            if now_s >= ends_s * run_s
            else saturating(most, tau_s)(now_s)
        ),
        run_s=run_s,
    ),
    st.floats(0.2, 1.0),
    st.floats(0.1, 50.0),
    st.floats(1.0, 40.0),
    st.just(0.0) | st.floats(0.0, 0.2),
    st.none() | st.sampled_from([CHANCE, math.nan]),
)


@given(trials=st.dictionaries(st.integers(1, 64), curves, min_size=2, max_size=7))
def test_a_diverging_number_is_not_chosen_and_all_trials_cost_a_quarter(
    trials: dict[int, Curve],
) -> None:
    try:
        choice = choose_by_time(trials, CHANCE)
    except TrainingFailed:
        assert all(
            math.isnan(trial.score(trial.seconds)) for trial in trials.values() if trial.done
        )
        return
    assert {*choice.measured}.isdisjoint(choice.untried)
    assert {*choice.measured, *choice.untried} == {*trials}
    for number, trial in trials.items():
        assert (number in choice.measured) == (trial.done > 0)
    if not choice.measured:
        return
    chosen, learning = (
        choice.accuracies[choice.num_groups],
        [score for score in choice.accuracies.values() if score > CHANCE],
    )
    assert chosen > CHANCE if learning else not math.isnan(chosen)
    most = 0.25 * (1 + 1e-9)
    assert spent_s(trials) <= most * max(trials[number].run_s for number in choice.measured)
    # Otherwise a later field may have been lost as a whole, and a quicker run is chosen that left before.
    if all(score > CHANCE for score in choice.accuracies.values()):
        assert spent_s(trials) <= most * trials[choice.num_groups].run_s


def test_what_is_ahead_after_equal_time_is_chosen_although_it_is_behind_after_equal_epochs() -> (
    None
):
    """F2, seen: 2 groups were chosen by first epochs, and 8 reach 93 % 2.7 times sooner."""
    trials = {
        2: Curve(saturating(0.95, 4.0), run_s=40.0),
        8: Curve(saturating(0.95, 1.5), run_s=12.0),
    }
    assert trials[2].score(2.0) > trials[8].score(0.6)
    assert trials[2].time_to(0.93) > 2.5 * trials[8].time_to(0.93)
    assert choose_by_time(trials, CHANCE).num_groups == 8


def test_a_training_that_stays_at_chance_is_not_chosen() -> None:
    """F2, seen: 1 group was at 0.904 on a schedule of its own, and on the training's stays at 0.10."""
    trials = {1: Curve(stuck, run_s=8.0), 2: Curve(saturating(0.9, 3.0), run_s=9.0)}
    assert choose_by_time(trials, CHANCE).num_groups == 2


def test_one_dip_does_not_end_the_search() -> None:
    """F2, seen: 2 groups at 0.737 ended it, and 4 would have reached 0.789."""
    taus_s = {1: 3.0, 2: 6.0, 4: 2.0, 8: 9.0}
    trials = {number: Curve(saturating(0.9, tau), run_s=20.0) for number, tau in taus_s.items()}
    assert choose_by_time(trials, CHANCE).num_groups == 4


def test_slower_runs_are_tried_while_the_slowest_is_the_best() -> None:
    trials = {
        16: Curve(stuck, run_s=2.0),
        8: Curve(stuck, run_s=3.0),
        2: Curve(saturating(0.9, 30.0), run_s=20.0),
        1: Curve(saturating(0.9, 8.0), run_s=30.0),
    }
    choice = choose_by_time(trials, CHANCE)
    assert (choice.num_groups, choice.untried) == (1, ())


def test_without_time_to_compare_two_none_trains() -> None:
    trials = {number: Curve(stuck, run_s=8.0 / number, rounds=4) for number in (1, 2, 4, 8)}
    for otherwise, expected in ((4, 4), (5, 4), (64, 8)):
        choice = choose_by_time(trials, CHANCE, otherwise=otherwise)
        assert (choice.num_groups, choice.accuracies, spent_s(trials)) == (expected, {}, 0.0)


def test_equal_scores_go_to_fewer_groups_and_if_all_diverge_it_is_an_error() -> None:
    assert (
        choose_by_time({4: Curve(stuck, run_s=9.0), 2: Curve(stuck, run_s=9.0)}, CHANCE).num_groups
        == 2
    )
    lost = {number: Curve(lambda now_s: math.nan, run_s=9.0) for number in (2, 4)}
    refused(lambda: choose_by_time(lost, CHANCE), "2, 4", error=TrainingFailed)


def test_the_choice_is_mostly_within_a_fifth_of_the_best_on_curves_drawn_at_random() -> None:
    draws, near = random.Random(1), 0
    for _ in range(100):
        # More groups have shorter runs, reach a little less, and have an optimum of speed in between.
        best = draws.uniform(0, 5)
        trials = {}
        for number in range(6):
            tau_s = 2.0 * math.exp(0.5 * abs(number - best) + draws.gauss(0.0, 0.1))
            most = 0.97 - 0.004 * number * draws.random()
            run_s = 60.0 * draws.uniform(0.8, 1.2) / 1.4**number
            trials[1 << number] = Curve(saturating(most, tau_s), run_s=run_s)
        times = {number: trial.time_to(0.9) for number, trial in trials.items()}
        near += times[choose_by_time(trials, CHANCE).num_groups] <= 1.2 * min(times.values())
    assert near >= 90


# ------------------------------------------------------------------------------------------------ the paper's rule
def test_the_paper_takes_the_last_number_before_the_first_epoch_falls_to_its_floor() -> None:
    trials = accuracies(0.5, 0.3, 0.46, 0.14, 0.9)
    choice = choose_by_floor(trials)
    assert (choice.num_groups, choice.untried) == (4, (16,))
    assert choice.accuracies == {1: 0.5, 2: 0.3, 4: 0.46, 8: 0.14}
    assert [trial.done for trial in trials.values()] == [1, 1, 1, 1, 0]
    assert choose_by_floor(accuracies(0.3, 0.3)).num_groups == 2
    assert choose_by_floor(accuracies(0.1, 0.9)).num_groups == 1
    assert choose_by_floor(accuracies(0.5, math.nan)).num_groups == 1
    refused(lambda: choose_by_floor(accuracies(math.nan, 0.9)), "1", error=TrainingFailed)


def test_the_paper_trains_whole_epochs() -> None:
    trials = {1: Curve(saturating(0.9, 3.0), run_s=20.0, epochs=20, rounds=80)}
    choose_by_floor(trials)
    assert trials[1].done == 4


# ------------------------------------------------------------------------------------------------------ candidates
def test_default_candidates_are_powers_of_two() -> None:
    assert default_candidates(1) == (1,)
    assert default_candidates(32) == (1, 2, 4, 8, 16, 32)
    assert default_candidates(60) == (1, 2, 4, 8, 16, 32)


@pytest.mark.parametrize(
    ("choose", "named"),
    [
        (lambda: choose_by_time({}, CHANCE), "candidates"),
        (lambda: choose_by_floor({0: Curve(stuck, run_s=1.0)}), "0"),
        (lambda: choose_by_time({1: Curve(stuck, run_s=1.0)}, CHANCE, share=1.5), "share"),
        (lambda: choose_by_floor({1: Curve(stuck, run_s=1.0)}, floor=-0.1), "floor"),
        (lambda: default_candidates(0), "0"),
    ],
)
def test_what_cannot_be_chosen_from_is_refused(
    choose: Callable[[], GroupCountChoice], named: str
) -> None:
    refused(choose, named)
