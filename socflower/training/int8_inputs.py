"""Tokens and sequences in the form that the int8 engine takes."""

import torch
from torch import Tensor, nn

_TOKEN_TYPES = (torch.int64, torch.int32)

PREFIX = "module."


def is_tokens(inputs: Tensor) -> bool:
    """Return whether inputs are the numbers of tokens, (n, length)."""
    return inputs.dtype in _TOKEN_TYPES and inputs.ndim == 2


def engine_inputs(inputs: Tensor) -> Tensor:
    """Return sequences (n, length, features) as images (n, features, length, 1), and tokens in float32; differentiable.

    Images and features (n, features) stay as they are.
    """
    if is_tokens(inputs):
        return inputs.to(torch.float32)
    return inputs.transpose(1, 2).unsqueeze(-1) if inputs.ndim == 3 else inputs


class SequenceReader(nn.Module):
    """A module of sequences, for images of one column; names of its parameters begin with `PREFIX`."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, images: Tensor) -> Tensor:
        """Return the module's result for images (n, features, length, 1)."""
        result: Tensor = self.module(images.flatten(2).transpose(1, 2))
        return result
