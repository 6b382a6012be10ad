"""Samples other than labelled images: features held by several parties, and codes from which images are generated."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from socflower.errors import ConfigError, require_range
from socflower.workloads.data_source import Indices
from socflower.workloads.dataset import LabelledData

STYLE_SIZE = 22
"""Elements of a style code. The number is even, since they are drawn in pairs."""

_WORD = np.uint64
_GOLDEN = _WORD(0x9E3779B97F4A7C15)


@dataclass(frozen=True, slots=True, eq=False)
class VerticalSamples:
    """Samples whose features are divided among parties: row i of each part belongs to sample `ids[i]`.

    Parties identify samples by id, not by row, since each party may store its rows in a different order. Raises
    ConfigError for parts of different lengths, for ids that occur twice and for labels of another type.
    """

    # (n,) int64.
    ids: torch.Tensor
    # The features of each party (n, ...), integers or floats.
    features: tuple[torch.Tensor, ...]
    # (n,) int64.
    labels: torch.Tensor

    def __post_init__(self) -> None:
        problem = self._problem()
        if problem is not None:
            raise ConfigError(f"vertical samples: {problem}")

    def _problem(self) -> str | None:
        if not self.features:
            return "need the features of one party or more, got none"
        num, lengths = len(self.ids), [len(part) for part in self.features]
        if self.ids.ndim != 1 or self.labels.shape != self.ids.shape or set(lengths) != {num}:
            parts = ", ".join(map(str, lengths))
            return f"{num} ids need as many labels and rows, got {len(self.labels)} and {parts}"
        if {self.ids.dtype, self.labels.dtype} != {torch.int64}:
            return f"ids and labels must be int64, got {self.ids.dtype} and {self.labels.dtype}"
        if bool((torch.sort(self.ids).values.diff() == 0).any()):
            return "an id occurs twice, so parties could not be joined by it"
        return None

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
        known[known.clone()] = in_order[places[known]] == wanted[known]
        if not bool(known.all()):
            raise ConfigError(f"vertical samples: no sample has the id {int(wanted[~known][0])}")
        return order[places]

    @staticmethod
    def _rows(part: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        # Parts are stored in narrow types; embeddings need int64.
        dtype = torch.float32 if part.is_floating_point() else torch.int64
        return part.index_select(0, rows).to(dtype)


@dataclass(frozen=True, slots=True, eq=False)
class GeneratorSamples:
    """Codes and the images that a generative model should generate from them.

    In a reverse split the images stay at the edge with the back half, and the cloud computes the codes for the front
    half by `generator_codes`. A code depends on a sample's id and label, not on its image: labels are the only
    information on the images that the cloud receives. Raises ConfigError for a negative seed.
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
        full_scale = 255.0 if pixels.dtype == torch.uint8 else 1.0
        return pixels.to(torch.float32).div_(full_scale)

    def mean_image_losses(self) -> tuple[float, float]:
        """Return the mean squared errors of two trivial generators, as baselines for a trained one.

        The first returns the mean of all images for every code, the second the mean image of the code's class. Style
        codes are noise, so a generator with a lower loss than the second has memorised samples.
        """
        targets = self.targets(range(len(self)))
        if not len(targets):
            raise ConfigError("generator samples: no images to take a mean of")
        centres = targets.clone()
        for label in torch.unique(self.images.labels):
            rows = self.images.labels == label
            centres[rows] = targets[rows].mean(dim=0)
        losses = [(targets - mean).square().mean() for mean in (targets.mean(dim=0), centres)]
        return float(losses[0]), float(losses[1])


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
    low, high = (int(end) for end in torch.aminmax(classes)) if len(classes) else (0, 0)
    if not 0 <= low <= high < num_classes:
        raise ConfigError(
            f"generator codes: labels must be in 0..{num_classes - 1}, got {low} to {high}"
        )
    _check_seed(seed)
    one_hot = torch.nn.functional.one_hot(classes, num_classes).float()
    return torch.cat([one_hot, _styles(rows.numpy(), seed)], dim=1)


def _check_seed(seed: int) -> None:
    require_range("generator codes", least=0, seed=seed)


def _styles(ids: npt.NDArray[np.int64], seed: int) -> torch.Tensor:
    """Return standard normal numbers (b, STYLE_SIZE): a counter hashed by SplitMix64, then Box and Muller's transform.

    A random generator per id would take a hundred times as long, and with one generator for all ids a style would
    depend on the ids before it.
    """
    start = _mix(np.array([seed], dtype=_WORD))
    own = _mix(start ^ _mix(ids.astype(_WORD)))[:, None]
    words = _mix(own + np.arange(1, STYLE_SIZE + 1, dtype=_WORD) * _GOLDEN)
    # Between 0 and 1, both excluded, so that the logarithm is finite.
    uniform = ((words >> _WORD(11)).astype(np.float64) + 0.5) / 2.0**53
    radius = np.sqrt(-2.0 * np.log(uniform[:, ::2]))
    angle = 2.0 * np.pi * uniform[:, 1::2]
    pairs = np.concatenate([radius * np.cos(angle), radius * np.sin(angle)], axis=1)
    return torch.from_numpy(pairs.astype(np.float32))


def _mix(words: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Return SplitMix64's output for these states (Steele, Lea and Flood 2014); arithmetic is modulo 2^64."""
    words = words + _GOLDEN
    words = (words ^ (words >> _WORD(30))) * _WORD(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> _WORD(27))) * _WORD(0x94D049BB133111EB)
    return words ^ (words >> _WORD(31))
