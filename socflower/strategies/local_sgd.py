"""Methods in which each SoC trains alone for many steps between synchronisations, and keeps its optimiser."""

from dataclasses import replace
from typing import Any

from flwr.serverapp.strategy import Strategy

from socflower.errors import ConfigError, require_range, require_type
from socflower.hierarchy.exchange.models import NONE
from socflower.hierarchy.plan import plan_of_socs
from socflower.plain_numbers import plain_numbers
from socflower.strategies.methods.group_work import SyncPlan
from socflower.strategies.methods.groups import GroupsMethod
from socflower.strategies.methods.post_local import Opening, PostLocalMethod, opened_intervals
from socflower.strategies.methods.streaming import StreamingMethod
from socflower.strategies.outer_momentum import OuterSGD
from socflower.strategies.presets import group_strategy
from socflower.strategies.round_planner import RoundPlanner
from socflower.strategies.settings import (
    Costs,
    Streaming,
    require_few_fragments,
    streamed_interval,
)
from socflower.strategies.socflow import SoCFlow
from socflower.wire.message_keys import INT8_WIRE


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

    preset = group_strategy("local-sgd")


@plain_numbers
class PostLocalSGD(LocalSGD):
    """Post-local SGD (Lin et al., 2020): one group of all SoCs for the first epochs, then `LocalSGD`.

    Parameters
    ----------
    synchronous_epochs : int
        Epochs before the switch, at least 1 and less than all.
    settings
        As of `LocalSGD`; `batch_size` is that of a group after the switch. Gradients are not compressed.
    """

    preset = group_strategy("post-local-sgd")

    def __init__(self, *, synchronous_epochs: int, **settings: Any) -> None:
        require_type(
            type(self).__name__, (int,), "a whole number", synchronous_epochs=synchronous_epochs
        )
        self._synchronous_epochs = synchronous_epochs
        super().__init__(**settings)

    def _with_rounds(self, sync: SyncPlan) -> SyncPlan:
        name, most = type(self).__name__, sync.schedule.num_epochs - 1
        require_range(name, least=1, most=most, synchronous_epochs=self._synchronous_epochs)
        if sync.schedule.server_interval > 1 or sync.exchange.compression != NONE:
            raise ConfigError(
                f"{name}: server_interval and compression are for groups of one plan; leave them out"
            )
        intervals, self._num_opening = opened_intervals(
            sync.schedule, sync.steps_per_epoch, self._synchronous_epochs
        )
        return replace(sync, intervals=intervals)

    def _method(self, **settings: Any) -> GroupsMethod:
        planner: RoundPlanner = settings["planner"]
        socs = planner.plan.participants
        whole = plan_of_socs(planner.cluster, 1, planner.rates, socs)
        return PostLocalMethod(Opening(plan=whole, num_rounds=self._num_opening), **settings)


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

    preset = group_strategy("diloco")


class StreamingDiLoCo(DiLoCo):
    """Streaming DiLoCo (Douillard et al., 2025): DiLoCo that synchronises a fragment at a time beside the training.

    A round ends with the synchronisation of one fragment; each is synchronised once an interval. An exchange is charged
    to the next round, beside whose first steps it runs. Groups of another plan, and a group whose reply is lost, begin
    again from the hub's model.

    Parameters
    ----------
    schedule : TrainingSchedule
        `interval_epochs` is H, a number of epochs, of at least as many steps as fragments.
    streaming : Streaming, optional
        Fragments, delay, and mixing.
    settings
        As of `DiLoCo`; `outer` is a step of SGD. Each SoC is a group; clients train in FP32.
    """

    preset = group_strategy("streaming-diloco")

    def __init__(
        self,
        *,
        streaming: Streaming | None = None,
        outer: Strategy | None = None,
        costs: Costs = Costs(),
        **settings: Any,
    ) -> None:
        name = type(self).__name__
        streaming = Streaming() if streaming is None else streaming
        require_type(name, (Streaming,), "Streaming(…) or None", streaming=streaming)
        require_type(name, (OuterSGD, type(None)), "OuterSGD(…) or nesterov(…)", outer=outer)
        if getattr(getattr(costs, "pricing", None), "arithmetic", ""):
            raise ConfigError(
                f"{name}: fragments change in a round, which int8 does not see; train in FP32"
            )
        self._streaming = streaming
        super().__init__(outer=outer, costs=costs, **settings)

    def _with_rounds(self, sync: SyncPlan) -> SyncPlan:
        schedule, interval = sync.schedule, sync.schedule.interval_epochs
        for broken, why in (
            (isinstance(interval, str), f"interval_epochs = {interval!r}; give a number"),
            (schedule.server_interval > 1, "server_interval averages whole models; leave it out"),
            (
                sync.exchange.wire == INT8_WIRE,
                f"wire = {INT8_WIRE!r} is for whole models; leave it out",
            ),
        ):
            if broken:
                raise ConfigError(f"{type(self).__name__}: {why}")
        require_few_fragments(self._streaming, interval, sync.steps_per_epoch)
        own = streamed_interval(interval, self._streaming.fragments)
        intervals = replace(schedule, interval_epochs=own).intervals(sync.steps_per_epoch)
        return replace(sync, intervals=intervals)

    def _method(self, **settings: Any) -> GroupsMethod:
        return StreamingMethod(self._streaming, **settings)
