"""Messages as bytes and back."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from socflower.edgecloud.stream.frames import (
    DeltaFeatures,
    Features,
    Goodbye,
    GradientFrame,
    Limits,
    Mark,
    Message,
    Recut,
    SplitMessages,
    digest_of_ids,
)
from socflower.wire.arrays import MalformedBytes
from socflower.wire.codecs.delta_coding import DeltaReceiver, DeltaSender
from socflower.wire.codecs.quantisation import decode, encode
from tests.one_line import refused

DTYPES = st.sampled_from(
    ["float16", "float32", "float64", "int8", "int64", "uint8", "uint16", "bool"]
)
ARRAYS = DTYPES.flatmap(
    lambda name: arrays.arrays(name, arrays.array_shapes(min_dims=0, min_side=0, max_side=4))
)
FLOATS = arrays.arrays(
    np.float32, arrays.array_shapes(max_dims=3, max_side=5), elements=st.floats(-9, 9, width=32)
)


def across(message: Message) -> Any:
    kinds = SplitMessages(Limits())
    head, pieces = kinds.encode(message)
    body = b"".join(pieces)
    return kinds.begin(head, len(body))(memoryview(body))


@settings(max_examples=40)
@given(
    features=FLOATS,
    labels=ARRAYS,
    bits=st.sampled_from([2, 4, 8, 16, 32]),
    grouping=st.sampled_from(["tensor", "sample"]),
)
def test_features_and_gradients_cross_bit_for_bit(
    features: Any, labels: Any, bits: int, grouping: Any
) -> None:
    encoded, digest = encode(features, bits, grouping=grouping), digest_of_ids(np.arange(3))
    head = {"batch": 7, "cut": 2, "answer_bits": 8, "ids_digest": digest}
    found = across(Features(encoded=encoded, labels=labels, **head))
    assert {name: getattr(found, name) for name in head} == head
    assert decode(found.encoded).tobytes() == decode(encoded).tobytes()
    assert found.labels.dtype == labels.dtype and found.labels.tobytes() == labels.tobytes()
    back = across(GradientFrame(batch=7, encoded=encoded, loss=0.1))
    assert back.loss == 0.1 and decode(back.encoded).tobytes() == decode(encoded).tobytes()


def nested(part: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.lists(part, max_size=3) | st.dictionaries(st.text(max_size=3), part, max_size=3)


def plain(part: Any) -> Any:
    if isinstance(part, dict):
        return {key: plain(each) for key, each in part.items()}
    if isinstance(part, list):
        return [plain(each) for each in part]
    return part.dtype, part.shape, part.tobytes()


@given(labels=st.recursive(ARRAYS, nested, max_leaves=6))
@settings(max_examples=8)
def test_labels_of_any_form_cross_bit_for_bit(labels: Any) -> None:
    encoded = encode(np.ones((2, 3), np.float32), 32)
    found = across(Features(batch=0, cut=0, encoded=encoded, labels=labels, ids_digest=b""))
    assert plain(found.labels) == plain(labels)
    assert decode(found.encoded).tolist() == [[1.0] * 3] * 2


def test_features_by_sample_cross_with_their_ids() -> None:
    sender, receiver = DeltaSender(max_bytes=10_000), DeltaReceiver(max_bytes=10_000)
    ids = np.array([3, 5, 9])
    how = {"memory_bytes": 10_000, "grouping": "tensor"}
    for scale in (1, 2, 3):
        message, decoded = sender.encode(ids, np.full((3, 4), scale, np.float32), 4)
        sent = DeltaFeatures(message=message, sample_ids=ids, **how)  # type: ignore[arg-type]
        head = {"batch": 0, "cut": 0, "labels": np.arange(3), "ids_digest": b""}
        found = across(Features(encoded=sent, **head)).encoded  # type: ignore[arg-type]
        assert {name: getattr(found, name) for name in how} == how
        assert found.sample_ids.tolist() == ids.tolist()
        assert receiver.decode(found.sample_ids, found.message).tobytes() == decoded.tobytes()


@pytest.mark.parametrize(
    "message",
    [Goodbye(), Mark(batch=3, cut=1), Recut(cut=4), GradientFrame(batch=2, encoded=None, loss=1.5)],
)
def test_small_messages_cross(message: Message) -> None:
    assert across(message) == message


def test_orders_of_samples_have_digests_of_their_own() -> None:
    assert digest_of_ids(np.array([1, 2])) != digest_of_ids(np.array([2, 1]))


@given(head=st.binary(max_size=60), body=st.binary(max_size=40))
def test_garbage_is_a_message_or_refused_and_nothing_else(head: bytes, body: bytes) -> None:
    try:
        SplitMessages(Limits()).begin(head, len(body))(memoryview(body))
    except MalformedBytes as refused:
        assert "\n" not in str(refused)


@pytest.mark.parametrize("key", ["max_tensor_bytes", "max_weights_bytes", "credit_bytes"])
def test_limits_that_cannot_be_are_refused(key: str) -> None:
    refused(lambda: Limits(**{key: 0}), f"{key} = 0")
