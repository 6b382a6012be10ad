"""Batches of any form are divided and put together as rows of one tensor are."""

from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from socflower.model_graph.batch_form import (
    NOTHING,
    concatenated,
    form_of,
    num_samples,
    output_of,
    pair_of,
    split,
)
from tests.one_line import refused


class Named(NamedTuple):
    first: torch.Tensor
    second: torch.Tensor


FORMS: dict[str, Any] = {
    "tensor": lambda rows: rows,
    "pair": lambda rows: (rows, rows[:, 0].long()),
    "list": lambda rows: [rows, rows * 2],
    "dict": lambda rows: {"ids": rows.long(), "mask": rows > 3, "source": "here"},
    "nested": lambda rows: ({"ids": rows, "scale": torch.tensor(2.0)}, rows[:, :1]),
    "named": lambda rows: Named(rows, -rows),
}


def leaves(batch: Any) -> list[Any]:
    parts = batch.values() if isinstance(batch, dict) else batch
    if isinstance(batch, dict | tuple | list):
        return [leaf for part in parts for leaf in leaves(part)]
    return [batch]


@given(
    form=st.sampled_from(list(FORMS)),
    sizes=st.lists(st.integers(0, 4), min_size=1, max_size=5).filter(any),
)
def test_parts_are_the_rows_and_together_the_whole_again(form: str, sizes: list[int]) -> None:
    rows = torch.arange(3.0 * sum(sizes)).reshape(-1, 3)
    whole, parts = FORMS[form](rows), split(FORMS[form](rows), sizes)
    assert [num_samples(part) for part in parts] == sizes
    assert all(part == NOTHING for part, size in zip(parts, sizes, strict=True) if not size)
    again = concatenated([part for part, size in zip(parts, sizes, strict=True) if size])
    assert type(again) is type(whole)
    for ours, theirs in zip(leaves(again), leaves(whole), strict=True):
        assert torch.equal(ours, theirs) if isinstance(ours, torch.Tensor) else ours == theirs


@pytest.mark.parametrize(
    "other", [torch.ones(2, 4), torch.ones(2, 3).double(), (torch.ones(2, 3),), NOTHING]
)
def test_what_has_another_shape_type_or_form_is_not_put_together(other: Any) -> None:
    assert concatenated([torch.ones(2, 3), other]) is None


def test_a_pair_is_a_pair_and_anything_else_is_described() -> None:
    inputs, labels = torch.ones(2, 3), torch.zeros(2)
    assert pair_of([inputs, labels], "X")[1] is labels
    assert [len(part) for part in pair_of(NOTHING, "X")] == [0, 0]
    for batch, form in (
        ({"ids": inputs}, "a dict of ids"),
        (inputs, "a tensor of shape (2, 3)"),
        ((inputs, {"a": labels}), "tuple of a tensor of shape (2, 3), a dict of a"),
    ):
        assert form_of(batch) == form
        refused(lambda batch=batch: pair_of(batch, "X"), "X: ", form)


def test_a_model_gets_dicts_by_name_and_tuples_by_position() -> None:
    class Takes(torch.nn.Module):
        def forward(self, a: int, b: int = 5) -> tuple[int, int]:
            return a, b

    found = [output_of(Takes(), inputs) for inputs in ({"b": 1, "a": 2}, (3, 4), [6], 7)]
    assert found == [(2, 1), (3, 4), (6, 5), (7, 5)]
