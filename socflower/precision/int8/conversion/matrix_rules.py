"""Sums and matrix products of values, and the attention that is made of them."""

from __future__ import annotations

import math

from socflower.precision.int8 import network as ir
from socflower.precision.int8.conversion import value_layout as layouts
from socflower.precision.int8.conversion.graph_builder import GraphBuilder, NoKernel, Value
from socflower.precision.int8.conversion.value_layout import ValueLayout
from socflower.precision.int8.operators.products import MatMul, Softmax


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


def added(builder: GraphBuilder, name: str, one: Value, other: Value) -> Value:
    """Add the sum of two values, the second one in the arrangement of the first."""
    layout = one.layout
    wanted = layouts.like(layout, other.form)
    if wanted is None or wanted.form != layout.form:
        raise NoKernel(f"sum of {one.form} and {other.form}")
    other = builder.arranged(other, wanted)
    return builder.put(ir.Add, builder.free_name(name), [one, other], layout)
