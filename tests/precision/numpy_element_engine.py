"""Elements with few mantissa bits in int64 NumPy, written from the docstrings and native/int8/layers.h.

A number is divided by the distance of its neighbours and multiplied again, where the engine masks bits.
"""

import zlib

import numpy as np

from socflower.precision.int8 import network as ir
from tests.precision.numpy_real_engine import NumpyRealTrainer, dither32


def grids(q, mantissa_bits):
    """Return for each of (h, w, ...) integers the distance between its neighbours, and the largest number.

    A group, all of h and w, has the least power of two as unit with which 2^(mantissa bits + 3) is above its integers.
    """
    groups = np.abs(q).max(axis=(0, 1), keepdims=True)
    unit = np.ones_like(groups)
    for _ in range(4 - mantissa_bits):
        unit[groups >= unit * 2 ** (mantissa_bits + 3)] *= 2
    significant = 2 ** np.maximum(np.frexp(q)[1] - 1 - mantissa_bits, 0).astype(np.int64)
    return np.maximum(significant, unit), (2 ** (mantissa_bits + 1) - 1) * 4 * unit


def nearest(q, mantissa_bits):
    """Return the nearest numbers, half to even, saturated."""
    apart, most = grids(q, mantissa_bits)
    return np.clip(np.rint(q / apart).astype(np.int64) * apart, -most, most)


def at_random(q, mantissa_bits, seed):
    """Return numbers above or below, as the number of each element of (h, w, batch, channels) says."""
    apart, most = grids(q, mantissa_bits)
    chance = dither32(q.shape, seed).astype(np.int64)
    up = np.abs(q) % apart + chance * apart // 2**32 >= apart
    return np.sign(q) * np.minimum((np.abs(q) // apart + up) * apart, most)


class NumpyElementTrainer(NumpyRealTrainer):
    """Trains a graph by an algorithm with `mantissa_bits` in both passes, step by step."""

    def __init__(self, *args, **settings):
        super().__init__(*args, **settings)
        for weight in self.weights.values():
            self.round_weight(weight)

    def round_weight(self, weight):
        weight.q = nearest(weight.q, self.algorithm.forward.mantissa_bits)

    def update_weight(self, weight, gradient, exponent):
        super().update_weight(weight, gradient, exponent)
        self.round_weight(weight)

    def value_elements(self, node, value):
        is_summed = isinstance(node, ir.Convolution) and self.is_normalised(node)
        if is_summed or node.name == self.graph.output:
            return value
        q, *scale = value
        return (nearest(q, self.algorithm.forward.mantissa_bits), *scale)

    def gradient_elements(self, gradient, value, role):
        q, exponent = gradient
        seed = zlib.crc32(f"{value} {role}".encode(), self.seed)
        return at_random(q, self.algorithm.backward.mantissa_bits, seed), exponent
