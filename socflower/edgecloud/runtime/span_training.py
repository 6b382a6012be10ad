"""Trains a span with the edge's half: joins, restores the agreed checkpoint, runs the loop, starts over if needed."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from socflower.edgecloud.half_protocols import BackHalf, FrontHalf
from socflower.edgecloud.runtime.back_loop import BackLoop
from socflower.edgecloud.runtime.checkpoints import CheckpointStore
from socflower.edgecloud.runtime.edge_connection import EdgeConnection
from socflower.edgecloud.runtime.front_loop import FrontLoop, FrontPlan
from socflower.edgecloud.runtime.half_state import HalfState, LoopReport
from socflower.edgecloud.stream.frames import SplitRefused, SplitStream, StartOver
from socflower.errors import require_range
from socflower.peers.resumable_stream import StreamLost

_PAUSE_S = 0.1


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchSpan:
    """Batches `first_batch` to `first_batch` + `num_batches` − 1, counted over the whole training."""

    first_batch: int
    num_batches: int

    def __post_init__(self) -> None:
        require_range(
            "span",
            least=0,
            first_batch=self.first_batch,
            num_batches=self.num_batches,
        )

    @property
    def stop(self) -> int:
        """The first batch after it."""
        return self.first_batch + self.num_batches


def train_front(
    connection: EdgeConnection,
    half: FrontHalf,
    span: BatchSpan,
    plan: FrontPlan,
    *,
    folder: Path | None = None,
) -> LoopReport:
    """Train a span with the front half here and the back half in the cloud, and return a report.

    `half` must be in the state before `span.first_batch`; on return it is trained on the span, and both halves are
    saved. With a `folder`, checkpoints are stored there. An edge that was killed continues from them if it calls this
    with the same arguments: `half` is restored, and `first_batch` of the report is the batch from which it continued.
    Raises `SplitRefused`, `StreamLost`, and whatever the half raises.
    """
    state = HalfState(half, _store(connection, folder, "front"), span.first_batch)
    return _train(
        connection,
        state,
        span,
        lambda channel, first: FrontLoop(state, channel, plan).run(first, span.stop),
        front=True,
    )


def train_back(
    connection: EdgeConnection,
    half: BackHalf,
    span: BatchSpan,
    *,
    folder: Path | None = None,
) -> LoopReport:
    """Train a span of a reverse split, with the back half here and the front half in the cloud; see `train_front`."""
    state = HalfState(half, _store(connection, folder, "back"), span.first_batch)
    return _train(
        connection,
        state,
        span,
        lambda channel, first: BackLoop(state, [channel]).run(first),
        front=False,
    )


def _store(connection: EdgeConnection, folder: Path | None, side: str) -> CheckpointStore:
    return CheckpointStore(folder, f"{connection.run_id}, party {connection.party}, {side} half")


def _train(
    connection: EdgeConnection,
    state: HalfState[Any],
    span: BatchSpan,
    drive: Callable[[SplitStream, int], None],
    *,
    front: bool,
) -> LoopReport:
    """Join and drive the half from the agreed checkpoint on, again after every `StartOver`."""
    report = state.report
    while True:
        channel: SplitStream | None = None
        try:
            channel, terms = connection.join(
                front=front,
                first_batch=span.first_batch,
                num_batches=span.num_batches,
                checkpoints=state.checkpoints(),
            )
            state.restore(terms.start, restore_codec=terms.restore_codec)
            state.epoch_id = terms.epoch_id
            if state.half.cut != terms.cut:
                raise SplitRefused(
                    f"run {connection.run_id}: the edge cuts at {state.half.cut}, the cloud at {terms.cut}"
                )
            first = terms.start.batch
            report.first_batch = min(first, report.first_batch) if report.losses else first
            report.num_batches = span.stop - report.first_batch
            drive(channel, first)
            return report
        except StartOver:
            report.num_rollbacks += 1
            if time.monotonic() > state.checkpoint_s + connection.give_up_s:
                raise StreamLost(
                    f"run {connection.run_id}: started over for {connection.give_up_s:g} s without a checkpoint; does "
                    "another edge use the same party number?"
                ) from None
            time.sleep(_PAUSE_S)
        finally:
            if channel is not None:
                connection.end_channel(channel)
                report.add(channel.traffic)
