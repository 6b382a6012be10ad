"""Weights passed in by an outside trainer, and gradients returned to it (F12)."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from socflower import _int8
from socflower.errors import ConfigError, TrainingFailed
from socflower.precision.int8.fixed_point import channel_stride, exponent_for
from socflower.precision.int8.network import BatchNorm, Convolution, Fp32, Graph, Node
from socflower.precision.int8.parameters import FloatArray, Parameters
from socflower.precision.int8.requantisation import MAX_EXPONENT

_SEED_STEP = 0x7FEB352D
"""Difference between the seeds of two layers, so that they round differently.

It is not the factor of `random24`: with that factor a layer would have the random numbers of the previous layer,
shifted by one element. With this one the numbers of any two of 200 layers are 18 million elements apart.
"""


def take_weights(
    graph: Graph, parameters: Parameters, engine: _int8.Engine, state: Mapping[str, npt.NDArray[np.generic]], seed: int
) -> None:
    """Replace the parameters by those of a torch state_dict; weights are rounded up or down at random.

    The direction of each rounding depends on `seed` alone. Running statistics that `state` leaves out are unchanged.
    Raises ConfigError if an array is missing or has a wrong shape, TrainingFailed if a value is not finite.
    """
    for index, node in enumerate(graph.nodes):
        if isinstance(node, Convolution):
            name = f"{node.name}.weight"
            weight = parameters.weights[name]
            weight.master = None  # of a frozen weight: the value passed in replaces it
            kernel_h, kernel_w, in_channels, _ = weight.data.shape
            shape: tuple[int, ...] = (node.shape[0], in_channels, kernel_h, kernel_w)
            if node.linear:
                shape = (node.shape[0], in_channels * kernel_h * kernel_w)
            outside = as_channels_last(_array(state, name, shape), weight.data.shape, node.shape[0])
            largest = _int8.max_magnitude(outside)
            if not largest <= 2.0**MAX_EXPONENT:
                raise TrainingFailed(f"{name}: a weight has reached {largest:.3g}; lower the learning rate")
            weight.exponent = max(exponent_for(largest), -MAX_EXPONENT)
            _int8.round_weights(
                engine, outside, weight.data, weight.exponent, (seed + index * _SEED_STEP) % 2**32
            )
        elif isinstance(node, BatchNorm):
            for part in ("running_mean", "running_var"):
                if f"{node.name}.{part}" in state:
                    _fill(parameters, f"{node.name}.{part}", state, node.shape[0])
        elif isinstance(node, Fp32):
            for name, array in parameters.fp32.items():
                if name.startswith(f"{node.name}.") and (name in state or _is_parameter(node, name)):
                    parameters.fp32[name] = np.array(_array(state, name, array.shape), dtype=np.float32)
        for part in _vectors(node.parameters, node):
            _fill(parameters, f"{node.name}.{part}", state, node.shape[0])


def start_gradients(graph: Graph, parameters: Parameters) -> dict[str, FloatArray]:
    """Give every trained parameter a gradient of zeros; return them by name.

    They are views, so later steps change them. A weight's gradient is (out, in, kh, kw), channels-last in memory,
    also for a linear layer.
    """
    views: dict[str, FloatArray] = {}
    for node in graph.nodes:
        if isinstance(node, Convolution) and "weight" in node.trained:
            weight = parameters.weights[f"{node.name}.weight"]
            kernel_h, kernel_w, in_channels, _ = weight.data.shape
            weight.gradient = np.zeros((node.shape[0], kernel_h, kernel_w, in_channels), dtype=np.float32)
            views[f"{node.name}.weight"] = weight.gradient.transpose(0, 3, 1, 2)
        for name in node.trained if isinstance(node, Fp32) else ():
            name = f"{node.name}.{name}"
            views[name] = parameters.fp32_gradients[name] = np.zeros_like(parameters.fp32[name])
        for part in _vectors(node.trained, node):
            vector = parameters.vectors[f"{node.name}.{part}"]
            vector.gradient = np.zeros(channel_stride(node.shape[0]), dtype=np.float32)
            views[f"{node.name}.{part}"] = vector.gradient[: node.shape[0]]
    return views


def as_channels_last(array: npt.NDArray[np.generic], shape: tuple[int, ...], num_outs: int) -> FloatArray:
    """Return (out, kh, kw, in) float32 of a torch weight for an int8 weight of `shape`; no copy if already so."""
    kernel_h, kernel_w, in_channels, _ = shape
    view = array.reshape(num_outs, in_channels, kernel_h, kernel_w).transpose(0, 2, 3, 1)
    return np.ascontiguousarray(view, dtype=np.float32)


def _vectors(parameters: tuple[str, ...], node: Node) -> tuple[str, ...]:
    """Return the parameters of a node that hold one value per channel."""
    if isinstance(node, BatchNorm):
        return parameters
    return tuple(name for name in parameters if name == "bias") if isinstance(node, Convolution) else ()


def _is_parameter(node: Fp32, name: str) -> bool:
    return name.removeprefix(f"{node.name}.") in node.parameters


def _array(
    state: Mapping[str, npt.NDArray[np.generic]], name: str, shape: tuple[int, ...]
) -> npt.NDArray[np.generic]:
    if name not in state:
        raise ConfigError(f"weights: {name} of shape {shape} is missing")
    if state[name].shape != shape:
        raise ConfigError(f"weights: {name} has shape {state[name].shape}, the network needs {shape}")
    return state[name]


def _fill(
    parameters: Parameters, name: str, state: Mapping[str, npt.NDArray[np.generic]], channels: int
) -> None:
    array = np.asarray(_array(state, name, (channels,)), dtype=np.float32)
    if not np.isfinite(array).all():
        raise TrainingFailed(f"{name}: a value is not finite; lower the learning rate")
    parameters.vectors[name].data[:channels] = array
