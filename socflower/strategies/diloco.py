"""DiLoCo: each SoC trains alone for many steps, then the hub takes an outer Nesterov step (Douillard et al., 2023)."""

from collections.abc import Iterable
from typing import Any

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import FedAvg
from numpy.typing import NDArray

from socflower.cluster import Cluster
from socflower.errors import ConfigError, require_range, require_type
from socflower.plain_numbers import plain_numbers
from socflower.strategies.records import array_views, to_array_record
from socflower.strategies.settings import Grouping, TrainingSchedule
from socflower.strategies.socflow import SoCFlow

OUTER_LEARNING_RATE = 0.7
OUTER_MOMENTUM = 0.9


class NesterovStep(FedAvg):
    """SGD with Nesterov momentum on the mean change of the models: m = mu m + g, w = w - eta (g + mu m).

    g is the model that was sent minus the mean by samples of those that came back.
    """

    def __init__(self, learning_rate: float, momentum: float) -> None:
        super().__init__(fraction_evaluate=0.0)
        self.learning_rate, self.momentum = learning_rate, momentum
        self.moments: dict[str, NDArray[Any]] = {}
        self._sent: dict[str, NDArray[Any]] = {}

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Remember the model that clients begin with."""
        self._sent = array_views(arrays)
        return super().configure_train(server_round, arrays, config, grid)

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Return the model after the step; none without replies."""
        mean, metrics = super().aggregate_train(server_round, replies)
        if mean is None:
            return None, metrics
        made = {}
        for name, returned in array_views(mean).items():
            change = self._sent[name] - returned
            if name in self.moments:
                self.moments[name] = change + self.momentum * self.moments[name]
            else:
                self.moments[name] = change
            step = change + self.momentum * self.moments[name]
            made[name] = np.asarray(self._sent[name] - self.learning_rate * step)
        return to_array_record(made), metrics


@plain_numbers
class DiLoCo(SoCFlow):
    """Each SoC trains alone between synchronisations, then the hub takes an outer step with Nesterov momentum.

    Each SoC is a group of its own, so its optimiser is kept between rounds, and all models pass the hub.

    Parameters
    ----------
    schedule : TrainingSchedule
        `interval_epochs` is H, in epochs; `batch_size` is that of a SoC.
    groups : Grouping, optional
        Its `num_socs` says how many SoCs take part, by default all; it has as many groups.
    outer_learning_rate, outer_momentum : float
        Of the outer step.
    settings
        As of `SoCFlow`, without an outer strategy or a rule of averaging.
    """

    def __init__(
        self,
        *,
        cluster: Cluster,
        schedule: TrainingSchedule,
        groups: Grouping | None = None,
        outer_learning_rate: float = OUTER_LEARNING_RATE,
        outer_momentum: float = OUTER_MOMENTUM,
        **settings: Any,
    ) -> None:
        name = type(self).__name__
        require_type(name, (Cluster,), "a Cluster, as of load_cluster(…)", cluster=cluster)
        require_type(name, (Grouping, type(None)), "Grouping(…) or None", groups=groups)
        for key, rate in {
            "outer_learning_rate": outer_learning_rate,
            "outer_momentum": outer_momentum,
        }.items():
            require_type(name, (int, float), "a number", **{key: rate})
        require_range(name, above=0, outer_learning_rate=outer_learning_rate)
        require_range(name, least=0, below=1, outer_momentum=outer_momentum)
        for key in ("outer", "average"):
            if settings.pop(key, None) is not None:
                raise ConfigError(f"{name}: {key} is its Nesterov step; leave it out")
        num_socs = (groups and groups.num_socs) or cluster.num_socs
        if groups is not None and groups.num_groups not in (1, num_socs):
            raise ConfigError(
                f"{name}: groups = {groups.num_groups} of {num_socs} SoCs, but each is a group of its own; "
                "give Grouping(num_socs=…)"
            )
        super().__init__(
            cluster=cluster,
            schedule=schedule,
            groups=Grouping(num_groups=num_socs, num_socs=num_socs),
            outer=NesterovStep(outer_learning_rate, outer_momentum),
            **settings,
        )
