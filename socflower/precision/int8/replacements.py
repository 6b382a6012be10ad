"""Modules of the user's that an algorithm replaces before a network is captured."""

import copy
from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from socflower.errors import ConfigError


def with_replacements(
    module: nn.Module, replacements: Mapping[type, Callable[[Any], Any]]
) -> nn.Module:
    """Return a copy of a module with a replacement for each part of these very classes; the module if there are none.

    Raises ConfigError for a replacement that is no module, or whose state has other names or shapes.
    """
    if not replacements:
        return module
    if type(module) in replacements:
        return _replacement("", module, replacements)
    translated = copy.deepcopy(module)
    for path, part in list(translated.named_modules()):
        for name, child in list(part.named_children()):
            if type(child) in replacements:
                where = f"{path}.{name}".lstrip(".")
                part.add_module(name, _replacement(where, child, replacements))
    return translated


def _replacement(
    path: str, module: nn.Module, replacements: Mapping[type, Callable[[Any], Any]]
) -> nn.Module:
    where = f"replacement of {path or 'the network'} ({type(module).__name__})"
    made = replacements[type(module)](module)
    if not isinstance(made, nn.Module):
        raise ConfigError(f"{where}: is a {type(made).__name__}, not a torch.nn.Module")
    expected, found = (
        {key: tuple(tensor.shape) for key, tensor in each.state_dict().items()}
        for each in (module, made)
    )
    if found != expected:
        raise ConfigError(f"{where}: its state is {found}, and the module's is {expected}")
    made.load_state_dict(module.state_dict())
    return made.train(module.training)
