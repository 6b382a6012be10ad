"""Training in int8 on the CPU's integer kernels, for one device or a whole group."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import field
from typing import Annotated, Any, ClassVar, Literal, TypeAlias, TypedDict

import numpy as np
import torch
from pydantic import Field
from torch import Tensor, nn

from socflower.errors import ConfigError
from socflower.field_rules import checked
from socflower.model_graph.batch_form import num_samples as num_samples_of
from socflower.model_graph.batch_form import pair_of
from socflower.model_graph.parts import layer_seed, random_streams
from socflower.precision import REAL_SCALES, EngineSettings, Int8Model, TrainingAlgorithm
from socflower.precision.int8.batch_share import BatchPeers, gather
from socflower.precision.int8.fixed_point import FloatArray, Int32Array
from socflower.precision.int8.model import JointStep, split_batches
from socflower.precision.int8.network import UnsupportedOperator
from socflower.precision.int8.parameters import export_velocities, import_velocities
from socflower.training.batch_statistics import require_batch_statistics
from socflower.training.saved_values import from_bytes, to_bytes
from socflower.training.schedules import RateSchedule
from socflower.training.session import PARAMETERS
from socflower.training.trainer import (
    Part,
    SessionResult,
    TrainingSpan,
    require_cpu,
    require_images,
    require_trained_parameters,
)

MOMENTUM = "momentum_buffer"
"""The key of a weight's momentum in a state, as in that of torch's SGD."""

BuildModel: TypeAlias = Callable[[Mapping[str, int]], Int8Model]
"""A function that returns the int8 model of a module, from earlier exponents of its weights."""


_PROFILED_STEPS = 2000
"""A profile of batch splitting takes about ten steps; it may save some per cent of each step that follows."""


class _Settings(TypedDict):
    learning_rate: float
    progress: float
    seed: int | None


@checked
class Int8Trainer:
    """Trains in int8 (Mandheling); the trained model is FP32 with the int8 values.

    `learning_rate` is that of the FP32 parameters: biases and BatchNorm under an integer update, everything under an
    FP32 one. The members of a group share one exponent per tensor and one set of BatchNorm statistics, as if
    maxima and sums were all-reduced: an integer sum over members is exact, so a group's step equals that of one
    device with the whole batch, bit for bit (F4). Frozen parameters (`requires_grad` False) keep their FP32 values
    bit for bit. In groups, dropout follows from the training's seed and the step; elsewhere each step draws a seed
    from torch's global generator.

    `fp32_operators` are the paths of modules that run in torch FP32; `unsupported` "fp32" adds all modules without
    int8 kernels. `device` is "cpu", or "auto", which means the same.
    """

    arithmetic: ClassVar[str] = "int8"
    algorithm: TrainingAlgorithm = REAL_SCALES
    learning_rate: Annotated[float, Field(gt=0.0)] = 0.01
    schedule: str | RateSchedule = "cosine"
    settings: EngineSettings = field(default_factory=EngineSettings)
    fp32_operators: Sequence[str] = ()
    unsupported: Literal["refuse", "fp32"] = "fp32"
    device: str = "cpu"

    def __post_init__(self) -> None:
        require_cpu(self.device, "Int8Trainer")
        object.__setattr__(self, "device", "cpu")

    def check(self) -> None:
        """Raise `ConfigError` for an unknown schedule, or one that needs more than its name."""
        if isinstance(self.schedule, str) and self.schedule not in ("cosine", "constant"):
            raise ConfigError(
                f"schedule = {self.schedule!r}: use cosine, constant, or a RateSchedule"
            )

    def rate(self, progress: float) -> float:
        """Return the learning rate at a fraction of training in [0, 1]."""
        return self.learning_rate * self._rates.at(progress)

    @property
    def _rates(self) -> RateSchedule:
        schedule = self.schedule
        return RateSchedule(kind=schedule) if isinstance(schedule, str) else schedule

    def model(
        self,
        module: nn.Module,
        input_shape: Sequence[int],
        *,
        exponents: Mapping[str, int] | None = None,
        head: bool = True,
    ) -> Int8Model:
        """Return the int8 model of a module for inputs (n, *input_shape); see `Int8Model.from_module`.

        Raises ConfigError for inputs other than images, for operators that int8 does not have, and for a BatchNorm with
        frozen statistics.
        """
        require_batch_statistics(module, "Int8Trainer")
        channels, height, width = require_images(input_shape, "Int8Trainer")
        try:
            return Int8Model.from_module(
                module,
                input_shape=(channels, height, width),
                algorithm=self.algorithm,
                settings=self.settings,
                fp32_operators=self.fp32_operators,
                unsupported=self.unsupported,
                exponents=exponents,
                head=head,
            )
        except UnsupportedOperator as error:
            raise error.advising("Int8Trainer({})") from None

    def start(
        self, model: nn.Module, span: TrainingSpan, state: bytes | None = None
    ) -> "Int8Session":
        """Begin, or continue from the state an earlier session returned; see `Trainer.start`."""
        require_trained_parameters(model)
        if span.proximal_mu:
            raise ConfigError(
                f"Int8Trainer: proximal-mu = {span.proximal_mu}, but its integer update has no proximal "
                "term; use FedAvg, or FP32Trainer"
            )
        session = Int8Session(self, model, span)
        if state is not None:
            session.restore(state)
        return session


class Int8Session:
    """One model under int8 training; see `TrainingSession` and `JointSession`."""

    def __init__(self, trainer: Int8Trainer, model: nn.Module, span: TrainingSpan) -> None:
        self._trainer = trainer
        self._module = model
        self._step, self._total_steps = span.first_step, max(1, span.total_steps)
        self._is_long = span.total_steps - span.first_step >= _PROFILED_STEPS
        self._seed = span.seed
        self._peers: BatchPeers | None = None
        # In a ring, known to all of its members, also to one without samples.
        self._image_shape: tuple[int, ...] = ()
        self._joint: JointStep | None = None
        # Built at the first batch, which has the shape of the images.
        self._int8: Int8Model | None = None
        # From which it is built.
        self._state: dict[str, Any] = {}

    def step(self, parts: Sequence[Part]) -> Tensor:
        """Do one step on the members' shares together; see `TrainingSession.step`."""
        pairs = [pair_of(part, "Int8Trainer") for part in parts if num_samples_of(part)]
        images, labels = _arrays(pairs)
        if self._int8 is None:
            self._int8 = self._start(images.shape[1:])
            if self._trainer.settings.batch_blocks is None and self._is_long:
                split_batches(self._int8, len(images))
        result = self._int8.train_step(images, labels, **self._settings(self._int8))
        self._step += 1
        return torch.tensor(result.loss)

    def join(self, peers: BatchPeers) -> None:
        """Train as a member of a ring; see `JointSession.join`."""
        self._peers = peers
        self._image_shape = ()

    def gradients(self, parts: Sequence[Part], num_samples: int) -> Tensor:
        """Compute this member's share of a step; see `JointSession.gradients`."""
        assert self._peers is not None
        pairs = [pair_of(part, "Int8Trainer") for part in parts if num_samples_of(part)]
        images = np.zeros((0, *self._image_shape), np.float32)
        labels = np.zeros(0, np.int32)
        if pairs:
            images, labels = _arrays(pairs)
        if not self._image_shape:
            self._image_shape = _common_shape(self._peers, images.shape[1:])
            images = images.reshape(len(images), *self._image_shape)
        if self._int8 is None:
            self._int8 = self._start(self._image_shape)
        settings = self._settings(self._int8)
        self._joint = self._int8.begin_joint_step(images, labels, self._peers, **settings)
        return torch.tensor(self._joint.loss)

    def exchange(self) -> None:
        """Sum the gradients over the ring; see `JointSession.exchange`."""
        assert self._joint is not None
        self._joint.exchange()

    def apply(self) -> None:
        """Update the parameters; see `JointSession.apply`."""
        assert self._joint is not None
        self._joint.apply()
        self._joint = None
        self._step += 1

    def finish(self) -> SessionResult:
        """Write the trained values to the module and return the state for the next session."""
        return SessionResult(state=self.state())

    def state(self) -> bytes:
        """Write the trained values to the module and return the state; see `JointSession.state`."""
        if self._int8 is None:
            return to_bytes(self._state) if self._state else b""
        # Frozen weights keep the values that the module has.
        self._module.load_state_dict(self._int8.state_dict(), strict=False)
        return to_bytes(_state_of(self._int8))

    def restore(self, state: bytes) -> None:
        """Restore exponents and momentum from a state."""
        self._state = from_bytes(state) if state else {}

    def _settings(self, model: Int8Model) -> _Settings:
        """Return learning rate, progress and seed of the next step."""
        progress = min(1.0, self._step / self._total_steps)
        seed = None
        if model.graph.draws and self._seed:
            sequence = np.random.SeedSequence([*self._seed, self._step])
            seed = int(sequence.generate_state(1, np.uint64)[0])
        elif model.graph.draws:
            seed = int(torch.randint(2**62, ()))
        return {"learning_rate": self._trainer.rate(progress), "progress": progress, "seed": seed}

    def _start(self, image_shape: Sequence[int]) -> Int8Model:
        """Build the model, and restore the state if there is one."""
        return _built(
            lambda exponents: self._trainer.model(
                self._module, image_shape, exponents=exponents or None
            ),
            self._state,
        )


def _built(build: BuildModel, state: Mapping[str, Any]) -> Int8Model:
    """Return a model with the part of a state that belongs to its layers."""
    model = build(state.get("exponents", {}))
    known = {node.name for node in model.graph.nodes}
    model.parameters.stalls.restore(state.get("stalls", ()))
    model.trackers.restore([entry for entry in state.get("trackers", ()) if entry[0] in known])
    velocities = {
        name: own[MOMENTUM].numpy()
        for name, own in state.get(PARAMETERS, {}).items()
        if MOMENTUM in own
    }
    import_velocities(model.graph, model.parameters, velocities)
    return model


def _state_of(model: Int8Model) -> dict[str, Any]:
    """Return the exponents, their trackers, the momentum of FP32 updates, and for how long nothing has changed."""
    velocities = export_velocities(model.graph, model.parameters)
    return {
        PARAMETERS: {name: {MOMENTUM: torch.from_numpy(own)} for name, own in velocities.items()},
        "exponents": dict(model.parameters.exponents),
        "trackers": model.trackers.to_json(),
        "stalls": model.parameters.stalls.to_json(),
    }


class Int8PartSession:
    """A part of a model under int8 training, or a whole one without a group; see `Session`.

    Inputs of a pass are images, or images and labels; then the part ends in logits, and `forward` does the whole step.
    Otherwise `backward` does: the engine updates weights as it computes their gradients. It has memory for one pass.

    The model is built by `build` at its first use, and again after `rebuild`, from the module's present tensors.
    `progress(number)` in [0, 1] is the fraction of training done before a batch. With `draws`, operators that run in
    torch draw from the random stream of a pass.
    """

    def __init__(
        self,
        trainer: Int8Trainer,
        build: BuildModel,
        *,
        progress: Callable[[int], float],
        output_shape: Sequence[int],
        seed: int,
        draws: bool,
    ) -> None:
        self._trainer, self._build, self._progress = trainer, build, progress
        self._output_shape, self._seed, self._draws = tuple(output_shape), seed, draws
        self._model: Int8Model | None = None
        self._state: dict[str, Any] = {}
        self._kept: int | None = None
        self._repeats = False
        # Of the last outputs, which are its multiples.
        self.quantum: float | None = None
        # Whether the model has trained since its values were last read.
        self.is_newer = False

    @property
    def model(self) -> Int8Model:
        """The int8 model of the present layers and tensors."""
        if self._model is None:
            self._model = _built(self._build, self._state)
        return self._model

    def forward(
        self, number: int, *inputs: Any, keep: bool = True, stream: int | None = None
    ) -> tuple[Tensor, ...]:
        """Run a pass; exponents are searched, unless it repeats an earlier one (`repeating`)."""
        images, *labels = inputs
        stream = number if stream is None else stream
        seed = layer_seed(self._seed, stream, 0) >> 1
        self._kept = None
        # A pass changes the running statistics.
        self.is_newer = True
        with random_streams(self._seed, stream) if self._draws else nullcontext():
            if labels:
                return (self._step_on(number, images, labels[0], seed),)
            real, self.quantum = self.model.forward(
                _images(images), seed=seed, keep=keep, replay=self._repeats
            )
        self._kept = number if keep else None
        return (torch.from_numpy(real).reshape(len(real), *self._output_shape),)

    def _step_on(self, number: int, images: Tensor, labels: Tensor, seed: int) -> Tensor:
        progress = self._progress(number)
        result = self.model.train_step(
            _images(images),
            labels.numpy(),
            learning_rate=self._trainer.rate(progress),
            progress=progress,
            seed=seed,
        )
        return torch.tensor(result.loss, dtype=torch.float64)

    def backward(
        self, number: int, gradients: Sequence[Tensor | None] | None = None
    ) -> tuple[Tensor | None, ...]:
        """Update the weights by the gradient of the outputs, rounded to int8; the inputs get none."""
        if gradients is None:
            # A pass with labels has done the step.
            return (None, None)
        assert self._kept == number and gradients[0] is not None
        self._kept = None
        gradient, progress, graph = gradients[0], self._progress(number), self.model.graph
        self.model.backward(
            gradient.numpy().reshape(len(gradient), *graph.shape_of(graph.output)),
            learning_rate=self._trainer.rate(progress),
            progress=progress,
        )
        self.is_newer = True
        return (None,)

    def begin(self) -> None:
        """Do nothing: the engine keeps no gradients."""

    def step(self, number: int = 0) -> None:
        """Do nothing: the weights are updated by `backward`."""

    def keeps(self, number: int) -> bool:
        """Return whether the engine still has the memory of a pass; see `Session.keeps`."""
        return self._kept == number

    def discard(self, number: int) -> None:
        """Leave a pass without its backward pass; see `Session.discard`."""
        if self._kept == number:
            self._kept = None

    @contextmanager
    def repeating(self) -> Iterator[None]:
        """Context for passes whose batch has been seen: they change neither statistics nor exponents."""
        self._repeats = True
        try:
            yield
        finally:
            self._repeats = False

    def state(self) -> dict[str, Any]:
        """Return exponents, trackers and momentum; see `Session.state`."""
        return self._state if self._model is None else _state_of(self._model)

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore a state, for the module's present tensors."""
        self._state, self._model, self._kept = dict(state), None, None

    def rebuild(self) -> None:
        """Build the model again at its next use, with the present state."""
        self.restore(self.state())


def _arrays(
    pairs: Sequence[tuple[Tensor, Tensor]],
) -> tuple[FloatArray, Int32Array]:
    """Return the images and labels of all pairs together."""
    labels = torch.cat([labels for _, labels in pairs]).numpy()
    return _images(torch.cat([inputs for inputs, _ in pairs])), labels.astype(np.int32)


def _images(inputs: Tensor) -> FloatArray:
    return np.ascontiguousarray(inputs.numpy(), dtype=np.float32)


def _common_shape(peers: BatchPeers, own: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape of an image, which a member without samples learns from the others."""
    if own:
        require_images(own, "Int8Trainer")
    channels, height, width = gather(peers, own or (0.0, 0.0, 0.0)).max(axis=0)
    return int(channels), int(height), int(width)
