"""The points at which a torch model can be cut in two, and the two halves, which share the model's weights."""

import hashlib
import math
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace

import torch
from torch import fx, nn
from torch.nn.modules import activation, normalization, pooling

from socflower.cluster.cost_model import ModelProfile
from socflower.errors import ConfigError
from socflower.model_graph.batch_form import Batch, form_of, num_samples, output_of
from socflower.model_graph.following import NoParts
from socflower.model_graph.graph import (
    CAPTURE_LOCK,
    NUM_SAMPLES,
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
from socflower.model_graph.tensor_arrays import layout_of, spec_of

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

    # Of the front half's last layer: a module's path, or the graph's name of a function's result.
    name: str
    # Of one sample; its elements are float32.
    feature_shape: tuple[int, ...]
    # Dimensions, the batch's included, from the outermost in memory to the innermost.
    layout: tuple[int, ...]
    # Modules that run in the front half, by path.
    front_layers: frozenset[str]
    # Entries of the model's state_dict that the front half has.
    front_names: frozenset[str]
    # Weights and buffers.
    front_weight_bytes: float
    # Of these, weights that are trained.
    front_trained_bytes: float
    # False: all before the cut is frozen.
    front_trains: bool

    @property
    def feature_elements(self) -> int:
        """Elements per sample that are sent across the cut."""
        return math.prod(self.feature_shape)

    def num_layers(self, profile: ModelProfile) -> int:
        """Return how many layers of `profile_module`'s profile of this model are in the front half."""
        return sum(layer.name in self.front_layers for layer in profile.layers)


@dataclass(frozen=True, kw_only=True, eq=False)
class SplitModel:
    """A model and its cuts, numbered in the order of its layers.

    `num_cuts` as a cut means that everything is in the front half. The halves are modules that share parameters and
    buffers with `model`, under the same names. Frozen layers stay in evaluation mode, so that their batch statistics
    do not change.
    """

    model: nn.Module
    name: str
    cuts: tuple[CutPoint, ...]
    example: Example | None
    # None: the model is one half as a whole.
    graph: ModelGraph | None
    # Behind which the model is cut.
    places: tuple[Operation, ...] = ()
    # Position of the last frozen operation.
    frozen_until: int = -1
    # By path; they stay in evaluation mode.
    frozen_layers: frozenset[str] = frozenset()
    # A layer may overwrite its input.
    writes_in_place: bool = True
    digest: str
    # Of which it is a copy.
    origin: "SplitModel | None" = None
    specs: Mapping[str, torch.Tensor] = field(init=False)
    """Shape, strides and type of every tensor, without values. A half releases tensors that only the other uses."""

    def __post_init__(self) -> None:
        object.__setattr__(
            self, "specs", {key: spec_of(tensor) for key, tensor in self.tensors().items()}
        )

    @property
    def num_cuts(self) -> int:
        """Number of cuts; used as a cut, it puts all layers into the front half."""
        return len(self.cuts)

    @property
    def random_layers(self) -> Mapping[int, str]:
        """Layers that draw random numbers in training: number of the stream, and path.

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
        return part_of(
            self.model, self.graph, _front(self.graph, place), self.frozen_until, end=place
        )

    def back(self, cut: int) -> nn.Module:
        """Return the layers behind the cut, from the features to the model's output."""
        self.check(cut)
        if cut == self.num_cuts:
            raise ConfigError(
                f"model {self.name}: nothing is behind cut {cut}, which stands for the whole model"
            )
        if self.graph is None:
            return self.model
        place = self.places[cut]
        return part_of(
            self.model, self.graph, _back(self.graph, place), self.frozen_until, start=place
        )

    def front_names(self, cut: int) -> tuple[str, ...]:
        """Return which entries of the model's state_dict the front half has, in their order there."""
        self.check(cut)
        names = tuple(self.tensors())
        return (
            names
            if cut == self.num_cuts
            else tuple(key for key in names if key in self.cuts[cut].front_names)
        )

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
        return self.digest

    def cut_named(self, name: str) -> int:
        """Return the number of a cut by its name; `ConfigError` lists the existing ones."""
        for number, point in enumerate(self.cuts):
            if point.name == name:
                return number
        raise ConfigError(
            f"model {self.name}: has no cut {name!r}; there are {', '.join(p.name for p in self.cuts)}"
        )

    def samples(self, num_samples: int) -> torch.Tensor:
        """Return a batch of identical inputs that the model accepts; `ConfigError` if no example is known."""
        if self.example is None:
            raise ConfigError(
                f"model {self.name}: is a back half as a whole, of whose features no example is known"
            )
        return first_samples(self.model, self.example, self.name, num_samples)

    def copy(self) -> "SplitModel":
        """Return a copy with its own weights; each half of a training takes ownership of one.

        Raises ConfigError once a half has taken ownership of this one.
        """
        if any(tensor.shape != self.specs[key].shape for key, tensor in self.tensors().items()):
            raise ConfigError(
                f"model {self.name}: belongs to a half, which has released some layers; copy it before"
            )
        return replace(self, model=copied(self.model, self.name), origin=self.origin or self)

    def check(self, cut: int) -> None:
        """Raise `ConfigError` for a cut that does not exist."""
        if not 0 <= cut <= self.num_cuts:
            raise ConfigError(
                f"model {self.name}: cut = {cut} does not exist; use 0 to {self.num_cuts - 1}, or "
                f"{self.num_cuts} for all layers in the front half"
            )


def capture_split(
    model: nn.Module,
    example: Example,
    *,
    name: str | None = None,
    frozen: int | str | None = None,
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
    graph = capture(model, example, name=name or "")
    places = tuple(
        one
        for one in graph.operations
        if (_is_place(model, one) or _ends_block(model, graph, one)) and _can_cut(model, graph, one)
    )
    if not places:
        raise NoParts(
            f"model {graph.name}: has no place to cut it; a cut lies after an activation, a normalisation, a "
            "pooling or a residual block through whose result all must pass, with weights on both sides"
        )
    frozen_until = _frozen_until(graph, places, frozen)
    frozen_operations = graph.operations[: frozen_until + 1]
    _freeze(model, graph.name, _tensor_names(frozen_operations), frozen)
    frozen_layers = _layers_within(model, graph, frozen_operations)
    _require_training_mode(model, graph.name, frozen_layers)
    if frozen_operations:
        _require_same_in_evaluation(graph)
    cuts = tuple(_cut_point(model, graph, place) for place in places)
    return SplitModel(
        model=model,
        name=graph.name,
        cuts=cuts,
        example=example,
        graph=graph,
        places=places,
        frozen_until=frozen_until,
        frozen_layers=frozen_layers,
        writes_in_place=any(one.writes_in_place for one in graph.operations),
        digest=_digest(model, graph, [point.name for point in cuts], frozen_until),
    )


def whole_front(
    model: nn.Module,
    example: Example | Batch,
    *,
    name: str | None = None,
    evaluating: Set[str] = frozenset(),
    may_be_frozen: bool = False,
) -> SplitModel:
    """Return a model that is a front half as a whole, with one cut at its end: a party's model in vertical training.

    torch.fx need not be able to follow it, and `example` may be inputs in a dict or tuple. Layers in `evaluating` stay
    in evaluation mode. Raises ConfigError where its output is not one float32 tensor whose first dimension is the
    batch, and where nothing of it is trained, unless it `may_be_frozen`.
    """
    return _whole(
        model, example, name or type(model).__name__, evaluating, may_be_frozen=may_be_frozen
    )


def whole_back(
    model: nn.Module,
    *,
    name: str | None = None,
    evaluating: Set[str] = frozenset(),
    may_be_frozen: bool = False,
    front_trains: bool = True,
) -> SplitModel:
    """Return a model that is a back half as a whole, for any features: the cloud's model in vertical training.

    Unless `front_trains` it returns no gradients.
    """
    return _whole(
        model,
        None,
        name or type(model).__name__,
        evaluating,
        may_be_frozen=may_be_frozen,
        front_trains=front_trains,
    )


def _is_place(model: nn.Module, operation: Operation) -> bool:
    if operation.module is not None:
        return isinstance(model.get_submodule(operation.module), _MODULES)
    return operation.function in _NAMES


def _ends_block(model: nn.Module, graph: ModelGraph, operation: Operation) -> bool:
    """Return whether a residual block ends with this sum; a block's activation or norm is its end instead."""
    parts = [
        other for other in operation.inputs if other.shape is not None and not other.is_constant
    ]
    readers = graph.readers[operation]
    followed = (
        len(readers) == 1 and _is_place(model, readers[0]) and readers[0].shape == operation.shape
    )
    return operation.function in _SUMS and len(parts) > 1 and not followed


def _can_cut(model: nn.Module, graph: ModelGraph, place: Operation) -> bool:
    if (
        place.is_constant
        or place.dtype is not torch.float32
        or not place.shape
        or place.shape[0] != NUM_SAMPLES
    ):
        return False
    front, back = _front(graph, place), _back(graph, place)
    before, behind = set(front), set(back)
    crossing = {one for one in before - behind if not behind.isdisjoint(graph.readers[one])}
    if crossing != {place} or any(one.draws for one in before & behind):
        return False
    front_names, back_names = _tensor_names(front), _tensor_names(back)
    weights = {key for key, _ in model.named_parameters()}
    return bool(front_names & weights and back_names & weights) and not front_names & back_names


def _front(graph: ModelGraph, place: Operation) -> list[Operation]:
    """Return the operations up to and including a place, and the constants that they need, in order."""
    return _with_constants(graph, graph.operations[: place.position + 1])


def _back(graph: ModelGraph, place: Operation) -> list[Operation]:
    """Return the operations after a place, and the constants that they need, in order."""
    return _with_constants(graph, graph.operations[place.position + 1 :])


def _with_constants(graph: ModelGraph, chosen: Iterable[Operation]) -> list[Operation]:
    taken = {operation for operation in chosen if not operation.is_constant}
    # In reverse order, so that the inputs of a constant are visited after the constant.
    for operation in reversed(graph.operations):
        if operation.is_constant and not taken.isdisjoint(graph.readers[operation]):
            taken.add(operation)
    return [operation for operation in graph.operations if operation in taken]


def _tensor_names(operations: Iterable[Operation]) -> frozenset[str]:
    return frozenset().union(*(operation.tensors for operation in operations))


def _frozen_until(graph: ModelGraph, places: Sequence[Operation], frozen: int | str | None) -> int:
    """Return the position of the last operation that is frozen, -1 for none."""
    if frozen is None:
        return -1
    if isinstance(frozen, int):
        if not 0 <= frozen < len(places):
            raise ConfigError(
                f"model {graph.name}: frozen = {frozen} is no cut; they are numbered 0 to "
                f"{len(places) - 1}"
            )
        return places[frozen].position
    cuts = [place for place in places if graph.name_of(place) == frozen]
    within = [one for one in graph.operations if f"{one.layer}.".startswith(f"{frozen}.")]
    if not cuts and not within:
        layers = dict.fromkeys(one.layer for one in graph.operations if one.module is not None)
        raise ConfigError(
            f"model {graph.name}: frozen = {frozen!r} is no layer; there are {', '.join(layers)}"
        )
    return (cuts or within)[-1].position


def _freeze(model: nn.Module, name: str, names: frozenset[str], frozen: int | str | None) -> None:
    parameters = dict(model.named_parameters())
    if not any(weight.requires_grad and key not in names for key, weight in parameters.items()):
        what = "" if frozen is None else f" with everything frozen up to {frozen!r}; freeze less"
        raise ConfigError(f"model {name}: nothing of it is trained{what}")
    for key in names & set(parameters):
        parameters[key].requires_grad_(False)


def _require_same_in_evaluation(graph: ModelGraph) -> None:
    """Raise `ConfigError` where evaluation runs other operations, since frozen ones are taken from there."""
    if [(n.op, n.target) for n in graph.evaluation] != [
        (one.node.op, one.node.target) for one in graph.operations
    ]:
        raise ConfigError(
            f"model {graph.name}: runs other operations in training than in evaluation, so no part of "
            "it can be frozen; use modules such as nn.Dropout in place of `if self.training`"
        )


def _require_training_mode(model: nn.Module, name: str, frozen_layers: frozenset[str]) -> None:
    """Raise `ConfigError` for a layer in evaluation mode that is not frozen, since halves train all such layers."""
    kept = [
        path for path, module in model.named_modules() if model.training and not module.training
    ]
    unexpected = [
        path
        for path in kept
        if not any(f"{layer}.".startswith(f"{path}.") for layer in frozen_layers)
    ]
    if unexpected:
        raise ConfigError(
            f"model {name}: layer {unexpected[0]!r} is in evaluation mode, but the model is in training "
            "mode; put it into training mode, or name the last layer that is not trained with frozen=…"
        )


def _layers_within(
    model: nn.Module, graph: ModelGraph, operations: Sequence[Operation]
) -> frozenset[str]:
    """Return the paths of the modules that run only in these operations, and of their submodules."""
    here = {one.module for one in operations if one.module is not None}
    roots = here - {one.layer for one in set(graph.operations) - set(operations)}
    return frozenset(
        path
        for path, _ in model.named_modules()
        if any(f"{path}.".startswith(f"{root}.") for root in roots)
    )


def _cut_point(model: nn.Module, graph: ModelGraph, place: Operation) -> CutPoint:
    assert place.shape is not None
    front = _front(graph, place)
    used = _tensor_names(front)
    ids = {
        id(tensor)
        for key, tensor in [*model.named_buffers(), *model.named_parameters()]
        if key in used
    }
    entries = {key: tensor for key, tensor in tensors_of(model).items() if id(tensor) in ids}
    # A shared one counts once.
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
        front_weight_bytes=_num_bytes(tensors),
        front_trained_bytes=_num_bytes(trained),
        front_trains=bool(trained),
    )


def _num_bytes(tensors: Iterable[torch.Tensor]) -> float:
    return float(sum(tensor.numel() * tensor.element_size() for tensor in tensors))


def _digest(model: nn.Module, graph: ModelGraph, cuts: Sequence[str], frozen_until: int) -> str:
    """Return SHA-256 of the graph by positions, since operation names may differ between versions of fx."""
    lines = [f"{cuts} {frozen_until}"]
    for operation in graph.operations:
        node = operation.node
        if node.op == "placeholder":
            lines.append(node.op)
            continue
        target = (
            node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
        )
        arguments = fx.node.map_arg(
            (node.args, node.kwargs), lambda other: f"%{graph.by_node[other].position}"
        )
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
    """Return a front half as a whole, or without an example a back half."""
    tensors = tensors_of(model)
    trained = [tensor for tensor in tensors.values() if tensor.requires_grad]
    if not trained and not may_be_frozen:
        raise ConfigError(f"model {name}: nothing of it is trained")
    _require_training_mode(model, name, frozenset(evaluating))
    features = None if example is None else _whole_features(model, example, name)
    front = {} if features is None else tensors
    point = CutPoint(
        name="start" if features is None else "end",
        feature_shape=() if features is None else tuple(features.shape[1:]),
        layout=() if features is None else layout_of(features),
        front_layers=frozenset()
        if features is None
        else frozenset(path for path, _ in model.named_modules()),
        front_names=frozenset(front),
        front_weight_bytes=_num_bytes(front.values()),
        front_trained_bytes=_num_bytes(tensor for tensor in front.values() if tensor.requires_grad),
        front_trains=front_trains if features is None else bool(trained),
    )
    return SplitModel(
        model=model,
        name=name,
        cuts=(point,),
        graph=None,
        frozen_layers=frozenset(evaluating),
        example=example if _is_example(example) else None,
        digest=_sha256([f"{point.feature_shape} {features is not None}"], model),
    )


def _is_example(example: object) -> bool:
    return isinstance(example, torch.Tensor) or (
        isinstance(example, tuple) and all(isinstance(size, int) for size in example)
    )


def _whole_features(model: nn.Module, example: Example | Batch, name: str) -> torch.Tensor:
    samples = first_samples(model, example, name) if _is_example(example) else example
    own = copied(model, name).train()
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
    if not (
        isinstance(features, torch.Tensor)
        and features.dtype is torch.float32
        and features.ndim > 0
        and features.shape[0] == num_samples(samples)
    ):
        raise ConfigError(
            f"model {name}: a front half yields one float32 tensor with the batch in front, not "
            f"{getattr(features, 'shape', type(features).__name__)}"
        )
    return features
