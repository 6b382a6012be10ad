"""Int8 training in int64 NumPy, written from the rules: F13 to F16, F18 and the docstrings of socflower.precision.

It shares no arithmetic with the engine. Tensors are (height, width, batch, channels) without padding channels.
"""

import math
from dataclasses import dataclass
from fractions import Fraction

import numpy as np

from socflower.precision.algorithm import IntegerUpdate
from socflower.precision.int8 import network as ir
from tests.precision import numpy_kernels as nk


def exponent_for(largest):
    """Return the smallest e with largest <= 127 * 2^e, by counting up; 0 for 0."""
    if largest == 0:
        return 0
    # None below it is enough: 127 < 2^7, and `largest` is at least half the power of two that frexp gives.
    exponent = math.frexp(largest)[1] - 8
    while Fraction(float(largest)) > 127 * Fraction(2) ** exponent:
        exponent += 1
    return exponent


class Tracker:
    """F16 from a list of the batches in which the exponent changed."""

    def __init__(self, policy, reach=1.0):
        self.policy = policy
        self.reach = reach
        self.exponent = None
        self.batch = 0
        self.next_look = 0
        self.changes = []

    def period(self):
        if not self.policy.adaptive or self.batch + 1 < self.policy.warm_up_batches:
            return 1
        if not self.changes:
            return max(1, (self.batch + 1) // 2)
        if self.policy.last_intervals:
            ends = [0, *self.changes][-self.policy.last_intervals - 1 :]
            return max(1, int(np.diff(ends).mean() / 2))
        closed = self.changes[-1] / len(
            self.changes
        )  # mean interval between changes, the first counted from 0
        open_too = (self.batch - self.changes[-1]) / (len(self.changes) + 1)
        return max(1, int(max(closed, open_too) / 2))

    def round(self, acc, acc_exponent, rounding):
        """Return (int8 values, exponent) of accumulators, and count a batch.

        `rounding` is a number, or a function of accumulators and shift.
        """

        def rounded(shift):
            if callable(rounding):
                return rounding(acc, shift)
            return nk.round_shift(acc, shift, rounding)

        largest = nk.largest_magnitude(acc)
        if self.exponent is not None and self.batch < self.next_look:
            shift = self.exponent - acc_exponent
            if 0 <= shift <= 30 and int(self.reach * largest) < 128 * 2**shift:
                self.batch += 1
                return rounded(shift), self.exponent
        exponent = acc_exponent + nk.shift_for(int(self.reach * largest))
        if largest == 0:
            self.batch += 1
            return np.zeros_like(acc), -7 if self.exponent is None else self.exponent
        if self.exponent not in (None, exponent):
            self.changes.append(self.batch)
        self.exponent = exponent
        self.next_look = self.batch + self.period()
        self.batch += 1
        return rounded(exponent - acc_exponent), exponent


@dataclass
class Weight:
    """Integers (kh, kw, in / groups, out), their exponent, and the FP32 weights behind them or None."""

    q: np.ndarray
    exponent: int
    master: np.ndarray | None
    velocity: np.ndarray | float = 0.0


def per_channel_integers(bits, *arrays):
    """Return (exponent, integer arrays): the finest common exponent at which array i has fewer than bits[i] bits."""
    exponents = [
        int(np.frexp(np.abs(array).max())[1]) - b
        for array, b in zip(arrays, bits, strict=True)
        if array.any()
    ]
    exponent = max(exponents, default=0)
    return exponent, [np.rint(array * 2.0**-exponent).astype(np.int64) for array in arrays]


class NumpyTrainer:
    """Trains a graph step by step."""

    def __init__(self, graph, state, algorithm, policy):
        self.graph = graph
        self.algorithm = algorithm
        self.policy = policy
        self.weights = {}
        self.vectors = {}
        self.velocities = {}
        self.trackers = {}
        for node in graph.nodes:
            if isinstance(node, ir.Convolution):
                real = np.asarray(state[f"{node.name}.weight"], np.float32)
                in_channels = graph.shape_of(node.inputs[0])[0] // node.groups
                real = real.reshape(node.shape[0], in_channels, *node.kernel).transpose(2, 3, 1, 0)
                exponent = exponent_for(np.abs(real).max())
                master = None if algorithm.weight == "int8" else real.copy()
                self.weights[f"{node.name}.weight"] = Weight(
                    nk.quantise(real, exponent), exponent, master
                )
        for name, array in state.items():
            if name not in self.weights and not name.endswith("num_batches_tracked"):
                self.vectors[name] = np.array(array, np.float32)

    def tracker(self, name, role):
        rule = self.algorithm.forward if role.startswith("forward") else self.algorithm.backward
        return self.trackers.setdefault((name, role), Tracker(self.policy, rule.reach))

    def round_forward(self, node, acc, exponent):
        return self.tracker(node.name, "forward").round(
            acc, exponent, self.algorithm.forward.rounding
        )

    def round_backward(self, node, acc, exponent, role="backward"):
        return self.tracker(node.name, role).round(acc, exponent, self.algorithm.backward.rounding)

    # ------------------------------------------------------------------------------------------ forward

    def step(self, images, labels, *, learning_rate, progress, seed=0):
        """Train on a batch and return the value of the logits: integers, their exponent, and what a subclass adds."""
        batch = len(images)
        self.rate = np.float32(learning_rate / batch)
        self.learning_rate, self.batch = np.float32(learning_rate), batch
        self.progress = progress
        self.seed = seed
        values = {ir.INPUT: self.input_value(images)}
        memory = {}
        for node in self.graph.nodes:
            forward = getattr(self, "forward_" + node.kind.replace("-", "_"))
            made = forward(node, memory, *(values[value] for value in node.inputs))
            values[node.name] = self.value_elements(node, made)
        logits, *scale = values[self.graph.output]
        gradient, exponent = self.logits_gradient(values[self.graph.output], labels)
        self.backward(values, memory, gradient[None, None], exponent)
        return (logits[0, 0], *scale)

    def value_elements(self, node, value):
        """Return the value that other operators read; a subclass may round it once more."""
        return value

    def gradient_elements(self, gradient, value, role):
        """Return the gradient that other operators read."""
        return gradient

    def input_value(self, images):
        exponent = exponent_for(np.abs(images).max())
        return nk.quantise(images, exponent).transpose(2, 3, 0, 1), exponent

    def logits_gradient(self, logits, labels):
        rounding = self.algorithm.backward.rounding
        return nk.softmax_gradient(logits[0][0, 0], logits[1], labels, rounding), -7

    def forward_convolution(self, node, memory, x):
        weight = self.weights[f"{node.name}.weight"]
        acc = nk.convolution(
            x[0], weight.q, stride=node.stride, padding=node.padding, groups=node.groups
        )
        exponent = x[1] + weight.exponent
        if node.bias:
            acc += np.rint(
                self.vectors[f"{node.name}.bias"].astype(np.float64) * 2.0**-exponent
            ).astype(np.int64)
        return self.round_forward(node, nk.kept(acc, node.relu), exponent)

    def forward_batch_norm(self, node, memory, x):
        q, exponent = x
        rows = q.size // q.shape[3]
        mean = q.sum(axis=(0, 1, 2)) / rows
        variance = np.maximum((q * q).sum(axis=(0, 1, 2)) / rows - mean * mean, 0.0)
        slope = 2.0**exponent * (1.0 / np.sqrt(variance * 4.0**exponent + node.eps))
        unbiased = variance * 4.0**exponent * (rows / max(rows - 1, 1))
        for part, new in (("mean", mean * 2.0**exponent), ("var", unbiased)):
            running = self.vectors[f"{node.name}.running_{part}"]
            kept = np.float32(1.0 - node.momentum) * running
            self.vectors[f"{node.name}.running_{part}"] = (kept + node.momentum * new).astype(
                np.float32
            )
        memory[node.name] = mean, slope
        scale = self.vectors[f"{node.name}.weight"] * slope
        offset = self.vectors[f"{node.name}.bias"] - scale * mean
        acc_exponent, (scale, offset) = per_channel_integers((21, 28), scale, offset)
        return self.round_forward(node, nk.kept(scale * q + offset, node.relu), acc_exponent)

    def forward_relu(self, node, memory, x):
        return nk.kept(x[0], relu=True), x[1]

    def forward_max_pool(self, node, memory, x):
        best, memory[node.name] = nk.max_pool(x[0], node.kernel, node.stride, node.padding)
        return best, x[1]

    def multiplier(self, node):
        return round(Fraction(2**14, node.kernel[0] * node.kernel[1]) + Fraction(1, 10**9))

    def forward_average_pool(self, node, memory, x):
        acc = nk.window_sums(x[0], node.kernel, node.stride, node.padding) * self.multiplier(node)
        return self.round_forward(node, acc, x[1] - 14)

    def forward_add(self, node, memory, a, b):
        acc, exponent = aligned_sum(a, b)
        return self.round_forward(node, nk.kept(acc, node.relu), exponent)

    def dropout_factor(self, node):
        """Return 1 / (1 - p) as (integer of 21 bits, exponent), p in units of 2^-32."""
        factor = 1 / (1 - Fraction(round(node.p * 2**32), 2**32))
        bits = 0
        while 2**bits <= factor:
            bits += 1
        return round(factor * Fraction(2) ** (21 - bits)), bits - 21

    def forward_dropout(self, node, memory, x):
        place = [other.name for other in self.graph.nodes].index(node.name)
        draws = np.random.Generator(np.random.Philox(np.random.SeedSequence([self.seed, place])))
        shape = x[0].shape[2:] if node.channelwise else x[0].shape
        keeps = draws.integers(0, 2**32, shape, dtype=np.uint32) >= round(node.p * 2**32)
        memory[node.name] = np.broadcast_to(keeps, x[0].shape)
        integer, exponent = self.dropout_factor(node)
        return self.round_forward(node, np.where(keeps, x[0], 0) * integer, x[1] + exponent)

    # ----------------------------------------------------------------------------------------- backward

    def backward_dropout(self, node, memory, values, read, dy, exponent):
        integer, factor_exponent = self.dropout_factor(node)
        acc = nk.kept(np.where(memory[node.name], dy, 0) * integer, mask=read[node.inputs[0]])
        return [self.round_backward(node, acc, exponent + factor_exponent)]

    def masks(self, values):
        """Return by value the mask of its gradient and whether its one reader applies it.

        A ReLU's gradient is masked by its one reader, or by the sum of its readers' gradients, or at once where it
        makes the logits; a max-pool that is the one reader of a rectified value passes the mask on to its own reader;
        a BatchNorm masks its own.
        """
        masks = {}
        for node in self.graph.nodes:
            rectified = isinstance(node, ir.Relu) or (
                isinstance(node, ir.Convolution | ir.Add) and node.relu
            )
            if isinstance(node, ir.MaxPool) and len(self.graph.consumers(node.inputs[0])) == 1:
                rectified = masks.pop(node.inputs[0], None) is not None
            if rectified:
                masks[node.name] = values[node.name][0]
        return masks

    def backward(self, values, memory, logits_gradient, logits_exponent):
        masks = self.masks(values)
        gradients = {name: [] for name in values}
        masked = nk.kept(logits_gradient, mask=masks.get(self.graph.output)), logits_exponent
        gradients[self.graph.output].append(
            self.gradient_elements(masked, self.graph.output, "gradient")
        )
        for node in reversed(self.graph.nodes):
            total, *others = gradients[node.name]
            for index, other in enumerate(others, start=1):
                acc, exponent = aligned_sum(total, other)
                last = index == len(others)
                acc = nk.kept(acc, mask=masks.get(node.name) if last else None)
                role = f"gradient sum {index}"
                total = self.round_backward(node, acc, exponent, role)
                total = self.gradient_elements(total, node.name, role)
            read = {
                value: masks[value]
                if value in masks and len(self.graph.consumers(value)) == 1
                else None
                for value in node.inputs
            }
            backward = getattr(self, "backward_" + node.kind.replace("-", "_"))
            made = backward(node, memory, values, read, *total)
            for index, (value, gradient) in enumerate(zip(node.inputs, made, strict=True)):
                role = f"gradient from {node.name}.{index}"
                gradients[value].append(gradient and self.gradient_elements(gradient, value, role))

    def backward_convolution(self, node, memory, values, read, dy, exponent):
        weight, (x, x_exponent) = self.weights[f"{node.name}.weight"], values[node.inputs[0]]
        geometry = {"stride": node.stride, "padding": node.padding, "groups": node.groups}
        dx = None
        if node.inputs[0] != ir.INPUT:
            acc = nk.input_gradient(dy, weight.q, x.shape, **geometry)
            acc = nk.kept(acc, mask=read[node.inputs[0]])
            dx = self.round_backward(node, acc, exponent + weight.exponent)
        self.update_weight(
            weight, nk.weight_gradient(x, dy, node.kernel, **geometry), x_exponent + exponent
        )
        if node.bias:
            self.update_vector(f"{node.name}.bias", dy.sum(axis=(0, 1, 2)) * 2.0**exponent)
        return [dx]

    def backward_batch_norm(self, node, memory, values, read, dy, exponent):
        """Return gamma / sigma * (dy - mean(dy) - xhat * mean(dy * xhat)), xhat = slope * (q - mean)."""
        q, x_exponent = values[node.inputs[0]]
        mean, slope = memory[node.name]
        if node.relu:
            dy = nk.kept(dy, mask=values[node.name][0])
        rows = dy.size // dy.shape[3]
        sum_dy = dy.sum(axis=(0, 1, 2)) * 2.0**exponent
        sum_dy_xhat = slope * ((dy * q).sum(axis=(0, 1, 2)) * 2.0**exponent - mean * sum_dy)
        gain = self.vectors[f"{node.name}.weight"] * (slope * 2.0**-x_exponent)
        scale_x = -gain * slope * sum_dy_xhat / rows
        offset = -gain * sum_dy / rows - scale_x * mean
        acc_exponent, (scale_dy, scale_x, offset) = per_channel_integers(
            (21, 21, 28), gain * 2.0**exponent, scale_x, offset
        )
        dx = self.round_backward(node, scale_dy * dy + scale_x * q + offset, acc_exponent)
        self.update_vector(f"{node.name}.weight", sum_dy_xhat)
        self.update_vector(f"{node.name}.bias", sum_dy)
        return [dx]

    def backward_relu(self, node, memory, values, read, dy, exponent):
        return [(nk.kept(dy, mask=read[node.inputs[0]]), exponent)]

    def backward_add(self, node, memory, values, read, dy, exponent):
        return [(nk.kept(dy, mask=read[value]), exponent) for value in node.inputs]

    def backward_max_pool(self, node, memory, values, read, dy, exponent):
        height, width = values[node.inputs[0]][0].shape[:2]
        acc = nk.max_pool_gradient(
            dy, memory[node.name], node.kernel, node.stride, node.padding, height, width
        )
        acc = nk.kept(acc, mask=read[node.inputs[0]])
        disjoint = node.stride[0] >= node.kernel[0] and node.stride[1] >= node.kernel[1]
        return [(acc, exponent) if disjoint else self.round_backward(node, acc, exponent)]

    def backward_average_pool(self, node, memory, values, read, dy, exponent):
        height, width = values[node.inputs[0]][0].shape[:2]
        acc = nk.window_sums_gradient(dy, node.kernel, node.stride, node.padding, height, width)
        acc = nk.kept(acc * self.multiplier(node), mask=read[node.inputs[0]])
        return [self.round_backward(node, acc, exponent - 14)]

    # ------------------------------------------------------------------------------------------- update

    def update_weight(self, weight, gradient, exponent):
        rule = self.algorithm.update
        if isinstance(rule, IntegerUpdate):
            shift = self.integer_shift(rule, weight, gradient)
            weight.q = np.clip(weight.q - nk.round_shift(gradient, shift, rule.rounding), -127, 127)
            return
        if rule.gradient_bits:
            shift = min(30, nk.shift_for(nk.largest_magnitude(gradient), rule.gradient_bits))
            gradient = nk.round_shift(gradient, shift, nk.PSEUDO_STOCHASTIC)
            exponent += shift
        weight.velocity = self.descend(
            weight.master, weight.velocity, gradient * 2.0**exponent, rule.momentum
        )
        if rule.weight_bits:
            units = 2 ** (rule.weight_bits - 1)
            whole = np.clip(np.rint(weight.master.astype(np.float64) * units), 1 - units, units - 1)
            weight.master = (whole / units).astype(np.float32)
        weight.exponent = max(-90, exponent_for(np.abs(weight.master).max()))
        weight.q = nk.quantise(weight.master, weight.exponent)

    def integer_shift(self, rule, weight, gradient):
        if rule.relative is None:
            begun = sum(start <= self.progress for start in rule.starts)
            return min(30, nk.shift_for(nk.largest_magnitude(gradient), rule.bits[begun - 1]))
        channels = weight.q.shape[3]
        least = 4 * weight.q.size // channels * nk.stride_of(channels)
        most = rule.relative * (1 - self.progress) * max(int(np.abs(weight.q).sum()), least)
        # Powers of two are exact, so that counting up finds what the quotient's bits say.
        quotient = int(np.abs(gradient).sum()) / most if most else math.inf
        return next((shift for shift in range(30) if quotient <= 2.0**shift), 30)

    def update_vector(self, name, gradient):
        momentum = getattr(self.algorithm.update, "momentum", 0.0)
        velocity = self.velocities.get(name, 0.0)
        self.velocities[name] = self.descend(self.vectors[name], velocity, gradient, momentum)

    def descend(self, values, velocity, gradient, momentum):
        """Follow SGD in float32 and return the new velocity; with momentum, that of mean gradients."""
        gradient = gradient.astype(np.float32)
        if not momentum:
            values -= self.rate * gradient
            return gradient
        velocity = np.float32(momentum) * velocity + gradient * np.float32(1.0 / self.batch)
        values -= self.learning_rate * velocity
        return velocity


def aligned_sum(a, b):
    """Return the exact sum of two (integers, exponent) tensors, at the lower exponent or 20 below the higher one.

    Zeros have any exponent: where it lies too far from the other operand's, the latter alone counts.
    """
    if abs(a[1] - b[1]) > 20 and not (a[0].any() and b[0].any()):
        return a[0] + b[0], a[1] if a[0].any() else b[1]
    low = max(min(a[1], b[1]), max(a[1], b[1]) - 20)
    return a[0] * 2 ** max(a[1] - low, 0) + b[0] * 2 ** max(b[1] - low, 0), low
