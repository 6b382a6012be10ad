"""Strategies to compare SoCFlow with: one ring over all SoCs, a single device, and FedAvg in a fixed order."""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from logging import WARNING
from typing import Any, cast

from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import FedAvg
from flwr.supercore import log
from numpy.typing import NDArray

from socflower.cluster import Cluster
from socflower.errors import TrainingFailed
from socflower.plain_numbers import plain_numbers
from socflower.strategies.mixed_replies import client_events, mean_metric
from socflower.strategies.planned_rounds import Resumable
from socflower.strategies.records import array_views
from socflower.strategies.replies import (
    failure_event,
    fault_of,
    heat_events,
    no_reply_event,
    other_layouts,
)
from socflower.strategies.reply_events import ReplyEvent
from socflower.strategies.settings import Grouping, TrainingSchedule
from socflower.strategies.socflow import SoCFlow
from socflower.wire.message_keys import ALPHA, CPU_SHARE, EVENTS, METRICS


@plain_numbers
class RingAllReduce(SoCFlow):
    """Synchronous SGD with a ring all-reduce over all SoCs after every batch: all SoCs form one group.

    A round is an epoch, after which the model is evaluated; the schedule's `interval_epochs` is not used, and its
    `batch_size` is the global batch.
    """

    def __init__(
        self,
        *,
        cluster: Cluster,
        schedule: TrainingSchedule,
        num_socs: int | None = None,
        **settings: Any,
    ) -> None:
        super().__init__(
            cluster=cluster,
            schedule=_of_epochs(schedule),
            groups=Grouping(num_groups=1, num_socs=num_socs),
            **settings,
        )


class SingleDevice(SoCFlow):
    """SGD on one SoC alone, the fastest where devices differ. `batch_size` is its batch."""

    def __init__(self, *, cluster: Cluster, schedule: TrainingSchedule, **settings: Any) -> None:
        super().__init__(
            cluster=cluster,
            schedule=_of_epochs(schedule),
            groups=Grouping(num_groups=1, num_socs=1),
            **settings,
        )


def _of_epochs(schedule: TrainingSchedule) -> TrainingSchedule:
    """Return the schedule with one round an epoch; `SoCFlow` refuses a value of another type."""
    return (
        replace(schedule, interval_epochs=1.0)
        if isinstance(schedule, TrainingSchedule)
        else schedule
    )


class OrderedFedAvg(Resumable, FedAvg):
    """Flower's FedAvg with the sum in the order of the nodes, so that equal seeds give equal weights.

    In Flower the order of the sum follows the random order of the sampled nodes. Flower also averages models with NaN,
    and omits failed clients without telling the caller. Here models with NaN are dropped, and `events` lists what was
    left out of the latest round, including failed evaluations.
    """

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.events: tuple[ReplyEvent, ...] = ()
        self.alpha: float | None = None  # of mixed precision, as in `RoundReport`
        self.cpu_share: float | None = None
        self._nodes: list[int] = []
        self._sent: ArrayRecord | None = None

    def configure_train(
        self,
        server_round: int,
        arrays: ArrayRecord,
        config: ConfigRecord,
        grid: Grid,
    ) -> list[Message]:
        """Address the nodes that Flower sampled, in ascending order."""
        messages = sorted(
            super().configure_train(server_round, arrays, config, grid),
            key=lambda message: message.metadata.dst_node_id,
        )
        self._nodes, self._sent = [message.metadata.dst_node_id for message in messages], arrays
        return messages

    def aggregate_train(
        self,
        server_round: int,
        replies: Iterable[Message],
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Average as Flower does, in ascending order of the nodes; `TrainingFailed` if no reply is usable."""
        if self.is_done(server_round):
            return None, None
        if not self._nodes:
            raise TrainingFailed(
                f"round {server_round}: no client was asked; no node is connected, or fraction_train "
                "is 0"
            )
        answers = {reply.metadata.src_node_id: reply for reply in replies}
        sent = array_views(self._sent or ArrayRecord())
        faults = {
            node_id: _fault(answers.get(node_id), soc, node_id, sent)
            for soc, node_id in enumerate(self._nodes)
        }
        same = {
            soc: answers[node_id]
            for soc, node_id in enumerate(self._nodes)
            if faults[node_id] is None
        }
        for soc, difference in other_layouts(same, self._sent).items():
            node_id = self._nodes[soc]
            faults[node_id] = ReplyEvent(
                kind="malformed",
                group_id=soc,
                text=f"SoC {soc} (node {node_id}): {difference}, dropped",
            )
        self.events = tuple(event for event in faults.values() if event is not None)
        usable = [answers[node_id] for node_id in self._nodes if faults[node_id] is None]
        if not usable:
            raise TrainingFailed(
                f"no client sent a usable model; first cause: {self.events[0].text}"
            )
        for soc, node_id in enumerate(self._nodes):
            if faults[node_id] is None:
                where = f"SoC {soc} (node {node_id})"
                self.events = (
                    *self.events,
                    *client_events(answers[node_id], soc, where),
                    *heat_events(answers[node_id], soc, where),
                )
        self.alpha, self.cpu_share = mean_metric(usable, ALPHA), mean_metric(usable, CPU_SHARE)
        return super().aggregate_train(server_round, [_without_lists(reply) for reply in usable])

    def aggregate_evaluate(
        self, server_round: int, replies: Iterable[Message]
    ) -> MetricRecord | None:
        """Average the clients' metrics, as Flower does; `events` lists those that failed."""
        replies = list(replies)
        for reply in replies:
            if reply.has_error():
                node_id = reply.metadata.src_node_id
                soc = self._nodes.index(node_id) if node_id in self._nodes else 0
                event = failure_event(reply, soc, f"evaluation, node {node_id}")
                log(WARNING, "aggregate_evaluate: %s", event.text)
                self.events = (*self.events, event)
        return super().aggregate_evaluate(server_round, replies)


def _without_lists(reply: Message) -> Message:
    """Return a reply whose metrics Flower can average: numbers only."""
    metrics = cast(MetricRecord, reply.content[METRICS])
    for key in [key for key, value in metrics.items() if isinstance(value, list)]:
        del metrics[key]
    reply.content.config_records.pop(EVENTS, None)
    return reply


def _fault(
    reply: Message | None,
    soc: int,
    node_id: int,
    sent: Mapping[str, NDArray[Any]],
) -> ReplyEvent | None:
    where = f"SoC {soc} (node {node_id})"
    return no_reply_event(soc, where) if reply is None else fault_of(reply, soc, where, sent=sent)
