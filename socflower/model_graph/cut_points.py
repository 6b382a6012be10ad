"""The points at which a torch model can be cut in two, and its halves, which share the model's weights."""

import hashlib
import math
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx, nn
from torch.nn.modules import activation, normalization, pooling

from socflower.cluster.cost_model import ModelProfile
from socflower.errors import ConfigError
from socflower.model_graph.batch_form import Batch, form_of, num_samples, output_of
from socflower.model_graph.following import NoParts
from socflower.model_graph.graph import (
    CAPTURE_LOCK,
    Example,
    ModelGraph,
    Operation,
    capture,
    first_samples,
    refused_samples,
    tensors_of,
)
from socflower.model_graph.model_copy import copied, reason
from socflower.model_graph.parts import part_of, random_layers
from socflower.model_graph.random_state import forked_generators
from socflower.model_graph.tensor_arrays import layout_of, spec_of, tensor_bytes

_MODULES: tuple[type[nn.Module], ...] = (
    # torch lists attention under activations, but it returns two values.
    *(getattr(activation, name) for name in activation.__all__ if name != "MultiheadAttention"),
    # Unpooling takes a second input, the indices of the maxima.
    *(getattr(pooling, name) for name in pooling.__all__ if not name.startswith("MaxUnpool")),
    *(getattr(normalization, name) for name in normalization.__all__),
    nn.modules.batchnorm._NormBase,
)
_NAMES = frozenset(
    {
        "relu",
        "relu6",
        "leaky_relu",
        "prelu",
        "rrelu",
        "elu",
        "selu",
        "celu",
        "gelu",
        "silu",
        "mish",
        "hardswish",
        "hardtanh",
        "hardsigmoid",
        "tanh",
        "sigmoid",
        "logsigmoid",
        "softplus",
        "softsign",
        "tanhshrink",
        "softshrink",
        "hardshrink",
        "threshold",
        "glu",
        "softmax",
        "log_softmax",
        "softmin",
        "batch_norm",
        "instance_norm",
        "layer_norm",
        "group_norm",
        "local_response_norm",
        "rms_norm",
        "max_pool1d",
        "max_pool2d",
        "max_pool3d",
        "avg_pool1d",
        "avg_pool2d",
        "avg_pool3d",
        "lp_pool1d",
        "lp_pool2d",
        "lp_pool3d",
        "fractional_max_pool2d",
        "fractional_max_pool3d",
        "adaptive_max_pool1d",
        "adaptive_max_pool2d",
        "adaptive_max_pool3d",
        "adaptive_avg_pool1d",
        "adaptive_avg_pool2d",
        "adaptive_avg_pool3d",
        "mean",
        # Global pooling without a module.
        "amax",
    }
)
_SUMS = frozenset({"add", "iadd"})


@dataclass(frozen=True, kw_only=True, slots=True)
class CutPoint:
    """A point of the graph where exactly one tensor passes from the front layers to the back layers."""

    # The name of the front half's last layer: a module's path, or the graph's name of a function's result.
    name: str
    # The shape of one sample's features, which are float32.
    feature_shape: tuple[int, ...]
    # Dimensions, with the batch's, from the outermost in memory to the innermost.
    layout: tuple[int, ...]
    # Paths of the modules that run in the front half.
    front_layers: frozenset[str]
    # Entries of the model's state_dict in the front half.
    front_names: frozenset[str]
    # Size of its weights and buffers.
    front_weight_bytes: float
    # Size of its trained weights.
    front_trained_bytes: float
    # False: all layers before the cut are frozen.
    front_trains: bool

    @property
    def feature_elements(self) -> int:
        """Elements per sample that cross the cut."""
        return math.prod(self.feature_shape)

    def num_layers(self, profile: ModelProfile) -> int:
        """Return how many layers of `profile_module`'s profile of this model are in the front half."""
        return sum(layer.name in self.front_layers for layer in profile.layers)


@dataclass(frozen=True, kw_only=True, eq=False)
class SplitModel:
    """A model and its cuts, numbered in the order of its layers.

    The cut `num_cuts` puts all layers into the front half. The halves share parameters and buffers with `model`, under
    the same names. Frozen layers stay in evaluation mode, so that their batch statistics do not change.
    """

    model: nn.Module
    name: str
    cuts: tuple[CutPoint, ...]
    example: Example | None
    # None: the model is one half as a whole.
    graph: ModelGraph | None
    # The operation before each cut.
    places: tuple[Operation, ...] = ()
    # Inputs that both halves get, and what is computed from them alone, in both halves.
    common: Set[Operation] = frozenset()
    # Position of the last frozen operation; -1: none is frozen.
    frozen_until: int = -1
    # Paths of the layers that stay in evaluation mode.
    frozen_layers: frozenset[str] = frozenset()
    # Whether a layer may overwrite its input.
    writes_in_place: bool = True
    digest: str
    # The model that this is a copy of.
    origin: "SplitModel | None" = None
    specs: Mapping[str, torch.Tensor] = field(init=False)
    """Shape, strides and type of every tensor, without values. A half releases tensors that only the other uses."""

    def __post_init__(self) -> None:
        specs = {key: spec_of(tensor) for key, tensor in self.tensors().items()}
        object.__setattr__(self, "specs", specs)

    @property
    def num_cuts(self) -> int:
        """Number of cuts; used as a cut, it puts all layers into the front half."""
        return len(self.cuts)

    @property
    def random_layers(self) -> Mapping[int, str]:
        """The paths of layers that draw random numbers in training, by the number of their stream.

        A model that was not captured draws from one stream.
        """
        return {0: ""} if self.graph is None else random_layers(self.graph, self.frozen_until)

    def front(self, cut: int) -> nn.Module:
        """Return the layers up to and including the cut, from the model's input to the features."""
        self.check(cut)
        if self.graph is None:
            return self.model
        if cut == self.num_cuts:
            return part_of(self.model, self.graph, self.graph.operations, self.frozen_until)
        place = self.places[cut]
        operations = _front(self.graph, place, self.common)
        return part_of(self.model, self.graph, operations, self.frozen_until, end=place)

    def back(self, cut: int) -> nn.Module:
        """Return the layers behind the cut, from the features and shared inputs to the model's output."""
        self.check(cut)
        if cut == self.num_cuts:
            raise ConfigError(f"model {self.name}: nothing is behind cut {cut}, the whole model")
        if self.graph is None:
            return self.model
        place = self.places[cut]
        operations = _back(self.graph, place, self.common)
        return part_of(self.model, self.graph, operations, self.frozen_until, start=place)

    def front_names(self, cut: int) -> tuple[str, ...]:
        """Return the entries of the model's state_dict in the front half, in their order there."""
        self.check(cut)
        if cut == self.num_cuts:
            return tuple(self.tensors())
        front = self.cuts[cut].front_names
        return tuple(key for key in self.tensors() if key in front)

    def back_names(self, cut: int) -> tuple[str, ...]:
        """Return the other entries, also those that no layer uses."""
        front = set(self.front_names(cut))
        return tuple(key for key in self.tensors() if key not in front)

    def front_trains(self, cut: int) -> bool:
        """Return whether any layer before the cut is trained, so that the back half must return a gradient."""
        self.check(cut)
        return cut == self.num_cuts or self.cuts[cut].front_trains

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return the model's parameters and persistent buffers themselves, in the order of its state_dict."""
        return tensors_of(self.model)

    def set_training_mode(self) -> None:
        """Put all layers except frozen ones into training mode, for instance after an evaluation."""
        for path, module in self.model.named_modules():
            module.training = path not in self.frozen_layers

    def fingerprint(self) -> str:
        """Return a digest of the graph, its layers' settings, names, shapes and frozen layers, without values.

        Edge and cloud compare it to ensure that both cut the same model at the same points.
        """
        return self.digest

    def cut_named(self, name: str) -> int:
        """Return the number of a cut by its name; `ConfigError` lists the existing ones."""
        for number, point in enumerate(self.cuts):
            if point.name == name:
                return number
        names = ", ".join(point.name for point in self.cuts)
        raise ConfigError(f"model {self.name}: has no cut {name!r}; there are {names}")

    def samples(self, num_samples: int) -> torch.Tensor:
        """Return a batch of identical inputs that the model accepts; `ConfigError` if no example is known."""
        if self.example is None:
            raise ConfigError(f"model {self.name}: is a back half, without an example of features")
        samples: torch.Tensor = first_samples(self.model, self.example, self.name, num_samples)
        return samples

    def copy(self) -> "SplitModel":
        """Return a copy with its own weights, for one half of a training.

        Raises ConfigError if this model belongs to a half already.
        """
        if any(tensor.shape != self.specs[key].shape for key, tensor in self.tensors().items()):
            raise ConfigError(
                f"model {self.name}: belongs to a half, which has released some layers; copy it before"
            )
        return replace(self, model=copied(self.model, self.name), origin=self.origin or self)

    def check(self, cut: int) -> None:
        """Raise `ConfigError` for a cut that does not exist."""
        most = self.num_cuts
        if not 0 <= cut <= most:
            raise ConfigError(
                f"model {self.name}: cut = {cut} does not exist; use 0 to {most - 1}, or {most} for the "
                "whole model"
            )


def capture_split(
    model: nn.Module,
    example: Example,
    *,
    name: str | None = None,
    frozen: int | str | None = None,
    shared: Sequence[str] = (),
) -> SplitModel:
    """Return the cuts of `model`: after an activation, a norm, a pooling, a recurrent layer or a residual block.

    There is none inside branches. `example` is a batch, whose first sample is used, or the shape of one float32 sample.
    Every module or function of those kinds is a separate cut: a normalisation as well as the activation and the pooling
    behind it. Operations that follow (dropout, flattening) belong to the back half. A residual block ends with its sum,
    or with the activation or norm of the sum. A cut needs weights on both sides, and no weight on both; only one
    float32 tensor, whose first dimension is the batch, may cross it: no shortcut, and no size that was read from the
    input. The model is captured in training mode.

    `shared` names inputs that both halves get, such as an attention mask; both compute what depends on them alone.

    `frozen` is the number of a cut, or the path of a cut, layer or block. No layer up to it is trained (transfer
    learning): the weights stop requiring gradients, and the layers stay in evaluation mode.

    Raises ConfigError if torch.fx cannot follow the model, naming the line, if the model fails for the example, if no
    weight is trained, if there is no cut, and for a layer in evaluation mode inside a model in training mode that
    `frozen` does not reach.
    """
    graph = capture(model, example, name=name or "", several=bool(shared))
    common = _common(graph, shared)
    places = []
    for one in graph.operations:
        is_end = _is_place(model, one) or _ends_block(model, graph, one)
        if is_end and _can_cut(model, graph, one, common):
            places.append(one)
    if not places:
        raise NoParts(
            f"model {graph.name}: has no place to cut it; a cut lies after an activation, a normalisation, a "
            "pooling or a residual block, with weights on both sides"
        )
    frozen_until = _frozen_until(graph, places, frozen)
    frozen_operations = graph.operations[: frozen_until + 1]
    _freeze(model, graph.name, _tensor_names(frozen_operations))
    frozen_layers = _layers_within(model, graph, frozen_operations)
    _require_training_mode(model, graph.name, frozen_layers)
    if frozen_operations:
        _require_same_in_evaluation(graph)
    cuts = tuple(_cut_point(model, graph, place, common) for place in places)
    return SplitModel(
        model=model,
        name=graph.name,
        cuts=cuts,
        example=example,
        graph=graph,
        places=tuple(places),
        common=common,
        frozen_until=frozen_until,
        frozen_layers=frozen_layers,
        writes_in_place=any(one.writes_in_place for one in graph.operations),
        digest=_digest(model, graph, [*(point.name for point in cuts), *shared], frozen_until),
    )


def whole_front(
    model: nn.Module,
    example: Example | Batch,
    *,
    name: str | None = None,
    evaluating: Set[str] = frozenset(),
    may_be_frozen: bool = False,
) -> SplitModel:
    """Return an undivided model as a front half with one cut at its end: a party's model in vertical training.

    torch.fx does not follow it, and `example` may be inputs in a dict or tuple. Layers in `evaluating` stay in
    evaluation mode. Raises ConfigError if its output is not one float32 tensor whose first dimension is the batch, and
    if it has no trained weight, unless it `may_be_frozen`.
    """
    name = name or type(model).__name__
    return _whole(model, example, name, evaluating, may_be_frozen=may_be_frozen)


def whole_back(
    model: nn.Module,
    *,
    name: str | None = None,
    evaluating: Set[str] = frozenset(),
    may_be_frozen: bool = False,
    front_trains: bool = True,
) -> SplitModel:
    """Return an undivided model as a back half, for any features: the cloud's model in vertical training.

    Unless `front_trains`, it returns no gradients.
    """
    name = name or type(model).__name__
    trains = {"may_be_frozen": may_be_frozen, "front_trains": front_trains}
    return _whole(model, None, name, evaluating, **trains)


def _is_place(model: nn.Module, operation: Operation) -> bool:
    if operation.module is not None:
        return isinstance(model.get_submodule(operation.module), _MODULES)
    if _name_of(operation) == "getitem":
        # The outputs of a recurrent layer, which come with its last state.
        layer = operation.inputs[0].module
        return layer is not None and isinstance(model.get_submodule(layer), nn.RNNBase)
    return _name_of(operation) in _NAMES


def _name_of(operation: Operation) -> str:
    """Return the name of a function, without the overload that an exported module names."""
    return operation.function.partition(".")[0]


def _ends_block(model: nn.Module, graph: ModelGraph, operation: Operation) -> bool:
    """Return whether a residual block ends with this sum, and not with the activation or norm behind it."""
    if _name_of(operation) not in _SUMS:
        return False
    inputs = [one for one in operation.inputs if one.shape is not None and not one.is_constant]
    readers = graph.readers[operation]
    is_followed = len(readers) == 1 and _is_place(model, readers[0])
    return len(inputs) > 1 and not (is_followed and readers[0].shape == operation.shape)


def _common(graph: ModelGraph, shared: Sequence[str]) -> Set[Operation]:
    """Return the shared inputs and what is computed from them and constants alone, without layers and draws."""
    names = [str(one.node.target) for one in graph.inputs]
    if shared and not set(shared) < set(names):
        raise ConfigError(
            f"model {graph.name}: shared = {list(shared)} must be some of its inputs {', '.join(names)}, not all"
        )
    common = {one for one in graph.inputs if str(one.node.target) in shared}
    for one in graph.operations:
        is_call = one.node.op in ("call_function", "call_method") and not one.draws
        reads = {each for each in one.inputs if not each.is_constant}
        if is_call and reads and reads <= common:
            common.add(one)
    return common


def _can_cut(model: nn.Module, graph: ModelGraph, place: Operation, common: Set[Operation]) -> bool:
    if not place.is_of_samples or place.is_constant or place.dtype is not torch.float32:
        return False
    front, back = _front(graph, place, common), _back(graph, place, common)
    before, behind = set(front), set(back)
    crossing = {one for one in before - behind if not behind.isdisjoint(graph.readers[one])}
    if crossing != {place} or any(one.draws for one in before & behind):
        return False
    front_names, back_names = _tensor_names(front), _tensor_names(back)
    weights = {key for key, _ in model.named_parameters()}
    shared_names = front_names & back_names & tensors_of(model).keys()
    return bool(front_names & weights and back_names & weights) and not shared_names


def _front(graph: ModelGraph, place: Operation, common: Set[Operation]) -> list[Operation]:
    """Return the operations up to and including a place, and the constants that they need, in order."""
    return _with_constants(graph, graph.operations[: place.position + 1], common)


def _back(graph: ModelGraph, place: Operation, common: Set[Operation]) -> list[Operation]:
    """Return the operations after a place, and the constants that they need, in order."""
    return _with_constants(graph, graph.operations[place.position + 1 :], common)


def _with_constants(
    graph: ModelGraph, chosen: Iterable[Operation], common: Set[Operation]
) -> list[Operation]:
    def is_needed_in_both(operation: Operation) -> bool:
        return operation.is_constant or operation in common

    taken = {operation for operation in chosen if not is_needed_in_both(operation)}
    # Both halves are given all shared inputs.
    taken.update(one for one in graph.inputs if one in common)
    # In reverse order, so that the inputs of a constant are visited after the constant.
    for operation in reversed(graph.operations):
        if is_needed_in_both(operation) and not taken.isdisjoint(graph.readers[operation]):
            taken.add(operation)
    return [operation for operation in graph.operations if operation in taken]


def _tensor_names(operations: Iterable[Operation]) -> frozenset[str]:
    return frozenset().union(*(operation.tensors for operation in operations))


def _frozen_until(graph: ModelGraph, places: Sequence[Operation], frozen: int | str | None) -> int:
    """Return the position of the last operation that is frozen, -1 for none."""
    if frozen is None:
        return -1
    if isinstance(frozen, int):
        if 0 <= frozen < len(places):
            return places[frozen].position
        raise ConfigError(
            f"model {graph.name}: frozen = {frozen} is no cut; they are numbered 0 to {len(places) - 1}"
        )
    cuts = [place for place in places if graph.name_of(place) == frozen]
    within = [one for one in graph.operations if f"{one.layer}.".startswith(f"{frozen}.")]
    if cuts or within:
        return (cuts or within)[-1].position
    layers = dict.fromkeys(one.layer for one in graph.operations if one.module is not None)
    raise ConfigError(
        f"model {graph.name}: frozen = {frozen!r} is no layer; there are {', '.join(layers)}"
    )


def _freeze(model: nn.Module, name: str, names: frozenset[str]) -> None:
    parameters = dict(model.named_parameters())
    trained = {key for key, weight in parameters.items() if weight.requires_grad}
    if not trained - names:
        raise ConfigError(f"model {name}: nothing of it is trained; freeze less")
    for key in names & set(parameters):
        parameters[key].requires_grad_(False)


def _require_same_in_evaluation(graph: ModelGraph) -> None:
    """Raise `ConfigError` if evaluation runs other operations, since frozen operations are taken from there."""
    in_training = [(one.node.op, one.node.target) for one in graph.operations]
    if [(node.op, node.target) for node in graph.evaluation] != in_training:
        raise ConfigError(
            f"model {graph.name}: runs other operations in training than in evaluation, so no part of it "
            "can be frozen; use nn.Dropout in place of `if self.training`"
        )


def _require_training_mode(model: nn.Module, name: str, frozen_layers: frozenset[str]) -> None:
    """Raise `ConfigError` for a layer in evaluation mode that is not frozen, since halves train all such layers."""
    for path, module in model.named_modules():
        is_frozen = any(f"{layer}.".startswith(f"{path}.") for layer in frozen_layers)
        if model.training and not module.training and not is_frozen:
            raise ConfigError(
                f"model {name}: layer {path!r} is in evaluation mode, but the model is in training mode; "
                "put it into training mode, or freeze it with frozen=…"
            )


def _layers_within(
    model: nn.Module, graph: ModelGraph, operations: Sequence[Operation]
) -> frozenset[str]:
    """Return the paths of the modules that run only in these operations, and of their submodules."""
    here = {one.module for one in operations if one.module is not None}
    roots = here - {one.layer for one in set(graph.operations) - set(operations)}
    starts = tuple(f"{root}." for root in roots)
    return frozenset(path for path, _ in model.named_modules() if f"{path}.".startswith(starts))


def _cut_point(
    model: nn.Module, graph: ModelGraph, place: Operation, common: Set[Operation]
) -> CutPoint:
    assert place.shape is not None
    front = _front(graph, place, common)
    named = dict([*model.named_buffers(), *model.named_parameters()])
    ids = {id(named[key]) for key in _tensor_names(front) if key in named}
    entries = {key: tensor for key, tensor in tensors_of(model).items() if id(tensor) in ids}
    # A shared tensor counts once.
    tensors = list({id(tensor): tensor for tensor in entries.values()}.values())
    trained = [tensor for tensor in tensors if tensor.requires_grad]
    # The root's own operations appear in a profile under its class's name.
    layers = {one.layer or type(model).__name__ for one in front if one.node.op != "placeholder"}
    return CutPoint(
        name=graph.name_of(place),
        feature_shape=place.shape[1:],
        layout=place.layout,
        front_layers=frozenset(layers),
        front_names=frozenset(entries),
        front_weight_bytes=float(tensor_bytes(tensors)),
        front_trained_bytes=float(tensor_bytes(trained)),
        front_trains=bool(trained),
    )


def _digest(model: nn.Module, graph: ModelGraph, cuts: Sequence[str], frozen_until: int) -> str:
    """Return SHA-256 of the graph by positions, since operation names may differ between versions of fx."""
    lines = [f"{cuts} {frozen_until}"]
    for operation in graph.operations:
        node = operation.node
        if node.op == "placeholder":
            lines.append(node.op)
            continue
        is_name = isinstance(node.target, str)
        target = node.target if is_name else getattr(node.target, "__name__", "")
        own = (node.args, node.kwargs)
        arguments = fx.node.map_arg(own, lambda other: f"%{graph.by_node[other].position}")
        layer = ""
        if operation.module is not None:
            module = model.get_submodule(operation.module)
            layer = f"{type(module).__name__}({module.extra_repr()})"
        lines.append(f"{node.op} {target} {arguments} {layer} {operation.shape}")
    return _sha256(lines, model)


def _sha256(lines: Sequence[str], model: nn.Module) -> str:
    shapes = [
        f"{key} {tuple(tensor.shape)} {tensor.dtype} {tensor.requires_grad}"
        for key, tensor in tensors_of(model).items()
    ]
    return hashlib.sha256("\n".join([*lines, *shapes]).encode()).hexdigest()


@CAPTURE_LOCK.shared()
def _whole(
    model: nn.Module,
    example: Example | Batch | None,
    name: str,
    evaluating: Set[str],
    *,
    may_be_frozen: bool,
    front_trains: bool = True,
) -> SplitModel:
    """Return a front half, or without an example a back half."""
    tensors = tensors_of(model)
    is_trained = any(tensor.requires_grad for tensor in tensors.values())
    if not is_trained and not may_be_frozen:
        raise ConfigError(f"model {name}: nothing of it is trained")
    _require_training_mode(model, name, frozenset(evaluating))
    if example is None:
        point = _point("start", None, {}, frozenset(), front_trains)
    else:
        features = _whole_features(model, example, name)
        layers = frozenset(path for path, _ in model.named_modules())
        point = _point("end", features, tensors, layers, is_trained)
    return SplitModel(
        model=model,
        name=name,
        cuts=(point,),
        graph=None,
        frozen_layers=frozenset(evaluating),
        example=example if _is_example(example) else None,
        digest=_sha256([f"{point.feature_shape} {example is not None}"], model),
    )


def _point(
    name: str,
    features: torch.Tensor | None,
    front: Mapping[str, torch.Tensor],
    layers: frozenset[str],
    front_trains: bool,
) -> CutPoint:
    trained = [tensor for tensor in front.values() if tensor.requires_grad]
    return CutPoint(
        name=name,
        feature_shape=() if features is None else tuple(features.shape[1:]),
        layout=() if features is None else layout_of(features),
        front_layers=layers,
        front_names=frozenset(front),
        front_weight_bytes=float(tensor_bytes(front.values())),
        front_trained_bytes=float(tensor_bytes(trained)),
        front_trains=front_trains,
    )


def _is_example(example: object) -> bool:
    if isinstance(example, tuple):
        return all(isinstance(size, int) for size in example)
    return isinstance(example, torch.Tensor)


def _whole_features(model: nn.Module, example: Example | Batch, name: str) -> torch.Tensor:
    samples = first_samples(model, example, name) if _is_example(example) else example
    own = copied(model, name).train()
    features: Any
    try:
        with forked_generators(), torch.no_grad():
            features = output_of(own, samples)
    except Exception as error:
        # Layers raise various types for a wrong shape.
        if isinstance(samples, torch.Tensor):
            raise refused_samples(name, samples, error) from error
        raise ConfigError(
            f"model {name}: does not take {form_of(samples)}: {reason(error)}"
        ) from error
    is_float32 = isinstance(features, torch.Tensor) and features.dtype is torch.float32
    if is_float32 and features.ndim and len(features) == num_samples(samples):
        found: torch.Tensor = features
        return found
    raise ConfigError(
        f"model {name}: a front half yields one float32 tensor with the batch in front, not "
        f"{form_of(features)}"
    )
