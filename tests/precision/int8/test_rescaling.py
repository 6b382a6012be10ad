"""ScaleTracker and the two ways of rounding out: F14 and F16."""

from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from socflower import _int8
from socflower.errors import TrainingFailed
from socflower.precision.algorithm import Rounding
from socflower.precision.int8.batch_share import BatchShare
from socflower.precision.int8.operators.elementwise import add_tensors
from socflower.precision.int8.requantisation import (
    MAX_EXPONENT,
    ZERO_EXPONENT,
    RescalingPolicy,
    ScaleTracker,
    round_elementwise,
    round_product,
)
from tests.one_line import refused
from tests.precision import numpy_kernels as nk
from tests.precision.numpy_engine import Tracker, aligned_sum

ENGINE = _int8.Engine(kernel="portable")
WHOLE = BatchShare(1)
NOWHERE = np.empty(0, np.int8)
exponents = st.lists(st.integers(-4, 4), min_size=1, max_size=120)


def looks(policy, exponents):
    """Return the batches in which a tracker looked, exponents[i] being right in batch i."""
    tracker = ScaleTracker(policy)
    batches = []
    for batch, exponent in enumerate(exponents):
        if tracker.known() is None:
            batches.append(batch)
            tracker.found(exponent)
        else:
            tracker.end_batch()
    assert tracker.num_looks == len(batches)
    return batches


@given(exponents, st.integers(1, 150))
def test_every_batch_of_the_warm_up_is_looked_at(exponents, warm_up):
    seen = looks(RescalingPolicy(warm_up_batches=warm_up), exponents)
    first = min(warm_up, len(exponents))
    assert seen[:first] == list(range(first))


@given(exponents)
def test_without_adaptation_every_batch_is_looked_at(exponents):
    assert looks(RescalingPolicy(adaptive=False, warm_up_batches=1), exponents) == list(
        range(len(exponents))
    )


numbers_of_intervals = st.none() | st.integers(1, 6)


@given(st.integers(1, 9), st.integers(3, 30), numbers_of_intervals)
def test_the_period_is_half_the_mean_interval_between_changes(interval, num_changes, last):
    """With a change every `interval` batches the trackers' looks are max(1, interval / 2) apart (F16)."""
    warm_up = interval * num_changes + 1
    rights = [batch // interval for batch in range(warm_up)]
    policy = RescalingPolicy(warm_up_batches=warm_up, last_intervals=last)
    seen = looks(policy, rights + rights[-1:] * 2 * interval)
    after = [batch for batch in seen if batch >= warm_up - 1]
    assert after[1] - after[0] == max(1, interval // 2)


def test_an_exponent_that_never_changes_is_looked_at_ever_less():
    seen = looks(RescalingPolicy(warm_up_batches=4), [0] * 1000)
    gaps = np.diff(seen[3:])
    assert (np.diff(gaps) >= 0).all()
    assert len(seen) < 25


def test_a_change_is_found_again_after_it_stopped_for_long():
    """The open interval since the last change counts, so early restlessness does not cost looks for ever."""
    seen = looks(RescalingPolicy(warm_up_batches=10), [*range(50), *[50] * 2000])
    assert len([batch for batch in seen if batch > 1000]) < 300


def test_only_the_last_intervals_count_if_the_policy_says_so():
    """After a change in each of 40 batches, changes every 20 batches make looks rare at once, not in the end."""
    rights = [*range(40), *(40 + batch // 20 for batch in range(400))]
    numbers = {}
    for last in (2, None):
        seen = looks(RescalingPolicy(warm_up_batches=10, last_intervals=last), rights)
        numbers[last] = sum(batch > 120 for batch in seen)
    assert numbers[2] < 0.5 * numbers[None]


@settings(max_examples=50)
@given(
    st.lists(st.tuples(st.integers(0, 2**26), st.integers(-3, 3)), min_size=1, max_size=60),
    st.integers(1, 8),
    numbers_of_intervals,
)
def test_rounding_out_follows_the_model_of_the_tracker(values, warm_up, last):
    """round_product and round_elementwise give the integers and exponents of F14 and F16, whatever comes."""
    policy = RescalingPolicy(warm_up_batches=warm_up, last_intervals=last)
    rounding = Rounding.PSEUDO_STOCHASTIC
    model = Tracker(policy)
    product = ScaleTracker(policy)
    elementwise = ScaleTracker(policy)
    for largest, acc_exponent in values:
        acc = np.linspace(-largest, largest, 16).astype(np.int32)
        expected, exponent = model.round(acc.astype(np.int64), acc_exponent, nk.PSEUDO_STOCHASTIC)
        out = np.empty(16, np.int8)
        wide = np.empty(16, np.int32)

        def run(destination, shift, acc=acc):
            if destination.dtype == np.int32:
                destination[...] = acc
                return int(np.abs(acc).max())
            return _int8.requantise(ENGINE, acc, destination, shift, rounding)

        def run_either(into, shift, acc=acc):
            return _int8.requantise(ENGINE, acc, into, shift, rounding)

        got = round_product("p", ENGINE, WHOLE, product, acc_exponent, run, out, wide, rounding)
        assert got == exponent
        np.testing.assert_array_equal(out, expected)
        assert round_elementwise("e", WHOLE, elementwise, acc_exponent, run_either, out) == exponent
        np.testing.assert_array_equal(out, expected)


def test_saturation_makes_the_next_look_immediate():
    tracker = ScaleTracker(RescalingPolicy(warm_up_batches=1))
    shifts = []

    def batch(largest):
        def run(into, shift):
            shifts.append(shift)
            return largest

        shifts.clear()
        return round_elementwise("x", WHOLE, tracker, 0, run, NOWHERE)

    assert [batch(1000) for _ in range(9)] == [3] * 9
    seen = tracker.num_looks
    assert seen < 9
    # 1023 >> 3 is 127.
    for largest, looks, tried in ((1023, 0, [3]), (1024, 1, [3, 0, 4])):
        while tracker.known() is None:
            batch(1000)
        seen = tracker.num_looks
        assert batch(largest) == tried[-1]
        assert (tracker.num_looks - seen, shifts) == (looks, tried)


def test_an_exponent_that_cannot_be_reached_by_a_shift_is_looked_for():
    tracker = ScaleTracker(RescalingPolicy(warm_up_batches=1))
    for acc_exponent, expected in ((0, 0), (0, 0), (5, 5), (-40, -40)):
        assert (
            round_elementwise("x", WHOLE, tracker, acc_exponent, lambda into, shift: 100, NOWHERE)
            == expected
        )


def test_zeros_neither_have_nor_change_an_exponent():
    tracker = ScaleTracker(RescalingPolicy(warm_up_batches=1))
    assert ZERO_EXPONENT == -7
    for largest, acc_exponent, expected in ((0, -3, -7), (127, -3, -3), (0, -9, -3)):
        got = round_elementwise(
            "x", WHOLE, tracker, acc_exponent, lambda *_, one=largest: one, NOWHERE
        )
        assert got == expected
        assert tracker.exponent == (None if expected == -7 else -3)
    assert round_elementwise("x", WHOLE, None, -9, lambda into, shift: 0, NOWHERE) == -7


sixteen = st.lists(st.integers(-127, 127), min_size=16, max_size=16)
addends = st.tuples(sixteen | st.just([0] * 16), st.integers(-30, 30))


@settings(max_examples=80)
@given(addends, addends)
def test_sums_are_exact_within_20_bits_and_zeros_have_no_say_beyond(a, b):
    a, b = ((np.array(values, np.int8).reshape(1, 1, 1, 16), e) for values, e in (a, b))
    acc, low = aligned_sum(*((values.astype(np.int64), exponent) for values, exponent in (a, b)))
    shift = nk.shift_for(nk.largest_magnitude(acc))
    out = np.empty_like(a[0])
    step = SimpleNamespace(engine=ENGINE, share=WHOLE)
    exponent = add_tensors("sum", step, None, a, b, out, rounding=Rounding.NEAREST)
    assert exponent == (low + shift if acc.any() else ZERO_EXPONENT)
    np.testing.assert_array_equal(out, nk.round_shift(acc, shift, nk.NEAREST))
    for zeros, other in ((a, b), (b, a)):
        if not zeros[0].any() and abs(a[1] - b[1]) > 20:
            np.testing.assert_array_equal(out, other[0])


@pytest.mark.parametrize("exponent", [MAX_EXPONENT + 1, -MAX_EXPONENT - 1])
def test_an_exponent_out_of_bounds_is_failed_training(exponent):
    tracker = ScaleTracker(RescalingPolicy())
    call = partial(
        round_elementwise, "conv1", WHOLE, tracker, exponent, lambda into, shift: 100, NOWHERE
    )
    refused(call, "conv1", f"100 * 2^{exponent}", error=TrainingFailed)
    refused(lambda: RescalingPolicy(warm_up_batches=0), "warm_up_batches", 0)
    refused(lambda: RescalingPolicy(last_intervals=0), "last_intervals", 0)
