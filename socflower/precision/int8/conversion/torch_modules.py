"""What torch's modules are in the integer engine: a rule for each type, from its settings to nodes of the network."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from socflower import _int8
from socflower.model_graph.graph import Operation
from socflower.precision.int8 import network as ir
from socflower.precision.int8.conversion import value_layout as layouts
from socflower.precision.int8.conversion.graph_builder import GraphBuilder, NoKernel, Value, form_of
from socflower.precision.int8.conversion.value_layout import ValueLayout
from socflower.precision.int8.numpy_operators.embedding import MOST_ROWS, Embedding
from socflower.precision.int8.numpy_operators.layout import ZERO
from socflower.precision.int8.numpy_operators.products import MatMul, Softmax
from socflower.precision.int8.numpy_operators.region_mean import RegionMean, Regions
from socflower.precision.int8.numpy_operators.sample_norm import SampleNorm
from socflower.precision.int8.numpy_operators.weighted import covers, sum_depths

MAX_WINDOW = 256
"""Pixels of a pooling window: the engine stores the position of a maximum in a byte."""


@dataclass(frozen=True, slots=True)
class ModuleCall:
    """A call of a module on one value. `name` is the module's path, or the name of a function that does the same."""

    builder: GraphBuilder
    module: Any
    name: str
    operation: Operation
    x: Value
    in_evaluation: bool = False

    def require(self, fits: bool, how: str = "") -> None:
        """Raise NoKernel, with `how` the module is set, unless it fits."""
        if not fits:
            raise NoKernel(f"{type(self.module).__name__} {how}".rstrip())

    def require_settings(self, **fitting: Sequence[Any]) -> None:
        """Raise NoKernel for a setting with another value than those that fit."""
        for name, values in fitting.items():
            value = getattr(self.module, name)
            self.require(value in values, f"with {name} = {value!r}")

    def require_plain_parameters(self) -> None:
        """Raise NoKernel for a layer whose weight or bias torch computes from other parameters before each call."""
        own = dict(self.module.named_parameters(recurse=False))
        for name in ("weight", "bias"):
            is_plain = name in own or getattr(self.module, name, None) is None
            self.require(
                is_plain,
                f"whose {name} is computed from other parameters, as by weight_norm or pruning; take that off",
            )

    @property
    def frozen(self) -> tuple[str, ...]:
        """Names of the parameters that are not trained."""
        parameters = self.module.named_parameters()
        return tuple(name for name, part in parameters if not part.requires_grad)

    def image(self) -> Value:
        """Return the input as (channels, height, width), (channels, length) or (features,)."""
        self.require(len(self.x.form) in (1, 2, 3), f"of {len(self.x.form) + 1} dimensions")
        return self.builder.arranged(self.x, layouts.images(self.x.form))

    def put(self, kind: type[ir.Node], x: Value, layout: ValueLayout, **settings: Any) -> Value:
        """Add a node of the module's name, with its parameters."""
        if not issubclass(kind, ir.Weighted | ir.BatchNorm | SampleNorm):
            # A ReLU or a pool may run in several places.
            name = self.builder.first_free_name(self.name, self.operation.node.name)
            return self.builder.put(kind, name, [x], layout, **settings)
        return self.builder.put(kind, self.name, [x], layout, frozen=self.frozen, **settings)

    def made(self) -> ValueLayout:
        """Return the layout of an image of the shape that torch makes."""
        return layouts.images(form_of(self.operation))

    def on(self, x: Value, module: nn.Module, name: str) -> ModuleCall:
        """Return the call of another module, a part of this one, on a value."""
        return replace(self, x=x, module=module, name=name)


def add_module(call: ModuleCall) -> Value:
    """Add the nodes of a module and return its value. Raises NoKernel for what int8 lacks."""
    for kind in type(call.module).__mro__:
        if (rule := _RULES.get(kind)) is not None:
            return rule(call)
    raise NoKernel(type(call.module).__name__)


# ----------------------------------------------------------------------------------------- layers with weights


def _convolution(call: ModuleCall) -> Value:
    module = call.module
    x = call.image()
    rank = len(module.kernel_size)
    call.require(len(x.form) == rank + 1, f"of {len(x.form) + 1} dimensions")
    call.require_plain_parameters()
    padding = module.padding
    if isinstance(padding, str):
        padding = (0,) * rank
        before_after = list(zip(*[iter(module._reversed_padding_repeated_twice)] * 2, strict=True))
        pads = [(int(before), int(after)) for before, after in reversed(before_after)]
    else:
        pads = [(size, size) for size in padding]
    even = all(before == after for before, after in pads)
    if module.padding_mode == "zeros" and even:
        padding = tuple(before for before, _ in pads)
    else:
        padding = (0,) * rank
        x = _padded(call, x, module.padding_mode, pads)
    weight = tuple(module.weight.shape)
    return _require_exact(
        call,
        call.put(
            ir.Convolution,
            x,
            call.made(),
            kernel=_image_pair(module.kernel_size),
            stride=_image_pair(module.stride),
            padding=_image_pair(padding, 0),
            dilation=_image_pair(module.dilation),
            groups=module.groups,
            bias=module.bias is not None,
            outside=() if rank == 2 else (("weight", f"{call.name}.weight", weight),),
        ),
    )


def _transposed_convolution(call: ModuleCall) -> Value:
    module = call.module
    x = call.image()
    rank = len(module.kernel_size)
    call.require(len(x.form) == rank + 1, f"of {len(x.form) + 1} dimensions")
    call.require_plain_parameters()
    call.require_settings(padding_mode=("zeros",))
    weight = tuple(module.weight.shape)
    return _require_exact(
        call,
        call.put(
            ir.TransposedConvolution,
            x,
            call.made(),
            kernel=_image_pair(module.kernel_size),
            stride=_image_pair(module.stride),
            padding=_image_pair(module.padding, 0),
            dilation=_image_pair(module.dilation),
            groups=module.groups,
            bias=module.bias is not None,
            outside=() if rank == 2 else (("weight", f"{call.name}.weight", weight),),
        ),
    )


def _require_exact(call: ModuleCall, value: Value) -> Value:
    """Raise NoKernel for a sum, forward or backward, that may leave int32; return the value otherwise."""
    node = call.builder.nodes[-1]
    assert isinstance(node, ir.Weighted)
    read = call.builder.shape_of(node.inputs[0])
    depth = max(sum_depths(node, read))
    most = _int8.MAX_EXACT_DEPTH
    call.require(
        depth <= most or covers(node, read),
        f"with sums of {depth} products, more than the {most} that fit int32",
    )
    return value


def linear(call: ModuleCall, outside: tuple[ir.OutsideName, ...] = ()) -> Value:
    """Add a linear layer: a convolution whose kernel covers the image, or one of a pixel over the last dimension."""
    module = call.module
    call.require_plain_parameters()
    return _linear(call, module.out_features, module.bias is not None, outside)


def _linear(
    call: ModuleCall, outs: int, bias: bool, outside: tuple[ir.OutsideName, ...] = ()
) -> Value:
    x = call.x
    if len(x.form) == 1:
        # The weight is in torch's order of the elements: (channels, height, width).
        x = call.builder.in_torch_order(x)
        kernel = x.layout.shape[1:]
        layout = layouts.flat((outs,))
    else:
        x = call.builder.arranged(x, _with_last_as_channels(x))
        kernel = (1, 1)
        last = x.layout.channels
        dims = (*x.layout.dims[:-1], (outs,))
        # The factors of the last dimension, which come last, become one.
        layout = ValueLayout(
            dims, x.layout.rows, x.layout.columns, last[:1] or (len(x.layout.sizes),)
        )
    value = call.put(
        ir.Convolution, x, layout, kernel=kernel, bias=bias, linear=True, outside=outside
    )
    return _require_exact(call, value)


def _with_last_as_channels(x: Value) -> ValueLayout:
    """Return a layout with the last dimension alone as channels; the one that the value has if it is such."""
    layout = x.layout
    last = layout.factors_of(len(layout.dims) - 1)
    return layout if layout.channels == last else layouts.tokens(x.form)


def _embedding(call: ModuleCall) -> Value:
    module = call.module
    call.require_settings(max_norm=(None,), scale_grad_by_freq=(False,))
    call.require_plain_parameters()
    call.require(call.x.name == ir.INPUT, "of computed numbers")
    call.require(module.num_embeddings <= MOST_ROWS, f"of {module.num_embeddings} rows")
    layout = layouts.tokens((*call.x.form, module.embedding_dim))
    return call.put(
        Embedding,
        call.x,
        layout,
        kernel=(1, 1),
        num_rows=module.num_embeddings,
        padding_row=-1 if module.padding_idx is None else module.padding_idx,
        outside=(("weight", f"{call.name}.weight", tuple(module.weight.shape)),),
    )


# ------------------------------------------------------------------------------------------------ normalisation


def _batch_norm(call: ModuleCall) -> Value:
    module = call.module
    call.require_settings(affine=(True,), track_running_stats=(True,))
    call.require(module.momentum is not None, "without momentum")
    call.require_plain_parameters()
    x = call.image()
    return call.put(ir.BatchNorm, x, x.layout, eps=module.eps, momentum=module.momentum)


def _group_norm(call: ModuleCall) -> Value:
    module = call.module
    call.require_plain_parameters()
    x = call.image()
    affine = module.affine
    return call.put(
        SampleNorm,
        x,
        x.layout,
        eps=module.eps,
        groups=module.num_groups,
        scale=affine,
        offset=affine,
    )


def _instance_norm(call: ModuleCall) -> Value:
    module = call.module
    call.require_settings(track_running_stats=(False,))
    call.require(len(call.x.form) > 1, "of one value a channel")
    x = call.image()
    affine = module.affine
    return call.put(
        SampleNorm,
        x,
        x.layout,
        eps=module.eps,
        groups=module.num_features,
        scale=affine,
        offset=affine,
    )


def layer_norm(call: ModuleCall) -> Value:
    """Add a LayerNorm: the normalised dimensions, which are the last ones, are the channels."""
    module = call.module
    call.require_plain_parameters()
    shape = tuple(module.normalized_shape)
    num_last = len(shape)
    x = call.x
    call.require(x.form[-num_last:] == shape, "over the samples")
    if num_last == 1 and len(x.form) > 1:
        x = call.builder.arranged(x, _with_last_as_channels(x))
    else:
        x = call.builder.arranged(x, layouts.tokens(x.form, num_last))
    parts = [part for part in ("weight", "bias") if getattr(module, part, None) is not None]
    outside = tuple((part, f"{call.name}.{part}", shape) for part in parts) if num_last > 1 else ()
    return call.put(
        SampleNorm,
        x,
        x.layout,
        eps=module.eps,
        per_pixel=True,
        scale="weight" in parts,
        offset="bias" in parts,
        outside=outside,
    )


# ------------------------------------------------------------------------------------------------------ pooling


def _max_pool(call: ModuleCall) -> Value:
    module = call.module
    call.require_settings(dilation=(1, (1, 1), (1,)), return_indices=(False,))
    x = call.image()
    rank = len(x.form) - 1
    kernel = _pair(module.kernel_size, rank)
    stride = _pair(module.stride, rank)
    padding = _pair(module.padding, rank, 0)
    if module.ceil_mode:
        # The incomplete last windows repeat their last row or column, which changes no maximum.
        made = call.made().shape[1:]
        extra = [
            max(0, (count - 1) * step + size - length - 2 * pad)
            for count, step, size, length, pad in zip(
                made, stride, kernel, x.layout.shape[1:], padding, strict=True
            )
        ]
        x = _padded(call, x, "replicate", [(0, more) for more in extra[2 - rank :]])
    return max_pool(call, x, kernel, stride, padding)


def max_pool(
    call: ModuleCall, x: Value, kernel: ir.Pair, stride: ir.Pair, padding: ir.Pair
) -> Value:
    """Add a max-pool; one of larger windows than the kernels take is pooled in rows, then in columns."""
    if kernel[0] * kernel[1] <= MAX_WINDOW:
        return call.put(ir.MaxPool, x, call.made(), kernel=kernel, stride=stride, padding=padding)
    call.require(max(kernel) <= MAX_WINDOW, f"with windows of {kernel[0]}x{kernel[1]}")
    channels, height, _ = call.made().shape
    of_rows = layouts.images((channels, height, x.layout.shape[2]))
    rows = call.put(
        ir.MaxPool,
        x,
        of_rows,
        kernel=(kernel[0], 1),
        stride=(stride[0], 1),
        padding=(padding[0], 0),
    )
    return call.put(
        ir.MaxPool,
        rows,
        call.made(),
        kernel=(1, kernel[1]),
        stride=(1, stride[1]),
        padding=(0, padding[1]),
    )


def _average_pool(call: ModuleCall) -> Value:
    module = call.module
    x = call.image()
    rank = len(x.form) - 1
    kernel = _pair(module.kernel_size, rank)
    stride = _pair(module.stride, rank)
    padding = _pair(module.padding, rank, 0)
    override = getattr(module, "divisor_override", None)
    counts = padding == (0, 0) or module.count_include_pad
    if counts and not module.ceil_mode and override is None and kernel[0] * kernel[1] <= MAX_WINDOW:
        return call.put(
            ir.AveragePool, x, call.made(), kernel=kernel, stride=stride, padding=padding
        )
    regions: list[Regions] = []
    divisors: list[tuple[int, ...]] = []
    for axis in (0, 1):
        size, count = x.layout.shape[1 + axis], call.made().shape[1 + axis]
        found, lengths = _windows(size, count, kernel[axis], stride[axis], padding[axis])
        regions.append(found)
        clipped = tuple(end - first for first, end in found)
        divisors.append(lengths if module.count_include_pad else clipped)
    if override is not None:
        divisors = [(override,) * len(regions[0]), (1,) * len(regions[1])]
    return _mean(call, x, call.made(), regions, divisors)


def _windows(
    size: int, count: int, kernel: int, stride: int, padding: int
) -> tuple[Regions, tuple[int, ...]]:
    """Return the parts of windows inside the input, and the windows' lengths within the padded input."""
    regions = []
    lengths = []
    for index in range(count):
        first = index * stride - padding
        end = min(first + kernel, size + padding)
        lengths.append(end - first)
        regions.append((max(first, 0), min(end, size)))
    return tuple(regions), tuple(lengths)


def _mean(
    call: ModuleCall,
    x: Value,
    layout: ValueLayout,
    regions: Sequence[Regions],
    divisors: Sequence[tuple[int, ...]],
) -> Value:
    return call.put(
        RegionMean,
        x,
        layout,
        rows=regions[0],
        columns=regions[1],
        row_divisors=divisors[0],
        column_divisors=divisors[1],
    )


def _adaptive_average(call: ModuleCall) -> Value:
    x = call.image()
    _, height, width = x.layout.shape
    layout = call.made()
    _, out_h, out_w = layout.shape
    window = (height // out_h, width // out_w)
    even = height % out_h == 0 and width % out_w == 0
    if even and window[0] * window[1] <= MAX_WINDOW:
        return call.put(ir.AveragePool, x, layout, kernel=window, stride=window)
    regions = [_adaptive_regions(height, out_h), _adaptive_regions(width, out_w)]
    lengths = [tuple(end - first for first, end in found) for found in regions]
    return _mean(call, x, layout, regions, lengths)


def _adaptive_regions(size: int, count: int) -> Regions:
    """Return torch's regions: they overlap if the size is no multiple of the count."""
    return tuple((index * size // count, -(-(index + 1) * size // count)) for index in range(count))


def _adaptive_max(call: ModuleCall) -> Value:
    call.require_settings(return_indices=(False,))
    x = call.image()
    _, height, width = x.layout.shape
    _, out_h, out_w = call.made().shape
    even = height % out_h == 0 and width % out_w == 0
    call.require(even, f"from {height}x{width} to {out_h}x{out_w}, in windows of two sizes")
    window = (height // out_h, width // out_w)
    return max_pool(call, x, window, window, (0, 0))


# ------------------------------------------------------------------------------------------- parts and repetition


def _padded(call: ModuleCall, x: Value, mode: str, pads: Sequence[tuple[int, int]]) -> Value:
    """Return the value with (before, after) more elements along its last dimensions, as `mode` makes them."""
    first = len(x.form) - len(pads)
    chosen: dict[int, Sequence[int]] = {}
    for dim, (before, after) in enumerate(pads, start=first):
        size = x.form[dim]
        positions = range(-before, size + after)
        match mode:
            case "zeros" | "constant":
                chosen[dim] = [index if 0 <= index < size else ZERO for index in positions]
            case "replicate":
                chosen[dim] = [min(max(index, 0), size - 1) for index in positions]
            case "reflect":
                fits = max(before, after) < size
                call.require(fits, f"with a reflection of {max(before, after)} of {size} pixels")
                chosen[dim] = [size - 1 - abs(size - 1 - abs(index)) for index in positions]
            case "circular":
                chosen[dim] = [index % size for index in positions]
            case _:
                call.require(False, f"with padding_mode = {mode!r}")
    return call.builder.select(f"{call.name}.padding", x, chosen)


def padding(call: ModuleCall, mode: str, flat: Sequence[int], value: float = 0.0) -> Value:
    """Add torch's padding: `flat` has (before, after) of the last dimension, then of the one before it, and so on."""
    call.require(mode != "constant" or value == 0.0, f"with a value of {value}")
    pads = [(flat[index], flat[index + 1]) for index in range(0, len(flat), 2)]
    call.require(len(pads) <= len(call.x.form), "over the samples")
    return _padded(call, call.x, mode, list(reversed(pads)))


def upsample(call: ModuleCall) -> Value:
    """Add nearest-neighbour upsampling to the size that torch makes."""
    call.require_settings(mode=("nearest", "nearest-exact"))
    made = form_of(call.operation)
    chosen: dict[int, Sequence[int]] = {}
    shift = 0.5 if call.module.mode == "nearest-exact" else 0.0
    scales = call.module.scale_factor
    for dim in range(1, len(made)):
        size = call.x.form[dim]
        ratio = size / made[dim]
        if scales is not None:
            given = scales if isinstance(scales, float | int) else scales[dim - 1]
            ratio = 1.0 / float(given)
        positions = [min(int((index + shift) * ratio), size - 1) for index in range(made[dim])]
        chosen[dim] = positions
    return call.builder.select(call.name, call.x, chosen)


def _pixel_shuffle(call: ModuleCall) -> Value:
    """(c r r, h, w) to (c, h r, w r): the values lie differently once they are read as an image."""
    factor = call.module.upscale_factor
    channels, height, width = call.x.form
    split = call.builder.viewed(call.x, (channels // factor**2, factor, factor, height, width))
    moved = Value(split.name, split.layout.permuted((0, 3, 1, 4, 2)))
    return call.builder.viewed(moved, form_of(call.operation))


def _pixel_unshuffle(call: ModuleCall) -> Value:
    factor = call.module.downscale_factor
    channels, height, width = call.x.form
    split = call.builder.viewed(
        call.x, (channels, height // factor, factor, width // factor, factor)
    )
    moved = Value(split.name, split.layout.permuted((0, 2, 4, 1, 3)))
    return call.builder.viewed(moved, form_of(call.operation))


def _channel_shuffle(call: ModuleCall) -> Value:
    channels, *size = call.x.form
    groups = call.module.groups
    split = call.builder.viewed(call.x, (groups, channels // groups, *size))
    order = (1, 0, *range(2, 2 + len(size)))
    moved = Value(split.name, split.layout.permuted(order))
    return call.builder.viewed(moved, form_of(call.operation))


def view(call: ModuleCall) -> Value:
    """Return the value in the shape that torch makes of it; nothing is added unless values have to move."""
    return call.builder.viewed(call.x, form_of(call.operation))


# ----------------------------------------------------------------------------------------------------- functions


def relu(call: ModuleCall) -> Value:
    """Add a ReLU."""
    return call.put(ir.Relu, call.x, call.x.layout)


def dropout(call: ModuleCall) -> Value:
    """Add a dropout, or nothing if it drops nothing."""
    p = 0.0 if call.in_evaluation else call.module.p
    channelwise = isinstance(call.module, nn.Dropout1d | nn.Dropout2d)
    if p == 0.0:
        return call.x
    x = call.x
    if channelwise:
        fits = len(x.form) == (3 if isinstance(call.module, nn.Dropout2d) else 2)
        call.require(fits, "of anything but (n, c, h, w)")
        x = call.image()
    return call.put(ir.Dropout, x, x.layout, p=p, channelwise=channelwise)


def softmax(call: ModuleCall) -> Value:
    """Add a softmax: its dimension is the channels."""
    dim = call.module.dim
    rank = len(call.x.form)
    call.require(dim is not None and dim != 0 and -rank <= dim <= rank, f"with dim = {dim}")
    # torch counts the batch as a dimension.
    own = dim - 1 if dim > 0 else rank + dim
    x = with_channels(call.builder, call.x, own)
    return call.put(Softmax, x, x.layout)


def with_channels(builder: GraphBuilder, x: Value, dim: int) -> Value:
    """Return a value whose channels are one of its dimensions, whole."""
    layout = x.layout
    if layout.channels == layout.factors_of(dim):
        return x
    dims = tuple((size,) for size in x.form)
    others = tuple(other for other in range(len(dims)) if other != dim)
    return builder.arranged(x, ValueLayout(dims, others, (), (dim,)))


def _table(function: str, *names: str) -> Callable[[ModuleCall], Value]:
    def rule(call: ModuleCall) -> Value:
        arguments = [getattr(call.module, name) for name in names]
        return call.builder.table(call.name, call.x, function, *arguments)

    return rule


def _gelu(call: ModuleCall) -> Value:
    function = "gelu-tanh" if call.module.approximate == "tanh" else "gelu"
    return call.builder.table(call.name, call.x, function)


_SELU = (1.6732632423543772, 1.0507009873554805)


# ------------------------------------------------------------------------------------------------------ attention


def attention(call: ModuleCall) -> Value:
    """Add self-attention of a MultiheadAttention module, batch first, without masks."""
    module = call.module
    call.require_settings(
        batch_first=(True,), bias_k=(None,), bias_v=(None,), add_zero_attn=(False,)
    )
    call.require(module._qkv_same_embed_dim, "of keys and values of other sizes")
    call.require(len(call.x.form) == 2, f"of {len(call.x.form) + 1} dimensions")
    builder = call.builder
    length, size = call.x.form
    outside: list[ir.OutsideName] = [("weight", f"{call.name}.in_proj_weight", (3 * size, size))]
    has_bias = module.in_proj_bias is not None
    if has_bias:
        outside.append(("bias", f"{call.name}.in_proj_bias", (3 * size,)))
    frozen = []
    for part in ("weight", "bias"):
        held = getattr(module, f"in_proj_{part}")
        if held is not None and not held.requires_grad:
            frozen.append(part)
    x = builder.arranged(call.x, _with_last_as_channels(call.x))
    layout = layouts.tokens((length, 3 * size))
    joint = builder.put(
        ir.Convolution,
        f"{call.name}.in_proj",
        [builder.arranged(x, layouts.tokens(x.form))],
        layout,
        kernel=(1, 1),
        bias=has_bias,
        linear=True,
        outside=tuple(outside),
        frozen=tuple(frozen),
    )
    heads = module.num_heads
    split: list[Value] = []
    for index, role in enumerate(("query", "key", "value")):
        chosen = range(index * size, (index + 1) * size)
        third = builder.select(f"{call.name}.{role}", joint, {1: chosen})
        of_heads = builder.viewed(third, (length, heads, size // heads))
        split.append(Value(of_heads.name, of_heads.layout.permuted((1, 0, 2))))
    query, key, value = split
    p = 0.0 if call.in_evaluation else module.dropout
    made = scaled_attention(builder, call.name, query, key, value, dropout=p)
    joined = builder.viewed(Value(made.name, made.layout.permuted((1, 0, 2))), (length, size))
    return linear(call.on(joined, module.out_proj, f"{call.name}.out_proj"))


def scaled_attention(
    builder: GraphBuilder,
    name: str,
    query: Value,
    key: Value,
    value: Value,
    *,
    scale: float | None = None,
    dropout: float = 0.0,
) -> Value:
    """Add softmax(scale * query @ key^T) @ value of (heads, length, size) values, with dropout after the softmax."""
    scale = 1.0 / math.sqrt(query.form[-1]) if scale is None else scale
    swapped = (*range(len(key.form) - 2), len(key.form) - 1, len(key.form) - 2)
    scores = matmul(builder, f"{name}.scores", query, Value(key.name, key.layout.permuted(swapped)))
    probabilities = builder.put(
        Softmax, builder.free_name(f"{name}.softmax"), [scores], scores.layout, scale=scale
    )
    if dropout:
        probabilities = builder.put(
            ir.Dropout,
            builder.free_name(f"{name}.dropout"),
            [probabilities],
            probabilities.layout,
            p=dropout,
        )
    return matmul(builder, f"{name}.attended", probabilities, value)


def matmul(builder: GraphBuilder, name: str, first: Value, second: Value) -> Value:
    """Add the products of matrices (..., rows, depth) and (..., depth, columns) with the same leading dimensions."""
    *batches, rows, depth = first.form
    if len(first.form) < 2 or second.form[:-1] != (*batches, depth):
        raise NoKernel(f"matmul of {first.form} and {second.form}")
    count = len(batches)
    first = builder.arranged(first, layouts.tokens(first.form))
    # The layout in which the second matrix already lies, if it is one of both.
    across = ValueLayout(
        tuple((size,) for size in second.form), (*range(count), count + 1), (), (count,)
    )
    transposed = second.layout.channels == second.layout.factors_of(count)
    second = builder.arranged(second, across if transposed else layouts.tokens(second.form))
    made = (*batches, rows, second.form[-1])
    dims = tuple((size,) for size in made)
    layout = ValueLayout(dims, tuple(range(count)), (count,), (count + 1,))
    return builder.put(
        MatMul,
        builder.free_name(name),
        [first, second],
        layout,
        batches=math.prod(batches),
        transposed=transposed,
    )


def _encoder_layer(call: ModuleCall) -> Value:
    """Add torch's transformer encoder layer as its forward computes it."""
    module = call.module
    name = call.name
    builder = call.builder

    def attended(x: Value) -> Value:
        made = attention(call.on(x, module.self_attn, f"{name}.self_attn"))
        return dropout(call.on(made, module.dropout1, f"{name}.dropout1"))

    def fed_forward(x: Value) -> Value:
        hidden = linear(call.on(x, module.linear1, f"{name}.linear1"))
        active = _activation(call.on(hidden, module.activation, f"{name}.activation"))
        active = dropout(call.on(active, module.dropout, f"{name}.dropout"))
        made = linear(call.on(active, module.linear2, f"{name}.linear2"))
        return dropout(call.on(made, module.dropout2, f"{name}.dropout2"))

    def normalised(x: Value, part: str) -> Value:
        return add_module(call.on(x, getattr(module, part), f"{name}.{part}"))

    x = call.x
    if module.norm_first:
        x = added(builder, f"{name}.attended", x, attended(normalised(x, "norm1")))
        return added(builder, f"{name}.made", x, fed_forward(normalised(x, "norm2")))
    x = normalised(added(builder, f"{name}.attended", x, attended(x)), "norm1")
    return normalised(added(builder, f"{name}.made", x, fed_forward(x)), "norm2")


def _activation(call: ModuleCall) -> Value:
    """Add the activation of a transformer layer: a module, or a function of torch."""
    function = call.module
    if isinstance(function, nn.Module):
        return add_module(call)
    if function in (nn.functional.relu, torch.relu):
        return relu(call)
    if function is nn.functional.gelu:
        return call.builder.table(call.name, call.x, "gelu")
    raise NoKernel(f"activation {getattr(function, '__name__', function)}")


def _encoder(call: ModuleCall) -> Value:
    module = call.module
    x = call.x
    for index, layer in enumerate(module.layers):
        call.require(type(layer) is nn.TransformerEncoderLayer, "of other layers")
        x = _encoder_layer(call.on(x, layer, f"{call.name}.layers.{index}"))
    if module.norm is not None:
        x = add_module(call.on(x, module.norm, f"{call.name}.norm"))
    return x


def added(builder: GraphBuilder, name: str, one: Value, other: Value) -> Value:
    """Add the sum of two values, the second one in the arrangement of the first."""
    layout = one.layout
    wanted = layouts.like(layout, other.form)
    if wanted is None or wanted.form != layout.form:
        raise NoKernel(f"sum of {one.form} and {other.form}")
    other = builder.arranged(other, wanted)
    return builder.put(ir.Add, builder.free_name(name), [one, other], layout)


# ---------------------------------------------------------------------------------------------------------- rules


def _pad_module(mode: str) -> Callable[[ModuleCall], Value]:
    def rule(call: ModuleCall) -> Value:
        value = getattr(call.module, "value", 0.0)
        return padding(call, mode, call.module.padding, value)

    return rule


_RULES: dict[type, Callable[[ModuleCall], Value]] = {
    nn.Conv1d: _convolution,
    nn.Conv2d: _convolution,
    nn.ConvTranspose1d: _transposed_convolution,
    nn.ConvTranspose2d: _transposed_convolution,
    nn.Linear: linear,
    nn.Embedding: _embedding,
    nn.BatchNorm1d: _batch_norm,
    nn.BatchNorm2d: _batch_norm,
    nn.GroupNorm: _group_norm,
    nn.InstanceNorm1d: _instance_norm,
    nn.InstanceNorm2d: _instance_norm,
    nn.LayerNorm: layer_norm,
    nn.ReLU: relu,
    nn.ReLU6: _table("clamp", "min_val", "max_val"),
    nn.Hardtanh: _table("clamp", "min_val", "max_val"),
    nn.LeakyReLU: _table("leaky-relu", "negative_slope"),
    nn.ELU: lambda call: call.builder.table(call.name, call.x, "elu", call.module.alpha, 1.0),
    nn.SELU: lambda call: call.builder.table(call.name, call.x, "elu", *_SELU),
    nn.GELU: _gelu,
    nn.SiLU: _table("silu"),
    nn.Mish: _table("mish"),
    nn.Hardswish: _table("hardswish"),
    nn.Hardsigmoid: _table("hardsigmoid"),
    nn.Sigmoid: _table("sigmoid"),
    nn.Tanh: _table("tanh"),
    nn.Softplus: _table("softplus", "beta"),
    nn.Softmax: softmax,
    nn.MaxPool1d: _max_pool,
    nn.MaxPool2d: _max_pool,
    nn.AvgPool1d: _average_pool,
    nn.AvgPool2d: _average_pool,
    nn.AdaptiveAvgPool1d: _adaptive_average,
    nn.AdaptiveAvgPool2d: _adaptive_average,
    nn.AdaptiveMaxPool1d: _adaptive_max,
    nn.AdaptiveMaxPool2d: _adaptive_max,
    nn.Flatten: view,
    nn.Unflatten: view,
    nn.Identity: lambda call: call.x,
    nn.Dropout: dropout,
    nn.Dropout1d: dropout,
    nn.Dropout2d: dropout,
    nn.Upsample: upsample,
    nn.PixelShuffle: _pixel_shuffle,
    nn.PixelUnshuffle: _pixel_unshuffle,
    nn.ChannelShuffle: _channel_shuffle,
    nn.ZeroPad1d: _pad_module("constant"),
    nn.ZeroPad2d: _pad_module("constant"),
    nn.ConstantPad1d: _pad_module("constant"),
    nn.ConstantPad2d: _pad_module("constant"),
    nn.ReflectionPad1d: _pad_module("reflect"),
    nn.ReflectionPad2d: _pad_module("reflect"),
    nn.ReplicationPad1d: _pad_module("replicate"),
    nn.ReplicationPad2d: _pad_module("replicate"),
    nn.CircularPad1d: _pad_module("circular"),
    nn.CircularPad2d: _pad_module("circular"),
    nn.TransformerEncoderLayer: _encoder_layer,
    nn.TransformerEncoder: _encoder,
}


def _pair(value: Any, rank: int, of_row: int = 1) -> ir.Pair:
    """Return a setting of one number a dimension as (height, width); an image of one row has `of_row` there."""
    if isinstance(value, int):
        value = (value,) * rank
    return _image_pair(tuple(value) if len(value) == rank else tuple(value) * rank, of_row)


def _image_pair(value: Sequence[int], of_row: int = 1) -> ir.Pair:
    return (int(value[0]), int(value[1])) if len(value) == 2 else (of_row, int(value[0]))
