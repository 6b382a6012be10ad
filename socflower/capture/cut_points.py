"""The points at which a torch model can be cut in two, and the two halves, which share the model's weights."""

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import fx, nn

from socflower.capture.halves import GraphHalves
from socflower.capture.operations import (
    CAPTURE_LOCK,
    CapturedGraph,
    copied,
    first_samples,
    layout_of,
    reason,
    tensors_of,
    training_mode_pass,
)
from socflower.capture.tensor_arrays import spec_of
from socflower.cluster.cost_model import ModelProfile
from socflower.errors import ConfigError

__all__ = ["CutPoint", "SplitModel", "capture_split", "whole_back", "whole_front"]

Example = torch.Tensor | tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class CutPoint:
    """A point of the graph where exactly one tensor passes from the front layers to the back layers."""

    name: str  # of the front half's last layer: a module's path, or the graph's name of a function's result
    feature_shape: tuple[int, ...]  # of one sample; its elements are float32
    layout: tuple[int, ...]  # dimensions, the batch's included, from the outermost in memory to the innermost
    front_layers: frozenset[str]  # modules that run in the front half, by path
    front_weight_bytes: float  # weights and buffers
    front_trained_bytes: float  # of these, weights that are trained
    front_trains: bool  # False: all before the cut is frozen

    @property
    def feature_elements(self) -> int:
        """Elements per sample that are sent across the cut."""
        return math.prod(self.feature_shape)

    def num_layers(self, profile: ModelProfile) -> int:
        """Return how many layers of `profile_module`'s profile of this model are in the front half."""
        return sum(layer.name in self.front_layers for layer in profile.layers)


class Halves(Protocol):
    """Builds the two halves of a model."""

    @property
    def random_layers(self) -> Mapping[int, str]:
        """Layers that draw random numbers in training, by the number of their random stream."""
        ...

    def front(self, cut: int) -> nn.Module:
        """Return the layers up to a cut."""
        ...

    def back(self, cut: int) -> nn.Module:
        """Return the layers behind a cut."""
        ...


class SplitModel:
    """A model and its cuts, numbered in the order of its layers.

    `num_cuts` as a cut means that everything is in the front half. The halves are modules that share parameters and
    buffers with `model`, under the same names. Frozen layers stay in evaluation mode, so that their batch statistics
    do not change.
    """

    def __init__(
        self, *, model: nn.Module, name: str, cuts: Sequence[CutPoint], front_names: Sequence[frozenset[str]],
        halves: Halves, frozen_layers: frozenset[str], fingerprint: str, arguments: Mapping[str, Any],
        writes_in_place: bool = True,
    ) -> None:
        self.model = model
        self.name = name
        self.cuts = tuple(cuts)
        self.writes_in_place = writes_in_place  # a layer may overwrite its input
        self._front_names = tuple(front_names)
        self._halves = halves
        self.frozen_layers = frozen_layers  # by path; they stay in evaluation mode
        self._fingerprint = fingerprint
        self._arguments = dict(arguments)
        self.specs: Mapping[str, torch.Tensor] = {key: spec_of(tensor) for key, tensor in self.tensors().items()}
        """Shape, strides and type of every tensor, without values. A half releases tensors that only the other uses."""

    @property
    def num_cuts(self) -> int:
        """Number of cuts; used as a cut, it puts all layers into the front half."""
        return len(self.cuts)

    @property
    def random_layers(self) -> Mapping[int, str]:
        """Layers that draw random numbers in training: number of the stream, and path."""
        return self._halves.random_layers

    def front(self, cut: int) -> nn.Module:
        """Return the layers up to and including the cut, from the model's input to the features."""
        self.check(cut)
        return self._halves.front(cut)

    def back(self, cut: int) -> nn.Module:
        """Return the layers behind the cut, from the features to the model's output."""
        self.check(cut)
        if cut == self.num_cuts:
            raise ConfigError(f"model {self.name}: nothing is behind cut {cut}, which stands for the whole model")
        return self._halves.back(cut)

    def front_names(self, cut: int) -> tuple[str, ...]:
        """Return which entries of the model's state_dict the front half has, in their order there."""
        self.check(cut)
        names = tuple(self.tensors())
        return names if cut == self.num_cuts else tuple(key for key in names if key in self._front_names[cut])

    def back_names(self, cut: int) -> tuple[str, ...]:
        """Return the other entries; this includes entries that no layer uses."""
        front = set(self.front_names(cut))
        return tuple(key for key in self.tensors() if key not in front)

    def front_trains(self, cut: int) -> bool:
        """Return whether anything before the cut is trained, so that the back half must return a gradient."""
        self.check(cut)
        return cut == self.num_cuts or self.cuts[cut].front_trains

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return the model's parameters and persistent buffers themselves, in the order of its state_dict."""
        return tensors_of(self.model)

    def set_training_mode(self) -> None:
        """Put all layers except frozen ones into training mode; an evaluation may have changed the mode."""
        for path, module in self.model.named_modules():
            module.training = path not in self.frozen_layers

    def fingerprint(self) -> str:
        """Return a digest of the graph, its layers' settings, names, shapes and what is frozen, without values.

        Edge and cloud compare it, which ensures that both cut the same model at the same points.
        """
        return self._fingerprint

    def cut_named(self, name: str) -> int:
        """Return the number of a cut by its name; `ConfigError` lists the existing ones."""
        for number, point in enumerate(self.cuts):
            if point.name == name:
                return number
        raise ConfigError(f"model {self.name}: has no cut {name!r}; there are {', '.join(p.name for p in self.cuts)}")

    def samples(self, num_samples: int) -> torch.Tensor:
        """Return a batch of identical inputs that the model accepts; `ConfigError` if no example is known."""
        if self._arguments["example"] is None:
            raise ConfigError(f"model {self.name}: is a back half as a whole, of whose features no example is known")
        return first_samples(self.model, self._arguments["example"], self.name, num_samples)

    def copy(self) -> "SplitModel":
        """Return a copy with its own weights; each half of a training takes ownership of one.

        Raises ConfigError once a half has taken ownership of this one.
        """
        if any(tensor.shape != self.specs[key].shape for key, tensor in self.tensors().items()):
            raise ConfigError(f"model {self.name}: belongs to a half, which has released some layers; copy it before")
        build = _whole if "is_front" in self._arguments else _captured
        return build(**{**self._arguments, "model": copied(self.model)})

    def check(self, cut: int) -> None:
        """Raise `ConfigError` for a cut that does not exist."""
        if not 0 <= cut <= self.num_cuts:
            raise ConfigError(f"model {self.name}: cut = {cut} does not exist; use 0 to {self.num_cuts - 1}, or "
                              f"{self.num_cuts} for all layers in the front half")


def capture_split(
    model: nn.Module, example: Example, *, name: str | None = None, frozen: int | str | None = None,
) -> SplitModel:
    """Return the cuts of `model`: after an activation, a norm, a pooling or a residual block, not inside branches.

    `example` is a batch, of which the first sample is used, or the shape of one float32 sample. Every module or
    function of those kinds is a separate cut: a normalisation as well as the activation and the pooling behind it.
    Operations that follow (dropout, flattening) belong to the back half. A residual block ends with its sum, or with
    the activation or norm of the sum. There is no cut where a second value would cross (a shortcut, or a size read
    from the input), where a weight is used on both sides, where one side has no weights, or where the crossing tensor
    is not float32 with the batch as first dimension. The model is captured in training mode.

    `frozen` is the number of a cut, or the path of a cut, layer or block; nothing up to and including it is trained
    (transfer learning): the weights stop requiring gradients, and the layers stay in evaluation mode.

    Raises ConfigError where torch.fx cannot follow the model, naming the line, where the model fails for the example,
    where no weight is trained, where there is no cut, and for a layer in evaluation mode inside a model in training
    mode that `frozen` does not reach.
    """
    return _captured(model=model, example=example, name=name or type(model).__name__, frozen=frozen)


def whole_front(model: nn.Module, example: Example, *, name: str | None = None) -> SplitModel:
    """Return a model that is a front half as a whole, with one cut at its end: a party's model in vertical training.

    torch.fx need not be able to follow it. Raises ConfigError where its output is not one float32 tensor whose first
    dimension is the batch.
    """
    return _whole(model=model, example=example, name=name or type(model).__name__, is_front=True)


def whole_back(model: nn.Module, *, name: str | None = None) -> SplitModel:
    """Return a model that is a back half as a whole, for any features: the cloud's model in vertical training."""
    return _whole(model=model, example=None, name=name or type(model).__name__, is_front=False)


@CAPTURE_LOCK.exclusive()
def _captured(*, model: nn.Module, example: Example, name: str, frozen: int | str | None) -> SplitModel:
    captured = CapturedGraph(model, name, example)
    places = captured.places()
    if not places:
        raise ConfigError(f"model {name}: has no place to cut it; a cut lies after an activation, a normalisation, "
                          "a pooling or a residual block through whose result all must pass, with weights on both "
                          "sides")
    frozen_until = _frozen_until(captured, places, frozen)
    frozen_nodes = [node for node in captured.nodes if captured.position[node] <= frozen_until]
    _freeze(captured, frozen_nodes, frozen)
    frozen_layers = _layers_within(captured, frozen_nodes)
    _require_training_mode(model, name, frozen_layers)
    tensors = tensors_of(model)
    front_ids = [captured.tensor_ids(captured.front(place)) for place in places]
    cuts = [_cut_point(captured, place, ids) for place, ids in zip(places, front_ids, strict=True)]
    return SplitModel(
        model=model, name=name, cuts=cuts,
        front_names=[frozenset(key for key, tensor in tensors.items() if id(tensor) in ids) for ids in front_ids],
        halves=GraphHalves(captured, places, frozen_until),
        frozen_layers=frozen_layers,
        fingerprint=_digest(captured, [point.name for point in cuts], frozen_until),
        arguments={"example": example, "name": name, "frozen": frozen},
        writes_in_place=captured.writes_in_place)


def _frozen_until(captured: CapturedGraph, places: Sequence[fx.Node], frozen: int | str | None) -> int:
    """Return the position of the last operation that is frozen, -1 for none."""
    if frozen is None:
        return -1
    if isinstance(frozen, int):
        if not 0 <= frozen < len(places):
            raise ConfigError(f"model {captured.name}: frozen = {frozen} is no cut; they are numbered 0 to "
                              f"{len(places) - 1}")
        return captured.position[places[frozen]]
    cuts = [place for place in places if captured.cut_name(place) == frozen]
    within = [node for node in captured.nodes if f"{captured.layer(node)}.".startswith(f"{frozen}.")]
    if not cuts and not within:
        layers = dict.fromkeys(captured.layer(node) for node in captured.nodes if node.op == "call_module")
        raise ConfigError(f"model {captured.name}: frozen = {frozen!r} is no layer; there are {', '.join(layers)}")
    return max(captured.position[node] for node in (cuts or within))


def _freeze(captured: CapturedGraph, frozen_nodes: Sequence[fx.Node], frozen: int | str | None) -> None:
    ids = captured.tensor_ids(frozen_nodes)
    remain = [weight for weight in captured.model.parameters() if weight.requires_grad and id(weight) not in ids]
    if not remain:
        what = "" if frozen is None else f" with everything frozen up to {frozen!r}; freeze less"
        raise ConfigError(f"model {captured.name}: nothing of it is trained{what}")
    for weight in captured.model.parameters():
        if id(weight) in ids:
            weight.requires_grad_(False)


def _require_training_mode(model: nn.Module, name: str, frozen_layers: frozenset[str]) -> None:
    """Raise `ConfigError` for a layer in evaluation mode that is not frozen, since halves train all such layers."""
    kept = [path for path, module in model.named_modules() if model.training and not module.training]
    unexpected = [path for path in kept if not any(f"{layer}.".startswith(f"{path}.") for layer in frozen_layers)]
    if unexpected:
        raise ConfigError(f"model {name}: layer {unexpected[0]!r} is in evaluation mode, but the model is in training "
                          "mode; put it into training mode, or name the last layer that is not trained with frozen=…")


def _layers_within(captured: CapturedGraph, nodes: Sequence[fx.Node]) -> frozenset[str]:
    """Return the paths of the modules that run only in these nodes, and of their submodules."""
    here = {captured.layer(node) for node in nodes if node.op == "call_module"}
    elsewhere = {captured.layer(node) for node in set(captured.nodes) - set(nodes)}
    roots = tuple(here - elsewhere)
    return frozenset(path for path, _ in captured.model.named_modules()
                     if any(f"{path}.".startswith(f"{root}.") for root in roots))


def _cut_point(captured: CapturedGraph, place: fx.Node, front_ids: set[int]) -> CutPoint:
    observed = captured.observations[place]
    assert observed.shape is not None
    front = [tensor for tensor in {id(t): t for t in tensors_of(captured.model).values()}.values()
             if id(tensor) in front_ids]
    trained = [tensor for tensor in front if tensor.requires_grad]
    # The root's own operations appear in a profile under its class's name.
    layers = {captured.layer(node) or type(captured.model).__name__ for node in captured.front(place)
              if node.op != "placeholder"}
    return CutPoint(
        name=captured.cut_name(place), feature_shape=observed.shape[1:], layout=observed.layout,
        front_layers=frozenset(layers), front_weight_bytes=_num_bytes(front), front_trained_bytes=_num_bytes(trained),
        front_trains=bool(trained))


def _num_bytes(tensors: Sequence[torch.Tensor]) -> float:
    return float(sum(tensor.numel() * tensor.element_size() for tensor in tensors))


def _digest(captured: CapturedGraph, cuts: Sequence[str], frozen_until: int) -> str:
    """Return SHA-256 of the graph by positions, since operation names may differ between versions of fx."""
    lines = [f"{cuts} {frozen_until}"]
    for node in captured.nodes:
        if node.op == "placeholder":
            lines.append(node.op)
            continue
        target = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
        arguments = fx.node.map_arg((node.args, node.kwargs), lambda other: f"%{captured.position[other]}")
        layer = ""
        if node.op == "call_module":
            module = captured.model.get_submodule(str(node.target))
            layer = f"{type(module).__name__}({module.extra_repr()})"
        lines.append(f"{node.op} {target} {arguments} {layer} {captured.observations[node].shape}")
    return _sha256(lines, captured.model)


def _sha256(lines: Sequence[str], model: nn.Module) -> str:
    shapes = [f"{key} {tuple(tensor.shape)} {tensor.dtype} {tensor.requires_grad}"
              for key, tensor in tensors_of(model).items()]
    return hashlib.sha256("\n".join([*lines, *shapes]).encode()).hexdigest()


class _WholeModel:
    """Halves of a model that is a half as a whole; it is not captured, so all its random draws come from one stream."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self.random_layers: Mapping[int, str] = {0: ""}

    def front(self, cut: int) -> nn.Module:
        return self._model

    def back(self, cut: int) -> nn.Module:
        return self._model


@CAPTURE_LOCK.shared()
def _whole(*, model: nn.Module, example: Example | None, name: str, is_front: bool) -> SplitModel:
    tensors = tensors_of(model)
    if not any(tensor.requires_grad for tensor in tensors.values()):
        raise ConfigError(f"model {name}: nothing of it is trained")
    _require_training_mode(model, name, frozenset())
    features = None if example is None else _whole_features(model, example, name)
    front = list(tensors.values()) if is_front else []
    trained = [tensor for tensor in front if tensor.requires_grad]
    point = CutPoint(
        name="end" if is_front else "start",
        feature_shape=() if features is None else tuple(features.shape[1:]),
        layout=() if features is None else layout_of(features),
        front_layers=frozenset(path for path, _ in model.named_modules()) if is_front else frozenset(),
        front_weight_bytes=_num_bytes(front), front_trained_bytes=_num_bytes(trained),
        # Not known for a back half; the front half avoids unneeded gradients by not requesting them.
        front_trains=True)
    shape = f"{point.feature_shape} {is_front}"
    return SplitModel(
        model=model, name=name, cuts=[point], front_names=[frozenset(tensors) if is_front else frozenset()],
        halves=_WholeModel(model), frozen_layers=frozenset(), fingerprint=_sha256([shape], model),
        arguments={"example": example, "name": name, "is_front": is_front})


def _whole_features(model: nn.Module, example: Example, name: str) -> torch.Tensor:
    samples = first_samples(model, example, name)
    try:
        with training_mode_pass(model):
            features = model(samples)
    except Exception as error:  # layers raise various types for a wrong shape
        shape = tuple(samples.shape[1:])
        raise ConfigError(f"model {name}: does not take samples of shape {shape}: {reason(error)}") from error
    if not (isinstance(features, torch.Tensor) and features.dtype is torch.float32 and features.ndim > 0
            and features.shape[0] == samples.shape[0]):
        raise ConfigError(f"model {name}: a front half yields one float32 tensor with the batch in front, not "
                          f"{getattr(features, 'shape', type(features).__name__)}")
    return features
