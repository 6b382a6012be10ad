"""The settings of SoCFlow, by what they are about; each is a frozen value that a caller may keep and reuse."""

from collections.abc import Mapping
from dataclasses import dataclass

from socflower.cluster import FP32, ModelProfile, Pricing, VirtualClock
from socflower.errors import ConfigError, require_type
from socflower.hierarchy.collectives import BUCKETS, FUSIONS
from socflower.hierarchy.leader_topology import COMPRESSIONS, KINDS, NONE, compression_fault
from socflower.hierarchy.uplink_turns import AUTO
from socflower.plain_numbers import plain_numbers

_COUNT = "a whole number, 1 or more"


@plain_numbers
@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingSchedule:
    """How much is trained, in which order, and how often groups synchronise.

    Parameters
    ----------
    num_samples, batch_size, num_epochs : int
        Size of the training set, batch of a group, and passes over the data.
    interval_epochs : float or "decay"
        Epochs between synchronisations, or the paper's schedule 0.25, 0.5, 1, 2 (F3).
    server_interval : int
        Every how many synchronisations all groups take part, where the cluster is a site of several servers; at the
        others those of each server average their models. All take part in the last one.
    reshuffle : bool
        Redistribute all data to the groups at the synchronisations that end an epoch; off where data must not leave
        their node.
    seed : int
        Seed of the order of the data.
    """

    num_samples: int
    batch_size: int
    num_epochs: int
    interval_epochs: float | str = "decay"
    server_interval: int = 1
    reshuffle: bool = True
    seed: int = 1

    def __post_init__(self) -> None:
        for key in ("num_samples", "batch_size", "num_epochs", "server_interval"):
            value = getattr(self, key)
            require_type("TrainingSchedule", (int,), _COUNT, **{key: value})
            if value < 1:
                raise ConfigError(f"TrainingSchedule: {key} = {value} must be {_COUNT}")
        require_type(
            "TrainingSchedule",
            (int, float, str),
            'a number above 0, or "decay"',
            interval_epochs=self.interval_epochs,
        )
        require_type("TrainingSchedule", (bool,), "True or False", reshuffle=self.reshuffle)
        require_type("TrainingSchedule", (int,), "a whole number", seed=self.seed)


@plain_numbers
@dataclass(frozen=True, kw_only=True, slots=True)
class Grouping:
    """How many groups are planned, and of how many of the cluster's slots; `num_socs` None is all of them."""

    num_groups: int = 1
    num_socs: int | None = None

    def __post_init__(self) -> None:
        require_type("Grouping", (int,), _COUNT, num_groups=self.num_groups)
        require_type(
            "Grouping", (int, type(None)), f"{_COUNT}, or None for all", num_socs=self.num_socs
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Costs:
    """What virtual time and energy are made of; without a profile, none are kept.

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


@plain_numbers
@dataclass(frozen=True, kw_only=True, slots=True)
class ExchangeSettings:
    """How groups exchange gradients, on every engine.

    Parameters
    ----------
    uplink_turns : bool or "auto"
        Whether communication groups take turns (F6). "auto" chooses for every new plan what the clock predicts to take
        less time, at the devices' nominal speeds (F7); without a clock or a profile groups take turns.
    overlap_buckets : int
        Gradient buckets that overlap with the backward pass (F7).
    leaders : "auto", "ring", "star" or "tree"
        How leaders exchange models (F8): over the hub, in a ring among themselves, in which the hub gets their mean, or
        by board and server. "auto" chooses for every new plan what the clock predicts to take less time, without a
        clock or a profile the ring. Real machines have a ring or a tree where nodes have a ring address, with "auto" if
        the grid is a `GroupGrid`. A strategy that needs each group's model, or is around this one, has the star.
    leader_compression : "none", "fp16" or "int8"
        What leaders in a ring or a tree exchange: their models, or the models' changes since the last synchronisation
        in halves, or in eight bits with error feedback, which stays with the group whoever leads it. BatchNorm's
        statistics are exchanged as they are.
    fusion : "buckets" or "per-tensor"
        What costs a message in virtual time (F8a): each of the `overlap_buckets`, and the model of a leader, as rings
        of real machines send them, or each tensor, as SoCFlow+ seems to have sent them.
    """

    uplink_turns: bool | str = AUTO
    overlap_buckets: int = 1
    leaders: str = AUTO
    leader_compression: str = NONE
    fusion: str = BUCKETS

    def __post_init__(self) -> None:
        if not isinstance(self.uplink_turns, bool) and self.uplink_turns != AUTO:
            raise ConfigError(
                f"uplink_turns = {self.uplink_turns!r} is unknown; use true, false or {AUTO!r}"
            )
        require_type("ExchangeSettings", (int,), _COUNT, overlap_buckets=self.overlap_buckets)
        if self.overlap_buckets < 1:
            raise ConfigError(
                f"ExchangeSettings: overlap_buckets = {self.overlap_buckets} must be {_COUNT}"
            )
        require_type(
            "ExchangeSettings",
            (str,),
            "a text",
            leaders=self.leaders,
            fusion=self.fusion,
            leader_compression=self.leader_compression,
        )
        if self.fusion not in FUSIONS:
            raise ConfigError(
                f"ExchangeSettings: fusion = {self.fusion!r} is unknown; use "
                f"{' or '.join(map(repr, FUSIONS))}"
            )
        if self.leaders not in (AUTO, *KINDS):
            raise ConfigError(
                f"ExchangeSettings: leaders = {self.leaders!r} is unknown; use "
                f"{', '.join(map(repr, (AUTO, *KINDS)))}"
            )
        if self.leader_compression not in COMPRESSIONS:
            raise ConfigError(
                f"ExchangeSettings: leader_compression = {self.leader_compression!r} is unknown; use "
                f"{', '.join(map(repr, COMPRESSIONS))}"
            )
        if fault := compression_fault(self.leaders, self.leader_compression):
            raise ConfigError(f"ExchangeSettings: {fault}")


_MOVED = {
    **dict.fromkeys(
        ("num_samples", "batch_size", "num_epochs", "interval_epochs", "reshuffle", "seed"),
        "schedule=TrainingSchedule({key}=…)",
    ),
    **dict.fromkeys(("model_profile", "pricing", "clock"), "costs=Costs({key}=…)"),
    **dict.fromkeys(("uplink_turns", "overlap_buckets"), "exchange=ExchangeSettings({key}=…)"),
    "num_socs": "groups=Grouping(num_groups=…, num_socs=…)",
    "num_groups": "groups, a number",
    "plan": "groups, which may be a plan",
}


def refuse_unknown(strategy: str, options: Mapping[str, object]) -> None:
    """Raise `ConfigError` for an option that is part of a settings value now, naming it; `TypeError` for any other."""
    for key in options:
        if key in _MOVED:
            raise ConfigError(f"{strategy}: {key} is now {_MOVED[key].format(key=key)}")
        raise TypeError(f"{strategy}: unexpected option {key!r}")
