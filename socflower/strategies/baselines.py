"""What SoCFlow is compared with, as special cases of it: one ring of everything, and one machine alone."""

from typing import Any

from socflower.cluster import Cluster
from socflower.strategies.socflow import SoCFlow


class RingAllReduce(SoCFlow):
    """Synchronous SGD with a ring all-reduce over all SoCs after every batch: one group of everything.

    A round is an epoch, after which the model is evaluated. `batch_size` is the global batch.
    """

    def __init__(self, *, cluster: Cluster, **settings: Any) -> None:
        super().__init__(cluster=cluster, num_groups=1, interval_epochs=1.0, **settings)


class SingleDevice(SoCFlow):
    """SGD on the cluster's first SoC alone."""

    def __init__(self, *, cluster: Cluster, **settings: Any) -> None:
        super().__init__(cluster=cluster, num_groups=1, num_socs=1, interval_epochs=1.0, **settings)
