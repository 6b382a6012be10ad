"""What torch's modules are in the integer engine: a rule for each type, from its settings to nodes of the network."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import nn

from socflower import _int8
from socflower.precision.int8 import network as ir
from socflower.precision.int8.conversion import value_layout as layouts
from socflower.precision.int8.conversion.graph_builder import GraphBuilder, NoKernel, Value
from socflower.precision.int8.conversion.image_rules import (
    adaptive_average,
    adaptive_max,
    average_pool,
    channel_shuffle,
    max_pool_module,
    padded,
    padding,
    pixel_shuffle,
    pixel_unshuffle,
    upsample,
    view,
)
from socflower.precision.int8.conversion.matrix_rules import added, scaled_attention
from socflower.precision.int8.conversion.module_call import ModuleCall, image_pair
from socflower.precision.int8.conversion.value_layout import ValueLayout
from socflower.precision.int8.operators.embedding import MOST_ROWS, Embedding
from socflower.precision.int8.operators.products import Softmax
from socflower.precision.int8.operators.sample_norm import SampleNorm
from socflower.precision.int8.operators.weighted import covers, sum_depths


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
        x = padded(call, x, module.padding_mode, pads)
    return _weighted(call, ir.Convolution, x, padding)


def _transposed_convolution(call: ModuleCall) -> Value:
    module = call.module
    x = call.image()
    rank = len(module.kernel_size)
    call.require(len(x.form) == rank + 1, f"of {len(x.form) + 1} dimensions")
    call.require_plain_parameters()
    call.require_settings(padding_mode=("zeros",))
    return _weighted(call, ir.TransposedConvolution, x, module.padding)


def _weighted(
    call: ModuleCall,
    kind: type[ir.Convolution | ir.TransposedConvolution],
    x: Value,
    padding: Sequence[int],
) -> Value:
    """Add a convolution, as one over an image if the module has fewer dimensions."""
    module = call.module
    weight = ("weight", f"{call.name}.weight", tuple(module.weight.shape))
    made = call.put(
        kind,
        x,
        call.made(),
        kernel=image_pair(module.kernel_size),
        stride=image_pair(module.stride),
        padding=image_pair(padding, 0),
        dilation=image_pair(module.dilation),
        groups=module.groups,
        bias=module.bias is not None,
        outside=() if len(module.kernel_size) == 2 else (weight,),
    )
    return _require_exact(call, made)


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


def _sample_norm(call: ModuleCall, groups: int) -> Value:
    module = call.module
    x = call.image()
    return call.put(
        SampleNorm,
        x,
        x.layout,
        eps=module.eps,
        groups=groups,
        scale=module.affine,
        offset=module.affine,
    )


def _group_norm(call: ModuleCall) -> Value:
    module = call.module
    call.require_plain_parameters()
    return _sample_norm(call, module.num_groups)


def _instance_norm(call: ModuleCall) -> Value:
    module = call.module
    call.require_settings(track_running_stats=(False,))
    call.require(len(call.x.form) > 1, "of one value a channel")
    return _sample_norm(call, module.num_features)


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
    nn.MaxPool1d: max_pool_module,
    nn.MaxPool2d: max_pool_module,
    nn.AvgPool1d: average_pool,
    nn.AvgPool2d: average_pool,
    nn.AdaptiveAvgPool1d: adaptive_average,
    nn.AdaptiveAvgPool2d: adaptive_average,
    nn.AdaptiveMaxPool1d: adaptive_max,
    nn.AdaptiveMaxPool2d: adaptive_max,
    nn.Flatten: view,
    nn.Unflatten: view,
    nn.Identity: lambda call: call.x,
    nn.Dropout: dropout,
    nn.Dropout1d: dropout,
    nn.Dropout2d: dropout,
    nn.Upsample: upsample,
    nn.PixelShuffle: pixel_shuffle,
    nn.PixelUnshuffle: pixel_unshuffle,
    nn.ChannelShuffle: channel_shuffle,
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
