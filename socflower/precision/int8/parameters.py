"""The values that training changes: int8 weights, FP32 vectors, and the state of the update rules."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from socflower.errors import ConfigError
from socflower.precision.int8.fixed_point import channel_stride, exponent_for, quantise, require_finite
from socflower.precision.int8.network import BatchNorm, Convolution, Graph

FloatArray = npt.NDArray[np.float32]

MAX_WEIGHT_EXPONENT = 200
"""No float32 weight has an exponent beyond it."""


@dataclass(slots=True)
class Weight:
    """Weight of a convolution, (kh, kw, in/groups, channel stride of out) int8 with one exponent.

    `master` and `velocity` (same shape, float32) exist under algorithms with FP32 weights, `gradient` under an
    outside update, where it is (out, kh, kw, in/groups). A frozen weight has a master under every algorithm: its
    original values, which are exported unchanged.
    """

    data: npt.NDArray[np.int8]
    exponent: int
    master: FloatArray | None = None
    velocity: FloatArray | None = None
    gradient: FloatArray | None = None


@dataclass(slots=True)
class Vector:
    """One float32 value per channel, padded to the channel stride."""

    data: FloatArray
    velocity: FloatArray | None = None
    gradient: FloatArray | None = None


@dataclass(slots=True)
class Parameters:
    """All parameters by their names in the module's state_dict."""

    weights: dict[str, Weight] = field(default_factory=dict)
    vectors: dict[str, Vector] = field(default_factory=dict)  # biases, BatchNorm's affine and running statistics
    num_batches_tracked: dict[str, int] = field(default_factory=dict)
    num_steps: int = 0  # steps made so far; the default seed of a step
    fp32: dict[str, FloatArray] = field(default_factory=dict)  # of operators on the FP32 side
    fp32_gradients: dict[str, FloatArray] = field(default_factory=dict)  # of the former, under an outside update


def import_parameters(
    graph: Graph, state: Mapping[str, FloatArray], *, keep_master: bool, exponents: Mapping[str, int] | None = None
) -> Parameters:
    """Return the parameters of a graph from the arrays of a torch state_dict.

    A weight gets the smallest exponent that fits it, or that of `exponents` if it is larger: the steps of an integer
    update are in units of it. Raises ConfigError if an array is missing, has a wrong shape or is unknown, and if values
    are not finite.
    """
    parameters = Parameters()
    left = dict(state)
    for node in graph.nodes:
        if isinstance(node, Convolution):
            in_channels = graph.shape_of(node.inputs[0])[0] // node.groups
            shape = (node.shape[0], in_channels, *node.kernel)
            module_shape = (node.shape[0], in_channels * node.kernel[0] * node.kernel[1]) if node.linear else shape
            real = _take(left, f"{node.name}.weight", module_shape).reshape(shape)
            name = f"{node.name}.weight"
            keep = keep_master or "weight" in node.frozen
            parameters.weights[name] = _import_weight(real, keep, (exponents or {}).get(name))
            if node.bias:
                _import_vector(parameters, left, f"{node.name}.bias", node.shape[0])
        elif isinstance(node, BatchNorm):
            for part in ("weight", "bias", "running_mean", "running_var"):
                _import_vector(parameters, left, f"{node.name}.{part}", node.shape[0])
            tracked = left.pop(f"{node.name}.num_batches_tracked", None)
            parameters.num_batches_tracked[node.name] = 0 if tracked is None else int(tracked)
        elif node.kind == "fp32":
            for name in [name for name in left if name.startswith(f"{node.name}.")]:
                parameters.fp32[name] = left.pop(name)
                require_finite(parameters.fp32[name], name)
    if left:
        raise ConfigError(f"state: the network does not use {', '.join(sorted(left))}")
    return parameters


def export_parameters(graph: Graph, parameters: Parameters) -> dict[str, npt.NDArray[np.generic]]:
    """Return float32 arrays (and int64 counters) by their names and shapes in the module's state_dict.

    A weight is its int8 value times 2^exponent, exactly, or its master weight if there is one.
    """
    state: dict[str, npt.NDArray[np.generic]] = {}
    for node in graph.nodes:
        if isinstance(node, Convolution):
            weight = parameters.weights[f"{node.name}.weight"]
            if weight.master is not None:
                real = weight.master
            else:
                real = np.ldexp(weight.data.astype(np.float32), weight.exponent)
            real = real[..., : node.shape[0]].transpose(3, 2, 0, 1)
            shape = (node.shape[0], -1) if node.linear else real.shape
            state[f"{node.name}.weight"] = np.ascontiguousarray(real).reshape(shape)
            if node.bias:
                state[f"{node.name}.bias"] = parameters.vectors[f"{node.name}.bias"].data[: node.shape[0]].copy()
        elif isinstance(node, BatchNorm):
            for part in ("weight", "bias", "running_mean", "running_var"):
                name = f"{node.name}.{part}"
                state[name] = parameters.vectors[name].data[: node.shape[0]].copy()
            tracked = parameters.num_batches_tracked[node.name]
            state[f"{node.name}.num_batches_tracked"] = np.array(tracked, dtype=np.int64)
        elif node.kind == "fp32":
            state.update({name: array for name, array in parameters.fp32.items() if name.startswith(f"{node.name}.")})
    return state


def _take(state: dict[str, FloatArray], name: str, shape: tuple[int, ...]) -> FloatArray:
    if name not in state:
        raise ConfigError(f"state: {name} of shape {shape} is missing")
    array = np.asarray(state.pop(name), dtype=np.float32)
    if array.shape != shape:
        raise ConfigError(f"state: {name} has shape {array.shape}, the network needs {shape}")
    require_finite(array, name)
    return array


def _import_weight(real: FloatArray, keep_master: bool, kept_exponent: int | None) -> Weight:
    out_channels, in_channels, kernel_h, kernel_w = real.shape
    padded = np.zeros((kernel_h, kernel_w, in_channels, channel_stride(out_channels)), dtype=np.float32)
    padded[..., :out_channels] = real.transpose(2, 3, 1, 0)
    exponent = exponent_for(float(np.max(np.abs(padded))))
    if kept_exponent is not None:
        exponent = max(exponent, kept_exponent)
    data = np.empty(padded.shape, dtype=np.int8)
    quantise(padded, exponent, data)
    return Weight(data=data, exponent=exponent, master=padded if keep_master else None)


def _import_vector(parameters: Parameters, state: dict[str, FloatArray], name: str, channels: int) -> None:
    padded = np.zeros(channel_stride(channels), dtype=np.float32)
    padded[:channels] = _take(state, name, (channels,))
    parameters.vectors[name] = Vector(data=padded)


def require_match(graph: Graph, parameters: Parameters, *, keep_master: bool) -> None:
    """Raise ConfigError, naming the first mismatch, if the parameters do not fit the graph and its update rule."""

    def require(name: str, array: npt.NDArray[np.generic] | None, kind: type, shape: tuple[int, ...]) -> None:
        if array is None or array.dtype != kind or array.shape != shape:
            got = "nothing" if array is None else f"{array.dtype} of shape {array.shape}"
            raise ConfigError(f"{name}: need {np.dtype(kind)} of shape {shape}, got {got}")

    for node in graph.nodes:
        stride = channel_stride(node.shape[0])
        vectors: tuple[str, ...] = ()
        if isinstance(node, Convolution):
            name = f"{node.name}.weight"
            weight = parameters.weights.get(name)
            shape = (*node.kernel, graph.shape_of(node.inputs[0])[0] // node.groups, stride)
            require(name, None if weight is None else weight.data, np.int8, shape)
            assert weight is not None
            if abs(weight.exponent) > MAX_WEIGHT_EXPONENT:
                raise ConfigError(f"{name}: an exponent of {weight.exponent} is beyond +-{MAX_WEIGHT_EXPONENT}")
            if (keep_master or "weight" in node.frozen) and weight.master is None:
                raise ConfigError(f"{name}: its FP32 master is missing")
            for extra in (weight.master, weight.velocity):
                if extra is not None:
                    require(name, extra, np.float32, shape)
                    require_finite(extra, name)
            vectors = ("bias",) if node.bias else ()
        elif isinstance(node, BatchNorm):
            vectors = ("weight", "bias", "running_mean", "running_var")
            if node.name not in parameters.num_batches_tracked:
                raise ConfigError(f"{node.name}.num_batches_tracked is missing")
        for part in vectors:
            vector = parameters.vectors.get(f"{node.name}.{part}")
            require(f"{node.name}.{part}", None if vector is None else vector.data, np.float32, (stride,))
            assert vector is not None
            for array in (vector.data, vector.velocity):
                if array is not None:
                    require(f"{node.name}.{part}", array, np.float32, (stride,))
                    require_finite(array, f"{node.name}.{part}")
