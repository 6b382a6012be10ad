"""How the loss of a batch follows from the losses of its parts, for training that divides a batch.

A mean loss divides by a weight: the number of samples, the number of labels that are not ignored, the summed weights of
the labels' classes. With parts P of a batch B, loss(B) = sum of weight(P) / weight(B) * loss(P), and so are gradients.
"""

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from socflower.errors import ConfigError
from socflower.model_graph.batch_form import Batch, num_samples, split
from socflower.model_graph.graph import in_mode
from socflower.model_graph.model_copy import copied, reason
from socflower.model_graph.random_state import forked_generators
from socflower.workloads.data_source import DataSource
from socflower.workloads.evaluation import IGNORED

WeightFn: TypeAlias = Callable[[Batch], float]

_TRIAL_ROWS = 32
"""The most samples of a batch on which a loss is tried."""

_TRIAL_CUTS = (0.25, 0.6, 0.9)
"""The part of each of the three batches after which it is cut in two."""

_TRIAL_TOLERANCE = 1e-4
"""Relative difference of float32 losses that is rounding."""

_TRIAL_DRAWS = 16
"""Number of tries of a loss that draws random numbers."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LossWeights:
    """The weights of a loss.

    `read` computes the weight of a part from its labels; if it is None, the weight is the number of samples. If
    `is_sum`, the loss is a sum, and parts are added without weights.
    """

    read: WeightFn | None = None
    is_sum: bool = False

    @property
    def is_read(self) -> bool:
        """Whether the weight of a batch can be computed only from its labels."""
        return self.read is not None

    def of(self, part: Batch) -> float:
        """Return the weight of a part.

        It is rounded to float32, so that the float64 sum over a few parts is exact, in whatever order they are added.
        Raises `ConfigError` for a negative weight, and one that is not finite.
        """
        if self.read is None or not num_samples(part):
            return float(num_samples(part))
        weight = float(self.read(part))
        if not 0.0 <= weight < math.inf:
            raise ConfigError(
                f"loss weight: {weight} for {num_samples(part)} samples; it must be 0 or more and finite"
            )
        return float(np.float32(weight))

    def share(self, weight: float, total: float) -> float:
        """Return the factor of a part's loss in that of the batch, from both weights.

        Raises `ConfigError` for a batch without weight, whose mean would be 0 / 0.
        """
        if self.is_sum:
            return 1.0
        if not total:
            raise ConfigError(
                "loss: every label of a batch is ignored or has weight 0; leave such samples out, or use "
                "larger batches"
            )
        return weight / total


BY_SAMPLES = LossWeights()
"""The weights of a mean over samples."""

_LABEL_LOSSES = (nn.CrossEntropyLoss, nn.NLLLoss)
_SAMPLE_LOSSES = (
    nn.MSELoss,
    nn.L1Loss,
    nn.SmoothL1Loss,
    nn.HuberLoss,
    nn.BCELoss,
    nn.BCEWithLogitsLoss,
    nn.KLDivLoss,
    nn.PoissonNLLLoss,
    nn.SoftMarginLoss,
    nn.MultiMarginLoss,
    nn.MultiLabelMarginLoss,
    nn.MultiLabelSoftMarginLoss,
    nn.HingeEmbeddingLoss,
)
_LABEL_FUNCTIONS: tuple[Callable[..., Any], ...] = (functional.cross_entropy, functional.nll_loss)
_SAMPLE_FUNCTIONS: tuple[Callable[..., Any], ...] = (
    functional.mse_loss,
    functional.l1_loss,
    functional.smooth_l1_loss,
    functional.huber_loss,
    functional.binary_cross_entropy,
    functional.binary_cross_entropy_with_logits,
    functional.kl_div,
    functional.poisson_nll_loss,
    functional.soft_margin_loss,
    functional.multi_margin_loss,
    functional.multilabel_margin_loss,
    functional.multilabel_soft_margin_loss,
    functional.hinge_embedding_loss,
)


def weights_of(loss: Callable[..., Any]) -> LossWeights | None:
    """Return the weights of a loss of torch: a module, a function, or a `functools.partial` of a function.

    None for any other loss, also for subclasses of torch's, and for a binary cross-entropy with `weight`, which may
    have an entry for each sample of a whole batch.
    """
    kind = type(loss)
    settings = vars(loss)
    by_label = kind in _LABEL_LOSSES
    if by_label or kind in _SAMPLE_LOSSES:
        settings = settings | settings["_buffers"]
    else:
        function, settings = _with_keywords(loss)
        by_label = function in _LABEL_FUNCTIONS
        if not by_label and function not in _SAMPLE_FUNCTIONS:
            return None
    weight = settings.get("weight")
    reduction = settings.get("reduction", "mean")
    is_legacy = any(settings.get(name) is not None for name in ("size_average", "reduce"))
    if is_legacy or (weight is not None and not by_label):
        return None
    if reduction == "sum":
        return LossWeights(is_sum=True)
    if reduction == "mean" and by_label:
        ignored = int(settings.get("ignore_index", IGNORED))
        return LossWeights(read=lambda batch: label_weight(batch, weight, ignored))
    return BY_SAMPLES if reduction in ("mean", "batchmean") else None


def label_weight(
    batch: Batch, class_weights: Tensor | None = None, ignored: int = IGNORED
) -> float:
    """Return the divisor of the mean cross-entropy of a batch (inputs, labels).

    That is the summed class weights of the labels that are not `ignored`. Labels that are probabilities count one by
    one, and batches of another form by their samples.
    """
    is_pair = isinstance(batch, tuple | list) and len(batch) == 2
    labels = batch[1] if is_pair else None
    if not isinstance(labels, Tensor):
        return num_samples(batch)
    if labels.is_floating_point():
        num_classes = labels.shape[1] if labels.dim() > 1 else 1
        return labels.numel() / num_classes
    counted = labels != ignored
    if class_weights is None:
        return float(counted.sum())
    # A label beyond the classes is reported by the loss itself.
    classes = labels[counted].to(class_weights.device).clamp(0, len(class_weights) - 1)
    return float(class_weights.double()[classes].sum())


def trial_batches(data: DataSource, batch_size: int) -> list[Batch]:
    """Return three batches of evenly spaced samples of `data`, on which a loss is tried.

    Batches of fewer than two samples cannot be divided, so there are no trials.
    """
    total = len(data)
    size = min(batch_size, _TRIAL_ROWS, total)
    if size < 2:
        return []
    rows = np.linspace(0, total - 1, size).astype(np.int64)
    stride = total // (3 * size) + 1
    batches = []
    # Samples may draw from the global generators.
    with forked_generators(0):
        for turn in range(len(_TRIAL_CUTS)):
            shifted = torch.from_numpy((rows + turn * stride) % total)
            batches.append(data.batch(shifted, (0,)))
    return batches


def require_divisible(
    model: nn.Module,
    loss_of: Callable[[nn.Module, Batch], Tensor],
    weights: LossWeights,
    batches: Sequence[Batch],
    *,
    remedy: str,
) -> None:
    """Raise `ConfigError` if the loss of a batch is not the weighted mean of those of its parts.

    Each batch is cut unevenly in two, on a copy of the model in evaluation mode, with the generators restored
    afterwards. For a loss that draws random numbers, the means over 16 draws may differ by four standard errors.
    `remedy` ends the message.
    """
    if not batches:
        return
    try:
        tried = copied(model)
    except ConfigError as error:
        raise ConfigError(
            f"{error}; so its loss cannot be tried, and batches are divided; use a loss of torch"
        ) from error
    with in_mode(tried, training=False), torch.no_grad():
        for batch, cut in zip(batches, _TRIAL_CUTS, strict=False):
            size = num_samples(batch)
            first = min(max(1, round(cut * size)), size - 1)
            joined = partial(_joined, tried, loss_of, weights, batch)
            whole = _Draws(partial(joined, [batch]))
            try:
                parts = _Draws(partial(joined, split(batch, (first, size - first))))
            except Exception as error:
                raise ConfigError(
                    f"the loss of {first} of the {size} samples of a batch fails ({reason(error)}); {remedy}"
                ) from error
            if not whole.agrees_with(parts):
                raise ConfigError(
                    f"the loss cannot be divided: of a batch of {size} samples it is {whole.mean:.6g}, "
                    f"but {parts.mean:.6g} from its parts of {first} and {size - first}; {remedy}"
                )


def _joined(
    model: nn.Module,
    loss_of: Callable[[nn.Module, Batch], Tensor],
    weights: LossWeights,
    batch: Batch,
    parts: Sequence[Batch],
) -> float:
    """Return the loss of a batch from those of its parts."""
    total = weights.of(batch)
    loss = 0.0
    for part in parts:
        weight = weights.of(part)
        if weight:
            loss += weights.share(weight, total) * float(loss_of(model, part))
    return loss


class _Draws:
    """Values of a function that may draw random numbers: one value if it does not, else many."""

    def __init__(self, value_of: Callable[[], float]) -> None:
        values = [self._drawn(value_of, draw) for draw in range(2)]
        self.error = 0.0
        if values[0] != values[1] and math.isfinite(values[0]):
            values += [self._drawn(value_of, draw) for draw in range(2, _TRIAL_DRAWS)]
            self.error = statistics.stdev(values) / math.sqrt(len(values))
        self.mean = statistics.fmean(values)

    def agrees_with(self, other: "_Draws") -> bool:
        """Whether the difference of the means can be rounding, or chance of the draws."""
        if not math.isfinite(self.mean):
            # Training itself reports a loss that is not finite.
            return True
        rounding = _TRIAL_TOLERANCE * max(abs(self.mean), 1e-3)
        chance = 4.0 * math.hypot(self.error, other.error)
        return abs(self.mean - other.mean) <= rounding + chance

    @staticmethod
    def _drawn(value_of: Callable[[], float], draw: int) -> float:
        with forked_generators(draw):
            return value_of()


def _with_keywords(loss: Callable[..., Any]) -> tuple[Callable[..., Any], dict[str, Any]]:
    """Return a function and the keywords that a `functools.partial` gives it."""
    if isinstance(loss, partial) and not loss.args:
        function, settings = _with_keywords(loss.func)
        return function, {**settings, **loss.keywords}
    return loss, {}
