"""Chooses the number of groups by training one epoch with each candidate (F2)."""

from collections.abc import Callable, Mapping, Sequence
from logging import INFO

from flwr.app import ArrayRecord, ConfigRecord
from flwr.serverapp import Grid

from socflower.errors import InfeasiblePlan
from socflower.flower_adapter import log
from socflower.hierarchy import GroupCountChoice, choose_group_count
from socflower.plain_numbers import plain_numbers
from socflower.strategies.group_grid import GroupGrid
from socflower.strategies.socflow import SoCFlow
from socflower.wire.message_keys import WARM_UP


@plain_numbers
def profile_group_count(
    grid: Grid,
    initial_arrays: ArrayRecord,
    accuracy_of: Callable[[ArrayRecord], float],
    make_strategy: Callable[[int], SoCFlow],
    candidates: Sequence[int],
    *,
    timeout_s: float = 3600.0,
    train_config: Mapping[str, str] | None = None,
) -> GroupCountChoice:
    """Train an epoch with each candidate, few groups first, and return the last N before accuracy falls.

    Candidates with which devices have too little memory are left out. `make_strategy(N)` must return a strategy of one
    epoch. Every candidate starts from `initial_arrays`. The virtual time of the warm-up is spent on the strategies'
    clock, like that of all training.
    """

    def first_epoch_accuracy(num_groups: int) -> float:
        strategy = make_strategy(num_groups)
        trained = strategy.start(
            GroupGrid(grid),
            initial_arrays,
            num_rounds=strategy.num_rounds,
            timeout=timeout_s,
            train_config=ConfigRecord({WARM_UP: True, **(train_config or {})}),
        )
        accuracy = accuracy_of(trained.arrays)
        log(INFO, "warm-up: %d groups reach %.4f in their first epoch", num_groups, accuracy)
        return accuracy

    feasible: list[int] = []
    for num_groups in sorted(set(candidates)):
        try:
            make_strategy(num_groups)
        except (
            InfeasiblePlan
        ) as error:  # more groups are smaller, so that shares of a batch are larger
            if not feasible:
                raise
            log(INFO, "warm-up: not with %d groups or more: %s", num_groups, error)
            break
        feasible.append(num_groups)
    return choose_group_count(feasible, first_epoch_accuracy)
