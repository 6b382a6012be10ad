"""Tensors as the arrays that travel, and back, in the memory layout that the layers expect."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from socflower.errors import ConfigError


def to_array(tensor: torch.Tensor, *, copy: bool = True) -> NDArray[Any]:
    """Return a tensor's values in C order; without `copy` perhaps the tensor's own memory."""
    if tensor.dtype is torch.bfloat16:
        raise ConfigError("model: bfloat16 tensors have no NumPy form; convert the model with .float()")
    array: NDArray[Any] = tensor.detach().cpu().numpy()
    # ascontiguousarray would make vectors of scalars.
    return np.array(array, order="C", copy=True) if copy or not array.flags.c_contiguous else array


def to_tensor(array: NDArray[Any], device: torch.device, layout: Sequence[int] = ()) -> torch.Tensor:
    """Return an array as a tensor, with its own memory where the array's may not be written or lies otherwise.

    Layers choose other algorithms for other layouts, so that only tensors which lie in memory as in the undivided model
    give its very bits.
    """
    if not array.flags.writeable or any(stride < 0 for stride in array.strides):
        array = np.array(array)
    tensor = torch.from_numpy(array).to(device)
    if not layout or len(layout) != tensor.ndim:
        return tensor
    inverse = sorted(range(len(layout)), key=lambda place: layout[place])
    return tensor.permute(*layout).contiguous().permute(*inverse)


def to_tensors(arrays: Mapping[str, NDArray[Any]]) -> dict[str, torch.Tensor]:
    """Return arrays as tensors of their own."""
    return {name: torch.from_numpy(np.array(array)) for name, array in arrays.items()}


def form_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return shape, strides and type of a tensor, without its values."""
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
