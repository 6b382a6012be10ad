"""States of stages at steps that a pipeline can return to, and who keeps a copy of whose (F33)."""

import io
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from socflower.pipeline.plan import Plan


@dataclass(frozen=True, kw_only=True, slots=True)
class StageState:
    """Weights, buffers and optimiser of some of a model's layers at one step."""

    weights: Mapping[str, Tensor] = field(
        default_factory=dict
    )  # trained parameters and buffers, by name
    optimizer: Mapping[str, Any] = field(
        default_factory=dict
    )  # as `FP32Session.named_state`; empty: new

    def to_bytes(self, names: Collection[str]) -> bytearray:
        """Return the part of these names, to be read by `from_bytes`."""
        wanted, stream = set(names), io.BytesIO()
        torch.save(
            {
                "weights": {
                    name: weight for name, weight in self.weights.items() if name in wanted
                },
                "optimizer": self._optimizer_of(wanted),
            },
            stream,
        )
        return bytearray(stream.getbuffer())

    @classmethod
    def from_bytes(cls, body: bytes | bytearray | memoryview) -> "StageState":
        """Return what `to_bytes` wrote."""
        saved = torch.load(io.BytesIO(body), weights_only=True, map_location="cpu")
        return cls(weights=saved["weights"], optimizer=saved["optimizer"])

    def joined(self, other: "StageState") -> "StageState":
        """Return both; of a name in both, this one's."""
        optimizer = dict(other.optimizer) | dict(self.optimizer)
        if optimizer:
            optimizer["parameters"] = {
                **other.optimizer.get("parameters", {}),
                **self.optimizer.get("parameters", {}),
            }
        return StageState(weights={**other.weights, **self.weights}, optimizer=optimizer)

    def optimizer_bytes(self) -> bytes | None:
        """Return the optimiser's state as a `Member` takes it; None for a new one."""
        if not self.optimizer:
            return None
        stream = io.BytesIO()
        torch.save(dict(self.optimizer), stream)
        return stream.getvalue()

    def _optimizer_of(self, names: Collection[str]) -> dict[str, Any]:
        return (
            {
                **self.optimizer,
                "parameters": {
                    name: own
                    for name, own in self.optimizer.get("parameters", {}).items()
                    if name in names
                },
            }
            if self.optimizer
            else {}
        )


class StateTransfer(NamedTuple):
    """One device sends another a part of a state."""

    source: int
    target: int
    names: tuple[str, ...]


def backup_of(plan: Plan) -> dict[int, int]:
    """Return which device keeps a copy of whose state: the first one of the next stage that of a single-device stage.

    The last stage's is kept by the first one; a pipeline on one device has none. Replicated stages, and layers that
    another pipeline of a 2-D plan has too, need none.
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
    """Return the newest step at which the devices together have all names; None without one.

    `held` has the names of each step, by device.
    """
    steps = sorted({step for own in held.values() for step in own}, reverse=True)
    return next(
        (
            step
            for step in steps
            if set(names) <= {name for own in held.values() for name in own.get(step, ())}
        ),
        None,
    )


def moves(
    needed: Mapping[int, Sequence[str]],
    held: Mapping[int, Collection[str]],
    order: Iterable[int],
) -> tuple[StateTransfer, ...]:
    """Return who sends what to whom, so that each device has what it needs; the first in `order` that has it sends.

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
