"""Weighted aggregation of whole models, as the leaders do it between groups (F8).

    w[i] = sum_k p_k * w_k[i],    p_k = weights[k] / sum(weights)

Each element is accumulated in float64 in the order of the models and rounded once, so equal inputs in equal
order give equal bits on every machine. Integer tensors are counters (BatchNorm's `num_batches_tracked`), of
which an average means nothing: the largest is kept.
"""

import math
from collections.abc import Mapping, MutableMapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from socflower import _native
from socflower.errors import ConfigError

Tensor = NDArray[Any]
Model = Mapping[str, Tensor]


def weighted_average(
    models: Sequence[Model], weights: Sequence[float], *, out: MutableMapping[str, Tensor] | None = None
) -> dict[str, Tensor]:
    """Return the average of `models`, tensor by tensor, with `weights` scaled to sum to 1 (F8).

    Tensors may be read-only and unaligned. A NaN in any model reaches the result even at weight zero: test
    with `first_non_finite` before. Peak memory is the result and one tensor in float64 (none for float32).

    Parameters
    ----------
    models : Sequence[Mapping[str, ndarray]]
        At least one; all with the same names, shapes and dtypes. The first one gives the order of names.
    weights : Sequence[float]
        One per model, finite and not negative, not all zero; usually numbers of examples.
    out : MutableMapping[str, ndarray], optional
        Arrays of the same names, shapes and dtypes that receive the result, sharing no memory with `models`.

    Raises
    ------
    ConfigError
        If weights or models do not fit together; the text names the tensor.
    """
    shares = normalised_weights(weights, len(models))
    require_alike(models)
    if out is not None:
        _require_target(models, out)
    result: dict[str, Tensor] = {}
    for name in models[0]:
        tensors = [model[name] for model in models]
        target = np.empty(tensors[0].shape, tensors[0].dtype) if out is None else out[name]
        average_tensor(tensors, shares, target)
        result[name] = target
    return result


def first_non_finite(model: Model) -> str | None:
    """Return the name of the first tensor that holds a NaN or an infinity, or None if all are finite."""
    for name, tensor in model.items():
        if is_native_float32(tensor):
            if not _native.all_finite(np.ascontiguousarray(tensor)):
                return name
        elif np.issubdtype(tensor.dtype, np.inexact) and not np.isfinite(tensor).all():
            return name
    return None


def is_finite(model: Model) -> bool:
    """Return whether no tensor of `model` holds a NaN or an infinity."""
    return first_non_finite(model) is None


def normalised_weights(weights: Sequence[float], num_models: int) -> list[float]:
    """Return `weights` divided by their sum; `ConfigError` unless they are `num_models` usable weights."""
    if num_models == 0:
        raise ConfigError("aggregation: need at least one model, got 0")
    if len(weights) != num_models:
        raise ConfigError(f"aggregation: need one weight per model, got {len(weights)} for {num_models} models")
    values = [float(weight) for weight in weights]
    for index, value in enumerate(values):
        if not (math.isfinite(value) and value >= 0):
            raise ConfigError(f"aggregation: weights[{index}] is {value}, need a finite number of at least 0")
    total = math.fsum(values)
    if not 0 < total < math.inf:
        raise ConfigError(f"aggregation: the {num_models} weights sum to {total}, need a finite sum above 0")
    return [value / total for value in values]


def require_alike(models: Sequence[Model]) -> None:
    """Raise `ConfigError`, naming the tensor, unless all models have equal names, shapes and dtypes."""
    first = models[0]
    for index, model in enumerate(models[1:], start=1):
        if model.keys() != first.keys():
            name = next(iter(sorted(model.keys() ^ first.keys())))
            having, lacking = (index, 0) if name in model else (0, index)
            raise ConfigError(f"aggregation: tensor '{name}' is in model {having} but not in model {lacking}")
        for name, tensor in first.items():
            other = model[name]
            if other.shape != tensor.shape or other.dtype != tensor.dtype:
                raise ConfigError(
                    f"aggregation: tensor '{name}' is {other.dtype}{list(other.shape)} in model {index} "
                    f"but {tensor.dtype}{list(tensor.shape)} in model 0"
                )


def average_tensor(tensors: Sequence[Tensor], shares: Sequence[float], out: Tensor) -> None:
    """Write the average of equally shaped `tensors` into `out`; `shares` sum to 1 (see the module's text)."""
    dtype = tensors[0].dtype
    if is_native_float32(out) and is_native_float32(tensors[0]):
        _native.weighted_sum_into(out, [np.ascontiguousarray(tensor) for tensor in tensors], shares)
    elif np.issubdtype(dtype, np.inexact):
        total = np.zeros(out.shape, np.result_type(dtype, np.float64))
        for tensor, share in zip(tensors, shares, strict=True):
            total += tensor * total.dtype.type(share)
        np.copyto(out, total, casting="same_kind")
    else:
        np.copyto(out, tensors[0])
        for tensor in tensors[1:]:
            np.maximum(out, tensor, out=out)


def is_native_float32(tensor: Tensor) -> bool:
    """Return whether the kernels can read `tensor`'s elements: float32 in the machine's byte order."""
    return tensor.dtype == np.float32 and tensor.dtype.isnative


def _require_target(models: Sequence[Model], out: Mapping[str, Tensor]) -> None:
    require_alike([models[0], out])
    for name, target in out.items():
        if not (target.flags.writeable and target.flags.c_contiguous):
            raise ConfigError(f"aggregation: out['{name}'] must be writable and C-contiguous")
        for index, model in enumerate(models):
            if np.may_share_memory(target, model[name]):
                raise ConfigError(f"aggregation: out['{name}'] shares memory with model {index}; give it its own")
