"""Trains with a user's plain torch loop: its model, optimiser and losses, in the session that every other trainer uses.

The loop runs in a thread and is never concurrent with the session: a batch goes to the loop, the loss comes back, and
the session computes the group's gradient and steps the optimiser while the loop waits in `optimizer.step`.
"""

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from queue import SimpleQueue
from typing import Any, TypeAlias

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from socflower.errors import ConfigError
from socflower.model_graph.batch_form import Batch
from socflower.model_graph.graph import in_mode
from socflower.training.fp32 import FP32Session, FP32Trainer
from socflower.training.saved_values import from_bytes
from socflower.training.trainer import SessionResult, TrainingSpan, require_trained_parameters
from socflower.workloads.data_source import DataSource

LoopFn: TypeAlias = Callable[["LoopGroup"], Any]

_LOOP = "_socflower_loop"
"""The attribute of a model by which a session finds the loop that has made it."""


class _Unwound(BaseException):
    """The interval is over, so that the loop ends where it waits; no `Exception`, which a loop may catch."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Prepared:
    """What a loop has given to `prepare`."""

    model: nn.Module
    optimizer: Optimizer
    batches: DataLoader[Any]


class LoopGroup:
    """What a plain loop is given, as an `Accelerator` of Accelerate: `prepare`, `backward` and `epochs`."""

    def __init__(self, loop: "_Loop") -> None:
        self._loop = loop

    def prepare(
        self, model: nn.Module, optimizer: Optimizer, batches: DataLoader[Any]
    ) -> tuple[nn.Module, Optimizer, Iterator[Batch]]:
        """Return the model, the optimiser at whose `step` members meet, and the batches of this group.

        One pass over the batches is the rest of an epoch, or of the interval between synchronisations; the first
        batches of a training only try whether the loss can be divided. The samples of `batches` are used, in the order
        of the training. Raises `ConfigError` for a scheduler, whose state groups could not exchange.
        """
        for given, kind in ((model, nn.Module), (optimizer, Optimizer), (batches, DataLoader)):
            if not isinstance(given, kind):
                raise ConfigError(
                    f"prepare: got {type(given).__name__}; give a module, an optimizer and a DataLoader, in this order"
                )
        if hasattr(optimizer.step, "_wrapped_by_lr_sched"):
            raise ConfigError(
                "prepare: the optimizer has a scheduler; give launch(scheduler=...), which is stepped once a batch"
            )
        return self._loop.prepare(Prepared(model=model, optimizer=optimizer, batches=batches))

    def backward(self, loss: Tensor) -> None:
        """Give the mean loss of the current batch in place of `loss.backward()`."""
        self._loop.on_loss(loss)

    @property
    def epochs(self) -> Iterator[int]:
        """The numbers of the training's epochs, from the current one on."""
        return self._loop.epochs()


class _MeetingOptimizer:
    """The loop's optimiser: `step` waits until the whole group has stepped, which clears gradients, too."""

    def __init__(self, optimizer: Optimizer, meet: Callable[[], None]) -> None:
        self._optimizer, self.step = optimizer, meet

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Do nothing: the session clears the gradients."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._optimizer, name)


def _clear_nothing(set_to_none: bool = True) -> None:
    """Stand for the model's `zero_grad`, which would clear what other members' parts have added."""


def _stay(model: nn.Module, mode: bool = True) -> nn.Module:
    """Stand for the model's `train`, and so for its `eval`, while its loss is tried."""
    return model


class _Loop:
    """A user's loop in its thread, which runs only while a session waits for it."""

    def __init__(self, train_fn: LoopFn) -> None:
        self._train_fn = train_fn
        # Batches with the number of their epoch, None at the end; and losses, what was prepared, or an error.
        self._to_loop: SimpleQueue[tuple[Batch, int] | None] = SimpleQueue()
        self._to_session: SimpleQueue[Any] = SimpleQueue()
        self._pending: list[tuple[Batch, int] | None] = []
        self._owes_loss = False
        self.span = TrainingSpan()
        self.num_steps = 0
        self._thread = threading.Thread(target=self._run, daemon=True, name="training loop")
        self._thread.start()
        self.prepared: Prepared = self._answer()

    def _run(self) -> None:
        try:
            self._train_fn(LoopGroup(self))
        except _Unwound:
            return
        except BaseException as error:
            self._to_session.put(error)
            return
        if self._pending == [None]:
            return
        self._to_session.put(
            ConfigError(
                "launch: the loop returned before the training ended; pass over the batches of `prepare` in each of "
                "`group.epochs`"
            )
        )

    def _answer(self) -> Any:
        answer = self._to_session.get()
        if isinstance(answer, BaseException):
            raise answer
        return answer

    # ------------------------------------------------------------------------------------ in the session's thread
    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return the loop's loss of a batch."""
        epoch = (self.span.first_step + self.num_steps) // max(1, self.span.steps_per_epoch)
        self._to_loop.put((batch, epoch))
        loss: Tensor = self._answer()
        return loss

    def end(self) -> None:
        """Unwind the loop, and wait for its thread."""
        self._to_loop.put(None)
        self._thread.join()

    # ------------------------------------------------------------------------------------ in the loop's thread
    def prepare(self, prepared: Prepared) -> Any:
        self._to_session.put(prepared)
        # The session decides from which epoch on this interval trains.
        if self._peek() is None:
            raise _Unwound
        prepared.model.zero_grad = _clear_nothing  # type: ignore[method-assign]
        return prepared.model, _MeetingOptimizer(prepared.optimizer, self._meet), _Batches(self)

    def _peek(self) -> tuple[Batch, int] | None:
        """Wait for the next batch, which stays the next one; None at the end."""
        if not self._pending:
            self._pending.append(self._to_loop.get())
        return self._pending[0]

    def pass_over(self) -> Iterator[Batch]:
        """Yield the batches up to the end of the current epoch, or of the interval."""
        if (first := self._peek()) is None:
            raise _Unwound
        while (item := self._peek()) is not None and item[1] == first[1]:
            self._pending.clear()
            self._owes_loss = True
            yield item[0]
            if self._owes_loss:
                raise ConfigError(
                    "launch: the loop asks for a batch without group.backward(loss) for the one before"
                )

    def on_loss(self, loss: Tensor) -> None:
        if not self._owes_loss:
            raise ConfigError("launch: group.backward(loss) is for one loss a batch")
        self._owes_loss = False
        self._to_session.put(loss)

    def _meet(self) -> None:
        if self._owes_loss:
            raise ConfigError(
                "launch: optimizer.step() without group.backward(loss); call that in place of loss.backward()"
            )
        self._peek()

    def epochs(self) -> Iterator[int]:
        while (item := self._peek()) is not None:
            yield item[1]
        raise _Unwound


class _Batches:
    """The batches of a loop; each pass is the rest of an epoch."""

    def __init__(self, loop: _Loop) -> None:
        self._loop = loop

    def __iter__(self) -> Iterator[Batch]:
        return self._loop.pass_over()

    def __len__(self) -> int:
        return self._loop.span.steps_per_epoch


def started_model(train_fn: LoopFn) -> nn.Module:
    """Return the model of a loop that has run up to `prepare` and waits there for a session of its model."""
    loop = _Loop(train_fn)
    model = loop.prepared.model
    model.__dict__[_LOOP] = loop
    return model


def prepared_by(train_fn: LoopFn) -> Prepared:
    """Return what a loop prepares; the loop ends there."""
    loop = _Loop(train_fn)
    loop.end()
    return loop.prepared


@dataclass(frozen=True, kw_only=True, slots=True)
class LoopTrainer:
    """Trains the models of `started_model` with their loops; `base` has the scheduler, the clipping and the device."""

    base: FP32Trainer = field(default_factory=FP32Trainer)

    @property
    def device(self) -> str:
        """That of the base."""
        return self.base.device

    def start(
        self, model: nn.Module, span: TrainingSpan, state: bytes | None = None
    ) -> "LoopSession":
        """Let the model's loop train; see `Trainer.start`."""
        loop = model.__dict__.pop(_LOOP, None)
        if loop is None:
            raise ConfigError("LoopTrainer: trains only models of started_model, each once")
        require_trained_parameters(model)
        return LoopSession(self.base, loop, span, state)


class LoopSession(FP32Session):
    """A session whose losses come from a loop, and whose optimiser is the loop's."""

    def __init__(
        self, base: FP32Trainer, loop: _Loop, span: TrainingSpan, state: bytes | None
    ) -> None:
        loop.span = span
        self._loop = loop
        trainer = replace(
            base, train_step=loop.loss, optimizer=lambda parameters: loop.prepared.optimizer
        )
        values = None if state is None else from_bytes(state)
        super().__init__(trainer, loop.prepared.model, span, values)

    def require_divisible_loss(
        self, first: Batch, data: DataSource, batch_size: int, *, divided: bool
    ) -> None:
        """Try the loop's loss if batches are divided; see `TriesLoss.require_divisible_loss`."""
        if not divided:
            return
        model = self._loop.prepared.model
        with in_mode(model, training=False):
            # The loop may call `model.train()` before its first batch.
            model.train = partial(_stay, model)  # type: ignore[method-assign]
            try:
                # The loop uses its own model, so that a copy of nothing is enough.
                self._trainer.require_divisible_loss(nn.Identity(), first, data, batch_size)
            finally:
                model.__dict__.pop("train")

    def apply(self) -> None:
        """Step the loop's optimiser."""
        super().apply()
        self._loop.num_steps += 1

    def finish(self) -> SessionResult:
        """End the loop; see `TrainingSession.finish`."""
        self._loop.end()
        self._loop.prepared.model.__dict__.pop("zero_grad", None)
        return super().finish()
