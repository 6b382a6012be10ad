"""What mixed-precision training needs of an int8 accelerator: a vendor's NPU runtime implements this and no more."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from socflower.precision.int8_model import StepResult

if TYPE_CHECKING:
    import torch

FloatArray = npt.NDArray[np.float32]
Arrays = Mapping[str, npt.NDArray[Any]]

_STATISTICS = ("running_mean", "running_var", "num_batches_tracked")


class Int8Backend(ABC):
    """An accelerator that trains one network in int8, one batch at a time.

    Life: `build` once; then, for every batch, `load_weights`, `train_step` and `pseudo_gradient`. Arrays go
    by the names and shapes of the torch module's state_dict; they may lie in memory in any order and must not be
    kept. Any exception drops the backend until the next round, and so do a loss, gradients and running statistics that
    are not finite; logits that are not finite count as no confidence at all.
    """

    @property
    @abstractmethod
    def name(self) -> str:
        """What runs, for results: "CPU int8, avx2", "Hexagon V66"."""

    @abstractmethod
    def build(self, module: torch.nn.Module, input_shape: tuple[int, int, int]) -> None:
        """Make the network ready for (n, *input_shape) images. Raises ConfigError on what int8 cannot run."""

    @abstractmethod
    def load_weights(self, weights: Arrays, *, seed: int) -> None:
        """Take over weights and, where they are given, running statistics.

        They are rounded up or down at random so that their expectation is exact (F12); equal seeds round equally.
        """

    @abstractmethod
    def train_step(self, images: FloatArray, labels: npt.NDArray[np.int32], *, learning_rate: float,
                   progress: float) -> StepResult:
        """Train on a batch of any size; `progress` in [0, 1] is the fraction of training done."""

    @abstractmethod
    def weights(self) -> dict[str, npt.NDArray[Any]]:
        """Return the weights as they are now, with running statistics."""

    @abstractmethod
    def predict(self, images: FloatArray) -> npt.NDArray[np.float64]:
        """Return (n, classes) logits of the loaded weights, with running statistics."""

    def pseudo_gradient(self, loaded: Arrays, *, learning_rate: float) -> Mapping[str, FloatArray]:
        """Return (loaded - weights now) / learning_rate of every trained parameter: what plain SGD went along.

        The arrays may be overwritten by the next `train_step`. Backends that hold the gradient override this. What is
        said of frozen parameters is not looked at.
        """
        now = self.weights()
        scale = np.float32(1.0 / learning_rate)
        return {
            name: scale * (np.asarray(loaded[name], dtype=np.float32) - np.asarray(value, dtype=np.float32))
            for name, value in now.items()
            if not name.endswith(_STATISTICS)
        }

    @property
    def hands_out_gradients(self) -> bool:
        """Whether momentum may add up what `pseudo_gradient` returns; not where it is mostly rounding noise."""
        return True

    @property
    def draws(self) -> bool:
        """Whether `train_step` draws random numbers of its own; then `draw_from` is called before each."""
        return False

    def draw_from(self, seed: int) -> None:
        """Take `seed` (0 to 2^62) as what the random numbers of the next `train_step` follow from."""
        return

    def samples_per_s(self, batch_size: int) -> float | None:
        """Return the training throughput where it is known beforehand; None (the default) has it measured."""
        return None

    def energy_j(self) -> float | None:
        """Return the joules drawn so far, or None (the default) where the accelerator does not tell.

        What a session drew goes into the reply as `npu-energy-j`.
        """
        return None
