"""A deployment of one model over an edge and a cloud, and the costs of each possible cut."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, TypeAlias

from pydantic import Field

from socflower.errors import ConfigError, InfeasiblePlan, require_range
from socflower.field_rules import OneOf, checked
from socflower.quantities import human_bytes
from socflower.wire.codecs.quantisation import BITS

Bits: TypeAlias = Annotated[int, OneOf(BITS)]
"""The width of a value that crosses the link."""

# Strict, since a text in a file of costs is no number.
_Cost: TypeAlias = Annotated[float, Field(ge=0, strict=True)]
_FORBID = {"extra": "forbid"}


@dataclass(frozen=True, kw_only=True, slots=True)
class SplitPlan:
    """A deployment (l, b, K): where the model is cut, the bits of its features, and how stale a gradient may be.

    `cut` is an index into `SplitCosts.cuts`; with None the edge trains alone. `window` is K of F23: how many batches
    may go forward before the gradient of an earlier one has come back. `grouped`: in groups of K + 1 that wait for each
    other, in place of a window that slides.
    """

    cut: int | None
    bits: int = 32
    window: int = 0
    grouped: bool = False

    def __post_init__(self) -> None:
        require_range("deployment", least=0, cut=self.cut or 0, window=self.window)
        if self.bits not in BITS:
            known = ", ".join(map(str, BITS))
            raise ConfigError(f"deployment: bits = {self.bits} must be one of {known}")


@checked
class CutCost:
    """One place where the model can be cut; seconds and bytes are those of one batch.

    The front half is everything up to and including this layer. It is at the edge (in a reverse split: in the cloud).
    """

    __pydantic_config__ = _FORBID
    # The front half's last layer.
    name: str
    # Of the edge's half; backward pass and update take 0 if none of it is trained.
    edge_forward_s: _Cost
    edge_backward_s: _Cost
    # Forward pass, backward pass and update of the cloud's half.
    cloud_s: _Cost
    feature_elements: Annotated[int, Field(ge=1)]
    # The state that moves with the front half: trained weights, buffers, optimiser state.
    front_weight_bytes: _Cost
    # Weights, gradients, optimiser state and one batch's activations at the edge.
    edge_memory_bytes: _Cost = 0.0
    # False: everything before the cut is frozen, and no gradient is sent back (Type 2 transfer).
    front_trains: Annotated[bool, Field(strict=True)] = True
    # The extra time of a backward pass with a replay; None: as much as a forward pass.
    edge_replay_s: _Cost | None = None

    @property
    def replay_s(self) -> float:
        """The edge's seconds for repeating a batch's forward pass, with all that a backward pass needs."""
        return self.edge_forward_s if self.edge_replay_s is None else self.edge_replay_s

    def at_edge_speed(self, speed: float) -> "CutCost":
        """Return the costs of an edge that works at `speed` times the present speed."""
        replay_s = None if self.edge_replay_s is None else self.edge_replay_s / speed
        return replace(
            self,
            edge_forward_s=self.edge_forward_s / speed,
            edge_backward_s=self.edge_backward_s / speed,
            edge_replay_s=replay_s,
        )


@checked
class SplitCosts:
    """The costs of a batch at every cut of one model on one edge and one cloud, in the order of the model's layers."""

    __pydantic_config__ = _FORBID
    model: str
    batch_size: int
    cuts: tuple[CutCost, ...]
    # A whole training step at the edge, and its memory.
    edge_only_s: _Cost
    edge_only_memory_bytes: _Cost = 0.0
    # What the edge has for training; None: unknown, so every half fits.
    edge_budget_bytes: _Cost | None = None
    # Labels travel with the features of a batch.
    label_bytes: _Cost = 0.0
    # The edge's codec by bits, 0 where missing: encoding features, decoding gradients.
    codec_s_per_element: Mapping[int, _Cost] = field(default_factory=dict)
    decode_s_per_element: Mapping[int, _Cost] = field(default_factory=dict)
    # Processor time for a byte sent or received, and for the messages of a batch, however small they are.
    edge_s_per_byte: _Cost = 0.0
    edge_s_per_batch: _Cost = 0.0
    cloud_s_per_byte: _Cost = 0.0
    cloud_s_per_batch: _Cost = 0.0
    gradient_bits: Bits = 32
    # Message and framing of a batch, each way.
    header_bytes: _Cost = 256.0
    # The state that moves with the whole model; 0: unknown, so there are no moves to edge-only training.
    model_weight_bytes: _Cost = 0.0
    # The processor on which the edge trains; None: its device's default one.
    edge_processor: str | None = None
    # Processors that work at the same time, each with its part of that time.
    edge_beside: tuple[tuple[str, float], ...] = ()

    def check(self) -> None:
        """Raise `ConfigError` for a model without cuts, or with fewer bytes than a front half."""
        if not self.cuts:
            raise ConfigError(
                f"model {self.model} has no place to cut it; a cut needs an activation, a normalisation, a pooling "
                "or a residual block through which everything passes"
            )
        largest_bytes = max(cut.front_weight_bytes for cut in self.cuts)
        if self.model_weight_bytes:
            where = f"model {self.model}"
            require_range(
                where,
                least=largest_bytes,
                model_weight_bytes=self.model_weight_bytes,
            )

    def at_edge_speed(self, speed: float) -> "SplitCosts":
        """Return the costs of an edge at `speed` times the present speed, because it is hot or also used otherwise."""
        if speed == 1.0:
            return self

        def slowed(seconds: Mapping[int, float]) -> dict[int, float]:
            return {bits: each / speed for bits, each in seconds.items()}

        return replace(
            self,
            cuts=tuple([cut.at_edge_speed(speed) for cut in self.cuts]),
            edge_only_s=self.edge_only_s / speed,
            edge_s_per_byte=self.edge_s_per_byte / speed,
            edge_s_per_batch=self.edge_s_per_batch / speed,
            codec_s_per_element=slowed(self.codec_s_per_element),
            decode_s_per_element=slowed(self.decode_s_per_element),
        )

    def needed_bytes(self, split_plan: SplitPlan) -> float:
        """Return the memory that a plan's half takes at the edge."""
        if split_plan.cut is None:
            return self.edge_only_memory_bytes
        return self.cuts[split_plan.cut].edge_memory_bytes

    def fitting(self, split_plans: Iterable[SplitPlan]) -> tuple[SplitPlan, ...]:
        """Return the plans whose half fits into the edge's memory; `InfeasiblePlan` if none does."""
        plans = tuple(split_plans)
        budget_bytes = math.inf if self.edge_budget_bytes is None else self.edge_budget_bytes
        fitting = tuple(plan for plan in plans if self.needed_bytes(plan) <= budget_bytes)
        if plans and not fitting:
            least = min(plans, key=self.needed_bytes)
            raise InfeasiblePlan(
                f"model {self.model} {self.describe(least)} takes at least {human_bytes(self.needed_bytes(least))} of "
                f"memory, and the edge has {human_bytes(budget_bytes)} left; use a smaller batch or another cut"
            )
        return fitting

    def describe(self, split_plan: SplitPlan) -> str:
        """Return a plan's cut and feature width as text."""
        if split_plan.cut is None:
            return "edge alone"
        return f"after {self.cuts[split_plan.cut].name}, {split_plan.bits} bits"

    def position(self, split_plan: SplitPlan) -> int:
        """Return the number of a plan's cut; an edge that trains alone is behind the last one."""
        return len(self.cuts) if split_plan.cut is None else split_plan.cut

    def feature_bytes(self, cut: int, bits: int) -> float:
        """Return the bytes that one batch sends with its features, labels and header included."""
        payload_bytes = math.ceil(self.cuts[cut].feature_elements * bits / 8)
        return self.header_bytes + self.label_bytes + payload_bytes

    def gradient_bytes(self, cut: int) -> float:
        """Return the bytes that come back for one batch: only the header if the front half is frozen."""
        elements = self.cuts[cut].feature_elements if self.cuts[cut].front_trains else 0
        return self.header_bytes + math.ceil(elements * self.gradient_bits / 8)
