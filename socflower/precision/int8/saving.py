"""Int8 models as .npz files: the graph as JSON, the algorithm by name, the parameters bit for bit."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np

from socflower.errors import ConfigError
from socflower.precision.algorithm import (
    BackwardRule,
    Fp32Update,
    IntegerUpdate,
    OperatorTranslation,
    OutsideUpdate,
    Rounding,
    TrainingAlgorithm,
)
from socflower.precision.int8.fixed_point import AnyArray, require_finite
from socflower.precision.int8.network import BatchNorm, Graph
from socflower.precision.int8.operators.weighted import scaled_by_channel
from socflower.precision.int8.parameters import Parameters, Vector, Weight, array_shapes
from socflower.wire.saved_state import atomic_file

SCHEMA = 1

MAX_WEIGHT_EXPONENT = 200
"""No float32 weight has an exponent beyond it."""


def save(
    path: Path,
    graph: Graph,
    algorithm: TrainingAlgorithm,
    parameters: Parameters,
    trackers: Sequence[Any],
) -> None:
    """Write the file; `ConfigError` if it cannot be written, and an old file stays as it was.

    `trackers` are plain values (`ScaleTrackers.to_json`).
    """
    if isinstance(algorithm.update, OutsideUpdate):
        raise ConfigError("save: a trainer holds the weights of this model; save that instead")
    # The graph is translated already.
    written = replace(algorithm, forward=replace(algorithm.forward, replacements={}))
    header = {
        "schema": SCHEMA,
        "graph": graph.to_json(),
        "algorithm": {
            **asdict(written),
            "update": {"kind": algorithm.weight, **asdict(algorithm.update)},
        },
        "exponents": parameters.exponents,
        "num_batches_tracked": parameters.num_batches_tracked,
        "num_steps": parameters.num_steps,
        "trackers": list(trackers),
    }
    arrays: dict[str, Any] = {"header": np.array(json.dumps(header))}
    for name, weight in parameters.weights.items():
        arrays[f"weight/{name}"] = weight.data
        arrays[f"master/{name}"] = weight.master
        arrays[f"velocity/{name}"] = weight.velocity
        arrays[f"units/{name}"] = weight.channel_units
    for name, vector in parameters.vectors.items():
        arrays[f"vector/{name}"] = vector.data
        arrays[f"velocity/{name}"] = vector.velocity
    for name, array in parameters.fp32.items():
        arrays[f"fp32/{name}"] = array
        arrays[f"velocity/{name}"] = parameters.fp32_velocities.get(name)
    try:
        with atomic_file(Path(path)) as file:
            np.savez(file, **{key: array for key, array in arrays.items() if array is not None})
    except OSError as error:
        raise ConfigError(f"{path}: cannot be written ({error.strerror})") from None


def load(path: Path) -> tuple[Graph, TrainingAlgorithm, Parameters, list[Any]]:
    """Return the content written by `save`. Raises ConfigError on a missing, foreign or damaged file."""
    try:
        with Path(path).open("rb") as stream, np.load(stream, allow_pickle=False) as file:
            arrays = {name: file[name] for name in file.files}
        header = json.loads(str(arrays.pop("header")))
        if header["schema"] != SCHEMA:
            raise ConfigError(f"schema {header['schema']}, this version reads {SCHEMA}")
        graph = Graph.from_json(header["graph"])
        algorithm = _algorithm(header["algorithm"])
        keep_master = isinstance(algorithm.update, Fp32Update)
        scaled = scaled_by_channel(graph, algorithm)
        needed = array_shapes(graph, keep_master=keep_master, scaled_by_channel=scaled)
        _require_arrays(arrays, needed)
        trackers = [[str(name), str(role), values] for name, role, values in header["trackers"]]
        return graph, algorithm, _parameters(graph, header, arrays), trackers
    except FileNotFoundError:
        raise ConfigError(f"{path}: there is no such file") from None
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None
    except Exception as error:
        # Parsers of a damaged archive raise many types.
        raise ConfigError(f"{path}: not an int8 model ({type(error).__name__})") from None


def _require_arrays(
    arrays: Mapping[str, AnyArray], needed: Mapping[str, tuple[type, tuple[int, ...]]]
) -> None:
    """Raise ConfigError for the first array that is missing, of another type or shape, or not finite."""
    expected = dict(needed)
    for key in arrays:
        role, _, name = key.partition("/")
        if role == "velocity" and f"fp32/{name}" in arrays:
            expected[key] = (np.float32, arrays[f"fp32/{name}"].shape)
        elif role in ("master", "velocity"):
            _, shape = needed.get(f"weight/{name}") or needed[f"vector/{name}"]
            expected[key] = (np.float32, shape)
        elif role == "fp32":
            require_finite(arrays[key], key)
    for key, (kind, shape) in expected.items():
        array = arrays.get(key)
        if array is None or array.dtype != kind or array.shape != shape:
            got = "nothing" if array is None else f"{array.dtype} of shape {array.shape}"
            raise ConfigError(f"{key}: need {np.dtype(kind)} of shape {shape}, got {got}")
        require_finite(array, key)
        if kind is np.int8 and (array == -128).any():
            raise ConfigError(f"{key}: has -128; int8 weights are -127 to 127")


def _algorithm(document: dict[str, Any]) -> TrainingAlgorithm:
    update = dict(document["update"])
    rule: IntegerUpdate | Fp32Update
    if update.pop("kind") == "int8":
        rule = IntegerUpdate(
            relative=update["relative"],
            bits=update["bits"],
            starts=update["starts"],
            rounding=Rounding(update["rounding"]),
        )
    else:
        rule = Fp32Update(**update)
    forward, backward = document["forward"], document["backward"]
    return TrainingAlgorithm(
        name=document["name"],
        forward=OperatorTranslation(
            rounding=Rounding(forward["rounding"]),
            scales=forward["scales"],
            reach=forward["reach"],
            mantissa_bits=forward["mantissa_bits"],
        ),
        backward=BackwardRule(
            rounding=Rounding(backward["rounding"]),
            loss=backward["loss"],
            dithered=bool(backward["dithered"]),
            wide_above=backward["wide_above"],
            reach=backward["reach"],
            mantissa_bits=backward["mantissa_bits"],
        ),
        weight=document["weight"],
        update=rule,
    )


def _parameters(graph: Graph, header: dict[str, Any], arrays: dict[str, Any]) -> Parameters:
    parameters = Parameters(num_steps=int(header["num_steps"]))
    for node in graph.nodes:
        if isinstance(node, BatchNorm):
            tracked = header["num_batches_tracked"][node.name]
            parameters.num_batches_tracked[node.name] = int(tracked)
    for key, array in arrays.items():
        role, _, name = key.partition("/")
        velocity = arrays.get(f"velocity/{name}")
        if role == "weight":
            exponent = int(header["exponents"][name])
            if abs(exponent) > MAX_WEIGHT_EXPONENT:
                raise ConfigError(f"{name}: an exponent of {exponent} is beyond float32")
            units = arrays.get(f"units/{name}")
            if units is not None and not (units > 0.0).all():
                raise ConfigError(f"units/{name}: need units above 0")
            parameters.weights[name] = Weight(
                data=np.ascontiguousarray(array),
                exponent=exponent,
                master=arrays.get(f"master/{name}"),
                velocity=velocity,
                channel_units=units,
            )
        elif role == "vector":
            parameters.vectors[name] = Vector(data=array, velocity=velocity)
        elif role == "fp32":
            parameters.fp32[name] = array
            if velocity is not None:
                parameters.fp32_velocities[name] = velocity
    return parameters
