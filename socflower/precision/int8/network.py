"""The graph of a network in the integer engine: the operators and the shapes of their values.

A value has the name of the node that computes it; its shape is (channels, height, width) without the batch. A linear
layer is a convolution whose kernel covers its input, so a flatten before it needs no node.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, ClassVar, TypeVar

from socflower.errors import ConfigError

Shape = tuple[int, int, int]
Pair = tuple[int, int]
Geometry = tuple[int, int, int, int, int, int, int, int, int, int, int, int]
OutsideName = tuple[str, str, tuple[int, ...]]
_ArrayT = TypeVar("_ArrayT", bound=Any)

INPUT = "input"
"""Name of the value that holds the images."""


class UnsupportedOperator(ConfigError):
    """An operator that only the FP32 side can run. `module` is the module that calls it; "" is the network itself.

    `modules` are those that `fp32_operators` must list so that the network can train; `module` is one of them. Without
    any, the operator runs in FP32 only once it is a module of its own (`must_move`).
    """

    def __init__(
        self, what: str, module: str, modules: Sequence[str] = (), *, must_move: bool = False
    ) -> None:
        self.what = what
        self.module = module
        self.modules = list(modules) or [module]
        self._must_move = must_move
        super().__init__(f"{what}; {self._remedy('{}')}")

    def advising(self, call: str) -> ConfigError:
        """Return the error with its remedy as a call, {} for the setting, such as "Int8Trainer({})"."""
        return ConfigError(f"{self.what}; {self._remedy(call)}")

    def _remedy(self, call: str) -> str:
        in_fp32 = call.format("unsupported='fp32'")
        if self._must_move:
            return (
                "move it into a module of its own, of one tensor in and one out, which runs in FP32"
            )
        if not self.module:
            return f"use {in_fp32} to run all such operators in FP32"
        named = call.format(f"fp32_operators={self.modules}")
        return f"use {in_fp32} to run all such operators in FP32, or {named} to name them"


_KINDS: dict[str, type[Node]] = {}


@dataclass(frozen=True, kw_only=True, slots=True)
class Node:
    """An operator: the values it reads and the shape of its output.

    `name` is also the prefix of its parameters in the module's state_dict; `outside` lists those that have another name
    or shape there: (parameter, name, shape). `frozen` has the names of the parameters that training does not change.
    """

    kind: ClassVar[str] = ""
    # Whether the operator computes no negative value: from any input, or from an input without negative values.
    non_negative: ClassVar[bool] = False
    keeps_sign: ClassVar[bool] = False
    name: str
    inputs: tuple[str, ...]
    shape: Shape
    frozen: tuple[str, ...] = ()
    outside: tuple[OutsideName, ...] = ()

    def __init_subclass__(cls, **settings: Any) -> None:
        """Register the kind, so that `Graph.from_json` finds it."""
        # No call of `super()` without arguments: a dataclass with slots is made a second time, as another class.
        if cls.kind:
            _KINDS[cls.kind] = cls

    def made_shape(self, inputs: Sequence[Shape]) -> Shape | None:
        """Return the shape that it makes of inputs of these shapes, None if it cannot read them."""
        return inputs[0]

    def check(self) -> str:
        """Return what is wrong with its settings, "" if nothing is."""
        return ""

    @property
    def parameters(self) -> tuple[str, ...]:
        """Its parameters, by their names in the module."""
        return ()

    @property
    def vectors(self) -> tuple[str, ...]:
        """Its arrays of one float32 value per channel, by their names in the module: parameters and statistics."""
        return ()

    @property
    def trained(self) -> tuple[str, ...]:
        """Its parameters that training changes."""
        return tuple(name for name in self.parameters if name not in self.frozen)


@dataclass(frozen=True, kw_only=True, slots=True)
class Weighted(Node):
    """An operator with a `weight` in int8, (out, in/groups, kh, kw), and a bias of one value per output channel."""

    kernel: Pair
    stride: Pair = (1, 1)
    padding: Pair = (0, 0)
    groups: int = 1
    bias: bool = False
    dilation: Pair = (1, 1)

    def weight_shape(self, in_channels: int) -> tuple[int, int, int, int]:
        """Return the shape of the weight for an input of so many channels."""
        return self.shape[0], in_channels // self.groups, *self.kernel

    @property
    def parameters(self) -> tuple[str, ...]:
        """Weight and, if it has one, bias."""
        return ("weight", *self.vectors)

    @property
    def vectors(self) -> tuple[str, ...]:
        """The bias, if it has one."""
        return ("bias",) if self.bias else ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Convolution(Weighted):
    """Convolution or linear layer, with a fused ReLU if `relu`.

    A `linear` layer's weight is (out, in * kh * kw) in the module.
    """

    kind: ClassVar[str] = "convolution"
    relu: bool = False
    linear: bool = False

    def made_shape(self, inputs: Sequence[Shape]) -> Shape | None:
        """Return (out channels, height, width)."""
        height, width = window_positions(inputs[0], self)
        return self.shape[0], height, width


@dataclass(frozen=True, kw_only=True, slots=True)
class TransposedConvolution(Weighted):
    """The input gradient of a convolution as an operator; the weight is (in, out/groups, kh, kw), as in torch."""

    kind: ClassVar[str] = "transposed-convolution"

    def weight_shape(self, in_channels: int) -> tuple[int, int, int, int]:
        """Return (in, out/groups, kh, kw)."""
        return in_channels, self.shape[0] // self.groups, *self.kernel

    def made_shape(self, inputs: Sequence[Shape]) -> Shape | None:
        """Return its own shape if the convolution of that shape makes the input's."""
        return self.shape if window_positions(self.shape, self) == inputs[0][1:] else None


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchNorm(Node):
    """Normalisation over batch and pixels with learned scale and offset, with a fused ReLU if `relu`."""

    kind: ClassVar[str] = "batch-norm"
    eps: float
    momentum: float
    relu: bool = False

    @property
    def parameters(self) -> tuple[str, ...]:
        """Scale and offset."""
        return ("weight", "bias")

    @property
    def vectors(self) -> tuple[str, ...]:
        """Scale, offset and running statistics."""
        return (*self.parameters, "running_mean", "running_var")


@dataclass(frozen=True, kw_only=True, slots=True)
class Relu(Node):
    """A ReLU that could not be fused into the operator before it."""

    kind: ClassVar[str] = "relu"


@dataclass(frozen=True, kw_only=True, slots=True)
class _Pool(Node):
    """An operator over windows."""

    keeps_sign: ClassVar[bool] = True
    kernel: Pair
    stride: Pair
    padding: Pair = (0, 0)

    def made_shape(self, inputs: Sequence[Shape]) -> Shape | None:
        """Return (channels, height, width)."""
        height, width = window_positions(inputs[0], self)
        return inputs[0][0], height, width


@dataclass(frozen=True, kw_only=True, slots=True)
class MaxPool(_Pool):
    """Maximum over windows."""

    kind: ClassVar[str] = "max-pool"


@dataclass(frozen=True, kw_only=True, slots=True)
class AveragePool(_Pool):
    """Mean over windows; padding counts as zeros."""

    kind: ClassVar[str] = "average-pool"


@dataclass(frozen=True, kw_only=True, slots=True)
class Add(Node):
    """Residual addition, with a fused ReLU if `relu`."""

    kind: ClassVar[str] = "add"
    relu: bool = False

    def made_shape(self, inputs: Sequence[Shape]) -> Shape | None:
        """Return the shape of both inputs."""
        return inputs[0] if len(inputs) == 2 and inputs[0] == inputs[1] else None


@dataclass(frozen=True, kw_only=True, slots=True)
class Dropout(Node):
    """Zero each element, or each channel of an image, with probability `p`; multiply the rest by 1 / (1 - p).

    This holds in training; in evaluation the values do not change.
    """

    kind: ClassVar[str] = "dropout"
    keeps_sign: ClassVar[bool] = True
    p: float
    channelwise: bool = False

    def check(self) -> str:
        """Refuse what is no probability."""
        return "" if 0.0 <= self.p <= 1.0 else f"p = {self.p}; it must lie in [0, 1]"


@dataclass(frozen=True, kw_only=True, slots=True)
class Fp32(Node):
    """An operator that runs in torch FP32: it has no int8 kernel, or `fp32_operators` names its module.

    `operator` is the module's type, or the functions it consists of, for messages. `path` is that of the module, which
    may be called by several nodes if it has no parameters; `own` are its parameters. `forms` are the shapes that torch
    gives the inputs, without the batch.
    """

    kind: ClassVar[str] = "fp32"
    operator: str
    path: str = ""
    own: tuple[str, ...] = ()
    forms: tuple[tuple[int, ...], ...] = ()

    def made_shape(self, inputs: Sequence[Shape]) -> Shape | None:
        """Return its own shape: torch alone knows what the module makes."""
        sizes = [math.prod(shape) for shape in inputs]
        return self.shape if sizes == [math.prod(form) for form in self.forms] else None

    @property
    def parameters(self) -> tuple[str, ...]:
        """Parameters of the module."""
        return self.own


@dataclass(frozen=True, kw_only=True, slots=True)
class Graph:
    """Nodes in an order in which every value is computed before it is read."""

    input_shape: Shape
    nodes: tuple[Node, ...]

    def __post_init__(self) -> None:
        if not self.nodes:
            raise ConfigError("graph: there is no operator to train")
        made = {INPUT}
        read: set[str] = set()
        for node in self.nodes:
            unknown = [value for value in node.inputs if value not in made]
            if unknown:
                raise ConfigError(
                    f"graph: {node.name} reads {unknown[0]!r}, which no node makes before"
                )
            if node.name in made:
                raise ConfigError(
                    f"{node.name}: runs twice, and int8 operators share no weights; make a module for each "
                    "call, or list the module around them in fp32_operators"
                )
            made.add(node.name)
            read.update(node.inputs)
            _require_geometry(node, [self.shape_of(value) for value in node.inputs])
        unread = [node.name for node in self.nodes[:-1] if node.name not in read]
        if unread:
            raise ConfigError(f"graph: nothing reads the result of {', '.join(unread)}")

    @property
    def draws(self) -> bool:
        """Whether a step draws random numbers, so that it reads a seed."""
        return any(isinstance(node, Dropout) for node in self.nodes)

    @property
    def output(self) -> str:
        """Name of the value that holds the logits."""
        return self.nodes[-1].name

    @property
    def num_classes(self) -> int:
        """Number of logits."""
        return self.nodes[-1].shape[0]

    def shape_of(self, value: str) -> Shape:
        """Return the shape of a value."""
        return self.input_shape if value == INPUT else self.node(value).shape

    def weight_shape(self, node: Weighted) -> tuple[int, int, int, int]:
        """Return (out, in/groups, kh, kw); for a transposed convolution (in, out/groups, kh, kw)."""
        in_channels, _, _ = self.shape_of(node.inputs[0])
        return node.weight_shape(in_channels)

    def module_weight_shape(self, node: Weighted) -> tuple[int, ...]:
        """Return the shape of a weight in the module: (out, in * kh * kw) for a linear layer."""
        outs, *rest = self.weight_shape(node)
        is_linear = isinstance(node, Convolution) and node.linear
        return (outs, math.prod(rest)) if is_linear else (outs, *rest)

    def inward(self, arrays: Mapping[str, _ArrayT], *, complete: bool = True) -> dict[str, _ArrayT]:
        """Return arrays by the names that nodes give them, of arrays by their names in the module's state_dict.

        Raises ConfigError for an array of another shape than the module's; if they must be `complete`, also for a
        trained parameter that is missing.
        """
        inside = dict(arrays)
        for node, part, inner, outer, shape in self._outside():
            if outer not in arrays:
                if complete and part in node.parameters and part not in node.frozen:
                    raise ConfigError(f"state: {outer} of shape {shape} is missing")
                continue
            array = inside.pop(outer)
            if tuple(array.shape) != shape:
                raise ConfigError(
                    f"state: {outer} has shape {tuple(array.shape)}, the network needs {shape}"
                )
            if part in node.vectors:
                array = array.reshape(-1)
            elif isinstance(node, Weighted):
                array = array.reshape(self.module_weight_shape(node))
            inside[inner] = array
        return inside

    def outward(self, arrays: Mapping[str, _ArrayT]) -> dict[str, _ArrayT]:
        """Return arrays by their names and shapes in the module's state_dict; the inverse of `inward`."""
        renamed = {inner: (outer, shape) for _, _, inner, outer, shape in self._outside()}
        outside: dict[str, _ArrayT] = {}
        for inner, array in arrays.items():
            outer, shape = renamed.get(inner, (inner, array.shape))
            outside[outer] = array.reshape(shape)
        return outside

    def _outside(self) -> list[tuple[Node, str, str, str, tuple[int, ...]]]:
        return [
            (node, part, f"{node.name}.{part}", outer, shape)
            for node in self.nodes
            for part, outer, shape in node.outside
        ]

    def node(self, name: str) -> Node:
        """Return the node of that name."""
        return next(node for node in self.nodes if node.name == name)

    @property
    def differentiated(self) -> frozenset[str]:
        """Names of the values whose gradient a step needs: those that depend on a trained parameter."""
        needed: set[str] = set()
        for node in self.nodes:
            if node.trained or not needed.isdisjoint(node.inputs):
                needed.add(node.name)
        return frozenset(needed)

    def consumers(self, value: str) -> tuple[Node, ...]:
        """Return the nodes that read a value; one that reads it twice appears twice."""
        return tuple(node for node in self.nodes for read in node.inputs if read == value)

    def to_json(self) -> dict[str, Any]:
        """Return plain values from which `from_json` builds an equal graph."""
        return {
            "input_shape": list(self.input_shape),
            "nodes": [{"kind": node.kind, **asdict(node)} for node in self.nodes],
        }

    @classmethod
    def from_json(cls, document: dict[str, Any]) -> Graph:
        """Return the graph that `to_json` described. Raises ConfigError on an unknown operator or field."""
        channels, height, width = document["input_shape"]
        nodes = tuple(_node_from_json(each) for each in document["nodes"])
        return cls(input_shape=(channels, height, width), nodes=nodes)


def _node_from_json(document: dict[str, Any]) -> Node:
    settings: dict[str, Any] = {key: _as_tuples(value) for key, value in document.items()}
    kind = _KINDS.get(str(settings.pop("kind", None)))
    try:
        if kind is not None:
            return kind(**settings)
    except TypeError:
        pass
    raise ConfigError(f"graph: unknown operator {document}")


def _as_tuples(value: Any) -> Any:
    return tuple(map(_as_tuples, value)) if isinstance(value, list) else value


def _require_geometry(node: Node, inputs: list[Shape]) -> None:
    """Raise ConfigError if an operator's shape does not follow from its inputs' shapes."""
    if wrong := node.check():
        raise ConfigError(f"graph: {node.name} has {wrong}")
    if node.shape != node.made_shape(inputs) or min(node.shape) < 1:
        made_of = " and ".join(map(str, inputs))
        raise ConfigError(f"graph: {node.name} does not make {node.shape} of {made_of}")


def window_positions(shape: Shape, node: Weighted | _Pool) -> Pair:
    """Return the rows and columns of positions that a window takes over an input of that shape."""
    dilation = node.dilation if isinstance(node, Weighted) else (1, 1)
    window = (node.kernel, node.stride, node.padding, dilation)
    height, width = (
        (size + 2 * padding - apart * (kernel - 1) - 1) // stride + 1
        for size, kernel, stride, padding, apart in zip(shape[1:], *window, strict=True)
    )
    return height, width


def convolution_geometry(graph: Graph, node: Weighted, batch: int) -> Geometry:
    """Return the arguments of the kernels' `Convolution`, up to the groups; of the one that a transposed one undoes."""
    read, made = graph.shape_of(node.inputs[0]), node.shape
    if isinstance(node, TransposedConvolution):
        read, made = made, read
    channels, height, width = read
    sizes = (batch, height, width, channels, made[0])
    return (*sizes, *node.kernel, *node.stride, *node.padding, node.groups)


def fuse_relu(graph: Graph) -> Graph:
    """Return the graph with each ReLU fused into the operator before it, if only the ReLU reads that operator.

    The maximum search of the rounding (F14) then reads only the values after the ReLU.
    """
    # Name of a fused ReLU -> operator that now computes its value.
    fused: dict[str, str] = {}
    nodes: dict[str, Node] = {}
    for node in graph.nodes:
        node = replace(node, inputs=tuple(fused.get(value, value) for value in node.inputs))
        before = nodes.get(node.inputs[0]) if node.inputs else None
        if (
            isinstance(node, Relu)
            and isinstance(before, Convolution | BatchNorm | Add)
            and not before.relu
            and len(graph.consumers(before.name)) == 1
        ):
            nodes[before.name] = replace(before, relu=True)
            fused[node.name] = before.name
        else:
            nodes[node.name] = node
    return Graph(input_shape=graph.input_shape, nodes=tuple(nodes.values()))
