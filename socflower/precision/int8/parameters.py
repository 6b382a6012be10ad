"""The values that training changes: int8 weights, FP32 vectors, and the state of the update rules."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np

from socflower import _int8
from socflower.errors import ConfigError, TrainingFailed
from socflower.precision.int8.fixed_point import (
    AnyArray,
    FloatArray,
    Int8Array,
    channel_stride,
    exponent_for,
    quantise,
    require_finite,
)
from socflower.precision.int8.network import BatchNorm, Fp32, Graph, Node, Weighted
from socflower.precision.int8.requantisation import exponent_within_float32
from socflower.precision.int8.stalling import StallWatch


@dataclass(slots=True)
class Weight:
    """Weight of a convolution, (kh, kw, in/groups, channel stride of out) int8 with one exponent.

    `channel_units`, (channel stride,), are finer: a real value is then the int8 times 2^exponent times the unit of its
    channel, between 2^-12 and 1. A weight of a depthwise convolution has them (`scaled_by_channel`).

    `master` and `velocity` (same shape, float32) exist under algorithms with FP32 weights, `gradient` under an
    outside update, and has the shape (out, kh, kw, in/groups). A frozen weight has none of them: the module keeps the
    original values.
    """

    data: Int8Array
    exponent: int
    master: FloatArray | None = None
    velocity: FloatArray | None = None
    gradient: FloatArray | None = None
    channel_units: FloatArray | None = None

    def fit(self, name: str, largest: FloatArray) -> FloatArray:
        """Take the exponent and the units that fit these largest magnitudes; return what int8 is per real value.

        `largest` has one number for each channel. Raises TrainingFailed, with `name`, if one is beyond float32.
        """
        self.exponent = exponent_within_float32(name, float(largest.max()))
        if self.channel_units is not None:
            units = largest / np.float32(math.ldexp(127.0, self.exponent))
            # A channel of zeros would have none.
            self.channel_units = np.maximum(units, np.float32(2.0**-12))
        inverse = np.full(self.data.shape[-1], 2.0**-self.exponent, dtype=np.float32)
        return inverse if self.channel_units is None else inverse / self.channel_units


@dataclass(slots=True)
class Vector:
    """One float32 value per channel, padded to the channel stride."""

    data: FloatArray
    velocity: FloatArray | None = None
    gradient: FloatArray | None = None


@dataclass(slots=True)
class Parameters:
    """All parameters by their names in the module's state_dict.

    `vectors` are biases, and BatchNorm's scales, offsets and running statistics. `fp32` are the parameters of
    operators on the FP32 side, `fp32_velocities` their momentum, `fp32_gradients` their gradients under an outside
    update. `num_steps` counts the steps
    made so far; it is the default seed of a step. `stalls` watches whether they change anything.
    """

    weights: dict[str, Weight] = field(default_factory=dict)
    vectors: dict[str, Vector] = field(default_factory=dict)
    num_batches_tracked: dict[str, int] = field(default_factory=dict)
    num_steps: int = 0
    stalls: StallWatch = field(default_factory=StallWatch)
    fp32: dict[str, FloatArray] = field(default_factory=dict)
    fp32_velocities: dict[str, FloatArray] = field(default_factory=dict)
    fp32_gradients: dict[str, FloatArray] = field(default_factory=dict)

    @property
    def exponents(self) -> dict[str, int]:
        """The exponents of the int8 weights."""
        return {name: weight.exponent for name, weight in self.weights.items()}

    @property
    def num_bytes(self) -> int:
        """Bytes of all arrays, those of the update rules included."""
        arrays: list[AnyArray | None] = []
        for fp32 in (self.fp32, self.fp32_velocities, self.fp32_gradients):
            arrays += fp32.values()
        for weight in self.weights.values():
            arrays += [weight.data, weight.master, weight.velocity, weight.gradient]
        for vector in self.vectors.values():
            arrays += [vector.data, vector.velocity, vector.gradient]
        return sum(array.nbytes for array in arrays if array is not None)


def import_parameters(
    graph: Graph,
    state: Mapping[str, FloatArray],
    *,
    keep_master: bool,
    scaled_by_channel: Collection[str] = (),
    exponents: Mapping[str, int] | None = None,
    frozen: Mapping[str, Weight] | None = None,
) -> Parameters:
    """Return the parameters of a graph from the arrays of a torch state_dict.

    Frozen weights that the state lacks are taken from `frozen`. The nodes of `scaled_by_channel` get channel units.

    Another weight gets the smallest exponent that fits it, or that of `exponents` if it is larger: an integer update
    steps by units of the exponent, so keeping it keeps the step. Raises ConfigError if an array is missing, has a wrong
    shape or is unknown, and if values are not finite.
    """
    parameters = Parameters()
    left = graph.inward(state)
    for node in graph.nodes:
        if isinstance(node, Weighted):
            name = f"{node.name}.weight"
            is_frozen = "weight" in node.frozen
            if is_frozen and frozen is not None and name not in left:
                parameters.weights[name] = frozen[name]
            else:
                real = _take(left, name, graph.module_weight_shape(node))
                kept_exponent = (exponents or {}).get(name)
                shaped = real.reshape(graph.weight_shape(node))
                keep = keep_master and not is_frozen
                weight = _import_weight(shaped, keep, kept_exponent)
                if node.name in scaled_by_channel:
                    _scale_by_channel(name, weight, shaped)
                parameters.weights[name] = weight
        elif isinstance(node, Fp32):
            for name in _of_node(node, left):
                parameters.fp32[name] = left.pop(name)
                require_finite(parameters.fp32[name], name)
        for name in _vector_names(node):
            padded = np.zeros(channel_stride(node.shape[0]), dtype=np.float32)
            padded[: node.shape[0]] = _take(left, name, (node.shape[0],))
            parameters.vectors[name] = Vector(data=padded)
        if isinstance(node, BatchNorm):
            tracked = left.pop(f"{node.name}.num_batches_tracked", 0)
            parameters.num_batches_tracked[node.name] = int(tracked)
    if left:
        raise ConfigError(f"state: the network does not use {', '.join(sorted(left))}")
    return parameters


def export_parameters(graph: Graph, parameters: Parameters) -> dict[str, AnyArray]:
    """Return float32 arrays (and int64 counters) by their names and shapes in the module's state_dict.

    A weight is its int8 value times its unit, exactly, or its master weight if there is one. Frozen weights are left
    out: the module has them, more precisely.
    """
    state: dict[str, AnyArray] = {}
    for node in graph.nodes:
        if isinstance(node, Weighted) and "weight" in node.trained:
            weight = parameters.weights[f"{node.name}.weight"]
            real = weight.master
            if real is None:
                real = np.ldexp(weight.data.astype(np.float32), weight.exponent)
                if weight.channel_units is not None:
                    real *= weight.channel_units
            state[f"{node.name}.weight"] = _to_module(graph, node, real)
        elif isinstance(node, Fp32):
            for name in _of_node(node, parameters.fp32):
                state[name] = parameters.fp32[name]
        for name in _vector_names(node):
            state[name] = parameters.vectors[name].data[: node.shape[0]].copy()
        if isinstance(node, BatchNorm):
            tracked = parameters.num_batches_tracked[node.name]
            state[f"{node.name}.num_batches_tracked"] = np.array(tracked, dtype=np.int64)
    return graph.outward(state)


def export_velocities(graph: Graph, parameters: Parameters) -> dict[str, FloatArray]:
    """Return the momentum of FP32 updates by names and shapes of the module's state_dict."""
    velocities: dict[str, FloatArray] = {}
    for node, name, holder in _trained(graph, parameters):
        if holder.velocity is None:
            continue
        if isinstance(holder, Vector):
            velocities[name] = holder.velocity[: node.shape[0]].copy()
        else:
            velocities[name] = _to_module(graph, node, holder.velocity)
    return graph.outward(velocities) | parameters.fp32_velocities


def import_velocities(
    graph: Graph, parameters: Parameters, velocities: Mapping[str, FloatArray]
) -> None:
    """Set the momentum of FP32 updates from the result of `export_velocities`; others stay without."""
    given = graph.inward(velocities, complete=False)
    for node, name, holder in _trained(graph, parameters):
        if name not in given:
            continue
        inside = given[name]
        if isinstance(node, Weighted) and isinstance(holder, Weight):
            inside = inside.reshape(graph.weight_shape(node)).transpose(2, 3, 1, 0)
        holder.velocity = np.zeros_like(holder.data, dtype=np.float32)
        holder.velocity[..., : inside.shape[-1]] = inside
    for name in parameters.fp32.keys() & velocities.keys():
        parameters.fp32_velocities[name] = np.array(velocities[name], dtype=np.float32)


def _trained(graph: Graph, parameters: Parameters) -> Iterator[tuple[Node, str, Weight | Vector]]:
    holders: dict[str, Weight | Vector] = {**parameters.weights, **parameters.vectors}
    for node in graph.nodes:
        for part in node.trained:
            if (holder := holders.get(f"{node.name}.{part}")) is not None:
                yield node, f"{node.name}.{part}", holder


def _to_module(graph: Graph, node: Node, array: FloatArray) -> FloatArray:
    """Return a weight (kh, kw, in, channel stride) in the shape that it has in the module."""
    assert isinstance(node, Weighted)
    outward = array[..., : graph.weight_shape(node)[0]].transpose(3, 2, 0, 1)
    return np.ascontiguousarray(outward).reshape(graph.module_weight_shape(node))


def _vector_names(node: Node) -> list[str]:
    return [f"{node.name}.{part}" for part in node.vectors]


def _of_node(node: Node, names: Iterable[str]) -> list[str]:
    """Return the names that belong to a node."""
    return [name for name in names if name.startswith(f"{node.name}.")]


def _take(state: dict[str, FloatArray], name: str, shape: tuple[int, ...]) -> FloatArray:
    """Remove a finite array from a state and return it as float32."""
    array = np.asarray(array_of(state, name, shape), dtype=np.float32)
    del state[name]
    require_finite(array, name)
    return array


def array_of(state: Mapping[str, AnyArray], name: str, shape: tuple[int, ...]) -> AnyArray:
    """Return an array of a state. Raises ConfigError if it is missing or has another shape."""
    if name not in state:
        raise ConfigError(f"state: {name} of shape {shape} is missing")
    if state[name].shape != shape:
        raise ConfigError(f"state: {name} has shape {state[name].shape}, the network needs {shape}")
    return state[name]


def _import_weight(real: FloatArray, keep_master: bool, kept_exponent: int | None) -> Weight:
    out_channels, in_channels, *kernel = real.shape
    padded = np.zeros((*kernel, in_channels, channel_stride(out_channels)), dtype=np.float32)
    padded[..., :out_channels] = real.transpose(2, 3, 1, 0)
    largest = float(np.max(np.abs(padded)))
    if largest == 0.0:
        # As torch would initialise it: an integer update steps by units of the exponent.
        largest = 1.0 / math.sqrt(math.prod(real.shape[1:]))
    exponent = exponent_for(largest)
    if kept_exponent is not None:
        exponent = max(exponent, kept_exponent)
    data = np.empty(padded.shape, dtype=np.int8)
    quantise(padded, exponent, data)
    return Weight(data=data, exponent=exponent, master=padded if keep_master else None)


def _scale_by_channel(name: str, weight: Weight, real: FloatArray) -> None:
    """Give a weight channel units, and the nearest int8 of real values (out, in, kh, kw) in these."""
    padded = np.zeros(weight.data.shape, dtype=np.float32)
    padded[..., : len(real)] = real.transpose(2, 3, 1, 0)
    largest = largest_by_channel(padded)
    weight.channel_units = np.ones_like(largest)
    inverse = weight.fit(name, largest)
    weight.data[...] = np.rint(np.clip(padded * inverse, -127, 127))


def largest_by_channel(values: FloatArray) -> FloatArray:
    """Return the largest magnitude in each channel, the last dimension; infinity if one is not finite."""
    largest = np.empty(values.shape[-1], dtype=np.float32)
    _int8.largest_by_channel(values, largest)
    return largest


def array_shapes(
    graph: Graph, *, keep_master: bool, scaled_by_channel: Collection[str] = ()
) -> dict[str, tuple[type, tuple[int, ...]]]:
    """Return type and shape of the arrays that a file of the graph's parameters must have (`saving`)."""
    needed: dict[str, tuple[type, tuple[int, ...]]] = {}
    for node in graph.nodes:
        stride = channel_stride(node.shape[0])
        if isinstance(node, Weighted):
            outs, in_channels, *kernel = graph.weight_shape(node)
            shape = (*kernel, in_channels, channel_stride(outs))
            needed[f"weight/{node.name}.weight"] = (np.int8, shape)
            if keep_master and "weight" in node.trained:
                needed[f"master/{node.name}.weight"] = (np.float32, shape)
            if node.name in scaled_by_channel:
                needed[f"units/{node.name}.weight"] = (np.float32, (stride,))
        for name in _vector_names(node):
            needed[f"vector/{name}"] = (np.float32, (stride,))
    return needed


# ------------------------------------------------------- weights of an outside trainer, and gradients for it (F12)

_SEED_STEP = 0x7FEB352D
"""Difference between the seeds of two layers, so that they round differently.

It is not the factor of `random24`: with that factor a layer would have the random numbers of the previous layer,
shifted by one element. With this one the numbers of any two of 200 layers are 18 million elements apart.
"""


def take_weights(
    graph: Graph,
    parameters: Parameters,
    engine: _int8.Engine,
    state: Mapping[str, AnyArray],
    seed: int | None,
) -> None:
    """Replace the parameters by those of a torch state_dict; weights are rounded up or down at random (F12).

    The direction of each rounding depends on `seed` alone; with None each weight is rounded to the nearest int8.
    Running statistics that `state` leaves out are unchanged. Raises ConfigError if an array is missing or has a wrong
    shape, TrainingFailed if a value is not finite.
    """
    state = graph.inward(state)
    for index, node in enumerate(graph.nodes):
        if isinstance(node, Weighted):
            name = f"{node.name}.weight"
            weight = parameters.weights[name]
            array = array_of(state, name, graph.module_weight_shape(node))
            outside = as_channels_last(array, graph.weight_shape(node))
            inverse = weight.fit(name, _largest_by_out(outside, weight))
            if seed is None:
                nearest = np.rint(
                    np.clip(outside.transpose(1, 2, 3, 0) * inverse[: len(outside)], -127, 127)
                )
                weight.data[..., : len(outside)] = nearest
            else:
                own_seed = (seed + index * _SEED_STEP) % 2**32
                _int8.round_weights(engine, outside, weight.data, inverse, own_seed)
        elif isinstance(node, Fp32):
            own = {f"{node.name}.{part}" for part in node.parameters}
            for name in _of_node(node, parameters.fp32):
                if name in state or name in own:
                    array = array_of(state, name, parameters.fp32[name].shape)
                    parameters.fp32[name] = np.array(array, dtype=np.float32)
        for part in node.vectors:
            name = f"{node.name}.{part}"
            if part in node.parameters or name in state:
                given = array_of(state, name, (node.shape[0],))
                array = np.asarray(given, dtype=np.float32)
                if not np.isfinite(array).all():
                    raise TrainingFailed(f"{name}: a value is not finite; lower the learning rate")
                parameters.vectors[name].data[: node.shape[0]] = array


def _largest_by_out(outside: FloatArray, weight: Weight) -> FloatArray:
    """Return what `Weight.fit` takes of (out, kh, kw, in) float32; without channel units the maximum is enough."""
    largest = np.zeros(weight.data.shape[-1], dtype=np.float32)
    if weight.channel_units is None:
        largest[0] = _int8.max_magnitude(outside)
    else:
        for index, own in enumerate(outside):
            largest[index] = _int8.max_magnitude(own)
    return largest


def start_gradients(graph: Graph, parameters: Parameters) -> dict[str, FloatArray]:
    """Give every trained parameter a gradient of zeros; return them by name.

    They are views, so later steps change them. A weight's gradient is (out, in, kh, kw), channels-last in memory,
    also for a linear layer.
    """
    views: dict[str, FloatArray] = {}
    for node in graph.nodes:
        for part in node.trained:
            name = f"{node.name}.{part}"
            if isinstance(node, Fp32):
                views[name] = parameters.fp32_gradients[name] = np.zeros_like(parameters.fp32[name])
            elif part in node.vectors:
                padded = np.zeros(channel_stride(node.shape[0]), dtype=np.float32)
                parameters.vectors[name].gradient = padded
                views[name] = padded[: node.shape[0]]
            elif isinstance(node, Weighted):
                outs, ins, height, width = graph.weight_shape(node)
                gradient = np.zeros((outs, height, width, ins), dtype=np.float32)
                parameters.weights[name].gradient = gradient
                views[name] = gradient.transpose(0, 3, 1, 2)
    return graph.outward(views)


def as_channels_last(array: AnyArray, shape: tuple[int, int, int, int]) -> FloatArray:
    """Return (out, kh, kw, in) float32 of a torch weight of (out, in, kh, kw) values; no copy if already so."""
    outside = array.reshape(shape).transpose(0, 2, 3, 1)
    return np.ascontiguousarray(outside, dtype=np.float32)
