"""Exchanges a model's gradients over a ring, bucket by bucket during the backward pass (F7)."""

import hashlib
import math
import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from socflower.errors import ConfigError
from socflower.peers.collective import POLL_INTERVAL_S, Collective, Poll, Work, exchange_over
from socflower.training.exchange.buckets import GradientBucket, make_bucket, make_buckets
from socflower.training.exchange.compression import GradientCompression


@dataclass(frozen=True, kw_only=True, slots=True)
class TurnCallbacks:
    """Callbacks before the first bucket of a step's exchange and after its last (F6)."""

    begin: Callable[[], None]
    end: Callable[[], None]


class BucketExchange:
    """Sums the members' weighted gradients, in `num_buckets` buckets of about equal bytes.

    Buckets are sent in the order in which a backward pass completes them, last layers first, the same in all members.
    Gradients in a bucket have the memory layouts of their parameters, which must be equal in all members as well.
    """

    def __init__(self, model: nn.Module, num_buckets: int) -> None:
        self._buckets = make_buckets(model, num_buckets)
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(
                partial(self._on_gradient, number, position)
            )
            for number, bucket in enumerate(self._buckets)
            for position, parameter in enumerate(bucket.parameters)
        ]
        self._step: _Step | None = None
        # The ring whose members have equal layouts.
        self._checked_ring: Collective | None = None

    @property
    def num_buckets(self) -> int:
        """Number of buckets: at most one per parameter."""
        return len(self._buckets)

    @property
    def bucket_sizes(self) -> tuple[int, ...]:
        """Number of elements of each bucket, in the order in which they are sent."""
        return tuple(bucket.buffer.numel() for bucket in self._buckets)

    def begin(
        self,
        ring: Collective,
        poll: Poll,
        *,
        overlapped: bool = True,
        turn: TurnCallbacks | None = None,
        compression: GradientCompression | None = None,
    ) -> None:
        """Prepare for a step's backward pass.

        `overlapped`: each gradient is final as soon as the pass has computed it; otherwise nothing is sent before
        `finish`. `poll` is called at each layer of the pass and during waits; an exception from
        it ends the step. In a ring's first step, members compare their layouts: raises `ConfigError` if they differ,
        `PeerLost`, or what `poll` raises.
        """
        # A trainer may have changed the model's layout; gradients would have to be transposed in
        # every step.
        self._buckets = [
            bucket if bucket.has_current_layout() else make_bucket(bucket.parameters)
            for bucket in self._buckets
        ]
        if ring is not self._checked_ring:
            self._require_same_layout(ring, poll)
        for bucket in self._buckets:
            bucket.clear()
        self._step = _Step(ring, poll, overlapped, turn, compression)

    def finish(self) -> None:
        """Return when all members' gradients are summed and set as the parameters' gradients.

        Raises `PeerLost`, or what `poll` raised; the gradients must then be discarded.
        """
        step, self._step = self._step, None
        assert step is not None
        try:
            for bucket in self._buckets[step.num_sent :]:
                for position, stored in enumerate(bucket.stored):
                    if not stored:
                        bucket.store_gradient(position)
                step.send(bucket)
            step.wait()
            for bucket in self._buckets:
                bucket.from_host()
        finally:
            step.end()

    def is_finite(self) -> bool:
        """Return whether the gradients that `finish` has set have no NaN and no infinity."""
        # A sum reads the gradients without a second array of their size. It may overflow where none
        # is infinite.
        return all(
            math.isfinite(bucket.gradients.sum()) or bool(torch.isfinite(bucket.gradients).all())
            for bucket in self._buckets
        )

    def abandon(self) -> None:
        """Discard a step whose backward pass or exchange failed, with its gradients."""
        if self._step is not None:
            self._step.end()
            self._step = None
        self._checked_ring = None
        # Another thread may still be writing to the old buffers.
        self._buckets = [make_bucket(bucket.parameters) for bucket in self._buckets]
        for bucket in self._buckets:
            for parameter in bucket.parameters:
                parameter.grad = None

    def close(self) -> None:
        """Release the model: remove the hooks."""
        if self._step is not None:
            self._step.end()
            self._step = None
        for hook in self._hooks:
            hook.remove()

    def _on_gradient(self, number: int, position: int, _: Tensor) -> None:
        """Store a parameter's gradient while it is in the cache; send the buckets that are complete."""
        step = self._step
        if step is None:
            return
        step.poll()
        if not step.overlapped:
            return
        if self._buckets[number].stored[position]:
            raise RuntimeError(
                "a gradient was made twice in one step; begin with overlapped=False where passes add up"
            )
        self._buckets[number].store_gradient(position)
        while step.num_sent < len(self._buckets) and not self._buckets[step.num_sent].num_missing:
            step.send(self._buckets[step.num_sent])

    def _require_same_layout(self, ring: Collective, poll: Poll) -> None:
        layouts = []
        for bucket in self._buckets:
            views = [(tuple(view.shape), view.stride()) for view in bucket.views]
            layouts.append((bucket.buffer.dtype, views))
        own = hashlib.sha256(repr(layouts).encode()).digest()
        if len(set(ring.all_gather(own, poll))) > 1:
            raise ConfigError(
                "ring: its members differ in their models' parameters, the layout of these in memory, "
                "or the number of buckets; give all members of a group the same model and trainer"
            )
        self._checked_ring = ring


class _Step:
    """The exchange of one step."""

    def __init__(
        self,
        ring: Collective,
        poll: Poll,
        overlapped: bool,
        turn: TurnCallbacks | None,
        compression: GradientCompression | None,
    ) -> None:
        self.poll, self.overlapped = poll, overlapped
        self.num_sent = 0
        self._ring, self._turn, self._compression = ring, turn, compression
        self._works: list[Work] = []
        # Waiting for a turn, or for a compressed exchange, must not block the backward pass.
        self._sender = None if turn is None and compression is None else _TaskThread()
        if self._sender is not None and turn is not None:
            self._sender.submit(turn.begin)

    def send(self, bucket: GradientBucket) -> None:
        number, self.num_sent = self.num_sent, self.num_sent + 1
        bucket.to_host()
        if self._sender is None:
            self._reduce(bucket)
        elif self._compression is None:
            self._sender.submit(partial(self._reduce, bucket))
        else:
            script = self._compression.exchange(
                self._ring.rank, self._ring.size, number, bucket.buffer, bucket.shapes
            )
            self._sender.submit(
                partial(exchange_over, self._ring, script, self._sender.require_open)
            )

    def wait(self) -> None:
        if self._sender is None:
            self._wait_for_works(self.poll)
            return
        self._sender.submit(partial(self._wait_for_works, self._sender.require_open))
        if self._turn is not None:
            self._sender.submit(self._turn.end)
        self._sender.wait(self.poll)

    def end(self) -> None:
        if self._sender is not None:
            self._sender.close()

    def _reduce(self, bucket: GradientBucket) -> None:
        self._works.append(self._ring.all_reduce(bucket.buffer))

    def _wait_for_works(self, poll: Poll) -> None:
        for work in self._works:
            work.wait(poll)


class _Cancelled(Exception):
    """The exchange was cancelled."""


class _TaskThread:
    """A thread that runs tasks in order; after the first failure, all later tasks are skipped."""

    def __init__(self) -> None:
        self._tasks: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._closed = False
        self._failure: BaseException | None = None
        self._idle = threading.Event()
        self._thread = threading.Thread(target=self._run, name="gradient-exchange", daemon=True)
        self._thread.start()

    def submit(self, task: Callable[[], None]) -> None:
        self._tasks.put(task)

    def wait(self, poll: Poll) -> None:
        self._tasks.put(None)
        while not self._idle.wait(POLL_INTERVAL_S):
            poll()
        if self._failure is not None:
            raise self._failure

    def close(self) -> None:
        self._closed = True
        self._tasks.put(None)

    def require_open(self) -> None:
        if self._closed:
            raise _Cancelled

    def _run(self) -> None:
        while (task := self._tasks.get()) is not None:
            try:
                if self._failure is None and not self._closed:
                    task()
            except BaseException as error:
                # The error is raised again in `wait`.
                self._failure = error
        self._idle.set()
