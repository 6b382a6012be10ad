"""Partitions of samples among clients: even, or with label skew."""

from typing import Any

import numpy as np
import numpy.typing as npt

from socflower.errors import ConfigError, require_known, require_range
from socflower.plain_numbers import plain_numbers

SCHEMES = ("iid", "dirichlet")


@plain_numbers
def iid_partition(num_samples: int, num_partitions: int, seed: int) -> list[npt.NDArray[np.int64]]:
    """Return `num_partitions` random index arrays that hold every sample once; sizes differ by at most one.

    Raises ConfigError if a partition would be empty.
    """
    _check(num_samples, num_partitions, min_size=1)
    order = np.random.default_rng(seed).permutation(num_samples)
    return list(np.array_split(order, num_partitions))


@plain_numbers
def dirichlet_partition(
    labels: npt.NDArray[np.integer[Any]],
    num_partitions: int,
    alpha: float,
    seed: int,
    min_size: int = 1,
) -> list[npt.NDArray[np.int64]]:
    """Return index arrays that hold every sample once, with label skew (Hsu et al. 2019, per class).

    Each class is divided among the partitions by shares drawn from Dirichlet(alpha, ..., alpha): with a small
    alpha each class is in few partitions, and a large alpha approaches the even split. Then samples are moved from the
    largest partition to those below `min_size`, which changes the drawn shares least. Equal arguments give equal
    partitions. Raises ConfigError unless alpha > 0 and num_partitions * min_size <= len(labels).
    """
    _check(len(labels), num_partitions, min_size)
    require_range("data.partition", above=0.0, alpha=alpha)
    generator = np.random.default_rng(seed)
    pieces: list[list[npt.NDArray[np.int64]]] = [[] for _ in range(num_partitions)]
    for label in np.unique(labels):
        members = generator.permutation(np.flatnonzero(labels == label))
        shares = generator.dirichlet(np.full(num_partitions, alpha))
        # Rounding the running sum, not each share, gives counts that add up to the class.
        cuts = np.rint(np.cumsum(shares)[:-1] * len(members)).astype(np.int64)
        for piece, part in zip(pieces, np.split(members, cuts), strict=True):
            piece.append(part)
    # Shuffled, so that the moved samples have several classes.
    partitions = [generator.permutation(np.concatenate(piece)) for piece in pieces]
    return _raise_to_min_size(partitions, min_size)


@plain_numbers
def partition(
    labels: npt.NDArray[np.integer[Any]], num_partitions: int, scheme: str, alpha: float, seed: int
) -> list[npt.NDArray[np.int64]]:
    """Return the index arrays of the named scheme, "iid" or "dirichlet"; `alpha` is used by the latter only.

    Raises ConfigError for an unknown scheme and for arguments that are invalid for it.
    """
    require_known("data.partition", scheme, SCHEMES)
    if scheme == "iid":
        return iid_partition(len(labels), num_partitions, seed)
    return dirichlet_partition(labels, num_partitions, alpha, seed)


def _check(num_samples: int, num_partitions: int, min_size: int) -> None:
    require_range("data.partition", least=1, num_samples=num_samples, num_partitions=num_partitions)
    require_range("data.partition", least=0, min_size=min_size)
    needed = num_partitions * min_size
    if needed > num_samples:
        raise ConfigError(
            f"data.partition: {num_partitions} partitions need {needed} samples, the data has {num_samples}"
        )


def _raise_to_min_size(
    partitions: list[npt.NDArray[np.int64]], min_size: int
) -> list[npt.NDArray[np.int64]]:
    """Move samples, one at a time, from the largest partition to those below `min_size`."""
    sizes = np.array([len(part) for part in partitions])
    received: list[list[int]] = [[] for _ in partitions]
    for small in np.flatnonzero(sizes < min_size):
        while sizes[small] < min_size:
            # This ends: the mean is at least min_size, so while a partition is below it, the largest one is above it.
            largest = int(sizes.argmax())
            sizes[largest] -= 1
            sizes[small] += 1
            received[small].append(int(partitions[largest][sizes[largest]]))
    return [
        np.concatenate([part[: size - len(extra)], np.array(extra, dtype=np.int64)])
        for part, size, extra in zip(partitions, sizes.tolist(), received, strict=True)
    ]
