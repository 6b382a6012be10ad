"""The common part of both halves of a torch model: layers that are added and removed with the cut, and saving."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from socflower.edgecloud.half_protocols import Labels, Weights
from socflower.edgecloud.runtime.half_optimizer import (
    SEPARATOR,
    HalfOptimizer,
    OptimizerFactory,
    Schedule,
)
from socflower.errors import ConfigError
from socflower.model_graph.batch_form import Batch, output_of
from socflower.model_graph.cut_points import SplitModel
from socflower.model_graph.graph import CAPTURE_LOCK
from socflower.model_graph.parts import random_streams
from socflower.model_graph.tensor_arrays import to_array, to_tensor
from socflower.model_graph.torch_device import on_device
from socflower.training.model_state import frozen_digest, frozen_parameters
from socflower.wire.saved_state import from_bytes, to_bytes

Loss: TypeAlias = Callable[[Any, Any], torch.Tensor]
"""A function of outputs and targets that returns one number, the mean over the batch."""

HalfStep: TypeAlias = Callable[[nn.Module, Any, Any], torch.Tensor]
"""A function of layers, what they take (features, or the model's inputs) and labels that returns the mean loss."""

_STATE = "half of a split model"


@dataclass(frozen=True, kw_only=True, slots=True)
class Passes:
    """How passes and updates are done: see `SplitProgram`."""

    loss: Loss | None = None
    train_step: HalfStep | None = None
    max_grad_norm: float | None = None
    autocast: torch.dtype | None = None

    def loss_of(self, layers: nn.Module, argument: Any, labels: Any) -> torch.Tensor:
        """Return the loss of `train_step`, or that of the layers' outputs."""
        if self.train_step is not None:
            return self.train_step(layers, argument, labels)
        assert self.loss is not None
        return self.loss(output_of(layers, argument), labels)


class TorchHalf:
    """One half of a split model, with the optimiser of its layers.

    It owns the split model and frees the tensors of the other half, which are empty from then on: a thin edge has
    memory for its own layers only. Each half needs its own `SplitModel.copy()`.

    Frozen parameters stay where they are, once `load` was given weights without them: then neither weights nor layers
    that move nor saved states have them, and a half that gains frozen layers copies them from the model that its split
    model is a copy of.
    """

    def __init__(
        self,
        side: Literal["front", "back"],
        split: SplitModel,
        cut: int,
        *,
        optimizer: OptimizerFactory,
        schedule: Schedule,
        seed: int,
        device: torch.device | str,
        passes: Passes,
    ) -> None:
        split.check(cut)
        self._side: Literal["front", "back"] = side
        self._split = split
        self._cut = cut
        self._seed = seed
        self._device = torch.device(device)
        self._passes = passes
        self._optimizer = HalfOptimizer(optimizer, schedule, max_grad_norm=passes.max_grad_norm)
        self._tensors = split.tensors()
        self._frozen = frozenset(frozen_parameters(split.model))
        self._keeps_frozen = False
        if any(tensor.shape != split.specs[name].shape for name, tensor in self._tensors.items()):
            raise ConfigError(
                f"model {split.name}: is another half's already; give each half a copy() of the split "
                "model"
            )
        self._release_tensors(set(self._tensors) - set(self._names(cut)))
        split.model.to(self._device)
        self._tensors = split.tensors()
        self._module: nn.Module | None = None
        self._optimizer.set_weights(self._own_tensors())

    @property
    def cut(self) -> int:
        """Where the model is cut now."""
        return self._cut

    @property
    def split(self) -> SplitModel:
        """The model and its cuts."""
        return self._split

    @property
    def all_layers_cut(self) -> int:
        """The cut after the last layer: all layers are in the front half."""
        return self._split.num_cuts

    @property
    def state_bytes(self) -> float:
        """The bytes of the optimiser's state."""
        return float(sum(array.nbytes for array in self._optimizer.state().values()))

    def export_layers(self, cut: int) -> Weights:
        """Move the cut so that this half loses layers; return their tensors and optimiser state (`name::key`).

        Raises ConfigError for a cut that does not exist or lies in the other half, and while a batch is in flight.
        """
        moving = self._moving(cut, gives=True)
        given = {name: self._array(name) for name in self._sent(moving)} | self._optimizer.state(
            moving
        )
        self._move_to(cut)
        self._release_tensors(set(moving))
        return given

    def import_layers(self, cut: int, weights: Weights) -> None:
        """Move the cut and add the layers that the other half exported.

        Raises ConfigError, with nothing changed, if they do not fit.
        """
        moving = self._moving(cut, gives=False)
        state = {key: array for key, array in weights.items() if SEPARATOR in key}
        self._check_tensors(
            {key: array for key, array in weights.items() if key not in state}, moving
        )
        unknown = [key for key in state if key.partition(SEPARATOR)[0] not in moving]
        if unknown:
            raise ConfigError(
                f"model {self._split.name}: optimiser state {unknown[0]!r} is of no layer that moves "
                f"to cut {cut}"
            )
        self._fill_all(moving, weights)
        self._move_to(cut, state)

    @property
    def keeps_frozen(self) -> bool:
        """Whether its frozen parameters are the model's own, and not sent."""
        return self._keeps_frozen

    def weights(self) -> Weights:
        """Return copies of this half's weights and buffers, by their names in the whole model.

        Frozen parameters are left out if the half was loaded without them.
        """
        return {name: self._array(name) for name in self._sent(self._names(self._cut))}

    def load(self, weights: Weights) -> None:
        """Set this half's weights and buffers, for example to a mean over clients; optimiser state does not change.

        Tensors of the other half are ignored, so that a whole model's weights may be passed. Frozen parameters may be
        left out, all of them. Raises ConfigError, with nothing changed, where a tensor is missing or has another shape.
        """
        own = self._names(self._cut)
        self._check_tensors({name: array for name, array in weights.items() if name in own}, own)
        self._fill_all(own, weights)

    def save(self) -> bytes:
        """Return everything that `restore` needs, without code: weights, buffers, optimiser state, cut.

        Learning rates follow from batch numbers and random numbers from the seed, so neither is saved. Raises
        ConfigError while a batch with a kept graph is in flight.
        """
        header = {
            "side": self._side,
            "fingerprint": self._split.fingerprint(),
            "cut": self._cut,
            "progress": self._progress(),
            "frozen_sha256": self._base_digest if self._keeps_frozen else "",
            "arithmetic": self._arithmetic_state(),
        }
        return to_bytes(
            _STATE,
            header,
            {
                **{f"weight {name}": array for name, array in self.weights().items()},
                **{f"state {key}": array for key, array in self._optimizer.state().items()},
            },
        )

    def restore(self, saved: bytes) -> None:
        """Restore what `save` returned; `ConfigError`, with nothing changed, for another half or model."""
        name = self._split.name
        content, stored = from_bytes(_STATE, saved)
        if (content["side"], content["fingerprint"]) != (self._side, self._split.fingerprint()):
            raise ConfigError(
                f"model {name}: saved is the {content['side']} half of model "
                f"{content['fingerprint'][:12]}, this is the {self._side} half of "
                f"{self._split.fingerprint()[:12]}"
            )
        cut = int(content["cut"])
        self._split.check(cut)
        arrays, state = (
            {
                key.removeprefix(prefix): array
                for key, array in stored.items()
                if key.startswith(prefix)
            }
            for prefix in ("weight ", "state ")
        )
        own = self._names(cut)
        self._check_tensors(arrays, own)
        kept = content.get("frozen_sha256", "")  # not in states of earlier versions
        if kept and kept != self._base_digest:
            raise ConfigError(
                f"model {name}: its frozen parameters are not those that it was saved with; load the "
                "same ones in model_fn, or start a new training"
            )
        self._release_tensors(set(self._tensors) - set(own))
        self._fill_all(own, arrays)
        self._keeps_frozen = bool(kept)
        self._optimizer.set_weights({})  # discards the previous state
        self._move_to(cut, state)
        self._resume(content["progress"])
        self._restore_arithmetic(content.get("arithmetic", {}))

    def _require_idle(self) -> None:
        """Raise ConfigError while a batch is in flight."""

    def _progress(self) -> list[list[int]]:
        """Return the batches in flight, each with the shape of its features."""
        return []

    def _resume(self, progress: Sequence[Sequence[int]]) -> None:
        """Restore what `_progress` returned."""

    def _arithmetic_state(self) -> dict[str, Any]:
        """Return what arithmetic other than floats needs besides tensors and optimiser, as plain values."""
        return {}

    def _restore_arithmetic(self, state: Mapping[str, Any]) -> None:
        """Restore what `_arithmetic_state` returned."""

    def _names(self, cut: int) -> tuple[str, ...]:
        return (
            self._split.front_names(cut) if self._side == "front" else self._split.back_names(cut)
        )

    def _own_tensors(self) -> dict[str, torch.Tensor]:
        return {name: self._tensors[name] for name in self._names(self._cut)}

    def _moving(self, cut: int, *, gives: bool) -> tuple[str, ...]:
        self._split.check(cut)
        self._require_idle()
        shrinks = cut <= self._cut if self._side == "front" else cut >= self._cut
        grows = cut >= self._cut if self._side == "front" else cut <= self._cut
        if not (shrinks if gives else grows):
            raise ConfigError(
                f"model {self._split.name}: the {self._side} half, cut at {self._cut}, cannot "
                f"{'give away' if gives else 'take'} layers by moving to {cut}"
            )
        before, after = set(self._names(self._cut)), set(self._names(cut))
        return tuple(name for name in self._tensors if name in before ^ after)

    def _move_to(self, cut: int, taken: Mapping[str, NDArray[Any]] | None = None) -> None:
        self._cut = cut
        self._module = None
        self._optimizer.set_weights(self._own_tensors(), taken)

    @contextmanager
    def _passing(self, batch: int) -> Iterator[nn.Module]:
        """Yield this half's layers in training mode, with the random streams of a batch."""
        layers = self._layers()
        # In this order: the exclusive holder of the lock forks the generator, and would wait for a half at the lock.
        with (
            CAPTURE_LOCK.shared(),
            random_streams(self._seed, batch) if self._split.random_layers else nullcontext(),
            torch.autocast(self._device.type, self._passes.autocast)
            if self._passes.autocast
            else nullcontext(),
        ):
            yield layers

    def _loss_of(self, batch: int, argument: Batch, labels: Any) -> torch.Tensor:
        """Return the loss of a batch, from what this half's first layer takes and the labels as tensors."""
        with self._passing(batch) as layers:
            loss = self._passes.loss_of(
                layers, on_device(argument, self._device), on_device(labels, self._device)
            )
        require_loss(loss, self._split.name)
        return loss

    def _layers(self) -> nn.Module:
        if self._module is None:
            front = self._side == "front"
            self._module = self._split.front(self._cut) if front else self._split.back(self._cut)
        self._split.set_training_mode()
        return self._module

    def _check_tensors(self, arrays: Weights, names: Sequence[str]) -> None:
        model = self._split.name
        missing, strange = set(names) - set(arrays), set(arrays) - set(names)
        if missing == self._frozen & set(names) and (
            self._split.origin or self._split.graph is None
        ):
            missing = set()
        if missing or strange:
            wrong = (
                f"{min(missing)!r} is missing"
                if missing
                else f"{min(strange)!r} is of other layers"
            )
            raise ConfigError(
                f"model {model}: the {self._side} half needs {len(names)} tensors; {wrong}"
            )
        for name, array in arrays.items():
            form = self._split.specs[name]
            # From an empty array, since only the type is needed.
            dtype = (
                torch.from_numpy(np.empty(0, array.dtype)).dtype
                if array.dtype.kind in "biufc"
                else array.dtype
            )
            if tuple(array.shape) != tuple(form.shape) or dtype != form.dtype:
                raise ConfigError(
                    f"model {model}: {name} is {array.dtype} of shape {tuple(array.shape)}, it should be "
                    f"{str(form.dtype).removeprefix('torch.')} of shape {tuple(form.shape)}"
                )

    @cached_property
    def _base_digest(self) -> str:
        """The digest of the frozen parameters of the model that this half was made of."""
        return frozen_digest((self._split.origin or self._split).model)

    def _sent(self, names: Iterable[str]) -> list[str]:
        return [name for name in names if not (self._keeps_frozen and name in self._frozen)]

    def _fill_all(self, names: Iterable[str], weights: Weights) -> None:
        """Set tensors to `weights`, and frozen parameters that are not among them to those of the model's origin."""
        if frozen := self._frozen & set(names):
            self._keeps_frozen = not frozen <= set(weights)
        base = {} if self._split.origin is None else self._split.origin.tensors()
        for name in names:
            if name in weights:
                self._fill(name, weights[name])
            elif self._tensors[name].shape != self._split.specs[name].shape:
                self._fill(name, to_array(base[name], copy=False))

    def _array(self, name: str) -> NDArray[Any]:
        return to_array(self._tensors[name])

    def _fill(self, name: str, array: NDArray[Any]) -> None:
        tensor, form = self._tensors[name], self._split.specs[name]
        if tensor.shape != form.shape:
            tensor.data = torch.empty_strided(
                form.shape, form.stride(), dtype=form.dtype, device=self._device
            )
        tensor.data.copy_(to_tensor(array, self._device))

    def _release_tensors(self, names: Iterable[str]) -> None:
        for name in names:
            tensor = self._tensors[name]
            tensor.data = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
            tensor.grad = None


def require_loss(loss: object, model: str) -> None:
    """Raise `ConfigError` for a loss that is not one number that depends on the model."""
    if not isinstance(loss, torch.Tensor) or loss.ndim or not loss.requires_grad:
        form = (
            f"a tensor of shape {tuple(loss.shape)}"
            if isinstance(loss, torch.Tensor)
            else type(loss).__name__
        )
        without = "" if getattr(loss, "requires_grad", True) else " without a gradient"
        raise ConfigError(
            f"model {model}: the loss is {form}{without}; it must be one number that depends on the "
            "outputs"
        )


def targets_from(labels: Labels, device: torch.device) -> Any:
    """Return labels as tensors, in the form that they have: int64 for integers, as torch's losses require."""
    if isinstance(labels, Mapping):
        return {key: targets_from(part, device) for key, part in labels.items()}
    if isinstance(labels, tuple | list):
        return type(labels)(targets_from(part, device) for part in labels)
    whole = np.issubdtype(labels.dtype, np.integer)
    return to_tensor(labels.astype(np.int64, copy=False) if whole else labels, device)
