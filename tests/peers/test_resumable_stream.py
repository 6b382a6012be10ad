"""Messages over streams that break anywhere: in order, each once, and never more waiting than the credit allows."""

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from math import inf, nan
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from socflower.peers.resumable_stream import ChannelLimits, Stream, StreamLost, cost_bytes
from socflower.wire.arrays import MalformedBytes
from socflower.wire.framing import check_size
from tests.one_line import refused
from tests.peers.memory_line import MemoryLine, credit_frame, part_frame


@dataclass(frozen=True)
class Note:
    """The messages of these tests: their number is the head, their text the body."""

    number: int
    text: bytes = b""


class Notes:
    def encode(self, message: Note) -> tuple[bytes, list[bytes | memoryview]]:
        return b"%d" % message.number, [message.text[:7], message.text[7:]]

    def begin(self, head: bytes, num_bytes: int) -> Callable[[memoryview], Note]:
        check_size(num_bytes, "a note", 10_000)
        if not head.isdigit():
            raise MalformedBytes("a note without a number")
        return lambda body: Note(int(head), bytes(body))


def channel(*, measured: bool = True, **limits: int) -> Stream[Note]:
    limits_of = ChannelLimits(**limits)
    return Stream("the peer", Notes(), limits=limits_of, patience_s=20, measured=measured)


either_kind = pytest.mark.parametrize("measured", [True, False], ids=["measured", "plain"])


def note(number: int, size: int) -> Note:
    return Note(number, bytes([number]) * size)


@settings(max_examples=30)
@given(
    measured=st.booleans(),
    sizes=st.lists(st.integers(0, 3000), min_size=1, max_size=20),
    breaks=st.lists(st.integers(0, 25), max_size=5),
    part_bytes=st.integers(1, 999),
    credit_bytes=st.integers(1, 6000),
)
def test_each_message_arrives_once_and_in_order_wherever_streams_break(
    sizes: list[int],
    breaks: list[int],
    part_bytes: int,
    credit_bytes: int,
    measured: bool,
) -> None:
    # Parts of single bytes would take long where messages are large.
    part_bytes = max(part_bytes, max(sizes) // 20)
    near = channel(part_bytes=part_bytes, measured=measured)
    far = channel(credit_bytes=credit_bytes, measured=measured)
    line = MemoryLine(near, far, breaks=breaks)
    for number, size in enumerate(sizes):
        near.send(note(number, size))
        far.send(Note(number))
    for number, size in enumerate(sizes):
        assert far.receive() == note(number, size)
        assert near.receive() == Note(number)
    assert near.poll() is None and far.poll() is None
    assert not measured or (near.sent.flush(20) and far.sent.flush(20))
    line.close()
    # One message goes whatever its size; more only within the credit.
    assert far.traffic.peak_inbox_bytes <= max(credit_bytes, cost_bytes(b"19", max(sizes)))


@either_kind
def test_one_who_waits_for_room_waits_until_there_is_some(measured: bool) -> None:
    near = channel(credit_bytes=5000, measured=measured)
    far = channel(credit_bytes=1, measured=measured)
    sent = threading.Event()

    def send() -> None:
        for number in range(10):
            near.send(note(number, 900), wait_for_room=True)
        sent.set()

    threading.Thread(target=send, daemon=True).start()
    line = MemoryLine(near, far)
    # The other end takes nothing, and so there is no room.
    assert not sent.wait(0.2)
    assert [far.receive().number for _ in range(10)] == list(range(10))
    assert sent.wait(20) and near.traffic.peak_kept_bytes <= 5000
    line.close()


def test_a_plain_stream_acknowledges_only_when_room_is_needed() -> None:
    """Else each message would cost a frame back; half of the room is free when the next credit is asked for."""
    near, far = (channel(measured=False, credit_bytes=10 * 1924) for _ in range(2))
    line = MemoryLine(near, far)
    for number in range(100):
        near.send(note(number, 900), wait_for_room=True)
        assert far.receive() == note(number, 900)
    line.close()
    # Of at most 33 bytes each: parts of the other way have a message.
    assert far.traffic.sent_bytes <= 100 / 4 * 33


@either_kind
@settings(max_examples=10)
@given(breaks=st.lists(st.integers(0, 9), max_size=3))
def test_the_end_comes_after_the_last_message(measured: bool, breaks: list[int]) -> None:
    near, far = (channel(measured=measured, credit_bytes=2000) for _ in range(2))
    line = MemoryLine(near, far, breaks=breaks)
    for number in range(5):
        near.send(note(number, 900))
    near.finish()
    assert [far.receive().number for _ in range(5)] == list(range(5))
    refused(far.receive, "the peer has ended the stream", error=StreamLost)
    assert far.peer_end == b"" and near.is_finishing
    line.close()


def test_a_farewell_comes_before_all_that_waits_and_its_reason_is_told() -> None:
    near, far = channel(), channel(credit_bytes=1)
    near.send(note(1, 900))
    near.fail(KeyError(), farewell=b"left")
    line = MemoryLine(near, far)
    with pytest.raises(StreamLost):
        far.receive()
    assert far.peer_end == b"left"
    with pytest.raises(StreamLost):
        far.send(note(1, 1))
    line.close()


def test_transfers_are_measured_at_both_ends() -> None:
    near, far = channel(), channel()
    line = MemoryLine(near, far, lag_s=lambda: 0.02)
    near.send(note(1, 5000))
    far.receive()
    assert near.sent.flush(20)
    (sent,) = near.sent.transfers()
    assert sent.sent and near.sent.transfers() == ()
    assert sent.num_bytes > 5000 and sent.seconds >= 0.02
    # The receiver hears of it with the sender's next word.
    near.send(Note(3))
    far.receive()
    (received,) = far.sent.transfers()
    assert not received.sent and received.seconds == sent.seconds
    line.close()


@pytest.mark.parametrize(
    ("num_bytes", "seconds"), [(9, inf), (9, nan), (9, -1.0), (9, 0.0), (0, 1.0)]
)
def test_transfers_that_cannot_be_are_not_counted(num_bytes: int, seconds: float) -> None:
    near = channel()
    stream_id = near.attach(received=0, used=0, credit_bytes=1)
    near.on_frame(stream_id, credit_frame(0, 0, (num_bytes, seconds), (8, 2.0)))
    (counted,) = near.sent.transfers()
    assert (counted.num_bytes, counted.seconds) == (8, 2.0)


def test_what_is_under_way_is_known() -> None:
    near = channel()
    assert near.sent.in_flight() is None
    near.send(note(1, 5000))
    # In line, but there is no stream.
    assert near.sent.in_flight() is None
    frames = near.frames(near.attach(received=0, used=0, credit_bytes=1))
    next(frames)
    in_flight = near.sent.in_flight()
    assert in_flight is not None and in_flight[1] > 5000


def test_patience_has_an_end_and_a_line() -> None:
    limits = ChannelLimits(credit_bytes=1)
    impatient = Stream("the peer", Notes(), limits=limits, patience_s=0.05)
    refused(lambda: impatient.receive("letter"), "the peer", "letter", "0.05 s", error=StreamLost)
    impatient.send(Note(3), wait_for_room=True)
    refused(lambda: impatient.send(Note(3), wait_for_room=True), "takes nothing", error=StreamLost)


def test_a_channel_that_failed_says_so_to_all() -> None:
    broken = channel()
    stream_id = broken.attach(received=0, used=0, credit_bytes=1)
    frames: Iterator[bytes] = broken.frames(stream_id)
    broken.fail(KeyError())
    broken.fail(StreamLost("second"))
    for act in (broken.receive, broken.poll, lambda: broken.send(Note(3))):
        with pytest.raises(KeyError):
            act()
    assert list(frames) == [] and isinstance(broken.failure, KeyError)


def test_a_stream_that_is_over_brings_nothing_any_more() -> None:
    near = channel()
    old = near.attach(received=0, used=0, credit_bytes=1)
    new = near.attach(received=0, used=0, credit_bytes=1)
    frame = part_frame(1, b"3")
    near.on_frame(old, frame)
    assert near.poll() is None
    near.on_frame(new, frame)
    assert near.poll() == Note(3)


@pytest.mark.parametrize(("received", "used"), [(1, 0), (0, 1), (3, 3)])
def test_a_stream_that_claims_what_cannot_be_is_refused(received: int, used: int) -> None:
    attach = partial(channel().attach, received=received, used=used, credit_bytes=1)
    refused(attach, "stream", received, used, error=MalformedBytes)


def test_more_than_the_credit_is_refused() -> None:
    near = channel(credit_bytes=3000)
    stream_id = near.attach(received=0, used=0, credit_bytes=1)
    near.on_frame(stream_id, part_frame(1, b"1", bytes(1500)))
    more = partial(near.on_frame, stream_id, part_frame(2, b"1", bytes(1500)))
    refused(more, "2525 bytes", "credit", error=MalformedBytes)


@pytest.mark.parametrize(
    ("frame", "named"),
    [
        (part_frame(1, b"one", b""), "number"),
        (part_frame(1, b"1", b"x", num_bytes=10_001), "10001"),
        (part_frame(1, b"1", b"x", num_bytes=1 << 60), "10000"),
        (part_frame(1, b"1", b"xx", num_bytes=1), "make up its 1 bytes"),
        (part_frame(1, b"1", b"", num_bytes=1), "make up its 1 bytes"),
        (part_frame(2, b"1", b""), "message 2"),
        (part_frame(1, b"1" * 1_400_000), "a frame of 1400032 bytes"),
        (part_frame(1, b"1", b"", index=1), "part 1"),
        (b"", "unknown"),
        (b"\x09", "unknown"),
        (b"\x01", "a part of 1 bytes"),
        (b"\x02", "a credit of 1 bytes"),
    ],
)
def test_frames_that_no_peer_sends_are_refused(frame: Any, named: str) -> None:
    near = channel()
    stream_id = near.attach(received=0, used=0, credit_bytes=1)
    refused(lambda: near.on_frame(stream_id, frame), named, error=MalformedBytes)
    assert near.poll() is None


@pytest.mark.parametrize(
    ("key", "value"), [("part_bytes", 0), ("part_bytes", (1 << 20) + 1), ("credit_bytes", 0)]
)
def test_limits_that_cannot_be_are_refused(key: str, value: int) -> None:
    refused(lambda: ChannelLimits(**{key: value}), key, value)
