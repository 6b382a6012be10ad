"""Rounds in which each SoC trains alone between two transfers with the hub, as in FedAvg: their task graphs."""

from collections.abc import Mapping

from socflower.cluster.cost_model import StepCost
from socflower.cluster.task_graph import HUB, Activity, GraphBuilder, TaskGraph


def add_training(
    builder: GraphBuilder, soc: int, cost: StepCost, num_batches: float, *, name: str, after: int
) -> int:
    """Add the training of a SoC on so many batches, each of a `cost`, and return the task that ends it."""
    trained = [
        builder.compute(
            name, soc, work.compute_s * num_batches, processor=work.processor, after=[after]
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


def local_round(
    training: Mapping[int, tuple[StepCost, float]], *, model_bytes: float, num_messages: int
) -> TaskGraph:
    """Return a round: the model from the hub to each SoC, its training, and its model back.

    `training` has for each SoC that takes part the cost of a batch and the number of batches. A model is so many bytes
    in so many messages.
    """
    builder = GraphBuilder()
    for soc, (cost, num_batches) in training.items():
        sent = builder.transfer(f"to SoC {soc}", HUB, soc, model_bytes, num_messages=num_messages)
        trained = add_training(builder, soc, cost, num_batches, name="train", after=sent)
        builder.transfer(
            f"from SoC {soc}", soc, HUB, model_bytes, num_messages=num_messages, after=[trained]
        )
    return builder.build(list(training))
