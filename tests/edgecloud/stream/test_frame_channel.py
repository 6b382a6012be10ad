"""Messages over streams that break anywhere: in order, each once, and never more waiting than the credit allows."""

import threading
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from socflower.edgecloud.stream.failures import SplitLost, StartOver
from socflower.edgecloud.stream.frame_channel import FrameChannel
from socflower.edgecloud.stream.frames import Goodbye, Limits, Mark, Recut, cost_bytes, pack
from socflower.edgecloud.stream.messages import split_pb2 as wire
from socflower.errors import ConfigError
from socflower.wire.arrays import MalformedBytes
from tests.edgecloud.stream.memory_line import MemoryLine


def channel(**limits: int) -> FrameChannel:
    return FrameChannel("the peer", limits=Limits(**limits), patience_s=20)


def layers(cut: int, size: int) -> Recut:
    return Recut(cut=cut, weights={"w": np.full(size, cut, np.uint8)})


@settings(max_examples=40)
@given(sizes=st.lists(st.integers(0, 3000), min_size=1, max_size=20), breaks=st.lists(st.integers(0, 25), max_size=5),
       part_bytes=st.integers(1, 999), credit_bytes=st.integers(1, 6000))
def test_each_message_arrives_once_and_in_order_wherever_streams_break(
    sizes: list[int], breaks: list[int], part_bytes: int, credit_bytes: int,
) -> None:
    # Parts of single bytes would take long where messages are large.
    part_bytes = max(part_bytes, max(sizes) // 20)
    near, far = channel(part_bytes=part_bytes), channel(credit_bytes=credit_bytes)
    line = MemoryLine(near, far, breaks=breaks)
    for number, size in enumerate(sizes):
        near.send(layers(number, size))
        far.send(Mark(batch=number, cut=0))
    for number, size in enumerate(sizes):
        arrived = far.receive()
        assert isinstance(arrived, Recut) and arrived.cut == number and arrived.weights is not None
        assert arrived.weights["w"].tobytes() == bytes([number]) * size
        assert near.receive() == Mark(batch=number, cut=0)
    assert near.poll() is None and far.poll() is None
    assert near.flush(20) and far.flush(20)
    line.close()
    # One message goes whatever its size; more only within the credit.
    largest = max(cost_bytes(pack(layers(0, size)).head) for size in sizes)
    assert far.traffic.peak_inbox_bytes <= max(credit_bytes, largest)


def test_one_who_waits_for_room_waits_until_there_is_some() -> None:
    near, far = channel(credit_bytes=5000), channel(credit_bytes=1)
    sent = threading.Event()

    def send() -> None:
        for number in range(10):
            near.send(layers(number, 900), wait_for_room=True)
        sent.set()

    threading.Thread(target=send, daemon=True).start()
    line = MemoryLine(near, far)
    assert not sent.wait(0.2)  # the other end takes nothing, and so there is no room
    assert [far.receive().cut for _ in range(10)] == list(range(10))  # type: ignore[union-attr]
    assert sent.wait(20) and near.traffic.peak_kept_bytes <= 5000
    line.close()


def test_transfers_are_measured_at_both_ends() -> None:
    near, far = channel(), channel()
    line = MemoryLine(near, far, lag_s=lambda: 0.02)
    near.send(layers(1, 5000))
    far.receive()
    assert near.flush(20)
    line_seen = near.transfers()
    assert [transfer.sent for transfer in line_seen] == [True] and near.transfers() == ()
    assert line_seen[0].num_bytes > 5000 and line_seen[0].seconds >= 0.02
    # The receiver hears of it with the sender's next word.
    near.send(Goodbye())
    far.receive()
    seen = far.transfers()
    assert [transfer.sent for transfer in seen] == [False] and seen[0].seconds == line_seen[0].seconds
    line.close()


def test_what_is_under_way_is_known() -> None:
    near = channel()
    assert near.in_flight() is None
    near.send(layers(1, 5000))
    assert near.in_flight() is None  # in line, but there is no stream
    frames = near.frames(near.attach(received=0, used=0, credit_bytes=1))
    next(frames)
    in_flight = near.in_flight()
    assert in_flight is not None and in_flight[1] > 5000


def test_patience_has_an_end_and_a_line() -> None:
    impatient = FrameChannel("the peer", limits=Limits(credit_bytes=1), patience_s=0.05)
    with pytest.raises(SplitLost, match=r"the peer sends no letter and has no stream for 0.05 s; see"):
        impatient.receive("letter")
    impatient.send(Goodbye(), wait_for_room=True)
    with pytest.raises(SplitLost, match="the peer takes nothing of what it is sent"):
        impatient.send(Goodbye(), wait_for_room=True)


def test_a_channel_that_failed_says_so_to_all() -> None:
    broken = channel()
    stream_id = broken.attach(received=0, used=0, credit_bytes=1)
    frames: Iterator[wire.Frame] = broken.frames(stream_id)
    broken.fail(StartOver())
    broken.fail(SplitLost("second"))
    for act in (broken.receive, broken.poll, lambda: broken.send(Goodbye())):
        with pytest.raises(StartOver):
            act()
    assert list(frames) == [] and isinstance(broken.failure, StartOver)


def test_a_stream_that_is_over_brings_nothing_any_more() -> None:
    near = channel()
    old = near.attach(received=0, used=0, credit_bytes=1)
    new = near.attach(received=0, used=0, credit_bytes=1)
    frame = wire.Frame(part=wire.Part(number=1, head=pack(Goodbye()).head))
    near.on_frame(old, frame)
    assert near.poll() is None
    near.on_frame(new, frame)
    assert near.poll() == Goodbye()


@pytest.mark.parametrize(("received", "used"), [(1, 0), (0, 1), (3, 3)])
def test_a_stream_that_claims_what_cannot_be_is_refused(received: int, used: int) -> None:
    with pytest.raises(MalformedBytes, match="a stream that says it has"):
        channel().attach(received=received, used=used, credit_bytes=1)


def test_more_than_the_credit_is_refused() -> None:
    near = channel(credit_bytes=3000)
    stream_id = near.attach(received=0, used=0, credit_bytes=1)
    packed = pack(layers(0, 1500))
    body = b"".join(packed.body)
    near.on_frame(stream_id, wire.Frame(part=wire.Part(number=1, head=packed.head, body=body)))
    with pytest.raises(MalformedBytes, match="beyond the credit"):
        near.on_frame(stream_id, wire.Frame(part=wire.Part(number=2, head=packed.head, body=body)))


@pytest.mark.parametrize("limits", [{"part_bytes": 0}, {"part_bytes": (1 << 20) + 1}, {"credit_bytes": 0},
                                    {"max_tensor_bytes": 0}, {"max_weights_bytes": 0}])
def test_limits_that_cannot_be_are_refused(limits: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match=next(iter(limits))):
        Limits(**limits)
