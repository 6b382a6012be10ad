"""Images and labels as the Hugging Face hub and MNIST's authors store them, and their decoding."""

import gzip
import importlib
import io
import logging
import math
import os
import struct
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from socflower.errors import DataUnavailable
from socflower.wire.saved_state import atomic_file, remove_partial

ImagesAndLabels: TypeAlias = tuple[npt.NDArray[np.uint8], npt.NDArray[np.int64]]

# Part of every cached file's name. Raise it when decoding changes.
_FORMAT = "v1"

_log = logging.getLogger(__name__)


def optional_package(module: str, *, extra: str, purpose: str) -> ModuleType:
    """Return the imported module; raise DataUnavailable with the extra to install if it is missing."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        package = module.partition(".")[0]
        raise DataUnavailable(
            f"{purpose} needs the package {package} ({error}): pip install 'socflower[{extra}]'"
        ) from error


IMAGE_COLUMNS = ("image", "img")
LABEL_COLUMN = "label"

# Pillow raises SyntaxError for a broken PNG.
_UNDECODABLE = (OSError, SyntaxError, TypeError, ValueError)


@dataclass(frozen=True, slots=True)
class EncodedImages:
    """PNG or JPEG files and their labels."""

    files: Sequence[bytes]
    labels: Sequence[int]


def image_column(names: Sequence[str], where: str) -> str:
    """Return the name of the image column; raise DataUnavailable if it or the label column is missing."""
    found = [name for name in IMAGE_COLUMNS if name in names]
    if not found or LABEL_COLUMN not in names:
        raise DataUnavailable(
            f"{where}: needs a column {' or '.join(IMAGE_COLUMNS)} and a column {LABEL_COLUMN}"
        )
    return found[0]


def read_parquet(path: Path) -> EncodedImages:
    """Return the rows of a Parquet file in the hub's layout, undecoded.

    Raises DataUnavailable if pyarrow is missing, the file is damaged, or the columns are not an image {bytes, path}
    and a label.
    """
    parquet = optional_package("pyarrow.parquet", extra="data", purpose=f"reading {path}")
    try:
        table = parquet.read_table(path)
    except (OSError, ValueError) as error:
        # Errors of pyarrow derive from these.
        raise DataUnavailable(
            f"{path}: not a readable Parquet file: {_first_line(error)}"
        ) from None
    column = table.column(image_column(table.column_names, str(path)))
    try:
        files = [file for chunk in column.chunks for file in chunk.field("bytes").to_pylist()]
        labels = table.column(LABEL_COLUMN).to_pylist()
    except (AttributeError, KeyError, ValueError):
        raise DataUnavailable(
            f"{path}: images must be structs of bytes and path, are {column.type}"
        ) from None
    return EncodedImages(files, labels)


def decode(
    encoded: EncodedImages, shape: tuple[int, int, int], num_classes: int, where: str
) -> ImagesAndLabels:
    """Return images (n, channels, height, width) uint8 and labels (n,) int64.

    `shape` is (channels, height, width) with 1 (grey) or 3 (RGB) channels. Raises DataUnavailable if pillow
    is missing, and with the row number for an undecodable image, a wrong size or a label outside 0..num_classes-1.
    """
    pillow = optional_package("PIL.Image", extra="data", purpose=f"decoding {where}")
    channels, height, width = shape
    mode = {1: "L", 3: "RGB"}[channels]
    images = np.empty((len(encoded.files), channels, height, width), dtype=np.uint8)
    for row, (file, label) in enumerate(zip(encoded.files, encoded.labels, strict=True)):
        problem = None
        try:
            with pillow.open(io.BytesIO(file)) as image:
                pixels = np.asarray(image.convert(mode))
        except _UNDECODABLE as error:
            problem = f"is no image: {_first_line(error)}"
        else:
            if pixels.shape[:2] != (height, width):
                problem = f"has {pixels.shape[1]}x{pixels.shape[0]} pixels, not {width}x{height}"
            elif not isinstance(label, int) or not 0 <= label < num_classes:
                problem = f"has label {label}, need 0 to {num_classes - 1}"
        if problem is not None:
            raise DataUnavailable(f"{where}: row {row} {problem}")
        images[row] = pixels if channels == 1 else pixels.transpose(2, 0, 1)
    return images, np.asarray(encoded.labels, dtype=np.int64)


def read_idx(
    images_path: Path, labels_path: Path, shape: tuple[int, int, int], num_classes: int
) -> ImagesAndLabels:
    """Return images (n, 1, height, width) uint8 and labels (n,) int64 of two compressed files in MNIST's idx format.

    `shape` is (1, height, width). Raises DataUnavailable for files that cannot be read, are not of this format, or do
    not fit the shape, the classes or each other.
    """
    images = _idx_array(images_path, 3)
    labels = _idx_array(labels_path, 1)
    _, height, width = shape
    if images.shape[1:] != (height, width):
        raise DataUnavailable(
            f"{images_path}: has images of {images.shape[2]}x{images.shape[1]} pixels, not {width}x{height}"
        )
    if len(images) != len(labels):
        raise DataUnavailable(
            f"{labels_path}: has {len(labels)} labels for {len(images)} images of {images_path.name}"
        )
    if labels.size and labels.max() >= num_classes:
        row = int(labels.argmax())
        raise DataUnavailable(
            f"{labels_path}: row {row} has label {labels[row]}, need 0 to {num_classes - 1}"
        )
    return images[:, np.newaxis], labels.astype(np.int64)


def _idx_array(path: Path, num_dimensions: int) -> npt.NDArray[np.uint8]:
    """Return the array of bytes of an idx file: a magic number, big-endian sizes, then the elements."""
    try:
        content = gzip.decompress(path.read_bytes())
    except (OSError, EOFError, zlib.error) as error:
        raise DataUnavailable(f"{path}: not a readable .gz file: {_first_line(error)}") from None
    header = struct.Struct(f">{1 + num_dimensions}I")
    # 8 is the type of unsigned bytes.
    magic = 8 << 8 | num_dimensions
    if len(content) < header.size or content[:4] != magic.to_bytes(4, "big"):
        raise DataUnavailable(f"{path}: not an idx file of bytes in {num_dimensions} dimensions")
    _, *sizes = header.unpack_from(content)
    elements = np.frombuffer(content, np.uint8, offset=header.size)
    if elements.size != math.prod(sizes):
        raise DataUnavailable(
            f"{path}: has {elements.size} bytes of {' x '.join(map(str, sizes))}; is it cut short?"
        )
    # The bytes of `content` are read-only, and tensors are not.
    return elements.reshape(sizes).copy()


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]


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
        # Concurrent processes write the same bytes, each to its own temporary file; the last one to rename it wins.
        for path, array in ((labels_path, labels), (images_path, images)):
            with atomic_file(path) as file:
                np.save(file, array, allow_pickle=False)
    except OSError as error:
        _log.warning(
            "data cache: cannot write %s (%s); every process decodes the images itself",
            folder,
            error,
        )
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
