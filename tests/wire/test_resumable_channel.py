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

from socflower.edgecloud.stream.split_pb2 import Frame
from socflower.wire.arrays import MalformedBytes
from socflower.wire.framing import check_size
from socflower.wire.framing_pb2 import Credit, Part, Transfer
from socflower.wire.resumable_channel import ChannelLimits, FrameChannel, StreamLost, cost_bytes
from tests.one_line import refused
from tests.wire.memory_line import MemoryLine


@dataclass(frozen=True)
class Note:
    """The messages of these tests: their number is the head, their text the body."""

    number: int
    text: bytes = b""


class Notes:
    frame = Frame

    def encode(self, message: Note) -> tuple[bytes, list[bytes | memoryview]]:
        return b"%d" % message.number, [message.text[:7], message.text[7:]]

    def begin(self, head: bytes, num_bytes: int) -> Callable[[memoryview], Note]:
        check_size(num_bytes, "a note", 10_000)
        if not head.isdigit():
            raise MalformedBytes("a note without a number")
        return lambda body: Note(int(head), bytes(body))


def channel(**limits: int) -> FrameChannel[Note]:
    return FrameChannel("the peer", Notes(), limits=ChannelLimits(**limits), patience_s=20)


def part(number: int, head: bytes | None, body: bytes, **more: int) -> Any:
    return Frame(part=Part(number=number, head=head, body=body, **{"num_bytes": len(body), **more}))


def note(number: int, size: int) -> Note:
    return Note(number, bytes([number]) * size)


@settings(max_examples=30)
@given(
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
) -> None:
    # Parts of single bytes would take long where messages are large.
    part_bytes = max(part_bytes, max(sizes) // 20)
    near, far = channel(part_bytes=part_bytes), channel(credit_bytes=credit_bytes)
    line = MemoryLine(near, far, breaks=breaks)
    for number, size in enumerate(sizes):
        near.send(note(number, size))
        far.send(Note(number))
    for number, size in enumerate(sizes):
        assert far.receive() == note(number, size)
        assert near.receive() == Note(number)
    assert near.poll() is None and far.poll() is None
    assert near.flush(20) and far.flush(20)
    line.close()
    # One message goes whatever its size; more only within the credit.
    assert far.traffic.peak_inbox_bytes <= max(credit_bytes, cost_bytes(b"19", max(sizes)))


def test_one_who_waits_for_room_waits_until_there_is_some() -> None:
    near, far = channel(credit_bytes=5000), channel(credit_bytes=1)
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


def test_transfers_are_measured_at_both_ends() -> None:
    near, far = channel(), channel()
    line = MemoryLine(near, far, lag_s=lambda: 0.02)
    near.send(note(1, 5000))
    far.receive()
    assert near.flush(20)
    (sent,) = near.transfers()
    assert sent.sent and near.transfers() == ()
    assert sent.num_bytes > 5000 and sent.seconds >= 0.02
    # The receiver hears of it with the sender's next word.
    near.send(Note(3))
    far.receive()
    (received,) = far.transfers()
    assert not received.sent and received.seconds == sent.seconds
    line.close()


@pytest.mark.parametrize(
    ("num_bytes", "seconds"), [(9, inf), (9, nan), (9, -1.0), (9, 0.0), (0, 1.0)]
)
def test_transfers_that_cannot_be_are_not_counted(num_bytes: int, seconds: float) -> None:
    near = channel()
    stream_id = near.attach(received=0, used=0, credit_bytes=1)
    told = [Transfer(num_bytes=num_bytes, seconds=seconds), Transfer(num_bytes=8, seconds=2.0)]
    near.on_frame(stream_id, Frame(credit=Credit(transfers=told)))
    (counted,) = near.transfers()
    assert (counted.num_bytes, counted.seconds) == (8, 2.0)


def test_what_is_under_way_is_known() -> None:
    near = channel()
    assert near.in_flight() is None
    near.send(note(1, 5000))
    # In line, but there is no stream.
    assert near.in_flight() is None
    frames = near.frames(near.attach(received=0, used=0, credit_bytes=1))
    next(frames)
    in_flight = near.in_flight()
    assert in_flight is not None and in_flight[1] > 5000


def test_patience_has_an_end_and_a_line() -> None:
    limits = ChannelLimits(credit_bytes=1)
    impatient = FrameChannel("the peer", Notes(), limits=limits, patience_s=0.05)
    refused(lambda: impatient.receive("letter"), "the peer", "letter", "0.05 s", error=StreamLost)
    impatient.send(Note(3), wait_for_room=True)
    refused(lambda: impatient.send(Note(3), wait_for_room=True), "takes nothing", error=StreamLost)


def test_a_channel_that_failed_says_so_to_all() -> None:
    broken = channel()
    stream_id = broken.attach(received=0, used=0, credit_bytes=1)
    frames: Iterator[Frame] = broken.frames(stream_id)
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
    frame = Frame(part=Part(number=1, head=b"3"))
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
    near.on_frame(stream_id, part(1, b"1", bytes(1500)))
    more = partial(near.on_frame, stream_id, part(2, b"1", bytes(1500)))
    refused(more, "2525 bytes", "credit", error=MalformedBytes)


@pytest.mark.parametrize(
    ("frame", "named"),
    [
        (part(1, b"one", b""), "number"),
        (part(1, b"1", b"x", num_bytes=10_001), "10001"),
        (part(1, b"1", b"x", num_bytes=1 << 60), "10000"),
        (part(1, b"1", b"xx", num_bytes=1), "make up its 1 bytes"),
        (part(1, b"1", b"", num_bytes=1), "make up its 1 bytes"),
        (part(2, b"1", b""), "message 2"),
        (part(1, None, b""), "part 0"),
        (part(1, b"1", b"", index=1), "part 1"),
        (Frame(), "unknown"),
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
