"""A line that is shaped at the edge: every byte passes the shaper, and one who reads slowly makes the cloud wait."""

import threading
import time
from typing import Any

import numpy as np
import pytest

from socflower.edgecloud.cloud.operator_calls import session_status
from socflower.edgecloud.half_protocols import Weights
from socflower.edgecloud.links.bandwidth_profile import constant
from socflower.edgecloud.links.shaping import TokenBucket
from socflower.edgecloud.plan.cuts import SplitPlan
from socflower.peers.resumable_stream import StreamLost
from tests.edgecloud.cloud.local import Cloud, plan, train
from tests.edgecloud.runtime.numpy_halves import Back, Front, connect
from tests.one_line import refused

MIB = 1 << 20


class Counting:
    """A shaper that lets everything pass, up to `most_bytes` until it is opened."""

    def __init__(self, most_bytes: float = float("inf")) -> None:
        self.passed_bytes, self._most_bytes, self.open = 0, most_bytes, threading.Event()

    def wait(self, num_bytes: int) -> bool:
        self.passed_bytes += num_bytes
        return self.passed_bytes <= self._most_bytes or self.open.wait(30)


def test_every_byte_passes_the_shapers() -> None:
    up, down = Counting(), Counting()
    with Cloud() as cloud:
        cloud.open()
        report = train(cloud.port, Front(), 10, plan(2), up=up, down=down)
    assert 0 < report.sent_bytes <= up.passed_bytes
    assert 0 < report.received_bytes <= down.passed_bytes


def test_a_shaped_line_takes_no_less_than_its_trace_and_is_measured_so() -> None:
    trace = constant(60_000, 1_000_000)
    up, down = TokenBucket(trace, "up"), TokenBucket(trace, "down")
    with Cloud() as cloud:
        cloud.open()
        began_s = time.monotonic()
        report = train(cloud.port, Front(), 60, plan(4), up=up, down=down)
        elapsed_s = time.monotonic() - began_s
    assert elapsed_s >= 0.9 * (report.sent_bytes - 4096) / 60_000
    sent = [transfer for transfer in report.transfers if transfer.sent]
    # Between streams' ends transfers are back to back or apart, never on top of each other.
    assert sum(transfer.seconds for transfer in sent) <= elapsed_s
    assert sum(transfer.num_bytes for transfer in sent) <= report.sent_bytes
    assert len(sent) < len(report.transfers)


class Heavy(Back):
    def export_layers(self, cut: int) -> Weights:
        return {**super().export_layers(cut), "ballast": np.zeros(48 * MIB, np.uint8)}


class Strong(Front):
    def import_layers(self, cut: int, weights: Weights) -> None:
        kept = {name: array for name, array in weights.items() if name != "ballast"}
        super().import_layers(cut, kept)


def test_an_edge_that_reads_slowly_makes_the_cloud_wait() -> None:
    down, front = Counting(2 * MIB), Strong()
    how = plan(decide=lambda now: SplitPlan(cut=2) if now.batch == 1 else None)
    with Cloud(factory=lambda terms, weights: Heavy()) as cloud:
        cloud.open()
        options = {"down": down}
        thread = threading.Thread(target=train, args=(cloud.port, front, 3, how), kwargs=options)
        thread.start()
        sent, deadline_s = [-1, 0], time.monotonic() + 20
        while (sent[-1] < 2 * MIB or sent[-1] != sent[-2]) and time.monotonic() < deadline_s:
            time.sleep(0.2)
            sent.append(session_status(cloud.operator, "run")[0]["sent_bytes"])
        down.open.set()
        thread.join(30)
        # What lies between: gRPC's window and the sockets' buffers.
        assert 2 * MIB <= sent[-1] < 40 * MIB
        assert not thread.is_alive() and front.cut == 2
        assert cloud.trained(front, 3)


def test_a_connection_that_is_closed_here_ends_its_span() -> None:
    with Cloud() as cloud:
        cloud.open()
        connection = connect(cloud.port)
        how = plan(progress=lambda done: connection.close() if done.batch == 3 else None)
        refused(lambda: train(connection, Front(), 4000, how), "closed", error=StreamLost)
        refused(lambda: train(connection, Front(), 4), "dialled", "closed", error=StreamLost)


def test_a_cloud_that_answers_a_greeting_with_nothing_is_waited_for_only_so_long() -> None:
    """Only one of two parties comes, and the cloud would wait for the other for minutes."""
    with Cloud() as cloud:
        cloud.open(num_parties=2)
        options = {"patience_s": 0.3, "give_up_s": 0.3}
        refused(lambda: train(cloud.port, Front(), 4, **options), "out of reach", error=StreamLost)


@pytest.mark.parametrize(
    ("options", "named"), [({"token": "short"}, ["token", "16"]), ({"run_id": "a\nb"}, ["run"])]
)
def test_what_cannot_be_dialled_is_refused(options: dict[str, Any], named: list[str]) -> None:
    refused(lambda: connect(1, **options), *named)
