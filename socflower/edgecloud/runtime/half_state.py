"""One side of a split training over a network: its half, its checkpoints, and the report of its span."""

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from threading import RLock
from typing import Generic, Literal, TypeVar

from socflower.edgecloud.half_protocols import Half
from socflower.edgecloud.plan.cuts import SplitPlan
from socflower.edgecloud.runtime.checkpoints import CheckpointStore, SavedHalf, SplitCheckpoint
from socflower.peers.resumable_stream import SentMessage, Traffic
from socflower.training.hang_watch import working

HalfT = TypeVar("HalfT", bound=Half)


@dataclass(frozen=True, kw_only=True, slots=True)
class AppliedMove:
    """A move of the cut."""

    # The first one at the new cut.
    batch: int
    old: int
    new: int
    # With the draining of the window.
    seconds: float
    # Whether the front half exported layers.
    gave: bool


@dataclass(slots=True)
class LoopReport(Traffic):
    """One side's report of a span; batches that were repeated after a rollback count once."""

    first_batch: int = 0
    num_batches: int = 0
    # By batch: the loss (with several parties in turns: their mean); the newest batch forward minus this one when its
    # gradient was applied (F23); and the bytes of encoded features at the front half, without labels.
    losses: dict[int, float] = field(default_factory=dict)
    staleness: dict[int, int] = field(default_factory=dict)
    feature_bytes: dict[int, int] = field(default_factory=dict)
    # In the half and in the codec.
    compute_s: float = 0.0
    # For the other side.
    wait_s: float = 0.0
    num_rollbacks: int = 0
    moves: list[AppliedMove] = field(default_factory=list)
    transfers: list[SentMessage] = field(default_factory=list)
    # At the end, of a front half.
    split_plan: SplitPlan | None = None

    @contextmanager
    def timed(self, what: Literal["compute_s", "wait_s"]) -> Iterator[None]:
        """Add the seconds of the block."""
        began_s = time.monotonic()
        try:
            with working("a half's pass") if what == "compute_s" else nullcontext():
                yield
        finally:
            setattr(self, what, getattr(self, what) + time.monotonic() - began_s)


def mean_loss(*reports: LoopReport) -> float:
    """Return the mean loss over the batches of all reports; NaN without any."""
    losses = [loss for report in reports for loss in report.losses.values()]
    return math.fsum(losses) / len(losses) if losses else math.nan


class HalfState(Generic[HalfT]):
    """A half, the batch before which its state is, and its checkpoints; the loops keep it up to date.

    `batch` is None between two checkpoints: then the other side may have another state. `lock` is held while the half
    is read from another thread, so that a loop does not change it meanwhile.
    """

    def __init__(
        self,
        half: HalfT,
        store: CheckpointStore,
        batch: int | None = 0,
    ) -> None:
        self.half = half
        self.store = store
        self.batch = batch
        self.lock = RLock()
        self.report = LoopReport()
        self.epoch_id = ""
        # The state of the coding of features when the span begins.
        self.codec = b""
        # The deployment with which a front half continues; None: as its plan says.
        self.split_plan: SplitPlan | None = None
        # When it last reached a checkpoint.
        self.checkpoint_s = time.monotonic()

    def checkpoints(self) -> list[SplitCheckpoint]:
        """Return the checkpoints from which this side can begin: the stored ones and its present state."""
        stored = list(self.store.checkpoints())
        return stored if self.batch is None else [*stored, SplitCheckpoint(batch=self.batch)]

    def restore(self, place: SplitCheckpoint, *, restore_codec: bool) -> None:
        """Restore a checkpoint from the store, unless the half is in that state."""
        self.codec = b""
        if self.batch != place.batch:
            saved = self.store.load(place)
            with self.lock:
                self.batch = None
                self.half.restore(saved.half)
                self.batch = place.batch
            self.codec = saved.codec if restore_codec else b""
            self.split_plan = saved.split_plan
        elif self.split_plan is not None:
            self.split_plan = replace(self.split_plan, cut=self.half.cut)

    def begin_change(self) -> None:
        """Note that the half changes, so that its state is that before no batch until the next checkpoint."""
        with self.lock:
            self.batch = None

    def save_checkpoint(
        self, batch: int, codec: Callable[[], bytes], split_plan: SplitPlan | None = None
    ) -> None:
        """Store the half as it is before a batch; `codec` returns the state of the coding of features."""
        if self.store.keeps:
            saved = SavedHalf(
                half=self.half.save(),
                codec=codec(),
                split_plan=split_plan,
            )
            self.store.save(SplitCheckpoint(batch=batch, epoch_id=self.epoch_id), saved)
        with self.lock:
            self.batch = batch
        self.checkpoint_s = time.monotonic()
