"""The strategies that a scenario can name, with the properties that planners and engines need."""

from dataclasses import dataclass

from socflower.errors import ConfigError
from socflower.scenario.schema.pipeline import GRID_STRATEGY, PIPELINE_STRATEGY
from socflower.scenario.schema.split import SPLIT_STRATEGIES


@dataclass(frozen=True, kw_only=True, slots=True)
class StrategyKind:
    """What a name in `[strategy]` stands for; without groups: FedAvg, and training with a cloud."""

    # For the description of the key; the page of strategies with a cloud describes those.
    about: str = ""
    uses_cloud: bool = False
    is_pipeline: bool = False
    # Whether each SoC is a group of its own, unless `[strategy] groups` is a number.
    is_alone: bool = False
    # The name of its outer step, and its optimiser, unless the scenario gives others.
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

    `num_groups`, `num_socs`, `interval_epochs`, `exchange` and `compression` are None if `[strategy]` decides, by its
    keys `groups`, `socs`, `sync_interval_epochs`, `exchange` and `compression`. With `needs_each_model` it has an
    average of its own, so that leaders cannot send the hub their mean.
    """

    # The class is imported when it trains, since every command reads this module.
    target: str = "socflower.strategies.socflow:SoCFlow"
    num_groups: int | None = None
    num_socs: int | None = None
    interval_epochs: float | None = None
    needs_each_model: bool = False
    exchange: str | None = None
    compression: str | None = None

    @property
    def unread_keys(self) -> frozenset[str]:
        """The keys by which strategies differ, and that this one does not read."""
        unread = {
            "groups": self.num_groups is not None or self.has_local_epochs or self.is_streaming,
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

    def groups(self, asked: int | str, num_socs: int) -> int | str:
        """Return the number of groups of so many SoCs; `asked` is the value in `[strategy]`."""
        if self.num_groups is None:
            return num_socs if self.is_alone and asked == "auto" else asked
        return self.num_groups

    def never_exchanges_gradients(self, asked: int | str) -> bool:
        """Whether all groups have one SoC, from the first epoch on; `asked` as in `groups`."""
        return self.is_alone and asked == "auto" and not self.is_synchronous_first

    def exchange_of(self, asked: str, compression: str) -> tuple[str, str]:
        """Return with whom members exchange gradients, and in which coding."""
        own = self.compression
        if own is None or compression.partition(" ")[0] == own:
            own = compression
        return self.exchange or asked, own

    def sync_interval_epochs(self, asked: float | str) -> float | str:
        """Return the epochs between synchronisations; `asked` is the value in `[strategy]`.

        One group has nothing to synchronise: its rounds only decide when it is evaluated. It is evaluated as often as
        several groups are, so that times to an accuracy are comparable.
        """
        if self.interval_epochs is None:
            return asked
        return self.interval_epochs if isinstance(asked, str) else min(self.interval_epochs, asked)

    def server_interval(self, asked: int) -> int:
        """Return after how many synchronisations one is among all servers; with one group all are."""
        return asked if self.num_groups is None else 1


def _one_group(
    about: str, *, exchange: str = "ring", compression: str | None = None
) -> GroupStrategy:
    return GroupStrategy(
        about=about,
        num_groups=1,
        interval_epochs=1.0,
        exchange=exchange,
        compression=compression,
    )


STRATEGIES: dict[str, StrategyKind] = {
    "socflow": GroupStrategy(),
    "ring": _one_group("all SoCs in one ring"),
    "ps": _one_group("all SoCs, the first as parameter server", exchange="server"),
    "hipress": _one_group(
        "`ring` with deep gradient compression where it is faster", compression="hipress"
    ),
    "powersgd": _one_group("`ring` with gradients of low rank", compression="powersgd"),
    "fedavg": StrategyKind(about="all SoCs in every round, each on its own data"),
    "sgd": GroupStrategy(about="SoC 0 alone", num_groups=1, num_socs=1, interval_epochs=1.0),
    "tree-fedavg": GroupStrategy(
        about="`fedavg` whose models are summed in a tree over boards and servers",
        target="socflower.strategies.baselines:TreeFedAvg",
        is_alone=True,
        has_local_epochs=True,
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
        about="[a pipeline](#pipeline) of unequal devices", is_pipeline=True
    ),
    GRID_STRATEGY: StrategyKind(
        about="a pipeline in each group, a ring across groups", is_pipeline=True, is_grid=True
    ),
    **dict.fromkeys(SPLIT_STRATEGIES, StrategyKind(uses_cloud=True)),
}
"""Each strategy by its name in `[strategy]`. A new strategy with groups is a class and an entry here."""

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
