"""Exchanging a model's gradients over a ring, part by part while the backward pass goes on (F7)."""

import queue
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from socflower.clients.collective import Collective, Poll, Work
from socflower.clients.compression import GradientCompression


@dataclass(slots=True)
class _Bucket:
    """Parameters whose gradients travel together, and the buffer in which they do."""

    parameters: list[nn.Parameter]
    buffer: Tensor  # flat; reduced into, so that a reduction that fails spoils no gradient
    views: list[Tensor] = field(default_factory=list)  # of the buffer, one like each parameter
    num_missing: int = 0  # parameters whose gradient is not there yet


@dataclass(frozen=True, kw_only=True, slots=True)
class Turn:
    """What is done before the first part of a step's exchange and after its last (F6)."""

    begin: Callable[[], None]
    end: Callable[[], None]


class GradientExchange:
    """Sums the members' weighted gradients, in `num_buckets` parts of about equal bytes.

    Parts go out in the order in which a backward pass ends with them, last layers first, the same in all members.
    """

    def __init__(self, model: nn.Module, num_buckets: int) -> None:
        parameters = [parameter for parameter in model.parameters() if parameter.requires_grad][::-1]
        self._buckets = [_bucket(part) for part in _parts(parameters, num_buckets)]
        self._bucket_of = {id(parameter): index for index, bucket in enumerate(self._buckets)
                           for parameter in bucket.parameters}
        self._hooks = [parameter.register_post_accumulate_grad_hook(self._on_gradient) for parameter in parameters]
        self._step: _Step | None = None

    @property
    def num_buckets(self) -> int:
        """How many parts there are: at most one a parameter."""
        return len(self._buckets)

    def begin(
        self, ring: Collective, poll: Poll, *, overlapped: bool = True, turn: Turn | None = None,
        compression: GradientCompression | None = None,
    ) -> None:
        """Get ready for a step's backward pass.

        `overlapped` says that gradients are final as soon as the pass has made them; else nothing is sent before
        `finish`. `poll` is called at each layer of the pass and while waiting; what it raises ends the step.
        """
        for bucket in self._buckets:
            bucket.num_missing = len(bucket.parameters)
        # Waiting for a turn, or for a compressed exchange, must not hold up the backward pass.
        in_thread = turn is not None or compression is not None
        self._step = _Step(ring, poll, overlapped, turn, compression, _Sender() if in_thread else None)

    def finish(self) -> None:
        """Return when all members' gradients are summed; they are the parameters' gradients then.

        Raises `PeerLost`, or what `poll` raised; the gradients are only good for throwing away then.
        """
        step, self._step = self._step, None
        assert step is not None
        try:
            while step.num_sent < len(self._buckets):
                step.send(self._buckets[step.num_sent])
            step.wait()
        finally:
            step.end()
        for bucket in self._buckets:
            for parameter, view in zip(bucket.parameters, bucket.views, strict=True):
                parameter.grad = view

    def abandon(self) -> None:
        """Forget a step whose backward pass or exchange failed."""
        step, self._step = self._step, None
        if step is not None:
            step.end()
        # Somebody may still be writing into the old buffers.
        self._buckets = [_bucket(bucket.parameters) for bucket in self._buckets]

    def close(self) -> None:
        """Let go of the model."""
        if self._step is not None:
            self._step.end()
            self._step = None
        for hook in self._hooks:
            hook.remove()

    def _on_gradient(self, parameter: Tensor) -> None:
        """Note that the backward pass is done with a parameter, and send what is complete."""
        step = self._step
        if step is None:
            return
        step.poll()
        if not step.overlapped:
            return
        self._buckets[self._bucket_of[id(parameter)]].num_missing -= 1
        while step.num_sent < len(self._buckets) and not self._buckets[step.num_sent].num_missing:
            step.send(self._buckets[step.num_sent])


class _Step:
    """The exchange of one step."""

    def __init__(
        self, ring: Collective, poll: Poll, overlapped: bool, turn: Turn | None,
        compression: GradientCompression | None, sender: "_Sender | None",
    ) -> None:
        self.poll, self.overlapped = poll, overlapped
        self.num_sent = 0
        self._ring, self._turn, self._compression, self._sender = ring, turn, compression, sender
        self._works: list[Work] = []
        if sender is not None and turn is not None:
            sender.do(turn.begin)

    def send(self, bucket: _Bucket) -> None:
        number, self.num_sent = self.num_sent, self.num_sent + 1
        _fill(bucket)
        if self._sender is None:
            self._works.append(self._ring.all_reduce(bucket.buffer))
        elif self._compression is None:
            self._sender.do(lambda: self._ring.all_reduce(bucket.buffer).wait(self._poll_in_thread))
        else:
            compression = self._compression
            self._sender.do(lambda: compression.exchange(self._ring, number, bucket.buffer, self._poll_in_thread))

    def wait(self) -> None:
        for work in self._works:
            work.wait(self.poll)
        if self._sender is not None:
            if self._turn is not None:
                self._sender.do(self._turn.end)
            self._sender.wait(self.poll)

    def end(self) -> None:
        if self._sender is not None:
            self._sender.close()

    def _poll_in_thread(self) -> None:
        assert self._sender is not None
        self._sender.require_wanted()


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
        while not self._idle.wait(0.05):
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


def _fill(bucket: _Bucket) -> None:
    """Copy the gradients into the buffer; a member without samples has none, which is zero."""
    for parameter, view in zip(bucket.parameters, bucket.views, strict=True):
        if parameter.grad is None:
            view.zero_()
        else:
            view.copy_(parameter.grad)


def _bucket(parameters: Sequence[nn.Parameter]) -> _Bucket:
    buffer = torch.zeros(sum(parameter.numel() for parameter in parameters), dtype=parameters[0].dtype)
    bucket = _Bucket(list(parameters), buffer)
    start = 0
    for parameter in parameters:
        part = buffer[start:start + parameter.numel()]
        dense = sorted(parameter.stride()) == sorted(parameter.contiguous().stride()) or parameter.is_contiguous(
            memory_format=torch.channels_last) if parameter.dim() == 4 else parameter.is_contiguous()
        # In the parameter's own layout the optimiser reads the gradient in one sweep.
        bucket.views.append(part.as_strided(parameter.size(), parameter.stride(), part.storage_offset()) if dense
                            else part.view(parameter.size()))
        start += parameter.numel()
    return bucket


def _parts(parameters: Sequence[nn.Parameter], num_parts: int) -> list[list[nn.Parameter]]:
    """Cut a sequence of parameters into runs of about equal bytes and one type, none empty."""
    share = sum(parameter.nbytes for parameter in parameters) / max(1, min(num_parts, len(parameters)))
    parts: list[list[nn.Parameter]] = []
    num_bytes = 0.0
    for parameter in parameters:
        full = parts and num_bytes + parameter.nbytes / 2 >= share * len(parts)
        if not parts or full or parts[-1][0].dtype != parameter.dtype:
            parts.append([])
        parts[-1].append(parameter)
        num_bytes += parameter.nbytes
    return parts
