"""A line that is shaped at the edge: every byte passes the shaper, and one who reads slowly makes the cloud wait."""

import threading
import time
from typing import Any

import numpy as np
import pytest

from socflower.edgecloud.cloud.cloud_service import CloudService
from socflower.edgecloud.cloud.operator_calls import (
    CloudOperator,
    fetch_weights,
    open_session,
    session_status,
)
from socflower.edgecloud.half_protocols import Weights
from socflower.edgecloud.links.bandwidth_profile import constant
from socflower.edgecloud.links.shaping import TokenBucket
from socflower.edgecloud.plan.cuts import SplitPlan
from socflower.edgecloud.runtime.front_loop import FrontPlan
from socflower.edgecloud.runtime.span_training import BatchSpan, train_front
from socflower.errors import ConfigError
from socflower.wire.frame_channel import StreamLost
from tests.edgecloud.runtime.numpy_halves import (
    FINGERPRINT,
    OPERATOR,
    Back,
    Front,
    connect,
    local_training,
    make_half,
    same,
)

MIB = 1 << 20


class Counting:
    """A shaper that lets everything pass, up to `most_bytes` until it is opened."""

    def __init__(self, most_bytes: float = float("inf")) -> None:
        self.passed_bytes, self._most_bytes, self.open = 0, most_bytes, threading.Event()

    def wait(self, num_bytes: int) -> bool:
        self.passed_bytes += num_bytes
        return self.passed_bytes <= self._most_bytes or self.open.wait(30)


def serve(factory: Any = make_half) -> tuple[CloudService, CloudOperator]:
    service = CloudService("127.0.0.1:0", factory, operator_token=OPERATOR)
    operator = CloudOperator(address=service.address, token=OPERATOR)
    open_session(operator, run_id="run", fingerprint=FINGERPRINT)
    return service, operator


def test_every_byte_passes_the_shapers() -> None:
    service, _ = serve()
    up, down = Counting(), Counting()
    try:
        report = train_front(
            connect(service.port, up=up, down=down),
            Front(),
            BatchSpan(first_batch=0, num_batches=10),
            FrontPlan(split_plan=SplitPlan(cut=1, window=2)),
        )
        assert (
            0 < report.sent_bytes <= up.passed_bytes
            and 0 < report.received_bytes <= down.passed_bytes
        )
    finally:
        service.close()


def test_a_shaped_line_takes_no_less_than_its_trace_and_is_measured_so() -> None:
    service, _ = serve()
    trace = constant(30_000, 1_000_000)
    front = Front()
    try:
        began_s = time.monotonic()
        report = train_front(
            connect(service.port, up=TokenBucket(trace, "up"), down=TokenBucket(trace, "down")),
            front,
            BatchSpan(first_batch=0, num_batches=60),
            FrontPlan(split_plan=SplitPlan(cut=1, window=4)),
        )
        elapsed_s = time.monotonic() - began_s
        assert elapsed_s >= 0.9 * (report.sent_bytes - 4096) / 30_000
        sent = [transfer for transfer in report.transfers if transfer.sent]
        # Between streams' ends transfers are back to back or apart, never on top of each other.
        assert sum(transfer.seconds for transfer in sent) <= elapsed_s
        assert sum(transfer.num_bytes for transfer in sent) <= report.sent_bytes
        assert any(not transfer.sent for transfer in report.transfers)
    finally:
        service.close()


def test_an_edge_that_reads_slowly_makes_the_cloud_wait() -> None:
    class Heavy(Back):
        def export_layers(self, cut: int) -> Weights:
            return {**super().export_layers(cut), "ballast": np.zeros(48 * MIB, np.uint8)}

    class Strong(Front):
        def import_layers(self, cut: int, weights: Weights) -> None:
            super().import_layers(
                cut, {name: array for name, array in weights.items() if name != "ballast"}
            )

    service, operator = serve(lambda terms, weights: Heavy())
    down, front = Counting(2 * MIB), Strong()
    plan = FrontPlan(
        split_plan=SplitPlan(cut=1), decide=lambda now: SplitPlan(cut=2) if now.batch == 1 else None
    )
    thread = threading.Thread(
        target=lambda: train_front(
            connect(service.port, down=down), front, BatchSpan(first_batch=0, num_batches=3), plan
        )
    )
    thread.start()
    try:
        sent, deadline_s = [-1, 0], time.monotonic() + 20
        while (sent[-1] < 2 * MIB or sent[-1] != sent[-2]) and time.monotonic() < deadline_s:
            time.sleep(0.2)
            sent.append(session_status(operator, "run")[0]["sent_bytes"])
        # What lies between: gRPC's window and the sockets' buffers.
        assert 2 * MIB <= sent[-1] < 40 * MIB
        down.open.set()
        thread.join(30)
        assert not thread.is_alive() and front.cut == 2
        assert same(front.weights(), fetch_weights(operator, "run")[1], wanted=local_training(3))
    finally:
        down.open.set()
        service.close()
        thread.join(30)


def test_a_connection_that_is_closed_here_ends_its_span() -> None:
    service, _ = serve()
    connection = connect(service.port)
    try:
        with pytest.raises(StreamLost, match="was closed here"):
            train_front(
                connection,
                Front(),
                BatchSpan(first_batch=0, num_batches=4000),
                FrontPlan(
                    split_plan=SplitPlan(cut=1),
                    progress=lambda done: connection.close() if done.batch == 3 else None,
                ),
            )
        with pytest.raises(StreamLost, match=r"was not dialled: .* closed here"):
            train_front(
                connection,
                Front(),
                BatchSpan(first_batch=0, num_batches=4),
                FrontPlan(split_plan=SplitPlan(cut=1)),
            )
    finally:
        service.close()


def test_a_peer_that_answers_a_greeting_with_nothing_is_waited_for_only_so_long() -> None:
    """Only one of two parties comes, and the cloud would wait for the other for minutes."""
    service, operator = serve()
    open_session(operator, run_id="pair", fingerprint=FINGERPRINT, num_parties=2)
    try:
        with pytest.raises(StreamLost, match="out of reach"):
            train_front(
                connect(service.port, "pair", patience_s=0.3, give_up_s=0.3),
                Front(),
                BatchSpan(first_batch=0, num_batches=4),
                FrontPlan(split_plan=SplitPlan(cut=1)),
            )
    finally:
        service.close()


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"token": "short"}, "a token has at least 16"),
        ({"run_id": "a\nb"}, "a run's name"),
    ],
)
def test_what_cannot_be_dialled_is_refused(options: dict[str, Any], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        connect(1, **options)
