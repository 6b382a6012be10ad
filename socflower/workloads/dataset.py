"""Labelled images in memory: stored with one byte per pixel, converted to normalised floats per batch."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from socflower.errors import ConfigError
from socflower.model_graph.batch_form import Batch
from socflower.plain_numbers import plain_numbers
from socflower.workloads.data_source import DataSource, Indices


@plain_numbers
@dataclass(frozen=True, slots=True, eq=False)
class LabelledData(DataSource):
    """Images and their labels, with the constants that normalise them.

    `inputs` are uint8 in 0..255, which take a quarter of the memory of floats and can be memory-mapped, or floats in
    0..1; `mean` and `std` are per channel and refer to pixels in 0..1. With a mean of 0 and a deviation of 1 in every
    channel, inputs count as normalised, and any finite floats are valid. Labels are classes, 0..num_classes-1. Raises
    ConfigError for inconsistent shapes, types, values and constants.
    """

    # (n, channels, height, width).
    inputs: torch.Tensor
    # (n,) int64.
    labels: torch.Tensor
    mean: tuple[float, ...]
    std: tuple[float, ...]
    num_classes: int
    # (channels, 1, 1): 1 / std, divided by 255 for bytes.
    _scale: torch.Tensor = field(init=False, repr=False)
    # (channels, 1, 1): -mean / std.
    _shift: torch.Tensor = field(init=False, repr=False)

    def __post_init__(self) -> None:
        problem = self._problem_of_form() or self._problem_of_labels() or self._problem_of_pixels()
        if problem is not None:
            raise ConfigError(f"data: {problem}")
        # Computed once: for a batch of 32 digits, two small tensors cost as much as the conversion itself.
        full_scale = 255.0 if self.inputs.dtype == torch.uint8 else 1.0
        mean = torch.tensor(self.mean, dtype=torch.float64).reshape(-1, 1, 1)
        std = torch.tensor(self.std, dtype=torch.float64).reshape(-1, 1, 1)
        object.__setattr__(self, "_scale", (1.0 / (full_scale * std)).float())
        object.__setattr__(self, "_shift", (-mean / std).float())

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def targets(self) -> torch.Tensor:
        """The labels."""
        return self.labels

    def _problem_of_form(self) -> str | None:
        shape, dtype = tuple(self.inputs.shape), self.inputs.dtype
        if len(shape) != 4 or tuple(self.labels.shape) != shape[:1]:
            return (
                f"need inputs (n, channels, height, width) and labels (n,), got {shape} and "
                f"{tuple(self.labels.shape)}; reshape rows of features to (n, 1, 1, features)"
            )
        if self.labels.dtype != torch.int64:
            return f"labels must be int64, got {self.labels.dtype}"
        if dtype != torch.uint8 and not self.inputs.is_floating_point():
            return f"inputs must be uint8 or floating point, got {dtype}"
        if not len(self.mean) == len(self.std) == shape[1]:
            return f"{shape[1]} channels need as many means and deviations"
        if min(self.std) <= 0.0:
            return f"std must be above 0 in every channel, got {self.std}"
        return None

    def _problem_of_labels(self) -> str | None:
        if not len(self.labels):
            return None
        low, high = (int(end) for end in torch.aminmax(self.labels))
        if 0 <= low <= high < self.num_classes:
            return None
        return (
            f"labels must be 0..{self.num_classes - 1} for num_classes = {self.num_classes}, got {low} to "
            f"{high}; leave out samples without a class"
        )

    def _problem_of_pixels(self) -> str | None:
        if self.inputs.dtype == torch.uint8 or not self.inputs.numel():
            return None
        low, high = (float(end) for end in torch.aminmax(self.inputs))
        if not (math.isfinite(low) and math.isfinite(high)):
            return "there is a NaN or an infinity among the inputs"
        is_normalised = not any(self.mean) and set(self.std) == {1.0}
        if is_normalised or 0.0 <= low <= high <= 1.0:
            return None
        return (
            f"floating-point inputs must be in 0..1, got {low:.4g} to {high:.4g}; divide pixels by 255, or "
            "give normalised inputs a mean of 0 and a std of 1"
        )

    def select(self, indices: Indices) -> "LabelledData":
        """Return a copy of the samples at `indices`, in that order."""
        rows = _as_rows(indices)
        inputs, labels = self.inputs.index_select(0, rows), self.labels.index_select(0, rows)
        return LabelledData(inputs, labels, self.mean, self.std, self.num_classes)

    def batch(self, indices: Indices, key: Sequence[int] = ()) -> tuple[torch.Tensor, torch.Tensor]:
        """Return inputs (b, channels, height, width) float32, normalised, and labels (b,) int64; nothing is random."""
        rows = _as_rows(indices)
        # Select first, so that only the batch's pixels are read and converted. In-place operations are safe on the
        # selected copy, and twice as fast as addcmul with broadcast constants.
        inputs = self.inputs.index_select(0, rows).to(torch.float32)
        inputs.mul_(self._scale).add_(self._shift)
        return inputs, self.labels.index_select(0, rows)

    def parts(self, indices: Sequence[Indices], key: Sequence[int] = ()) -> list[Batch]:
        """Return one batch for each of `indices`; all are read at once, which is faster."""
        rows = [_as_rows(each) for each in indices]
        inputs, labels = self.batch(torch.cat(rows))
        sizes = [len(each) for each in rows]
        return list(zip(inputs.split(sizes), labels.split(sizes), strict=True))


@dataclass(frozen=True, slots=True, eq=False)
class DataSet:
    """Training and test samples, and their source."""

    train: LabelledData
    test: LabelledData
    name: str
    source: str


def concatenate(parts: Sequence[LabelledData]) -> LabelledData:
    """Return the samples of all parts, one part after the other.

    Raises ConfigError for no parts and for parts of different shape, pixel type, constants or classes.
    """
    if not parts:
        raise ConfigError("data: nothing to concatenate")
    first = parts[0]
    for number, part in enumerate(parts[1:], start=1):
        if _format(part) != _format(first):
            raise ConfigError(
                f"data: part {number} has format {_format(part)}, part 0 has {_format(first)}"
            )
    inputs = torch.cat([part.inputs for part in parts])
    labels = torch.cat([part.labels for part in parts])
    return LabelledData(inputs, labels, first.mean, first.std, first.num_classes)


def _format(part: LabelledData) -> tuple[object, ...]:
    return tuple(part.inputs.shape[1:]), part.inputs.dtype, part.mean, part.std, part.num_classes


def _as_rows(indices: Indices) -> torch.Tensor:
    return torch.as_tensor(indices, dtype=torch.int64)
