"""Some classes of a data set, and weights from elsewhere."""

from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from socflower.workloads.dataset import LabelledData
from socflower.workloads.models.classifiers import build_model
from socflower.workloads.transfer import class_subset, load_weights
from tests.one_line import refused

CLASSES = st.lists(st.integers(0, 6), min_size=1, max_size=7, unique=True)


def samples(num_samples: int = 40) -> LabelledData:
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randint(0, 256, (num_samples, 1, 2, 2), dtype=torch.uint8, generator=generator)
    labels = torch.randint(0, 7, (num_samples,), generator=generator)
    return LabelledData(inputs, labels, (0.5,), (0.2,), 7)


def network(num_classes: int, seed: int, name: str = "vgg-tiny") -> nn.Module:
    return build_model(name, in_channels=1, image_size=28, num_classes=num_classes, seed=seed)


def saved(model: nn.Module, path: Path) -> Path:
    np.savez(path, **{name: tensor.numpy() for name, tensor in model.state_dict().items()})
    return path


@given(classes=CLASSES)
def test_a_subset_keeps_order_and_pixels_and_numbers_classes_as_named(classes: list[int]) -> None:
    everything = samples()
    chosen = class_subset(everything, classes)
    expected = [
        (everything.inputs[row].tolist(), classes.index(label))
        for row, label in enumerate(everything.labels.tolist())
        if label in classes
    ]
    assert list(zip(chosen.inputs.tolist(), chosen.labels.tolist(), strict=True)) == expected
    assert (chosen.num_classes, chosen.mean, chosen.std) == (
        len(classes),
        everything.mean,
        everything.std,
    )


@given(classes=CLASSES)
def test_a_subset_and_the_others_hold_every_sample_once(classes: list[int]) -> None:
    others = [label for label in range(7) if label not in classes]
    everything = samples()
    sizes = [len(class_subset(everything, part)) for part in (classes, others) if part]
    assert sum(sizes) == len(everything)


@pytest.mark.parametrize(
    ("classes", "named"),
    [([], "one or more"), ([1, 2, 1], "[1, 2, 1]"), ([7], "0..6"), ([-1], "-1")],
)
def test_classes_that_cannot_be_are_refused(classes: list[int], named: str) -> None:
    refused(lambda: class_subset(samples(), classes), "class", named)


@pytest.mark.parametrize("name", ["vgg-tiny", "resnet8", "lenet5"])
@pytest.mark.parametrize("num_classes", [4, 7])
def test_all_but_the_head_is_loaded(name: str, num_classes: int, tmp_path: Path) -> None:
    """A head of as many classes is left out too: they are others."""
    source, model = network(7, 1, name), network(num_classes, 2, name)
    untouched = network(num_classes, 2, name).state_dict()
    left_out = load_weights(model, saved(source, tmp_path / "model.npz"))
    assert left_out == tuple(untouched)[-2:]
    for key, tensor in model.state_dict().items():
        assert torch.equal(tensor, (untouched if key in left_out else source.state_dict())[key])


def test_the_head_may_be_loaded_or_be_missing(tmp_path: Path) -> None:
    source, model = network(7, 1), network(7, 2)
    assert load_weights(model, saved(source, tmp_path / "model.npz"), except_head=False) == ()
    assert equal(model, source)
    arrays = dict(list(source.state_dict().items())[:-2])
    np.savez(tmp_path / "headless.npz", **arrays)
    assert len(load_weights(network(3, 2), tmp_path / "headless.npz")) == 2


def equal(one: nn.Module, other: nn.Module) -> bool:
    state = other.state_dict()
    return all(torch.equal(tensor, state[key]) for key, tensor in one.state_dict().items())


def test_weights_that_do_not_fit_are_refused_and_change_nothing(tmp_path: Path) -> None:
    arrays = {name: tensor.numpy() for name, tensor in network(7, 1).state_dict().items()}
    first, norm, *_, head = arrays
    zeros = np.zeros(3, np.float32)
    fewer = {key: value for key, value in arrays.items() if key != norm}
    for wrong, except_head, *named in (
        (fewer, True, norm, "1 missing"),
        (arrays | {"other.weight": zeros}, True, "other.weight", "1 too many"),
        (arrays | {norm: zeros}, True, norm, "(3,)", "(16,)"),
        (arrays | {first: np.full(arrays[first].shape, "x")}, True, first, "<U1"),
        (arrays | {head: zeros}, False, "(3,)", "head"),
    ):
        model, path = network(7, 2), tmp_path / "wrong.npz"
        np.savez(path, **wrong)
        refused(partial(load_weights, model, path, except_head=except_head), *named)
        assert equal(model, network(7, 2))


def test_files_that_are_no_weights_are_refused(tmp_path: Path) -> None:
    single, garbage, torn, pickled = (
        tmp_path / name for name in ("one.npy", "text.npz", "torn.npz", "object.npz")
    )
    np.save(single, np.zeros(3))
    garbage.write_text("not an archive")
    torn.write_bytes(saved(network(7, 1), tmp_path / "whole.npz").read_bytes()[:5000])
    np.savez(pickled, weight=np.array([object()]))
    for path, named in (
        (tmp_path / "none.npz", "no such file"),
        (single, "single array"),
        *((path, ".npz") for path in (garbage, torn, pickled, tmp_path)),
    ):
        refused(lambda path=path: load_weights(network(7, 2), path), path.name, named)
