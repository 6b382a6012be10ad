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
"""A function of a batch that returns the divisor of its metrics, such as the number of labels that count."""

IGNORED = -100
"""The label that torch's cross-entropy ignores by default."""

_GIVE_STEP = "give a function (model, batch) that returns metrics, as evaluate(..., step=...)"


@plain_numbers
@dataclass(frozen=True, slots=True)
class Evaluation:
    """Metrics of a model, each a mean over `num_samples` samples, or over the part of them that `weight` counts."""

    metrics: Mapping[str, float]
    num_samples: int
    # The divisor of the metrics: the number of samples, unless some of their labels do not count.
    weight: float

    @property
    def num_examples(self) -> int | float:
        """The weight of these metrics in an average over nodes, as an int if it is a whole number."""
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
            known = ", ".join(self.metrics) or "nothing"
            raise ConfigError(
                f"evaluation: there is no {name}, only {known}; return it from `step`"
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
        Without it, pairs (inputs, labels) give accuracy and cross-entropy. Dicts give the loss of `model(**batch)`, and
        accuracy if it returns logits (n, classes) for labels (n,). Labels of -100 do not count, as in training.
    weight : (batch) -> float, optional
        The divisor of a batch's metrics; by default its number of samples. A model that averages over tokens needs the
        number of tokens that count.
    device : str, optional
        "auto", "cpu", "cuda", …, as in `FP32Trainer`; the model is moved there and stays. By default the model's own.

    Notes
    -----
    The model runs in evaluation mode; afterwards the mode of every submodule is restored. Raises ConfigError for empty
    data, a batch size below 1, and batches without a known metric.
    """
    source = as_data_source(data)
    num_rows = len(source)
    if num_rows == 0:
        raise ConfigError("evaluation: the data has no samples")
    require_range("evaluation", least=1, batch_size=batch_size)
    if device is not None:
        model.to(resolve_device(device, "evaluation: device"))
    where = device_of(model)
    sums: dict[str, float] = {}
    total = 0.0
    with in_mode(model, training=False), torch.inference_mode():
        for start in range(0, num_rows, batch_size):
            rows = torch.arange(start, min(start + batch_size, num_rows))
            batch = on_device(source.batch(rows), where)
            added, counted = _sums(model, batch, step, weight)
            # Without a label that counts, the batch's means are 0 / 0.
            if counted:
                total += counted
                sums = _added(sums, added)
    if not total:
        raise ConfigError("evaluation: no label of the data counts; give data with labels")
    return Evaluation({name: value / total for name, value in sums.items()}, num_rows, total)


_Sums: TypeAlias = tuple[dict[str, float], float]
"""The sums of a batch's metrics, and their weight."""


def _added(sums: dict[str, float], added: dict[str, float]) -> dict[str, float]:
    if sums and added.keys() != sums.keys():
        raise ConfigError(
            f"evaluation: one batch gave {', '.join(sums) or 'nothing'} and another "
            f"{', '.join(added) or 'nothing'}"
        )
    return {name: sums.get(name, 0.0) + value for name, value in added.items()}


def _sums(
    model: nn.Module,
    batch: Batch,
    step: EvaluationStep | None,
    weight: EvaluationWeight | None,
) -> _Sums:
    own = None if weight is None else float(weight(batch))
    if own is not None and not 0.0 <= own < math.inf:
        raise ConfigError(f"evaluation: the weight of a batch is {own:g}; it must be 0 or more")
    if step is not None:
        counted = num_samples(batch) if own is None else own
        means = step(model, batch)
        return {name: float(value) * counted for name, value in means.items()}, counted
    if isinstance(batch, Mapping):
        return _model_s_own_sums(model, batch, own)
    if isinstance(batch, tuple | list) and len(batch) == 2:
        inputs, labels = batch
        return _classifier_sums(model, inputs, labels, own)
    raise ConfigError(
        f"evaluation: the data give {form_of(batch)}, which has no known metric; {_GIVE_STEP}"
    )


def _model_s_own_sums(model: nn.Module, batch: Mapping[str, Any], weight: float | None) -> _Sums:
    """Return the loss that a model gives for a dict, and its correct labels if its logits tell."""
    made, labels = model(**batch), batch.get("labels")
    loss = output_entry(made, "loss")
    if loss is None:
        raise ConfigError(
            f"evaluation: the model returned no loss for {form_of(batch)}; {_GIVE_STEP}"
        )
    num_correct = _num_correct(output_entry(made, "logits"), labels)
    counted = float(num_samples(batch)) if num_correct is None else _num_counted(labels)
    if weight is not None:
        counted = weight
    sums = {} if num_correct is None else {"accuracy": float(num_correct)}
    return {**sums, "loss": float(loss) * counted}, counted


def _classifier_sums(model: nn.Module, inputs: Any, labels: Any, weight: float | None) -> _Sums:
    logits = output_of(model, inputs)
    num_correct = _num_correct(logits, labels)
    if num_correct is None:
        raise ConfigError(
            f"evaluation: {form_of(logits)} for labels as {form_of(labels)} are no classes; {_GIVE_STEP}"
        )
    loss = float(functional.cross_entropy(logits, labels, reduction="sum"))
    counted = _num_counted(labels) if weight is None else weight
    return {"accuracy": float(num_correct), "loss": loss}, counted


def _num_correct(logits: Any, labels: Any) -> int | None:
    """Return how many labels (n,) have the largest of their logits (n, classes); None for other forms."""
    if not isinstance(logits, Tensor) or not isinstance(labels, Tensor):
        return None
    if logits.dim() != 2 or labels.dim() != 1 or labels.is_floating_point():
        return None
    return int((logits.argmax(dim=1) == labels).sum())


def _num_counted(labels: Any) -> float:
    """Return how many labels torch's cross-entropy does not ignore."""
    return float((labels != IGNORED).sum())
