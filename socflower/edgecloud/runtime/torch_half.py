"""The common part of both halves of a torch model: layers that are added and removed with the cut, and saving."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from socflower.edgecloud.half_protocols import Labels, Weights
from socflower.errors import ConfigError
from socflower.model_graph.batch_form import Batch, output_of
from socflower.model_graph.cut_points import SplitModel
from socflower.model_graph.graph import CAPTURE_LOCK
from socflower.model_graph.tensor_arrays import to_array, to_tensor
from socflower.model_graph.torch_device import on_device
from socflower.training.model_state import frozen_digest, frozen_parameters
from socflower.training.schedules import Schedule
from socflower.training.session import (
    PARAMETERS,
    LossFn,
    OptimizerFn,
    Session,
    TorchSession,
    loss_between,
    require_loss,
)
from socflower.wire.saved_state import from_bytes, to_bytes

SEPARATOR = "::"
"""Separates a weight's name from a key of its optimiser state."""

States: TypeAlias = Mapping[str, Mapping[str, Any]]
"""The optimiser's state of each weight, by name."""

HalfStep: TypeAlias = Callable[[nn.Module, Any, Any], torch.Tensor]
"""A function of layers, what they take (features, or the model's inputs) and labels that returns the mean loss."""

_STATE = "half of a split model"
# Prefixes of names of saved arrays.
_WEIGHT = "weight "
_OF_OPTIMIZER = "state "


@dataclass(frozen=True, kw_only=True, slots=True)
class Passes:
    """How passes and updates are done: see `SplitProgram`."""

    loss: LossFn | None = None
    train_step: HalfStep | None = None
    max_grad_norm: float | None = None
    autocast: torch.dtype | None = None

    def loss_of(
        self,
        layers: nn.Module,
        argument: Any,
        labels: Any,
        name: str,
    ) -> torch.Tensor:
        """Return the loss of `train_step`, or that of the layers' outputs; `name` is the model's."""
        if self.train_step is not None:
            loss = self.train_step(layers, argument, labels)
        else:
            assert self.loss is not None
            loss = loss_between(self.loss, output_of(layers, argument), labels, f"model {name}")
        return require_loss(loss, f"model {name}")


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
        optimizer: OptimizerFn,
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
        self._make_optimizer = optimizer
        self._schedule = schedule
        self._tensors = split.tensors()
        self._frozen = frozenset(frozen_parameters(split.model))
        self.keeps_frozen = False
        if any(tensor.shape != split.specs[name].shape for name, tensor in self._tensors.items()):
            raise self._error("belongs to another half; give each half a copy()")
        _free(self._tensors, set(self._tensors) - set(self._names(cut)))
        split.model.to(self._device)
        self._tensors = split.tensors()
        self._module: nn.Module | None = None
        self._session = self._new_session()

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
        return float(sum(array.nbytes for array in self._state_arrays(self._tensors).values()))

    def export_layers(self, cut: int) -> Weights:
        """Move the cut so that this half loses layers; return their tensors and optimiser state (`name::key`).

        Raises `ConfigError` for a cut that does not exist or lies in the other half, and while a batch is in flight.
        """
        moving = self._moving(cut, gives=True)
        given = {name: self._array(name) for name in self._sent(moving)}
        given |= self._state_arrays(moving)
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
        self._move_to(cut, _states_in(state))

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
        states = self._state_arrays(self._names(self._cut))
        arrays |= {f"{_OF_OPTIMIZER}{key}": array for key, array in states.items()}
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
        self._session = self._new_session()
        self._move_to(cut, _states_in(state))
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

    def _move_to(self, cut: int, taken: States | None = None) -> None:
        """Train the layers up to another cut; weights that stay keep their state, that of new ones is in `taken`."""
        states = {**self._session.state().get(PARAMETERS, {}), **(taken or {})}
        self._cut = cut
        self._module = None
        self._session = self._new_session()
        self._session.restore({PARAMETERS: states})

    # ------------------------------------------------------------------------------------------------------ the session

    def _new_session(self) -> Session:
        """Return a session of the present layers, without a state."""
        return TorchSession(
            self._run,
            self._trained(),
            self._make_optimizer,
            where="split training",
            schedule=self._schedule,
            max_grad_norm=self._passes.max_grad_norm,
            seed=self._seed if self.split.random_layers else None,
        )

    def _trained(self) -> dict[str, nn.Parameter]:
        """Return the weights that are updated, by name."""
        named: dict[str, nn.Parameter] = {}
        first_names: dict[int, str] = {}
        for name, weight in self._own_tensors().items():
            if isinstance(weight, nn.Parameter) and weight.requires_grad:
                # A tied weight is updated under its first name, at the place of its last one.
                first = first_names.setdefault(id(weight), name)
                named.pop(first, None)
                named[first] = weight
        return named

    def _run(self, batch: int, *inputs: Any) -> torch.Tensor:
        """Compute a pass of a batch in training mode; see `TorchSession`."""
        raise NotImplementedError

    def _prepare(self, *inputs: Any) -> None:
        """Build what a pass needs before it begins."""
        self._layers()

    def _forward(self, batch: int, *inputs: Any, keep: bool = True) -> torch.Tensor:
        """Return the result of a pass of a batch, without a graph."""
        self._prepare(*inputs)
        # The lock comes first: its exclusive holder forks the generator, and would wait for a half that waits for it.
        with CAPTURE_LOCK.shared():
            (made,) = self._session.forward(batch, *inputs, keep=keep)
        return made

    def _train(self, batch: int, *inputs: Any) -> tuple[tuple[torch.Tensor | None, ...], float]:
        """Do a whole step on a batch; return the gradients of the inputs, and the loss."""
        loss = self._forward(batch, *inputs)
        self._session.begin()
        gradients = self._session.backward(batch)
        self._session.step(batch)
        return gradients, float(loss)

    def _state_arrays(self, names: Iterable[str]) -> dict[str, NDArray[Any]]:
        """Return the optimiser's state of the named weights, by `name::key`."""
        state = self._session.state()
        states: States = state.get(PARAMETERS, {})
        arrays: dict[str, NDArray[Any]] = {}
        for name in names:
            for entry, value in states.get(name, {}).items():
                if isinstance(value, torch.Tensor):
                    arrays[f"{name}{SEPARATOR}{entry}"] = to_array(value)
                # The momentum of SGD without momentum is None.
                elif value is not None:
                    raise ConfigError(
                        f"optimizer: {state['optimizer']} keeps {entry} as {type(value).__name__}, which "
                        "cannot move with a layer; use SGD or Adam"
                    )
        return arrays

    def _autocast(self) -> AbstractContextManager[Any]:
        narrow = self._passes.autocast
        return torch.autocast(self._device.type, narrow) if narrow else nullcontext()

    def _loss_of(self, batch: int, argument: Batch, labels: Any) -> torch.Tensor:
        """Return the loss of a batch, from the argument of this half's first layer and the labels as tensors."""
        taken = on_device(argument, self._device)
        targets = on_device(labels, self._device)
        with self._autocast():
            return self._passes.loss_of(self._layers(), taken, targets, self.split.name)

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
        _free(self._tensors, names)


def _free(tensors: Mapping[str, torch.Tensor], names: Iterable[str]) -> None:
    """Free the memory of the named tensors, which are empty from then on."""
    for name in names:
        tensor = tensors[name]
        tensor.data = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        tensor.grad = None


def _without(prefix: str, arrays: Weights) -> Weights:
    """Return the arrays whose names have the prefix, without it."""
    return {name[len(prefix) :]: each for name, each in arrays.items() if name.startswith(prefix)}


def _states_in(arrays: Weights) -> dict[str, dict[str, torch.Tensor]]:
    """Return the optimiser's state of each weight from arrays by `name::key`."""
    states: dict[str, dict[str, torch.Tensor]] = {}
    for key, array in arrays.items():
        name, _, entry = key.partition(SEPARATOR)
        states.setdefault(name, {})[entry] = torch.from_numpy(np.array(array))
    return states


def targets_from(labels: Labels, device: torch.device) -> Any:
    """Return labels as tensors, in the form that they have: int64 for integers, as torch's losses require."""
    if isinstance(labels, Mapping):
        return {key: targets_from(part, device) for key, part in labels.items()}
    if isinstance(labels, tuple | list):
        return type(labels)(targets_from(part, device) for part in labels)
    whole = np.issubdtype(labels.dtype, np.integer)
    return to_tensor(labels.astype(np.int64, copy=False) if whole else labels, device)
