"""Calls for a challenge need no token: they may hold no thread, and a flood of them is logged."""

import threading
import time
from collections.abc import Iterator
from dataclasses import replace

import grpc
import pytest

from socflower.edgecloud.cloud.operator_calls import session_status
from tests.edgecloud.cloud.local import Cloud

CHALLENGE = "/socflower.Authentication/Challenge"
pytestmark = pytest.mark.timeout(60)


def test_challenges_whose_request_never_comes_hold_no_thread() -> None:
    """The service has 20 threads, and each of these 60 calls held one."""
    ended = threading.Event()

    def never() -> Iterator[bytes]:
        ended.wait(50.0)
        yield from ()

    with Cloud(max_streams=4) as cloud, grpc.insecure_channel(cloud.service.address) as channel:
        calls = [channel.stream_unary(CHALLENGE).future(never()) for _ in range(60)]
        ends = [call.code() for call in calls]
        assert set(ends) <= {grpc.StatusCode.OK, grpc.StatusCode.UNAVAILABLE}
        assert ends[0] == grpc.StatusCode.OK
        assert session_status(replace(cloud.operator, timeout_s=20.0)) == []
        ended.set()
        # On a busy machine more calls are open at a time than may be, and lines about these come first.
        assert "127.0.0.1:" in line_about(cloud, "challenge")


def test_a_flood_of_challenges_is_logged() -> None:
    with Cloud(max_streams=4) as cloud, grpc.insecure_channel(cloud.service.address) as channel:
        for _ in range(40):
            channel.stream_unary(CHALLENGE)(iter([b""]), timeout=20.0)
        line = line_about(cloud, "challenges")
        assert "split cloud" in line and "32" in line and "127.0.0.1:" in line


def line_about(cloud: Cloud, what: str) -> str:
    """Return the first line of the cloud's log with a text, once it is there."""
    deadline_s = time.monotonic() + 20
    while not (found := [line for line in cloud.lines if what in line]):
        assert time.monotonic() < deadline_s
        time.sleep(0.01)
    return found[0]


def test_a_client_that_asks_again_and_again_with_its_token_is_no_flood() -> None:
    with Cloud(max_streams=4) as cloud:
        for _ in range(40):
            assert session_status(replace(cloud.operator, timeout_s=20.0)) == []
        assert cloud.lines == []
