"""Exchanging a model's gradients over a ring, part by part while the backward pass goes on (F7)."""

import hashlib
import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from torch import Tensor, nn

from socflower.errors import ConfigError
from socflower.rings.collective import POLL_INTERVAL_S, Collective, Poll, Work
from socflower.rings.compression.codecs import GradientCompression
from socflower.training.sum_order import Bucket, make_bucket, make_buckets


@dataclass(frozen=True, kw_only=True, slots=True)
class Turn:
    """What is done before the first part of a step's exchange and after its last (F6)."""

    begin: Callable[[], None]
    end: Callable[[], None]


class GradientExchange:
    """Sums the members' weighted gradients, in `num_buckets` parts of about equal bytes.

    Parts go out in the order in which a backward pass ends with them, last layers first, the same in all members.
    In a part, gradients have the memory layouts of their parameters, so these have to be the same in all members, too.
    """

    def __init__(self, model: nn.Module, num_buckets: int) -> None:
        self._buckets = make_buckets(model, num_buckets)
        self._hooks = [parameter.register_post_accumulate_grad_hook(partial(self._on_gradient, number, position))
                       for number, bucket in enumerate(self._buckets)
                       for position, parameter in enumerate(bucket.parameters)]
        self._step: _Step | None = None
        self._agreed_on: Collective | None = None  # the ring in which all members have been found to be alike

    @property
    def num_buckets(self) -> int:
        """How many parts there are: at most one a parameter."""
        return len(self._buckets)

    @property
    def bucket_sizes(self) -> tuple[int, ...]:
        """How many elements each part has, in the order in which they go out."""
        return tuple(bucket.buffer.numel() for bucket in self._buckets)

    def begin(
        self, ring: Collective, poll: Poll, *, overlapped: bool = True, turn: Turn | None = None,
        compression: GradientCompression | None = None,
    ) -> None:
        """Get ready for a step's backward pass.

        `overlapped` says that gradients are final as soon as the pass has made them, each once; else nothing is sent
        before `finish`. `poll` is called at each layer of the pass and while waiting; what it raises ends the step.
        In a ring's first step members make sure that they are alike: raises `ConfigError` if not, `PeerLost`, or what
        `poll` raises.
        """
        # A trainer may have given the model another layout; gradients would have to be turned round in every step.
        self._buckets = [bucket if bucket.fits() else make_bucket(bucket.parameters) for bucket in self._buckets]
        if ring is not self._agreed_on:
            self._require_alike(ring, poll)
        for bucket in self._buckets:
            bucket.start()
        self._step = _Step(ring, poll, overlapped, turn, compression)

    def finish(self) -> None:
        """Return when all members' gradients are summed; they are the parameters' gradients then.

        Raises `PeerLost`, or what `poll` raised; the gradients are only good for throwing away then.
        """
        step, self._step = self._step, None
        assert step is not None
        try:
            for bucket in self._buckets[step.num_sent:]:
                for position, taken in enumerate(bucket.taken):
                    if not taken:
                        bucket.take(position)
                step.send(bucket)
            step.wait()
        finally:
            step.end()

    def abandon(self) -> None:
        """Forget a step whose backward pass or exchange failed, and its gradients."""
        if self._step is not None:
            self._step.end()
            self._step = None
        self._agreed_on = None
        # Somebody may still be writing into the old buffers.
        self._buckets = [make_bucket(bucket.parameters) for bucket in self._buckets]
        for bucket in self._buckets:
            for parameter in bucket.parameters:
                parameter.grad = None

    def close(self) -> None:
        """Let go of the model."""
        if self._step is not None:
            self._step.end()
            self._step = None
        for hook in self._hooks:
            hook.remove()

    def _on_gradient(self, number: int, position: int, _: Tensor) -> None:
        """Take what the backward pass has made of a parameter, while it is in the cache; send what is complete."""
        step = self._step
        if step is None:
            return
        step.poll()
        if not step.overlapped:
            return
        if self._buckets[number].taken[position]:
            raise RuntimeError("a gradient was made twice in one step; begin with overlapped=False where passes add up")
        self._buckets[number].take(position)
        while step.num_sent < len(self._buckets) and not self._buckets[step.num_sent].num_missing:
            step.send(self._buckets[step.num_sent])

    def _require_alike(self, ring: Collective, poll: Poll) -> None:
        own = hashlib.sha256(repr([(bucket.buffer.dtype, [(tuple(view.shape), view.stride()) for view in bucket.views])
                                   for bucket in self._buckets]).encode()).digest()
        if len(set(ring.all_gather(own, poll))) > 1:
            raise ConfigError("ring: its members differ in their models' parameters, the layout of these in memory, or "
                              "the number of buckets; give all members of a group the same model and trainer")
        self._agreed_on = ring


class _Step:
    """The exchange of one step."""

    def __init__(
        self, ring: Collective, poll: Poll, overlapped: bool, turn: Turn | None,
        compression: GradientCompression | None,
    ) -> None:
        self.poll, self.overlapped = poll, overlapped
        self.num_sent = 0
        self._ring, self._turn, self._compression = ring, turn, compression
        self._works: list[Work] = []
        # Waiting for a turn, or for a compressed exchange, must not hold up the backward pass.
        self._sender = None if turn is None and compression is None else _Sender()
        if self._sender is not None and turn is not None:
            self._sender.do(turn.begin)

    def send(self, bucket: Bucket) -> None:
        number, self.num_sent = self.num_sent, self.num_sent + 1
        if self._sender is None:
            self._reduce(bucket)
        elif self._compression is None:
            self._sender.do(partial(self._reduce, bucket))
        else:
            self._sender.do(partial(self._compression.exchange, self._ring, number, bucket.buffer,
                                    self._sender.require_wanted))

    def wait(self) -> None:
        if self._sender is None:
            self._wait_for_works(self.poll)
            return
        self._sender.do(partial(self._wait_for_works, self._sender.require_wanted))
        if self._turn is not None:
            self._sender.do(self._turn.end)
        self._sender.wait(self.poll)

    def end(self) -> None:
        if self._sender is not None:
            self._sender.close()

    def _reduce(self, bucket: Bucket) -> None:
        self._works.append(self._ring.all_reduce(bucket.buffer))

    def _wait_for_works(self, poll: Poll) -> None:
        for work in self._works:
            work.wait(poll)


class _Abandoned(Exception):
    """Nobody waits for this exchange any more."""


class _Sender:
    """A thread that does one thing after the other; the first failure is that of all that follow."""

    def __init__(self) -> None:
        self._tasks: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._closed = False
        self._failure: BaseException | None = None
        self._idle = threading.Event()
        self._thread = threading.Thread(target=self._run, name="gradient-exchange", daemon=True)
        self._thread.start()

    def do(self, task: Callable[[], None]) -> None:
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

    def require_wanted(self) -> None:
        if self._closed:
            raise _Abandoned

    def _run(self) -> None:
        while (task := self._tasks.get()) is not None:
            try:
                if self._failure is None and not self._closed:
                    task()
            except BaseException as error:  # handed to whoever waits
                self._failure = error
        self._idle.set()

