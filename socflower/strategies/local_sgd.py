"""Methods in which each SoC trains alone for many steps between synchronisations, and keeps its optimiser."""

from typing import Any

from flwr.serverapp.strategy import Strategy

from socflower.cluster import Cluster
from socflower.errors import ConfigError, require_type
from socflower.hierarchy import GroupPlan
from socflower.plain_numbers import plain_numbers
from socflower.strategies.outer_sgd import nesterov
from socflower.strategies.settings import Grouping, TrainingSchedule
from socflower.strategies.socflow import SoCFlow


@plain_numbers
class LocalSGD(SoCFlow):
    """Local SGD (Stich, 2019): each SoC trains alone between synchronisations, which average models by samples.

    Each SoC is a group of its own, so its optimiser is kept between rounds; leaders exchange as those of groups do.

    Parameters
    ----------
    schedule : TrainingSchedule
        `interval_epochs` is H, in epochs; `batch_size` is that of a SoC.
    groups : int, Grouping or GroupPlan, optional
        Larger groups in place of single SoCs.
    settings
        As of `SoCFlow`.
    """

    def __init__(
        self,
        *,
        cluster: Cluster,
        schedule: TrainingSchedule,
        groups: int | Grouping | GroupPlan | None = None,
        **settings: Any,
    ) -> None:
        name = type(self).__name__
        require_type(name, (Cluster,), "a Cluster, as of load_cluster(…)", cluster=cluster)
        alone = cluster.num_socs if groups is None else groups
        super().__init__(cluster=cluster, schedule=schedule, groups=alone, **settings)


class DiLoCo(LocalSGD):
    """DiLoCo (Douillard et al., 2023): local SGD, then the hub takes an outer step with Nesterov momentum.

    Its authors train with AdamW inside, MuLoCo (Thérien et al., 2025) is the same with Muon: both are the clients'
    optimiser, `FP32Trainer(optimizer=muon(…))`.

    Parameters
    ----------
    outer : Strategy, optional
        Another outer step than `nesterov()`, whose learning rate is 0.7 and whose momentum 0.9.
    settings
        As of `LocalSGD`, without a rule of averaging.
    """

    def __init__(self, *, outer: Strategy | None = None, **settings: Any) -> None:
        if settings.pop("average", None) is not None:
            raise ConfigError(
                f"{type(self).__name__}: average is its outer step's; leave it out, or give outer"
            )
        super().__init__(outer=outer or nesterov(fraction_evaluate=0.0), **settings)
