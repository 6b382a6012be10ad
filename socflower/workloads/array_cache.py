"""A disk cache of decoded images, memory-mapped so that all processes of a machine share one copy."""

import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from socflower.wire.saved_state import atomic_file, remove_partial

ImagesAndLabels: TypeAlias = tuple[npt.NDArray[np.uint8], npt.NDArray[np.int64]]

_FORMAT = "v1"  # part of every file name; to be raised when decoding changes

_log = logging.getLogger(__name__)


def cache_folder() -> Path:
    """Return SOCFLOWER_CACHE, else socflower/ under XDG_CACHE_HOME, else ~/.cache/socflower."""
    if chosen := os.environ.get("SOCFLOWER_CACHE"):
        return Path(chosen)
    if base := os.environ.get("XDG_CACHE_HOME"):
        return Path(base) / "socflower"
    return Path.home() / ".cache" / "socflower"


def cached_arrays(key: str, make: Callable[[], ImagesAndLabels], folder: Path) -> ImagesAndLabels:
    """Return images (n, channels, height, width) uint8 and labels (n,) int64 of `key`, from the cache or from `make`.

    The images are mapped copy-on-write: processes share the pages that they only read, and a write stays private.
    Unreadable files are written again. If the folder cannot be written, the arrays stay in memory, with a warning.
    """
    images_path = folder / f"{key}-{_FORMAT}-images.npy"
    labels_path = folder / f"{key}-{_FORMAT}-labels.npy"
    cached = _read(images_path, labels_path)
    if cached is not None:
        return cached
    images, labels = make()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        remove_partial(folder)
        # Concurrent processes write the same bytes, each to its own temporary file; the last rename wins.
        for path, array in ((labels_path, labels), (images_path, images)):
            with atomic_file(path) as file:
                np.save(file, array, allow_pickle=False)
    except OSError as error:
        _log.warning("data cache: cannot write %s (%s); every process decodes the images itself", folder, error)
        return images, labels
    _log.info("data cache: decoded %d images into %s", len(images), images_path)
    return _read(images_path, labels_path) or (images, labels)


def _read(images_path: Path, labels_path: Path) -> ImagesAndLabels | None:
    try:
        images = np.load(images_path, mmap_mode="c", allow_pickle=False)
        labels = np.load(labels_path, allow_pickle=False)
    except FileNotFoundError:
        return None
    except (OSError, EOFError, ValueError) as error:
        _log.warning("data cache: %s is unreadable (%s), decoding again", images_path, error)
        return None
    well_formed = images.dtype == np.uint8 and images.ndim == 4 and labels.dtype == np.int64
    if not well_formed or labels.shape != images.shape[:1]:
        _log.warning("data cache: %s has unexpected types or shapes, decoding again", images_path)
        return None
    return images, labels
