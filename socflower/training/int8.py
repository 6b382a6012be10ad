"""Training in int8 on the CPU's integer kernels, for one device or a whole group."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Literal, TypedDict

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from socflower.errors import ConfigError, require_range
from socflower.model_graph.batch_form import num_samples as num_samples_of
from socflower.model_graph.batch_form import pair_of
from socflower.plain_numbers import plain_numbers
from socflower.precision import NITI, EngineSettings, Int8Model, TrainingAlgorithm
from socflower.precision.int8.batch_share import BatchPeers, gather
from socflower.precision.int8.model import JointStep
from socflower.precision.int8.network import UnsupportedOperator
from socflower.training.batch_statistics import require_batch_statistics
from socflower.training.trainer import (
    Part,
    SessionResult,
    TrainingSpan,
    require_cpu,
    require_trained_parameters,
)
from socflower.wire.saved_state import from_bytes, to_bytes

SCHEDULES = ("cosine", "constant")
_STATE = "int8 trainer state"


class _Settings(TypedDict):
    learning_rate: float
    progress: float
    seed: int | None


@plain_numbers
@dataclass(frozen=True, kw_only=True)
class Int8Trainer:
    """Trains in int8 (Mandheling); the trained model is FP32 with the int8 values.

    `learning_rate` is that of the FP32 parameters: biases and BatchNorm under an integer update, everything under an
    FP32 one. The members of a group share one exponent per tensor and one set of BatchNorm statistics, as if
    maxima and sums were all-reduced: an integer sum over members is exact, so a group's step equals that of one
    device with the whole batch, bit for bit. Parameters that are frozen (`requires_grad` False) keep their
    FP32 values bit for bit. In groups, dropout follows from the training's seed and the step; elsewhere it draws a seed
    per step from torch's global generator.
    """

    arithmetic: ClassVar[str] = "int8"
    algorithm: TrainingAlgorithm = NITI
    learning_rate: float = 0.01
    schedule: str = "cosine"
    settings: EngineSettings = field(default_factory=EngineSettings)
    fp32_operators: Sequence[str] = ()  # paths of modules that run in torch FP32
    unsupported: Literal["refuse", "fp32"] = "refuse"  # how to handle modules without int8 kernels
    device: str = "cpu"  # "auto" is the same

    def __post_init__(self) -> None:
        if self.schedule not in SCHEDULES:
            raise ConfigError(
                f"Int8Trainer: schedule = {self.schedule!r}; use one of {', '.join(SCHEDULES)}"
            )
        require_cpu(self.device, "Int8Trainer")
        object.__setattr__(self, "device", "cpu")
        require_range("Int8Trainer", above=0.0, learning_rate=self.learning_rate)

    def rate(self, progress: float) -> float:
        """Return the learning rate at a fraction of training in [0, 1]."""
        annealed = 0.5 * (1.0 + math.cos(math.pi * progress)) if self.schedule == "cosine" else 1.0
        return self.learning_rate * annealed

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
        if len(input_shape) != 3:
            raise _no_images(input_shape)
        channels, height, width = input_shape
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
            advice = error.remedy(
                "use", "Int8Trainer(fp32_operators={})", "Int8Trainer(unsupported={})"
            )
            raise ConfigError(f"{error.what}; {advice}") from None

    def start(
        self, model: nn.Module, span: TrainingSpan, state: bytes | None = None
    ) -> "Int8Session":
        """Begin, or continue from the state an earlier session returned; see `Trainer.start`."""
        require_trained_parameters(model)
        if span.proximal_mu:
            raise ConfigError(
                f"Int8Trainer: proximal-mu = {span.proximal_mu}, but its integer update has no proximal "
                "term, so that FedProx would be FedAvg: use FedAvg, or FP32Trainer"
            )
        session = Int8Session(self, model, span)
        if state is not None:
            session.restore(state)
        return session


class Int8Session:
    """One model under int8 training; see `TrainingSession` and `JointSession`."""

    def __init__(self, trainer: Int8Trainer, model: nn.Module, span: TrainingSpan) -> None:
        self._trainer, self._module = trainer, model
        self._step, self._total_steps, self._seed = (
            span.first_step,
            max(1, span.total_steps),
            span.seed,
        )
        self._peers: BatchPeers | None = None
        self._image_shape: tuple[int, ...] = ()  # in a ring, known to all of its members
        self._joint: JointStep | None = None
        self._int8: Int8Model | None = (
            None  # built at the first batch, which has the shape of the images
        )
        self._state: bytes | None = None

    def step(self, parts: Sequence[Part]) -> Tensor:
        """Do one step on the members' shares together; see `TrainingSession.step`."""
        pairs = [pair_of(part, "Int8Trainer") for part in parts if num_samples_of(part)]
        images, labels = _arrays(pairs)
        if self._int8 is None:
            self._int8 = self._start(images.shape[1:])
        result = self._int8.train_step(images, labels, **self._settings(self._int8))
        self._step += 1
        return torch.tensor(result.loss)

    def join(self, peers: BatchPeers) -> None:
        """Train as a member of a ring; see `JointSession.join`."""
        self._peers, self._image_shape = peers, ()

    def gradients(self, parts: Sequence[Part], num_samples: int) -> Tensor:
        """Compute this member's share of a step; see `JointSession.gradients`."""
        assert self._peers is not None
        pairs = [pair_of(part, "Int8Trainer") for part in parts if num_samples_of(part)]
        images, labels = (
            _arrays(pairs)
            if pairs
            else (np.zeros((0, *self._image_shape), np.float32), np.zeros(0, int))
        )
        if not self._image_shape:
            self._image_shape = self._common_shape(self._peers, images.shape[1:])
            images = images.reshape(len(images), *self._image_shape)
        if self._int8 is None:
            self._int8 = self._start(self._image_shape)
        self._joint = self._int8.begin_joint_step(
            images, labels, self._peers, **self._settings(self._int8)
        )
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
            return self._state or b""
        self._module.load_state_dict(self._int8.state_dict())
        header = {
            "trackers": self._int8.trackers_to_json(),
            "exponents": self._int8.weight_exponents(),
        }
        return to_bytes(_STATE, header, self._int8.velocities())

    def restore(self, state: bytes) -> None:
        """Restore exponents and momentum from a state."""
        self._state = state

    def _settings(self, model: Int8Model) -> _Settings:
        """Return learning rate, progress and seed of the next step."""
        progress = min(1.0, self._step / self._total_steps)
        seed = None
        if model.draws and self._seed:
            seed = int(
                np.random.SeedSequence([*self._seed, self._step]).generate_state(1, np.uint64)[0]
            )
        elif model.draws:
            seed = int(torch.randint(2**62, ()))
        return {"learning_rate": self._trainer.rate(progress), "progress": progress, "seed": seed}

    @staticmethod
    def _common_shape(peers: BatchPeers, own: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of an image, which a member without samples learns from the others."""
        if own and len(own) != 3:
            raise _no_images(own)
        channels, height, width = gather(peers, own or (0.0, 0.0, 0.0)).max(axis=0)
        return int(channels), int(height), int(width)

    def _start(self, image_shape: Sequence[int]) -> Int8Model:
        header, arrays = from_bytes(_STATE, self._state) if self._state else ({}, {})
        model = self._trainer.model(self._module, image_shape, exponents=header.get("exponents"))
        if header:
            model.restore_trackers(header["trackers"])
            model.restore_velocities(arrays)
        return model


def _arrays(
    pairs: Sequence[tuple[Tensor, Tensor]],
) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.int32]]:
    images = torch.cat([inputs for inputs, _ in pairs]).numpy()
    labels = torch.cat([labels for _, labels in pairs]).numpy().astype(np.int32)
    return np.ascontiguousarray(images, dtype=np.float32), labels


def _no_images(shape: Sequence[int]) -> ConfigError:
    return ConfigError(
        "Int8Trainer: int8 training takes images (n, channels, height, width), got inputs of shape "
        f"{('n', *shape)}; use FP32Trainer"
    )
