"""What torch's functions and tensor methods are in the integer engine.

Most are a module of torch with the same settings, and follow the rule of that module (`torch_modules`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from numbers import Real
from typing import Any

from torch import fx, nn

from socflower.model_graph.graph import Operation
from socflower.precision.int8.conversion import value_layout as layouts
from socflower.precision.int8.conversion.graph_builder import GraphBuilder, NoKernel, Value, form_of
from socflower.precision.int8.conversion.image_rules import padding, view
from socflower.precision.int8.conversion.matrix_rules import added, matmul, scaled_attention
from socflower.precision.int8.conversion.module_call import ModuleCall
from socflower.precision.int8.conversion.torch_modules import add_module, attention
from socflower.precision.int8.conversion.value_layout import ValueLayout
from socflower.precision.int8.operators.layout import Concat
from socflower.precision.int8.operators.products import Multiply
from socflower.precision.int8.operators.region_mean import RegionMean, Regions

DROPOUTS = (nn.functional.dropout, nn.functional.dropout1d, nn.functional.dropout2d)

# The arguments of all signatures here that may be tensors.
_TENSORS = ("input", "other", "tensors", "query", "key", "value")


def add_function(builder: GraphBuilder, operation: Operation) -> Value:
    """Add the nodes of a function's call and return its value. Raises NoKernel for what int8 lacks."""
    name = operation.function
    if operation.node.target in DROPOUTS:
        return _dropout(builder, operation)
    if name in _AS_MODULE:
        signature, make = _AS_MODULE[name]
        arguments = _arguments(operation.node, signature)
        module = make({key: value for key, value in arguments.items() if key != "input"})
        x = builder.value_of(arguments["input"])
        return add_module(ModuleCall(builder, module, operation.node.name, operation, x))
    rule = _RULES.get(name)
    if rule is None:
        target = getattr(operation.node.target, "__name__", str(operation.node.target))
        raise NoKernel(f"operator {target!r}")
    return rule(builder, operation)


def _arguments(node: fx.Node, signature: str) -> dict[str, Any]:
    """Return the arguments of a call by the names of its signature; those that are not given are left out."""
    names = signature.split()
    if len(node.args) > len(names) or not set(node.kwargs) <= set(names):
        raise NoKernel(f"{node.name} with arguments {node.args} and {dict(node.kwargs)}")
    given = dict(zip(names, node.args, strict=False)) | dict(node.kwargs)
    for key, value in given.items():
        if key not in _TENSORS and _nodes_in(value):
            raise NoKernel(f"{node.name} with a computed {key}")
    return given


def _nodes_in(value: Any) -> list[fx.Node]:
    found: list[fx.Node] = []
    fx.node.map_arg(value, found.append)
    return found


# ------------------------------------------------------------------------------------------ functions as modules

_Maker = Callable[[dict[str, Any]], nn.Module]


def _module(kind: Callable[..., nn.Module], *ignored: str) -> _Maker:
    def make(arguments: dict[str, Any]) -> nn.Module:
        return kind(**{key: value for key, value in arguments.items() if key not in ignored})

    return make


def _softmax(arguments: dict[str, Any]) -> nn.Module:
    if arguments.get("dtype") is not None:
        raise NoKernel("softmax of another dtype")
    return nn.Softmax(arguments.get("dim"))


def _layer_norm(arguments: dict[str, Any]) -> nn.Module:
    if arguments.get("weight") is not None or arguments.get("bias") is not None:
        raise NoKernel("layer_norm with the parameters of another module")
    return nn.LayerNorm(
        arguments["normalized_shape"], arguments.get("eps", 1e-5), elementwise_affine=False
    )


def _interpolate(arguments: dict[str, Any]) -> nn.Module:
    if arguments.get("antialias") or arguments.get("recompute_scale_factor"):
        raise NoKernel("interpolate with these settings")
    mode = arguments.get("mode", "nearest")
    return nn.Upsample(arguments.get("size"), arguments.get("scale_factor"), mode)


_POOL = "input kernel_size stride padding"
_MAX_POOL = f"{_POOL} dilation ceil_mode return_indices"

_AS_MODULE: dict[str, tuple[str, _Maker]] = {
    "relu": ("input inplace", _module(nn.ReLU, "inplace")),
    "relu6": ("input inplace", _module(nn.ReLU6, "inplace")),
    "hardtanh": ("input min_val max_val inplace", _module(nn.Hardtanh, "inplace")),
    "leaky_relu": ("input negative_slope inplace", _module(nn.LeakyReLU, "inplace")),
    "elu": ("input alpha inplace", _module(nn.ELU, "inplace")),
    "selu": ("input inplace", _module(nn.SELU, "inplace")),
    "gelu": ("input approximate", _module(nn.GELU)),
    "silu": ("input inplace", _module(nn.SiLU, "inplace")),
    "mish": ("input inplace", _module(nn.Mish, "inplace")),
    "hardswish": ("input inplace", _module(nn.Hardswish, "inplace")),
    "hardsigmoid": ("input inplace", _module(nn.Hardsigmoid, "inplace")),
    "sigmoid": ("input", _module(nn.Sigmoid)),
    "tanh": ("input", _module(nn.Tanh)),
    "softplus": ("input beta", _module(nn.Softplus)),
    "softmax": ("input dim _stacklevel dtype", _softmax),
    "max_pool1d": (_MAX_POOL, _module(nn.MaxPool1d)),
    "max_pool2d": (_MAX_POOL, _module(nn.MaxPool2d)),
    "avg_pool1d": (f"{_POOL} ceil_mode count_include_pad", _module(nn.AvgPool1d)),
    "avg_pool2d": (
        f"{_POOL} ceil_mode count_include_pad divisor_override",
        _module(nn.AvgPool2d),
    ),
    "adaptive_avg_pool1d": ("input output_size", _module(nn.AdaptiveAvgPool1d)),
    "adaptive_avg_pool2d": ("input output_size", _module(nn.AdaptiveAvgPool2d)),
    "adaptive_max_pool1d": ("input output_size return_indices", _module(nn.AdaptiveMaxPool1d)),
    "adaptive_max_pool2d": ("input output_size return_indices", _module(nn.AdaptiveMaxPool2d)),
    "pixel_shuffle": ("input upscale_factor", _module(nn.PixelShuffle)),
    "pixel_unshuffle": ("input downscale_factor", _module(nn.PixelUnshuffle)),
    "channel_shuffle": ("input groups", _module(nn.ChannelShuffle)),
    "layer_norm": ("input normalized_shape weight bias eps", _layer_norm),
    "interpolate": (
        "input size scale_factor mode align_corners recompute_scale_factor antialias",
        _interpolate,
    ),
}


def drops_in(node: fx.Node) -> bool:
    """Return whether a functional dropout is on."""
    return bool(_dropout_arguments(node).get("training", True))


def _dropout_arguments(node: fx.Node) -> dict[str, Any]:
    return _arguments(node, "input p training inplace")


def _dropout(builder: GraphBuilder, operation: Operation) -> Value:
    node = operation.node
    arguments = _dropout_arguments(node)
    x = builder.value_of(arguments["input"])
    if not drops_in(node):
        return x
    evaluated = builder.captured.evaluation[operation.position]
    p = float(arguments.get("p", 0.5))
    if p and drops_in(evaluated):
        raise NoKernel("dropout in evaluation: give it training=self.training")
    kinds: dict[Any, type[nn.Dropout | nn.Dropout1d | nn.Dropout2d]] = {
        nn.functional.dropout1d: nn.Dropout1d,
        nn.functional.dropout2d: nn.Dropout2d,
    }
    module = kinds.get(node.target, nn.Dropout)(p)
    return add_module(ModuleCall(builder, module, node.name, operation, x))


# -------------------------------------------------------------------------------------------------------- views


def _view(builder: GraphBuilder, operation: Operation) -> Value:
    """Add a view: whatever its arguments, torch has found the shape that it makes."""
    x = builder.value_of(operation.inputs[0])
    return view(ModuleCall(builder, None, operation.node.name, operation, x))


def _dim(dim: Any, rank: int) -> int:
    """Return a dimension without the batch, of torch's number with it. Raises NoKernel for the batch itself."""
    if not isinstance(dim, int) or not dim % (rank + 1) > 0:
        raise NoKernel(f"operator over dimension {dim}")
    return dim % (rank + 1) - 1


def _transpose(builder: GraphBuilder, operation: Operation) -> Value:
    arguments = _arguments(operation.node, "input dim0 dim1")
    x = builder.value_of(arguments["input"])
    rank = len(x.form)
    one, other = (_dim(arguments[key], rank) for key in ("dim0", "dim1"))
    order = list(range(rank))
    order[one], order[other] = order[other], order[one]
    return Value(x.name, x.layout.permuted(order))


def _permute(builder: GraphBuilder, operation: Operation) -> Value:
    node = operation.node
    x = builder.value_of(node.args[0])
    rank = len(x.form)
    dims: Any = node.kwargs.get("dims", node.args[1:])
    dims = dims[0] if len(dims) == 1 and isinstance(dims[0], tuple | list) else dims
    if len(dims) != rank + 1 or dims[0] % (rank + 1) != 0:
        raise NoKernel(f"permute to {dims}")
    return Value(x.name, x.layout.permuted([_dim(dim, rank) for dim in dims[1:]]))


def _getitem(builder: GraphBuilder, operation: Operation) -> Value:
    """Add a slice, or the result of a chunk or of an attention module."""
    source, index = operation.node.args
    made = operation.inputs[0]
    if made.module is not None and made.shape is None:
        return _attended(builder, made, index)
    if made.shape is None:
        return _part(builder, made, index, operation)
    x = builder.value_of(source)
    if _nodes_in(index):
        raise NoKernel("index that is computed")
    parts = list(index) if isinstance(index, tuple) else [index]
    if Ellipsis in parts:
        place = parts.index(Ellipsis)
        missing = len(x.form) + 2 - len(parts)
        parts[place : place + 1] = [slice(None)] * missing
    if parts[:1] != [slice(None)] or len(parts) > len(x.form) + 1:
        raise NoKernel(f"index {index}")
    chosen: dict[int, Sequence[int]] = {}
    for dim, part in enumerate(parts[1:]):
        if isinstance(part, slice):
            found = range(x.form[dim])[part]
        elif isinstance(part, int):
            found = range(part % x.form[dim], part % x.form[dim] + 1)
        else:
            raise NoKernel(f"index {index}")
        if not found:
            raise NoKernel("slice without elements")
        if list(found) != list(range(x.form[dim])):
            chosen[dim] = found
    return builder.viewed(builder.select(operation.node.name, x, chosen), form_of(operation))


def _attended(builder: GraphBuilder, made: Operation, index: Any) -> Value:
    """Add the first result of a MultiheadAttention module that attends to its own input."""
    module = builder.submodules[str(made.module)]
    arguments = _arguments(made.node, "query key value key_padding_mask need_weights attn_mask")
    is_own = arguments["query"] is arguments.get("key") is arguments.get("value")
    masks = [arguments.get(key) for key in ("key_padding_mask", "attn_mask")]
    if not isinstance(module, nn.MultiheadAttention) or index != 0:
        raise NoKernel(f"{type(module).__name__} with several results")
    if not is_own or masks != [None, None]:
        raise NoKernel("MultiheadAttention with masks, or of several values")
    x = builder.value_of(arguments["query"])
    return attention(ModuleCall(builder, module, str(made.module), made, x))


def _part(builder: GraphBuilder, made: Operation, index: Any, operation: Operation) -> Value:
    """Add a part of a chunk, split or unbind."""
    if made.function not in ("chunk", "split", "unbind") or not isinstance(index, int):
        raise NoKernel(f"operator {made.node.name} with several results")
    names = {"chunk": "input count dim", "split": "input count dim", "unbind": "input dim"}
    arguments = _arguments(made.node, names[made.function].replace("count", _count_name(made)))
    x = builder.value_of(arguments["input"])
    dim = _dim(arguments.get("dim", 0), len(x.form))
    size = x.form[dim]
    if made.function == "unbind":
        starts = list(range(size + 1))
    elif made.function == "chunk":
        length = -(-size // int(arguments["chunks"]))
        starts = [*range(0, size, length), size]
    else:
        lengths = arguments[_count_name(made)]
        if isinstance(lengths, int):
            starts = [*range(0, size, lengths), size]
        else:
            starts = [sum(lengths[:count]) for count in range(len(lengths) + 1)]
    index %= len(starts) - 1
    chosen = {dim: range(starts[index], starts[index + 1])}
    return builder.viewed(builder.select(operation.node.name, x, chosen), form_of(operation))


def _count_name(made: Operation) -> str:
    if made.function == "chunk":
        return "chunks"
    return "split_size_or_sections" if made.node.op == "call_function" else "split_size"


def _concat(builder: GraphBuilder, operation: Operation) -> Value:
    """Add a concatenation: its dimension must be alone on its axis."""
    arguments = _arguments(operation.node, "tensors dim")
    values = [builder.value_of(read) for read in arguments["tensors"]]
    rank = len(values[0].form)
    dim = _dim(arguments.get("dim", 0), rank)
    first = values[0].layout
    own = first.factors_of(dim)
    axis = next(
        (axis for axis in ("channels", "rows", "columns") if getattr(first, axis) == own), ""
    )
    if len(own) != 1 or not axis:
        first = _with_rows(values[0].form, dim)
        axis = "rows" if first.rows else "channels"
    made: list[Value] = []
    for value in values:
        dims = list(first.dims)
        dims[dim] = (value.form[dim],)
        wanted = ValueLayout(tuple(dims), first.rows, first.columns, first.channels)
        if wanted.form != value.form:
            raise NoKernel(f"concatenation of {values[0].form} and {value.form}")
        made.append(builder.arranged(value, wanted))
    dims = list(first.dims)
    dims[dim] = (sum(value.form[dim] for value in values),)
    layout = ValueLayout(tuple(dims), first.rows, first.columns, first.channels)
    name = builder.free_name(operation.node.name)
    return builder.put(Concat, name, made, layout, axis=axis)


def _with_rows(form: Sequence[int], dim: int) -> ValueLayout:
    """Return a layout with one dimension as rows, or as channels if there is no other."""
    dims = tuple((size,) for size in form)
    if len(dims) == 1:
        return layouts.flat(form)
    others = [other for other in range(len(dims)) if other != dim]
    return ValueLayout(dims, (dim,), tuple(others[:-1]), (others[-1],))


# ---------------------------------------------------------------------------------------------------- arithmetic


def _operands(builder: GraphBuilder, operation: Operation) -> tuple[Value, Value | None, Any]:
    """Return the values of a binary call, the larger rank first, and the number in place of the second one, if any."""
    node = operation.node
    if len(node.args) != 2 or node.kwargs:
        raise NoKernel(f"operator {operation.function!r} with these arguments")
    one, other = node.args
    if isinstance(one, Real) or isinstance(other, Real):
        read = other if isinstance(one, Real) else one
        return builder.value_of(read), None, one if isinstance(one, Real) else other
    first, second = builder.value_of(one), builder.value_of(other)
    rank = len(form_of(operation))
    return builder.aligned(first, one, rank), builder.aligned(second, other, rank), None


def _sum(builder: GraphBuilder, operation: Operation) -> Value:
    first, second, number = _operands(builder, operation)
    return _added(builder, operation, first, second, number, 1.0)


def _difference(builder: GraphBuilder, operation: Operation) -> Value:
    first, second, number = _operands(builder, operation)
    name = operation.node.name
    if second is None and isinstance(operation.node.args[0], Real):
        # A number minus a tensor.
        return builder.table(name, first, "affine", -1.0, float(number))
    if second is not None:
        second = builder.table(f"{name}.negative", second, "affine", -1.0, 0.0)
    return _added(builder, operation, first, second, number, -1.0)


def _added(
    builder: GraphBuilder,
    operation: Operation,
    first: Value,
    second: Value | None,
    number: Any,
    sign: float,
) -> Value:
    name = operation.node.name
    if second is None:
        return builder.table(name, first, "affine", 1.0, sign * float(number))
    first, second = _expanded(builder, operation, first, second)
    return added(builder, name, first, second)


def _expanded(
    builder: GraphBuilder, operation: Operation, first: Value, second: Value
) -> tuple[Value, Value]:
    """Return both values repeated to the shape that torch makes."""
    form = form_of(operation)
    whole = first if first.form == form else second
    if whole.form != form:
        raise NoKernel(f"broadcast of {first.form} and {second.form}")
    name = f"{operation.node.name}.repeated"
    return (
        builder.expanded(name, first, whole.layout),
        builder.expanded(name, second, whole.layout),
    )


def _product(builder: GraphBuilder, operation: Operation) -> Value:
    first, second, number = _operands(builder, operation)
    name = operation.node.name
    if second is None:
        return builder.table(name, first, "affine", float(number), 0.0)
    form = form_of(operation)
    whole, part = (first, second) if first.form == form else (second, first)
    if whole.form != form:
        raise NoKernel(f"broadcast of {first.form} and {second.form}")
    wanted = layouts.like(whole.layout, part.form)
    if wanted is None:
        raise NoKernel(f"broadcast of {first.form} and {second.form}")
    part = builder.arranged(part, wanted)
    pairs = zip(whole.layout.shape, wanted.shape, strict=True)
    if not all(own in (1, size) for size, own in pairs):
        # Repeated along a part of an axis.
        part = builder.expanded(f"{name}.repeated", part, whole.layout)
    inputs = [whole, part] if whole is first else [part, whole]
    return builder.put(Multiply, builder.free_name(name), inputs, whole.layout)


def _quotient(builder: GraphBuilder, operation: Operation) -> Value:
    first, second, number = _operands(builder, operation)
    if second is not None or isinstance(operation.node.args[0], Real) or not number:
        raise NoKernel("division by a tensor")
    return builder.table(operation.node.name, first, "affine", 1.0 / float(number), 0.0)


def _unary(function: str, *arguments: float) -> Callable[[GraphBuilder, Operation], Value]:
    def rule(builder: GraphBuilder, operation: Operation) -> Value:
        given = _arguments(operation.node, "input")
        x = builder.value_of(given["input"])
        return builder.table(operation.node.name, x, function, *arguments)

    return rule


def _clamp(builder: GraphBuilder, operation: Operation) -> Value:
    given = _arguments(operation.node, "input min max")
    x = builder.value_of(given["input"])
    least, most = given.get("min"), given.get("max")
    # Beyond the largest int8 value at any exponent.
    beyond = 2.0**100
    return builder.table(
        operation.node.name,
        x,
        "clip",
        -beyond if least is None else least,
        beyond if most is None else most,
    )


def _power(builder: GraphBuilder, operation: Operation) -> Value:
    given = _arguments(operation.node, "input exponent")
    if given["exponent"] != 2:
        raise NoKernel(f"power of {given['exponent']}")
    return builder.table(operation.node.name, builder.value_of(given["input"]), "square")


def _reduced(divide: bool) -> Callable[[GraphBuilder, Operation], Value]:
    """Return the rule of a mean or sum over some dimensions."""

    def rule(builder: GraphBuilder, operation: Operation) -> Value:
        given = _arguments(operation.node, "input dim keepdim")
        x = builder.value_of(given["input"])
        dims = given.get("dim")
        dims = [dims] if isinstance(dims, int) else dims
        rank = len(x.form)
        if not dims or len(dims) >= rank:
            raise NoKernel("mean or sum over everything")
        return _reduce(builder, operation, x, {_dim(dim, rank) for dim in dims}, divide)

    return rule


def _reduce(
    builder: GraphBuilder, operation: Operation, x: Value, dims: set[int], divide: bool
) -> Value:
    reduced = {factor for dim in dims for factor in x.layout.factors_of(dim)}
    axes = [set(x.layout.rows), set(x.layout.columns)]
    fits = all(axis <= reduced or axis.isdisjoint(reduced) for axis in axes)
    if not fits or not reduced.isdisjoint(x.layout.channels):
        kept = [dim for dim in range(len(x.form)) if dim not in dims]
        whole = tuple((size,) for size in x.form)
        target = ValueLayout(whole, tuple(sorted(dims)), tuple(kept[:-1]), (kept[-1],))
        x = builder.arranged(x, target)
        reduced = set(dims)
        axes = [set(target.rows), set(target.columns)]
    regions: list[Regions] = []
    divisors: list[tuple[int, ...]] = []
    for size, axis in zip(x.layout.shape[1:], axes, strict=True):
        is_reduced = bool(axis) and axis <= reduced
        found: Regions = ((0, size),) if is_reduced else tuple((i, i + 1) for i in range(size))
        regions.append(found)
        divisors.append((size if is_reduced and divide else 1,) * len(found))
    made_dims = tuple(() if dim in dims else sizes for dim, sizes in enumerate(x.layout.dims))
    numbers: list[list[int]] = []
    count = 0
    for dim, sizes in enumerate(x.layout.dims):
        for _ in sizes:
            numbers.append([] if dim in dims else [count])
            count += dim not in dims
    layout = x.layout.renumbered(made_dims, numbers)
    value = builder.put(
        RegionMean,
        builder.free_name(operation.node.name),
        [x],
        layout,
        rows=regions[0],
        columns=regions[1],
        row_divisors=divisors[0],
        column_divisors=divisors[1],
    )
    return builder.viewed(value, form_of(operation))


def _matmul(builder: GraphBuilder, operation: Operation) -> Value:
    given = _arguments(operation.node, "input other")
    first, second = (builder.value_of(given[key]) for key in ("input", "other"))
    return matmul(builder, operation.node.name, first, second)


def _attention(builder: GraphBuilder, operation: Operation) -> Value:
    given = _arguments(
        operation.node, "query key value attn_mask dropout_p is_causal scale enable_gqa"
    )
    plain = given.get("attn_mask") is None and not given.get("dropout_p")
    if not plain or given.get("is_causal") or given.get("enable_gqa"):
        raise NoKernel("attention with a mask or dropout")
    query, key, value = (builder.value_of(given[name]) for name in ("query", "key", "value"))
    scale = given.get("scale")
    return scaled_attention(builder, operation.node.name, query, key, value, scale=scale)


def _pad(builder: GraphBuilder, operation: Operation) -> Value:
    given = _arguments(operation.node, "input pad mode value")
    x = builder.value_of(given["input"])
    if _nodes_in(given.get("value")):
        raise NoKernel("padding with a computed value")
    call = ModuleCall(builder, None, operation.node.name, operation, x)
    value = given.get("value") or 0.0
    return padding(call, given.get("mode", "constant"), given["pad"], float(value))


def _same(builder: GraphBuilder, operation: Operation) -> Value:
    return builder.value_of(operation.inputs[0])


_RULES: dict[str, Callable[[GraphBuilder, Operation], Value]] = {
    **dict.fromkeys(("view", "reshape", "flatten", "unflatten", "squeeze", "unsqueeze"), _view),
    **dict.fromkeys(("contiguous", "clone", "float"), _same),
    **dict.fromkeys(("transpose", "swapaxes", "swapdims"), _transpose),
    "permute": _permute,
    "getitem": _getitem,
    **dict.fromkeys(("cat", "concat", "concatenate"), _concat),
    **dict.fromkeys(("add", "iadd"), _sum),
    **dict.fromkeys(("sub", "isub", "subtract"), _difference),
    **dict.fromkeys(("mul", "imul", "multiply"), _product),
    **dict.fromkeys(("truediv", "itruediv", "div", "divide"), _quotient),
    **dict.fromkeys(("neg", "negative"), _unary("affine", -1.0, 0.0)),
    "square": _unary("square"),
    "abs": _unary("abs"),
    "pow": _power,
    **dict.fromkeys(("clamp", "clip"), _clamp),
    "mean": _reduced(divide=True),
    "sum": _reduced(divide=False),
    **dict.fromkeys(("matmul", "bmm"), _matmul),
    "scaled_dot_product_attention": _attention,
    "pad": _pad,
}
