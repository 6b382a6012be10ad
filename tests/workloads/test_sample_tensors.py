"""Samples of several parties, joined by id, and the codes that images are generated from."""

from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from socflower.workloads.dataset import LabelledData
from socflower.workloads.sample_tensors import (
    STYLE_SIZE,
    GeneratorSamples,
    VerticalSamples,
    generator_codes,
)
from tests.one_line import refused

IDS = st.lists(st.integers(0, 2**40), min_size=1, max_size=20, unique=True)


def parted(ids: list[int]) -> VerticalSamples:
    """Return samples of which every party's features name the sample."""
    key = torch.tensor(ids, dtype=torch.int64)
    small = torch.arange(len(ids), dtype=torch.int16)
    return VerticalSamples(key, (small[:, None], key.double()[:, None] / 2), key % 2)


def images(num_samples: int, dtype: torch.dtype = torch.uint8) -> LabelledData:
    generator = torch.Generator().manual_seed(0)
    pixels = torch.randint(0, 256, (num_samples, 1, 4, 4), dtype=torch.uint8, generator=generator)
    labels = torch.randint(0, 3, (num_samples,), generator=generator)
    inputs = pixels if dtype == torch.uint8 else pixels.to(dtype) / 255
    return LabelledData(inputs, labels, (0.5,), (0.2,), 3)


@given(ids=IDS, seed=st.integers(0, 99))
def test_whatever_the_order_the_same_id_names_the_same_sample(ids: list[int], seed: int) -> None:
    order = torch.randperm(len(ids), generator=torch.Generator().manual_seed(seed)).tolist()
    one, other = parted(ids), parted([ids[row] for row in order])
    rows = other.rows_of(ids)
    assert other.ids[rows].tolist() == ids == one.ids[one.rows_of(ids)].tolist()
    assert torch.equal(other.batch(rows)[0][1], one.batch(range(len(ids)))[0][1])


@given(ids=IDS, data=st.data())
def test_a_batch_holds_each_partys_rows_and_the_labels(ids: list[int], data: st.DataObject) -> None:
    rows = data.draw(st.lists(st.integers(0, len(ids) - 1), max_size=10))
    parts, labels = parted(ids).batch(rows)
    dtypes = [each.dtype for each in (*parts, labels)]
    assert dtypes == [torch.int64, torch.float32, torch.int64]
    assert parts[0][:, 0].tolist() == rows
    assert labels.tolist() == [ids[row] % 2 for row in rows]


def test_vertical_samples_that_do_not_fit_are_refused() -> None:
    ids, labels, part = torch.arange(3), torch.zeros(3, dtype=torch.int64), torch.zeros(3, 2)
    for arguments, named in (
        ((ids, (), labels), "none"),
        ((ids, (part, part[:2]), labels), "3 and 3, 2"),
        ((ids, (part,), labels[:2]), "2 and 3"),
        ((ids.int(), (part,), labels), "int32"),
        ((ids, (part,), labels.float()), "int64"),
        ((labels, (part,), labels), "twice"),
    ):
        refused(lambda arguments=arguments: VerticalSamples(*arguments), named)
    for samples in (parted([5, 7]), parted([9]), VerticalSamples(ids[:0], (part[:0],), labels[:0])):
        refused(lambda samples=samples: samples.rows_of([6]), "6")


@given(ids=IDS, seed=st.integers(0, 2**63), data=st.data())
def test_a_code_is_a_function_of_seed_id_and_label_alone(
    ids: list[int], seed: int, data: st.DataObject
) -> None:
    codes = partial(generator_codes, num_classes=10)
    labels = data.draw(st.lists(st.integers(0, 9), min_size=len(ids), max_size=len(ids)))
    together = codes(ids, labels, seed=seed)
    classes, styles = together[:, :10], together[:, 10:]
    assert styles.shape == (len(ids), STYLE_SIZE) and bool(torch.isfinite(together).all())
    assert classes.argmax(dim=1).tolist() == labels and bool((classes.sum(dim=1) == 1).all())
    for row, (own, label) in enumerate(zip(ids, labels, strict=True)):
        assert torch.equal(codes([own], [label], seed=seed)[0], together[row])
        assert not torch.equal(codes([own], [label], seed=seed + 1)[0, 10:], styles[row])


def test_styles_are_standard_normal_and_independent() -> None:
    num_samples = 20_000
    for seed in (0, 1):
        styles = generator_codes(range(num_samples), [0] * num_samples, num_classes=1, seed=seed)[
            :, 1:
        ].double()
        # Bounds at about five standard errors of each statistic.
        assert styles.mean(dim=0).abs().max() < 5 / num_samples**0.5
        covariance = styles.T @ styles / num_samples
        assert (covariance - torch.eye(STYLE_SIZE)).abs().max() < 5 * (2 / num_samples) ** 0.5
        assert abs(float((styles.abs() < 1).double().mean()) - 0.6827) < 0.005
        # From one id to the next.
        assert abs(float((styles[1:] * styles[:-1]).mean())) < 0.01


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32])
def test_targets_are_the_pixels_from_0_to_1(dtype: torch.dtype) -> None:
    data = images(12, dtype)
    samples = GeneratorSamples(data, seed=4)
    targets = samples.targets([3, 3, 0])
    assert targets.dtype == torch.float32
    torch.testing.assert_close(targets, images(12).inputs[[3, 3, 0]] / 255)
    targets.zero_()
    # A copy.
    assert bool(data.inputs[3].any())
    codes = samples.codes([7, 2])
    assert torch.equal(codes, generator_codes([7, 2], data.labels[[7, 2]], num_classes=3, seed=4))
    assert len(samples) == 12


def test_trivial_losses_are_those_of_the_mean_images() -> None:
    data = images(30)
    everywhere, by_class = GeneratorSamples(data).mean_image_losses()
    pixels = data.inputs.double() / 255
    assert everywhere == pytest.approx(float(pixels.var(dim=0, correction=0).mean()), rel=1e-5)
    within = sum(
        float(
            pixels[data.labels == label].var(dim=0, correction=0).mean()
            * (data.labels == label).sum()
        )
        for label in range(3)
    )
    assert by_class == pytest.approx(within / 30, rel=1e-5)
    assert by_class < everywhere


def test_codes_that_cannot_be_are_refused() -> None:
    for ids, labels, seed, named in (
        ([0, 1], [0], 0, "2"),
        ([0], [3], 0, "3 to 3"),
        ([0, 1], [-1, 2], 0, "-1 to 2"),
        ([0], [0], -1, "seed = -1"),
    ):
        refused(partial(generator_codes, ids, labels, num_classes=3, seed=seed), named)
    refused(lambda: GeneratorSamples(images(2), seed=-1), "seed = -1")
    refused(GeneratorSamples(images(2).select([])).mean_image_losses, "no images")
    assert generator_codes([], [], num_classes=3).shape == (0, 3 + STYLE_SIZE)
