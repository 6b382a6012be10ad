"""The baselines of split training: edge-only, plain split, JointDNN, SplitFed, and a pipeline without compression."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
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
    # Of features.
    bits: int = FULL_BITS
    gradient_bits: int = FULL_BITS


BASELINES: Mapping[str, BaselineTerms] = {
    # Ours without the codec and without moves, to show the benefit of these two.
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
    cut: int | None = None,
    allow_edge_only: bool = False,
) -> tuple[SplitPlan, ...]:
    """Return every deployment that a method may choose, the smallest cut first and edge-only last.

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
    return tuple(
        SplitPlan(
            cut=place,
            bits=terms.bits,
            window=limit,
        )
        for place in places
    )


def plan_baseline(
    peer: str,
    costs: SplitCosts,
    rates: LinkRates,
    *,
    num_batches: int = 1,
    window: int = 0,
    cut: int | None = None,
    allow_edge_only: bool = False,
    reverse: bool = False,
) -> SplitPlan:
    """Return the method's deployment for a link: of its `choices` the one that trains `num_batches` fastest (F26).

    Its time is predicted with the method's own gradient width, not that of `costs`. Ties go to the earlier choice.
    Raises `InfeasiblePlan` if no choice fits into the edge's memory.
    """
    own = replace(costs, gradient_bits=_terms(peer).gradient_bits)
    return min(
        own.fitting(choices(peer, costs, window=window, cut=cut, allow_edge_only=allow_edge_only)),
        key=lambda choice: predicted_s(
            own,
            choice,
            rates,
            num_batches,
            reverse=reverse,
        ),
    )


def gradient_bits(strategy: str, ours: int) -> int:
    """Return the width of gradients in bits under a strategy; `ours` is that of our own."""
    return BASELINES[strategy].gradient_bits if strategy in BASELINES else ours


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
