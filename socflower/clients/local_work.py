"""Trains a node alone on its own data: the client half of `strategies/methods/local.py`, and of Flower's FedAvg."""

import math

import torch
from flwr.app import ConfigRecord, Message
from torch import Tensor

from socflower.clients.node_training import Metrics, NodeTraining
from socflower.errors import ConfigError
from socflower.model_graph.random_state import own_random_state
from socflower.thermal.limits import paced
from socflower.training.batches import local_batches
from socflower.training.trainer import TrainingSpan, mean_loss, try_loss
from socflower.wire.message_keys import NUM_EXAMPLES, SERVER_ROUND, TRAIN_LOSS


def train_alone(training: NodeTraining) -> Message:
    """Train for `local-epochs` with a new optimiser, as FedAvg expects; epochs and steps continue across rounds."""
    training.load()
    config = training.config
    batch_size, num_epochs = _count(config, "batch-size", 32), _count(config, "local-epochs", 1)
    seed, earlier_rounds = _count(config, "seed", 1), _count(config, SERVER_ROUND, 1) - 1
    proximal_mu = config.get("proximal-mu", 0.0)
    if not isinstance(proximal_mu, int | float) or not 0.0 <= proximal_mu < math.inf:
        raise ConfigError(
            f"train config: proximal-mu = {proximal_mu!r} must be a number, 0 or more"
        )
    partition_id, num_partitions = training.partition
    data = training.data_fn(training.context, partition_id, num_partitions)
    if not len(data):
        raise ConfigError(
            f"data_fn(context, {partition_id}, {num_partitions}) returned no samples; give every node "
            "some, or start fewer nodes"
        )
    steps_per_epoch = -(-len(data) // batch_size)
    steps, first_epoch = steps_per_epoch * num_epochs, earlier_rounds * num_epochs
    span = TrainingSpan(
        first_step=earlier_rounds * steps,
        total_steps=_count(config, "num-rounds", earlier_rounds + 1) * steps,
        steps_per_epoch=steps_per_epoch,
        proximal_mu=float(proximal_mu),
    )
    session = training.trainer.start(training.model, span)
    batches = local_batches(
        len(data), batch_size, num_epochs, seed=(seed, partition_id), first_epoch=first_epoch
    )
    losses: list[Tensor] = []
    with own_random_state(seed, partition_id, span.first_step):
        for step, indices in enumerate(paced(batches)):
            key = seed, first_epoch + step // steps_per_epoch, partition_id
            batch = data.batch(torch.from_numpy(indices), key)
            if not earlier_rounds and not losses:
                try_loss(session, [batch], data, batch_size, divided=False)
            losses.append(session.step([batch]))
    metrics: Metrics = {TRAIN_LOSS: mean_loss(losses), NUM_EXAMPLES: len(data) * num_epochs}
    return training.reply(metrics, session.finish())


def _count(config: ConfigRecord, key: str, default: int) -> int:
    value = config.get(key, default)
    if not isinstance(value, int) or value < 1:
        raise ConfigError(f"train config: {key} = {value!r} must be a whole number, 1 or more")
    return value
