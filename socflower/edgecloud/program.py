"""The program that edge, cloud and server of a split training share: the model, its cuts, and how it is trained.

All three construct it from the same code, so no code is sent; a fingerprint verifies that they did.
"""

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Generic, Self, TypeAlias, TypeVar

import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

from socflower.capture.cut_points import SplitModel, capture_split, whole_back, whole_front
from socflower.capture.random_state import build_exclusively
from socflower.capture.torch_device import AUTO, resolve_device
from socflower.cluster.cost_model import ModelProfile
from socflower.edgecloud.plan.device_costs import CutShape
from socflower.edgecloud.runtime.back import TorchBack
from socflower.edgecloud.runtime.front import TorchFront
from socflower.edgecloud.runtime.half_optimizer import Schedule, constant_rate
from socflower.edgecloud.samples import BatchSource, PartyBatches
from socflower.errors import ConfigError
from socflower.training.fp32 import LossFn, OptimizerFn, sgd
from socflower.training.model_state import frozen_digest, trainable_state

ModelFn: TypeAlias = Callable[[], nn.Module]
HalfT = TypeVar("HalfT", TorchFront, TorchBack)
_SEEDS_APART = 1_000_003  # so that a later start draws other random numbers than another party
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
    return {name.removeprefix(prefix): array for name, array in arrays.items() if name.startswith(prefix)}


@dataclass(frozen=True, kw_only=True)
class SplitProgram(ABC):
    """A model in two halves, and how it is trained; see `LayeredProgram` and `JoinedProgram`.

    `schedule` gives a factor on the learning rate by batch, over the whole training. Each half runs on the `device` of
    its own machine, as in `FP32Trainer`.
    """

    model_fn: ModelFn
    optimizer: OptimizerFn = field(default_factory=sgd)
    schedule: Schedule = constant_rate
    loss: LossFn = functional.cross_entropy
    seed: int = 1
    device: str = AUTO

    @property
    def is_reverse(self) -> bool:
        """Whether the front half is in the cloud."""
        return False

    @property
    def num_parties(self) -> int | None:
        """How many parties hold features; None where each edge has whole samples, and may be one of any number."""
        return None

    @property
    def cloud_prefix(self) -> str:
        """The prefix of the cloud half's tensor names in the whole model."""
        return ""

    def model(self) -> nn.Module:
        """Return the whole model with the weights that training begins with."""
        return build_exclusively(self.model_fn)

    def front(self, party: int, cut: int | None, batches: BatchSource) -> PlacedHalf[TorchFront]:
        """Return a party's front half; a cut of None gives it all layers.

        Each party draws its own random numbers, so that dropout differs between them.
        """
        split, prefix = self._front_part(party)
        return PlacedHalf(TorchFront(split, self._place(cut), batches, self.optimizer, schedule=self.schedule,
                                     seed=self.seed + party, loss=self.loss, device=self._own_device()), prefix)

    def back(self, cut: int | None, batches: PartyBatches | None = None) -> PlacedHalf[TorchBack]:
        """Return the back half, which is empty if the edge has all layers.

        With `batches` it has its own targets (a reverse split).
        """
        targets = None if batches is None else lambda batch: torch.from_numpy(batches.targets(batch))
        return PlacedHalf(TorchBack(self._back_part(), self._place(cut), self.optimizer, self.loss,
                                    schedule=self.schedule, seed=self.seed, targets=targets,
                                    device=self._own_device()), self.cloud_prefix)

    def _own_device(self) -> torch.device:
        return resolve_device(self.device, "split training: device")

    def trainable_state(self) -> dict[str, Tensor]:
        """Return what training changes: the arrays with which a training starts whose frozen parameters stay in place.

        Give the strategy `frozen_sha256` as well, with which edges and cloud compare their own frozen parameters.
        """
        return trainable_state(self._frozen_model())

    @cached_property
    def frozen_sha256(self) -> str:
        """The digest of the frozen parameters; empty if all are trained."""
        return frozen_digest(self._frozen_model())

    def _frozen_model(self) -> nn.Module:
        """Return the whole model at the beginning, with what is not trained frozen."""
        return self.model()

    def starting_at(self, batch: int) -> Self:
        """Return the same program for halves whose batch 0 is `batch` of the training.

        Its random numbers must not repeat those of the first batches.
        """
        if not batch:
            return self
        return replace(self, schedule=lambda own: self.schedule(batch + own), seed=self.seed + _SEEDS_APART * batch)

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
        """Return the model of which a party has the front, for one half, and its prefix in the whole model."""

    @abstractmethod
    def _back_part(self) -> SplitModel:
        """Return the model of which the back half is made, for one half."""

    @abstractmethod
    def _place(self, cut: int | None) -> int:
        """Return a cut as halves count it."""


@dataclass(frozen=True, kw_only=True)
class LayeredProgram(SplitProgram):
    """A model that is cut between two of its layers.

    `example` is the shape of one sample. `frozen` names the last layer that is not trained (transfer learning). In a
    `reverse` split the front half is in the cloud: a generative model, whose last layers see the data.
    """

    example: tuple[int, ...]
    frozen: str | None = None
    reverse: bool = False

    @property
    def is_reverse(self) -> bool:
        """Whether the front half is in the cloud."""
        return self.reverse

    @cached_property
    def split(self) -> SplitModel:
        """The model and its cuts; halves are made from copies."""
        return capture_split(self.model(), self.example, frozen=self.frozen)

    def _frozen_model(self) -> nn.Module:
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

    def _front_part(self, party: int) -> tuple[SplitModel, str]:
        return self.split.copy(), ""

    def _back_part(self) -> SplitModel:
        return self.split.copy()

    def _place(self, cut: int | None) -> int:
        return self.split.num_cuts if cut is None else cut


@dataclass(frozen=True, kw_only=True)
class JoinedProgram(SplitProgram):
    """A model whose parties hold different features of the same samples: a bottom for each, and a top over all.

    `examples` holds a batch of one sample for each party; only its shape matters. `bottoms` and `top` are the names of
    the submodules; the top takes the bottoms' features concatenated along dimension 1. There is one cut.
    """

    examples: Sequence[Tensor]
    bottoms: Sequence[str]
    top: str

    def __post_init__(self) -> None:
        if len(self.bottoms) != len(self.examples):
            raise ConfigError(f"joined training: {len(self.bottoms)} bottom models and {len(self.examples)} examples; "
                              "need one for each party")

    @property
    def num_parties(self) -> int:
        """How many parties hold features."""
        return len(self.bottoms)

    @property
    def cloud_prefix(self) -> str:
        """The name of the top model."""
        return f"{self.top}."

    def cut_names(self, party: int = 0) -> tuple[str, ...]:
        """Return the bottom's name: its end is where the model is cut."""
        return (self.bottoms[party],)

    def front_names(self, party: int, cut: int | None) -> Collection[str]:
        """Return the names of the tensors in a party's bottom model."""
        return [name for name in self.model().state_dict() if name.startswith(f"{self.bottoms[party]}.")]

    def fingerprint(self) -> str:
        """Return a digest of all names and shapes."""
        state = self.model().state_dict()
        layout = ";".join(f"{name}:{tensor.dtype}{tuple(tensor.shape)}" for name, tensor in state.items())
        return hashlib.sha256(f"{'|'.join(self.bottoms)}|{self.top}|{layout}".encode()).hexdigest()

    def _front_part(self, party: int) -> tuple[SplitModel, str]:
        bottom = self.bottoms[party]
        return whole_front(self.model().get_submodule(bottom), self.examples[party]), f"{bottom}."

    def _back_part(self) -> SplitModel:
        return whole_back(self.model().get_submodule(self.top))

    def _place(self, cut: int | None) -> int:
        if cut != 0:
            raise ConfigError(f"joined training: cut = {cut}; parties that hold different features have one cut, 0, "
                              "at the end of their bottom models")
        return cut


def cut_shapes(split: SplitModel, profile: ModelProfile) -> tuple[CutShape, ...]:
    """Return the cuts in the form that `split_costs` takes, for the layer profile of the same model."""
    return tuple(CutShape(name=point.name, num_layers=point.num_layers(profile),
                          feature_elements_per_sample=point.feature_elements,
                          front_state_bytes=point.front_weight_bytes) for point in split.cuts)
