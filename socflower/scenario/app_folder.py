"""Runs any Flower app folder on the local engine: its unmodified ServerApp and ClientApp in virtual time."""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from time import perf_counter
from typing import Any, TypeAlias

from socflower.cluster import LayerProfile, ModelProfile
from socflower.cluster.cluster_file import load_cluster
from socflower.cluster.cost_model import BACKWARD_TO_FORWARD
from socflower.cluster.task_graph import Activity
from socflower.cluster.toml_file import parse_value
from socflower.cluster.virtual_clock import Usage
from socflower.engines.local.message_log import MessageLog
from socflower.engines.local.run_app import load_flower_app, run_app
from socflower.errors import ConfigError
from socflower.scenario.priced_processors import cluster_gpu_notes
from socflower.sim import EventClock, Trace
from socflower.wire.folders import exclusive_folder, new_folder
from socflower.wire.saved_state import write_atomically

RunConfigValue: TypeAlias = bool | int | float | str


def run_app_folder(
    folder: Path, cluster_file: Path, out: Path, *, num_nodes: int | None = None, training_flops: float | None = None,
    overrides: tuple[str, ...] = (), num_workers: int | None = None,
) -> dict[str, Any]:
    """Run the app and write `result.json` and `trace.json`; return the result.

    A node is a SoC of the cluster (default: all). `training_flops` is the cost of one example in training; without it
    only messages take virtual time, training does not. `overrides` set keys of the run config. Raises
    `TrainingFailed`, and writes nothing, if no client succeeded, or none of those that trained last.
    """
    with exclusive_folder(out, f"--out {out}"):
        return _run(folder, cluster_file, out, num_nodes, training_flops, overrides, num_workers)


def _run(
    folder: Path, cluster_file: Path, out: Path, num_nodes: int | None, training_flops: float | None,
    overrides: tuple[str, ...], num_workers: int | None,
) -> dict[str, Any]:
    app = load_flower_app(folder)
    cluster = load_cluster(cluster_file)
    run_config = dict(app.run_config)
    for override in overrides:
        key, value = _override(override, app.run_config)
        run_config[key] = value
    trace, messages = Trace(), MessageLog()
    started_s = perf_counter()
    clock = run_app(app.server_app, app.client_app, cluster=cluster, num_nodes=num_nodes, run_config=run_config,
                    num_workers=num_workers, model_profile=_profile(training_flops),
                    clock=EventClock(cluster, trace=trace), messages=messages)
    usage = clock.usage
    result = {
        "schema": 1, "app": str(folder), "engine": "local", "run_config": run_config,
        "virtual_s": clock.now_s, "wall_s": perf_counter() - started_s, "energy_j": usage.total_energy_j,
        "bytes": {tier.value: value for tier, value in usage.num_bytes.items()},
        "notes": [*cluster_gpu_notes(cluster, "local"), *_pricing_notes(usage)],
        "breakdown": {"soc_seconds": {key.value: value for key, value in usage.soc_seconds.items()},
                      "energy_j": {key.value: value for key, value in usage.energy_j.items()}},
        "events": messages.documents(),
    }
    with new_folder(out) as fresh:
        write_atomically(fresh / "result.json", json.dumps(result, indent=1))
        trace.write(fresh / "trace.json")
    return result


def _pricing_notes(usage: Usage) -> list[str]:
    """Return a line if no computation cost any virtual time."""
    if usage.soc_seconds.get(Activity.COMPUTE, 0.0):
        return []
    return ["training took no virtual time, since nothing tells what it costs: give --training-flops, the operations "
            "of one example's forward and backward pass"]


def _override(override: str, run_config: Mapping[str, RunConfigValue]) -> tuple[str, RunConfigValue]:
    """Return key and value of `--set key=value`; `ConfigError` for an unknown key or a value of another type."""
    key, separator, text = (part.strip() for part in override.partition("="))
    if not separator or not text:
        raise ConfigError(f"--set {override}: write key=value, as in num-server-rounds=3")
    if key not in run_config:
        raise ConfigError(f"--set {override}: the app's run config has no {key!r}; it has {', '.join(run_config)}")
    value, default = parse_value(text), run_config[key]
    if not isinstance(value, bool | int | float | str):
        raise ConfigError(f"--set {override}: a run config holds numbers, texts, true and false only")
    # A text's default may accept any value, such as "auto" or a number; numbers and booleans keep their type.
    if not isinstance(default, str) and _kind(value) != _kind(default):
        raise ConfigError(f"--set {override}: must be {_kind(default)}, as {key} = {json.dumps(default)} of the app is")
    return key, value


def _kind(value: RunConfigValue) -> str:
    if isinstance(value, bool):
        return "true or false"
    return "a text" if isinstance(value, str) else "a number"


def _profile(training_flops: float | None) -> ModelProfile | None:
    if training_flops is None:
        return None
    if not 0 < training_flops < math.inf:
        raise ConfigError(f"--training-flops {training_flops}: must be above 0 and finite")
    layer = LayerProfile(name="model", kind="foreign", forward_flops=training_flops / (1.0 + BACKWARD_TO_FORWARD),
                         output_bytes=0.0, weight_bytes=0.0, num_tensors=0)
    return ModelProfile(name="foreign", layers=(layer,), input_bytes=0.0)
