import dataclasses
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from socflower.workloads.dataset import LabelledData, concatenate
from tests.one_line import refused


def samples(num_samples: int = 20, seed: int = 0) -> LabelledData:
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randint(0, 256, (num_samples, 3, 4, 5), dtype=torch.uint8, generator=generator)
    labels = torch.randint(0, 7, (num_samples,), generator=generator)
    return LabelledData(inputs, labels, (0.5, 0.4, 0.3), (0.2, 0.3, 0.4), 7)


def normalised(data: LabelledData, rows: list[int]) -> torch.Tensor:
    pixels = data.inputs[rows].double() / (255 if data.inputs.dtype == torch.uint8 else 1)
    mean, std = (
        torch.tensor(values, dtype=torch.float64).view(1, -1, 1, 1)
        for values in (data.mean, data.std)
    )
    return ((pixels - mean) / std).float()


@given(rows=st.lists(st.integers(0, 19), max_size=30))
def test_batch_is_normalised(rows: list[int]) -> None:
    data = samples()
    inputs, labels = data.batch(rows)
    assert inputs.dtype == torch.float32 and labels.dtype == torch.int64
    torch.testing.assert_close(inputs, normalised(data, rows), rtol=1e-5, atol=1e-6)
    assert labels.tolist() == data.labels[rows].tolist()


def test_batches_leave_the_data_as_it_was() -> None:
    for dtype in (torch.uint8, torch.float32):
        data = samples()
        data = LabelledData((data.inputs / 255).to(dtype), data.labels, data.mean, data.std, 7)
        before = data.inputs.clone()
        inputs, _ = data.batch(range(20))
        inputs.zero_()
        assert torch.equal(data.inputs, before)


def test_floats_count_as_pixels_from_0_to_1() -> None:
    data = samples()
    floats = LabelledData(data.inputs / 255, data.labels, data.mean, data.std, 7)
    torch.testing.assert_close(floats.batch([3, 1])[0], data.batch([3, 1])[0], rtol=1e-5, atol=1e-6)


def test_select_accepts_every_kind_of_index_and_copies() -> None:
    data, rows = samples(), [4, 4, 0]
    for indices in (rows, np.array(rows, dtype=np.int32), torch.tensor(rows)):
        chosen = data.select(indices)
        assert len(chosen) == 3 and torch.equal(chosen.inputs, data.inputs[rows])
        assert (chosen.mean, chosen.std, chosen.num_classes) == (data.mean, data.std, 7)
    chosen.inputs.zero_()
    assert data.inputs[0].any()
    assert len(data.select([])) == 0


def test_select_then_concatenate_gives_the_whole_back() -> None:
    data = samples()
    whole = concatenate([data.select(range(7)), data.select([]), data.select(range(7, 20))])
    assert torch.equal(whole.inputs, data.inputs) and torch.equal(whole.labels, data.labels)


def test_what_does_not_fit_together_is_refused() -> None:
    whole = {
        "inputs": torch.zeros(2, 1, 3, 3, dtype=torch.uint8),
        "labels": torch.zeros(2, dtype=torch.int64),
        "mean": (0.0,),
        "std": (1.0,),
        "num_classes": 2,
    }
    inputs, labels = whole["inputs"], whole["labels"]
    floats = torch.zeros(2, 1, 3, 3)
    for changes, *named in (
        ({"inputs": inputs[0]}, "inputs"),
        ({"labels": labels[:1]}, "inputs"),
        ({"labels": labels.int()}, "labels", "int64"),
        ({"inputs": inputs.int()}, "uint8"),
        ({"mean": (0.0, 0.0)}, "1 channel"),
        ({"std": (0.0,)}, "std"),
        ({"labels": torch.tensor((0, 2))}, "num_classes = 2", "0 to 2"),
        ({"labels": torch.tensor((-100, 1))}, "num_classes = 2", "-100 to 1"),
        *(
            ({"inputs": floats.index_fill(0, torch.tensor(1), value)}, "NaN", "infinity")
            for value in (math.nan, math.inf, -math.inf)
        ),
    ):
        refused(lambda changes=changes: LabelledData(**whole | changes), *named)
    data = samples()
    refused(lambda: concatenate([]), "concatenate")
    refused(lambda: concatenate([data, dataclasses.replace(data, num_classes=8)]), "part 1")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("value", [255.0, -0.5])
def test_floats_outside_0_to_1_are_refused_unless_they_are_said_to_be_normalised(
    dtype: torch.dtype, value: float
) -> None:
    inputs, labels = torch.full((2, 1, 3, 3), 0.5, dtype=dtype), torch.tensor([0, 1])
    inputs[1, 0, 2, 2] = value
    for constants in (((0.5,), (1.0,)), ((0.0,), (0.25,))):
        refused(
            lambda constants=constants: LabelledData(inputs, labels, *constants, 2), "0..1", "255"
        )
    made = LabelledData(inputs, labels, (0.0,), (1.0,), 2)
    assert torch.equal(made.batch([0, 1])[0], inputs.float())
