"""Int8 models as .npz files: the graph as JSON, the algorithm by name, the parameters bit for bit."""

from __future__ import annotations

import json
from dataclasses import asdict
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
from socflower.precision.int8.network import Graph
from socflower.precision.int8.parameters import Parameters, Vector, Weight, require_match
from socflower.wire.saved_state import atomic_file

SCHEMA = 1


def save(path: Path, graph: Graph, algorithm: TrainingAlgorithm, parameters: Parameters) -> None:
    """Write the file; `ConfigError` if it cannot be written, and an old file stays as it was."""
    in_fp32 = any(node.kind == "fp32" for node in graph.nodes)
    if in_fp32 or isinstance(algorithm.update, OutsideUpdate):
        raise ConfigError(
            "save: a torch module or trainer holds a part of these weights; save that instead"
        )
    header = {
        "schema": SCHEMA,
        "graph": graph.to_json(),
        "algorithm": {
            **asdict(algorithm),
            "update": {"kind": algorithm.weight, **asdict(algorithm.update)},
        },
        "exponents": parameters.exponents,
        "num_batches_tracked": parameters.num_batches_tracked,
        "num_steps": parameters.num_steps,
    }
    arrays: dict[str, Any] = {"header": np.array(json.dumps(header))}
    for name, weight in parameters.weights.items():
        arrays[f"weight/{name}"] = weight.data
        arrays[f"master/{name}"] = weight.master
        arrays[f"velocity/{name}"] = weight.velocity
    for name, vector in parameters.vectors.items():
        arrays[f"vector/{name}"] = vector.data
        arrays[f"velocity/{name}"] = vector.velocity
    try:
        with atomic_file(Path(path)) as file:
            np.savez(file, **{key: array for key, array in arrays.items() if array is not None})
    except OSError as error:
        raise ConfigError(f"{path}: cannot be written ({error.strerror})") from None


def load(path: Path) -> tuple[Graph, TrainingAlgorithm, Parameters]:
    """Return the content written by `save`. Raises ConfigError on a missing, foreign or damaged file."""
    try:
        with Path(path).open("rb") as stream, np.load(stream, allow_pickle=False) as file:
            arrays = {name: file[name] for name in file.files}
        header = json.loads(str(arrays.pop("header")))
        if header["schema"] != SCHEMA:
            raise ConfigError(f"schema {header['schema']}, this version reads {SCHEMA}")
        graph = Graph.from_json(header["graph"])
        parameters = _parameters(header, arrays)
        algorithm = _algorithm(header["algorithm"])
        require_match(graph, parameters, keep_master=isinstance(algorithm.update, Fp32Update))
        return graph, algorithm, parameters
    except FileNotFoundError:
        raise ConfigError(f"{path}: there is no such file") from None
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None
    except Exception as error:
        # Parsers of a damaged archive raise many types.
        raise ConfigError(f"{path}: not an int8 model ({type(error).__name__})") from None


def _algorithm(document: dict[str, Any]) -> TrainingAlgorithm:
    update = dict(document["update"])
    rule: IntegerUpdate | Fp32Update
    if update.pop("kind") == "int8":
        rule = IntegerUpdate(
            bits=update["bits"],
            starts=update["starts"],
            rounding=Rounding(update["rounding"]),
        )
    else:
        rule = Fp32Update(**update)
    backward = document["backward"]
    return TrainingAlgorithm(
        name=document["name"],
        forward=OperatorTranslation(rounding=Rounding(document["forward"]["rounding"])),
        backward=BackwardRule(rounding=Rounding(backward["rounding"]), loss=backward["loss"]),
        weight=document["weight"],
        update=rule,
    )


def _parameters(header: dict[str, Any], arrays: dict[str, Any]) -> Parameters:
    parameters = Parameters(
        num_batches_tracked=dict(header["num_batches_tracked"]), num_steps=int(header["num_steps"])
    )
    for name, exponent in header["exponents"].items():
        data = arrays[f"weight/{name}"]
        if data.dtype != np.int8 or data.ndim != 4 or (data == -128).any():
            raise ValueError(f"weight {name} is not int8 in -127..127 of four dimensions")
        parameters.weights[name] = Weight(
            data=np.ascontiguousarray(data),
            exponent=int(exponent),
            master=arrays.get(f"master/{name}"),
            velocity=arrays.get(f"velocity/{name}"),
        )
    for key, array in arrays.items():
        if key.startswith("vector/"):
            name = key.removeprefix("vector/")
            parameters.vectors[name] = Vector(data=array, velocity=arrays.get(f"velocity/{name}"))
    return parameters
