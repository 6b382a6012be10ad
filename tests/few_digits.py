"""A quarter of the digits, for runs that are about anything but accuracy."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

NUM_TRAIN = 1000
NUM_TEST = 250


@contextmanager
def few_digits() -> Iterator[None]:
    """In this process "digits" are the first 1,000 training and 250 test digits; worker processes have all of them."""
    import torch  # here: most tests load no torch

    from socflower.scenario import arithmetic
    from socflower.workloads import sources
    from socflower.workloads.dataset import DataSet
    from socflower.workloads.sources import load_data

    whole = load_data("digits")
    if len(whole.train) == NUM_TRAIN:
        yield
        return
    few = DataSet(
        whole.train.select(torch.arange(NUM_TRAIN)),
        whole.test.select(torch.arange(NUM_TEST)),
        whole.name,
        whole.source,
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sources, "_load_digits", lambda cache: few)
        patch.setattr(sources, "_DIGITS_TRAIN", NUM_TRAIN)
        arithmetic.held_out_split.cache_clear()
        yield
    arithmetic.held_out_split.cache_clear()


@pytest.fixture
def on_few_digits() -> Iterator[None]:
    with few_digits():
        yield
