"""Batches of any form: tensors in tuples, lists and dicts, as a collate function returns them.

The first dimension of every tensor counts samples. `()` is the batch without samples.
"""

from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from socflower.errors import ConfigError

Batch: TypeAlias = Any

NOTHING: tuple[()] = ()
"""The batch of no samples."""


def num_samples(batch: Batch) -> int:
    """Return the length of the first tensor in `batch`; 0 if it has none."""
    return next((len(leaf) for leaf in tensors_in(batch) if leaf.dim()), 0)


def pair_of(batch: Batch, reader: str) -> tuple[Tensor, Tensor]:
    """Return `batch` as a pair (inputs, labels) of tensors; `ConfigError` in the name of `reader` for other batches."""
    if not num_samples(batch):
        return torch.empty(0), torch.empty(0, dtype=torch.int64)
    is_pair = isinstance(batch, tuple | list) and len(batch) == 2
    if is_pair and all(isinstance(part, Tensor) for part in batch):
        return batch[0], batch[1]
    raise ConfigError(
        f"{reader}: takes batches (inputs, labels) of two tensors, and the data give {form_of(batch)}; "
        "give the data a collate_fn that returns such a pair, or use FP32Trainer"
    )


def labelled(batch: Batch, reader: str) -> tuple[Batch, Any]:
    """Return inputs of any form and their labels, from a pair, or from a dict with an entry `labels`.

    `ConfigError` in the name of `reader` for other batches.
    """
    if isinstance(batch, Mapping) and "labels" in batch:
        return {key: one for key, one in batch.items() if key != "labels"}, batch["labels"]
    if isinstance(batch, tuple | list) and len(batch) == 2:
        return batch[0], batch[1]
    raise ConfigError(
        f"{reader}: takes batches (inputs, labels), or dicts with labels, and the data give {form_of(batch)}; give "
        "the data a collate_fn that returns such a pair"
    )


def concatenated(batches: Sequence[Batch]) -> Batch | None:
    """Return one batch of all samples, or None if forms, shapes or types differ, as for padded sequences."""
    if len({_signature(batch) for batch in batches}) != 1:
        return None
    return _combine(batches, lambda tensors: torch.cat(tensors) if tensors[0].dim() else tensors[0])


def split(batch: Batch, sizes: Sequence[int]) -> list[Batch]:
    """Return consecutive parts of a batch with `sizes` samples."""

    def rows(first: int, end: int) -> Batch:
        if first == end:
            return NOTHING
        return mapped(batch, lambda tensor: tensor[first:end] if tensor.dim() else tensor)

    return [rows(first, end) for first, end in pairwise(accumulate(sizes, initial=0))]


def mapped(batch: Batch, change: Callable[[Tensor], Any]) -> Batch:
    """Return `batch` with every tensor changed."""
    return _combine([batch], lambda tensors: change(tensors[0]))


def output_entry(output: Any, name: str) -> Any:
    """Return a dict's entry or an attribute of a model's output, such as its loss; None without it."""
    return output.get(name) if isinstance(output, Mapping) else getattr(output, name, None)


def output_of(model: nn.Module, inputs: Batch) -> Any:
    """Return `model(inputs)`: a dict goes to its keyword arguments, a tuple or list to its positional ones."""
    if isinstance(inputs, Mapping):
        return model(**inputs)
    return model(*inputs) if isinstance(inputs, tuple | list) else model(inputs)


def form_of(batch: Batch) -> str:
    """Describe a batch in a few words."""
    if isinstance(batch, Tensor):
        return f"a tensor of shape {tuple(batch.shape)}"
    if isinstance(batch, Mapping):
        return f"a dict of {', '.join(map(str, batch))}"
    if isinstance(batch, tuple | list):
        return f"{type(batch).__name__} of {', '.join(map(form_of, batch)) or 'nothing'}"
    return type(batch).__name__


def tensors_in(batch: Batch) -> list[Tensor]:
    """Return the tensors of `batch` in order."""
    if isinstance(batch, Tensor):
        return [batch]
    parts = batch.values() if isinstance(batch, Mapping) else batch
    if not isinstance(batch, Mapping | tuple | list):
        return []
    return [leaf for part in parts for leaf in tensors_in(part)]


def _signature(batch: Batch) -> Any:
    """Return a value that is equal for batches that can be concatenated."""
    if isinstance(batch, Tensor):
        return batch.dtype, tuple(batch.shape[1:]), batch.dim()
    if isinstance(batch, Mapping):
        return type(batch), tuple((key, _signature(part)) for key, part in batch.items())
    if isinstance(batch, tuple | list):
        return type(batch), tuple(_signature(part) for part in batch)
    return type(batch)


def _combine(batches: Sequence[Batch], join: Callable[[list[Tensor]], Any]) -> Batch:
    """Return one batch of the form of `batches`, each tensor joined from theirs; other values are the first one's."""
    first = batches[0]
    if isinstance(first, Tensor):
        return join(list(batches))
    if isinstance(first, Mapping):
        entries = {key: _combine([batch[key] for batch in batches], join) for key in first}
        # A type that takes a dict: a dict itself, or a BatchEncoding of transformers.
        made: Callable[[Mapping[Any, Any]], Batch] = type(first)
        return made(entries)
    if isinstance(first, tuple | list):
        parts = [_combine(parts, join) for parts in zip(*batches, strict=True)]
        # A named tuple takes its fields one by one.
        return type(first)(*parts) if hasattr(first, "_fields") else type(first)(parts)
    return first
