"""In which order the front loop goes forward and back where it may do either, and what a decision gets to see."""

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from numpy.typing import NDArray

from socflower.edgecloud.half_protocols import Array
from socflower.edgecloud.plan.cuts import SplitPlan
from socflower.edgecloud.runtime.back_loop import BackLoop
from socflower.edgecloud.runtime.checkpoints import CheckpointStore
from socflower.edgecloud.runtime.front_loop import DecisionInput, FrontLoop, FrontPlan
from socflower.edgecloud.runtime.half_state import HalfState, LoopReport
from socflower.edgecloud.stream.frames import Limits, SplitChannel, SplitMessages
from socflower.wire.frame_channel import SentMessage
from tests.edgecloud.runtime.numpy_halves import Back, Front
from tests.wire.memory_line import MemoryLine, lags

WINDOW = 3


def wait_until(holds: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + 15
    while not holds() and time.monotonic() < deadline_s:
        time.sleep(0.001)
    assert holds()


class Recording(Front):
    """Notes what it does, and does its first update only when the gradients of a full window have come."""

    def __init__(self, channel: SplitChannel) -> None:
        super().__init__()
        self.channel = channel
        self.order: list[tuple[str, int]] = []

    def forward(self, batch: int, *, keep_graph: bool = False) -> Array:
        self.order.append(("forward", batch))
        return super().forward(batch, keep_graph=keep_graph)

    def apply(self, batch: int, gradient: Array | None) -> None:
        if batch == 0:  # before the gradients there is the answer to the first mark
            wait_until(lambda: self.channel.received_and_used()[0] == 1 + WINDOW + 1)
        # As in a real training the line is quicker to begin with a message than the half is to update itself.
        wait_until(lambda: self.channel.is_idle)
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


def train(
    plan: FrontPlan, num_batches: int, longest_s: float = 0.0
) -> tuple[Recording, LoopReport]:
    near, far = (
        SplitChannel(name, SplitMessages(Limits()), limits=Limits(), patience_s=20)
        for name in ("the cloud", "the edge")
    )
    line = MemoryLine(near, far, lag_s=lags(1, longest_s))
    front = Recording(near)
    state = HalfState(front, CheckpointStore(None, "test"))
    behind = BackLoop(HalfState(Late(front), CheckpointStore(None, "test")), [far])
    thread = threading.Thread(target=behind.run, args=(0,))
    thread.start()
    FrontLoop(state, near, plan).run(0, num_batches)
    thread.join(20)
    assert not thread.is_alive()
    line.close()
    return front, state.report


def test_a_batch_goes_forward_after_each_update_even_if_more_gradients_have_come() -> None:
    """What F26 presupposes: two updates in a row would leave the link and the back half idle."""
    front, _ = train(FrontPlan(split_plan=SplitPlan(cut=1, window=WINDOW)), 12)
    start = [("forward", batch) for batch in range(WINDOW + 1)]
    turns = [
        turn
        for batch in range(WINDOW + 1)
        for turn in (("apply", batch), ("forward", batch + WINDOW + 1))
    ]
    assert front.order[: len(start) + len(turns)] == start + turns


def test_every_transfer_is_shown_to_a_decision_once() -> None:
    """Also those that are noticed while the window is full, between two decisions."""
    seen: list[SentMessage] = []

    def decide(now: DecisionInput) -> None:
        seen.extend(now.transfers)

    _, report = train(
        FrontPlan(split_plan=SplitPlan(cut=1, window=WINDOW), decide=decide), 30, longest_s=0.003
    )
    assert len(seen) > 20 and seen == report.transfers[: len(seen)]


def test_no_batch_goes_forward_while_another_waits_for_the_link() -> None:
    """However wide the window: what would wait for the link takes no memory, and its weights are not older."""
    near, far = (
        SplitChannel(name, SplitMessages(Limits()), limits=Limits(), patience_s=20)
        for name in ("the cloud", "the edge")
    )
    longest = []

    class Counting(Front):
        def forward(self, batch: int, *, keep_graph: bool = False) -> Array:
            longest.append(sum(kept.number > near._started for kept in near._unacknowledged))
            return super().forward(batch, keep_graph=keep_graph)

    line = MemoryLine(near, far, lag_s=lambda: 0.01)  # slower than the halves
    behind = BackLoop(HalfState(Back(), CheckpointStore(None, "test")), [far])
    thread = threading.Thread(target=behind.run, args=(0,))
    thread.start()
    plan = FrontPlan(split_plan=SplitPlan(cut=1, window=8))
    FrontLoop(HalfState(Counting(), CheckpointStore(None, "test")), near, plan).run(0, 12)
    thread.join(20)
    line.close()
    assert not thread.is_alive() and len(longest) == 12 and max(longest) == 0
