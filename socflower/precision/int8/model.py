"""A network that trains in int8: the public interface of the engine.

For example::

    model = Int8Model.from_module(build_model("lenet5", ...), input_shape=(1, 28, 28))
    result = model.train_step(images, labels, learning_rate=0.01, progress=0.0)
    accuracy = model.evaluate(test_images, test_labels).accuracy
    module.load_state_dict(model.state_dict())
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from socflower import _int8
from socflower.errors import ConfigError, TrainingFailed, require_range
from socflower.plain_numbers import plain_numbers
from socflower.precision.algorithm import (
    REAL_SCALES,
    BackwardRule,
    Fp32Update,
    IntegerUpdate,
    TrainingAlgorithm,
)
from socflower.precision.int8 import saving
from socflower.precision.int8.batch_share import BatchPeers, BatchShare, JointShare, gather
from socflower.precision.int8.batch_splitting import best_blocks, profile_batch_blocks
from socflower.precision.int8.bound_graph import BoundGraph, Fp32Factory
from socflower.precision.int8.fixed_point import (
    AnyArray,
    DoubleArray,
    FloatArray,
    Int8Array,
    Int32Array,
    exponent_for,
    to_real,
)
from socflower.precision.int8.network import Convolution, Fp32, Graph, Shape
from socflower.precision.int8.operators.base import StepContext, Tensor
from socflower.precision.int8.operators.embedding import Embedding
from socflower.precision.int8.operators.weighted import scaled_by_channel
from socflower.precision.int8.parameters import (
    Parameters,
    array_of,
    export_parameters,
    import_parameters,
)
from socflower.precision.int8.region_cache import RegionCache
from socflower.precision.int8.requantisation import (
    MAX_EXPONENT,
    RescalingPolicy,
    ScaleTrackers,
    changes_mean,
    exponent_within_float32,
)
from socflower.precision.int8.stalling import guards

if TYPE_CHECKING:
    import torch


GRADIENT_EXPONENT = -7
"""softmax - one-hot lies in [-1, 1]; it is kept in units of 2^-7."""


@plain_numbers
@dataclass(frozen=True, kw_only=True, slots=True)
class EngineSettings:
    """How the engine uses the machine; only `rescaling` changes results.

    `cores` (one per thread) pins the threads. `kernel` is one of `_int8.available_kernels()`; "" is the best one,
    or the value of SOCFLOWER_KERNEL. `batch_blocks` maps convolutions to the images they work on at a time
    (batch splitting, F15); with None, trainers split those that a profile finds if the training is long enough to pay
    for it (`split_batches`). `memory_budget_bytes` limits the memory held during and between steps.
    """

    num_threads: int = 1
    cores: tuple[int, ...] = ()
    kernel: str = ""
    rescaling: RescalingPolicy = field(default_factory=RescalingPolicy)
    batch_blocks: Mapping[str, int] | None = None
    memory_budget_bytes: int | None = None
    reuse_graph: bool = True


@plain_numbers
@dataclass(frozen=True, kw_only=True, slots=True)
class StepResult:
    """Mean cross-entropy of a batch before its update, and the number of correctly classified samples."""

    loss: float
    num_correct: int
    num_samples: int

    @property
    def accuracy(self) -> float:
        """Fraction of samples classified correctly."""
        return self.num_correct / self.num_samples


class JointStep:
    """A step of a ring whose pass is done; see `Int8Model.begin_joint_step`.

    `loss` is this member's part of the mean loss of the batch.
    """

    def __init__(
        self, model: Int8Model, share: JointShare, trackers: ScaleTrackers, loss: float
    ) -> None:
        self._model = model
        self._share = share
        self._trackers = trackers
        self.loss = loss

    def exchange(self) -> None:
        """Sum the gradients over the members.

        Raises `TrainingFailed` if sums leave int32, and the errors of the peers.
        """
        with _overflow_fails_training():
            self._share.exchange()

    def apply(self) -> None:
        """Update the parameters, and adopt the exponents that the pass found."""
        self._share.apply()
        self._model.trackers = self._trackers
        self._model.parameters.num_steps += 1


class Int8Model:
    """A graph with its parameters and the buffers of its steps.

    The last operator computes logits. With `head` False it computes values that a loss elsewhere reads; then `forward`
    and `backward` train the model. With `input_gradient`, `backward` also computes the gradient of the images, for
    layers before the model.

    With `trains_alone` (the default), a training in which nothing changes any more is refused (`stalling`). It is False
    for a part of a network beside which others may train.
    """

    trains_alone = True

    def __init__(
        self,
        graph: Graph,
        parameters: Parameters,
        *,
        algorithm: TrainingAlgorithm = REAL_SCALES,
        settings: EngineSettings | None = None,
        fp32_factory: Fp32Factory | None = None,
        head: bool = True,
        input_gradient: bool = False,
    ) -> None:
        settings = settings or EngineSettings()
        made = graph.shape_of(graph.output)
        if head and made[1:] != (1, 1):
            raise ConfigError(f"{graph.output}: the last operator makes {made}, not logits")
        for name, block in (settings.batch_blocks or {}).items():
            if block < 0 or not any(
                isinstance(n, Convolution) and n.name == name for n in graph.nodes
            ):
                raise ConfigError(
                    f"batch_blocks: {name!r} must be a convolution, its block 0 or more, got {block}"
                )
        self.graph = graph
        self.algorithm = algorithm
        self.settings = settings
        self.parameters = parameters
        self.engine = _engine(settings)
        self.trackers = ScaleTrackers(settings.rescaling)
        self._fp32_factory = fp32_factory
        self._input_gradient = input_gradient
        self._clear_memory()
        self._round_weights()

    @cached_property
    def _reads_numbers(self) -> bool:
        return any(isinstance(node, Embedding) for node in self.graph.nodes)

    @cached_property
    def _guards(self) -> frozenset[str]:
        return guards(self.graph)

    def _clear_memory(self) -> None:
        """Start with memory of its own."""
        self.regions = RegionCache(
            budget_bytes=self.settings.memory_budget_bytes, reuse=self.settings.reuse_graph
        )
        self._programs: dict[int, BoundGraph] = {}
        # Of the last `forward`, for `backward`.
        self._kept: tuple[BoundGraph, StepContext] | None = None

    @classmethod
    def from_module(
        cls,
        module: torch.nn.Module,
        *,
        input_shape: Shape | tuple[int],
        algorithm: TrainingAlgorithm = REAL_SCALES,
        settings: EngineSettings | None = None,
        fp32_operators: Sequence[str] = (),
        unsupported: Literal["refuse", "fp32"] = "fp32",
        exponents: Mapping[str, int] | None = None,
        head: bool = True,
        input_gradient: bool = False,
    ) -> Int8Model:
        """Return the int8 model of a torch module for (n, *input_shape) images; the module is only read.

        For a module that takes (n, features) the input shape is (features,); the model takes images of one pixel.

        The modules and functions that `fp32_operators` names run in torch FP32 between the int8 ones: those that a
        placement has `on_cpu` (`operator_costs.profile_operators`). `exponents` are earlier exponents of the weights
        (`parameters.exponents`). Operators without an int8 kernel run in FP32 too, which `islands` and a warning
        report; with `unsupported` "refuse" they raise ConfigError.
        """
        from socflower.precision.int8.fp32_operator import fp32_factory
        from socflower.precision.int8.from_torch import capture_network
        from socflower.precision.int8.replacements import with_replacements

        captured = capture_network(
            with_replacements(module, algorithm.forward.replacements),
            input_shape,
            fp32_operators=fp32_operators,
            unsupported=unsupported,
        )
        keep_master = isinstance(algorithm.update, Fp32Update)
        parameters = import_parameters(
            captured.graph,
            captured.state,
            keep_master=keep_master,
            scaled_by_channel=scaled_by_channel(captured.graph, algorithm),
            exponents=exponents,
        )
        model = cls(
            captured.graph,
            parameters,
            algorithm=algorithm,
            settings=settings,
            fp32_factory=fp32_factory(captured.modules) if captured.modules else None,
            head=head,
            input_gradient=input_gradient,
        )
        _warn_of_islands(model, fp32_operators)
        return model

    def twin(self) -> Int8Model:
        """Return a model of the same parameters, trackers and threads, with memory of its own.

        A pipeline keeps several forward passes until their backward passes: each needs a model with its own memory.
        Any of them may run any pass, with the same result. After `load_state_dict` of one, the others keep the old
        parameters.
        """
        # Not `copy.copy`, which starts another engine.
        other = object.__new__(type(self))
        vars(other).update(vars(self))
        other._clear_memory()
        return other

    @property
    def islands(self) -> dict[str, str]:
        """The operators that run in torch FP32, by name: what each of them computes."""
        return {node.name: node.operator for node in self.graph.nodes if isinstance(node, Fp32)}

    def train_step(
        self,
        images: FloatArray,
        labels: Int32Array,
        *,
        learning_rate: float = 0.01,
        progress: float | None = None,
        seed: int | None = None,
        timings: dict[str, float] | None = None,
    ) -> StepResult:
        """Train on one batch: (n, *input_shape) float32 images and n integer labels.

        `learning_rate` is that of the FP32 parameters (all weights under an FP32 update, biases and BatchNorm under
        an integer one); `progress` in [0, 1] is the fraction of training done. It determines the gradient bits of an
        integer update (F18) and is required if they change. `seed` (default: the number of steps this model has made)
        determines the dropout masks. `timings`, if given, collects seconds per operator. Frozen parameters do not
        change, and no gradient is computed for them; BatchNorm's running statistics do change, as in torch. Raises
        ConfigError if the input has another shape or a NaN, if a required `progress` is missing, or if every parameter
        is frozen; raises TrainingFailed if training has diverged, or has long been unable to change the loss.
        """
        settings = self._step_settings(learning_rate, progress, seed)
        images, labels = self._checked(images, labels)
        share = BatchShare(len(images))
        result = self._run(images, labels, share, self.trackers, settings, timings)
        self.parameters.num_steps += 1
        return result

    def begin_joint_step(
        self,
        images: FloatArray,
        labels: Int32Array,
        peers: BatchPeers,
        *,
        learning_rate: float = 0.01,
        progress: float | None = None,
        seed: int | None = None,
    ) -> JointStep:
        """Compute this member's share of a ring's step: n images and labels; n may be 0.

        All members call it with models of equal parameters and equal settings; their shares are the batch, by rank. The
        result's `exchange` and `apply` complete the step, as `train_step` would on the whole batch. Until `apply`
        nothing changes, so the step may be begun again instead. Raises as `train_step` does, and the errors of `peers`.
        """
        settings = self._step_settings(learning_rate, progress, seed)
        num_own = len(images)
        if not num_own:
            # It takes part in the exchanges of the members, and contributes nothing.
            images = np.zeros((1, *self.graph.input_shape), np.float32)
            labels = np.zeros(1, np.int32)
        images, labels = self._checked(images, labels)
        sizes = [int(size) for size in gather(peers, [num_own])[:, 0]]
        for cautious in (False, True):
            share = JointShare(peers, sizes, cautious=cautious)
            trackers = self.trackers.copy()
            try:
                result = self._run(images, labels, share, trackers, settings, None)
            except TrainingFailed:
                if cautious:
                    raise
                # Values may have saturated unseen. All members see the same maxima, so all of them repeat the pass.
                continue
            if share.held():
                break
        return JointStep(self, share, trackers, result.loss * num_own / sum(sizes))

    def _step_settings(
        self, learning_rate: float, progress: float | None, seed: int | None
    ) -> tuple[float, float, int]:
        """Return learning rate, progress and seed of a step, checked."""
        update = self.algorithm.update
        if progress is None and isinstance(update, IntegerUpdate) and len(update.bits) != 1:
            bits = ", ".join(map(str, update.bits))
            takes = (
                f"takes its gradient bits {bits} in turn" if bits else "takes ever smaller steps"
            )
            raise ConfigError(
                f"train_step: {self.algorithm.name} {takes}; pass progress=step / num_steps"
            )
        progress = progress or 0.0
        seed = self.parameters.num_steps if seed is None else seed
        require_range("train_step", least=0.0, learning_rate=learning_rate, seed=seed)
        require_range("train_step", least=0.0, most=1.0, progress=progress)
        if self.graph.output not in self.graph.differentiated:
            raise ConfigError(
                "every parameter is frozen (requires_grad is False): nothing to train"
            )
        return learning_rate, progress, seed

    def _run(
        self,
        images: FloatArray,
        labels: Int32Array,
        share: BatchShare,
        trackers: ScaleTrackers,
        settings: tuple[float, float, int],
        timings: dict[str, float] | None,
    ) -> StepResult:
        """Run forward and backward pass; `share` makes the changes, or defers them."""
        with self._released_afterwards(), _overflow_fails_training():
            program, step = self._begin(images, share=share, trackers=trackers)
            step.learning_rate, step.progress, step.seed = settings
            step.timings = timings
            logits = program.forward(step)
            real = real_logits(logits.data, logits.exponent, self.graph.num_classes)
            real *= logits.factor
            result = _classified(real, labels)
            gradient = program.logits_gradient()
            exponent = write_logits_gradient(
                self.algorithm.backward,
                share,
                real,
                logits,
                labels,
                self.graph.num_classes,
                gradient,
            )
            has_gradient = share.most(float(gradient.any())) > 0.0
            program.backward(step, gradient, exponent)
            if has_gradient:
                remedy = f"use a learning rate below {step.learning_rate:.3g}"
                share.change(partial(self._require_change, step, remedy))
        return result

    def _require_change(self, step: StepContext, remedy: str) -> None:
        """Raise TrainingFailed if steps whose loss has a gradient have changed nothing for long."""
        num_samples = step.share.num_samples
        stalls = self.parameters.stalls
        # Without anything in the images, a layer that reads them has no gradient.
        if step.largest_input:
            stalls.require_reach(self._guards, step.reached, num_samples, remedy)
        update = self.algorithm.update
        if isinstance(update, IntegerUpdate) and update.bits and step.reached:
            bits = update.bits_at(step.progress)
            # Later bits may be few on purpose.
            if bits == max(update.bits):
                stalls.require_motion(min(step.reached), bits, num_samples)

    @contextmanager
    def _released_afterwards(self) -> Iterator[None]:
        try:
            yield
        finally:
            self.regions.release_all()

    def forward(
        self,
        images: FloatArray,
        *,
        seed: int = 0,
        keep: bool = True,
        replay: bool = False,
    ) -> tuple[FloatArray, float]:
        """Return the last operator's output, (n, channels, height, width), and its quantum.

        The output is int8 times the quantum, in float32. With `keep`, the values that `backward` reads are kept until
        then, or until the next pass of any kind. A pass that is not kept does not count for the exponent trackers. A
        `replay` does not update the running statistics, since its batch has done so before.
        """
        images = self._checked_images(images)
        try:
            program, step = self._begin(images)
            step.seed = seed
            step.differentiated = keep
            step.replay = replay
            output = program.forward(step)
            real = output.real()
            self._kept = (program, step) if keep else None
        finally:
            if self._kept is None:
                self.regions.release_all()
        return real, output.scale

    def backward(
        self,
        gradient: FloatArray,
        *,
        learning_rate: float = 0.01,
        progress: float = 0.0,
        summed: bool = False,
    ) -> FloatArray | None:
        """Train on the batch that `forward` kept, by the gradient of the mean loss with respect to its output.

        The gradient (n, channels, height, width) is rounded to the nearest int8, as an FP32 operator's is. If it is
        `summed`, it is used as it is, so that an int8 gradient times a power of two stays exact; parameters then get
        `learning_rate` times the gradient of the same loss. For `learning_rate` and `progress` see `train_step`.

        Returns the gradient of the same loss with respect to the images if the model computes it (`input_gradient`):
        int8 times a power of two, of a mean divided by n. Raises TrainingFailed for a NaN or an infinity in `gradient`,
        and if no gradient has long reached the weights.
        """
        if self._kept is None:
            raise ConfigError("backward: no pass is kept; call forward with keep=True before")
        (program, step), self._kept = self._kept, None
        with self._released_afterwards(), _overflow_fails_training():
            into = program.logits_gradient()
            num_samples = step.share.num_samples
            step.learning_rate = learning_rate
            step.progress = progress
            # Integer gradients are sums over the batch, and a step divides its learning rate by the samples.
            if summed:
                step.learning_rate *= num_samples
            else:
                gradient = gradient * np.float32(num_samples)
            exponent = round_gradient(step.engine, self.graph, gradient, into)
            # A gradient from outside is int8.
            program.tensors[self.graph.output].gradient_low = None
            has_gradient = bool(into.any())
            of_input = program.backward(step, into, exponent)
            self.parameters.num_steps += 1
            if has_gradient and self.trains_alone:
                self._require_change(step, "lower the learning rate")
            if of_input is None:
                return None
            real = to_real(*of_input, self.graph.input_shape)
            return real if summed else real / np.float32(num_samples)

    def infer(self, images: FloatArray) -> FloatArray:
        """Return the last operator's output in evaluation mode, (n, channels, height, width).

        Weights and activations are int8, and BatchNorm uses its running statistics. Each image has scales of its own,
        so its result does not depend on the other images.
        """
        images = self._checked_images(images)
        with self._released_afterwards():
            program, step = self._begin(images, takes_input=False)
            return program.evaluate(step, images)

    def predict(self, images: FloatArray, *, batch_size: int = 256) -> DoubleArray:
        """Return (n, classes) real logits of the images, `batch_size` at a time; see `infer`."""
        require_range("predict", least=1, batch_size=batch_size)
        images = self._checked_images(images)
        parts = [
            self.infer(images[start : start + batch_size])
            for start in range(0, len(images), batch_size)
        ]
        logits = np.concatenate(parts).reshape(len(images), self.graph.num_classes)
        return logits.astype(np.float64)

    def evaluate(
        self,
        images: FloatArray,
        labels: Int32Array,
        *,
        batch_size: int = 256,
    ) -> StepResult:
        """Return loss and accuracy on labelled images; nothing changes."""
        images, labels = self._checked(images, labels)
        return _classified(self.predict(images, batch_size=batch_size), labels)

    def arrays(self) -> dict[str, AnyArray]:
        """Return the parameters as NumPy arrays by their names in the module's state_dict, weights as float32."""
        return export_parameters(self.graph, self.parameters)

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Return the parameters as tensors for the torch module's `load_state_dict`.

        Frozen weights, which the module has, are left out: with some, load it with `strict=False`.
        """
        import torch

        return {name: torch.from_numpy(np.array(array)) for name, array in self.arrays().items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the parameters of a torch state_dict (tensors or arrays), rounding the weights to int8.

        Frozen weights may be missing. The exponents found by earlier steps are discarded. Raises ConfigError, and
        changes nothing, if parameters are missing, unknown or not finite, or have a wrong shape.
        """
        arrays = {name: np.asarray(value, dtype=np.float32) for name, value in state.items()}
        keep_master = isinstance(self.algorithm.update, Fp32Update)
        parameters = import_parameters(
            self.graph,
            arrays,
            keep_master=keep_master,
            scaled_by_channel=scaled_by_channel(self.graph, self.algorithm),
            frozen=self.parameters.weights,
        )
        for name, array in self.parameters.fp32.items():
            array_of(parameters.fp32, name, array.shape)
        parameters.num_steps = self.parameters.num_steps
        self.parameters = parameters
        self._round_weights()
        self.trackers.restore([])

    def _round_weights(self) -> None:
        """Round new weights to the mantissa bits that the algorithm has, as every step does."""
        if (bits := self.algorithm.forward.mantissa_bits) is not None:
            for weight in self.parameters.weights.values():
                _int8.round_elements(self.engine, weight.data, bits)

    def save(self, path: Path) -> None:
        """Write graph, algorithm, the exact parameters and the state of training to an .npz file, atomically.

        Of modules that run in FP32 it has the parameters and buffers.
        """
        trackers = self.trackers.to_json()
        saving.save(path, self.graph, self.algorithm, self.parameters, trackers)

    @classmethod
    def load(
        cls,
        path: Path,
        *,
        settings: EngineSettings | None = None,
        module: torch.nn.Module | None = None,
    ) -> Int8Model:
        """Return the model that `save` wrote; it continues with the same bits.

        Torch is not needed, unless operators run in FP32: then `module` has their modules, by the same paths. Raises
        ConfigError on any other file.
        """
        graph, algorithm, parameters, trackers = saving.load(path)
        in_fp32 = [node for node in graph.nodes if isinstance(node, Fp32)]
        factory: Fp32Factory | None = None
        if in_fp32:
            if module is None:
                paths = ", ".join(node.path or node.name for node in in_fp32)
                raise ConfigError(f"{path}: {paths} run in FP32; load it with module=…")
            from socflower.precision.int8.fp32_operator import fp32_modules

            factory = fp32_modules(graph, module)
        model = cls(graph, parameters, algorithm=algorithm, settings=settings, fp32_factory=factory)
        model.trackers.restore(trackers)
        return model

    def __getstate__(self) -> dict[str, Any]:
        """Return the state without the engine and its memory, for pickle and copies."""
        names = ("graph", "algorithm", "settings", "parameters", "trackers")
        kept = {name: getattr(self, name) for name in names}
        return {**kept, "fp32": self._fp32_factory, "input_gradient": self._input_gradient}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Start an engine and memory of its own."""
        self._fp32_factory = state.pop("fp32")
        self._input_gradient = state.pop("input_gradient")
        vars(self).update(state)
        self.engine = _engine(self.settings)
        self._clear_memory()

    def _begin(
        self,
        images: FloatArray,
        *,
        takes_input: bool = True,
        share: BatchShare | None = None,
        trackers: ScaleTrackers | None = None,
    ) -> tuple[BoundGraph, StepContext]:
        """Begin a pass over images that are the whole batch, or a share of it; round them if it `takes_input`."""
        # This pass takes the memory of a kept one.
        self._kept = None
        self.regions.release_all()
        share = share or BatchShare(len(images))
        largest = share.most(_int8.max_magnitude(images))
        if not np.isfinite(largest):
            raise ConfigError("images: there is a NaN or an infinity among the pixels")
        if largest and not 2.0**-MAX_EXPONENT < largest < 2.0**MAX_EXPONENT:
            raise ConfigError(
                f"images: the largest magnitude is {largest:.3g}; normalise to about 1"
            )
        batch = len(images)
        program = self._program(batch)
        step = StepContext(
            engine=self.engine,
            algorithm=self.algorithm,
            parameters=self.parameters,
            trackers=trackers or self.trackers,
            share=share,
            largest_input=largest,
            workspace=self._scratch(batch, "workspace", program.workspace_bytes, np.uint8),
            accumulators=self._scratch(batch, "accumulators", program.accumulator_size, np.int32),
        )
        if takes_input:
            program.take_input(images, exponent_for(largest), step.workspace)
        return program, step

    def _program(self, batch: int) -> BoundGraph:
        """Return the graph bound to a batch size, bound at its first use."""
        program = self._programs.get(batch)
        if program is None:
            program = self._programs[batch] = BoundGraph(
                self.graph,
                batch,
                self.engine,
                self.regions,
                batch_blocks=self.settings.batch_blocks or {},
                fp32_factory=self._fp32_factory,
                input_gradient=self._input_gradient,
            )
        return program

    def _scratch(self, batch: int, role: str, size: int, dtype: type) -> Any:
        num_bytes = size * np.dtype(dtype).itemsize
        return self.regions.acquire((batch, "step", role), num_bytes, lambda: np.empty(size, dtype))

    def _checked(self, images: FloatArray, labels: Int32Array) -> tuple[FloatArray, Int32Array]:
        images = self._checked_images(images)
        labels = np.asarray(labels)
        if labels.shape != (len(images),) or labels.dtype.kind not in "iu":
            got = f"{labels.dtype} of shape {labels.shape}"
            raise ConfigError(f"labels: need {len(images)} integers, got {got}")
        least = int(labels.min())
        most = int(labels.max())
        if least < 0 or most >= self.graph.num_classes:
            classes = f"0 to {self.graph.num_classes - 1}"
            raise ConfigError(f"labels: need {classes}, got {least} to {most}")
        return images, np.ascontiguousarray(labels, dtype=np.int32)

    def _checked_images(self, images: FloatArray) -> FloatArray:
        images = np.asarray(images.detach() if hasattr(images, "detach") else images)
        if images.dtype.kind in "iu" and self._reads_numbers:
            images = images.astype(np.float32)
        needed = self.graph.input_shape
        if images.dtype != np.float32 or images.shape[1:] != needed or len(images) == 0:
            raise ConfigError(
                f"images: need float32 of shape (n, {', '.join(map(str, needed))}), n of 1 or more, got "
                f"{images.dtype} of shape {images.shape}"
            )
        return np.ascontiguousarray(images)


def _warn_of_islands(model: Int8Model, asked: Sequence[str]) -> None:
    """Warn of operators that run in FP32 though nobody asked for that."""
    unasked = [
        f"{name} ({operator})" for name, operator in model.islands.items() if name not in asked
    ]
    if unasked:
        warnings.warn(
            f"int8 training has no kernel for {', '.join(unasked)}: this part runs in torch FP32; "
            "profile_operators times it, and unsupported='refuse' refuses it",
            # The caller of `from_module`.
            stacklevel=3,
        )


def split_batches(model: Int8Model, batch: int) -> None:
    """Let convolutions work on fewer images at a time where a profile of this batch size says that it pays (F15)."""
    blocks = best_blocks(profile_batch_blocks(model.graph, batch, model.engine))
    model.settings = replace(model.settings, batch_blocks=blocks)
    model._clear_memory()


def _engine(settings: EngineSettings) -> _int8.Engine:
    """Return an engine; `ConfigError` for a kernel path or cores that this machine does not have."""
    try:
        return _int8.Engine(settings.num_threads, list(settings.cores), settings.kernel)
    except (ValueError, RuntimeError) as error:
        raise ConfigError(str(error)) from None


def round_gradient(
    engine: _int8.Engine,
    graph: Graph,
    gradient: FloatArray,
    out: Int8Array,
) -> int:
    """Round a gradient (batch, c, h, w) to `out` and return its exponent; TrainingFailed if it is not finite."""
    shape = (out.shape[2], *graph.shape_of(graph.output))
    if gradient.shape != shape:
        raise ConfigError(f"backward: need a gradient of shape {shape}, got {gradient.shape}")
    gradient = np.ascontiguousarray(gradient, dtype=np.float32)
    exponent = exponent_within_float32(graph.output, _int8.max_magnitude(gradient))
    _int8.quantise_images(engine, gradient, out, *shape, exponent)
    return exponent


@contextmanager
def _overflow_fails_training() -> Iterator[None]:
    """Raise TrainingFailed for sums that leave int32."""
    try:
        yield
    except OverflowError as error:
        raise TrainingFailed(str(error)) from None


def _classified(real: DoubleArray, labels: Int32Array) -> StepResult:
    """Return loss and accuracy of (n, classes) real logits."""
    return StepResult(
        loss=mean_cross_entropy(real, labels),
        num_correct=int((real.argmax(axis=1) == labels).sum()),
        num_samples=len(labels),
    )


def real_logits(logits: Int8Array, exponent: int, num_classes: int) -> DoubleArray:
    """Return (batch, classes) real logits of a (1, 1, batch, channel stride) tensor."""
    return np.ldexp(logits[0, 0, :, :num_classes].astype(np.float64), exponent)


def mean_cross_entropy(real: DoubleArray, labels: Int32Array) -> float:
    """Return the mean of -log softmax at the label."""
    shifted = real - real.max(axis=1, keepdims=True)
    log_sum = np.log(np.exp(shifted).sum(axis=1))
    return float(np.mean(log_sum - shifted[np.arange(len(labels)), labels]))


def write_logits_gradient(
    rule: BackwardRule,
    share: BatchShare,
    real: DoubleArray,
    logits: Tensor,
    labels: Int32Array,
    num_classes: int,
    out: Int8Array,
) -> int:
    """Write softmax(logits) - one-hot(labels), per sample, as int8 and return its exponent.

    The `integer` rule uses only integer arithmetic (NITI §3.3); `fp32` computes in float64 from the `real` logits and
    rounds to the nearest int8 of the finest exponent, or to int16 where the rule has it.
    """
    if rule.loss == "integer":
        _int8.softmax_gradient(
            logits.data, logits.exponent, labels, out, num_classes, rule.rounding
        )
        return GRADIENT_EXPONENT
    powers = np.exp(real - real.max(axis=1, keepdims=True))
    gradient = powers / powers.sum(axis=1, keepdims=True)
    gradient[np.arange(len(labels)), labels] -= 1.0
    out[...] = 0
    exponent = max(exponent_for(share.most(float(np.abs(gradient).max()))), -MAX_EXPONENT)
    scaled = np.ldexp(gradient, -exponent)
    rounded = np.clip(np.rint(scaled), -127, 127).astype(np.int8)
    out[0, 0, :, :num_classes] = rounded
    logits.gradient_low = None
    if logits.reads_int16 and rule.wide_above is not None:
        # Whole numbers, whose sums over the shares are exact.
        fine = np.rint(np.ldexp(scaled, 16)).astype(np.int64)
        if changes_mean(share, fine, rounded, 16, rule.wide_above):
            logits.gradient_low = np.zeros_like(out)
            left = np.clip(np.rint(256.0 * (scaled - rounded)), -127, 127)
            logits.gradient_low[0, 0, :, :num_classes] = left.astype(np.int8)
    return exponent
