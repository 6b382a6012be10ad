"""What split training is measured against: edge-only, plain split, JointDNN, SplitFed, pipeline without compression."""

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
class Terms:
    """What a method may choose among: what its own paper offers, never less than ours may have of the same."""

    cut: Literal["best", "given or best", "given or middle", "none"]  # "given" is the cut that the user names
    edge_alone: Literal["always", "if allowed", "never", "only"]  # "if allowed": where ours may leave the cloud out
    waits: bool  # for the gradient of a batch before the next one begins; otherwise it has our window K
    bits: int = FULL_BITS  # of features
    gradient_bits: int = FULL_BITS


PEERS: Mapping[str, Terms] = {
    # Ours without the codec and without moves: it shows what these two bring.
    "pipelined": Terms(cut="given or best", edge_alone="if allowed", waits=False),
    # Eshratifar et al. 2019: the shortest path through layers × {edge, cloud}; all at the edge is one of the paths.
    "joint-dnn": Terms(cut="best", edge_alone="always", waits=True),
    "split": Terms(cut="given or middle", edge_alone="never", waits=True),
    "splitfed": Terms(cut="given or middle", edge_alone="never", waits=True),
    "edge-only": Terms(cut="none", edge_alone="only", waits=True),
}
"""The methods that ours is compared with, by the names that scenarios use."""


def choices(
    peer: str, costs: SplitCosts, *, window: int = 0, cut: int | None = None, allow_edge_only: bool = False,
) -> tuple[SplitPlan, ...]:
    """Return every deployment that a method may be planned with, the smallest cut first and the edge alone last.

    `cut` is the one that the user gives, for methods that follow it. Raises ConfigError for a cut that the model does
    not have, and for an unknown method.
    """
    terms = _terms(peer)
    limit = 0 if terms.waits else window
    cuts: tuple[int, ...] = tuple(range(len(costs.cuts)))
    if cut is not None:
        cut_cost(costs, cut)
    if terms.cut == "none":
        cuts = ()
    elif terms.cut != "best" and cut is not None:
        cuts = (cut,)
    elif terms.cut == "given or middle":
        cuts = (_middle(costs),)
    split = tuple(SplitPlan(cut=place, bits=terms.bits, window=limit) for place in cuts)
    given = terms.cut == "given or best" and cut is not None  # then ours has no choice of place either
    alone = terms.edge_alone in ("always", "only") or (terms.edge_alone == "if allowed" and allow_edge_only
                                                       and not given)
    return (*split, SplitPlan(cut=None, bits=terms.bits, window=limit)) if alone else split


def planned(
    peer: str, costs: SplitCosts, rates: LinkRates, *, num_batches: int = 1, window: int = 0, cut: int | None = None,
    allow_edge_only: bool = False, reverse: bool = False,
) -> SplitPlan:
    """Return the method's deployment for a link: of its `choices` the one that trains `num_batches` fastest (F26).

    It is priced by the method's own width of gradients, whatever that of `costs` is. Ties go to the earlier choice.
    """
    own = replace(costs, gradient_bits=_terms(peer).gradient_bits)
    return min(choices(peer, costs, window=window, cut=cut, allow_edge_only=allow_edge_only),
               key=lambda choice: predicted_s(own, choice, rates, num_batches, reverse=reverse))


def gradient_bits(strategy: str, ours: int) -> int:
    """Return the width in which gradients travel under a strategy, `ours` being what our own was given."""
    return PEERS[strategy].gradient_bits if strategy in PEERS else ours


def _middle(costs: SplitCosts) -> int:
    """Return the cut in the middle of the model, as one takes it who does not compute: behind a layer and its pooling.

    A layer ends where the next weights begin; to cut before its pooling would send features that nobody needs.
    """
    middle = len(costs.cuts) // 2
    same = [index for index, cut in enumerate(costs.cuts)
            if cut.front_weight_bytes == costs.cuts[middle].front_weight_bytes and index >= middle]
    return same[-1]


def _terms(peer: str) -> Terms:
    if peer not in PEERS:
        raise ConfigError(f"baseline {peer!r} is unknown; use one of {', '.join(PEERS)}")
    return PEERS[peer]
