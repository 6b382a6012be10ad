"""Rules for modules that pool, pad, resize and shuffle images."""

from __future__ import annotations

from collections.abc import Sequence

from socflower.precision.int8 import network as ir
from socflower.precision.int8.conversion import value_layout as layouts
from socflower.precision.int8.conversion.graph_builder import Value, form_of
from socflower.precision.int8.conversion.module_call import ModuleCall, pair
from socflower.precision.int8.conversion.value_layout import ValueLayout
from socflower.precision.int8.operators.layout import ZERO
from socflower.precision.int8.operators.region_mean import RegionMean, Regions

MAX_WINDOW = 256
"""Pixels of a pooling window: the engine stores the position of a maximum in a byte."""

# ------------------------------------------------------------------------------------------------------ pooling


def max_pool_module(call: ModuleCall) -> Value:
    """Add a max-pool."""
    module = call.module
    call.require_settings(dilation=(1, (1, 1), (1,)), return_indices=(False,))
    x = call.image()
    rank = len(x.form) - 1
    kernel = pair(module.kernel_size, rank)
    stride = pair(module.stride, rank)
    padding = pair(module.padding, rank, 0)
    if module.ceil_mode:
        # The incomplete last windows repeat their last row or column, which changes no maximum.
        made = call.made().shape[1:]
        extra = [
            max(0, (count - 1) * step + size - length - 2 * pad)
            for count, step, size, length, pad in zip(
                made, stride, kernel, x.layout.shape[1:], padding, strict=True
            )
        ]
        x = padded(call, x, "replicate", [(0, more) for more in extra[2 - rank :]])
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


def average_pool(call: ModuleCall) -> Value:
    """Add an average pool."""
    module = call.module
    x = call.image()
    rank = len(x.form) - 1
    kernel = pair(module.kernel_size, rank)
    stride = pair(module.stride, rank)
    padding = pair(module.padding, rank, 0)
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


def adaptive_average(call: ModuleCall) -> Value:
    """Add an adaptive average pool."""
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


def adaptive_max(call: ModuleCall) -> Value:
    """Add an adaptive max-pool, where all windows are equal."""
    call.require_settings(return_indices=(False,))
    x = call.image()
    _, height, width = x.layout.shape
    _, out_h, out_w = call.made().shape
    even = height % out_h == 0 and width % out_w == 0
    call.require(even, f"from {height}x{width} to {out_h}x{out_w}, in windows of two sizes")
    window = (height // out_h, width // out_w)
    return max_pool(call, x, window, window, (0, 0))


# ------------------------------------------------------------------------------------------- parts and repetition


def padded(call: ModuleCall, x: Value, mode: str, pads: Sequence[tuple[int, int]]) -> Value:
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
    return padded(call, call.x, mode, list(reversed(pads)))


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


def pixel_shuffle(call: ModuleCall) -> Value:
    """(c r r, h, w) to (c, h r, w r): the values lie differently once they are read as an image."""
    factor = call.module.upscale_factor
    channels, height, width = call.x.form
    split = call.builder.viewed(call.x, (channels // factor**2, factor, factor, height, width))
    moved = Value(split.name, split.layout.permuted((0, 3, 1, 4, 2)))
    return call.builder.viewed(moved, form_of(call.operation))


def pixel_unshuffle(call: ModuleCall) -> Value:
    """Add the inverse of a pixel shuffle."""
    factor = call.module.downscale_factor
    channels, height, width = call.x.form
    split = call.builder.viewed(
        call.x, (channels, height // factor, factor, width // factor, factor)
    )
    moved = Value(split.name, split.layout.permuted((0, 2, 4, 1, 3)))
    return call.builder.viewed(moved, form_of(call.operation))


def channel_shuffle(call: ModuleCall) -> Value:
    """Add a transposition of groups and channels of a group."""
    channels, *size = call.x.form
    groups = call.module.groups
    split = call.builder.viewed(call.x, (groups, channels // groups, *size))
    order = (1, 0, *range(2, 2 + len(size)))
    moved = Value(split.name, split.layout.permuted(order))
    return call.builder.viewed(moved, form_of(call.operation))


def view(call: ModuleCall) -> Value:
    """Return the value in the shape that torch makes of it; nothing is added unless values have to move."""
    return call.builder.viewed(call.x, form_of(call.operation))
