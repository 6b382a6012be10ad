"""The table `[strategy.outer]`: which strategy makes the next model of the groups' models: Flower's, or an SGD step."""

from typing import Annotated, Any

from pydantic import Field

from socflower.errors import ConfigError, require_range
from socflower.field_rules import OneOf, unknown_key
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
    "sgd": ("socflower.strategies.outer_momentum:OuterSGD", ("learning_rate",)),
    "momentum": ("socflower.strategies.outer_momentum:OuterSGD", ("learning_rate", "momentum")),
    "nesterov": ("socflower.strategies.outer_momentum:nesterov", ("learning_rate", "momentum")),
}
"""Each by its name: the class of `flwr.serverapp.strategy` or another function, and the arguments that it takes."""

_AT_LEAST_ZERO = {"least": 0.0}
_ABOVE_ZERO = {"above": 0.0}
_DECAY = {"least": 0.0, "below": 1.0}
_LIMITS = {
    **dict.fromkeys(("beta_1", "beta_2", "momentum", "server_momentum"), _DECAY),
    **dict.fromkeys(("proximal_mu", "q", "num_malicious_nodes"), _AT_LEAST_ZERO),
    **dict.fromkeys(("eta", "tau", "learning_rate", "server_learning_rate"), _ABOVE_ZERO),
    **dict.fromkeys(("client_learning_rate", "num_nodes_to_select"), _ABOVE_ZERO),
    "beta": {"least": 0.0, "below": 0.5},
}
"""The range of each argument, which Flower's classes do not check."""
_REQUIRED = {
    "qfedavg": ("client_learning_rate", "that of the groups"),
    "momentum": ("momentum", "such as 0.5; without it use 'sgd'"),
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
    arguments: dict[str, int | float] = Field(
        {},
        description=(
            "keyword arguments of the class, as in `arguments.eta = 0.01`; of `sgd`, `momentum` and `nesterov` "
            "`learning_rate`, by default 1 or Nesterov's 0.7, and `momentum`, by default Nesterov's 0.9"
        ),
    )

    @property
    def takes_mean(self) -> bool:
        """Whether the strategy needs no more of the groups' models than their mean."""
        return self.name in _OF_MEANS

    def check(self) -> None:
        """Refuse arguments that the strategy does not take, or without which it cannot be made."""
        known = OUTER_STRATEGIES[self.name][1]
        for key, value in self.arguments.items():
            if key not in known:
                raise ConfigError(unknown_key(key, value, known, f"arguments of {self.name!r}"))
            limits_and_value: dict[str, Any] = {**_LIMITS[key], key: value}
            require_range("arguments", **limits_and_value)
            if key.startswith("num_") and not isinstance(value, int):
                raise ConfigError(f"arguments.{key} = {value} counts groups; give a whole number")
        key, why = _REQUIRED.get(self.name, ("", ""))
        if key and key not in self.arguments:
            raise ConfigError(f"{self.name!r} needs arguments.{key}, {why}")

    @property
    def counts_groups(self) -> bool:
        """Whether its rule needs a number of groups that is known beforehand."""
        return self.name in _COUNTS_GROUPS
