"""What SoCFlow is compared with: one ring of everything and one machine alone, its special cases, and FedAvg."""

from collections.abc import Iterable
from typing import Any

from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import FedAvg

from socflower.cluster import Cluster
from socflower.strategies.replies import ReplyEvent, failed, no_reply
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


class OrderedFedAvg(FedAvg):
    """Flower's FedAvg with the sum in the order of the nodes, so that equal seeds give equal weights.

    Flower draws the nodes of a round at random, and with them the order of its sum. `events` tells what it leaves
    out of the newest round without a word: clients that raised, died or did not answer.
    """

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.events: tuple[ReplyEvent, ...] = ()
        self._nodes: list[int] = []

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid,
    ) -> list[Message]:
        """Address the nodes that Flower drew, in ascending order."""
        messages = sorted(super().configure_train(server_round, arrays, config, grid),
                          key=lambda message: message.metadata.dst_node_id)
        self._nodes = [message.metadata.dst_node_id for message in messages]
        return messages

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message],
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Average as Flower does, in ascending order of the nodes."""
        ordered = sorted(replies, key=lambda reply: reply.metadata.src_node_id)
        answers = {reply.metadata.src_node_id: reply for reply in ordered}
        self.events = tuple(
            event for soc, node_id in enumerate(self._nodes)
            if (event := _left_out(answers.get(node_id), soc, node_id)) is not None)
        return super().aggregate_train(server_round, ordered)


def _left_out(reply: Message | None, soc: int, node_id: int) -> ReplyEvent | None:
    if reply is None:
        return no_reply(soc, f"SoC {soc} (node {node_id})")
    return failed(reply, soc, f"SoC {soc} (node {node_id})") if reply.has_error() else None
