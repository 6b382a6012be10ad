"""Virtual time for ordinary Flower apps: a Grid that wraps any Grid and prices its messages."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

from flwr.app import Message, MessageType
from flwr.serverapp import Grid

from socflower.cluster import (
    FP32,
    Cluster,
    ModelProfile,
    Pricing,
    TaskGraph,
    Usage,
    VirtualClock,
)
from socflower.cluster.hub_round import HubExchange, Payload, Training, hub_round
from socflower.engines.local.message_log import (
    fault_of_num_examples,
    is_priced,
    metric,
    num_examples_of,
)
from socflower.errors import ConfigError, TrainingFailed
from socflower.precision.processor_costs import MixedPricing
from socflower.strategies.forwarding_grid import ForwardingGrid
from socflower.wire.message_keys import CPU_SHARE


def require_socs(cluster: Cluster, num_nodes: int) -> None:
    """Raise `ConfigError` if there are more nodes than SoCs."""
    if num_nodes > cluster.num_socs:
        raise ConfigError(
            f"{num_nodes} nodes on a cluster of {cluster.num_socs} SoCs; describe a larger cluster or "
            "start fewer nodes"
        )


class VirtualTimeGrid(ForwardingGrid):
    """Runs the task graph of each `send_and_receive` through `grid` on `clock`; pushed messages have no price.

    A TRAIN message costs its bytes from the hub to the node's SoC, the reply's `num-examples` by the profile of the
    SoC's device, and the reply's bytes back; other messages cost their bytes only. Nodes are SoCs in ascending
    order of their ids. Messages that their strategy has priced are not priced again. Without a `model_profile`
    training takes no virtual time. `batch_size` determines the number of updates, `pricing` the arithmetic, and `fused`
    whether a message of Flower's costs one message, or one for each tensor (F8a).
    Raises `TrainingFailed` if a client reports a number of examples that is negative or not finite.
    """

    def __init__(
        self,
        grid: Grid,
        clock: VirtualClock,
        cluster: Cluster,
        *,
        model_profile: ModelProfile | None = None,
        batch_size: int = 32,
        pricing: Pricing = FP32,
        on_usage: Callable[[Usage], None] = lambda usage: None,
        fused: bool = False,
    ) -> None:
        super().__init__(grid)
        self._clock = clock
        self._cluster = cluster
        self._profile = model_profile
        self._batch_size = batch_size
        self._pricing = pricing
        self._on_usage = on_usage
        self._fused = fused

    @property
    def clock(self) -> VirtualClock:
        """The clock, for strategies that price their clients' work themselves."""
        return self._clock

    @property
    def model_profile(self) -> ModelProfile | None:
        """What training costs, for strategies that have no profile of their own."""
        return self._profile

    @property
    def cluster(self) -> Cluster:
        """The cluster that messages are priced on."""
        return self._cluster

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> list[Message]:
        """Exchange messages through the inner grid and advance the clock by the time that they would take."""
        sent = list(messages)
        replies = list(self._grid.send_and_receive(sent, timeout=timeout))
        to_price = [message for message in sent if not is_priced(message)]
        if to_price:
            self._on_usage(
                self._clock.run(
                    self._graph(to_price, replies), label=to_price[0].metadata.message_type
                )
            )
        return replies

    def _graph(self, sent: Sequence[Message], replies: Sequence[Message]) -> TaskGraph:
        soc_of_node = {node: soc for soc, node in enumerate(sorted(self._grid.get_node_ids()))}
        require_socs(self._cluster, len(soc_of_node))
        answered = {reply.metadata.src_node_id: reply for reply in replies if reply.has_content()}
        trained = {message.metadata.dst_node_id for message in sent if self._has_training(message)}
        for node in sorted(trained & set(answered)):
            if (fault := fault_of_num_examples(answered[node])) is not None:
                raise TrainingFailed(
                    f"SoC {soc_of_node[node]} (node {node}): {fault}; its training has no price "
                    "without one"
                )
        exchanges = [
            self._exchange(soc_of_node[message.metadata.dst_node_id], message, answered)
            for message in sent
        ]
        return hub_round(exchanges, soc_of_node.values())

    def _exchange(self, soc: int, message: Message, answered: Mapping[int, Message]) -> HubExchange:
        reply = answered.get(message.metadata.dst_node_id)
        return HubExchange(
            soc=soc,
            message=self._payload(message),
            training=self._training(soc, reply)
            if reply is not None and self._has_training(message)
            else None,
            reply=None if reply is None else self._payload(reply),
        )

    def _payload(self, message: Message) -> Payload:
        """Return the bytes of a message, and what it costs in messages; without arrays it counts as one tensor.

        Bytes in its configs count too: of secure aggregation these are the masked arrays.
        """
        arrays = [
            array for record in message.content.array_records.values() for array in record.values()
        ]
        others = [
            each
            for record in message.content.config_records.values()
            for value in record.values()
            for each in (value if isinstance(value, list) else [value])
            if isinstance(each, bytes)
        ]
        return Payload(
            float(sum(len(array.data) for array in arrays) + sum(map(len, others))),
            1 if self._fused else max(1, len(arrays)),
        )

    def _has_training(self, message: Message) -> bool:
        return self._profile is not None and message.metadata.message_type.startswith(
            MessageType.TRAIN
        )

    def _training(self, soc: int, reply: Message) -> Training | None:
        assert self._profile is not None
        num_examples = int(num_examples_of(reply) or 0)
        batch = min(self._batch_size, num_examples)
        if not batch:
            return None
        pricing, on_cpu = self._pricing, metric(reply, CPU_SHARE)
        if isinstance(pricing, MixedPricing) and on_cpu is not None:
            # The client's report, not the predicted alpha.
            pricing = replace(pricing, cpu_share=on_cpu)
        cost = pricing.step_cost(self._profile, self._cluster.device_of(soc), batch)
        return Training(cost=cost, num_batches=num_examples / batch, name=f"train {num_examples}")
