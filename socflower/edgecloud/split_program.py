"""The program that edge, cloud and server of a split training share: the model, its cuts, and how it is trained.

All three construct it from the same code, so no code is sent; a fingerprint verifies that they did.
"""

import hashlib
import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Generic, TypeAlias, TypeVar

import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

from socflower.cluster.cost_model import ModelProfile
from socflower.edgecloud.plan.device_costs import CutShape
from socflower.edgecloud.runtime.back import TorchBack
from socflower.edgecloud.runtime.front import TorchFront
from socflower.edgecloud.runtime.int8_front import Int8Front
from socflower.edgecloud.runtime.mixed_front import MixedEdge, MixedFront
from socflower.edgecloud.runtime.torch_half import HalfStep, Passes, targets_from
from socflower.edgecloud.samples import (
    LABELS,
    BatchSource,
    PartyBatches,
    inputs_and_labels,
    label_arrays,
)
from socflower.errors import ConfigError, require_range
from socflower.model_graph.batch_form import Batch, form_of, output_of, tensors_in
from socflower.model_graph.cut_points import SplitModel, capture_split, whole_back, whole_front
from socflower.model_graph.following import NoParts
from socflower.model_graph.graph import Example, tensors_of
from socflower.model_graph.model_copy import copied, reason
from socflower.model_graph.random_state import build_exclusively, forked_generator
from socflower.model_graph.torch_device import AUTO, resolve_device
from socflower.plain_numbers import plain_numbers
from socflower.training.fp32 import sgd
from socflower.training.int8 import Int8Trainer
from socflower.training.model_state import frozen_digest, trainable_state
from socflower.training.schedules import Schedule, constant_rate
from socflower.training.session import LossFn, OptimizerFn
from socflower.training.trainer import require_trained_parameters

ModelFn: TypeAlias = Callable[[], nn.Module]
HalfT = TypeVar("HalfT", TorchFront, TorchBack)
# A later start draws other random numbers than another party.
_SEEDS_APART = 1_000_003
Arrays: TypeAlias = Mapping[str, NDArray[Any]]


@dataclass(frozen=True)
class PlacedHalf(Generic[HalfT]):
    """One half, and the prefix of its tensors' names in the whole model."""

    half: HalfT
    prefix: str = ""

    def arrays(self) -> dict[str, NDArray[Any]]:
        """Return the half's tensors by their names in the whole model."""
        return {f"{self.prefix}{name}": array for name, array in self.half.weights().items()}

    def load(self, arrays: Arrays) -> None:
        """Set the half's tensors from those of the whole model, or from its own only."""
        self.half.load(without_prefix(self.prefix, arrays))


def without_prefix(prefix: str, arrays: Arrays) -> dict[str, NDArray[Any]]:
    """Return the arrays whose names begin with a prefix, under their names without the prefix."""
    start = len(prefix)
    return {name[start:]: array for name, array in arrays.items() if name.startswith(prefix)}


@plain_numbers
@dataclass(frozen=True, kw_only=True)
class SplitProgram(ABC):
    """A model in two halves, and how it is trained; see `LayeredProgram`, `HalvesProgram` and `JoinedProgram`.

    `schedule` gives a factor on the learning rate by batch, over the whole training (`torch_schedule` makes one of a
    torch scheduler). Each half runs on the `device` of its own machine, as in `FP32Trainer`.

    Of a batch (inputs, labels) inputs go to the front half and labels travel to the back half; of a dict, all but its
    "labels" go to the front half. The loss, a mean over the batch, is `loss(outputs, labels)`, or the result of
    `train_step(layers, features, labels)`. `max_grad_norm` limits the norm of each half's gradient by itself, since
    neither knows the other's in time. `autocast` runs passes in torch.bfloat16; features and gradients cross in
    float32.

    With an `Int8Trainer` as `edge_trainer` the edges' halves train in int8, by its algorithm, learning rate and
    schedule; `optimizer` and `schedule` are then those of the cloud's halves alone. With a `MixedEdge` they train on
    CPU and NPU at once.
    """

    model_fn: ModelFn
    optimizer: OptimizerFn = field(default_factory=sgd)
    schedule: Schedule = constant_rate
    loss: LossFn = functional.cross_entropy
    seed: int = 1
    device: str = AUTO
    train_step: HalfStep | None = None
    max_grad_norm: float | None = None
    autocast: torch.dtype | None = None
    edge_trainer: Int8Trainer | MixedEdge | None = None

    def __post_init__(self) -> None:
        where = "split training"
        if self.edge_trainer is not None:
            self._check_int8(where)
        if self.train_step is not None and self.loss is not functional.cross_entropy:
            raise ConfigError(f"{where}: train_step computes the loss itself; leave loss out")
        if self.max_grad_norm is not None:
            require_range(where, above=0.0, max_grad_norm=self.max_grad_norm)
        if self.autocast not in (None, torch.bfloat16):
            raise ConfigError(f"{where}: autocast = {self.autocast} must be torch.bfloat16 or None")

    def _check_int8(self, where: str) -> None:
        is_mixed = isinstance(self.edge_trainer, MixedEdge)
        for name in ("autocast", "train_step" if is_mixed else "max_grad_norm"):
            if getattr(self, name) is not None:
                raise ConfigError(
                    f"{where}: {name} = {getattr(self, name)} is not for an edge_trainer, whose half is in integers"
                )
        if self.is_reverse:
            raise ConfigError(
                f"{where}: edge_trainer in a reverse split, whose edge has the loss: integer arithmetic has softmax "
                "cross-entropy only"
            )

    @property
    def is_reverse(self) -> bool:
        """Whether the front half is in the cloud."""
        return False

    @property
    def num_parties(self) -> int | None:
        """How many parties hold features; None if each edge has whole samples, and there may be any number of edges."""
        return None

    @property
    def cloud_prefix(self) -> str:
        """The prefix of the cloud half's tensor names in the whole model."""
        return ""

    def model(self) -> nn.Module:
        """Return the whole model with the weights that training begins with."""
        return build_exclusively(self.model_fn)

    def divide(self, batch: Batch) -> tuple[Batch, Batch]:
        """Return the part of a batch for the front half, and the part that travels to the back half."""
        return inputs_and_labels(batch)

    def front(
        self,
        party: int,
        cut: int | None,
        batches: BatchSource,
    ) -> PlacedHalf[TorchFront]:
        """Return a party's front half; a cut of None gives it all layers.

        Each party draws its own random numbers, so that dropout differs between them.
        """
        split, prefix = self._front_part(party)
        return PlacedHalf(self._front_half(split, self._place(cut), batches, party), prefix)

    def _front_half(
        self, split: SplitModel, cut: int, batches: BatchSource, party: int
    ) -> TorchFront:
        trainer = self.edge_trainer
        seed = self.seed + party
        if trainer is None:
            return TorchFront(
                split,
                cut,
                batches,
                self.optimizer,
                schedule=self.schedule,
                seed=seed,
                device=self._own_device(),
                passes=self._passes,
            )
        if isinstance(trainer, MixedEdge):
            return MixedFront(
                split,
                cut,
                batches,
                self.optimizer,
                trainer,
                party=party,
                schedule=self.schedule,
                seed=seed,
                passes=self._passes,
            )
        if not isinstance(batches, PartyBatches):
            raise ConfigError(
                "split training: edge_trainer needs PartyBatches, which know the training's length"
            )
        return Int8Front(
            split,
            cut,
            batches,
            trainer,
            loss=self.loss,
            progress=batches.progress,
            seed=seed,
        )

    def back(self, cut: int | None, batches: PartyBatches | None = None) -> PlacedHalf[TorchBack]:
        """Return the back half, which is empty if the edge has all layers.

        With `batches` it has its own targets (a reverse split).
        """

        def own_targets(batch: int) -> Tensor:
            assert batches is not None
            return torch.from_numpy(batches.targets(batch))

        half = TorchBack(
            self._back_part(),
            self._place(cut),
            self.optimizer,
            self.loss,
            schedule=self.schedule,
            seed=self.seed,
            targets=None if batches is None else own_targets,
            device=self._own_device(),
            passes=self._passes,
        )
        return PlacedHalf(half, self.cloud_prefix)

    @property
    def _passes(self) -> Passes:
        return Passes(
            loss=self.loss,
            train_step=self.train_step,
            max_grad_norm=self.max_grad_norm,
            autocast=self.autocast,
        )

    def _own_device(self) -> torch.device:
        return resolve_device(self.device, "split training: device")

    def trainable_state(self) -> dict[str, Tensor]:
        """Return what training changes: the arrays at the start of a training whose frozen parameters stay in place.

        Give the strategy `frozen_sha256` as well, with which edges and cloud compare their own frozen parameters.
        """
        return trainable_state(self.frozen_model())

    @cached_property
    def frozen_sha256(self) -> str:
        """The digest of the frozen parameters; empty if all are trained."""
        return frozen_digest(self.frozen_model())

    def frozen_model(self) -> nn.Module:
        """Return the whole model at the beginning, with untrained parameters frozen."""
        return self.model()

    def edge_names(self, party: int, cut: int | None) -> Collection[str]:
        """Return the names of the tensors that are at an edge."""
        front = self.front_names(party, cut)
        if not self.is_reverse or cut is None:
            return front
        return [name for name in self.model().state_dict() if name not in set(front)]

    @abstractmethod
    def cut_names(self, party: int = 0) -> tuple[str, ...]:
        """Return the names of the places where a party's model can be cut, in order."""

    @abstractmethod
    def front_names(self, party: int, cut: int | None) -> Collection[str]:
        """Return the names, in the whole model, of the tensors in a party's front half."""

    @abstractmethod
    def fingerprint(self) -> str:
        """Return a digest of the model's layers and cuts, without values."""

    @abstractmethod
    def _front_part(self, party: int) -> tuple[SplitModel, str]:
        """Return the model whose front a party has, for one half, and its prefix in the whole model."""

    @abstractmethod
    def _back_part(self) -> SplitModel:
        """Return the model whose back half the cloud has, for one half."""

    @abstractmethod
    def _place(self, cut: int | None) -> int:
        """Return a cut as halves count it."""


class _SharesInputs(SplitProgram):
    """A program whose back half also gets some inputs of a batch, which travel with the labels."""

    shared: Sequence[str]

    def divide(self, batch: Batch) -> tuple[Batch, Batch]:
        """Return the part of a batch for the front half, and the part that travels to the back half."""
        inputs, labels = inputs_and_labels(batch)
        if not self.shared:
            return inputs, labels
        if not isinstance(inputs, Mapping) or not set(self.shared) <= set(inputs):
            raise ConfigError(
                f"split training: shared = {list(self.shared)} must be entries of a batch in a dict, not of "
                f"{form_of(batch)}"
            )
        taken = set(inputs) - set(self.shared).difference(self._front_takes)
        own = {key: part for key, part in inputs.items() if key in taken}
        return own, {LABELS: labels, **{key: inputs[key] for key in self.shared}}

    @property
    @abstractmethod
    def _front_takes(self) -> Collection[str]:
        """The shared inputs, and perhaps others, that the front half takes."""

    @property
    def _passes(self) -> Passes:
        passes = super()._passes
        if self.shared and self.train_step is None:
            return replace(passes, train_step=self._loss_of_back)
        return passes

    def _loss_of_back(
        self, layers: nn.Module, features: Batch, travelled: Mapping[str, Any]
    ) -> Tensor:
        if isinstance(features, Mapping):
            # All layers are in one half, which takes the inputs themselves.
            return self.loss(output_of(layers, features), travelled[LABELS])
        shared = {key: travelled[key] for key in self.shared}
        return self.loss(layers(features, **shared), travelled[LABELS])


@plain_numbers
@dataclass(frozen=True, kw_only=True)
class LayeredProgram(_SharesInputs):
    """A model that is cut between two of its layers.

    `example` is the shape of one sample, or a batch: a tensor, or a dict with one input and those in `shared`, such as
    an attention mask, which travel to the back half with the labels. `frozen` names the last layer that is not trained
    (transfer learning). In a `reverse` split the front half is in the cloud: a generative model, whose last layers see
    the data. A transformer has cuts between its blocks if `model_fn` returns its `exported_module`.
    """

    example: Example | Batch
    frozen: str | None = None
    reverse: bool = False
    shared: Sequence[str] = ()

    def __post_init__(self) -> None:
        SplitProgram.__post_init__(self)
        if self.shared and self.reverse:
            raise ConfigError(
                "split training: shared is not for a reverse split, whose data are at the back half"
            )

    def _check_int8(self, where: str) -> None:
        super()._check_int8(where)
        if self.shared:
            raise ConfigError(f"{where}: edge_trainer takes images alone, without shared inputs")
        if self.frozen is not None:
            raise ConfigError(
                f"{where}: frozen = {self.frozen!r} is not for an edge_trainer: frozen layers stay in evaluation "
                "mode, but int8 training normalises by the batch"
            )

    @property
    def is_reverse(self) -> bool:
        """Whether the front half is in the cloud."""
        return self.reverse

    @cached_property
    def split(self) -> SplitModel:
        """The model and its cuts; halves are made from copies."""
        try:
            # A copy, since layers are frozen in it, and `model_fn` may return a model that its user keeps.
            return capture_split(
                copied(self.model()),
                self.example,
                frozen=self.frozen,
                shared=self.shared,
            )
        except NoParts as error:
            raise ConfigError(
                f"{error}; exported_module cuts transformers, and a HalvesProgram takes a model of two submodules"
            ) from error

    def frozen_model(self) -> nn.Module:
        """Return the whole model, which is given with what is frozen."""
        return self.split.model

    def cut_names(self, party: int = 0) -> tuple[str, ...]:
        """Return the names of all cuts."""
        return tuple(point.name for point in self.split.cuts)

    def front_names(self, party: int, cut: int | None) -> Collection[str]:
        """Return the names of the tensors up to the cut."""
        return self.split.front_names(self._place(cut))

    def fingerprint(self) -> str:
        """Return the fingerprint of the split model."""
        return self.split.fingerprint()

    @property
    def _front_takes(self) -> Collection[str]:
        return self.shared

    def divide(self, batch: Batch) -> tuple[Batch, Batch]:
        """Return the part of a batch for the front half, and the part that travels to the back half."""
        own, travels = super().divide(batch)
        is_shape = isinstance(self.example, tuple | list) and not tensors_in(self.example)
        # The plan's times and sizes are those of the example.
        if is_shape and isinstance(own, Tensor) and tuple(own.shape[1:]) != tuple(self.example):
            raise ConfigError(
                f"split training: samples have shape {tuple(own.shape[1:])}, and example = {tuple(self.example)}; "
                "give the program the shape of the data"
            )
        return own, travels

    def _front_part(self, party: int) -> tuple[SplitModel, str]:
        return self.split.copy(), ""

    def _back_part(self) -> SplitModel:
        return self.split.copy()

    def _place(self, cut: int | None) -> int:
        return self.split.num_cuts if cut is None else cut


@dataclass(frozen=True, kw_only=True)
class _NamedParts(SplitProgram):
    """A model whose halves are submodules, by name; there is one cut, at the end of a party's `bottom`."""

    top: str

    def _check_int8(self, where: str) -> None:
        raise ConfigError(
            f"{where}: edge_trainer is for a LayeredProgram of images, not for a {type(self).__name__}"
        )

    @property
    def cloud_prefix(self) -> str:
        """The name of the top model."""
        return f"{self.top}."

    @abstractmethod
    def _bottom_of(self, party: int) -> str:
        """Return the name of a party's bottom model."""

    def cut_names(self, party: int = 0) -> tuple[str, ...]:
        """Return the bottom's name: its end is where the model is cut."""
        return (self._bottom_of(party),)

    def front_names(self, party: int, cut: int | None) -> Collection[str]:
        """Return the names of the tensors in a party's bottom model."""
        prefix = f"{self._bottom_of(party)}."
        return [name for name in self.frozen_model().state_dict() if name.startswith(prefix)]

    def _digest(self, what: str) -> str:
        """Return a digest of `what`, and of all names and shapes."""
        state = self.frozen_model().state_dict().items()
        layout = ";".join(f"{name}:{tensor.dtype}{tuple(tensor.shape)}" for name, tensor in state)
        return hashlib.sha256(f"{what}|{self.top}|{layout}".encode()).hexdigest()

    def _place(self, cut: int | None) -> int:
        if cut != 0:
            raise ConfigError(
                f"split training: cut = {cut}, but a model of named parts has one cut, 0, behind {self._bottom_of(0)}"
            )
        return cut


@plain_numbers
@dataclass(frozen=True, kw_only=True)
class JoinedProgram(_NamedParts):
    """A model whose parties hold different features of the same samples: a bottom for each, and a top over all.

    `examples` holds a batch of one sample for each party; only its shape matters. `bottoms` and `top` are the names of
    the submodules; the top takes the bottoms' features concatenated along dimension 1. There is one cut.
    """

    examples: Sequence[Tensor]
    bottoms: Sequence[str]

    def __post_init__(self) -> None:
        SplitProgram.__post_init__(self)
        if len(self.bottoms) != len(self.examples):
            raise ConfigError(
                f"joined training: {len(self.bottoms)} bottoms and {len(self.examples)} examples; give one a party"
            )

    @property
    def num_parties(self) -> int:
        """How many parties hold features."""
        return len(self.bottoms)

    def _bottom_of(self, party: int) -> str:
        """Return the name of a party's bottom model."""
        return self.bottoms[party]

    def fingerprint(self) -> str:
        """Return a digest of all names and shapes."""
        return self._digest("|".join(self.bottoms))

    def _front_part(self, party: int) -> tuple[SplitModel, str]:
        bottom = self.bottoms[party]
        part = copied(self.model().get_submodule(bottom))
        return whole_front(part, self.examples[party]), f"{bottom}."

    def _back_part(self) -> SplitModel:
        return whole_back(copied(self.model().get_submodule(self.top)))


@plain_numbers
@dataclass(frozen=True, kw_only=True)
class HalvesProgram(_NamedParts, _SharesInputs):
    """A model whose author says where it is cut: submodule `bottom` at the edge, `top` in the cloud.

    Use it for models that neither torch.fx nor `exported_module` can follow. `bottom` takes a batch's inputs as
    `model(inputs)` does, a dict as keyword arguments, and returns one float32 tensor with the batch in front; `top`
    takes that. Of a batch in a dict `top` also gets the entries in `shared` as keyword arguments, such as an attention
    mask: they travel with the labels, and go to the bottom too if its `forward` has them. `example` is a batch in the
    form of the data. Layers that `model_fn` has put into evaluation mode inside a model in training mode stay in it.

    Raises ConfigError, from `fingerprint` on, if the halves share a weight or leave one out, or fail for the example.
    """

    example: Batch
    bottom: str = "front"
    top: str = "back"
    shared: Sequence[str] = ()

    def _bottom_of(self, party: int) -> str:
        """Return the name of the bottom model."""
        return self.bottom

    def fingerprint(self) -> str:
        """Return a digest of names, shapes and frozen parameters, after a trial with the example."""
        return self._tried

    @cached_property
    def split(self) -> SplitModel:
        """The bottom with its cut, for `cut_shapes` and a profile of the whole model."""
        front, _ = self._front_part(0)
        (point,) = front.cuts
        layers = frozenset(f"{self.bottom}.{path}".rstrip(".") for path in point.front_layers)
        return replace(
            front,
            cuts=(
                replace(
                    point,
                    name=self.bottom,
                    front_layers=layers,
                ),
            ),
        )

    @cached_property
    def _tried(self) -> str:
        model = self._original
        require_trained_parameters(model)
        self._part(self.bottom), self._part(self.top)
        self._check_parts(model)
        inputs, labels = self.divide(self.example)
        with forked_generator():
            bottom = self._front_part(0)[0].model
            self._try_top(output_of(bottom, inputs).detach().requires_grad_(), labels)
        parameters = model.named_parameters()
        frozen = sorted(name for name, weight in parameters if not weight.requires_grad)
        return self._digest(f"{self.bottom}|{list(self.shared)}|{frozen}")

    def _try_top(self, features: Tensor, labels: Batch) -> None:
        """Raise `ConfigError` if the top and the loss do not take the example's features and labels."""
        name = type(self._original).__name__
        top = self._back_part().model
        targets = targets_from(label_arrays(labels), features.device)
        try:
            self._passes.loss_of(top, features, targets, name)
        except ConfigError:
            raise
        except Exception as error:
            raise ConfigError(
                f"model {name}: {self.top!r} and the loss do not take features of shape {tuple(features.shape)} with "
                f"{form_of(labels)} of the example: {reason(error)}"
            ) from error

    def _check_parts(self, model: nn.Module) -> None:
        where = f"model {type(model).__name__}"
        halves = dict[int, str]()
        for key, tensor in tensors_of(model).items():
            parts = [part for part in (self.bottom, self.top) if key.startswith(f"{part}.")]
            if not parts:
                raise ConfigError(
                    f"{where}: {key!r} is neither in {self.bottom!r} nor in {self.top!r}"
                )
            # Two machines cannot share a weight.
            if halves.setdefault(id(tensor), parts[0]) != parts[0]:
                raise ConfigError(f"{where}: {key!r} is a weight of both halves; give each its own")

    @cached_property
    def _original(self) -> nn.Module:
        """The whole model; halves are made from copies, since making it may take long."""
        return self.model()

    def frozen_model(self) -> nn.Module:
        """Return the whole model, which is given with what is frozen."""
        return self._original

    @property
    def _front_takes(self) -> Collection[str]:
        return inspect.signature(self._part(self.bottom).forward).parameters

    def _part(self, path: str) -> nn.Module:
        model = self._original
        try:
            return model.get_submodule(path)
        except AttributeError:
            parts = ", ".join(name for name, _ in model.named_children())
            raise ConfigError(
                f"model {type(model).__name__}: has no submodule {path!r}; its parts are {parts}"
            ) from None

    def _evaluating(self, part: nn.Module) -> frozenset[str]:
        """Return the layers of a half that stay in evaluation mode."""
        if not self._original.training:
            return frozenset()
        return frozenset(path for path, module in part.named_modules() if not module.training)

    def _front_part(self, party: int) -> tuple[SplitModel, str]:
        bottom = self._part(self.bottom)
        front = whole_front(
            copied(bottom),
            self.divide(self.example)[0],
            name=self.bottom,
            evaluating=self._evaluating(bottom),
            may_be_frozen=True,
        )
        return front, f"{self.bottom}."

    def _back_part(self) -> SplitModel:
        bottom = self._part(self.bottom)
        top = self._part(self.top)
        return whole_back(
            copied(top),
            name=self.top,
            evaluating=self._evaluating(top),
            may_be_frozen=True,
            front_trains=any(weight.requires_grad for weight in bottom.parameters()),
        )


def cut_shapes(split: SplitModel, profile: ModelProfile) -> tuple[CutShape, ...]:
    """Return the cuts in the form that `split_costs` takes, for the layer profile of the same model."""
    return tuple(
        CutShape(
            name=point.name,
            num_layers=point.num_layers(profile),
            feature_elements_per_sample=point.feature_elements,
            front_state_bytes=point.front_weight_bytes,
        )
        for point in split.cuts
    )


ProgramT = TypeVar("ProgramT", bound=SplitProgram)


def starting_at(program: ProgramT, batch: int) -> ProgramT:
    """Return the same program for halves whose batch 0 is `batch` of the training.

    Its random numbers must not repeat those of the first batches.
    """
    if not batch:
        return program
    seed = program.seed + _SEEDS_APART * batch
    return replace(program, schedule=lambda own: program.schedule(batch + own), seed=seed)
