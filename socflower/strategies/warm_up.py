"""Chooses the number of groups by training the beginning of the run in several (F2)."""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from logging import INFO

from flwr.app import ArrayRecord, ConfigRecord
from flwr.serverapp import Grid

from socflower.cluster import VirtualClock
from socflower.errors import InfeasiblePlan, TrainingFailed, require_known
from socflower.flower_adapter import log
from socflower.hierarchy import (
    GroupCountChoice,
    IntervalCosts,
    SyncInterval,
    choose_by_floor,
    choose_by_time,
)
from socflower.hierarchy.group_count import GROUP_RULES, PAPER, TIME, WARM_UP_SHARE, Measured
from socflower.plain_numbers import plain_numbers
from socflower.sim import EventClock
from socflower.strategies.group_grid import GroupGrid
from socflower.strategies.socflow import SoCFlow
from socflower.wire.message_keys import WARM_UP


@dataclass(frozen=True, kw_only=True, slots=True)
class WarmUp:
    """What a warm-up has chosen, and the training that continues from it.

    `strategy.start(GroupGrid(grid), arrays, num_rounds=strategy.num_rounds)` trains the rounds that are left; with
    `evaluate_fn=strategy.skip_done_rounds(evaluate)` it evaluates only those.
    """

    choice: GroupCountChoice
    strategy: SoCFlow
    # The model after the rounds of the chosen number of groups.
    arrays: ArrayRecord

    @property
    def num_groups(self) -> int:
        """The chosen number of groups."""
        return self.choice.num_groups

    @property
    def accuracies(self) -> Mapping[int, float]:
        """The latest accuracy of each number of groups that was tried."""
        return self.choice.accuracies


@plain_numbers
def profile_group_count(
    grid: Grid,
    initial_arrays: ArrayRecord,
    accuracy_of: Callable[[ArrayRecord], float],
    make_strategy: Callable[[int], SoCFlow],
    candidates: Sequence[int],
    *,
    rule: str = TIME,
    share: float = WARM_UP_SHARE,
    timeout_s: float = 3600.0,
    train_config: Mapping[str, str] | None = None,
) -> WarmUp:
    """Train the first rounds of the run in several numbers of groups; return the best, which continues from there.

    `make_strategy(N)` must return the strategy of the whole run. With `rule="time"` the accuracies after equal time
    are compared, within `share` of the run's predicted time (see `choose_by_time`); with `rule="paper"` each candidate
    trains an epoch, few groups first, until an accuracy is below 0.15 (see `choose_by_floor`). Candidates with
    which devices have too little memory are left out. The virtual time of all rounds is spent on the strategies' clock;
    a grid without virtual time is measured, and each candidate's first round then trains whatever it takes.
    """
    first = accuracy_of(initial_arrays) if rule == TIME else 0.0
    return warm_up(
        grid,
        initial_arrays,
        lambda number, strategy, arrays: accuracy_of(arrays),
        make_strategy,
        candidates,
        first,
        rule=rule,
        share=share,
        timeout_s=timeout_s,
        train_config=train_config,
    )


def warm_up(
    grid: Grid,
    initial_arrays: ArrayRecord,
    score: Callable[[int, SoCFlow, ArrayRecord], float],
    make_strategy: Callable[[int], SoCFlow],
    candidates: Sequence[int],
    initial: float,
    *,
    rule: str = TIME,
    share: float = WARM_UP_SHARE,
    timeout_s: float = 3600.0,
    train_config: Mapping[str, str] | None = None,
) -> WarmUp:
    """Do what `profile_group_count` does, with a score of each round; `initial` is that of the initial arrays."""
    require_known("group count: rule", rule, GROUP_RULES)
    config = ConfigRecord({WARM_UP: True, **(train_config or {})})
    trials: dict[int, _Trial] = {}
    for number in sorted(set(candidates)):
        try:
            strategy = make_strategy(number)
        except InfeasiblePlan as error:
            # More groups are smaller, so that shares of a batch are larger.
            if not trials:
                raise
            log(INFO, "warm-up: not with %d groups or more: %s", number, error)
            break
        trials[number] = _Trial(
            number, strategy, GroupGrid(grid), initial_arrays, score, timeout_s, config
        )
    if rule == PAPER:
        choice = choose_by_floor(trials)
    else:
        one_a_board = max((trial.num_boards for trial in trials.values()), default=1)
        choice = choose_by_time(trials, initial, otherwise=one_a_board, share=share)
    for number, measured in choice.measured.items():
        log(INFO, "warm-up: %d groups: %.4f after %.4g s", number, measured.score, measured.seconds)
    if not choice.measured:
        log(
            INFO,
            "warm-up: %d groups, one a board, untried: the first rounds of two numbers of groups take more than %g of "
            "the run; train more epochs or synchronise more often",
            choice.num_groups,
            share,
        )
    for number, trial in trials.items():
        if number != choice.num_groups:
            trial.strategy.method.close()
    best = trials[choice.num_groups]
    return WarmUp(choice=choice, strategy=best.strategy, arrays=best.arrays)


class _Trial:
    """The run in one number of groups, a round at a time."""

    def __init__(
        self,
        num_groups: int,
        strategy: SoCFlow,
        grid: Grid,
        arrays: ArrayRecord,
        score: Callable[[int, SoCFlow, ArrayRecord], float],
        timeout_s: float,
        config: ConfigRecord,
    ) -> None:
        method = strategy.method
        if method.work.clock is None:
            method.work.use_grid(grid, strategy.plan, arrays)
        self.strategy, self.arrays = strategy, arrays
        self._num_groups, self._grid, self._score = num_groups, grid, score
        self._timeout_s, self._config = timeout_s, config
        clock = method.work.clock
        costs = None if clock is None else strategy.predicted(clock)[1]
        # Without costs no virtual time is spent, so real time is measured.
        self._clock: VirtualClock | None = None if costs is None else clock
        self._predicted = None if costs is None else _Predicted(costs)
        self._seconds, self._num_done, self._steps_done = 0.0, 0, 0

    @property
    def num_boards(self) -> int:
        """The number of boards with SoCs of the plan."""
        return len({board for group in self.strategy.plan.groups for board in group.boards})

    @property
    def run_s(self) -> float:
        """The predicted seconds of the whole run; of a run that is measured, by its steps so far."""
        intervals = self.strategy.method.sync.intervals
        if self._predicted is not None:
            return self._predicted.run_s(intervals)
        steps = sum(interval.num_steps for interval in intervals)
        return self._seconds * steps / self._steps_done if self._steps_done else math.inf

    @property
    def next_s(self) -> float:
        """The predicted seconds of the next round; 0 for the first one of a run that is measured."""
        intervals = self.strategy.method.sync.intervals[self._num_done :]
        if not intervals:
            return math.inf
        if self._predicted is not None:
            return self._predicted(intervals[0])
        return self._seconds * intervals[0].num_steps / max(1, self._steps_done)

    def advance(self) -> Measured:
        """Train the next round; a score of NaN if it leaves no model."""
        before_s, self._num_done = self._now_s(), self._num_done + 1
        interval = self.strategy.method.sync.intervals[self._num_done - 1]
        try:
            self.arrays = self.strategy.train_round(
                self._num_done,
                self._grid,
                self.arrays,
                timeout_s=self._timeout_s,
                train_config=self._config,
            )
        except TrainingFailed as error:
            log(INFO, "warm-up: not with %d groups: %s", self._num_groups, error)
            score = math.nan
        else:
            score = self._score(self._num_groups, self.strategy, self.arrays)
        self._seconds += self._now_s() - before_s
        self._steps_done += interval.num_steps
        return Measured(seconds=self._seconds, epoch=interval.epoch_end, score=score)

    def _now_s(self) -> float:
        return time.monotonic() if self._clock is None else self._clock.now_s


class _Predicted:
    """The predicted seconds of intervals, each kind of interval once."""

    def __init__(self, costs: IntervalCosts) -> None:
        self._costs = costs
        self._seconds: dict[tuple[int, bool, bool, int], float] = {}
        self._run_s = 0.0

    def run_s(self, intervals: Sequence[SyncInterval]) -> float:
        """Return the seconds of all intervals of the run."""
        self._run_s = self._run_s or math.fsum(map(self, intervals))
        return self._run_s

    def __call__(self, interval: SyncInterval) -> float:
        costs = self._costs
        stage = min(interval.first_step, max(costs.gradients.coding.changes, default=0))
        dealt = costs.begins_with_deal(interval)
        kind = (interval.num_steps, dealt, interval.across_servers, stage)
        if kind not in self._seconds:
            clock = EventClock(costs.cluster)
            costs.run(interval, clock)
            self._seconds[kind] = clock.now_s
        return self._seconds[kind]
