"""Copies of a user's model, which are run or followed instead of the model, so that it does not change.

A forward pass may change buffers, attributes and the random state, and torch.fx stores constants in a model.
"""

import copy
from typing import Any

import torch
from torch import nn

from socflower.errors import ConfigError
from socflower.model_graph.batch_form import tensors_in


def copied(model: nn.Module, name: str = "", memo: dict[int, Any] | None = None) -> nn.Module:
    """Return a copy of a model; `ConfigError` with the reason if it cannot be copied.

    `memo` has replacements of some tensors, by the `id` of the tensor. A module may keep results of a forward pass as
    attributes; they are copied without their autograd graph, since torch copies only leaves.
    """
    memo = {} if memo is None else memo
    for result in kept_results(model):
        memo.setdefault(id(result), result.detach().clone())
    try:
        return copy.deepcopy(model, memo)
    except Exception as error:
        # Locks, files, process groups and others raise various types.
        raise ConfigError(
            f"model {name or type(model).__name__}: cannot be copied: {reason(error)}"
        ) from error


def kept_results(model: nn.Module) -> list[torch.Tensor]:
    """Return the tensors with an autograd graph that are attributes of a model's modules."""
    return [
        tensor
        for module in model.modules()
        for tensor in tensors_in(list(vars(module).values()))
        if not tensor.is_leaf
    ]


def reason(error: BaseException) -> str:
    """Return an error as one line."""
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
