"""Delta coding: both ends hold the same bits, errors shrink instead of adding up, and a lost message is noticed."""

from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from socflower.wire.codecs.delta_coding import DeltaMessage, DeltaReceiver, DeltaSender
from socflower.wire.codecs.quantisation import decode, encode
from tests.one_line import refused


def pair(**options: Any) -> tuple[DeltaSender, DeltaReceiver]:
    options.setdefault("max_bytes", 1 << 20)
    return DeltaSender(**options), DeltaReceiver(**options)


def ids(*samples: int) -> np.ndarray:
    return np.array(samples, np.int64)


def state(end: DeltaSender | DeltaReceiver) -> bytes:
    """Return all that an end holds, in its order of dropping."""
    return end.save()


@given(data=st.data(), num_held=st.integers(0, 12), grouping=st.sampled_from(["tensor", "sample"]))
@settings(max_examples=30)
def test_both_ends_hold_the_same_bits_through_any_sequence(
    data: st.DataObject,
    num_held: int,
    grouping: Any,
) -> None:
    """With samples dropped, batches that have a sample twice, changing widths and shapes, resets and restarts."""
    sender, receiver = pair(max_bytes=num_held * 6 * 2, grouping=grouping)
    rng = np.random.default_rng(data.draw(st.integers(0, 999)))
    for _ in range(data.draw(st.integers(1, 12))):
        event = data.draw(st.sampled_from(["batch"] * 6 + ["reset", "restart"]))
        if event == "reset":
            sender.reset()
            receiver.reset()
        elif event == "restart":
            # Either end may start from what either saved: they are alike.
            saved = sender.save(), receiver.save()
            sender, receiver = pair(max_bytes=num_held * 6 * 2, grouping=grouping)
            sender.restore(saved[1])
            receiver.restore(saved[0])
        else:
            samples = np.array(data.draw(st.lists(st.integers(-3, 9), max_size=8)), np.int64)
            shape = data.draw(st.sampled_from([(6,), (2, 3)])) if data.draw(st.booleans()) else (6,)
            features = rng.normal(
                size=(len(samples), *shape), scale=10.0 ** rng.integers(-3, 3)
            ).astype(np.float32)
            message, seen = sender.encode(
                samples, features, data.draw(st.sampled_from([2, 4, 8, 16, 32]))
            )
            came = receiver.decode(samples, message)
            assert came.tobytes() == seen.tobytes() and came.shape == features.shape
        assert state(sender) == state(receiver)
        assert sender.num_samples == receiver.num_samples <= num_held
        assert sender.num_bytes <= num_held * 6 * 2


@given(seed=st.integers(0, 999), bits=st.sampled_from([2, 4, 8]))
@settings(max_examples=40)
def test_the_error_of_a_repeated_activation_decreases_geometrically(seed: int, bits: int) -> None:
    """By a factor of 2ⁿ − 1 at least, down to what rounding leaves."""
    features = np.random.default_rng(seed).normal(size=(4, 50)).astype(np.float32)
    sender, receiver = pair()
    samples = ids(0, 1, 2, 3)
    rounding = float(abs(features).max()) * 2.0**-11
    before = np.inf
    for _ in range(20):
        message, _ = sender.encode(samples, features, bits)
        error = float(abs(receiver.decode(samples, message) - features).max())
        assert error <= (before + rounding) / (2**bits - 1) * (1 + 1e-3) + rounding * 2**-11 + 2e-7
        before = error
    # A float16 memory is repaired by every change, so that it ends below its own rounding.
    assert before <= rounding / (2**bits - 1) * 1.01 + 1e-6


@given(seed=st.integers(0, 999))
@settings(max_examples=20)
def test_errors_do_not_add_up_over_many_small_changes(seed: int) -> None:
    rng = np.random.default_rng(seed)
    features = rng.normal(size=(3, 40)).astype(np.float32)
    sender, receiver = pair()
    samples = ids(5, 6, 7)
    errors = []
    for _ in range(60):
        message, _ = sender.encode(samples, features, 4)
        errors.append(float(abs(receiver.decode(samples, message) - features).max()))
        features = features + rng.uniform(-0.01, 0.01, features.shape).astype(np.float32)
    # Each is bounded by its own change: a step, and what the change before has left.
    assert max(errors[2:]) < 0.01 / 15 * 1.5


@given(seed=st.integers(0, 999), bits=st.sampled_from([2, 4, 8, 16, 32]))
def test_at_first_sight_it_is_the_plain_codec_of_eight_bits_or_more(seed: int, bits: int) -> None:
    features = np.random.default_rng(seed).normal(size=(4, 5, 3)).astype(np.float32)
    sender, receiver = pair()
    message, seen = sender.encode(ids(1, 2, 3, 4), features, bits)
    plain = encode(features, max(bits, 8))
    assert message.change is None and message.first == plain
    assert np.array_equal(receiver.decode(ids(1, 2, 3, 4), message), decode(plain))
    assert np.array_equal(seen, decode(plain))


def test_a_batch_is_sent_partly_as_it_is_and_partly_as_changes() -> None:
    rng = np.random.default_rng(0)
    sender, receiver = pair()
    features = rng.normal(size=(4, 10)).astype(np.float32)
    receiver.decode(ids(1, 2), sender.encode(ids(1, 2), features[:2], 2)[0])
    message, _ = sender.encode(ids(3, 1, 4, 2), features[[2, 0, 3, 1]], 2)
    assert message.first is not None and message.change is not None
    assert (message.first.bits, message.change.bits) == (8, 2)
    assert message.first.shape == message.change.shape == (2, 10)
    assert message.num_bytes == 16 + (20 + 8) + (5 + 8)
    came = receiver.decode(ids(3, 1, 4, 2), message)
    assert abs(came - features[[2, 0, 3, 1]]).max() < 0.02


def test_at_32_bits_everything_arrives_exactly() -> None:
    rng = np.random.default_rng(0)
    sender, receiver = pair()
    for _ in range(3):
        features = rng.normal(size=(2, 10)).astype(np.float32)
        assert np.array_equal(
            receiver.decode(ids(1, 2), sender.encode(ids(1, 2), features, 32)[0]), features
        )
    assert state(sender) == state(receiver)


def test_the_samples_unused_for_longest_are_dropped() -> None:
    sender, receiver = pair(max_bytes=3 * 10 * 2)
    features = np.ones((1, 10), np.float32)

    def send(sample: int) -> DeltaMessage:
        message, _ = sender.encode(ids(sample), features, 4)
        receiver.decode(ids(sample), message)
        return message

    for sample in (1, 2, 3, 1, 4):
        # 4 drops 2.
        send(sample)
    assert [send(sample).first is None for sample in (1, 3, 4, 2)] == [True, True, True, False]
    assert (receiver.num_samples, receiver.num_bytes) == (3, 60)


def test_values_beyond_float16_saturate_in_memory_and_arrive_all_the_same() -> None:
    features = np.array([[1e6, -1e7, 0.0]], np.float32)
    sender, receiver = pair()
    for _ in range(4):
        came = receiver.decode(ids(1), sender.encode(ids(1), features, 8)[0])
        assert abs(came - features).max() <= 1.1e7 / 255 / 2 * 1.01


def assert_unexpected(receiver: DeltaReceiver, samples: np.ndarray, message: DeltaMessage) -> None:
    refused(lambda: receiver.decode(samples, message), "another state", message.count)


def test_a_message_lost_repeated_or_changed_is_noticed_and_changes_nothing() -> None:
    sender, receiver = pair()
    features = np.random.default_rng(0).normal(size=(2, 10)).astype(np.float32)

    def message(end: DeltaSender = sender, change: float = 0.0) -> DeltaMessage:
        return end.encode(ids(1, 2), features + np.float32(change), 4)[0]

    first = message()
    receiver.decode(ids(1, 2), first)
    before = state(receiver)
    assert_unexpected(receiver, ids(1, 2), first)
    message()
    assert_unexpected(receiver, ids(1, 2), message())
    assert state(receiver) == before
    # Both go on from the same batch again.
    sender.restore(before)
    receiver.decode(ids(1, 2), message())

    # Other contents under the same count are found at the next message.
    other = DeltaSender(max_bytes=1 << 20)
    other.restore(sender.save())
    message()
    receiver.decode(ids(1, 2), message(other, 1))
    assert_unexpected(receiver, ids(1, 2), message())


def test_a_reset_of_one_end_alone_is_noticed() -> None:
    sender, receiver = pair()
    sender.reset()
    message, _ = sender.encode(ids(1), np.ones((1, 3), np.float32), 4)
    assert_unexpected(receiver, ids(1), message)


@pytest.mark.parametrize("other", [{"max_bytes": 5}, {"grouping": "sample"}])
def test_ends_with_different_settings_do_not_understand_each_other(other: dict[str, Any]) -> None:
    sender, receiver = DeltaSender(max_bytes=100), DeltaReceiver(**{"max_bytes": 100, **other})
    message, _ = sender.encode(ids(1), np.ones((1, 3), np.float32), 4)
    assert_unexpected(receiver, ids(1), message)
    refused(lambda: receiver.restore(sender.save()), "[100, 8, 'float16', 'tensor']")


def test_a_diverged_training_leaves_the_sender_as_it_was() -> None:
    sender, _ = pair()
    features = np.ones((2, 3), np.float32)
    sender.encode(ids(1, 2), features, 4)
    before = state(sender)
    for value in (np.nan, np.inf):
        features[1, 2] = value
        refused(lambda: sender.encode(ids(1, 2), features, 4), "diverged")
    assert state(sender) == before


def test_what_does_not_fit_is_refused() -> None:
    sender, receiver = pair()
    features = np.ones((2, 3), np.float32)
    for wrong in (ids(1), ids(1, 2, 3), np.zeros((2, 1), np.int64)):
        refused(lambda wrong=wrong: sender.encode(wrong, features, 4), "(2, 3)")
    message, _ = sender.encode(ids(1, 2), features, 4)
    before = state(receiver)
    empty = replace(message, first=None)
    unasked = replace(message, first=None, change=message.first)
    for samples, wrong, *named in (
        (ids(1, 2, 3), message, "(2, 3)", "(3, 3)"),
        (ids(1, 2), empty, "without features"),
        (ids(1, 2), unasked, "(0, 3)", "(2, 3)"),
    ):
        refused(partial(receiver.decode, samples, wrong), *named)
    assert state(receiver) == before
    refused(lambda: pair(max_bytes=-1), "max_bytes = -1")
    for broken in (b"", before[:-40]):
        refused(lambda broken=broken: receiver.restore(broken), "damaged")
