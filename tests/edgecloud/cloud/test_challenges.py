"""Calls for a challenge need no token: they may hold no thread, and are logged where somebody floods the cloud."""

import threading
from collections.abc import Iterator

import grpc
import pytest

from socflower.edgecloud.cloud.cloud_service import CloudService
from socflower.edgecloud.cloud.operator_calls import CloudOperator, session_status

TOKEN = "operator-token-0123456789abcdef0123456789"
CHALLENGE = "/socflower.Authentication/Challenge"


@pytest.fixture
def cloud() -> Iterator[tuple[CloudService, list[str]]]:
    lines: list[str] = []
    service = CloudService(
        "127.0.0.1:0",
        lambda *_: pytest.fail("no run is opened"),
        operator_token=TOKEN,
        log=lines.append,
        max_streams=4,
    )
    yield service, lines
    service.close()


@pytest.mark.timeout(60)
def test_challenges_whose_request_never_comes_hold_no_thread(
    cloud: tuple[CloudService, list[str]],
) -> None:
    """The service has 20 threads, and each of these 60 calls held one."""
    service, lines = cloud
    address, ended = f"127.0.0.1:{service.port}", threading.Event()

    def never() -> Iterator[bytes]:
        ended.wait(50.0)
        yield from ()

    operator = CloudOperator(address=address, token=TOKEN, timeout_s=20.0)
    with grpc.insecure_channel(address) as channel:
        calls = [channel.stream_unary(CHALLENGE).future(never()) for _ in range(60)]
        ends = [call.code() for call in calls]
        assert (
            set(ends) <= {grpc.StatusCode.OK, grpc.StatusCode.UNAVAILABLE}
            and ends[0] == grpc.StatusCode.OK
        )
        assert session_status(operator) == []
        ended.set()
    line = next(line for line in lines if "challenges" in line)
    assert (
        line.startswith("split cloud: refused 32 challenges on one connection")
        and "from ipv4:127.0.0.1:" in line
    )


@pytest.mark.timeout(60)
def test_a_client_that_asks_again_and_again_with_its_token_is_no_flood(
    cloud: tuple[CloudService, list[str]],
) -> None:
    service, lines = cloud
    for _ in range(40):
        assert (
            session_status(
                CloudOperator(address=f"127.0.0.1:{service.port}", token=TOKEN, timeout_s=20.0)
            )
            == []
        )
    assert lines == []
