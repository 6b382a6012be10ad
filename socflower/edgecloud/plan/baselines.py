"""The baselines of split training: edge-only, plain split, JointDNN, SplitFed, and a pipeline without compression."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, product
from typing import Literal

from socflower.edgecloud.links.bandwidth_profile import LinkRates
from socflower.edgecloud.plan.cost_model import predicted_s
from socflower.edgecloud.plan.cuts import SplitCosts, SplitPlan
from socflower.edgecloud.plan.phases import cut_cost
from socflower.errors import ConfigError

FULL_BITS = 32


@dataclass(frozen=True, kw_only=True, slots=True)
class BaselineTerms:
    """The choices of a method: those that its paper offers, with at least the freedom that ours has."""

    # "given" is the cut that the user names.
    cut: Literal["best", "given or best", "given or middle", "none"]
    # "if allowed": if ours may train without the cloud.
    edge_alone: Literal["always", "if allowed", "never", "only"]
    # Whether a batch waits for the gradient of the one before; otherwise the method uses our window K.
    waits: bool


BASELINES: Mapping[str, BaselineTerms] = {
    # Ours without moves.
    "pipelined": BaselineTerms(
        cut="given or best",
        edge_alone="if allowed",
        waits=False,
    ),
    # Eshratifar et al. 2019: the shortest path through layers × {edge, cloud}; all at the edge is one of the paths.
    "joint-dnn": BaselineTerms(cut="best", edge_alone="always", waits=True),
    "split": BaselineTerms(cut="given or middle", edge_alone="never", waits=True),
    "splitfed": BaselineTerms(
        cut="given or middle",
        edge_alone="never",
        waits=True,
    ),
    "edge-only": BaselineTerms(cut="none", edge_alone="only", waits=True),
}
"""The methods that ours is compared with, by their names in scenarios."""


def choices(
    peer: str,
    costs: SplitCosts,
    *,
    window: int = 0,
    grouped: bool = False,
    cut: int | None = None,
    allow_edge_only: bool = False,
    bits: Sequence[int] = (FULL_BITS,),
) -> tuple[SplitPlan, ...]:
    """Return every deployment that a method may choose, the smallest cut and widest features first, edge-only last.

    `cut` is the one given by the user, for methods that use it. Raises `ConfigError` for a cut that the model does not
    have, and for an unknown method.
    """
    terms = _terms(peer)
    if cut is not None:
        cut_cost(costs, cut)
    places: list[int | None] = list(range(len(costs.cuts)))
    if terms.cut == "none":
        places = []
    elif terms.cut != "best" and cut is not None:
        places = [cut]
    elif terms.cut == "given or middle":
        places = [_middle(costs)]
    # With a given cut, ours cannot choose edge-only training either.
    free = terms.cut != "given or best" or cut is None
    if_allowed = terms.edge_alone == "if allowed" and allow_edge_only and free
    if if_allowed or terms.edge_alone in ("always", "only"):
        places.append(None)
    limit = 0 if terms.waits else window
    widths = sorted(set(bits), reverse=True)
    return tuple(
        SplitPlan(
            cut=place,
            bits=width,
            window=limit,
            grouped=grouped,
        )
        for place, width in product(places, widths)
    )


def plan_baseline(
    peer: str,
    costs: SplitCosts,
    rates: LinkRates,
    *,
    num_batches: int = 1,
    window: int = 0,
    grouped: bool = False,
    cut: int | None = None,
    allow_edge_only: bool = False,
    bits: Sequence[int] = (FULL_BITS,),
    reverse: bool = False,
) -> SplitPlan:
    """Return the method's deployment for a link: of its `choices` the one that trains `num_batches` fastest (F26).

    Gradients are as wide as those of `costs`. Ties go to the earlier choice. Raises `InfeasiblePlan` if no choice fits
    into the edge's memory.
    """
    options = choices(
        peer,
        costs,
        window=window,
        grouped=grouped,
        cut=cut,
        allow_edge_only=allow_edge_only,
        bits=bits,
    )
    return min(
        costs.fitting(options),
        key=lambda choice: predicted_s(costs, choice, rates, num_batches, reverse=reverse),
    )


TECHNIQUES = ("window", "features", "gradients")
"""What ours adds to JointDNN: K, the bits forward and the bits back."""


def ablation(
    costs: SplitCosts,
    rates: LinkRates,
    *,
    num_batches: int,
    window: int,
    bits: Sequence[int],
    grouped: bool = False,
    reverse: bool = False,
) -> Mapping[frozenset[str], float]:
    """Return the seconds of `num_batches` (F26) with every subset of our `TECHNIQUES`.

    Each subset has its fastest cut, or none: the empty one is JointDNN, the full one ours without moves. Features then
    have `bits`, and gradients the width of `costs`.
    """
    found = {}
    for count in range(len(TECHNIQUES) + 1):
        for chosen in map(frozenset, combinations(TECHNIQUES, count)):
            own = costs if "gradients" in chosen else replace(costs, gradient_bits=FULL_BITS)
            plan = plan_baseline(
                "pipelined",
                own,
                rates,
                num_batches=num_batches,
                window=window if "window" in chosen else 0,
                grouped=grouped,
                allow_edge_only=True,
                bits=bits if "features" in chosen else (FULL_BITS,),
                reverse=reverse,
            )
            found[chosen] = predicted_s(own, plan, rates, num_batches, reverse=reverse)
    return found


def _middle(costs: SplitCosts) -> int:
    """Return the cut in the middle of the model, as a user without a cost model would choose it: after a pooling.

    A layer ends where the next weights begin; a cut before its pooling would send features that are not needed.
    """
    weights = [cut.front_weight_bytes for cut in costs.cuts]
    middle = len(weights) // 2
    return max(at for at, each in enumerate(weights) if each == weights[middle] and at >= middle)


def _terms(peer: str) -> BaselineTerms:
    if peer not in BASELINES:
        raise ConfigError(f"baseline {peer!r} is unknown; use one of {', '.join(BASELINES)}")
    return BASELINES[peer]
