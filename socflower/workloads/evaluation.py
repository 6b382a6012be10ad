"""Accuracy and loss of a classifier on labelled data."""

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional

from socflower.capture.graph import in_mode
from socflower.errors import ConfigError, require_range
from socflower.workloads.data_source import DataSource


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Accuracy and loss of a model on `num_samples` samples."""

    accuracy: float  # fraction of correct labels, 0..1
    loss: float  # mean cross-entropy in nats
    num_samples: int


def evaluate(model: nn.Module, data: DataSource, batch_size: int = 128) -> Evaluation:
    """Return the model's accuracy and mean loss over all of `data`, computed on the model's own device.

    The model runs in evaluation mode; afterwards the mode of every submodule is restored. Raises ConfigError
    for empty data and for a batch size below 1.
    """
    if len(data) == 0:
        raise ConfigError("evaluation: the data has no samples")
    require_range("evaluation", least=1, batch_size=batch_size)
    first_weight = next(model.parameters(), None)
    device = first_weight.device if first_weight is not None else torch.device("cpu")
    num_correct, summed_loss = 0, 0.0
    with in_mode(model, training=False), torch.inference_mode():
        for start in range(0, len(data), batch_size):
            inputs, labels = data.batch(torch.arange(start, min(start + batch_size, len(data))))
            inputs, labels = inputs.to(device), labels.to(device)
            logits = model(inputs)
            summed_loss += float(functional.cross_entropy(logits, labels, reduction="sum"))
            num_correct += int((logits.argmax(dim=1) == labels).sum())
    return Evaluation(num_correct / len(data), summed_loss / len(data), len(data))
