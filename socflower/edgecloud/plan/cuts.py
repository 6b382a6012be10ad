"""A deployment of one model over an edge and a cloud, and the costs of each possible cut."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from socflower.errors import ConfigError, require_range
from socflower.wire.codecs.quantisation import BITS

_STRICT = {"strict": True, "extra": "forbid"}  # for costs that are read from a file


@dataclass(frozen=True, kw_only=True, slots=True)
class SplitPlan:
    """Where a model is cut, the bit width of its features, and how stale a gradient may be: N = (l, b, K)."""

    cut: int | None  # index into `SplitCosts.cuts`; None: the edge trains alone
    bits: int = 32
    window: int = 0  # K of F23: batches that may go forward before the gradient of an earlier one has come back

    def __post_init__(self) -> None:
        require_range("deployment", least=0, cut=self.cut or 0, window=self.window)
        if self.bits not in BITS:
            raise ConfigError(
                f"deployment: bits = {self.bits} is unknown; use one of {', '.join(map(str, BITS))}"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class CutCost:
    """One place where the model can be cut; seconds and bytes are those of one batch.

    The front half is everything up to and including this layer. It is at the edge (in a reverse split: in the cloud).
    """

    __pydantic_config__ = _STRICT
    name: str  # of the front half's last layer
    edge_forward_s: float  # of the edge's half
    edge_backward_s: float  # backward pass and update; 0 where none of it is trained
    cloud_s: float  # forward, backward and update of the cloud's half
    feature_elements: int  # of one batch
    front_weight_bytes: (
        float  # that move with the front half: trained weights, buffers, optimiser state
    )
    edge_memory_bytes: float = (
        0.0  # weights, gradients, optimiser state and one batch's activations at the edge
    )
    front_trains: bool = (
        True  # False: everything before the cut is frozen, and no gradient is sent back (Type 2)
    )
    edge_replay_s: float | None = (
        None  # what a replay adds to a backward pass; None: as much as a forward pass
    )

    def __post_init__(self) -> None:
        require_range(
            f"cut {self.name}",
            least=0,
            edge_forward_s=self.edge_forward_s,
            cloud_s=self.cloud_s,
            edge_backward_s=self.edge_backward_s,
            front_weight_bytes=self.front_weight_bytes,
            edge_memory_bytes=self.edge_memory_bytes,
            edge_replay_s=self.replay_s,
        )
        require_range(f"cut {self.name}", least=1, feature_elements=self.feature_elements)

    @property
    def replay_s(self) -> float:
        """The seconds of the edge for repeating a batch's pass, with all that a backward pass needs."""
        return self.edge_forward_s if self.edge_replay_s is None else self.edge_replay_s

    def at_edge_speed(self, speed: float) -> "CutCost":
        """Return the costs while the edge works at `speed`, of 1 as here."""
        return replace(
            self,
            edge_forward_s=self.edge_forward_s / speed,
            edge_backward_s=self.edge_backward_s / speed,
            edge_replay_s=None if self.edge_replay_s is None else self.edge_replay_s / speed,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class SplitCosts:
    """The costs of a batch at every cut of one model on one edge and one cloud, in the order of the model's layers."""

    __pydantic_config__ = _STRICT
    model: str
    batch_size: int
    cuts: tuple[CutCost, ...]
    edge_only_s: float  # a whole training step at the edge
    edge_only_memory_bytes: float = 0.0  # of such a step
    label_bytes: float = 0.0  # that travel with the features of a batch
    codec_s_per_element: Mapping[int, float] = field(
        default_factory=dict
    )  # at the edge, by bits; 0 where missing
    decode_s_per_element: Mapping[int, float] = field(
        default_factory=dict
    )  # of gradients there, likewise
    edge_s_per_byte: float = 0.0  # the edge's processor time for a byte sent or received
    edge_s_per_batch: float = (
        0.0  # the edge's processor time for the messages of a batch, however small they are
    )
    cloud_s_per_byte: float = 0.0  # the cloud's, of the same two
    cloud_s_per_batch: float = 0.0
    gradient_bits: int = 32  # on the way back
    header_bytes: float = 256.0  # of a batch, each way: message and framing
    model_weight_bytes: float = 0.0  # that move with the whole model; 0: unknown, no edge-only move
    edge_processor: str | None = None  # on which the edge trains; None: its device's default one
    edge_beside: tuple[
        tuple[str, float], ...
    ] = ()  # processors that work beside it, for what part of its time

    def __post_init__(self) -> None:
        if not self.cuts:
            raise ConfigError(
                f"model {self.model}: has no place to cut it; a cut lies after an activation, a "
                "normalisation, a pooling or a residual block through which everything passes"
            )
        if self.gradient_bits not in BITS:
            raise ConfigError(
                f"gradient_bits = {self.gradient_bits} is unknown; use one of "
                f"{', '.join(map(str, BITS))}"
            )
        largest_bytes = max(cut.front_weight_bytes for cut in self.cuts)
        if self.model_weight_bytes and not largest_bytes <= self.model_weight_bytes < math.inf:
            raise ConfigError(
                f"model {self.model}: model_weight_bytes = {self.model_weight_bytes} must be at least "
                f"those of its largest front half, {largest_bytes}, and finite"
            )

    def at_edge_speed(self, speed: float) -> "SplitCosts":
        """Return the costs while the edge works at `speed`, of 1 as here: hot, or with users of its own."""
        if speed == 1.0:
            return self
        return replace(
            self,
            cuts=tuple([cut.at_edge_speed(speed) for cut in self.cuts]),
            edge_only_s=self.edge_only_s / speed,
            edge_s_per_byte=self.edge_s_per_byte / speed,
            edge_s_per_batch=self.edge_s_per_batch / speed,
            codec_s_per_element={
                bits: seconds / speed for bits, seconds in self.codec_s_per_element.items()
            },
            decode_s_per_element={
                bits: seconds / speed for bits, seconds in self.decode_s_per_element.items()
            },
        )

    def feature_bytes(self, cut: int, bits: int) -> float:
        """Return the bytes that one batch sends with its features, labels and header included."""
        return (
            self.header_bytes
            + self.label_bytes
            + math.ceil(self.cuts[cut].feature_elements * bits / 8)
        )

    def gradient_bytes(self, cut: int) -> float:
        """Return the bytes that come back for one batch; an empty message where the front half is frozen."""
        elements = self.cuts[cut].feature_elements if self.cuts[cut].front_trains else 0
        return self.header_bytes + math.ceil(elements * self.gradient_bits / 8)
