"""The part of a model that nodes exchange: trainable parameters and buffers, without frozen parameters."""

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
    """Return the names of the entries of the state dict that no optimiser changes: buffers and frozen parameters."""
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
    own = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    sent = {name: tuple(tensor.shape) for name, tensor in arrays.items()}
    for name in [*sent, *trainable_state(model)]:
        if own.get(name) != sent.get(name):
            raise ConfigError(
                f"{type(model).__name__} of this node is not the server's: {name!r} has the shape "
                f"{own.get(name, 'of nothing')} here and {sent.get(name, 'of nothing')} there"
            )
    model.load_state_dict(arrays, strict=False)


def require_same_base(own: str, expected: str | None, config_key: str) -> None:
    """Raise `ConfigError` unless the `frozen_digest` of this node's model is the server's.

    The server sends its digest as `config_key` of the configs; None: it sent none.
    """
    if own and expected is None:
        raise ConfigError(
            "the model has frozen parameters, which were not sent; so that nodes can compare theirs, give "
            f"ConfigRecord({{{config_key!r}: frozen_digest(model)}}) as train_config and evaluate_config"
        )
    if expected is not None and own != expected:
        raise ConfigError(
            "the frozen parameters of this node are not the server's: their digest is "
            f"{own[:12] or 'of nothing'}, and the server's {expected[:12]}; load or make the same ones"
        )


def frozen_digest(model: nn.Module) -> str:
    """Return a SHA-256 of the frozen parameters' names, types, shapes and values; empty if nothing is frozen."""
    frozen = frozen_parameters(model)
    digest = hashlib.sha256()
    for name in sorted(frozen):
        tensor = frozen[name].detach().cpu().contiguous()
        header = f"{name} {tensor.dtype} {tuple(tensor.shape)}\n"
        digest.update(header.encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest() if frozen else ""
