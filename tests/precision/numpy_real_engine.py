"""Real scales in NumPy, written from the docstrings of socflower.precision and native/int8/reference.h.

A value is (integers, exponent, factor); a gradient is (integers, exponent).
"""

import math
import zlib

import numpy as np

from socflower.precision.int8 import network as ir
from tests.precision import numpy_kernels as nk
from tests.precision.numpy_engine import NumpyTrainer, exponent_for, per_channel_integers

GOLDEN_STEP = 0x9E3779B9


def random32(index, seed):
    """Return the numbers of elements (random24.h) as uint64 below 2^32."""
    x = (index * 0x9E3779B1 + seed) % 2**32
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        x = (x ^ (x >> np.uint64(shift))) * np.uint64(factor) % 2**32
    return x ^ (x >> np.uint64(16))


def dither32(shape, seed):
    """Return the number of each element of (height, width, batch, channels), counted over padded channels."""
    *pixels, channels = shape
    first = np.arange(math.prod(pixels), dtype=np.uint64).reshape(*pixels, 1)
    index = first * np.uint64(nk.stride_of(channels)) + np.arange(channels, dtype=np.uint64)
    block = index // np.uint64(16) * np.uint64(16)
    return (random32(block, seed) + (index - block) * np.uint64(GOLDEN_STEP)) % 2**32


def round_at_random(acc, shift, seed):
    """Return acc / 2^shift, rounded up or down as the number of each element says."""
    noise = (dither32(acc.shape, seed) >> np.uint64(32 - shift)).astype(np.int64)
    return np.sign(acc) * np.minimum((np.abs(acc) + noise) >> shift, 127)


def scale_of(value):
    return math.ldexp(value[2], value[1])


def affine_real(acc, by_image, scale, offset, other=None, *, relu):
    """Return acc * by_image * scale + offset + other as float32, every operation rounded."""
    real = acc.astype(np.float32) * np.float32(by_image) * np.float32(scale) + np.float32(offset)
    if other is not None:
        q, by_image = other
        real = real + q.astype(np.float32) * np.float32(by_image)
    assert real.dtype == np.float32
    return np.maximum(real, np.float32(0)) if relu else real


def at_real_scale(real, largest, reach, *, relu):
    """Return float32 values at the scale at which `reach` of `largest` is 127; a rectified value stays positive."""
    if largest == 0.0:
        return np.zeros(real.shape, np.int64), -7, 1.0
    factor, exponent = math.frexp(reach * largest / 127.0)
    inverse = np.float32(1.0 / math.ldexp(factor, exponent))
    q = np.rint(np.clip(real * inverse, -127, 127)).astype(np.int64)
    if relu:
        q[(q == 0) & (real > 0)] = 1
    return q, exponent, factor


def channel_units(master, exponent):
    """Return the unit of each output channel of a weight, in 2^exponent."""
    largest = np.abs(master).max(axis=(0, 1, 2))
    return np.maximum(largest / np.float32(math.ldexp(127.0, exponent)), np.float32(2.0**-12))


class NumpyRealTrainer(NumpyTrainer):
    """Trains a graph by `REAL_SCALES`, step by step.

    A convolution that a BatchNorm alone reads hands on its accumulators and their scale, for each channel. If it is
    depthwise its weight and its gradients have units for each channel, kept by the identity of the weight and by the
    name of the value.
    """

    def __init__(self, *args, **settings):
        super().__init__(*args, **settings)
        self.reach = self.algorithm.forward.reach
        self.units = {}
        self.gradient_units = {}
        for node in self.graph.nodes:
            if self.is_scaled(node):
                weight = self.weights[f"{node.name}.weight"]
                self.units[id(weight)] = None
                self.round_master(weight)

    def units_of(self, weight):
        return self.units.get(id(weight), np.float32(1.0))

    def is_scaled(self, node):
        """Return whether the node is a depthwise convolution that a BatchNorm reads."""
        if not isinstance(node, ir.Convolution) or not self.is_normalised(node):
            return False
        if self.algorithm.weight == "int8":
            return False
        channels = self.graph.shape_of(node.inputs[0])[0]
        return node.groups == channels == node.shape[0] > 1

    def unit_of_gradient(self, name):
        return self.gradient_units.get(name, 1.0)

    def round_master(self, weight):
        """Round the master weights to int8, each channel in its unit."""
        units = channel_units(weight.master, weight.exponent)
        self.units[id(weight)] = units
        inverse = np.float32(2.0**-weight.exponent) / units
        weight.q = np.rint(np.clip(weight.master * inverse, -127, 127)).astype(np.int64)

    def update_weight(self, weight, gradient, exponent):
        super().update_weight(weight, gradient, exponent)
        if id(weight) in self.units:
            self.round_master(weight)

    def round_forward(self, node, acc, exponent, factor=1.0):
        return (*super().round_forward(node, acc, exponent), factor)

    def input_value(self, images):
        return (*super().input_value(images), 1.0)

    def is_normalised(self, node):
        """Return whether the next operator is a BatchNorm, and alone reads this one."""
        index = self.graph.nodes.index(node)
        after = self.graph.nodes[index + 1 : index + 2]
        reads = self.graph.consumers(node.name) == after
        return reads and not node.relu and any(isinstance(one, ir.BatchNorm) for one in after)

    def forward_convolution(self, node, memory, x):
        weight = self.weights[f"{node.name}.weight"]
        geometry = {"stride": node.stride, "padding": node.padding, "groups": node.groups}
        acc = nk.convolution(x[0], weight.q, **geometry)
        exponent = x[1] + weight.exponent
        if node.bias:
            bias = self.vectors[f"{node.name}.bias"].astype(np.float64)
            bias = bias / self.units_of(weight)
            acc += np.rint(np.ldexp(bias, -exponent) / x[2]).astype(np.int64)
        acc = nk.kept(acc, node.relu)
        scale = math.ldexp(x[2], exponent)
        if self.is_normalised(node):
            memory["sums of", node.name] = acc, scale * self.units_of(weight).astype(np.float64)
            return acc, 0, 1.0
        real = affine_real(acc, 1.0, scale, 0.0, relu=node.relu)
        return at_real_scale(real, nk.largest_magnitude(acc) * scale, self.reach, relu=node.relu)

    def track(self, node, mean, variance, rows):
        unbiased = variance * (rows / max(rows - 1, 1))
        for part, new in (("mean", mean), ("var", unbiased)):
            name = f"{node.name}.running_{part}"
            kept = np.float32(1.0 - node.momentum) * self.vectors[name]
            self.vectors[name] = (kept + node.momentum * new).astype(np.float32)

    def forward_accumulators(self, node, memory, acc, unit):
        """Normalise accumulators; keep them normalised, as int8, for the backward pass."""
        axes = (0, 1, 2)
        rows = acc.size // acc.shape[3]
        bits = min(20, (53 - rows.bit_length()) // 2)
        shift = max(0, nk.largest_magnitude(acc).bit_length() - bits)
        kept = (acc + ((1 << shift) >> 1)) >> shift
        mean = kept.sum(axis=axes) / rows
        variance = np.maximum((kept * kept).sum(axis=axes) / rows - mean * mean, 0.0)
        mean, variance = mean * 2.0**shift, variance * 2.0 ** (2 * shift)
        self.track(node, mean * unit, variance * unit**2, rows)
        inverse_deviation = 1.0 / np.sqrt(variance * unit**2 + node.eps)
        slope = unit * inverse_deviation
        least, most = acc.min(axis=axes), acc.max(axis=axes)
        per_step = 127.0 / np.maximum(np.maximum(most - mean, mean - least), 0.5)
        real = affine_real(acc, 1.0, per_step, -mean * per_step, relu=False)
        q = np.rint(np.clip(real, -127, 127)).astype(np.int64)
        memory[node.name] = q, 0.0, slope / per_step, inverse_deviation
        scale = self.vectors[f"{node.name}.weight"] * slope
        offset = self.vectors[f"{node.name}.bias"] - scale * mean
        ends = np.array([scale * most + offset, scale * least + offset])
        largest = (np.maximum(ends, 0.0) if node.relu else np.abs(ends)).max()
        real = affine_real(acc, 1.0, scale, offset, relu=node.relu)
        return at_real_scale(real, float(largest), self.reach, relu=node.relu)

    def forward_batch_norm(self, node, memory, x):
        sums = memory.get(("sums of", node.inputs[0]))
        if sums is not None:
            return self.forward_accumulators(node, memory, *sums)
        q, step = x[0], scale_of(x)
        rows = q.size // q.shape[3]
        mean = q.sum(axis=(0, 1, 2)) / rows
        variance = np.maximum((q * q).sum(axis=(0, 1, 2)) / rows - mean * mean, 0.0)
        deviation = np.sqrt(variance * step**2 + node.eps)
        slope = step / deviation
        self.track(node, mean * step, variance * step**2, rows)
        memory[node.name] = q, mean, slope, 1.0 / deviation
        scale = self.vectors[f"{node.name}.weight"] * slope
        offset = self.vectors[f"{node.name}.bias"] - scale * mean
        acc_exponent, (scale, offset) = per_channel_integers((21, 28), scale, offset)
        return self.round_forward(node, nk.kept(scale * q + offset, node.relu), acc_exponent)

    def round_by_channel(self, node, acc, exponent, weight):
        """Round the input gradient of a depthwise convolution at random, for a BatchNorm in units of channels."""
        largest = np.abs(acc).max(axis=(0, 1, 2)).astype(np.float64)
        unit = self.units_of(weight) * self.gradient_units[node.name]
        own_exponent = exponent_for((largest * unit).max())
        source = next((one for one in self.graph.nodes if one.name == node.inputs[0]), None)
        if isinstance(source, ir.BatchNorm) and self.graph.consumers(source.name) == (node,):
            per_step = 127.0 / np.maximum(largest, 1.0)
            self.gradient_units[source.name] = np.ldexp(unit / per_step, -own_exponent)
        else:
            per_step = np.ldexp(unit, -own_exponent)
        real = acc.astype(np.float32) * per_step.astype(np.float32)
        real = np.clip(real, -127, 127).astype(np.float64)
        down = np.floor(real)
        seed = zlib.crc32(nk.padded(largest, np.float64).tobytes())
        *pixels, channels = acc.shape
        first = np.arange(math.prod(pixels), dtype=np.uint64).reshape(*pixels, 1)
        index = first * np.uint64(nk.stride_of(channels)) + np.arange(channels, dtype=np.uint64)
        chance = (random32(index, seed) >> np.uint64(8)) / 2.0**24
        return (down + (chance < real - down)).astype(np.int64), exponent + own_exponent

    def forward_relu(self, node, memory, x):
        return (*super().forward_relu(node, memory, x), x[2])

    def forward_max_pool(self, node, memory, x):
        return (*super().forward_max_pool(node, memory, x), x[2])

    def forward_average_pool(self, node, memory, x):
        q, exponent, _ = super().forward_average_pool(node, memory, x)
        return q, exponent, x[2]

    def forward_dropout(self, node, memory, x):
        q, exponent, _ = super().forward_dropout(node, memory, x)
        return q, exponent, x[2]

    def forward_add(self, node, memory, a, b):
        real = affine_real(a[0], scale_of(a), 1.0, 0.0, (b[0], scale_of(b)), relu=node.relu)
        return at_real_scale(real, float(np.abs(real).max()), self.reach, relu=node.relu)

    def logits_gradient(self, logits, labels):
        """Return softmax - one-hot of real logits in float64, at the finest exponent."""
        q, exponent, factor = logits
        real = np.ldexp(q[0, 0].astype(np.float64), exponent) * factor
        powers = np.exp(real - real.max(axis=1, keepdims=True))
        gradient = powers / powers.sum(axis=1, keepdims=True)
        gradient[np.arange(len(labels)), labels] -= 1.0
        exponent = max(exponent_for(np.abs(gradient).max()), -90)
        return nk.quantise(gradient, exponent), exponent

    def backward_convolution(self, node, memory, values, read, dy, exponent):
        weight, x = self.weights[f"{node.name}.weight"], values[node.inputs[0]]
        geometry = {"stride": node.stride, "padding": node.padding, "groups": node.groups}
        dx = None
        if node.inputs[0] != ir.INPUT:
            acc = nk.input_gradient(dy, weight.q, x[0].shape, **geometry)
            acc = nk.kept(acc, mask=read[node.inputs[0]])
            if self.is_scaled(node):
                dx = self.round_by_channel(node, acc, exponent + weight.exponent, weight)
            else:
                dx = self.round_backward(node, acc, exponent + weight.exponent)
        gradient = nk.weight_gradient(x[0], dy, node.kernel, **geometry)
        units = self.unit_of_gradient(node.name)
        scale = (math.ldexp(scale_of(x), exponent) * np.asarray(units)).astype(np.float32)
        if self.algorithm.weight == "int8":
            self.update_weight(weight, gradient, 0)
        else:
            self.update_weight(weight, gradient * scale.astype(np.float64), 0)
        if node.bias:
            self.update_vector(f"{node.name}.bias", dy.sum(axis=(0, 1, 2)) * units * 2.0**exponent)
        return [dx]

    def backward_batch_norm(self, node, memory, values, read, dy, exponent):
        """Return gamma / sigma * (dy - mean(dy) - xhat * mean(dy * xhat)), rounded at random."""
        q, mean, slope, inverse_deviation = memory[node.name]
        if node.relu:
            dy = nk.kept(dy, mask=values[node.name][0])
        rows = dy.size // dy.shape[3]
        sums = np.array([dy.sum(axis=(0, 1, 2)), (dy * q).sum(axis=(0, 1, 2))], np.float64)
        units = self.unit_of_gradient(node.name)
        sums *= units
        sum_dy, sum_dy_x = sums * 2.0**exponent
        sum_dy_xhat = slope * (sum_dy_x - mean * sum_dy)
        gain = self.vectors[f"{node.name}.weight"] * inverse_deviation
        scale_x = -gain * slope * sum_dy_xhat / rows
        offset = -gain * sum_dy / rows - scale_x * mean
        coefficients = [gain * 2.0**exponent * units, scale_x, offset]
        seed = zlib.crc32(nk.padded(sums, np.float64).tobytes())
        read = next(one for one in self.graph.nodes if one.name == node.inputs[0])
        by_channel = self.is_scaled(read)
        if by_channel:
            largest = np.abs(dy).max(axis=(0, 1, 2))
            bound = sum(
                np.abs(c) * top for c, top in zip(coefficients, (largest, 127, 1), strict=True)
            )
            # Zeros need no unit.
            units = np.maximum(bound, (bound.max() or 127.0) * 2.0**-20) / 127.0
            coefficients[0] = coefficients[0] * (largest > 0)
            coefficients = [each / units for each in coefficients]
        acc_exponent, (int_dy, int_x, int_offset) = per_channel_integers(
            (21, 21, 28), *coefficients
        )
        acc = int_dy * dy + int_x * q + int_offset
        if by_channel:
            exponent = math.frexp(bound.max() / 127.0)[1]
            self.gradient_units[read.name] = np.ldexp(units, -exponent)
            dx = round_at_random(acc, -acc_exponent, seed), exponent
        else:
            dx = self.tracker(node.name, "backward").round(
                acc, acc_exponent, lambda acc, shift: round_at_random(acc, shift, seed)
            )
        self.update_vector(f"{node.name}.weight", sum_dy_xhat)
        self.update_vector(f"{node.name}.bias", sum_dy)
        return [dx]
