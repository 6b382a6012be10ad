"""Partitions of samples among clients: even, or with label skew."""

from typing import Any

import numpy as np
import numpy.typing as npt

from socflower.errors import ConfigError, require_range
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
    alpha each class is in few partitions, and a large one approaches the even split. Then samples are moved from the
    largest partition to those below `min_size`, which changes the drawn shares least. Equal arguments give equal
    partitions. Raises ConfigError unless alpha > 0 and num_partitions * min_size <= len(labels).
    """
    _check(len(labels), num_partitions, min_size)
    if not (alpha > 0.0 and np.isfinite(alpha)):
        raise ConfigError(f"data.partition: alpha must be a finite number above 0, got {alpha}")
    generator = np.random.default_rng(seed)
    pieces: list[list[npt.NDArray[np.int64]]] = [[] for _ in range(num_partitions)]
    for label in np.unique(labels):
        members = generator.permutation(np.flatnonzero(labels == label))
        shares = generator.dirichlet(np.full(num_partitions, alpha))
        # Rounding the running sum, not each share, gives counts that add up to the class.
        cuts = np.rint(np.cumsum(shares)[:-1] * len(members)).astype(np.int64)
        for piece, part in zip(pieces, np.split(members, cuts), strict=True):
            piece.append(part)
    # Shuffled, so that moved samples are of several classes.
    partitions = [generator.permutation(np.concatenate(piece)) for piece in pieces]
    return _raise_to_min_size(partitions, min_size)


@plain_numbers
def partition(
    labels: npt.NDArray[np.integer[Any]], num_partitions: int, scheme: str, alpha: float, seed: int
) -> list[npt.NDArray[np.int64]]:
    """Return the index arrays of the named scheme, "iid" or "dirichlet"; `alpha` is used by the latter only.

    Raises ConfigError for an unknown scheme and for arguments that are invalid for it.
    """
    if scheme == "iid":
        return iid_partition(len(labels), num_partitions, seed)
    if scheme == "dirichlet":
        return dirichlet_partition(labels, num_partitions, alpha, seed)
    raise ConfigError(f"data.partition: unknown scheme {scheme!r}, known are {', '.join(SCHEMES)}")


def _check(num_samples: int, num_partitions: int, min_size: int) -> None:
    if num_samples < 1:
        raise ConfigError("data.partition: the data has no samples")
    if num_partitions < 1:
        raise ConfigError(f"data.partition: needs 1 partition or more, got {num_partitions}")
    require_range("data.partition", least=0, min_size=min_size)
    if num_partitions * min_size > num_samples:
        raise ConfigError(
            f"data.partition: {num_partitions} partitions of at least {min_size} need "
            f"{num_partitions * min_size} samples, the data has {num_samples}; use fewer partitions"
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
