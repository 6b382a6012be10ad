"""Training on CPU and NPU at once: a batch is split, FP32 and INT8 train in parallel, gradients merge (SoCFlow+ 3.2).

Each processor is like a member of a group (F4): a step's gradient is the mean over all samples of both processors.
FP32 master weights, momentum and weight decay stay with the CPU (F12). For plain SGD this equals merging the two
processors' weights by gamma, w = gamma * w_FP32 + (1 - gamma) * w_INT8.
"""

import json
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from socflower.errors import ConfigError, TrainingFailed
from socflower.field_rules import OneOf, checked
from socflower.model_graph import batch_form
from socflower.model_graph.graph import in_mode
from socflower.model_graph.model_copy import copied
from socflower.model_graph.random_state import forked_generator
from socflower.precision import Int8Backend, NativeInt8Backend
from socflower.precision.cpu_share import (
    MIXING_RULES,
    RULES_BY_THROUGHPUT,
    ThroughputRatio,
    accuracy_floor,
    confidence,
    cpu_samples,
    cpu_share,
)
from socflower.training.batch_statistics import require_batch_statistics
from socflower.training.fp32 import FP32Session, FP32Trainer
from socflower.training.trainer import (
    Metric,
    Part,
    SessionResult,
    TrainingSpan,
    require_cpu,
    require_images,
)
from socflower.wire.message_keys import ALPHA, ALPHA_STEPS, CPU_SHARE
from socflower.workloads.evaluation import IGNORED

_PROFILED_SAMPLES = 32
"""Number of samples of the first batch on which beta is measured."""


@checked
class MixedPrecisionTrainer:
    """Trains each batch on an FP32 worker (torch) and an INT8 worker (`backend`) in parallel.

    `rule` sets how the CPU's share gamma follows from alpha and beta (`precision.mixed_precision`). alpha is measured
    before each epoch on `held_out` inputs; without them, on the inputs of the epoch's first batch before it is trained
    on. beta comes from the strategy if it plans with device profiles, else from `npu_ratio`; if neither is given, it is
    measured here. `parallel` False runs the two workers one after the other, for machines of one core; the result is
    the same.

    `backend` creates the accelerator backend, a new one in every session.
    """

    arithmetic: ClassVar[str] = "mixed"
    fp32: FP32Trainer = field(default_factory=FP32Trainer)
    rule: Annotated[str, OneOf(MIXING_RULES)] = "paper"
    backend: Callable[[], Int8Backend] = NativeInt8Backend
    held_out: Tensor | None = None
    npu_ratio: float | None = None
    parallel: bool = True

    def __post_init__(self) -> None:
        require_cpu(self.fp32.device, "MixedPrecisionTrainer")
        object.__setattr__(self, "fp32", replace(self.fp32, device="cpu"))

    def check(self) -> None:
        """Raise `ConfigError` for settings of the FP32Trainer that int8 training does not have."""
        fp32 = self.fp32
        is_plain = fp32.loss is functional.cross_entropy and fp32.loss_weight is None
        if not is_plain or fp32.train_step is not None:
            raise ConfigError(
                "int8 training has only the cross-entropy of logits; leave out the loss, loss_weight and "
                "train_step of the FP32Trainer"
            )
        if self.held_out is not None and not len(self.held_out):
            raise ConfigError("held_out has no inputs; give at least one, or None")

    def start(
        self, model: nn.Module, span: TrainingSpan, state: bytes | None = None
    ) -> "MixedPrecisionSession":
        """Begin, or continue from the state an earlier session returned; see `Trainer.start`."""
        header, fp32_state = _parse(state)
        if self.npu_ratio is not None and not span.npu_ratios:
            span = replace(span, npu_ratios=(self.npu_ratio,) * span.num_members)
        return MixedPrecisionSession(
            self, model, span, self.fp32.start(model, span, fp32_state), header
        )


@dataclass(slots=True)
class _Int8Pass:
    """The INT8 worker's result of a step; its gradients are still to be multiplied by `weight`.

    `loss` is its part of the batch's mean loss.
    """

    gradients: dict[str, Tensor]
    weight: float
    loss: float
    num_samples: int
    seconds: float


@dataclass(slots=True)
class _Counts:
    """Samples of a session: all, the CPU's, and the INT8 backend's, besides alpha with the number of its steps.

    A gradient counts when it is applied, since a ring may repeat a pass. `pending` has the samples of each pass of a
    step, all and the INT8 backend's, by the first member with samples.
    """

    applied: int = 0
    applied_cpu: int = 0
    since_average: int = 0
    int8_since_average: int = 0
    pending: dict[int, tuple[int, int]] = field(default_factory=dict)
    alphas: list[tuple[float, int]] = field(default_factory=list)

    def apply(self) -> None:
        """Count the gradients that are applied."""
        for num_samples, num_int8 in self.pending.values():
            self.applied += num_samples
            self.applied_cpu += num_samples - num_int8
            self.since_average += num_samples
            self.int8_since_average += num_int8
        self.pending.clear()

    def note_alpha(self, alpha: float) -> None:
        """Count a step at this alpha."""
        if self.alphas and self.alphas[-1][0] == alpha:
            self.alphas[-1] = (alpha, self.alphas[-1][1] + 1)
        else:
            self.alphas.append((alpha, 1))

    def metrics(self) -> dict[str, Metric]:
        """Return the CPU's share of the samples, and each alpha with its steps."""
        metrics: dict[str, Metric] = {}
        if self.applied:
            metrics[CPU_SHARE] = self.applied_cpu / self.applied
        if self.alphas:
            metrics[ALPHA] = [alpha for alpha, _ in self.alphas]
            metrics[ALPHA_STEPS] = [float(steps) for _, steps in self.alphas]
        return metrics


class MixedPrecisionSession:
    """One model under mixed-precision training; see `TrainingSession`."""

    def __init__(
        self,
        trainer: MixedPrecisionTrainer,
        model: nn.Module,
        span: TrainingSpan,
        fp32: FP32Session,
        header: dict[str, Any],
    ) -> None:
        self._trainer = trainer
        self._model = model
        self._span = span
        self._fp32 = fp32
        self._parameters = dict(model.named_parameters())
        every = dict(model.named_parameters(remove_duplicate=False))
        self._aliases = {name: part for name, part in every.items() if name not in self._parameters}
        self._step = span.first_step
        self._backend: Int8Backend | None = None
        self._worker: ThreadPoolExecutor | None = None
        if trainer.parallel:
            self._worker = ThreadPoolExecutor(1, thread_name_prefix="int8")
        self._dropped = False
        self._events: list[str] = []
        self._alpha: float | None = header.get("alpha")
        self._alpha_epoch: int | None = header.get("alpha_epoch")
        self._ratio = ThroughputRatio(*header["seconds"]) if "seconds" in header else None
        self._shares: list[float] = [1.0] * span.num_members
        self._floor = 0.0
        self._counts = _Counts()
        self._joules_at_start: float | None = None

    # The INT8 worker's part is added after the FP32 pass.
    final_in_backward = False

    @property
    def in_ring_order(self) -> bool:
        """Whether members' gradients are summed as a ring does; see `ExchangingSession.in_ring_order`."""
        return self._fp32.in_ring_order

    def step(self, parts: Sequence[Part]) -> Tensor:
        """Do one synchronous step on both processors of every member; see `TrainingSession.step`."""
        loss = self.gradients(parts, sum(map(batch_form.num_samples, parts)))
        self.apply()
        return loss

    def gradients(self, parts: Sequence[Part], num_samples: int) -> Tensor:
        """Compute the gradient of `parts` of a batch of `num_samples`; see `ExchangingSession.gradients`."""
        parts = [batch_form.pair_of(part, "MixedPrecisionTrainer") for part in parts]
        num_own = sum(len(labels) for _, labels in parts)
        _require_labels(parts)
        if num_own and self._trainer.rule != "fp32":
            self._prepare(parts)
        cpu_parts = []
        npu_parts = []
        num_cpu = 0
        for (inputs, labels), share in zip(parts, self._shares, strict=True):
            size = cpu_samples(len(labels), share, self._floor)
            cpu_parts.append((inputs[:size], labels[:size]))
            npu_parts.append((inputs[size:], labels[size:]))
            num_cpu += size
        self._fp32.begin()
        int8 = self._start_int8(npu_parts, num_samples)
        started_s = time.perf_counter()
        loss = self._fp32.accumulate(cpu_parts, num_samples)
        cpu_s = time.perf_counter() - started_s
        if int8 is not None:
            loss = loss + self._merge_int8(int8, npu_parts, num_samples, (num_cpu, cpu_s))
        first = next((member for member, (_, labels) in enumerate(parts) if len(labels)), 0)
        self._counts.pending[first] = num_own, 0 if self._dropped else num_own - num_cpu
        return loss

    def apply(self) -> None:
        """Do a step of the FP32 optimiser, and count it."""
        self._fp32.apply()
        self._step += 1
        self._counts.apply()
        if self._alpha is not None and self._trainer.rule != "fp32":
            self._counts.note_alpha(self._alpha)

    def disable_momentum(self) -> float:
        """Return the FP32 optimiser's momentum and set it to 0."""
        return self._fp32.disable_momentum()

    def finish(self) -> SessionResult:
        """Average running statistics over members and processors and return optimiser, alpha and timings."""
        self._average_statistics()
        if self._worker is not None:
            self._worker.shutdown()
        metrics = self._npu_energy() | self._counts.metrics()
        return SessionResult(state=self.state(), metrics=metrics, events=tuple(self._events))

    def state(self) -> bytes:
        """Return optimiser, alpha and timings; see `ExchangingSession.state`."""
        header: dict[str, Any] = {"alpha": self._alpha, "alpha_epoch": self._alpha_epoch}
        if self._ratio is not None:
            header["seconds"] = [self._ratio.cpu_s, self._ratio.npu_s]
        return json.dumps(header).encode() + b"\n" + self._fp32.state()

    # ------------------------------------------------------------------------------------------ alpha, beta, gamma

    def _prepare(self, parts: Sequence[Part]) -> None:
        """Before a step: create the backend, measure alpha and beta if needed, set the members' shares."""
        try:
            if self._backend is None and not self._dropped:
                self._build_backend(next(inputs for inputs, labels in parts if len(labels)))
        except ConfigError:
            # Int8 cannot run the model or the inputs: a mistake of the caller.
            raise
        except Exception as error:
            # A vendor's runtime may raise anything.
            self._drop_backend(error)
        try:
            if not self._dropped:
                self._measure(parts)
        except Exception as error:
            self._drop_backend(error)
        if self._dropped:
            return
        assert self._alpha is not None
        beta = self._ratio.beta if self._ratio else 0.0
        ratios = self._span.npu_ratios or [beta] * self._span.num_members
        self._shares = [cpu_share(self._trainer.rule, self._alpha, ratio) for ratio in ratios]
        self._floor = accuracy_floor(self._trainer.rule, self._alpha)

    def _build_backend(self, inputs: Tensor) -> None:
        channels, height, width = require_images(inputs.shape[1:], "MixedPrecisionTrainer")
        held_out = self._trainer.held_out
        if held_out is not None and held_out.shape[1:] != inputs.shape[1:]:
            raise ConfigError(
                f"MixedPrecisionTrainer: held_out has inputs of shape {tuple(held_out.shape[1:])}, but "
                f"training has {tuple(inputs.shape[1:])}; hold out samples of the same data"
            )
        require_batch_statistics(self._model, "MixedPrecisionTrainer")
        self._backend = self._trainer.backend()
        self._backend.build(self._model, (channels, height, width))
        if self._fp32.accumulates_gradients and not self._backend.hands_out_gradients:
            raise ConfigError(
                f"MixedPrecisionTrainer: momentum adds up the rounding noise of {self._backend.name}; give "
                "the FP32Trainer optimizer=sgd(learning_rate, momentum=0.0), or leave backend out"
            )
        # In the middle of an epoch alpha is known, and no measurement would load the running statistics.
        self._backend.load_weights(self._weights(with_statistics=True), seed=self._seed)
        self._joules_at_start = self._backend.energy_j()

    def _measure(self, parts: Sequence[Part]) -> None:
        """Measure alpha at the beginning of an epoch, and beta if it is needed and unknown."""
        epoch = self._step // self._span.steps_per_epoch
        if self._alpha_epoch != epoch:
            self._average_statistics()
            if self._dropped:
                return
            self._alpha = self._measure_alpha(parts)
            self._alpha_epoch = epoch
        is_needed = self._trainer.rule in RULES_BY_THROUGHPUT and not self._span.npu_ratios
        if self._ratio is None and is_needed:
            # The measurement must not advance the generator of the model's random layers.
            with forked_generator():
                self._ratio = self._measure_ratio(parts)

    def _measure_alpha(self, parts: Sequence[Part]) -> float:
        """Compare the logits of both processors (F9), on the same weights and running statistics."""
        assert self._backend is not None
        held_out = self._trainer.held_out
        inputs = torch.cat([inputs for inputs, _ in parts]) if held_out is None else held_out
        self._backend.load_weights(self._weights(with_statistics=True), seed=self._seed)
        with in_mode(self._model, training=False), torch.no_grad():
            fp32 = self._model(inputs).numpy()
        return confidence(fp32, self._backend.predict(_images(inputs)))

    def _measure_ratio(self, parts: Sequence[Part]) -> ThroughputRatio:
        """Time both workers running in parallel, on copies that are discarded (F10)."""
        assert self._backend is not None
        inputs = torch.cat([inputs for inputs, _ in parts])[:_PROFILED_SAMPLES]
        labels = torch.cat([labels for _, labels in parts])[:_PROFILED_SAMPLES]
        size = len(labels)
        fp32 = self._trainer.fp32.start(copied(self._model), TrainingSpan())
        weights = self._weights(with_statistics=True)
        known = self._backend.samples_per_s(size)
        cpu_s = npu_s = math.inf
        for attempt in range(3):
            self._backend.load_weights(weights, seed=-1 - attempt)
            int8 = None
            if known is None:
                int8 = self._submit(lambda: self._int8_seconds(inputs, labels))
            started_s = time.perf_counter()
            fp32.begin()
            fp32.accumulate([(inputs, labels)], size)
            seconds = time.perf_counter() - started_s
            int8_s = size / known if known else 0.0
            if int8 is not None:
                int8_s = int8.result()
            # The first run builds graphs and fills caches.
            if attempt:
                cpu_s = min(cpu_s, seconds)
                npu_s = min(npu_s, int8_s)
        self._backend.load_weights(weights, seed=self._seed)
        return ThroughputRatio(cpu_s / size, npu_s / size)

    def _int8_seconds(self, inputs: Tensor, labels: Tensor) -> float:
        assert self._backend is not None
        started_s = time.perf_counter()
        self._backend.train_step(
            _images(inputs), _labels(labels), learning_rate=self._fp32.learning_rate, progress=0.0
        )
        return time.perf_counter() - started_s

    def _npu_energy(self) -> dict[str, Metric]:
        """Return the joules that the accelerator drew in this session, if it measures them."""
        if self._backend is None or self._dropped or self._joules_at_start is None:
            return {}
        try:
            joules = self._backend.energy_j()
        except Exception as error:
            # A vendor's runtime may raise anything.
            self._drop_backend(error)
            return {}
        return {} if joules is None else {"npu-energy-j": joules - self._joules_at_start}

    # ------------------------------------------------------------------------------------------ the INT8 worker

    @property
    def _seed(self) -> int:
        """The seed of stochastic rounding: different in each step, the same for all members."""
        return self._step

    def _start_int8(self, parts: Sequence[Part], num_samples: int) -> "Future[_Int8Pass] | None":
        present = [(inputs, labels) for inputs, labels in parts if len(labels)]
        if self._dropped or not present:
            return None
        assert self._backend is not None
        # Drawn here and not in the worker, which runs in parallel to the CPU's random layers.
        draws: list[int | None] = [None] * len(present)
        if self._backend.draws:
            draws = [int(torch.randint(2**62, ())) for _ in present]
        return self._submit(lambda: self._int8_work(present, draws, num_samples))

    def _submit(self, work: Callable[[], Any]) -> "Future[Any]":
        if self._worker is not None:
            return self._worker.submit(work)
        future: Future[Any] = Future()
        try:
            future.set_result(work())
        except Exception as error:
            future.set_exception(error)
        return future

    def _int8_work(
        self, present: Sequence[Part], draws: Sequence[int | None], num_samples: int
    ) -> _Int8Pass:
        """Do each member's INT8 step from the same weights; every member has an accelerator of its own."""
        backend = self._backend
        assert backend is not None
        started_s = time.perf_counter()
        weights = self._weights()
        # At rate 0 the weights would not change.
        rate = self._fp32.learning_rate or 1.0
        progress = min(1.0, self._step / max(1, self._span.total_steps))
        is_alone = len(present) == 1
        total: dict[str, Tensor] = {}
        loss = 0.0
        num_done = 0
        for (inputs, labels), draw in zip(present, draws, strict=True):
            backend.load_weights(weights, seed=self._seed)
            if draw is not None:
                backend.draw_from(draw)
            result = backend.train_step(
                _images(inputs), _labels(labels), learning_rate=rate, progress=progress
            )
            share = len(labels) / num_samples
            gradients = backend.pseudo_gradient(weights, learning_rate=rate)
            for name, gradient in self._trained(gradients):
                if is_alone:
                    # No copy: it is unchanged until the backend's next step.
                    total[name] = gradient
                elif name in total:
                    total[name].add_(gradient, alpha=share)
                else:
                    total[name] = gradient * share
            loss += result.loss * share
            num_done += len(labels)
        for name, gradient in total.items():
            # Checking the sum is faster than checking all elements.
            if not math.isfinite(float(gradient.sum())):
                raise TrainingFailed(f"its gradient of {name} is not finite")
        seconds = time.perf_counter() - started_s
        # If the throughput is given, this machine only emulates the accelerator, and its own time does not count.
        known = backend.samples_per_s(num_done) if self._ratio is not None else None
        return _Int8Pass(
            gradients=total,
            weight=num_done / num_samples if is_alone else 1.0,
            loss=loss,
            num_samples=num_done,
            seconds=num_done / known if known else seconds,
        )

    def _trained(self, gradients: Mapping[str, Any]) -> Iterator[tuple[str, Tensor]]:
        """Yield the gradients of trained parameters, in their types and shapes.

        The accelerator may have changed frozen parameters in its copy; they are loaded again in the next step.
        """
        others = {*self._aliases, *(name for name, _ in self._model.named_buffers())}
        for name, array in gradients.items():
            if name not in others and (parameter := self._parameters[name]).requires_grad:
                gradient = torch.from_numpy(array).to(parameter.dtype)
                yield name, gradient.reshape(parameter.shape)

    def _merge_int8(
        self,
        future: "Future[_Int8Pass]",
        parts: Sequence[Part],
        num_samples: int,
        cpu: tuple[int, float],
    ) -> Tensor:
        """Add the INT8 gradients to the FP32 ones; if the backend failed, compute that share on the CPU too."""
        try:
            work = future.result()
            if not math.isfinite(work.loss):
                raise TrainingFailed(f"its loss is {work.loss}")
        except Exception as error:
            # A vendor's runtime may raise anything.
            self._drop_backend(error)
            return self._fp32.accumulate(parts, num_samples)
        for name, gradient in work.gradients.items():
            parameter = self._parameters[name]
            if parameter.grad is None:
                parameter.grad = gradient * work.weight
            else:
                parameter.grad.add_(gradient, alpha=work.weight)
        if self._ratio is not None:
            self._ratio.note(cpu=cpu, npu=(work.num_samples, work.seconds))
        return torch.tensor(work.loss)

    def _drop_backend(self, error: Exception) -> None:
        name = self._backend.name if self._backend is not None else "int8 backend"
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        self._dropped = True
        self._shares = [1.0] * self._span.num_members
        self._events.append(
            f"{name} failed at step {self._step} and is left out until the next round; its samples "
            f"went to the CPU ({reason})"
        )

    # ------------------------------------------------------------------------------------------ weights

    def _weights(self, *, with_statistics: bool = False) -> dict[str, Any]:
        every = {**self._parameters, **self._aliases}
        weights: dict[str, Any] = {
            name: parameter.detach().numpy() for name, parameter in every.items()
        }
        if with_statistics:
            weights |= {name: buffer.numpy() for name, buffer in self._model.named_buffers()}
        return weights

    def _average_statistics(self) -> None:
        """Average running statistics over members and then processors, by the samples that each has seen (F3)."""
        self._fp32.average_statistics()
        counts = self._counts
        if counts.int8_since_average and self._backend is not None and not self._dropped:
            share = counts.int8_since_average / counts.since_average
            for buffer, statistic in self._int8_statistics(self._backend):
                buffer.lerp_(statistic.to(buffer.dtype), share)
        counts.int8_since_average = counts.since_average = 0

    def _int8_statistics(self, backend: Int8Backend) -> list[tuple[Tensor, Tensor]]:
        """Return each running statistic of the model with that of the backend; none if the backend fails."""
        named = self._model.named_buffers()
        buffers = {name: buffer for name, buffer in named if buffer.is_floating_point()}
        if not buffers:
            return []
        try:
            seen = {
                name: torch.from_numpy(np.array(array))
                for name, array in backend.weights().items()
                if name in buffers
            }
            if not all(bool(torch.isfinite(statistic).all()) for statistic in seen.values()):
                raise TrainingFailed("its running statistics are not finite")
        except Exception as error:
            # A vendor's runtime may raise anything.
            self._drop_backend(error)
            return []
        return [(buffers[name], statistic) for name, statistic in seen.items()]


def _require_labels(parts: Sequence[Part]) -> None:
    if any(bool((labels == IGNORED).any()) for _, labels in parts):
        raise ConfigError(
            f"MixedPrecisionTrainer: int8 training cannot ignore labels of {IGNORED}; leave such samples "
            "out, or use FP32Trainer"
        )


def _images(inputs: Tensor) -> Any:
    return np.ascontiguousarray(inputs.numpy(), dtype=np.float32)


def _labels(labels: Tensor) -> Any:
    return labels.numpy().astype(np.int32)


def _parse(state: bytes | None) -> tuple[dict[str, Any], bytes | None]:
    if state is None:
        return {}, None
    header, _, fp32_state = state.partition(b"\n")
    return json.loads(header), fp32_state
