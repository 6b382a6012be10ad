"""Samples that the hub sends to a node, instead of the node holding the whole data set."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from socflower.errors import ConfigError
from socflower.model_graph.batch_form import Batch
from socflower.wire.message_keys import SentSamples
from socflower.workloads.data_source import DataSource, Indices
from socflower.workloads.dataset import LabelledData

_PIXELS = {torch.uint8: "uint8", torch.float32: "float32"}
"""How pixels travel, by their type."""


class DispatchedSamples(DataSource):
    """A data set of `num_samples`, of which this node holds those of the numbers `rows`, ascending, in `held`."""

    __slots__ = ("_held", "_num_samples", "_rows")

    def __init__(self, held: LabelledData, rows: NDArray[np.int64], num_samples: int) -> None:
        self._held, self._rows, self._num_samples = held, rows, num_samples

    def __len__(self) -> int:
        return self._num_samples

    def batch(self, indices: Indices, key: Sequence[int] = ()) -> Batch:
        """Return the samples at `indices`; see `DataSource.batch`. Raises `ConfigError` for one that was not sent."""
        return self._held.batch(self._places(indices), key)

    def parts(self, indices: Sequence[Indices], key: Sequence[int] = ()) -> list[Batch]:
        """Return one batch for each of `indices`."""
        return self._held.parts([self._places(each) for each in indices], key)

    def _places(self, indices: Indices) -> NDArray[np.int64]:
        """Return where the samples of these numbers are in `held`."""
        asked = np.asarray(indices, np.int64)
        places = np.searchsorted(self._rows, asked)
        is_held = places < len(self._rows)
        is_held[is_held] = self._rows[places[is_held]] == asked[is_held]
        if not is_held.all():
            raise ConfigError(
                f"dispatch: sample {asked[~is_held][0]} was not sent; {len(self._rows)} of {self._num_samples} were"
            )
        return places


def require_dispatchable(data: Any, num_samples: int) -> LabelledData:
    """Return data that can be sent; `ConfigError` for other forms, and for another number than the schedule's."""
    if not isinstance(data, LabelledData) or data.inputs.dtype not in _PIXELS:
        kind = getattr(getattr(data, "inputs", None), "dtype", type(data).__name__)
        raise ConfigError(
            f"dispatch: sends LabelledData of {' or '.join(_PIXELS.values())}, not {kind}; let every node load the data"
        )
    if len(data) != num_samples:
        raise ConfigError(
            f"dispatch: has {len(data)} samples, and the schedule num_samples = {num_samples}; give all training data"
        )
    return data


def sent_samples(data: LabelledData, rows: NDArray[np.int64]) -> SentSamples:
    """Return the samples of the numbers `rows`, ascending, as they travel."""
    chosen = data.select(rows)
    return SentSamples(
        rows=rows.astype("<i8").tobytes(),
        inputs=chosen.inputs.numpy().tobytes(),
        labels=chosen.labels.numpy().astype("<i8").tobytes(),
        shape=tuple(chosen.inputs.shape[1:]),
        pixels=_PIXELS[chosen.inputs.dtype],
        mean=chosen.mean,
        std=chosen.std,
        num_classes=chosen.num_classes,
    )


def received_samples(sent: SentSamples, num_samples: int) -> DispatchedSamples:
    """Return the samples of a message; `ConfigError` for bytes that are not those of so many samples."""
    rows = np.frombuffer(sent.rows, "<i8").astype(np.int64)
    # Tensors are writable, and bytes are not.
    labels = np.frombuffer(sent.labels, "<i8").astype(np.int64)
    try:
        inputs = np.frombuffer(sent.inputs, sent.pixels).reshape(len(rows), *sent.shape).copy()
    except (TypeError, ValueError) as error:
        raise ConfigError(f"dispatch: the pixels are damaged: {error}") from None
    held = LabelledData(
        torch.from_numpy(inputs), torch.from_numpy(labels), sent.mean, sent.std, sent.num_classes
    )
    return DispatchedSamples(held, rows, num_samples)
