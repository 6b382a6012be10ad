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

_TRIAL_ROWS = 32  # at most, of each batch on which a loss is tried
_TRIAL_CUTS = (0.25, 0.6, 0.9)  # where the three batches are cut in two
_TRIAL_TOLERANCE = 1e-4  # of float32 losses, relative
_TRIAL_DRAWS = 16  # of a loss that draws random numbers


@dataclass(frozen=True, kw_only=True, slots=True)
class LossWeights:
    """The weights of a loss.

    `read` returns the weight of a part, which only its labels tell; None: its number of samples. `is_sum`: the loss is
    a sum, and parts are added as they are.
    """

    read: WeightFn | None = None
    is_sum: bool = False

    @property
    def is_read(self) -> bool:
        """Whether the weight of a batch is known only to those who have its labels."""
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
                f"loss weight: a part of {num_samples(part)} samples has {weight}; it must be 0 or more, "
                "what the mean over the part divides by"
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
                "loss: every label of a batch is ignored or has weight 0, so its mean is 0 / 0; leave "
                "such samples out, or use larger batches"
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
    if type(loss) in (*_LABEL_LOSSES, *_SAMPLE_LOSSES):
        by_label, settings = type(loss) in _LABEL_LOSSES, vars(loss) | vars(loss)["_buffers"]
    else:
        function, settings = _with_keywords(loss)
        if function not in (*_LABEL_FUNCTIONS, *_SAMPLE_FUNCTIONS):
            return None
        by_label = function in _LABEL_FUNCTIONS
    if any(settings.get(legacy) is not None for legacy in ("size_average", "reduce")):
        return None
    weight, reduction = settings.get("weight"), settings.get("reduction", "mean")
    if not by_label and weight is not None:
        return None
    if reduction == "sum":
        return LossWeights(is_sum=True)
    if by_label and reduction == "mean":
        ignored = int(settings.get("ignore_index", IGNORED))
        return LossWeights(read=lambda batch: label_weight(batch, weight, ignored))
    return BY_SAMPLES if reduction in ("mean", "batchmean") else None


def label_weight(
    batch: Batch, class_weights: Tensor | None = None, ignored: int = IGNORED
) -> float:
    """Return what the mean cross-entropy of a batch (inputs, labels) divides by.

    That is the summed class weights of the labels that are not `ignored`. Labels that are probabilities count one by
    one, and batches of another form by their samples.
    """
    if not isinstance(batch, tuple | list) or len(batch) != 2 or not isinstance(batch[1], Tensor):
        return num_samples(batch)
    labels = batch[1]
    if labels.is_floating_point():
        return labels.numel() / labels.shape[1] if labels.dim() > 1 else len(labels)
    counted = labels != ignored
    if class_weights is None:
        return float(counted.sum())
    # A label beyond the classes is reported by the loss itself.
    classes = labels[counted].to(class_weights.device).clamp(0, len(class_weights) - 1)
    return float(class_weights.double()[classes].sum())


def trial_batches(data: DataSource, batch_size: int) -> list[Batch]:
    """Return three batches of evenly spaced samples of `data`, on which a loss is tried; none of fewer than two."""
    size = min(batch_size, _TRIAL_ROWS, len(data))
    if size < 2:
        return []
    rows = np.linspace(0, len(data) - 1, size).astype(np.int64)
    with forked_generators(0):  # samples may draw from global generators
        return [
            data.batch(
                torch.from_numpy((rows + turn * (len(data) // (3 * size) + 1)) % len(data)), (0,)
            )
            for turn in range(len(_TRIAL_CUTS))
        ]


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
    afterwards. A loss that draws random numbers may differ by what its mean over 16 draws leaves open. `remedy` ends
    the message.
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
            sizes = (first, size - first)
            whole = _Draws(partial(_joined, tried, loss_of, weights, [batch], batch))
            try:
                parts = _Draws(
                    partial(_joined, tried, loss_of, weights, split(batch, sizes), batch)
                )
            except Exception as error:
                raise ConfigError(
                    f"the loss of {first} of the {size} samples of a batch fails ({reason(error)}), and "
                    f"batches are divided; {remedy}"
                ) from error
            if not whole.agrees_with(parts):
                raise ConfigError(
                    f"the loss cannot be divided: of a batch of {size} samples it is {whole.mean:.6g}, "
                    f"but {parts.mean:.6g} from its parts of {sizes[0]} and {sizes[1]}; {remedy}"
                )


def _joined(
    model: nn.Module,
    loss_of: Callable[[nn.Module, Batch], Tensor],
    weights: LossWeights,
    parts: Sequence[Batch],
    batch: Batch,
) -> float:
    """Return the loss of a batch from those of its parts."""
    total = weights.of(batch)
    own = [(part, weights.of(part)) for part in parts]
    return sum(
        weights.share(weight, total) * float(loss_of(model, part)) for part, weight in own if weight
    )


class _Draws:
    """Values of a function that may draw random numbers: one value if it does not, else many."""

    def __init__(self, value_of: Callable[[], float]) -> None:
        values = [self._drawn(value_of, draw) for draw in range(2)]
        if values[0] != values[1] and math.isfinite(values[0]):
            values += [self._drawn(value_of, draw) for draw in range(2, _TRIAL_DRAWS)]
        self.mean = statistics.fmean(values)
        self.error = 0.0 if len(values) == 2 else statistics.stdev(values) / math.sqrt(len(values))

    def agrees_with(self, other: "_Draws") -> bool:
        """Whether both means differ by rounding alone, or by what the draws leave open."""
        if not math.isfinite(self.mean):
            return True  # training itself reports a loss that is not finite
        allowed = _TRIAL_TOLERANCE * max(abs(self.mean), 1e-3) + 4.0 * math.hypot(
            self.error, other.error
        )
        return abs(self.mean - other.mean) <= allowed

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
