"""Both loops of a split training in one process, over a line in memory."""

import threading
from typing import Any

from socflower.edgecloud.plan.cuts import SplitPlan
from socflower.edgecloud.runtime.back_loop import BackLoop
from socflower.edgecloud.runtime.checkpoints import CheckpointStore
from socflower.edgecloud.runtime.front_loop import FrontLoop, FrontPlan
from socflower.edgecloud.runtime.half_state import HalfState, LoopReport
from socflower.edgecloud.stream.frames import Limits, SplitMessages, SplitStream
from tests.edgecloud.runtime.numpy_halves import Back, Front
from tests.peers.memory_line import MemoryLine

Channels = tuple[SplitStream, SplitStream]


def plan(window: int = 0, bits: int = 32, cut: int = 1, **options: Any) -> FrontPlan:
    return FrontPlan(split_plan=SplitPlan(cut=cut, bits=bits, window=window), **options)


def channels() -> Channels:
    limits = Limits()
    near, far = (
        SplitStream(name, SplitMessages(limits), limits=limits, patience_s=20)
        for name in ("the cloud", "the edge")
    )
    return near, far


def run_loops(
    front: Front,
    back: Back,
    how: FrontPlan,
    num_batches: int,
    ends: Channels | None = None,
    **of_line: Any,
) -> LoopReport:
    """Train with both loops; `of_line` are the line's lags and breaks."""
    near, far = ends or channels()
    line = MemoryLine(near, far, **of_line)
    state = HalfState(front, CheckpointStore(None, "test"))
    behind = BackLoop(HalfState(back, CheckpointStore(None, "test")), [far])
    thread = threading.Thread(target=behind.run, args=(0,))
    thread.start()
    FrontLoop(state, near, how).run(0, num_batches)
    thread.join(20)
    assert not thread.is_alive()
    line.close()
    return state.report
