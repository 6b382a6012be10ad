import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from socflower.edgecloud.samples import BatchOrder
from socflower.errors import ConfigError


@given(num_samples=st.integers(1, 200), seed=st.integers(0, 2**32 - 1), key=st.integers(0, 5), draw=st.data())
def test_an_epoch_has_every_sample_once_in_batches_that_differ_by_one_at_most(
    num_samples: int, seed: int, key: int, draw: st.DataObject,
) -> None:
    per_epoch = draw.draw(st.integers(1, num_samples))
    order = BatchOrder(num_samples, per_epoch, seed, key)
    epoch = draw.draw(st.integers(0, 3))
    batches = [order.rows(epoch * per_epoch + within) for within in range(per_epoch)]
    assert sorted(np.concatenate(batches)) == list(range(num_samples))
    sizes = {len(batch) for batch in batches}
    assert max(sizes) - min(sizes) <= 1


@given(asked=st.lists(st.integers(0, 40), min_size=1, max_size=20))
def test_a_batch_is_the_same_whenever_it_is_asked_for(asked: list[int]) -> None:
    order = BatchOrder(30, 4, seed=3)
    for batch in asked:
        assert (order.rows(batch) == BatchOrder(30, 4, seed=3).rows(batch)).all()


def test_parties_of_one_key_have_one_order_and_others_another() -> None:
    assert (BatchOrder(50, 5, 1, key=0).rows(7) == BatchOrder(50, 5, 1, key=0).rows(7)).all()
    assert (BatchOrder(50, 5, 1, key=0).rows(7) != BatchOrder(50, 5, 1, key=1).rows(7)).any()


@pytest.mark.parametrize("per_epoch", [0, 11])
def test_batches_without_samples_are_refused(per_epoch: int) -> None:
    with pytest.raises(ConfigError, match="10 samples cannot make"):
        BatchOrder(10, per_epoch, seed=1)
