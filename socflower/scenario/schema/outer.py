"""The table `[strategy.outer]`: which strategy makes the next model of the groups' models: Flower's, or an SGD step."""

from typing import Annotated, Any

from pydantic import Field

from socflower.errors import ConfigError
from socflower.field_rules import OneOf
from socflower.scenario.schema.key_rules import require_reader
from socflower.toml_file import Table

OUTER_STRATEGIES: dict[str, tuple[str, tuple[str, ...]]] = {
    "fedavg": ("FedAvg", ()),
    "fedavgm": ("FedAvgM", ("server_learning_rate", "server_momentum")),
    "fedadam": ("FedAdam", ("eta", "beta_1", "beta_2", "tau")),
    "fedyogi": ("FedYogi", ("eta", "beta_1", "beta_2", "tau")),
    "fedadagrad": ("FedAdagrad", ("eta", "tau")),
    "fedprox": ("FedProx", ("proximal_mu",)),
    "fedmedian": ("FedMedian", ()),
    "fedtrimmedavg": ("FedTrimmedAvg", ("beta",)),
    "krum": ("Krum", ("num_malicious_nodes",)),
    "multikrum": ("MultiKrum", ("num_malicious_nodes", "num_nodes_to_select")),
    "bulyan": ("Bulyan", ("num_malicious_nodes",)),
    "qfedavg": ("QFedAvg", ("client_learning_rate", "q")),
    "sgd": ("socflower.strategies.outer_sgd:OuterSGD", ("learning_rate",)),
    "momentum": ("socflower.strategies.outer_sgd:OuterSGD", ("learning_rate", "momentum")),
    "nesterov": ("socflower.strategies.outer_sgd:nesterov", ("learning_rate", "momentum")),
}
"""Each by its name: the class of `flwr.serverapp.strategy` or another function, and the keys that it takes."""

_READERS = {
    key: tuple(name for name, (_, keys) in OUTER_STRATEGIES.items() if key in keys)
    for _, keys in OUTER_STRATEGIES.values()
    for key in keys
}
OUTER_SGD = ("sgd", "momentum", "nesterov")
"""Steps of SGD, which may step on a part of the model."""
_OF_MEANS = ("fedavg", "fedavgm", "fedadam", "fedyogi", "fedadagrad", "fedprox", *OUTER_SGD)
_COUNTS_GROUPS = ("fedtrimmedavg", "krum", "multikrum", "bulyan")


class OuterConfig(Table):
    """`[strategy.outer]`: the strategy that makes the next model of the groups' models, with its own defaults."""

    name: Annotated[str, OneOf(OUTER_STRATEGIES)] = Field(
        description=(
            "a class of Flower's in small letters, or a step of SGD on the mean change of the models, without or with "
            "`momentum` (SlowMo) or Nesterov's (DiLoCo)"
        )
    )
    learning_rate: float | None = Field(
        None, gt=0, description="of `sgd`, `momentum`, by default 1; of `nesterov`, by default 0.7"
    )
    momentum: float | None = Field(
        None,
        ge=0,
        lt=1,
        description="of `momentum`, which requires it; of `nesterov`, by default 0.9",
    )
    eta: float | None = Field(None, gt=0, description="of `fedadam`, `fedyogi`, `fedadagrad`")
    beta_1: float | None = Field(None, ge=0, lt=1, description="of `fedadam`, `fedyogi`")
    beta_2: float | None = Field(None, ge=0, lt=1, description="of `fedadam`, `fedyogi`")
    tau: float | None = Field(None, gt=0, description="of `fedadam`, `fedyogi`, `fedadagrad`")
    server_learning_rate: float | None = Field(None, gt=0, description="of `fedavgm`")
    server_momentum: float | None = Field(None, ge=0, lt=1, description="of `fedavgm`")
    proximal_mu: float | None = Field(None, ge=0, description="of `fedprox`")
    beta: float | None = Field(None, ge=0, lt=0.5, description="of `fedtrimmedavg`")
    num_malicious_nodes: int | None = Field(
        None, ge=0, description="groups, of `krum`, `multikrum`, `bulyan`"
    )
    num_nodes_to_select: int | None = Field(None, gt=0, description="groups, of `multikrum`")
    client_learning_rate: float | None = Field(
        None, gt=0, description="of `qfedavg`, which requires it"
    )
    q: float | None = Field(None, ge=0, description="of `qfedavg`")

    @property
    def takes_mean(self) -> bool:
        """Whether the strategy needs no more of the groups' models than their mean."""
        return self.name in _OF_MEANS

    def check(self) -> None:
        """Refuse keys of another strategy."""
        require_reader(self, "name", _READERS)
        if self.name == "qfedavg" and self.client_learning_rate is None:
            raise ConfigError("'qfedavg' needs client_learning_rate, that of the groups")
        if self.name == "momentum" and self.momentum is None:
            raise ConfigError("'momentum' needs momentum, such as 0.5; without it use 'sgd'")

    @property
    def arguments(self) -> dict[str, Any]:
        """The keys that are given, besides the name."""
        return self.model_dump(exclude_none=True, exclude={"name"})

    @property
    def counts_groups(self) -> bool:
        """Whether its rule needs a number of groups that is known beforehand."""
        return self.name in _COUNTS_GROUPS
