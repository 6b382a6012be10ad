"""Trains a span with the edge's half: joins, restores the agreed checkpoint, runs the loop, starts over if needed."""

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from socflower.edgecloud.halves import BackHalf, FrontHalf, Half
from socflower.edgecloud.plan.cuts import SplitPlan
from socflower.edgecloud.runtime.back_loop import BackLoop
from socflower.edgecloud.runtime.checkpoints import Checkpoint, CheckpointStore
from socflower.edgecloud.runtime.edge_connection import EdgeConnection, JoinTerms
from socflower.edgecloud.runtime.feature_path import FeatureReceiver, FeatureSender
from socflower.edgecloud.runtime.front_loop import FrontLoop, FrontPlan
from socflower.edgecloud.runtime.loop_report import LoopReport
from socflower.edgecloud.stream.failures import SplitLost, SplitRefused, StartOver
from socflower.edgecloud.stream.frame_channel import FrameChannel
from socflower.errors import ConfigError

_PAUSE_S = 0.1


@dataclass(frozen=True, kw_only=True, slots=True)
class Span:
    """Batches `first_batch` to `first_batch` + `num_batches` − 1, counted over the whole training."""

    first_batch: int
    num_batches: int

    def __post_init__(self) -> None:
        if self.first_batch < 0 or self.num_batches < 0:
            raise ConfigError(f"span: first_batch = {self.first_batch} and num_batches = {self.num_batches} must be 0 "
                              "or more")

    @property
    def stop(self) -> int:
        """The first batch after it."""
        return self.first_batch + self.num_batches


def train_front(
    connection: EdgeConnection, half: FrontHalf, span: Span, plan: FrontPlan, *, folder: Path | None = None,
) -> LoopReport:
    """Train a span with the front half here and the back half in the cloud, and return a report.

    `half` must be in the state before `span.first_batch`; on return it is trained on the span, and both halves are
    saved. With a `folder`, checkpoints are stored there, from which an edge that was killed continues: called again
    with the same arguments it restores `half`, and `first_batch` of the report tells from where. Raises `SplitRefused`,
    `SplitLost`, and whatever the half raises.
    """
    def drive(training: "_Training", channel: FrameChannel, terms: JoinTerms) -> None:
        sender = FeatureSender(grouping=plan.grouping, feedback=plan.feedback, delta_bytes=plan.delta_bytes)
        sender.restore(training.codec)
        split_plan = training.split_plan or plan.split_plan
        FrontLoop(half, channel, plan, report=training.report, store=training.store, epoch_id=terms.epoch_id,
                  split_plan=split_plan, sender=sender, on_checkpoint=training.on_checkpoint,
                  on_step=training.on_step).run(terms.start.batch, span.stop)

    return _Training(connection, half, span, folder, front=True).run(drive)


def train_back(
    connection: EdgeConnection, half: BackHalf, span: Span, *, folder: Path | None = None,
) -> LoopReport:
    """Train a span of a reverse split, with the back half here and the front half in the cloud; see `train_front`."""
    def drive(training: "_Training", channel: FrameChannel, terms: JoinTerms) -> None:
        receiver = FeatureReceiver(channel.peer)
        FeatureReceiver.restore_all([receiver], training.codec)
        BackLoop(half, [channel], joined=False, report=training.report, store=training.store, epoch_id=terms.epoch_id,
                 receivers=[receiver], on_checkpoint=training.on_checkpoint,
                 on_step=training.on_step).run(terms.start.batch)

    return _Training(connection, half, span, folder, front=False).run(drive)


class _Training:
    """One call of the functions above, with all its restarts."""

    def __init__(self, connection: EdgeConnection, half: Half, span: Span, folder: Path | None, *, front: bool) -> None:
        self._connection, self._half, self._span, self._front = connection, half, span, front
        self.store = CheckpointStore(
            folder, f"{connection.run_id}, party {connection.party}, {'front' if front else 'back'} half")
        self.report = LoopReport(first_batch=span.first_batch, num_batches=span.num_batches)
        self.codec = b""
        self.split_plan: SplitPlan | None = None
        self._state_batch: int | None = span.first_batch
        self._progress_s = time.monotonic()

    def on_checkpoint(self, batch: int) -> None:
        self._state_batch, self._progress_s = batch, time.monotonic()

    def on_step(self) -> None:
        self._state_batch = None

    def run(self, drive: Callable[["_Training", FrameChannel, JoinTerms], None]) -> LoopReport:
        while True:
            offers = list(self.store.checkpoints())
            if self._state_batch is not None:
                offers.append(Checkpoint(batch=self._state_batch))
            channel: FrameChannel | None = None
            try:
                channel, terms = self._connection.join(
                    front=self._front, first_batch=self._span.first_batch, num_batches=self._span.num_batches,
                    checkpoints=offers)
                self._begin_at(terms)
                drive(self, channel, terms)
                return self.report
            except StartOver:
                self.report.num_rollbacks += 1
                if time.monotonic() > self._progress_s + self._connection.give_up_s:
                    raise SplitLost(f"run {self._connection.run_id}: had to begin anew again and again for "
                                    f"{self._connection.give_up_s:g} s; see whether another edge uses the same party "
                                    "number") from None
                time.sleep(_PAUSE_S)
            finally:
                if channel is not None:
                    self._connection.end_channel(channel)
                    self.report.add_traffic(channel.traffic)

    def _begin_at(self, terms: JoinTerms) -> None:
        """Restore the checkpoint on which all sides agreed."""
        place = terms.start
        self.codec = b""
        if self._state_batch != place.batch:
            saved = self.store.load(place)
            self._state_batch = None
            self._half.restore(saved.half)
            self._state_batch = place.batch
            self.codec = saved.codec if terms.restore_codec else b""
            self.split_plan = saved.split_plan
        elif self.split_plan is not None:
            self.split_plan = replace(self.split_plan, cut=self._half.cut)
        if self._half.cut != terms.cut:
            raise SplitRefused(f"run {self._connection.run_id}: the edge's half is cut at {self._half.cut}, the "
                               f"cloud's at {terms.cut}; make both at the same cut")
        self.report.first_batch = min(place.batch, self.report.first_batch) if self.report.losses else place.batch
        self.report.num_batches = self._span.stop - self.report.first_batch
