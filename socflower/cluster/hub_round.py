"""A round in which nodes get a model from the hub, train alone, and send it back: FedAvg's, as a task graph."""

from collections.abc import Sequence
from dataclasses import dataclass

from socflower.cluster.cost_model import StepCost
from socflower.cluster.task_graph import HUB, Activity, GraphBuilder, TaskGraph


@dataclass(frozen=True, kw_only=True, slots=True)
class Payload:
    """What a message carries, and as how many messages it is priced (F8a)."""

    num_bytes: float
    num_messages: int


@dataclass(frozen=True, kw_only=True, slots=True)
class LocalTrainingCost:
    """What a node computes between two messages."""

    num_examples: int
    # May be a fraction: the last batch of a pass is smaller.
    num_batches: float
    step: StepCost


@dataclass(frozen=True, kw_only=True, slots=True)
class HubExchange:
    """A node's part of a round: what it gets, computes and sends; None for what it does not do."""

    soc: int
    down: Payload
    training: LocalTrainingCost | None = None
    up: Payload | None = None


def hub_round(exchanges: Sequence[HubExchange], participants: Sequence[int]) -> TaskGraph:
    """Return the graph of a round; each node sends its answer as soon as it has trained.

    The compute time of a node is its batches times `step.compute_s`, on all processors of the step at once; then come
    the updates of its weights.
    """
    builder = GraphBuilder()
    for each in exchanges:
        soc, down, up = each.soc, each.down, each.up
        last = builder.transfer(
            f"to SoC {soc}", HUB, soc, down.num_bytes, num_messages=down.num_messages
        )
        if up is None:
            continue
        if each.training is not None:
            last = _add_training(builder, soc, each.training, last)
        builder.transfer(
            f"from SoC {soc}",
            soc,
            HUB,
            up.num_bytes,
            num_messages=up.num_messages,
            after=[last],
        )
    return builder.build(participants)


def _add_training(builder: GraphBuilder, soc: int, training: LocalTrainingCost, after: int) -> int:
    step = training.step
    trained = [
        builder.compute(
            f"train {training.num_examples}",
            soc,
            work.compute_s * training.num_batches,
            processor=work.processor,
            after=[after],
        )
        for work in step.processors
    ]
    return builder.compute(
        "update",
        soc,
        (step.merge_s + step.update_s) * training.num_batches,
        processor=step.processor,
        activity=Activity.UPDATE,
        after=trained,
    )
