"""Samples other than labelled images: features held by several parties, and codes from which images are generated."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from socflower.errors import ConfigError, require_range
from socflower.workloads.dataset import LabelledData

Indices: TypeAlias = torch.Tensor | npt.NDArray[np.integer[Any]] | Sequence[int]

STYLE_SIZE = 22
"""Elements of a style code; even, since they are drawn in pairs."""

_WORD = np.uint64
_GOLDEN = _WORD(0x9E3779B97F4A7C15)


@dataclass(frozen=True, slots=True, eq=False)
class VerticalSamples:
    """Samples of which every party holds different features: row i of each part belongs to sample `ids[i]`.

    Parties identify samples by id, not by row, since each party may store its rows in a different order. Raises
    ConfigError for parts of different lengths, for ids that occur twice and for labels of another type.
    """

    # (n,) int64.
    ids: torch.Tensor
    # Per party (n, ...), of integers or floats.
    features: tuple[torch.Tensor, ...]
    # (n,) int64.
    labels: torch.Tensor

    def __post_init__(self) -> None:
        if not self.features:
            raise ConfigError("vertical samples: need the features of one party or more, got none")
        lengths = [len(part) for part in self.features]
        if (
            self.ids.ndim != 1
            or self.labels.shape != self.ids.shape
            or set(lengths) != {len(self.ids)}
        ):
            raise ConfigError(
                f"vertical samples: {len(self.ids)} ids need as many labels and rows of every party, got "
                f"{len(self.labels)} and {', '.join(map(str, lengths))}"
            )
        if self.ids.dtype != torch.int64 or self.labels.dtype != torch.int64:
            raise ConfigError(
                f"vertical samples: ids and labels must be int64, got {self.ids.dtype} and "
                f"{self.labels.dtype}"
            )
        if bool((torch.sort(self.ids).values.diff() == 0).any()):
            raise ConfigError(
                "vertical samples: an id occurs twice, so parties could not be joined by it"
            )

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def num_parties(self) -> int:
        """The number of parties with features."""
        return len(self.features)

    def batch(self, indices: Indices) -> tuple[tuple[torch.Tensor, ...], torch.Tensor]:
        """Return each party's rows at `indices`, integers as int64 and floats as float32, and the labels (b,)."""
        rows = torch.as_tensor(indices, dtype=torch.int64)
        parts = tuple(self._rows(part, rows) for part in self.features)
        return parts, self.labels.index_select(0, rows)

    def rows_of(self, ids: Indices) -> torch.Tensor:
        """Return the rows of the samples with these ids; ConfigError for an unknown id."""
        wanted = torch.as_tensor(ids, dtype=torch.int64)
        in_order, order = torch.sort(self.ids)
        places = torch.searchsorted(in_order, wanted)
        known = places < len(in_order)
        known &= (
            in_order[places.clamp(max=max(0, len(in_order) - 1))] == wanted
            if len(in_order)
            else known
        )
        if not bool(known.all()):
            raise ConfigError(f"vertical samples: no sample has the id {int(wanted[~known][0])}")
        return order[places]

    @staticmethod
    def _rows(part: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        # Stored in narrow types, converted per batch: embeddings are looked up by int64.
        return part.index_select(0, rows).to(
            torch.float32 if part.is_floating_point() else torch.int64
        )


@dataclass(frozen=True, slots=True, eq=False)
class GeneratorSamples:
    """Codes and the images that a generative model should generate from them.

    In a reverse split the images stay at the edge with the back half, and the codes are computed in the cloud with the
    front half. A code depends on a sample's id and label, not on its image: labels are the only information on the
    images that the cloud receives. It only needs `generator_codes`. Raises ConfigError for a negative seed.
    """

    images: LabelledData
    seed: int = 0

    def __post_init__(self) -> None:
        _check_seed(self.seed)

    def __len__(self) -> int:
        return len(self.images)

    def codes(self, ids: Indices) -> torch.Tensor:
        """Return codes (b, num_classes + STYLE_SIZE) float32 of the samples in rows `ids`."""
        rows = torch.as_tensor(ids, dtype=torch.int64)
        labels = self.images.labels.index_select(0, rows)
        return generator_codes(rows, labels, num_classes=self.images.num_classes, seed=self.seed)

    def targets(self, ids: Indices) -> torch.Tensor:
        """Return images (b, channels, height, width) float32 in 0..1, not normalised."""
        pixels = self.images.inputs.index_select(0, torch.as_tensor(ids, dtype=torch.int64))
        return (
            pixels.to(torch.float32).div_(255.0)
            if pixels.dtype == torch.uint8
            else pixels.to(torch.float32)
        )

    def mean_image_losses(self) -> tuple[float, float]:
        """Return the mean squared errors of two trivial generators, as baselines for a trained one.

        The first returns the mean of all images for every code, the second the mean image of the code's class. A loss
        below the second is due to memorised samples, since the style codes are noise.
        """
        targets = self.targets(range(len(self)))
        if not len(targets):
            raise ConfigError("generator samples: no images to take a mean of")
        centres = targets.clone()
        for label in torch.unique(self.images.labels):
            rows = self.images.labels == label
            centres[rows] = targets[rows].mean(dim=0)
        return float((targets - targets.mean(dim=0)).square().mean()), float(
            (targets - centres).square().mean()
        )


def generator_codes(
    ids: Indices, labels: Indices, *, num_classes: int, seed: int = 0
) -> torch.Tensor:
    """Return codes (b, num_classes + STYLE_SIZE) float32: the label one-hot, then the sample's style z ~ N(0, I).

    A style depends on seed and id only, not on the rest of the batch or on the machine. Raises ConfigError for labels
    outside 0..num_classes-1, for different numbers of labels and ids, and for a negative seed.
    """
    rows, classes = (torch.as_tensor(values, dtype=torch.int64) for values in (ids, labels))
    if rows.ndim != 1 or classes.shape != rows.shape:
        raise ConfigError(
            f"generator codes: {rows.numel()} ids need as many labels, got {classes.numel()}"
        )
    if len(classes) and not 0 <= int(classes.min()) <= int(classes.max()) < num_classes:
        raise ConfigError(
            f"generator codes: labels must be in 0..{num_classes - 1}, got {int(classes.min())} to "
            f"{int(classes.max())}"
        )
    _check_seed(seed)
    return torch.cat(
        [torch.nn.functional.one_hot(classes, num_classes).float(), _styles(rows.numpy(), seed)],
        dim=1,
    )


def _check_seed(seed: int) -> None:
    require_range("generator codes", least=0, seed=seed)


def _styles(ids: npt.NDArray[np.int64], seed: int) -> torch.Tensor:
    """Return standard normal numbers (b, STYLE_SIZE): a counter hashed by SplitMix64, then Box and Muller's transform.

    A random generator per id would take a hundred times as long, and with a single one a style would depend on the
    ids requested before.
    """
    start = _mix(np.array([seed], dtype=_WORD))
    own = _mix(start ^ _mix(ids.astype(_WORD)))[:, None]
    words = _mix(own + np.arange(1, STYLE_SIZE + 1, dtype=_WORD) * _GOLDEN)
    # In (0, 1), so the log is finite.
    uniform = ((words >> _WORD(11)).astype(np.float64) + 0.5) / 2.0**53
    radius = np.sqrt(-2.0 * np.log(uniform[:, ::2]))
    angle = 2.0 * np.pi * uniform[:, 1::2]
    return torch.from_numpy(
        np.concatenate([radius * np.cos(angle), radius * np.sin(angle)], axis=1).astype(np.float32)
    )


def _mix(words: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Return SplitMix64's output for these states (Steele, Lea and Flood 2014); arithmetic is modulo 2^64."""
    words = words + _GOLDEN
    words = (words ^ (words >> _WORD(30))) * _WORD(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> _WORD(27))) * _WORD(0x94D049BB133111EB)
    return words ^ (words >> _WORD(31))
