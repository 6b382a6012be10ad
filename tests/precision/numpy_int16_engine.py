"""Training with int16 gradients in int64 NumPy, written from the docstring of `BackwardRule.wide_above`.

A wide gradient is one integer of 16 bits here, at an exponent that is lower by 8: all that reads it is linear.
"""

import numpy as np

from socflower.precision.int8 import network as ir
from tests.precision import numpy_kernels as nk
from tests.precision.numpy_engine import NumpyTrainer, exponent_for


def is_wide(gradient):
    return nk.largest_magnitude(gradient) > 127


def fitted(acc, exponent):
    """Return integers without the bits beyond 30, rounded half away from zero, and their exponent."""
    drop = max(0, nk.largest_magnitude(acc).bit_length() - 30)
    magnitude = (2 * np.abs(acc) + 2**drop) // 2 ** (drop + 1) if drop else np.abs(acc)
    return np.sign(acc) * magnitude, exponent + drop


def in_halves(exact, rounded, per_unit):
    """Return 256 * rounded + the nearest int8 of what is left of exact / per_unit, half away from zero."""
    left = 256 * (exact - rounded * per_unit)
    magnitude = np.minimum((2 * np.abs(left) + per_unit) // (2 * per_unit), 127)
    return 256 * rounded + np.sign(left) * magnitude


class NumpyInt16Trainer(NumpyTrainer):
    """Trains a graph by an algorithm with `wide_above`, step by step."""

    def __init__(self, *args):
        super().__init__(*args)
        self.wide = {}
        self.num_wide = 0

    def reads_int16(self, name):
        if name == ir.INPUT or len(self.graph.consumers(name)) > 1:
            return False
        node = self.graph.node(name)
        if node.kind == "max-pool":
            disjoint = all(s >= k for s, k in zip(node.stride, node.kernel, strict=True))
            return disjoint and self.reads_int16(node.inputs[0])
        is_rectified_result = name == self.graph.output and getattr(node, "relu", False)
        return node.kind == "convolution" and not is_rectified_result

    def is_coarse(self, exact, rounded, per_unit):
        mean = float(np.abs(exact).sum())
        change = abs(mean - float(np.abs(rounded).sum()) * per_unit)
        return change > (2.0**self.algorithm.backward.wide_above - 1.0) * mean

    def round_backward(self, node, acc, exponent, role="backward"):
        tracker = self.tracker(node.name, role)
        looks = tracker.policy.adaptive and tracker.batch < tracker.next_look
        before = tracker.exponent
        rounded, made = tracker.round(acc, exponent, self.algorithm.backward.rounding)
        produces = node.kind in ("convolution", "batch-norm") and role == "backward"
        if not produces or not self.reads_int16(node.inputs[0]):
            return rounded, made
        shift = max(0, made - exponent)
        searched = not looks or nk.largest_magnitude(acc) >= 128 * 2 ** max(0, before - exponent)
        searched = searched or not 0 <= before - exponent <= 30
        if searched and acc.any():
            self.wide[node.name] = self.is_coarse(acc, rounded, 2**shift)
        if not self.wide.get(node.name, False):
            return rounded, made
        self.num_wide += 1
        return in_halves(acc, rounded, 2**shift), made - 8

    def logits_gradient(self, logits, labels):
        real = logits[0][0, 0] * 2.0 ** logits[1]
        powers = np.exp(real - real.max(axis=1, keepdims=True))
        gradient = powers / powers.sum(axis=1, keepdims=True)
        gradient[np.arange(len(labels)), labels] -= 1.0
        exponent = exponent_for(np.abs(gradient).max())
        scaled = np.ldexp(gradient, -exponent)
        rounded = np.clip(np.rint(scaled), -127, 127).astype(np.int64)
        fine = np.rint(scaled * 2.0**16).astype(np.int64)
        if not self.reads_int16(self.graph.output) or not self.is_coarse(fine, rounded, 2**16):
            return rounded, exponent
        self.num_wide += 1
        low = np.clip(np.rint(256.0 * (scaled - rounded)), -127, 127).astype(np.int64)
        return 256 * rounded + low, exponent - 8

    def backward_convolution(self, node, memory, values, read, dy, exponent):
        if not is_wide(dy):
            return super().backward_convolution(node, memory, values, read, dy, exponent)
        weight, (x, x_exponent) = self.weights[f"{node.name}.weight"], values[node.inputs[0]]
        geometry = {"stride": node.stride, "padding": node.padding, "groups": node.groups}
        dx = None
        if node.inputs[0] != ir.INPUT:
            acc = nk.input_gradient(dy, weight.q, x.shape, **geometry)
            acc = nk.kept(acc, mask=read[node.inputs[0]])
            dx = self.round_backward(node, *fitted(acc, exponent + weight.exponent))
        acc = nk.weight_gradient(x, dy, node.kernel, **geometry)
        self.update_weight(weight, *fitted(acc, x_exponent + exponent))
        if node.bias:
            self.update_vector(f"{node.name}.bias", dy.sum(axis=(0, 1, 2)) * 2.0**exponent)
        return [dx]
