"""Strategies to compare SoCFlow with: all SoCs in one group, a single device, and FedAvg, also in a tree.

What each fixes of `SoCFlow`'s settings is its entry of `STRATEGIES` in `socflower.strategies.presets`.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from flwr.serverapp.strategy import Strategy

from socflower.errors import ConfigError, require_known, require_range, require_type
from socflower.plain_numbers import plain_numbers
from socflower.precision.processor_costs import MixedPricing
from socflower.strategies.local_sgd import LocalSGD
from socflower.strategies.method import RoundReport
from socflower.strategies.methods.group_work import SyncPlan
from socflower.strategies.methods.local import (
    LocalRound,
    LocalSchedule,
    LocalTraining,
    SettledLocal,
)
from socflower.strategies.outer_step import proximal_mu_of
from socflower.strategies.presets import group_strategy
from socflower.strategies.round_strategy import RoundStrategy
from socflower.strategies.settings import Costs, ExchangeSettings, Grouping
from socflower.strategies.socflow import SoCFlow
from socflower.wire.message_keys import WIRES


@plain_numbers
class RingAllReduce(SoCFlow):
    """Synchronous SGD with a ring all-reduce over all SoCs after every batch: all SoCs form one group.

    A round is an epoch, after which the model is evaluated, or the schedule's `interval_epochs` if that is a shorter
    one; its `batch_size` is the global batch.
    """

    preset = group_strategy("ring")

    def __init__(self, *, num_socs: int | None = None, **settings: Any) -> None:
        own: dict[str, Any] = {} if num_socs is None else {"groups": Grouping(num_socs=num_socs)}
        super().__init__(**own, **settings)


class ParameterServer(RingAllReduce):
    """Synchronous SGD with a parameter server: the first SoC sums the others' gradients and sends each the sum.

    It trains too, as in SoCFlow+ section 4.1.
    """

    preset = group_strategy("ps")


class _CompressingRing(RingAllReduce):
    """A ring over all SoCs with a coding of its own; `options` are the coding's, such as ``rank=4``."""

    def __init__(
        self,
        *,
        options: Mapping[str, float] = {},
        exchange: ExchangeSettings = ExchangeSettings(),
        **settings: Any,
    ) -> None:
        if options:
            texts = (f"{key}={value}" for key, value in options.items())
            spec = " ".join((str(self.preset.compression), *texts))
            exchange = replace(exchange, compression=spec)
        super().__init__(exchange=exchange, **settings)


@plain_numbers
class HiPress(_CompressingRing):
    """A ring with deep gradient compression of those buckets that it makes faster (Bai et al., SOSP 2021)."""

    preset = group_strategy("hipress")


@plain_numbers
class PowerSGDAllReduce(_CompressingRing):
    """A ring that sums gradients as factors of low rank (Vogels et al., NeurIPS 2019)."""

    preset = group_strategy("powersgd")


class SingleDevice(SoCFlow):
    """SGD on one SoC alone, the fastest where devices differ. `batch_size` is its batch."""

    preset = group_strategy("sgd")


@plain_numbers
class TreeFedAvg(LocalSGD):
    """T-FedAvg of SoCFlow+: `OrderedFedAvg` whose models are summed in a tree over boards and servers.

    In each round each SoC passes over its own data with a new optimiser, so SoCs with more data do more steps; models
    are averaged by samples.

    Parameters
    ----------
    schedule : TrainingSchedule
        `batch_size` is that of a SoC. A round is `local_epochs`, and data stay at their SoCs.
    local_epochs : int
        Passes over its own data in each round; all epochs are a multiple.
    exchange : ExchangeSettings
        `leaders` is the tree.
    """

    preset = group_strategy("tree-fedavg")

    def __init__(self, *, local_epochs: int = 1, costs: Costs = Costs(), **settings: Any) -> None:
        name = type(self).__name__
        require_type(name, (int,), "a whole number", local_epochs=local_epochs)
        require_range(name, least=1, local_epochs=local_epochs)
        if isinstance(getattr(costs, "pricing", None), MixedPricing):
            raise ConfigError(
                f"{name}: mixed precision measures alpha by steps of a group; train in FP32 or int8"
            )
        self._local_epochs = local_epochs
        super().__init__(costs=costs, **settings)

    def _with_rounds(self, sync: SyncPlan) -> SyncPlan:
        if sync.schedule.num_epochs % self._local_epochs:
            raise ConfigError(
                f"{type(self).__name__}: num_epochs = {sync.schedule.num_epochs} must be a multiple of local_epochs = "
                f"{self._local_epochs}"
            )
        return sync


@plain_numbers
class OrderedFedAvg(RoundStrategy[LocalRound, SettledLocal]):
    """FedAvg over all SoCs: each trains alone on its own data, and models are averaged by samples after each round.

    The sum is in the order of the SoCs, so equal seeds give equal weights. Broken replies are dropped and reported.

    Parameters
    ----------
    schedule : LocalSchedule
        Rounds, epochs of a round, and batch.
    num_socs : int
        How many nodes take part in each round; later rounds continue without nodes that are gone.
    outer : Strategy, optional
        As of `SoCFlow`: a strategy of Flower's in place of the mean, and whether nodes evaluate.
    tolerate_client_errors : bool
        As of `SoCFlow`.
    wire : str
        How models travel: "float32", or "int8", int8 weights with a scale for each tensor. What int8 leaves out of the
        mean is added to the next one.
    """

    reports: list[RoundReport]

    def __init__(
        self,
        *,
        schedule: LocalSchedule,
        num_socs: int,
        outer: Strategy | None = None,
        tolerate_client_errors: bool = False,
        wire: str = WIRES[0],
    ) -> None:
        name = type(self).__name__
        require_known(f"{name}: wire", wire, WIRES)
        require_type(name, (LocalSchedule,), "LocalSchedule(…)", schedule=schedule)
        require_type(name, (int,), "a whole number", num_socs=num_socs)
        require_range(name, least=1, num_socs=num_socs)
        method = LocalTraining(
            schedule=schedule,
            num_socs=num_socs,
            proximal_mu=proximal_mu_of(outer),
            tolerate_client_errors=tolerate_client_errors,
            wire=wire,
        )
        super().__init__(method, outer, num_socs)
