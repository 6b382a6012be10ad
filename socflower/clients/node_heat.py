"""Heat as an operator has it in `flower-supernode --node-config`: whether a node minds it, and its limits."""

from dataclasses import fields
from functools import cache

from flwr.app import Context, Message
from flwr.clientapp.typing import ClientAppCallable, Mod

from socflower.clients.heat_guard import HeatLimits
from socflower.clients.mods import heat_mod
from socflower.clients.node_config import NodeConfig
from socflower.errors import ConfigError

_SWITCH = "heat"
_LIMITS = {f"heat-{entry.name.replace('_', '-')}": entry.name for entry in fields(HeatLimits)}


def node_heat_limits(node_config: NodeConfig) -> HeatLimits | None:
    """Return a node's limits, None where it does not mind heat; `ConfigError` for a key that cannot be.

    Keys: `heat` (true: mind it), and the fields of `HeatLimits`, as in `heat-pause-c=80.0`.
    """
    switch = node_config.get(_SWITCH, False)
    given = {key: value for key, value in node_config.items() if key.startswith(f"{_SWITCH}-")}
    unknown = sorted(set(given) - set(_LIMITS))
    if unknown:
        raise ConfigError(f"node config: {unknown[0]} is unknown; use one of {', '.join(_LIMITS)}")
    if not isinstance(switch, bool):
        raise ConfigError(f"node config: {_SWITCH} = {switch!r} must be true or false")
    if not switch:
        if given:
            raise ConfigError(f"node config: {min(given)} without {_SWITCH}; add {_SWITCH}=true")
        return None
    numbers: dict[str, float] = {}
    for key, value in given.items():
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ConfigError(f"node config: {key} = {value!r} must be a number")
        numbers[_LIMITS[key]] = float(value)
    return HeatLimits(**numbers)


def node_heat_mod(message: Message, context: Context, call_next: ClientAppCallable) -> Message:
    """Answer as `heat_mod` does with the limits of the node's config; nodes that do not mind heat pass through."""
    limits = node_heat_limits(context.node_config)
    return call_next(message, context) if limits is None else _mod(limits)(message, context, call_next)


@cache
def _mod(limits: HeatLimits) -> Mod:
    return heat_mod(limits=limits)
