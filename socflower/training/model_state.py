"""What of a model travels: the parameters that train, and buffers; frozen parameters stay where they are."""

import hashlib
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from socflower.errors import ConfigError


def trainable_state(model: nn.Module) -> dict[str, Tensor]:
    """Return the entries of the model's state dict that training changes: trainable parameters, and all buffers.

    Without frozen parameters (`requires_grad` is False) this is the whole state dict.
    """
    return {
        name: entry.detach()
        for name, entry in model.state_dict(keep_vars=True).items()
        if entry.requires_grad or not isinstance(entry, nn.Parameter)
    }


def num_bytes_of(model: nn.Module) -> int:
    """Return the bytes of all entries of the model's state dict."""
    return sum(tensor.nbytes for tensor in model.state_dict().values())


def untrained_names(model: nn.Module) -> list[str]:
    """Return the names in the state dict of what no optimiser steps: buffers and frozen parameters."""
    return [
        name
        for name, entry in model.state_dict(keep_vars=True).items()
        if not (isinstance(entry, nn.Parameter) and entry.requires_grad)
    ]


def frozen_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters that are not trained, by their names in the state dict."""
    return {
        name: entry
        for name, entry in model.state_dict(keep_vars=True).items()
        if isinstance(entry, nn.Parameter) and not entry.requires_grad
    }


def load_trainable_state(model: nn.Module, arrays: Mapping[str, Tensor]) -> None:
    """Load a `trainable_state`, or a whole state dict.

    Raises `ConfigError` for a tensor that the model does not have, or has in another shape, and for a trainable
    parameter or buffer that is missing.
    """
    own = model.state_dict()
    for name, tensor in arrays.items():
        if name not in own:
            raise ConfigError(
                f"{_MODELS_DIFFER}: {type(model).__name__} has no {name!r}, which was sent"
            )
        if own[name].shape != tensor.shape:
            raise ConfigError(
                f"{_MODELS_DIFFER}: {name!r} has the shape {tuple(own[name].shape)} and was sent with "
                f"{tuple(tensor.shape)}"
            )
    if missing := [name for name in trainable_state(model) if name not in arrays]:
        raise ConfigError(
            f"{_MODELS_DIFFER}: {missing[0]!r} is trained, or a buffer, and was not sent"
        )
    model.load_state_dict(arrays, strict=False)


def require_same_base(own: str, expected: str | None, config_key: str) -> None:
    """Raise `ConfigError` unless the `frozen_digest` of this node's model is the server's.

    The server sends its digest as `config_key` of the configs; None: it sent none.
    """
    if own and expected is None:
        raise ConfigError(
            "the model has frozen parameters, which were not sent; so that every node can check that "
            f"its own are the server's, give ConfigRecord({{{config_key!r}: frozen_digest(model)}}) "
            "as train_config, and as evaluate_config if clients evaluate"
        )
    if expected is not None and own != expected:
        raise ConfigError(
            f"the frozen parameters of this node are not the server's: their digest is "
            f"{own[:12] or 'of nothing'}, and the server's {expected[:12]}; load the same ones in "
            "model_fn, or make them with the same seed"
        )


_MODELS_DIFFER = "the model of this node is not the server's"


def frozen_digest(model: nn.Module) -> str:
    """Return a SHA-256 of the frozen parameters' names, types, shapes and values; empty if nothing is frozen."""
    frozen = frozen_parameters(model)
    digest = hashlib.sha256()
    for name in sorted(frozen):
        tensor = frozen[name].detach().cpu().contiguous()
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest() if frozen else ""
