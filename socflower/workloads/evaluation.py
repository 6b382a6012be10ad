"""Metrics of a model on data: accuracy and loss of a classifier, or what a user's function computes of a batch."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional

from socflower.errors import ConfigError, require_range
from socflower.model_graph.batch_form import Batch, form_of, num_samples, output_entry, output_of
from socflower.model_graph.graph import in_mode
from socflower.model_graph.torch_device import device_of, on_device, resolve_device
from socflower.plain_numbers import plain_numbers
from socflower.workloads.map_dataset import as_data_source

EvaluationStep: TypeAlias = Callable[[nn.Module, Batch], Mapping[str, Tensor | float]]
"""A function of model and batch that returns metrics, each a mean over the batch's samples."""


EvaluationWeight: TypeAlias = Callable[[Batch], float]
"""A function of a batch that returns what its metrics divide by, such as the number of labels that count."""


@plain_numbers
@dataclass(frozen=True, slots=True)
class Evaluation:
    """Metrics of a model, each a mean over `num_samples` samples, or over what `weight` counts."""

    metrics: Mapping[str, float]
    num_samples: int
    # The number of samples, unless not all of their labels count.
    weight: float

    @property
    def num_examples(self) -> int | float:
        """The weight, by which means of several nodes are averaged; a whole number as such."""
        return int(self.weight) if self.weight == int(self.weight) else self.weight

    @property
    def accuracy(self) -> float:
        """The fraction of correct labels, 0..1."""
        return self._metric("accuracy")

    @property
    def loss(self) -> float:
        """The mean loss; of a classifier, cross-entropy in nats."""
        return self._metric("loss")

    def _metric(self, name: str) -> float:
        if name not in self.metrics:
            raise ConfigError(
                f"evaluation: there is no {name}, only {', '.join(self.metrics) or 'nothing'}; return it "
                "from the function that evaluates a batch"
            )
        return self.metrics[name]


@plain_numbers
def evaluate(
    model: nn.Module,
    data: Any,
    batch_size: int = 128,
    *,
    step: EvaluationStep | None = None,
    weight: EvaluationWeight | None = None,
    device: str | None = None,
) -> Evaluation:
    """Return the model's metrics over all of `data`.

    Parameters
    ----------
    data : DataSource, map-style Dataset or DataLoader
    step : (model, batch) -> dict of metrics, optional
        Without it, pairs (inputs, labels) give accuracy and cross-entropy, and dicts the loss of `model(**batch)`, with
        accuracy if it returns logits (n, classes) for labels (n,). Labels of -100 do not count, as in training.
    weight : (batch) -> float, optional
        What the metrics of a batch divide by, if that is not its number of samples: for a model that averages over
        tokens, the number of those that count.
    device : str, optional
        "auto", "cpu", "cuda", …, as in `FP32Trainer`; the model is moved there and stays. Without it, the model's own.

    Notes
    -----
    The model runs in evaluation mode; afterwards the mode of every submodule is restored. Raises ConfigError for empty
    data, a batch size below 1, and batches of which no metric is known.
    """
    source = as_data_source(data)
    if len(source) == 0:
        raise ConfigError("evaluation: the data has no samples")
    require_range("evaluation", least=1, batch_size=batch_size)
    if device is not None:
        model.to(resolve_device(device, "evaluation: device"))
    where = device_of(model)
    sums: dict[str, float] = {}
    total = 0.0
    with in_mode(model, training=False), torch.inference_mode():
        for start in range(0, len(source), batch_size):
            batch = on_device(
                source.batch(torch.arange(start, min(start + batch_size, len(source)))), where
            )
            own = None if weight is None else _checked(weight(batch))
            added, counted = (
                _classifier_sums(model, batch, own)
                if step is None
                else _sums(step(model, batch), num_samples(batch) if own is None else own)
            )
            if not counted:
                # The means of this batch are 0 / 0.
                continue
            total += counted
            if sums and added.keys() != sums.keys():
                raise ConfigError(
                    f"evaluation: one batch gave {', '.join(sums) or 'nothing'} and another "
                    f"{', '.join(added) or 'nothing'}; return the same metrics for every batch"
                )
            sums = {name: sums.get(name, 0.0) + value for name, value in added.items()}
    if not total:
        raise ConfigError("evaluation: no label of the data counts; give data with labels")
    return Evaluation({name: value / total for name, value in sums.items()}, len(source), total)


def _checked(weight: float) -> float:
    if not 0.0 <= float(weight) < math.inf:
        raise ConfigError(
            f"evaluation: the weight of a batch is {weight}; it must be 0 or more, what its metrics "
            "divide by"
        )
    return float(weight)


def _sums(means: Mapping[str, Tensor | float], weight: float) -> tuple[dict[str, float], float]:
    return {name: float(value) * weight for name, value in means.items()}, weight


def _classifier_sums(
    model: nn.Module, batch: Batch, weight: float | None
) -> tuple[dict[str, float], float]:
    """Return the summed loss, the number of correct labels if the model gives one for each sample, and their weight."""
    if isinstance(batch, Mapping):
        made = model(**batch)
        loss, logits, labels = (
            output_entry(made, "loss"),
            output_entry(made, "logits"),
            batch.get("labels"),
        )
        if loss is None:
            raise ConfigError(
                f"evaluation: the model returned no loss for {form_of(batch)}; {_GIVE_STEP}"
            )
        num_correct = _num_correct(logits, labels)
        counted = (
            weight
            if weight is not None
            else num_samples(batch)
            if num_correct is None
            else _num_counted(labels)
        )
        return {
            **({} if num_correct is None else {"accuracy": num_correct}),
            "loss": float(loss) * counted,
        }, counted
    if not isinstance(batch, tuple | list) or len(batch) != 2:
        raise ConfigError(
            f"evaluation: the data give {form_of(batch)}, of which no metric is known; {_GIVE_STEP}"
        )
    inputs, labels = batch
    logits = output_of(model, inputs)
    num_correct = _num_correct(logits, labels)
    if num_correct is None:
        raise ConfigError(
            f"evaluation: {form_of(logits)} for labels as {form_of(labels)} are no classes; {_GIVE_STEP}"
        )
    loss = float(functional.cross_entropy(logits, labels, reduction="sum"))
    return {"accuracy": num_correct, "loss": loss}, _num_counted(
        labels
    ) if weight is None else weight


IGNORED = -100
"""The label that torch's cross-entropy ignores by default."""

_GIVE_STEP = "give a function (model, batch) that returns metrics, as evaluate(..., step=...)"


def _num_correct(logits: Any, labels: Any) -> int | None:
    """Return how many labels (n,) have the largest of their logits (n, classes); None for other forms."""
    if (
        not isinstance(logits, Tensor)
        or not isinstance(labels, Tensor)
        or logits.dim() != 2
        or labels.dim() != 1
        or labels.is_floating_point()
    ):
        return None
    return int((logits.argmax(dim=1) == labels).sum())


def _num_counted(labels: Any) -> int:
    """Return how many labels torch's cross-entropy does not ignore."""
    return int((labels != IGNORED).sum())
