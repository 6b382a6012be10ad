"""Training on CPU and NPU at once: a batch is split, and FP32 and INT8 train in parallel (SoCFlow+ 3.2).

By default gradients merge: each processor is like a member of a group (F4), and a step's gradient is the mean over all
samples of both. FP32 master weights, momentum and weight decay stay with the CPU (F12), and alpha (F9) is the
similarity of a quantised copy of the masters. With `merge` "weights" each NPU trains an int8 model of its own, and
w = gamma * w_FP32 + (1 - gamma) * w_INT8 when the session ends (Eq. 5), with an alpha measured just before.
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
from socflower.precision import NITI, Int8Backend, NativeInt8Backend
from socflower.precision.cpu_share import (
    MERGES,
    MIXING_RULES,
    RULES_BY_THROUGHPUT,
    ThroughputRatio,
    accuracy_floor,
    confidence,
    cpu_samples,
    cpu_share,
    without_single,
)
from socflower.training.batch_statistics import depends_on_batch, require_batch_statistics
from socflower.training.fp32 import FP32Session, FP32Trainer, accumulates_gradients
from socflower.training.processor_merge import OwnCopies, add_gradients
from socflower.training.trainer import (
    Metric,
    Part,
    SessionResult,
    TrainingSpan,
    require_cpu,
    require_images,
)
from socflower.wire.message_keys import ALPHA, ALPHA_STEPS, COPY_SIMILARITY, CPU_SHARE
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

    With `merge` "weights" alpha is measured at the end of each session, before the merge, and used from then on; the
    CPU's gradient is the mean over the CPU's samples, and a new training begins at the alpha of fresh copies.

    `backend` creates the accelerator backend, a new one in every session; None is `NativeInt8Backend`, with NITI if it
    trains weights of its own.
    """

    arithmetic: ClassVar[str] = "mixed"
    fp32: FP32Trainer = field(default_factory=FP32Trainer)
    rule: Annotated[str, OneOf(MIXING_RULES)] = "paper"
    backend: Callable[[], Int8Backend] | None = None
    merge: Annotated[str, OneOf(MERGES)] = "gradients"
    held_out: Tensor | None = None
    npu_ratio: float | None = None
    parallel: bool = True

    def __post_init__(self) -> None:
        require_cpu(self.fp32.device, "MixedPrecisionTrainer")
        object.__setattr__(self, "fp32", replace(self.fp32, device="cpu"))

    @property
    def merges_weights(self) -> bool:
        """Whether NPUs train int8 models of their own."""
        return self.merge == "weights" and self.rule != "fp32"

    def make_backend(self) -> Int8Backend:
        """Return a new accelerator."""
        if self.backend is not None:
            return self.backend()
        return NativeInt8Backend(NITI) if self.merges_weights else NativeInt8Backend()

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
    # What alpha is called: the confidence of Eq. 4, or the similarity of a copy of the same weights.
    alpha_key: str = COPY_SIMILARITY

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
            metrics[self.alpha_key] = [alpha for alpha, _ in self.alphas]
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
        # By every name, also those of shared parameters.
        self._parameters = dict(model.named_parameters(remove_duplicate=False))
        self._step = span.first_step
        self._backend: Int8Backend | None = None
        self._worker: ThreadPoolExecutor | None = None
        if trainer.parallel:
            self._worker = ThreadPoolExecutor(1, thread_name_prefix="int8")
        self._dropped = False
        self._events: list[str] = []
        self._copies: OwnCopies | None = None
        self._alphas: list[float] = _for_members(header.get("alphas", []), span.num_members)
        self._alpha_epoch: int | None = header.get("alpha_epoch")
        self._ratio: ThroughputRatio | None = None
        if "seconds" in header:
            cpu_s, npu_s = header["seconds"]
            self._ratio = ThroughputRatio(cpu_s, npu_s, num_idle_steps=header.get("idle_steps", 0))
        # Whether samples of a part depend on each other: then a part has none or at least two.
        self._normalises = depends_on_batch(model)
        self._shares: list[float] = [1.0] * span.num_members
        self._floors: list[float] = [0.0] * span.num_members
        self._counts = _Counts(alpha_key=ALPHA if trainer.merges_weights else COPY_SIMILARITY)
        # The latest inputs, on which alpha is measured without held-out ones.
        self._latest: Tensor | None = None
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

    def batch_weight(self, parts: Sequence[Part]) -> float | None:
        """Return the samples of the CPUs if they alone train the FP32 model; see `WeighingSession.batch_weight`."""
        if not self._trainer.merges_weights:
            return None
        pairs = self._pairs(parts)
        sizes = self._cpu_sizes(pairs)
        return float(sum(sizes))

    def gradients(
        self, parts: Sequence[Part], num_samples: int, weight: Callable[[], float] | None = None
    ) -> Tensor:
        """Compute the gradient of `parts` of a batch of `num_samples`; see `ExchangingSession.gradients`.

        If weights are merged, the gradient covers the CPUs' samples only, and the NPUs do their own steps. `weight`
        returns how many of the batch's samples they are; by default, those in `parts`.
        """
        parts = self._pairs(parts)
        sizes = self._cpu_sizes(parts)
        num_own, num_cpu = sum(len(labels) for _, labels in parts), sum(sizes)
        cpu_parts = [
            (inputs[:size], labels[:size])
            for (inputs, labels), size in zip(parts, sizes, strict=True)
        ]
        npu_parts = [
            (inputs[size:], labels[size:])
            for (inputs, labels), size in zip(parts, sizes, strict=True)
        ]
        if self._trainer.merges_weights:
            weight = weight or (lambda: float(num_cpu))
        self._fp32.begin()
        int8 = self._start_int8(npu_parts, num_samples)
        started_s = time.perf_counter()
        loss = self._fp32.accumulate(cpu_parts, num_samples, weight)
        cpu_s = time.perf_counter() - started_s
        if weight is not None and num_cpu:
            # The loss is to be the mean over all samples.
            loss = loss * (weight() / num_samples)
        if int8 is not None:
            loss = loss + self._merge_int8(int8, npu_parts, num_samples, (num_cpu, cpu_s))
        elif self._ratio is not None:
            self._ratio.note(cpu=(num_cpu, cpu_s), npu=(0, 0.0))
        first = next((member for member, (_, labels) in enumerate(parts) if len(labels)), 0)
        self._counts.pending[first] = num_own, 0 if self._dropped else num_own - num_cpu
        if self._copies is not None:
            for member, (_, labels) in enumerate(parts):
                if len(labels):
                    self._copies.pending[member] = len(labels)
        return loss

    def apply(self) -> None:
        """Do a step of the FP32 optimiser, and count it."""
        self._fp32.apply()
        self._step += 1
        self._counts.apply()
        if self._copies is not None:
            self._copies.apply()
        if self._alphas and self._trainer.rule != "fp32":
            self._counts.note_alpha(sum(self._alphas) / len(self._alphas))

    def disable_momentum(self) -> float:
        """Return the FP32 optimiser's momentum and set it to 0."""
        return self._fp32.disable_momentum()

    def finish(self) -> SessionResult:
        """Average or merge what members and processors have apart; return optimiser, alpha and timings."""
        metrics = self._counts.metrics()
        if self._copies is not None and not self._dropped:
            self._merge_copies(self._copies)
        self._average_statistics()
        if self._worker is not None:
            self._worker.shutdown()
        metrics |= self._npu_energy()
        return SessionResult(state=self.state(), metrics=metrics, events=tuple(self._events))

    @property
    def averages_weights(self) -> bool:
        """Whether the members of a ring have different weights after `finish`, whose mean is the group's model.

        They also `agree` on what they `measured`.
        """
        return self._trainer.merges_weights

    @property
    def measured(self) -> float | None:
        """The alpha that this member has measured, if it has."""
        return self._alphas[0] if self._alphas else None

    def agree(self, measured: Sequence[float | None]) -> None:
        """Use the mean of all members' alphas from now on, since members may leave or return."""
        known = [alpha for alpha in measured if alpha is not None]
        if known:
            self._alphas = [sum(known) / len(known)] * self._span.num_members

    def state(self) -> bytes:
        """Return optimiser, alpha and timings; see `ExchangingSession.state`."""
        header: dict[str, Any] = {"alphas": self._alphas, "alpha_epoch": self._alpha_epoch}
        if self._ratio is not None:
            header["seconds"] = [self._ratio.cpu_s, self._ratio.npu_s]
            header["idle_steps"] = self._ratio.num_idle_steps
        return json.dumps(header).encode() + b"\n" + self._fp32.state()

    # ------------------------------------------------------------------------------------------ alpha, beta, gamma

    def _pairs(self, parts: Sequence[Part]) -> list[tuple[Tensor, Tensor]]:
        """Return the parts as inputs and labels, after what comes before a step."""
        pairs = [batch_form.pair_of(part, "MixedPrecisionTrainer") for part in parts]
        _require_labels(pairs)
        if any(len(labels) for _, labels in pairs) and self._trainer.rule != "fp32":
            self._prepare(pairs)
        return pairs

    def _cpu_sizes(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> list[int]:
        """Return how many samples of each part the CPU takes."""
        sizes = []
        for (_, labels), share, floor in zip(pairs, self._shares, self._floors, strict=True):
            size = cpu_samples(len(labels), share, floor)
            sizes.append(without_single(size, len(labels)) if self._normalises else size)
        return sizes

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
        if not self._dropped:
            self._set_shares()

    def _set_shares(self) -> None:
        """Set the CPUs' shares by alpha and beta (F11)."""
        rule, beta = self._trainer.rule, self._ratio.beta if self._ratio else 0.0
        ratios = self._span.npu_ratios or [beta] * self._span.num_members
        self._shares = [
            cpu_share(rule, alpha, ratio) for alpha, ratio in zip(self._alphas, ratios, strict=True)
        ]
        self._floors = [accuracy_floor(rule, alpha) for alpha in self._alphas]

    def _build_backend(self, inputs: Tensor) -> None:
        channels, height, width = require_images(inputs.shape[1:], "MixedPrecisionTrainer")
        held_out = self._trainer.held_out
        if held_out is not None and held_out.shape[1:] != inputs.shape[1:]:
            raise ConfigError(
                f"MixedPrecisionTrainer: held_out has inputs of shape {tuple(held_out.shape[1:])}, but "
                f"training has {tuple(inputs.shape[1:])}; hold out samples of the same data"
            )
        require_batch_statistics(self._model, "MixedPrecisionTrainer")
        shape = channels, height, width
        if self._trainer.merges_weights:
            self._copies = OwnCopies(
                lambda: self._loaded_backend(shape), self._model, self._span.num_members
            )
            self._backend = self._copies.backends[0]
        else:
            # Known before it is built, since an event names it.
            self._backend = self._trainer.make_backend()
            self._load(self._backend, shape)
            self._refuse_noise(self._backend)
        self._joules_at_start = self._joules()

    def _loaded_backend(self, shape: tuple[int, int, int]) -> Int8Backend:
        backend = self._trainer.make_backend()
        self._load(backend, shape)
        return backend

    def _load(self, backend: Int8Backend, shape: tuple[int, int, int]) -> None:
        """Build an accelerator and load the model's weights.

        In the middle of an epoch alpha is known, and no measurement would load the running statistics.
        """
        backend.build(self._model, shape)
        backend.load_weights(self._weights(with_statistics=True), seed=self._seed)

    def _refuse_noise(self, backend: Int8Backend) -> None:
        if accumulates_gradients(self._fp32) and not backend.hands_out_gradients:
            raise ConfigError(
                f"MixedPrecisionTrainer: momentum adds up the rounding noise of {backend.name}; give "
                "the FP32Trainer optimizer=sgd(learning_rate, momentum=0.0), or leave backend out"
            )

    def _measure(self, parts: Sequence[Part]) -> None:
        """Measure alpha at the beginning of an epoch or of own copies, and beta if it is needed and unknown."""
        epoch = self._step // self._span.steps_per_epoch
        self._latest = torch.cat([inputs for inputs, _ in parts])
        is_due = not self._alphas if self._copies is not None else self._alpha_epoch != epoch
        if is_due:
            self._average_statistics()
            if self._dropped:
                return
            self._alphas = [self._measure_alpha()] * self._span.num_members
            self._alpha_epoch = epoch
        is_needed = self._trainer.rule in RULES_BY_THROUGHPUT and not self._span.npu_ratios
        if is_needed and (self._ratio is None or self._ratio.is_stale):
            # The measurement must not advance the generator of the model's random layers.
            with forked_generator():
                self._ratio = self._measure_ratio(parts)

    def _measure_alpha(self) -> float:
        """Compare the logits of both processors (F9), on the same weights and running statistics."""
        assert self._backend is not None
        self._backend.load_weights(self._weights(with_statistics=True), seed=self._seed)
        inputs, fp32 = self._held_out_logits()
        return confidence(fp32, self._backend.predict(_images(inputs)))

    def _held_out_logits(self) -> tuple[Tensor, Any]:
        """Return the inputs on which alpha is measured, and the FP32 model's logits."""
        inputs = self._latest if self._trainer.held_out is None else self._trainer.held_out
        assert inputs is not None
        with in_mode(self._model, training=False), torch.no_grad():
            return inputs, self._model(inputs).numpy()

    def _merge_copies(self, copies: OwnCopies) -> None:
        """Measure alpha of the copies as they were trained, then merge them with the FP32 model (F9, Eq. 5)."""
        try:
            logits: tuple[Tensor, Any] | None = None
            for member, backend in enumerate(copies.backends):
                if self._fp32.activate(member) or logits is None:
                    logits = self._held_out_logits()
                # Of a copy that had no samples nothing new is known.
                if copies.has_trained(member):
                    inputs, fp32 = logits
                    self._alphas[member] = confidence(fp32, backend.predict(_images(inputs)))
            self._set_shares()
            copies.merge(self._shares, self._fp32.activate)
            self._fp32.average_statistics(copies.samples)
            self.agree(self._alphas)
        except Exception as error:
            # A vendor's runtime may raise anything.
            self._drop_backend(error)

    def _measure_ratio(self, parts: Sequence[Part]) -> ThroughputRatio:
        """Time both workers running in parallel, on copies that are discarded (F10)."""
        assert self._backend is not None
        own: Mapping[str, Any] = {}
        if self._copies is not None:
            own = {name: np.array(array) for name, array in self._backend.weights().items()}
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
        self._backend.load_weights(own or weights, seed=self._seed)
        return ThroughputRatio(cpu_s / size, npu_s / size)

    def _int8_seconds(self, inputs: Tensor, labels: Tensor) -> float:
        assert self._backend is not None
        started_s = time.perf_counter()
        self._backend.train_step(
            _images(inputs), _labels(labels), learning_rate=self._fp32.learning_rate, progress=0.0
        )
        return time.perf_counter() - started_s

    def _joules(self) -> float | None:
        """Return what all accelerators have drawn, or None if one does not measure it."""
        backends = [self._backend] if self._copies is None else self._copies.backends
        joules = [None if each is None else each.energy_j() for each in backends]
        known = [each for each in joules if each is not None]
        return sum(known) if len(known) == len(joules) else None

    def _npu_energy(self) -> dict[str, Metric]:
        """Return the joules that the accelerators drew in this session, if they measure them."""
        if self._backend is None or self._dropped or self._joules_at_start is None:
            return {}
        try:
            joules = self._joules()
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
        present = {member: part for member, part in enumerate(parts) if len(part[1])}
        if self._dropped or not present:
            return None
        assert self._backend is not None
        # Drawn here and not in the worker, which runs in parallel to the CPU's random layers.
        draws: list[int | None] = [None] * len(present)
        if self._backend.draws:
            draws = [int(torch.randint(2**62, ())) for _ in present]
        if self._copies is not None:
            copies = self._copies
            return self._submit(lambda: self._own_steps(copies, present, draws, num_samples))
        own = list(present.values())
        return self._submit(lambda: self._int8_work(own, draws, num_samples))

    def _own_steps(
        self,
        copies: OwnCopies,
        present: Mapping[int, Part],
        draws: Sequence[int | None],
        num_samples: int,
    ) -> _Int8Pass:
        """Do each member's step on its own int8 model."""
        started_s, loss, num_done = time.perf_counter(), 0.0, 0
        progress = min(1.0, self._step / max(1, self._span.total_steps))
        for (member, (inputs, labels)), draw in zip(present.items(), draws, strict=True):
            if draw is not None:
                copies.backends[member].draw_from(draw)
            batch = _images(inputs), _labels(labels)
            rate = self._fp32.learning_rate
            own = copies.train(member, self._step, batch, rate=rate, progress=progress)
            loss += own * len(labels) / num_samples
            num_done += len(labels)
        return self._timed_pass({}, 1.0, loss, num_done, time.perf_counter() - started_s)

    def _timed_pass(
        self,
        gradients: dict[str, Tensor],
        weight: float,
        loss: float,
        num_done: int,
        seconds: float,
    ) -> _Int8Pass:
        """Return a pass with the accelerator's own throughput if it tells it.

        Then this machine only emulates the accelerator, and its own time does not count.
        """
        assert self._backend is not None
        known = self._backend.samples_per_s(num_done) if self._ratio is not None else None
        return _Int8Pass(
            gradients=gradients,
            weight=weight,
            loss=loss,
            num_samples=num_done,
            seconds=num_done / known if known else seconds,
        )

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
        weight = num_done / num_samples if is_alone else 1.0
        return self._timed_pass(total, weight, loss, num_done, time.perf_counter() - started_s)

    def _trained(self, gradients: Mapping[str, Any]) -> Iterator[tuple[str, Tensor]]:
        """Yield the gradients of trained parameters, in their types and shapes.

        The accelerator may have changed frozen parameters in its copy; they are loaded again in the next step.
        """
        own = dict(self._model.named_parameters())
        others = {
            *self._parameters,
            *(name for name, _ in self._model.named_buffers()),
        } - own.keys()
        for name, array in gradients.items():
            # An unknown name is the accelerator's failure.
            if name not in others and (parameter := own[name]).requires_grad:
                gradient = torch.from_numpy(array).to(parameter.dtype)
                yield name, gradient.reshape(parameter.shape)

    def _merge_int8(
        self,
        future: "Future[_Int8Pass]",
        parts: Sequence[Part],
        num_samples: int,
        cpu: tuple[int, float],
    ) -> Tensor:
        """Add the INT8 gradients to the FP32 ones; if the backend failed, compute that share on the CPU too.

        If an int8 model of its own failed, what it did in the session is lost.
        """
        try:
            work = future.result()
            if not math.isfinite(work.loss):
                raise TrainingFailed(f"its loss is {work.loss}")
        except Exception as error:
            # A vendor's runtime may raise anything.
            self._drop_backend(error)
            if self._copies is not None:
                return torch.zeros(())
            return self._fp32.accumulate(parts, num_samples)
        add_gradients(self._parameters, work.gradients, work.weight)
        if self._ratio is not None:
            self._ratio.note(cpu=cpu, npu=(work.num_samples, work.seconds))
        return torch.tensor(work.loss)

    def _drop_backend(self, error: Exception) -> None:
        name = self._backend.name if self._backend is not None else "int8 backend"
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        self._dropped = True
        self._shares = [1.0] * self._span.num_members
        lost = "; its samples went to the CPU"
        if self._copies is not None:
            lost = ", and nothing of its int8 model is merged; further samples go to the CPU"
        self._events.append(
            f"{name} failed at step {self._step} and is left out until the next round{lost} ({reason})"
        )

    # ------------------------------------------------------------------------------------------ weights

    def _weights(self, *, with_statistics: bool = False) -> dict[str, Any]:
        every = self._parameters
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
        is_copy = self._copies is None and self._backend is not None and not self._dropped
        if counts.int8_since_average and is_copy:
            share = counts.int8_since_average / counts.since_average
            assert self._backend is not None
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


def _for_members(values: Sequence[float], num_members: int) -> list[float]:
    """Return a value for each member; the mean for all if the group had another number of them."""
    if not values or len(values) == num_members:
        return list(values)
    return [sum(values) / len(values)] * num_members


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
