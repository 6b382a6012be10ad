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
# Prefixes of names of saved arrays.
_WEIGHT = "weight "
_OF_OPTIMIZER = "state "


@dataclass(frozen=True, kw_only=True, slots=True)
class Passes:
    """How passes and updates are done: see `SplitProgram`."""

    loss: Loss | None = None
    train_step: HalfStep | None = None
    max_grad_norm: float | None = None
    autocast: torch.dtype | None = None

    def loss_of(
        self,
        layers: nn.Module,
        argument: Any,
        labels: Any,
    ) -> torch.Tensor:
        """Return the loss of `train_step`, or that of the layers' outputs."""
        if self.train_step is not None:
            return self.train_step(layers, argument, labels)
        assert self.loss is not None
        return self.loss(output_of(layers, argument), labels)


class TorchHalf:
    """One half of a split model, with the optimiser of its layers.

    It owns the split model and frees the tensors of the other half, which are empty from then on: a thin edge has
    memory for its own layers only. Each half needs its own `SplitModel.copy()`.

    Once `load` was given weights without the frozen parameters, `keeps_frozen` is set and these stay in place: weights,
    layers that move and saved states leave them out, and a half that gains frozen layers copies them from the original
    of its split model.
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
        self.split = split
        self._cut = cut
        self._seed = seed
        self._passes = passes
        self._device = torch.device(device)
        self._optimizer = HalfOptimizer(
            optimizer,
            schedule,
            max_grad_norm=passes.max_grad_norm,
        )
        self._tensors = split.tensors()
        self._frozen = frozenset(frozen_parameters(split.model))
        self.keeps_frozen = False
        if any(tensor.shape != split.specs[name].shape for name, tensor in self._tensors.items()):
            raise self._error("belongs to another half; give each half a copy()")
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
    def all_layers_cut(self) -> int:
        """The cut after the last layer: all layers are in the front half."""
        return self.split.num_cuts

    @property
    def state_bytes(self) -> float:
        """The bytes of the optimiser's state."""
        return float(sum(array.nbytes for array in self._optimizer.state().values()))

    def export_layers(self, cut: int) -> Weights:
        """Move the cut so that this half loses layers; return their tensors and optimiser state (`name::key`).

        Raises `ConfigError` for a cut that does not exist or lies in the other half, and while a batch is in flight.
        """
        moving = self._moving(cut, gives=True)
        given = {name: self._array(name) for name in self._sent(moving)}
        given |= self._optimizer.state(moving)
        self._move_to(cut)
        self._release_tensors(set(moving))
        return given

    def import_layers(self, cut: int, weights: Weights) -> None:
        """Move the cut and add the layers that the other half exported.

        Raises `ConfigError`, with nothing changed, if they do not fit.
        """
        moving = self._moving(cut, gives=False)
        state = {key: array for key, array in weights.items() if SEPARATOR in key}
        tensors = {key: array for key, array in weights.items() if key not in state}
        self._check_tensors(tensors, moving)
        for key in state:
            if key.partition(SEPARATOR)[0] not in moving:
                raise self._error(f"no layer that moves to cut {cut} has optimiser state {key!r}")
        self._fill_all(moving, weights)
        self._move_to(cut, state)

    def weights(self) -> Weights:
        """Return copies of this half's weights and buffers, by their names in the whole model.

        Frozen parameters are left out if the half was loaded without them.
        """
        return {name: self._array(name) for name in self._sent(self._names(self._cut))}

    def load(self, weights: Weights) -> None:
        """Set this half's weights and buffers, for example to a mean over clients; optimiser state does not change.

        Tensors of the other half are ignored, so that a whole model's weights may be passed. All frozen parameters may
        be left out. Raises `ConfigError`, with nothing changed, if a tensor is missing or has another shape.
        """
        own = self._names(self._cut)
        self._check_tensors({name: array for name, array in weights.items() if name in own}, own)
        self._fill_all(own, weights)

    def save(self) -> bytes:
        """Return everything that `restore` needs, without code: weights, buffers, optimiser state, cut.

        Learning rates follow from batch numbers and random numbers from the seed, so neither is saved. Raises
        `ConfigError` while a batch with a kept graph is in flight.
        """
        header = {
            "side": self._side,
            "fingerprint": self.split.fingerprint(),
            "cut": self._cut,
            "progress": self._progress(),
            "frozen_sha256": self._base_digest if self.keeps_frozen else "",
            "arithmetic": self._arithmetic_state(),
        }
        arrays = {f"{_WEIGHT}{name}": array for name, array in self.weights().items()}
        arrays |= {f"{_OF_OPTIMIZER}{key}": array for key, array in self._optimizer.state().items()}
        return to_bytes(_STATE, header, arrays)

    def restore(self, saved: bytes) -> None:
        """Restore what `save` returned; `ConfigError`, with nothing changed, for another half or model."""
        header, stored = from_bytes(_STATE, saved)
        if (header["side"], header["fingerprint"]) != (self._side, self.split.fingerprint()):
            saved_of = f"the {header['side']} half of model {header['fingerprint'][:12]}"
            own = f"the {self._side} half of {self.split.fingerprint()[:12]}"
            raise self._error(f"saved is {saved_of}, this is {own}")
        cut = int(header["cut"])
        self.split.check(cut)
        arrays, state = (_without(prefix, stored) for prefix in (_WEIGHT, _OF_OPTIMIZER))
        own_names = self._names(cut)
        self._check_tensors(arrays, own_names)
        if header["frozen_sha256"] not in ("", self._base_digest):
            raise self._error(
                "its frozen parameters are not those it was saved with; load the same ones in model_fn"
            )
        self._release_tensors(set(self._tensors) - set(own_names))
        self._fill_all(own_names, arrays)
        self.keeps_frozen = bool(header["frozen_sha256"])
        # Discards the optimiser's previous state.
        self._optimizer.set_weights({})
        self._move_to(cut, state)
        self._resume(header["progress"])
        self._restore_arithmetic(header["arithmetic"])

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
        return self.split.front_names(cut) if self._side == "front" else self.split.back_names(cut)

    def _own_tensors(self) -> dict[str, torch.Tensor]:
        return {name: self._tensors[name] for name in self._names(self._cut)}

    def _moving(self, cut: int, *, gives: bool) -> tuple[str, ...]:
        self.split.check(cut)
        self._require_idle()
        towards_front = cut <= self._cut if gives else cut >= self._cut
        towards_back = cut >= self._cut if gives else cut <= self._cut
        if not (towards_front if self._side == "front" else towards_back):
            verb = "export" if gives else "import"
            raise self._error(
                f"the {self._side} half, cut at {self._cut}, cannot {verb} layers by moving to {cut}"
            )
        changed = set(self._names(self._cut)) ^ set(self._names(cut))
        return tuple(name for name in self._tensors if name in changed)

    def _move_to(self, cut: int, taken: Mapping[str, NDArray[Any]] | None = None) -> None:
        self._cut = cut
        self._module = None
        self._optimizer.set_weights(self._own_tensors(), taken)

    @contextmanager
    def _passing(self, batch: int) -> Iterator[nn.Module]:
        """Yield this half's layers in training mode, with the random streams of a batch."""
        layers = self._layers()
        autocast = self._passes.autocast
        draws = random_streams(self._seed, batch) if self.split.random_layers else nullcontext()
        narrow = torch.autocast(self._device.type, autocast) if autocast else nullcontext()
        # The lock comes first: its exclusive holder forks the generator, and would wait for a half that waits for it.
        with CAPTURE_LOCK.shared(), draws, narrow:
            yield layers

    def _loss_of(self, batch: int, argument: Batch, labels: Any) -> torch.Tensor:
        """Return the loss of a batch, from the argument of this half's first layer and the labels as tensors."""
        with self._passing(batch) as layers:
            taken = on_device(argument, self._device)
            targets = on_device(labels, self._device)
            loss = self._passes.loss_of(layers, taken, targets)
        require_loss(loss, self.split.name)
        return loss

    def _layers(self) -> nn.Module:
        if self._module is None:
            made = self.split.front if self._side == "front" else self.split.back
            self._module = made(self._cut)
        self.split.set_training_mode()
        return self._module

    def _check_tensors(self, arrays: Weights, names: Sequence[str]) -> None:
        missing = set(names) - set(arrays)
        strange = set(arrays) - set(names)
        has_base = self.split.origin is not None or self.split.graph is None
        if has_base and missing == self._frozen & set(names):
            missing = set()
        if missing or strange:
            wrong = f"{min(missing | strange)!r} is {'missing' if missing else 'of other layers'}"
            raise self._error(f"the {self._side} half needs {len(names)} tensors; {wrong}")
        for name, array in arrays.items():
            wanted = self.split.specs[name]
            shape = tuple(wanted.shape)
            dtype = str(wanted.dtype).removeprefix("torch.")
            if (tuple(array.shape), str(array.dtype)) != (shape, dtype):
                raise self._error(
                    f"{name} is {array.dtype} of shape {tuple(array.shape)}, not {dtype} of shape {shape}"
                )

    def _error(self, text: str) -> ConfigError:
        return ConfigError(f"model {self.split.name}: {text}")

    @cached_property
    def _base_digest(self) -> str:
        """The digest of the frozen parameters of the model from which this half was made."""
        return frozen_digest((self.split.origin or self.split).model)

    def _sent(self, names: Iterable[str]) -> list[str]:
        kept = self._frozen if self.keeps_frozen else frozenset()
        return [name for name in names if name not in kept]

    def _fill_all(self, names: Iterable[str], weights: Weights) -> None:
        """Set tensors to `weights`; frozen parameters that are not among them to those of the model's origin."""
        if frozen := self._frozen & set(names):
            self.keeps_frozen = not frozen <= set(weights)
        base = {} if self.split.origin is None else self.split.origin.tensors()
        for name in names:
            if name in weights:
                self._fill(name, weights[name])
            elif self._tensors[name].shape != self.split.specs[name].shape:
                self._fill(name, to_array(base[name], copy=False))

    def _array(self, name: str) -> NDArray[Any]:
        return to_array(self._tensors[name])

    def _fill(self, name: str, array: NDArray[Any]) -> None:
        tensor = self._tensors[name]
        form = self.split.specs[name]
        if tensor.shape != form.shape:
            tensor.data = torch.empty_strided(
                form.shape,
                form.stride(),
                dtype=form.dtype,
                device=self._device,
            )
        tensor.data.copy_(to_tensor(array, self._device))

    def _release_tensors(self, names: Iterable[str]) -> None:
        for name in names:
            tensor = self._tensors[name]
            tensor.data = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
            tensor.grad = None


def require_loss(loss: object, model: str) -> None:
    """Raise `ConfigError` for a loss that is not one number that depends on the model."""
    if not isinstance(loss, torch.Tensor):
        wrong = f"of type {type(loss).__name__}"
    elif loss.ndim:
        wrong = f"a tensor of shape {tuple(loss.shape)}"
    elif not loss.requires_grad:
        wrong = "without a gradient"
    else:
        return
    raise ConfigError(f"model {model}: the loss is {wrong}, not one number of the outputs")


def _without(prefix: str, arrays: Weights) -> Weights:
    """Return the arrays whose names have the prefix, without it."""
    return {name[len(prefix) :]: each for name, each in arrays.items() if name.startswith(prefix)}


def targets_from(labels: Labels, device: torch.device) -> Any:
    """Return labels as tensors, in the form that they have: int64 for integers, as torch's losses require."""
    if isinstance(labels, Mapping):
        return {key: targets_from(part, device) for key, part in labels.items()}
    if isinstance(labels, tuple | list):
        return type(labels)(targets_from(part, device) for part in labels)
    whole = np.issubdtype(labels.dtype, np.integer)
    return to_tensor(labels.astype(np.int64, copy=False) if whole else labels, device)
