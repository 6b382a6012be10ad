"""Chooses the number of groups by training one epoch with each candidate (F2)."""

from collections.abc import Callable, Mapping, Sequence
from logging import INFO

from flwr.app import ArrayRecord, ConfigRecord
from flwr.serverapp import Grid
from flwr.supercore import log

from socflower.hierarchy import GroupCountChoice, choose_group_count
from socflower.strategies.group_grid import GroupGrid
from socflower.strategies.socflow import SoCFlow
from socflower.wire.message_keys import WARM_UP


def profile_group_count(
    grid: Grid, initial_arrays: ArrayRecord, accuracy_of: Callable[[ArrayRecord], float],
    make_strategy: Callable[[int], SoCFlow], candidates: Sequence[int], *, timeout_s: float = 3600.0,
    train_config: Mapping[str, str] | None = None,
) -> GroupCountChoice:
    """Train an epoch with each candidate, few groups first, and return the last N before accuracy falls.

    `make_strategy(N)` must return a strategy of one epoch. Every candidate starts from `initial_arrays`. The
    virtual time of the warm-up is spent on the strategies' clock, like that of all training.
    """

    def first_epoch_accuracy(num_groups: int) -> float:
        strategy = make_strategy(num_groups)
        trained = strategy.start(GroupGrid(grid), initial_arrays, num_rounds=strategy.num_rounds, timeout=timeout_s,
                                 train_config=ConfigRecord({WARM_UP: True, **(train_config or {})}))
        accuracy = accuracy_of(trained.arrays)
        log(INFO, "warm-up: %d groups reach %.4f in their first epoch", num_groups, accuracy)
        return accuracy

    return choose_group_count(candidates, first_epoch_accuracy)
