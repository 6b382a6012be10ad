"""The interface of an int8 accelerator in mixed-precision training, and a CPU core in place of the NPU.

A vendor's NPU runtime implements `Int8Backend` and no more; `NativeInt8Backend` runs this package's integer kernels.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Literal

import numpy as np

from socflower.errors import ConfigError
from socflower.precision.algorithm import (
    HANDED_OUT_GRADIENTS,
    IntegerUpdate,
    OutsideUpdate,
    TrainingAlgorithm,
)
from socflower.precision.int8.fixed_point import AnyArray, DoubleArray, FloatArray, Int32Array
from socflower.precision.int8.model import EngineSettings, Int8Model, StepResult
from socflower.precision.int8.network import UnsupportedOperator
from socflower.precision.int8.parameters import start_gradients, take_weights

if TYPE_CHECKING:
    import torch

Arrays = Mapping[str, AnyArray]

_STATISTICS = ("running_mean", "running_var", "num_batches_tracked")


class Int8Backend(ABC):
    """An accelerator that trains one network in int8, one batch at a time.

    Call `build` once, then `load_weights`, `train_step` and `pseudo_gradient` for every batch. Arrays have the names
    and shapes of the torch module's state_dict. They may have any memory order; do not keep references to them. After
    any exception, and after a loss, gradient or running statistic that is not finite, the backend is not used until the
    next round. Logits that are not finite count as a confidence of 0.
    """

    @property
    @abstractmethod
    def name(self) -> str:
        """Name of the backend in results: "CPU int8, avx2", "Hexagon V66"."""

    @abstractmethod
    def build(self, module: torch.nn.Module, input_shape: tuple[int, int, int]) -> None:
        """Prepare the network for (n, *input_shape) images. Raises ConfigError on operators that int8 cannot run."""

    @abstractmethod
    def load_weights(self, weights: Arrays, *, seed: int) -> None:
        """Load weights, and running statistics if `weights` has them.

        Weights are rounded up or down at random so that their expectation is exact (F12); equal seeds round equally.
        """

    @abstractmethod
    def train_step(
        self,
        images: FloatArray,
        labels: Int32Array,
        *,
        learning_rate: float,
        progress: float,
    ) -> StepResult:
        """Train on a batch of any size; `progress` in [0, 1] is the fraction of training done."""

    @abstractmethod
    def weights(self) -> dict[str, AnyArray]:
        """Return the current weights and running statistics."""

    @abstractmethod
    def predict(self, images: FloatArray) -> DoubleArray:
        """Return (n, classes) logits of the loaded weights, with running statistics."""

    def pseudo_gradient(self, loaded: Arrays, *, learning_rate: float) -> Mapping[str, FloatArray]:
        """Return (loaded - current weights) / learning_rate of every trained parameter: the gradient of plain SGD.

        The arrays may be overwritten by the next `train_step`. Backends that hold the gradient override this. The
        values of frozen parameters are ignored.
        """
        scale = np.float32(1.0 / learning_rate)
        gradients = {}
        for name, value in self.weights().items():
            if not name.endswith(_STATISTICS):
                before = np.asarray(loaded[name], dtype=np.float32)
                gradients[name] = scale * (before - np.asarray(value, dtype=np.float32))
        return gradients

    @property
    def hands_out_gradients(self) -> bool:
        """Whether momentum may accumulate the `pseudo_gradient`; False if it is mostly rounding noise."""
        return True

    @property
    def updates_weights(self) -> bool:
        """Whether `train_step` changes the weights, as `merge` "weights" needs; False if it computes gradients only."""
        return True

    @property
    def draws(self) -> bool:
        """Whether `train_step` draws random numbers; if so, `draw_from` is called before each step."""
        return False

    def draw_from(self, seed: int) -> None:
        """Set `seed` (0 to 2^62) for the random numbers of the next `train_step`."""
        return

    def samples_per_s(self, batch_size: int) -> float | None:
        """Return the training throughput if it is known in advance, or None (the default) to have it measured."""
        return None

    def energy_j(self) -> float | None:
        """Return the joules drawn so far, or None (the default) if the accelerator does not report it.

        The reply holds the energy of a session as `npu-energy-j`.
        """
        return None


class NativeInt8Backend(Int8Backend):
    """Int8 training on the CPU.

    By default `pseudo_gradient` is the gradient computed in int8 arithmetic. With NITI the backend makes NITI's
    integer step on the rounded weights, and `pseudo_gradient` is the difference, rounding noise included: exactly the
    merge of SoCFlow+. `fp32_operators` and `unsupported` are those of `Int8Model.from_module`.
    """

    def __init__(
        self,
        algorithm: TrainingAlgorithm = HANDED_OUT_GRADIENTS,
        settings: EngineSettings | None = None,
        *,
        fp32_operators: Sequence[str] = (),
        unsupported: Literal["refuse", "fp32"] = "fp32",
    ) -> None:
        if not isinstance(algorithm.update, OutsideUpdate | IntegerUpdate):
            raise ConfigError(
                f"mixed precision: {algorithm.name} has masters of its own; use niti or the default"
            )
        self._algorithm, self._settings = algorithm, settings or EngineSettings()
        self._fp32_operators: Sequence[str] = fp32_operators
        self._unsupported: Literal["refuse", "fp32"] = unsupported
        self._draw = 0
        self._model: Int8Model | None = None
        self._gradients: dict[str, FloatArray] = {}
        self._loaded_seed: int | None = None

    @property
    def name(self) -> str:
        """Name of the kernel path in use."""
        return f"CPU int8, {self._built.engine.kernel}" if self._model else "CPU int8"

    @property
    def _built(self) -> Int8Model:
        if self._model is None:
            raise ConfigError("int8 backend: call build before anything else")
        return self._model

    @property
    def hands_out_gradients(self) -> bool:
        """False with NITI: the change of a weight is a whole number of quanta."""
        return isinstance(self._algorithm.update, OutsideUpdate)

    @property
    def updates_weights(self) -> bool:
        """True with NITI; else an outside trainer holds the weights."""
        return not self.hands_out_gradients

    @property
    def draws(self) -> bool:
        """True if the network has dropout."""
        return self._built.graph.draws

    def draw_from(self, seed: int) -> None:
        """Set the seed of the next step's dropout masks; see `Int8Backend.draw_from`."""
        self._draw = seed

    def build(self, module: torch.nn.Module, input_shape: tuple[int, int, int]) -> None:
        """Capture the module; see `Int8Backend.build`."""
        try:
            self._model = Int8Model.from_module(
                module,
                input_shape=input_shape,
                algorithm=self._algorithm,
                settings=self._settings,
                fp32_operators=self._fp32_operators,
                unsupported=self._unsupported,
            )
        except UnsupportedOperator as error:
            raise error.advising(
                "MixedPrecisionTrainer(backend=partial(NativeInt8Backend, {}))"
            ) from None
        self._loaded_seed = None
        if isinstance(self._algorithm.update, OutsideUpdate):
            self._gradients = start_gradients(self._model.graph, self._model.parameters)

    def load_weights(self, weights: Arrays, *, seed: int) -> None:
        """Round the weights; skip this if they were loaded with the same seed and no step has changed them."""
        model = self._built
        if seed == self._loaded_seed and self._gradients:
            return
        # If loading fails, some weights are new and some are old.
        self._loaded_seed = None
        take_weights(model.graph, model.parameters, model.engine, weights, seed)
        self._loaded_seed = seed

    def train_step(
        self,
        images: FloatArray,
        labels: Int32Array,
        *,
        learning_rate: float,
        progress: float,
    ) -> StepResult:
        """Do one step; see `Int8Backend.train_step`."""
        # Returned gradients are means over the batch, with factor 1; an integer step has bits, not a rate.
        rate = 1.0 if self._gradients else learning_rate
        return self._built.train_step(
            images, labels, learning_rate=rate, progress=progress, seed=self._draw
        )

    def weights(self) -> dict[str, AnyArray]:
        """Return the int8 weights as float32; under an outside update these are the loaded ones."""
        return self._built.arrays()

    def predict(self, images: FloatArray) -> DoubleArray:
        """Return logits; see `Int8Backend.predict`."""
        return self._built.predict(images)

    def pseudo_gradient(self, loaded: Arrays, *, learning_rate: float) -> Mapping[str, FloatArray]:
        """Return the gradient itself if the engine computes it; see `Int8Backend.pseudo_gradient`."""
        return self._gradients or super().pseudo_gradient(loaded, learning_rate=learning_rate)
