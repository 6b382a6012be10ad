"""In which order the front loop goes forward and back where it may do either, and what a decision gets to see."""

import time
from collections.abc import Callable, Sequence
from typing import Any

from numpy.typing import NDArray

from socflower.edgecloud.half_protocols import Array
from socflower.edgecloud.runtime.front_loop import DecisionInput, FrontPlan
from socflower.edgecloud.runtime.half_state import LoopReport
from socflower.edgecloud.stream.frames import SplitStream
from socflower.peers.resumable_stream import SentMessage
from tests.edgecloud.runtime.loops import channels, plan, run_loops
from tests.edgecloud.runtime.numpy_halves import Back, Front
from tests.peers.memory_line import lags

WINDOW = 3


def wait_until(holds: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + 120
    while not holds() and time.monotonic() < deadline_s:
        time.sleep(0.001)
    assert holds()


class Recording(Front):
    """Notes what it does, and does its first update only when the gradients of a full window have come."""

    def __init__(self, channel: SplitStream) -> None:
        super().__init__()
        self.channel = channel
        self.order: list[tuple[str, int]] = []

    def forward(self, batch: int, *, keep_graph: bool = False) -> Array:
        self.order.append(("forward", batch))
        return super().forward(batch, keep_graph=keep_graph)

    def apply(self, batch: int, gradient: Array | None) -> None:
        # Before the gradients there is the answer to the first mark.
        if batch == 0:
            wait_until(lambda: self.channel.received_and_used()[0] == 1 + WINDOW + 1)
        # As in a real training the line is quicker to begin with a message than the half is to update itself.
        wait_until(lambda: self.channel.sent.is_idle)
        self.order.append(("apply", batch))
        super().apply(batch, gradient)


class Late(Back):
    """Answers nothing before the window is full."""

    def __init__(self, front: Recording) -> None:
        super().__init__()
        self.front = front

    def step(
        self, batch: int, features: Sequence[Array], labels: NDArray[Any]
    ) -> tuple[list[Array | None], float]:
        wait_until(lambda: len(self.front.order) > WINDOW)
        return super().step(batch, features, labels)


def train(how: FrontPlan, num_batches: int, longest_s: float = 0.0) -> tuple[Recording, LoopReport]:
    ends = channels()
    front = Recording(ends[0])
    lag_s = lags(1, longest_s)
    return front, run_loops(front, Late(front), how, num_batches, ends, lag_s=lag_s)


def test_a_batch_goes_forward_after_each_update_even_if_more_gradients_have_come() -> None:
    """What F26 presupposes: two updates in a row would leave the link and the back half idle."""
    front, _ = train(plan(WINDOW), 12)
    order = [("forward", batch) for batch in range(WINDOW + 1)]
    for batch in range(WINDOW + 1):
        order += [("apply", batch), ("forward", batch + WINDOW + 1)]
    assert front.order[: len(order)] == order


def test_every_transfer_is_shown_to_a_decision_once() -> None:
    """Also those that are noticed while the window is full, between two decisions."""
    seen: list[SentMessage] = []

    def decide(now: DecisionInput) -> None:
        seen.extend(now.transfers)

    _, report = train(plan(WINDOW, decide=decide), 30, longest_s=0.003)
    assert len(seen) > 20 and seen == report.transfers[: len(seen)]


def test_no_batch_goes_forward_while_another_waits_for_the_link() -> None:
    """However wide the window: what would wait for the link takes no memory, and its weights are not older."""
    (near, far), longest = channels(), []

    class Counting(Front):
        def forward(self, batch: int, *, keep_graph: bool = False) -> Array:
            longest.append(sum(kept.number > near._out.started for kept in near._out.kept))
            return super().forward(batch, keep_graph=keep_graph)

    # The line is slower than the halves.
    run_loops(Counting(), Back(), plan(8), 12, (near, far), lag_s=lambda: 0.01)
    assert len(longest) == 12 and max(longest) == 0
