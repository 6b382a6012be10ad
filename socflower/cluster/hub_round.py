"""A round of messages between the hub and SoCs that train alone, as in FedAvg, as a task graph.

The grid that prices a training as it runs and the prediction of one both make their rounds here.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from socflower.cluster.cost_model import StepCost
from socflower.cluster.task_graph import HUB, Activity, TaskGraph, TaskGraphBuilder


@dataclass(frozen=True, slots=True)
class Payload:
    """A message: its bytes, and what it costs in messages."""

    num_bytes: float
    num_messages: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Training:
    """Batches that a SoC trains on, each of the same cost; `name` is that of the task."""

    cost: StepCost
    num_batches: float
    name: str = "train"


@dataclass(frozen=True, kw_only=True, slots=True)
class HubExchange:
    """A message to a SoC, and its reply, None if it does not answer; before it replies it may train."""

    soc: int
    message: Payload
    training: Training | None = None
    reply: Payload | None = None


def hub_round(exchanges: Sequence[HubExchange], socs: Collection[int]) -> TaskGraph:
    """Return a round of exchanges, all at once, in a run of these SoCs."""
    builder = TaskGraphBuilder()
    for exchange in exchanges:
        soc, sent, reply = exchange.soc, exchange.message, exchange.reply
        last = builder.transfer(
            f"to SoC {soc}", HUB, soc, sent.num_bytes, num_messages=sent.num_messages
        )
        if reply is None:
            continue
        if exchange.training is not None:
            last = _add_training(builder, soc, exchange.training, after=last)
        builder.transfer(
            f"from SoC {soc}",
            soc,
            HUB,
            reply.num_bytes,
            num_messages=reply.num_messages,
            after=[last],
        )
    return builder.build(list(socs))


def local_round(training: Mapping[int, Training], model: Payload) -> TaskGraph:
    """Return a round: the model from the hub to each SoC that takes part, its training, and its model back."""
    exchanges = [
        HubExchange(soc=soc, message=model, training=own, reply=model)
        for soc, own in training.items()
    ]
    return hub_round(exchanges, training)


def _add_training(builder: TaskGraphBuilder, soc: int, training: Training, *, after: int) -> int:
    """Add the training of a SoC, and return the task that ends it."""
    cost, num_batches = training.cost, training.num_batches
    trained = [
        builder.compute(
            training.name,
            soc,
            work.compute_s * num_batches,
            processor=work.processor,
            after=[after],
        )
        for work in cost.processors
    ]
    return builder.compute(
        "update",
        soc,
        (cost.merge_s + cost.update_s) * num_batches,
        processor=cost.processor,
        activity=Activity.UPDATE,
        after=trained,
    )
