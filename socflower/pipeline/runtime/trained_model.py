"""The end of a training: each device's stage as arrays, and the model that the leader assembles from them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from socflower.training.saved_values import from_bytes, to_bytes
from socflower.training.session import PARAMETERS

StageEnd: TypeAlias = Mapping[str, NDArray[Any]]
"""A stage at the end: `weight/NAME`, `buffer/NAME`, `state`, `losses`, `samples`, `device` and `measured`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainedModel:
    """The whole model of all stages, which the leader has at the end."""

    # Trained parameters and buffers, by their names in the model.
    weights: Mapping[str, Tensor]
    # Of optimisers and schedules; a training under any plan can continue from it.
    state: bytes
    # Of each update, the mean over its samples.
    losses: tuple[float, ...]
    # By SoC, as all that follow.
    peak_bytes: Mapping[int, float]
    peak_in_flight: Mapping[int, int]
    # Seconds of both passes of a sample, without waits; 0 without samples.
    sample_s: Mapping[int, float]
    # Labels such as "cpu".
    devices: Mapping[int, str]

    def to_bytes(self) -> bytes:
        """Return the model in the form of `from_bytes`."""
        return to_bytes({key.name: getattr(self, key.name) for key in fields(self)})

    @classmethod
    def from_bytes(cls, body: bytes | memoryview) -> "TrainedModel":
        """Return the model of `to_bytes`."""
        return cls(**from_bytes(body))


def assembled(ends: Mapping[int, StageEnd]) -> TrainedModel:
    """Return the model of all stages, by SoC; devices of a stage average their buffers by samples."""
    weights: dict[str, Tensor] = {}
    buffers: dict[str, list[tuple[float, Tensor]]] = {}
    parameters: dict[str, Any] = {}
    state: dict[str, Any] = {}
    losses = np.zeros(max(len(end["losses"]) for end in ends.values()))
    for end in ends.values():
        own = from_bytes(end["state"].tobytes())
        parameters |= own[PARAMETERS]
        state = {**own, **state}
        if len(end["losses"]):
            losses += end["losses"]
        for key, array in end.items():
            kind, _, name = key.partition("/")
            if kind == "weight":
                weights[name] = torch.from_numpy(array)
            elif kind == "buffer":
                copy = (float(end["samples"][0]), torch.from_numpy(array))
                buffers.setdefault(name, []).append(copy)
    weights |= {name: _mean(copies) for name, copies in buffers.items()}
    measured = {soc: end["measured"].tolist() for soc, end in ends.items()}
    return TrainedModel(
        weights=weights,
        state=to_bytes({**state, PARAMETERS: parameters}),
        losses=tuple(losses.tolist()),
        peak_bytes={soc: each[0] for soc, each in measured.items()},
        peak_in_flight={soc: int(each[1]) for soc, each in measured.items()},
        sample_s={soc: each[2] for soc, each in measured.items()},
        devices={soc: end["device"].tobytes().decode() for soc, end in ends.items()},
    )


def _mean(copies: Sequence[tuple[float, Tensor]]) -> Tensor:
    """Return the mean of a buffer by the devices' samples; of counters the largest, as `MemberBuffers` does."""
    first, total = copies[0][1], sum(samples for samples, _ in copies)
    if len(copies) == 1 or not total:
        return first
    if not first.is_floating_point():
        return torch.stack([own for _, own in copies]).amax(dim=0)
    mean = torch.zeros(first.shape, dtype=torch.float64)
    for samples, own in copies:
        mean += samples / total * own.double()
    return mean.to(first.dtype)
