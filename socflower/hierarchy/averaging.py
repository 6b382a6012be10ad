"""Weighted averages of models (F8): of groups on the server, and of the halves in split training.

    w[i] = sum_k p_k * w_k[i],    p_k = weights[k] / sum(weights)

Each element is accumulated in float64 in the order of the models and rounded once, so equal inputs in equal
order give bit-identical results on every machine. Integer tensors are counters (BatchNorm's `num_batches_tracked`);
an average of them is meaningless, so the largest value is kept.
"""

import math
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from socflower import _native
from socflower.errors import ConfigError, require_range

Tensor = NDArray[Any]
Model = Mapping[str, Tensor]
Average = TypeVar("Average")

# Of all models together; below this, starting threads takes longer than they save.
_THREADED_BYTES = 32e6
# More threads do not increase memory throughput.
_NUM_THREADS = min(4, os.cpu_count() or 1)


def average_tensors(tensors: Sequence[Tensor], shares: Sequence[float]) -> Tensor:
    """Return the average of equally shaped `tensors`; `shares` sum to 1 (formula at the top of this module)."""
    dtype = tensors[0].dtype
    average = np.empty(tensors[0].shape, dtype)
    if is_native_float32(tensors[0]):
        _native.weighted_sum_into(
            average, [np.ascontiguousarray(tensor) for tensor in tensors], shares
        )
    elif np.issubdtype(dtype, np.inexact):
        total = np.zeros(average.shape, np.result_type(dtype, np.float64))
        # The order of the sum is fixed, so that results are bit-identical.
        for tensor, share in zip(tensors, shares, strict=True):
            total += tensor * total.dtype.type(share)
        np.copyto(average, total, casting="same_kind")
    else:
        np.copyto(average, tensors[0])
        for tensor in tensors[1:]:
            np.maximum(average, tensor, out=average)
    return average


def weighted_average(models: Sequence[Model], weights: Sequence[float]) -> dict[str, Tensor]:
    """Return the average of `models`, tensor by tensor, with `weights` scaled to sum to 1 (F8).

    Tensors may be read-only and unaligned. A NaN in any model reaches the result even at weight zero: check
    with `first_non_finite` first. For large models several threads average one tensor each, with bit-identical results.
    Peak memory is the result and one tensor in float64 (none for float32).

    Parameters
    ----------
    models : Sequence[Mapping[str, ndarray]]
        At least one; all with the same names, shapes and dtypes. The result has the first one's order of names.
    weights : Sequence[float]
        One per model, finite and not negative, not all zero; usually numbers of examples.

    Raises
    ------
    ConfigError
        If weights are invalid or models differ in names, shapes or dtypes; the text names the tensor.
    """
    return averaged_by(average_tensors, models, weights)


def averaged_by(
    average: Callable[[Sequence[Tensor], Sequence[float]], Average],
    models: Sequence[Model],
    weights: Sequence[float],
) -> dict[str, Average]:
    """Return the result of `weighted_average`, with tensors computed and returned by `average`, without a copy."""
    shares = _shares(weights, len(models))
    _require_alike(models)
    # Names are in the order of the first model.
    by_tensor = {name: [model[name] for model in models] for name in models[0]}
    if len(models) * sum(tensor.nbytes for tensor in models[0].values()) < _THREADED_BYTES:
        return {name: average(tensors, shares) for name, tensors in by_tensor.items()}
    with ThreadPoolExecutor(_NUM_THREADS) as threads:
        # Largest first, so that no thread starts a large tensor when the others have finished.
        order = sorted(by_tensor, key=lambda name: -by_tensor[name][0].nbytes)
        done = threads.map(lambda name: average(by_tensor[name], shares), order)
        averages = dict(zip(order, done, strict=True))
    return {name: averages[name] for name in by_tensor}


def first_non_finite(model: Model, sent: Model | None = None) -> str | None:
    """Return the name of the first tensor that holds a NaN or an infinity, or None if all are finite.

    Infinities that `sent` has too are constants, such as the -inf of an attention mask; they do not count. A NaN always
    counts: the training diverged before.
    """
    for name, tensor in model.items():
        if not _is_finite(tensor) and not _is_infinite_by_design(tensor, (sent or {}).get(name)):
            return name
    return None


def non_finite_tensors(model: Model) -> dict[str, Tensor]:
    """Return copies of the tensors that hold a NaN or an infinity, as `sent` for `first_non_finite`."""
    return {name: tensor.copy() for name, tensor in model.items() if not _is_finite(tensor)}


def _is_finite(tensor: Tensor) -> bool:
    if is_native_float32(tensor):
        return _native.all_finite(np.ascontiguousarray(tensor))
    return not np.issubdtype(tensor.dtype, np.inexact) or bool(np.isfinite(tensor).all())


def _is_infinite_by_design(tensor: Tensor, sent: Tensor | None) -> bool:
    if sent is None or (sent.shape, sent.dtype) != (tensor.shape, tensor.dtype):
        return False
    not_finite = ~np.isfinite(tensor)
    return np.array_equal(tensor[not_finite], sent[not_finite])


def is_native_float32(tensor: Tensor) -> bool:
    """Return whether the kernels can read `tensor`'s elements: float32 in the machine's byte order."""
    return tensor.dtype == np.float32 and tensor.dtype.isnative


def _shares(weights: Sequence[float], num_models: int) -> list[float]:
    """Return `weights` divided by their sum; `ConfigError` unless they are `num_models` usable weights."""
    require_range("aggregation", least=1, num_models=num_models)
    if len(weights) != num_models:
        raise ConfigError(f"aggregation: got {len(weights)} weights for {num_models} models")
    values = [float(weight) for weight in weights]
    named: dict[str, Any] = {f"weights[{index}]": value for index, value in enumerate(values)}
    require_range("aggregation", least=0, **named)
    total = math.fsum(values)
    require_range("aggregation", above=0, sum_of_weights=total)
    return [value / total for value in values]


def _require_alike(models: Sequence[Model]) -> None:
    """Raise `ConfigError`, naming the tensor, unless all models have equal names, shapes and dtypes."""
    first = _forms(models[0])
    for index, model in enumerate(models[1:], start=1):
        own = _forms(model)
        for name in sorted(own.keys() | first.keys()):
            form, expected = own.get(name, "missing"), first.get(name, "missing")
            if form != expected:
                raise ConfigError(
                    f"aggregation: tensor {name!r} is {form} in model {index} and {expected} in model 0"
                )


def _forms(model: Model) -> dict[str, str]:
    return {name: f"{tensor.dtype}{list(tensor.shape)}" for name, tensor in model.items()}
