"""Which weights move after a loss: states of stages at common steps, and the devices that keep copies (F33)."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import Tensor

from socflower.pipeline.plan import Plan
from socflower.training.saved_values import from_bytes, to_bytes
from socflower.training.session import PARAMETERS


@dataclass(frozen=True, kw_only=True, slots=True)
class StageState:
    """Weights, buffers and optimiser of some of a model's layers at one step."""

    # Trained parameters and buffers, by name.
    weights: Mapping[str, Tensor] = field(default_factory=dict)
    # As `Session.state`; empty: a new optimiser.
    optimizer: Mapping[str, Any] = field(default_factory=dict)

    def to_bytes(self, names: Collection[str]) -> bytearray:
        """Return the part of these names in the form of `from_bytes`."""
        wanted = set(names)
        part = {
            "weights": {name: own for name, own in self.weights.items() if name in wanted},
            "optimizer": dict(self.optimizer),
        }
        if self.optimizer:
            parameters = self.optimizer.get(PARAMETERS, {})
            part["optimizer"][PARAMETERS] = {
                name: own for name, own in parameters.items() if name in wanted
            }
        return bytearray(to_bytes(part))

    @classmethod
    def from_bytes(cls, body: bytes | bytearray | memoryview) -> "StageState":
        """Return the state of `to_bytes`."""
        return cls(**from_bytes(body))

    def joined(self, other: "StageState") -> "StageState":
        """Return both states; this one's value wins for a name in both."""
        optimizer = dict(other.optimizer) | dict(self.optimizer)
        if optimizer:
            optimizer[PARAMETERS] = {
                **other.optimizer.get(PARAMETERS, {}),
                **self.optimizer.get(PARAMETERS, {}),
            }
        return StageState(weights={**other.weights, **self.weights}, optimizer=optimizer)

    def optimizer_bytes(self) -> bytes | None:
        """Return the optimiser's state as an argument of `Member`; None for a new optimiser."""
        return to_bytes(self.optimizer) if self.optimizer else None


class StateTransfer(NamedTuple):
    """One device sends another a part of a state."""

    source: int
    target: int
    names: tuple[str, ...]


def backup_of(plan: Plan) -> dict[int, int]:
    """Return, for each device that is alone in its stage, the device that keeps a copy of its state (F33).

    It is the first device of the next stage; the first stage keeps the copy of the last one. Replicated stages need no
    copies, nor do the pipelines of a 2-D plan, which have the same layers.
    """
    if len(plan.pipelines) > 1:
        return {}
    stages = plan.pipelines[0].stages
    return {
        stage.devices[0]: stages[(number + 1) % len(stages)].devices[0]
        for number, stage in enumerate(stages)
        if len(stage.devices) == 1 and len(stages) > 1
    }


def newest_common(
    held: Mapping[int, Mapping[int, Collection[str]]], names: Collection[str]
) -> int | None:
    """Return the newest step at which the devices together have all names, or None.

    `held` has the names of each step, by device.
    """
    together: dict[int, set[str]] = {}
    for own in held.values():
        for step, there in own.items():
            together.setdefault(step, set()).update(there)
    whole = [step for step, there in together.items() if there >= set(names)]
    return max(whole, default=None)


def moves(
    needed: Mapping[int, Sequence[str]],
    held: Mapping[int, Collection[str]],
    order: Iterable[int],
) -> tuple[StateTransfer, ...]:
    """Return the transfers that give each device the names that it needs; the first holder in `order` sends.

    Each name is sent to a device once. Pairs of devices send at the same time.
    """
    senders = list(order)
    found: dict[tuple[int, int], list[str]] = {}
    for target, names in needed.items():
        own = held.get(target, ())
        for name in names:
            if name not in own:
                source = next(soc for soc in senders if name in held.get(soc, ()))
                found.setdefault((source, target), []).append(name)
    return tuple(
        StateTransfer(source, target, tuple(names)) for (source, target), names in found.items()
    )
