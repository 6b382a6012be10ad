"""The settings of SoCFlow, by what they are about; each is a frozen value that a caller may keep and reuse."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import Field

from socflower.cluster import FP32, ModelProfile, Pricing, VirtualClock
from socflower.cluster.cluster_file import MOST_SOCS
from socflower.errors import ConfigError, require_type
from socflower.field_rules import OneOf, checked
from socflower.hierarchy import IntervalCosts, SyncInterval, sync_schedule
from socflower.hierarchy.exchange import coding_bytes
from socflower.hierarchy.exchange.coding_bytes import CODINGS, gradient_coding
from socflower.hierarchy.exchange.collective_tasks import BUCKETS, FUSIONS
from socflower.hierarchy.exchange.gradients import GradientExchange
from socflower.hierarchy.exchange.models import (
    COMPRESSIONS,
    NONE,
    RING,
    STAR,
    TREE,
    ModelExchange,
    compression_fault,
)
from socflower.hierarchy.sync_intervals import DECAY, DOUBLING_EPOCHS, sync_shapes
from socflower.hierarchy.uplink_turns import AUTO
from socflower.wire.message_keys import INT8_WIRE, WIRES

# Far above any real training: they keep planning and training bounded.
MOST_EPOCHS = 1_000_000
_MOST_SAMPLES = 1_000_000
_MOST_BUCKETS = 1000

Epochs = Annotated[int, Field(gt=0, le=MOST_EPOCHS)]
BatchSize = Annotated[int, Field(gt=0, le=_MOST_SAMPLES)]
IntervalEpochs = Annotated[float, Field(gt=0, le=MOST_EPOCHS)] | Annotated[str, OneOf((DECAY,))]
NumSocs = Annotated[int, Field(gt=0, le=MOST_SOCS)]
UplinkTurns = bool | Annotated[str, OneOf((AUTO,))]
OverlapBuckets = Annotated[int, Field(gt=0, le=_MOST_BUCKETS)]
Leaders = Annotated[str, OneOf((AUTO, RING, STAR, TREE))]


class _WithOptions(OneOf):
    """Limits a key to texts that begin with one of some words; `gradient_coding` checks the rest."""

    def _check(self, value: int | str) -> int | str:
        super()._check(str(value).partition(" ")[0])
        return value


Compression = Annotated[str, _WithOptions(CODINGS)]
GradientExchangeKind = Annotated[str, OneOf(coding_bytes.KINDS)]
LeaderCompression = Annotated[str, OneOf(COMPRESSIONS)]
Fusion = Annotated[str, OneOf(FUSIONS)]
Wire = Annotated[str, OneOf(WIRES)]


@checked
class TrainingSchedule:
    """How much is trained, in which order, and how often groups synchronise.

    Parameters
    ----------
    num_samples, batch_size, num_epochs : int
        Size of the training set, batch of a group, and passes over the data.
    interval_epochs : float or "decay"
        Epochs between synchronisations, or the paper's schedule 0.25, 0.5, 1, 2 (F3).
    doubling_epochs : int
        With "decay", after how many epochs the interval doubles: the paper's GN (F3).
    server_interval : int
        In a site of several servers, all groups take part in every `server_interval`-th synchronisation, and in the
        last one; in the others the groups of each server average their models.
    reshuffle : bool
        Redistribute all data among the groups at the synchronisations that end an epoch; off if data must not leave
        their node.
    seed : int
        Seed of the order of the data.
    """

    num_samples: Annotated[int, Field(gt=0)]
    batch_size: BatchSize
    num_epochs: Epochs
    interval_epochs: IntervalEpochs = "decay"
    doubling_epochs: Epochs = DOUBLING_EPOCHS
    server_interval: Epochs = 1
    reshuffle: bool = True
    seed: int = 1

    def check(self) -> None:
        """Refuse epochs after which a constant interval doubles."""
        if self.doubling_epochs != DOUBLING_EPOCHS and self.interval_epochs != DECAY:
            raise ConfigError(
                f"doubling_epochs = {self.doubling_epochs} is for interval_epochs = {DECAY!r}, and it is "
                f"{self.interval_epochs!r}; leave it out"
            )

    def intervals(self, steps_per_epoch: int) -> Sequence[SyncInterval]:
        """Return the intervals of the whole training (F3)."""
        return sync_schedule(steps_per_epoch=steps_per_epoch, **self._rounds)

    def shapes(
        self, steps_per_epoch: int, changes: Sequence[int] = ()
    ) -> Sequence[tuple[SyncInterval, int]]:
        """Return the distinct intervals and their counts, so that the cost does not grow with the number of epochs.

        Intervals before and after each of the steps `changes` are distinct.
        """
        return sync_shapes(steps_per_epoch=steps_per_epoch, **self._rounds, changes=changes)

    @property
    def _rounds(self) -> dict[str, Any]:
        keys = ("num_epochs", "interval_epochs", "server_interval", "doubling_epochs")
        return {key: getattr(self, key) for key in keys}


@checked
class Grouping:
    """How many groups are planned, and of how many of the cluster's slots; `num_socs` None is all of them.

    With `use_spares` the SoCs beyond `num_socs` stand in for participants that are away and, with re-balancing, for
    slower ones.
    """

    num_groups: NumSocs = 1
    num_socs: NumSocs | None = None
    use_spares: bool = False


@checked
class Streaming:
    """How Streaming DiLoCo synchronises a model's fragments: `fragments` of them in turn, each every interval.

    The outer step of a fragment is mixed into a group's weights `delay_steps` later, which keep the part `mixing` of
    what was trained by then: by default half with a delay, and nothing without.
    """

    fragments: Annotated[
        int, Field(gt=0, le=1000, description="fragments of whole layers, every so many-th one")
    ] = 2
    delay_steps: Annotated[
        int,
        Field(ge=0, le=MOST_EPOCHS, description="steps beside which a fragment is exchanged"),
    ] = 1
    mixing: Annotated[
        float | None,
        Field(
            ge=0,
            lt=1,
            description=(
                "what groups keep of their own weights of a fragment; default: 0.5, without a delay 0"
            ),
        ),
    ] = None

    @property
    def alpha(self) -> float:
        """`mixing`, or its default."""
        if self.mixing is not None:
            return self.mixing
        return 0.5 if self.delay_steps else 0.0


def streamed_interval(interval_epochs: float | str, fragments: int) -> float:
    """Return the epochs between synchronisations, if each of so many fragments is synchronised every interval."""
    return float(interval_epochs) / fragments


def require_few_fragments(
    streaming: Streaming, interval_epochs: float | str, steps_per_epoch: int
) -> None:
    """Raise `ConfigError` unless every round has more steps than the delay, and at least one."""
    least = int(streamed_interval(interval_epochs, streaming.fragments) * steps_per_epoch)
    if least < max(1, streaming.delay_steps):
        raise ConfigError(
            f"streaming: fragments = {streaming.fragments} and delay_steps = {streaming.delay_steps}, and an interval "
            f"of {interval_epochs} epochs has {least} steps a fragment; give fewer, or a longer interval"
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Costs:
    """What virtual time and energy are computed from; without a profile neither is computed.

    Parameters
    ----------
    model_profile : ModelProfile, optional
        The model's layers, as `profile_module` reads them; by default that of the grid, as `--training-flops` of
        `socflower run` gives it one.
    pricing : Pricing
        The cost of the clients' arithmetic: by default FP32 on each device's default processor; `Int8Pricing()` or
        `MixedPricing(rule=…)` for clients that train this way. With mixed precision and a profile, clients split
        batches by the catalogue's throughputs instead of measured ones.
    clock : VirtualClock, optional
        By default that of the grid, if it has one (the `local` engine's has), so that the same app runs on every
        engine.
    """

    model_profile: ModelProfile | None = None
    pricing: Pricing = FP32
    clock: VirtualClock | None = None

    def __post_init__(self) -> None:
        require_type(
            "Costs",
            (ModelProfile, type(None)),
            "a ModelProfile, as of profile_module(model, …)",
            model_profile=self.model_profile,
        )
        for key, value, method, expected in (
            ("pricing", self.pricing, "step_cost", "a Pricing, such as Int8Pricing()"),
            ("clock", self.clock, "now_s", "a VirtualClock, or None for that of the grid"),
        ):
            if isinstance(value, type) or not (
                hasattr(value, method) or (key == "clock" and value is None)
            ):
                require_type("Costs", (), expected, **{key: value})
        if self.clock is not None and self.model_profile is None:
            raise ConfigError(
                "Costs: a clock needs a model_profile to price; make one with profile_module(model, …)"
            )


@checked
class ExchangeSettings:
    """How groups exchange gradients, on every engine.

    Parameters
    ----------
    uplink_turns : bool or "auto"
        Whether communication groups take turns (F6). "auto" chooses for every new plan what the clock predicts to take
        less time, at the devices' nominal speeds (F7); without a clock or a profile groups take turns.
    overlap_buckets : int
        Gradient buckets that overlap with the backward pass (F7).
    exchange : "ring" or "server"
        With whom members exchange gradients: in a ring, or with the first member as the parameter server of the others.
    compression : "none", "fp16", "int8", "int8-stochastic", "int4", "dgc", "hipress" or "powersgd"
        What members exchange instead of FP32 gradients: halves, eight bits (with error feedback or rounded at random),
        four bits, the largest values (deep gradient compression; HiPress where they are predicted to be faster), or
        factors of low rank. Each bucket is compressed by itself. Options follow: "powersgd rank=4", "dgc ratio=0.01".
    leaders : "auto", "ring", "star" or "tree"
        How leaders exchange models (F8): over the hub, in a ring among themselves, in which the hub gets their mean, or
        by board and server. "auto" chooses for every new plan what the clock predicts to take less time, without a
        clock or a profile the ring. Real machines have a ring or a tree where nodes have a ring address, with "auto" if
        the grid is a `GroupGrid`. A strategy that needs each group's model, or is around this one, has the star.
    leader_compression : "none", "fp16", "int8" or "int4"
        What leaders in a ring or a tree exchange: their models, or the models' changes since the last synchronisation
        in halves, or with error feedback in eight bits, or in a ring in four. The feedback stays with the
        group, whoever leads it. BatchNorm's statistics are exchanged as they are.
    fusion : "buckets" or "per-tensor"
        What costs a message in virtual time (F8a): each of the `overlap_buckets`, and the model of a leader, as rings
        of real machines send them, or each tensor, as SoCFlow+ seems to have sent them.
    wire : "float32" or "int8"
        How models travel between hub and leaders, who then have the star: "int8" is int8 weights with a scale for each
        tensor. What that leaves out of the mean is added to the next one.
    """

    uplink_turns: UplinkTurns = AUTO
    overlap_buckets: OverlapBuckets = 1
    exchange: GradientExchangeKind = coding_bytes.RING
    compression: Compression = NONE
    leaders: Leaders = AUTO
    leader_compression: LeaderCompression = NONE
    fusion: Fusion = BUCKETS
    wire: Wire = WIRES[0]

    def check(self) -> None:
        """Refuse options that a compression does not have, and a compression that an exchange does not have."""
        GradientExchange(kind=self.exchange, coding=gradient_coding(self.compression))
        if fault := compression_fault(self.leaders, self.leader_compression):
            raise ConfigError(fault)


def interval_costs(
    schedule: TrainingSchedule, exchange: ExchangeSettings, *, hub_decides: bool, **others: Any
) -> IntervalCosts:
    """Return what the intervals of a schedule cost with these exchanges; `others` are the fields besides.

    `hub_decides`: the hub makes the next model, not the leaders.
    """
    return IntervalCosts(
        num_samples=schedule.num_samples,
        batch_size=schedule.batch_size,
        reshuffle=schedule.reshuffle,
        uplink_turns=False,
        overlap_buckets=exchange.overlap_buckets,
        fusion=exchange.fusion,
        models=ModelExchange(
            coding=gradient_coding(exchange.leader_compression),
            hub_decides=hub_decides,
            in_int8=exchange.wire == INT8_WIRE,
        ),
        **others,
    )
