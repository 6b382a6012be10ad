"""A scenario file: its tables together, and what follows from them."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Self

from pydantic import Field

from socflower.cluster.cluster_file import ClusterFile
from socflower.errors import ConfigError, SocflowerError
from socflower.hierarchy.exchange.models import AUTO, STAR
from socflower.peers.ring.settings import RingSettings
from socflower.scenario.schema.config import (
    CompareConfig,
    DataConfig,
    EventConfig,
    ModelConfig,
    PrecisionConfig,
    StrategyConfig,
    TrainConfig,
    own_settings_by_table,
)
from socflower.scenario.schema.key_rules import shown
from socflower.scenario.schema.pipeline import PipelineConfig
from socflower.scenario.schema.rules_between_tables import require_fitting_tables
from socflower.scenario.schema.split import (
    EdgeCloudConfig,
)
from socflower.scenario.schema.thermal import BackgroundLoadConfig, ThermalConfig
from socflower.strategies.presets import (
    CLUSTER_STRATEGIES,
    STRATEGIES,
    GroupStrategy,
    StrategyKind,
    family_of,
)
from socflower.strategies.settings import ExchangeSettings, TrainingSchedule
from socflower.wire.message_keys import WIRES


class ScenarioFile(ClusterFile):
    """A scenario file; the tables of its cluster are those of a cluster file."""

    seed: int = Field(
        1,
        ge=0,
        le=2**32 - 1,
        description=(
            "of the initial weights, the partition, the order of the data, and links to a cloud"
        ),
    )
    model: ModelConfig = ModelConfig()
    data: DataConfig = DataConfig()
    train: TrainConfig = TrainConfig()
    precision: PrecisionConfig = PrecisionConfig()
    strategy: StrategyConfig = StrategyConfig()
    ring: RingSettings = RingSettings()
    compare: CompareConfig = CompareConfig()
    events: tuple[EventConfig, ...] = Field((), alias="event")
    # Without this table there is no heat.
    thermal: ThermalConfig | None = None
    # Without this table there are no other users.
    background_load: BackgroundLoadConfig | None = None
    # Without this table there is no cloud.
    edgecloud: EdgeCloudConfig | None = None
    # Without this table a pipeline has its defaults.
    pipeline: PipelineConfig | None = None
    expect: dict[str, int | float] = Field({})

    def check(self) -> None:
        """Refuse tables that do not go together."""
        ClusterFile.check(self)
        self._compare_what_fits()
        require_fitting_tables(self)

    def _compare_what_fits(self) -> None:
        """Replace the strategies that are compared by default with those of this scenario's family."""
        if self.compare.strategies != CLUSTER_STRATEGIES or not (
            self.kind.uses_cloud or self.kind.is_pipeline
        ):
            return
        fitting: tuple[str, ...] = (self.strategy.name, *CLUSTER_STRATEGIES[1:])
        if self.kind.uses_cloud:
            fitting = tuple(name for name in family_of(self.strategy.name) if name != "splitfed")
        # The table is frozen; this is the only default that depends on another table.
        object.__setattr__(self, "compare", self.compare.replaced(strategies=fitting))

    def at(self, table: str, key: str) -> str:
        """Return a key with its place and value: "[train] epochs = 3"."""
        if (table, key) == ("train", "optimizer"):
            # Where it is left out, it is the strategy's.
            return f"[train] optimizer = {self.optimizer!r}"
        values = self.split if table == "edgecloud" else getattr(self, table)
        return f"[{table}] {shown(values, key)}"

    @property
    def _name(self) -> str:
        return self.at("strategy", "name")

    def under(self, strategy: str, own: Mapping[str, Any] | None = None) -> Self:
        """Return the scenario under another strategy, with that strategy's own values of `[compare]`, or with `own`."""
        if own is None:
            own = self.compare.train.get(strategy, {})
        of_train, of_strategy = own_settings_by_table(own)
        if strategy != self.strategy.name and "local_epochs" in STRATEGIES[strategy].unread_keys:
            of_train = {"local_epochs": 1, **of_train}
        # Other strategies refuse the table of pipelines.
        pipeline = self.pipeline if STRATEGIES[strategy].is_pipeline else None
        if strategy != self.strategy.name and STRATEGIES[strategy].optimizer != "sgd":
            # It is published with this optimiser.
            of_train = {"optimizer": None, "momentum": None, **of_train}
        return self.replaced(
            strategy=self.strategy.under(strategy, **of_strategy),
            pipeline=pipeline,
            train=self.train.replaced(**of_train),
        )

    @property
    def momentum(self) -> float:
        """The momentum of `[train]`, by default 0.9; 0 for updates without momentum."""
        if self.train.momentum is not None:
            return self.train.momentum
        # In a split training momentum is that of the cloud's half, which trains in FP32.
        without = self.precision.has_int8_weights and not self.kind.uses_cloud
        return 0.0 if without or self.optimizer != "sgd" else 0.9

    @property
    def optimizer(self) -> str:
        """The optimiser of `[train]`, by default that of the strategy."""
        return self.train.optimizer or self.kind.optimizer

    @property
    def synchronous_epochs(self) -> int:
        """The epochs of one group of all SoCs before those of groups; 0 for strategies that begin with groups."""
        if not self.kind.is_synchronous_first:
            return 0
        return self.strategy.post_local_epochs or self.train.epochs // 2

    @property
    def kind(self) -> StrategyKind:
        """What the strategy is."""
        return self.strategy.kind

    @property
    def interval_epochs(self) -> float | str:
        """Epochs between synchronisations of a strategy with groups."""
        return self.kind.sync_interval_epochs(
            self.strategy.sync_interval_epochs, self.train.local_epochs
        )

    def schedule(self, num_samples: int) -> TrainingSchedule:
        """Return what groups or a pipeline train on so many samples, and how often groups synchronise."""
        train, strategy = self.train, self.strategy
        asked = TrainingSchedule(
            num_samples=num_samples,
            batch_size=train.batch_size,
            num_epochs=train.epochs,
            interval_epochs=strategy.sync_interval_epochs,
            doubling_epochs=strategy.doubling_epochs,
            server_interval=strategy.server_interval,
            reshuffle=strategy.reshuffle,
            seed=self.seed,
        )
        return self.kind.scheduled(asked, train.local_epochs)

    @property
    def exchange(self) -> ExchangeSettings:
        """How groups exchange, as strategy and file decide: in a star if the hub needs their models."""
        asked, wire = self.strategy.exchanges(), self.precision.wire
        needs_star = self.hub_needs_models or wire != WIRES[0]
        leaders = STAR if asked.leaders == AUTO and needs_star else asked.leaders
        return replace(asked, leaders=leaders, wire=wire)

    @property
    def hub_needs_models(self) -> str:
        """The key of the file that needs each group's model at the hub; empty if no key does."""
        outer, kind = self.strategy.outer_step, self.kind
        if isinstance(kind, GroupStrategy) and kind.needs_each_model:
            return self._name
        if self.strategy.quorum < 1:
            return self.at("strategy", "quorum")
        return (
            f"[strategy.outer] name = {outer.name!r}"
            if outer is not None and not outer.takes_mean
            else ""
        )

    @property
    def split(self) -> EdgeCloudConfig:
        """`[edgecloud]`, or its defaults if the scenario has no such table."""
        return self.edgecloud or EdgeCloudConfig()


class Scenario(ScenarioFile):
    """A whole scenario."""

    name: str = "scenario"
    question: str = ""
    # The file's folder, from which factories are imported; None without factories.
    folder: str | None = None
    # The SHA-256 of the factories' modules.
    code: str | None = None

    def mistake(
        self, table: str, key: str, why: str, kind: type[SocflowerError] = ConfigError
    ) -> SocflowerError:
        """Return the error about a key of this scenario: its place, its value, and why it cannot be."""
        return kind(f"{self.name} {self.at(table, key)}: {why}")

    @property
    def factories(self) -> tuple[str, ...]:
        """The user's functions that it names."""
        return tuple(each.factory for each in (self.model, self.data) if each.factory)
