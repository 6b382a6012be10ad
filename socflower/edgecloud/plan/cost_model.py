"""The cost model of split training (F26): the time of a number of batches, and the cost of moving the cut."""

import math

from socflower.edgecloud.links.bandwidth_profile import LinkRates
from socflower.edgecloud.plan.cuts import SplitCosts, SplitPlan
from socflower.edgecloud.plan.phases import Phases, cut_cost, phases, transfer_s, window_limit
from socflower.errors import ConfigError


def period_s(phases: Phases, window: float, *, grouped: bool = False) -> float:
    """Return the seconds between two batches of a full pipeline: max(T_M, T_Σ/(K+1)); T_Σ for a window of 0.

    For batches that are `grouped` it is a group's mean.
    """
    if math.isinf(phases.total_s):
        # Divided by an infinite window it would be NaN.
        return math.inf
    if grouped and not math.isinf(window):
        return _group_s(phases, window + 1.0) / (window + 1.0)
    return max(phases.longest_s, phases.total_s / (window + 1.0))


def training_s(
    phases: Phases, num_batches: float, window: float, *, grouped: bool = False
) -> float:
    """Return the seconds of `num_batches` (0, or at least 1) from an empty pipeline to an empty one (F26).

    Sequential, window 0: τ·T_Σ. Otherwise (τ − 1)·max(T_M, T_Σ/(K+1)) + T_Σ. `num_batches` may be a mean, as τ is in
    F27; an infinite window is no limit. The result is never less than the exact time of a sliding window over four
    first-come first-served servers. Both are equal if T_M decides or K + 1 divides τ − 1; otherwise the result is too
    long by less than T_Σ − (K+1)·T_M, for any number of batches. The same holds if the edge is one processor for
    forward and backward passes of different batches, provided it never does two backward passes in a row while a
    forward pass is allowed. A front half that always prefers backward passes leaves the link and the cloud idle, and
    needs up to 1.7 times as long.

    `grouped`, K + 1 batches fill and empty the pipeline, and the next ones wait for them. A group of n takes
    T_Σ + (n − 1)·max(T2, T3, T4), or n·T1 if that is more: the edge computes before and after all others.
    Eq. 12, max(T_Σ, n·T_M), leaves out that the other three fill and empty. Both are lower bounds; an edge with few
    batches in a group may wait for the first of them although it is the slowest.
    """
    if num_batches == 0:
        return 0.0
    if math.isinf(phases.total_s):
        return math.inf
    if grouped and not math.isinf(window):
        full_groups, left = divmod(num_batches, window + 1.0)
        return full_groups * _group_s(phases, window + 1.0) + _group_s(phases, left)
    return (num_batches - 1.0) * period_s(phases, window) + phases.total_s


def _group_s(phases: Phases, num_batches: float) -> float:
    """Return the seconds of a group from an empty pipeline to an empty one."""
    if num_batches < 1.0:
        return phases.total_s * num_batches
    beyond_s = max(phases.up_s, phases.cloud_s, phases.down_s)
    return max(phases.total_s + (num_batches - 1.0) * beyond_s, num_batches * phases.edge_s)


def migration_s(
    costs: SplitCosts, old: int | None, new: int | None, rates: LinkRates, *, reverse: bool = False
) -> float:
    """Return the seconds for moving the weights between two cuts (U, Eq. 13), one latency included.

    Layers leave the edge at the up rate and arrive at the down rate; with None the edge has the whole model. The result
    is 0 between equal cuts and infinite over a dead link. Raises what `received_weight_bytes` raises.
    """
    if old == new:
        return 0.0
    received_bytes = received_weight_bytes(costs, old, new, reverse=reverse)
    rate = rates.down_bytes_per_s if received_bytes > 0 else rates.up_bytes_per_s
    return transfer_s(abs(received_bytes), rate) + rates.latency_s


def received_weight_bytes(
    costs: SplitCosts, old: int | None, new: int | None, *, reverse: bool = False
) -> float:
    """Return the bytes of weights that the edge receives as the cut moves, negative if it sends some (Eq. 13).

    Raises `ConfigError` for a cut that the model does not have, and for None if the model's bytes are not known.
    """
    return _edge_weight_bytes(costs, new, reverse) - _edge_weight_bytes(costs, old, reverse)


def _edge_weight_bytes(costs: SplitCosts, cut: int | None, reverse: bool) -> float:
    if cut is None:
        if not costs.model_weight_bytes:
            raise ConfigError(
                f"model {costs.model}: a move to or from edge-only training needs model_weight_bytes in its costs"
            )
        return costs.model_weight_bytes
    front_bytes = cut_cost(costs, cut).front_weight_bytes
    # Unknown model bytes count as 0: between two cuts of a reverse split they cancel out.
    return costs.model_weight_bytes - front_bytes if reverse else front_bytes


def drain_s(phases: Phases, window: float, *, grouped: bool = False) -> float:
    """Return the seconds until the window is empty without further forward passes: K periods for K batches in flight.

    For an infinite window: until the newest batch is complete, T_Σ. A drain divides a group of batches that are
    `grouped`, whose second part fills the pipeline again.
    """
    if window == 0:
        return 0.0
    if grouped and not math.isinf(window):
        size = window + 1.0
        return 2.0 * _group_s(phases, size / 2.0) - _group_s(phases, size)
    return phases.total_s if math.isinf(window) else window * period_s(phases, window)


def predicted_s(
    costs: SplitCosts,
    split_plan: SplitPlan,
    rates: LinkRates,
    num_batches: float,
    previous: SplitPlan | None = None,
    *,
    now: LinkRates | None = None,
    reverse: bool = False,
) -> float:
    """Return the seconds of the next `num_batches` under a deployment: M, and U and the drain if it is a new one (F27).

    `previous` is the deployment whose batches are in flight, if there is another one. `rates` are those expected
    during training; `now` are those for drain and migration, if they differ.
    """
    times = phases(costs, split_plan, rates, reverse=reverse)
    window = window_limit(costs, split_plan)
    total_s = training_s(times, num_batches, window, grouped=split_plan.grouped)
    if previous is None or previous == split_plan:
        return total_s
    now = now or rates
    leaving_s = 0.0
    if previous.cut is not None:
        in_flight = phases(costs, previous, now, reverse=reverse)
        window = window_limit(costs, previous)
        leaving_s = drain_s(in_flight, window, grouped=previous.grouped)
    moving_s = migration_s(
        costs,
        previous.cut,
        split_plan.cut,
        now,
        reverse=reverse,
    )
    return total_s + leaving_s + moving_s
