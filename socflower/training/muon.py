"""Muon for a network's hidden layers, AdamW for all else (Jordan et al., 2024; torch.optim.Muon)."""

from collections.abc import Callable, Iterable
from functools import partial
from inspect import unwrap
from typing import Any

import torch
from torch import Tensor, nn

from socflower.errors import ConfigError, require_range
from socflower.plain_numbers import plain_numbers


@plain_numbers
def muon(
    learning_rate: float = 0.02, momentum: float = 0.95, weight_decay: float = 0.0
) -> Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]:
    """Return a factory of `HiddenMuon`.

    Raises `ConfigError` for a learning rate that is not positive and finite, and for a momentum outside [0, 1).
    """
    require_range("muon", above=0.0, learning_rate=learning_rate)
    require_range("muon", least=0.0, below=1.0, momentum=momentum)
    require_range("muon", least=0.0, weight_decay=weight_decay)
    return partial(
        HiddenMuon, learning_rate=learning_rate, momentum=momentum, weight_decay=weight_decay
    )


class HiddenMuon(torch.optim.Optimizer):
    """`torch.optim.Muon` on hidden matrices and convolution kernels, `torch.optim.AdamW` on the other parameters.

    Hidden are the parameters of two or more dimensions except the first and the last of the model, which are those
    of its input (an embedding, or the first layer) and of its output. A kernel is a matrix with a row for each output
    channel, as with Muon's author. Its steps are scaled to the size of AdamW's (`match_rms_adamw`, Liu et al., 2025),
    so that one learning rate and one weight decay serve both. Raises `ConfigError` for a model without hidden layers.
    """

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        *,
        learning_rate: float,
        momentum: float,
        weight_decay: float,
    ) -> None:
        own = list(parameters)
        hidden = hidden_weights(own)
        if not hidden:
            raise ConfigError(
                "muon: the model has no layer between its first and its last one; use 'adamw'"
            )
        chosen = {id(weight) for weight in hidden}
        rest = [parameter for parameter in own if id(parameter) not in chosen]
        # These share the memory of the model's parameters.
        matrices = [nn.Parameter(_as_matrix(weight.detach(), weight)) for weight in hidden]
        of_all: dict[str, Any] = {"lr": learning_rate, "weight_decay": weight_decay}
        self._parts = (
            torch.optim.Muon(matrices, momentum=momentum, adjust_lr_fn="match_rms_adamw", **of_all),
            torch.optim.AdamW(rest, **of_all),
        )
        groups = [
            {**part.param_groups[0], "params": params}
            for part, params in zip(self._parts, (hidden, rest), strict=True)
        ]
        super().__init__(groups, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Step both optimisers with the settings and the states of this one."""
        for group, part in zip(self.param_groups, self._parts, strict=True):
            (own,) = part.param_groups
            own.update({key: value for key, value in group.items() if key != "params"})
            for parameter, inner in zip(group["params"], own["params"], strict=True):
                if inner is not parameter:
                    gradient = parameter.grad
                    inner.grad = None if gradient is None else _as_matrix(gradient, parameter)
                # A restored state has other values than those that the part has seen.
                part.state[inner] = self.state[parameter]
            # Without torch's hooks around it, such as the pause of a hot device: they belong to the whole step.
            unwrap(type(part).step)(part)


def hidden_weights(parameters: Iterable[nn.Parameter]) -> list[nn.Parameter]:
    """Return the trainable parameters with two or more dimensions, except the first and the last one."""
    return [each for each in parameters if each.requires_grad and each.dim() > 1][1:-1]


def _as_matrix(tensor: Tensor, parameter: Tensor) -> Tensor:
    """Return a row for each output channel, in the parameter's order in memory, which may have the channels last."""
    if parameter.dim() > 2 and not parameter.is_contiguous():
        tensor = tensor.movedim(1, -1)
    return tensor.reshape(len(tensor), -1)
