import pickle

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from socflower.errors import ConfigError
from socflower.workloads import LabelledData, concatenate


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
        assert (chosen.mean, chosen.std, chosen.num_classes) == (
            data.mean,
            data.std,
            data.num_classes,
        )
    chosen.inputs.zero_()
    assert data.inputs[0].any()
    assert len(data.select([])) == 0


def test_select_then_concatenate_gives_the_whole_back() -> None:
    data = samples()
    whole = concatenate([data.select(range(7)), data.select([]), data.select(range(7, 20))])
    assert torch.equal(whole.inputs, data.inputs) and torch.equal(whole.labels, data.labels)


def test_data_survives_pickling() -> None:
    data = samples()
    copy = pickle.loads(pickle.dumps(data))
    assert torch.equal(copy.batch([2, 5])[0], data.batch([2, 5])[0])


def test_concatenate_refuses_nothing_and_strangers() -> None:
    data = samples()
    with pytest.raises(ConfigError, match="nothing to concatenate"):
        concatenate([])
    stranger = LabelledData(data.inputs, data.labels, data.mean, data.std, 8)
    with pytest.raises(ConfigError, match="part 1 has format"):
        concatenate([data, stranger])


def test_what_does_not_fit_together_is_refused() -> None:
    inputs, labels = torch.zeros(2, 1, 3, 3, dtype=torch.uint8), torch.zeros(2, dtype=torch.int64)
    cases = [
        ((inputs[0], labels, (0.0,), (1.0,), 2), "need inputs"),
        ((inputs, labels[:1], (0.0,), (1.0,), 2), "need inputs"),
        ((inputs, labels.int(), (0.0,), (1.0,), 2), "labels must be int64, got torch.int32"),
        ((inputs.int(), labels, (0.0,), (1.0,), 2), "uint8 or floating point"),
        ((inputs, labels, (0.0, 0.0), (1.0,), 2), "1 channels need as many"),
        ((inputs, labels, (0.0,), (0.0,), 2), "std must be above 0"),
    ]
    for arguments, reason in cases:
        with pytest.raises(ConfigError, match=reason):
            LabelledData(*arguments)


@pytest.mark.parametrize(
    ("labels", "found"), [((0, 2), "0 to 2"), ((-100, 1), "-100 to 1"), ((5, 6), "5 to 6")]
)
def test_labels_that_are_no_classes_are_refused_with_the_values_found(
    labels: tuple[int, int], found: str
) -> None:
    inputs = torch.zeros(2, 1, 3, 3, dtype=torch.uint8)
    with pytest.raises(
        ConfigError, match=rf"labels must be 0\.\.1 for num_classes = 2, got {found}; "
    ) as refusal:
        LabelledData(inputs, torch.tensor(labels), (0.0,), (1.0,), 2)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_floats_outside_0_to_1_are_refused_but_where_they_say_that_they_are_normalised(
    dtype: torch.dtype,
) -> None:
    labels = torch.tensor([0, 1])
    for value in (255.0, -0.5):
        inputs = torch.full((2, 1, 3, 3), 0.5, dtype=dtype)
        inputs[1, 0, 2, 2] = value
        for constants in (((0.5,), (1.0,)), ((0.0,), (0.25,))):
            with pytest.raises(
                ConfigError,
                match=r"must be in 0\.\.1, got .*; divide pixels by 255 or pass them as",
            ):
                LabelledData(inputs, labels, *constants, 2)
        made = LabelledData(inputs, labels, (0.0,), (1.0,), 2)
        assert torch.equal(made.batch([0, 1])[0], inputs.float())


def test_inputs_that_are_not_finite_are_refused_however_they_are_normalised() -> None:
    for value in (float("nan"), float("inf"), -float("inf")):
        inputs = torch.zeros(2, 1, 3, 3)
        inputs[0, 0, 1, 1] = value
        with pytest.raises(ConfigError, match="a NaN or an infinity among the inputs"):
            LabelledData(inputs, torch.tensor([0, 1]), (0.0,), (1.0,), 2)
