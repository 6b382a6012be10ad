"""What torch computes in place of an int8 operator, on images (n, channels, height, width): to time it in FP32."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from socflower.precision.int8 import network as ir
from socflower.precision.int8.operators.embedding import Embedding
from socflower.precision.int8.operators.layout import Concat, Rearrange, Select
from socflower.precision.int8.operators.parameter_value import ParameterValue
from socflower.precision.int8.operators.products import MatMul, Multiply, Softmax
from socflower.precision.int8.operators.region_mean import RegionMean
from socflower.precision.int8.operators.sample_norm import SampleNorm
from socflower.precision.int8.operators.tables import LookupTable

Compute = Callable[[Sequence[Tensor]], Tensor]

_FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "gelu": functional.gelu,
    "gelu-tanh": lambda x: functional.gelu(x, approximate="tanh"),
    "silu": functional.silu,
    "mish": functional.mish,
    "softplus": functional.softplus,
    "hardswish": functional.hardswish,
    "hardsigmoid": functional.hardsigmoid,
    "clamp": functional.relu6,
    "clip": lambda x: x.clamp(0.0, 6.0),
    "leaky-relu": functional.leaky_relu,
    "elu": functional.elu,
    "affine": lambda x: x * 2.0 + 1.0,
    "square": torch.square,
    "abs": torch.abs,
}


def fp32_equivalent(
    node: ir.Node, graph: ir.Graph, modules: Mapping[str, nn.Module], batch: int
) -> Compute:
    """Return a function of the node's inputs with the work that torch has for the node; only its time is meant."""
    compute = _of_weights(node, graph) or _elementwise(node) or _of_images(node, batch)
    if compute is None:
        module = modules[getattr(node, "path", node.name)]
        forms = getattr(node, "forms", ())
        return lambda inputs: module(
            *(x.reshape(batch, *form) for x, form in zip(inputs, forms, strict=True))
            if forms
            else inputs
        )
    if getattr(node, "relu", False):
        return lambda inputs: torch.relu(compute(inputs))
    return compute


def _of_weights(node: ir.Node, graph: ir.Graph) -> Compute | None:
    if not isinstance(node, ir.Weighted):
        return None
    weight = torch.zeros(graph.weight_shape(node)).requires_grad_()
    if isinstance(node, Embedding):
        table = torch.zeros(node.num_rows, node.shape[0]).requires_grad_()
        return lambda inputs: functional.embedding(torch.zeros_like(inputs[0]).long(), table)
    bias = torch.zeros(node.shape[0]).requires_grad_() if node.bias else None
    if isinstance(node, ir.Convolution) and node.linear and node.shape[1:] == (1, 1):
        flat = weight.detach().flatten(1).requires_grad_()
        return lambda inputs: functional.linear(inputs[0].flatten(1), flat, bias)
    settings: dict[str, Any] = {
        "stride": node.stride,
        "padding": node.padding,
        "groups": node.groups,
        "dilation": node.dilation,
    }
    if isinstance(node, ir.TransposedConvolution):
        return lambda inputs: functional.conv_transpose2d(inputs[0], weight, bias, **settings)
    return lambda inputs: functional.conv2d(inputs[0], weight, bias, **settings)


def _elementwise(node: ir.Node) -> Compute | None:
    match node:
        case ir.Add():
            return lambda inputs: inputs[0] + inputs[1]
        case Multiply():
            return lambda inputs: inputs[0] * inputs[1]
        case ir.Relu():
            return lambda inputs: torch.relu(inputs[0])
        case ir.Dropout():
            drop = functional.dropout2d if node.channelwise else functional.dropout
            return lambda inputs: drop(inputs[0], node.p)
        case LookupTable():
            function = _FUNCTIONS[node.function]
            return lambda inputs: function(inputs[0])
        case Softmax():
            return lambda inputs: torch.softmax(inputs[0] * node.scale, 1)
    return None


def _of_images(node: ir.Node, batch: int) -> Compute | None:
    match node:
        case ir.MaxPool():
            window = (node.kernel, node.stride, node.padding)
            return lambda inputs: functional.max_pool2d(inputs[0], *window)
        case ir.AveragePool():
            window = (node.kernel, node.stride, node.padding)
            return lambda inputs: functional.avg_pool2d(inputs[0], *window)
        case RegionMean():
            return lambda inputs: functional.adaptive_avg_pool2d(inputs[0], node.shape[1:])
        case SampleNorm():
            return lambda inputs: functional.group_norm(inputs[0], node.groups, eps=node.eps)
        case Concat():
            dim = ("batch", "channels", "rows", "columns").index(node.axis)
            return lambda inputs: torch.cat(list(inputs), dim)
        case Select():
            chosen = [
                torch.tensor(each).clamp_min(0) for each in (node.channels, node.rows, node.columns)
            ]

            def select(inputs: Sequence[Tensor]) -> Tensor:
                x = inputs[0]
                for dim, index in enumerate(chosen, start=1):
                    x = x.index_select(dim, index)
                return x

            return select
        case Rearrange():
            return lambda inputs: inputs[0].flatten(1).clone().reshape(batch, *node.shape)
        case MatMul():
            return lambda inputs: _matmul(node, inputs)
        case ParameterValue():
            value = torch.zeros(node.shape).requires_grad_()
            return lambda inputs: value.expand(batch, *node.shape).clone()
    return None


def _matmul(node: MatMul, inputs: Sequence[Tensor]) -> Tensor:
    """Multiply as the operator does, the pixels (batches, rows) and the channels as columns."""
    shapes = [(channels, height, width) for _, channels, height, width in (x.shape for x in inputs)]
    rows, depth, columns = node.sizes(shapes)
    first, second = inputs
    lhs = first.reshape(len(first), depth, node.batches, rows).permute(0, 2, 3, 1)
    pixels = math.prod(second.shape[2:]) // node.batches
    rhs = second.reshape(len(second), second.shape[1], node.batches, pixels)
    rhs = rhs.permute(0, 2, 1, 3) if node.transposed else rhs.permute(0, 2, 3, 1)
    return (lhs @ rhs).reshape(len(first), columns, node.batches, rows)
