"""Conversion between tensors and the NumPy arrays that are sent, in the memory layout that the layers expect."""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from socflower.errors import ConfigError


def to_array(tensor: torch.Tensor, *, copy: bool = True) -> NDArray[Any]:
    """Return a tensor's values in C order; without `copy` the array may share the tensor's memory."""
    if tensor.dtype is torch.bfloat16:
        raise ConfigError("model: NumPy has no bfloat16; convert the model with .float()")
    array: NDArray[Any] = tensor.detach().cpu().numpy()
    # ascontiguousarray would turn scalars into vectors.
    return np.array(array, order="C", copy=True) if copy or not array.flags.c_contiguous else array


def to_tensor(
    array: NDArray[Any], device: torch.device, layout: Sequence[int] = ()
) -> torch.Tensor:
    """Return an array as a tensor, with its own memory if the array is read-only or has another layout.

    Layers choose their algorithm by memory layout, so only tensors with the layout of the undivided model give
    bit-identical results.
    """
    if not array.flags.writeable or any(stride < 0 for stride in array.strides):
        array = np.array(array)
    tensor = torch.from_numpy(array).to(device)
    if not layout or len(layout) != tensor.ndim:
        return tensor
    inverse = sorted(range(len(layout)), key=lambda place: layout[place])
    return tensor.permute(*layout).contiguous().permute(*inverse)


def tensor_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Return the bytes of tensors, also of those on the meta device."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def layout_of(tensor: torch.Tensor) -> tuple[int, ...]:
    """Return a tensor's dimensions from the outermost in memory to the innermost."""
    strides = tensor.stride()
    return tuple(sorted(range(tensor.ndim), key=lambda dim: (-strides[dim], dim)))


def spec_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return shape, strides and type of a tensor, without its values."""
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
