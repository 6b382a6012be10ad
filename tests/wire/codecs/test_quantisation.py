"""Features in few bits: the error is half a step at most, both ends decode the same, and garbage is refused."""

import math
import tracemalloc
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from socflower.errors import ConfigError
from socflower.wire.codecs.quantisation import EncodedTensor, Floats, Grouping, decode, encode
from tests.one_line import refused

LARGEST = float(np.finfo(np.float32).max)
# A tensor has many elements, each of which is an example of the bound.
FEW = settings(max_examples=40)
QUANTISED = st.sampled_from([2, 4, 8, 16])
GROUPING: st.SearchStrategy[Grouping] = st.sampled_from(["tensor", "sample"])
# All of float32: -0.0, subnormal numbers, ranges beyond float32's own.
ANY_TENSOR = hnp.arrays(
    np.float32,
    hnp.array_shapes(max_dims=4, max_side=9),
    elements=st.floats(-LARGEST, LARGEST, width=32),
)
LIKE_A_FEATURE = hnp.arrays(
    np.float32, hnp.array_shapes(max_dims=4, max_side=9), elements=st.floats(-9, 9, width=32)
)


def by_formula(features: Floats, bits: int) -> tuple[list[int], list[float]]:
    """F24 element by element in Python's own float64."""
    values = [float(value) for value in features.reshape(-1)]
    low, high = min(values), max(values)
    step = (high - low) / (2**bits - 1)
    levels = [round((value - low) / step) if step else 0 for value in values]
    return levels, [low + level * step for level in levels]


def groups_of(features: Floats, grouping: Grouping) -> list[Floats]:
    return list(features) if grouping == "sample" else [features]


@FEW
@given(features=st.one_of(ANY_TENSOR, LIKE_A_FEATURE), bits=QUANTISED, grouping=GROUPING)
def test_the_error_is_half_a_step_at_most(features: Floats, bits: int, grouping: Grouping) -> None:
    decoded = decode(encode(features, bits, grouping=grouping))
    assert decoded.shape == features.shape and decoded.dtype == np.float32
    for was, came in zip(groups_of(features, grouping), groups_of(decoded, grouping), strict=True):
        exact = was.astype(np.float64)
        step = (exact.max() - exact.min()) / (2**bits - 1)
        rounding = np.maximum(abs(came.astype(np.float64)), np.finfo(np.float32).tiny) * 2**-24
        assert (abs(came.astype(np.float64) - exact) <= step * (1 / 2 + 2**-13) + rounding).all()


@FEW
@given(features=LIKE_A_FEATURE, bits=QUANTISED)
def test_decoded_features_are_those_of_the_formula(features: Floats, bits: int) -> None:
    _, expected = by_formula(features, bits)
    low, high = float(features.min()), float(features.max())
    decoded = decode(encode(features, bits)).reshape(-1)
    # Where an element lies in the middle between two levels it may go to either: then they differ by one step.
    step = (high - low) / (2**bits - 1)
    rounding = 2**-22 * max(abs(low), abs(high), high - low)
    for was, came, wanted in zip(features.reshape(-1), decoded, expected, strict=True):
        if abs(float(came) - wanted) > rounding:
            assert abs(abs(float(was) - wanted) / step - 0.5) < 2**-12
            assert abs(float(came) - wanted) == pytest.approx(step, rel=1e-3, abs=rounding)


@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("grouping", ["tensor", "sample"])
@pytest.mark.parametrize(
    "shape", [(3, 70_001), (2, 32_768), (5, 32_769), (40_000, 3), (7, 5_001), (100_003,)]
)
def test_tensors_of_several_blocks_are_coded_as_small_ones_are(
    bits: int,
    grouping: Grouping,
    shape: tuple[int, ...],
) -> None:
    """Against the same numbers in NumPy without blocks; shapes at and beside a block's size."""
    features = np.random.default_rng(5).normal(1, 3, shape).astype(np.float32)
    rows = features.reshape(shape[0] if grouping == "sample" else 1, -1).astype(np.float64)
    low, high = rows.min(axis=1, keepdims=True), rows.max(axis=1, keepdims=True)
    step = (high - low) / (2**bits - 1)
    levels = np.rint(np.divide(rows - low, step, out=np.zeros_like(rows), where=step > 0))
    expected = (low + levels * step).astype(np.float32).reshape(shape)
    # Rounding of a range of some 26.
    differ = abs(decode(encode(features, bits, grouping=grouping)) - expected) > 1e-5
    middle = abs(abs((rows - low) / np.where(step > 0, step, 1) % 1) - 0.5).reshape(shape) < 2**-10
    assert not (differ & ~middle).any() and differ.mean() < 1e-3


@FEW
@given(features=ANY_TENSOR)
def test_at_32_bits_nothing_is_lost(features: Floats) -> None:
    encoded = encode(features, 32)
    decoded = decode(encoded)
    # -0.0 too.
    assert decoded.tobytes() == features.tobytes()
    assert not np.shares_memory(decoded, features)
    assert encoded.num_bytes == 4 * features.size


@FEW
@given(features=LIKE_A_FEATURE, bits=QUANTISED, grouping=GROUPING)
def test_both_ends_decode_the_same_bits(features: Floats, bits: int, grouping: Grouping) -> None:
    """What has travelled as plain bytes and numbers is decoded to what the sender sees."""
    here = encode(features, bits, grouping=grouping)
    there = EncodedTensor(
        bits=here.bits,
        shape=here.shape,
        payload=bytes(here.payload),
        low=tuple(float(np.float32(low)) for low in here.low),
        high=tuple(float(np.float32(high)) for high in here.high),
    )
    assert there == here
    assert decode(there).tobytes() == decode(here).tobytes()
    assert decode(here).flags.writeable


@given(value=st.floats(-LARGEST, LARGEST, width=32), bits=QUANTISED, grouping=GROUPING)
def test_constant_tensors_come_back_exactly(value: float, bits: int, grouping: Grouping) -> None:
    features = np.full((3, 5), value, np.float32)
    assert np.array_equal(decode(encode(features, bits, grouping=grouping)), features)


@FEW
@given(features=LIKE_A_FEATURE, bits=QUANTISED)
def test_the_least_value_comes_back_exactly_and_the_largest_up_to_rounding(
    features: Floats, bits: int
) -> None:
    """So the zeros behind a ReLU stay zeros."""
    decoded = decode(encode(features, bits))
    assert (decoded[features == features.min()] == features.min()).all()
    assert decoded.max() == pytest.approx(features.max(), abs=2**-22 * float(abs(features).max()))


@FEW
@given(features=LIKE_A_FEATURE, bits=QUANTISED)
def test_coding_twice_changes_nothing_more(features: Floats, bits: int) -> None:
    once = decode(encode(features, bits))
    assert np.allclose(decode(encode(once, bits)), once, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("bits", [2, 4, 8, 16, 32])
@pytest.mark.parametrize("grouping", ["tensor", "sample"])
@pytest.mark.parametrize("shape", [(0,), (4, 0), (0, 3, 2), ()])
def test_tensors_without_elements_or_dimensions(
    bits: int, grouping: Grouping, shape: tuple[int, ...]
) -> None:
    features = np.full(shape, 2.5, np.float32)
    encoded = encode(features, bits, grouping=grouping)
    assert np.array_equal(decode(encoded), features) and decode(encoded).shape == shape
    assert encoded.num_elements == features.size


@pytest.mark.parametrize("bits", [2, 4, 8, 16])
@pytest.mark.parametrize(
    "low, high", [(-LARGEST, LARGEST), (0.0, 1e-45), (-1e-45, 1e-45), (1e-38, 2e-38), (-1, 1e38)]
)
def test_huge_and_tiny_ranges_neither_overflow_nor_vanish(
    bits: int, low: float, high: float
) -> None:
    features = np.array([low, high], np.float32)
    with np.errstate(all="raise"):
        decoded = decode(encode(features, bits))
    assert np.allclose(decoded, features, rtol=1e-6, atol=0)


@pytest.mark.parametrize("bits", [2, 8, 16])
def test_a_tensor_in_any_layout_is_coded_in_the_order_of_its_indices(bits: int) -> None:
    features = np.random.default_rng(1).normal(size=(4, 6, 5)).astype(np.float32).transpose(0, 2, 1)
    assert np.array_equal(decode(encode(features, bits)), decode(encode(features.copy(), bits)))


@pytest.mark.parametrize(
    ("bits", "num_bytes"), [(2, 2 * 3), (4, 2 * 5), (8, 2 * 9), (16, 2 * 18), (32, 2 * 36)]
)
def test_bytes_on_the_wire(bits: int, num_bytes: int) -> None:
    features = np.arange(18, dtype=np.float32).reshape(2, 9)
    encoded = encode(features, bits, grouping="sample")
    # Every sample begins on a byte.
    assert memoryview(encoded.payload).nbytes == num_bytes
    assert encoded.num_bytes == num_bytes + (16 if bits < 32 else 0)
    if bits < 32:
        assert (encoded.low, encoded.high) == ((0, 9), (8, 17))


def test_memory_is_what_is_returned_and_a_few_blocks() -> None:
    features = np.random.default_rng(0).normal(size=(16, 1 << 17)).astype(np.float32)
    for bits in (2, 4, 8, 16, 32):
        for grouping in ("tensor", "sample"):
            tracemalloc.start()
            encoded = encode(features, bits, grouping=grouping)
            _, encoding_bytes = tracemalloc.get_traced_memory()
            tracemalloc.reset_peak()
            before_bytes, _ = tracemalloc.get_traced_memory()
            decode(encoded)
            _, decoding_bytes = tracemalloc.get_traced_memory()
            tracemalloc.stop()
            # At 32 bits it is the features' own memory.
            kept = encoded.num_bytes if bits < 32 else 0
            assert encoding_bytes < kept + 600_000
            assert decoding_bytes - before_bytes < features.nbytes + 700_000


@pytest.mark.parametrize("bits", [2, 16, 32])
@pytest.mark.parametrize(
    ("value", "named"), [(math.nan, "NaN"), (math.inf, "infinite"), (-math.inf, "infinite")]
)
def test_a_training_that_has_diverged_is_said_to(bits: int, value: float, named: str) -> None:
    features = np.zeros((4, 7), np.float32)
    features[2, 3] = value
    for grouping in ("tensor", "sample"):
        coding = partial(encode, features, bits, grouping=grouping, what="gradient of batch 7")
        refused(coding, "gradient of batch 7", named, "diverged")


def test_what_cannot_be_encoded_is_refused() -> None:
    features = np.zeros((2, 3), np.float32)
    refused(lambda: encode(features.astype(np.float64), 8), "float64")  # type: ignore[arg-type]
    refused(lambda: encode(features, 3), "3", "2, 4, 8, 16, 32")
    refused(lambda: encode(features, 8, grouping="channel"), "'channel'")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"bits": 3}, "bits = 3"),
        ({"shape": (2, -9)}, "(2, -9)"),
        ({"shape": (2, 10)}, "9 bytes"),
        # Nothing is allocated.
        ({"shape": (10**30,)}, "9 bytes"),
        ({"payload": b"12345678"}, "8 bytes"),
        ({"payload": b"1234567890"}, "10 bytes"),
        ({"payload": b""}, "0 bytes"),
        ({"bits": 8}, "9 bytes"),
        ({"bits": 32}, "none"),
        ({"low": (), "high": ()}, "0 least and 0 largest"),
        ({"low": (1.0, 2.0)}, "2 least and 1 largest"),
        ({"low": (0.0,) * 3, "high": (1.0,) * 3}, "3 least and 3 largest"),
        ({"low": (3.0,)}, "3.0"),
        ({"low": (math.nan,)}, "nan"),
        ({"high": (math.nan,)}, "nan"),
        ({"high": (math.inf,)}, "inf"),
        ({"low": (-1e300,)}, "-1e+300"),
    ],
)
def test_malformed_tensors_are_refused(changed: dict[str, Any], named: str) -> None:
    whole = EncodedTensor(bits=4, shape=(2, 9), low=(-1.0,), high=(2.0,), payload=b"123456789")
    refused(lambda: replace(whole, **changed), "encoded tensor", named)


@given(
    bits=st.sampled_from([2, 4, 8, 16, 32]),
    shape=st.lists(st.integers(0, 5), max_size=3),
    low=st.floats(width=32),
    high=st.floats(width=32),
    payload=st.binary(max_size=64),
)
def test_whatever_is_accepted_is_decoded_to_finite_numbers_of_its_shape(
    bits: int,
    shape: list[int],
    low: float,
    high: float,
    payload: bytes,
) -> None:
    try:
        encoded = EncodedTensor(
            bits=bits,
            shape=tuple(shape),
            payload=payload,
            **({"low": (low,), "high": (high,)} if bits < 32 and math.prod(shape) else {}),
        )
    except ConfigError:
        return
    decoded = decode(encoded)
    assert decoded.shape == tuple(shape)
    assert bits == 32 or np.isfinite(decoded).all()
