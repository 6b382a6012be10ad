"""The presets: what each strategy fixes of `SoCFlow`'s settings, for its class and for scenarios.

A preset is data that planners read without torch or Flower. Its class takes all that it fixes from here.
"""

from dataclasses import dataclass, replace

from socflower.errors import ConfigError
from socflower.hierarchy import GroupPlan, Quorum
from socflower.hierarchy.exchange.coding_bytes import RING, SERVER, PowerSGD, SelectedBuckets
from socflower.hierarchy.exchange.models import TREE
from socflower.strategies.settings import ExchangeSettings, Grouping, TrainingSchedule

_UNASKED = ExchangeSettings()

PIPELINE_STRATEGY, GRID_STRATEGY = "hybrid-pipeline", "2d"
SPLIT_STRATEGIES = ("split-replay", "pipelined", "joint-dnn", "split", "splitfed", "edge-only")
"""Strategies that train with a cloud; all except the first are baselines."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StrategyKind:
    """What a strategy is; those without groups are FedAvg, pipelines, and training with a cloud."""

    # For the description of the key; the page of strategies with a cloud describes those.
    about: str = ""
    uses_cloud: bool = False
    is_pipeline: bool = False
    # Whether each SoC is a group of its own, unless `[strategy] groups` is a number.
    is_alone: bool = False
    # Its outer step, a function of `strategies/outer_momentum.py`, and its optimiser, unless others are given.
    outer: str = ""
    optimizer: str = "sgd"
    # Whether its first epochs are those of one group of all SoCs.
    is_synchronous_first: bool = False
    # Whether it synchronises fragments of the model.
    is_streaming: bool = False
    # Whether each SoC passes over its own data, and models are summed in a tree.
    has_local_epochs: bool = False
    # Of pipelines: whether they are those of groups, with a device a stage.
    is_grid: bool = False
    # None if the settings of these names decide.
    num_groups: int | None = None
    interval_epochs: float | None = None

    @property
    def has_groups(self) -> bool:
        """Whether it trains with groups, and so has a plan of them."""
        return isinstance(self, GroupStrategy)

    @property
    def waits_for_all(self) -> bool:
        """Whether its rounds need all groups, of one plan or of all servers."""
        return self.is_synchronous_first or self.is_streaming or self.has_local_epochs

    def exchanged(self, asked: ExchangeSettings) -> ExchangeSettings:
        """Return how groups exchange; `ConfigError` for another way than the strategy's own."""
        return asked

    def scheduled(self, asked: TrainingSchedule, local_epochs: int = 1) -> TrainingSchedule:
        """Return the schedule with the strategy's own intervals; `local_epochs` is a round of those that have them."""
        return replace(
            asked,
            interval_epochs=self.sync_interval_epochs(asked.interval_epochs, local_epochs),
            # With one group all synchronisations are among all servers.
            server_interval=1 if self.num_groups else asked.server_interval,
            reshuffle=asked.reshuffle and not self.has_local_epochs,
        )

    def sync_interval_epochs(self, asked: float | str, local_epochs: int = 1) -> float | str:
        """Return the epochs between synchronisations.

        One group has nothing to synchronise, nor has a pipeline: its rounds only decide when it is evaluated. It is
        evaluated as often as several groups are, so that times to an accuracy are comparable.
        """
        if self.has_local_epochs:
            return float(local_epochs)
        if self.interval_epochs is None:
            return asked
        return self.interval_epochs if isinstance(asked, str) else min(self.interval_epochs, asked)

    @property
    def unread_keys(self) -> frozenset[str]:
        """The keys by which strategies differ, and that this one does not read."""
        own_epochs = {"local_epochs"} if self.uses_cloud or self.is_pipeline else set()
        return frozenset(
            {
                *own_epochs,
                "doubling_epochs",
                "preemption",
                "dispatch",
                "use_spares",
                # Rings across the pipelines of a grid sum gradients in each mini-batch.
                "sync_interval_epochs" if self.is_grid else "groups",
            }
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupStrategy(StrategyKind):
    """A strategy with groups: a class that is made as `SoCFlow` is, by keyword arguments.

    `num_socs`, `exchange`, `compression` and `leaders` are None if the settings of these names decide. With
    `needs_each_model` it has an average of its own, so that leaders cannot send the hub their mean.
    """

    # The class is imported when it trains, since every command reads this module.
    target: str = "socflower.strategies.socflow:SoCFlow"
    num_socs: int | None = None
    needs_each_model: bool = False
    exchange: str | None = None
    compression: str | None = None
    leaders: str | None = None

    @property
    def unread_keys(self) -> frozenset[str]:
        """The keys by which strategies differ, and that this one does not read."""
        unread = {
            "groups": self.num_groups is not None or self.trains_single_socs,
            "socs": self.num_socs is not None,
            "exchange": self.exchange is not None,
            "local_epochs": not self.has_local_epochs,
            "sync_interval_epochs": self.has_local_epochs,
            # With one SoC in each group, both ways are the same.
            "preemption": self.num_groups is not None or self.is_alone,
            "dispatch": self.has_local_epochs,
            "use_spares": self.has_local_epochs,
            "doubling_epochs": self.has_local_epochs
            or self.is_streaming
            or self.interval_epochs is not None,
        }
        return frozenset(key for key, is_unread in unread.items() if is_unread)

    @property
    def trains_single_socs(self) -> bool:
        """Whether a group cannot have several SoCs."""
        return self.has_local_epochs or self.is_streaming

    def groups(self, asked: int | str, num_socs: int) -> int | str:
        """Return the number of groups of so many SoCs; `asked` is a number or "auto"."""
        if self.num_groups is None:
            return num_socs if self.is_alone and asked == "auto" else asked
        return self.num_groups

    def grouping(self, asked: int | Grouping | None, num_socs: int) -> Grouping:
        """Return the groups to plan in a cluster of so many SoCs; None asks for those of the strategy."""
        if asked is None:
            asked = num_socs if self.is_alone else 1
        counts = asked if isinstance(asked, Grouping) else Grouping(num_groups=asked)
        return counts if counts.num_socs else replace(counts, num_socs=self.num_socs)

    def never_exchanges_gradients(self, asked: int | str) -> bool:
        """Whether all groups have one SoC, from the first epoch on; `asked` as in `groups`."""
        return self.is_alone and asked == "auto" and not self.is_synchronous_first

    def exchanged(self, asked: ExchangeSettings) -> ExchangeSettings:
        """Return how groups exchange; `ConfigError` for another way than the strategy's own."""
        fixed = {}
        for key in ("exchange", "compression", "leaders"):
            value, own = getattr(asked, key), getattr(self, key)
            # Options may follow the name of a compression.
            if own in (None, value.partition(" ")[0]):
                continue
            if value != getattr(_UNASKED, key):
                raise ConfigError(f"{key} = {value!r}: this strategy has {own!r}; leave it out")
            fixed[key] = own
        return replace(asked, **fixed)

    def require_fitting(self, name: str, plan: GroupPlan, quorum: Quorum) -> None:
        """Raise `ConfigError` for groups of other sizes than the strategy's, and for late ones that it waits for."""
        if self.waits_for_all and quorum != Quorum():
            raise ConfigError(
                f"{name}: quorum = {quorum}, and its rounds wait for all; leave it out"
            )
        groups, socs = len(plan.groups), len(plan.participants)
        are_of_one = groups == socs or not self.trains_single_socs
        if not (are_of_one and self.num_groups in (None, groups) and self.num_socs in (None, socs)):
            raise ConfigError(
                f"{name}: groups = {groups}, of {socs} SoCs in all, and it has groups of its own; leave groups out"
            )


def _one_group(
    about: str, preset: str, *, exchange: str = RING, compression: str | None = None
) -> GroupStrategy:
    return GroupStrategy(
        about=about,
        target=f"socflower.strategies.baselines:{preset}",
        num_groups=1,
        interval_epochs=1.0,
        exchange=exchange,
        compression=compression,
    )


STRATEGIES: dict[str, StrategyKind] = {
    "socflow": GroupStrategy(),
    "ring": _one_group("all SoCs in one ring", "RingAllReduce"),
    "ps": _one_group("all SoCs, the first as parameter server", "ParameterServer", exchange=SERVER),
    "hipress": _one_group(
        "`ring` with deep gradient compression where it is faster",
        "HiPress",
        compression=SelectedBuckets.name,
    ),
    "powersgd": _one_group(
        "`ring` with gradients of low rank", "PowerSGDAllReduce", compression=PowerSGD.name
    ),
    "fedavg": StrategyKind(about="all SoCs in every round, each on its own data"),
    "sgd": GroupStrategy(
        about="SoC 0 alone",
        target="socflower.strategies.baselines:SingleDevice",
        num_groups=1,
        num_socs=1,
        interval_epochs=1.0,
    ),
    "tree-fedavg": GroupStrategy(
        about="`fedavg` whose models are summed in a tree over boards and servers",
        target="socflower.strategies.baselines:TreeFedAvg",
        is_alone=True,
        has_local_epochs=True,
        leaders=TREE,
    ),
    "local-sgd": GroupStrategy(
        about="each SoC alone between synchronisations, with an optimiser that it keeps",
        target="socflower.strategies.local_sgd:LocalSGD",
        is_alone=True,
    ),
    "post-local-sgd": GroupStrategy(
        about="synchronous in one group at first, then `local-sgd`",
        target="socflower.strategies.local_sgd:PostLocalSGD",
        is_alone=True,
        is_synchronous_first=True,
    ),
    "diloco": GroupStrategy(
        about="the same with AdamW inside, and an outer step with Nesterov momentum",
        target="socflower.strategies.local_sgd:DiLoCo",
        is_alone=True,
        outer="nesterov",
        optimizer="adamw",
    ),
    "streaming-diloco": GroupStrategy(
        about="DiLoCo that synchronises a fragment of the model at a time, beside the training",
        target="socflower.strategies.local_sgd:StreamingDiLoCo",
        is_alone=True,
        is_streaming=True,
        outer="nesterov",
        optimizer="adamw",
    ),
    "muloco": GroupStrategy(
        about="DiLoCo with Muon inside",
        target="socflower.strategies.local_sgd:DiLoCo",
        is_alone=True,
        outer="nesterov",
        optimizer="muon",
    ),
    PIPELINE_STRATEGY: StrategyKind(
        about="[a pipeline](#pipeline) of unequal devices", is_pipeline=True, interval_epochs=1.0
    ),
    GRID_STRATEGY: StrategyKind(
        about="a pipeline in each group, a ring across groups",
        is_pipeline=True,
        is_grid=True,
        interval_epochs=1.0,
    ),
    **dict.fromkeys(SPLIT_STRATEGIES, StrategyKind(uses_cloud=True)),
}
"""Each strategy by its name in `[strategy]`. A new one with groups is an entry here, which may name a class."""

CLUSTER_STRATEGIES = ("socflow", "ring", "fedavg", "sgd")
"""What `socflower compare` runs by default."""


def family_of(name: str) -> tuple[str, ...]:
    """Return the strategies that can run the workload of a strategy: those with a cloud, or those without."""
    return tuple(
        other
        for other, kind in STRATEGIES.items()
        if kind.uses_cloud == STRATEGIES[name].uses_cloud
    )


def group_strategy(name: str) -> GroupStrategy:
    """Return a strategy with groups; `ConfigError` for a strategy without groups."""
    kind = STRATEGIES[name]
    others = [other for other in family_of(name) if isinstance(STRATEGIES[other], GroupStrategy)]
    instead = f"; use one of {', '.join(map(repr, others))}" if others else ""
    if not isinstance(kind, GroupStrategy):
        raise ConfigError(f"plan: {name} has no groups to plan{instead}")
    return kind
