"""`socflower cloud measure`: the measured costs of a scenario's model on this device at every cut, for planners."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import torch
from rich.console import Console
from rich.table import Table

from socflower.edgecloud.plan.cuts import SplitCosts
from socflower.edgecloud.runtime.measuring import (
    Measuring,
    from_document,
    measure_cloud,
    measure_costs,
    to_document,
)
from socflower.edgecloud.split_program import LayeredProgram
from socflower.engines.names import MAX_WORKERS, require_count
from socflower.errors import ConfigError
from socflower.model_graph.torch_device import resolve_device
from socflower.quantities import human_bytes, human_seconds
from socflower.scenario.measured_file import read_measured
from socflower.scenario.schema.scenario_file import Scenario
from socflower.wire.codecs.error_feedback import Form
from socflower.wire.codecs.quantisation import BITS

_CLOUD_KIND = "split-cloud-seconds"
_COMMAND = "socflower cloud measure"


def measure_split(
    scenario: Scenario,
    program: object,
    *,
    side: str,
    cloud: Path | None,
    repeats: int,
    threads: int,
) -> dict[str, Any]:
    """Return this machine's costs at every cut on the program's device: seconds for the cloud, all costs for the edge.

    The edge reads the cloud's seconds from the file that was measured there, or measures them on itself.
    """
    if not isinstance(program, LayeredProgram) or program.is_reverse:
        raise ConfigError(
            f"{scenario.name}: only models that are cut between layers, with the front at the edge, are "
            "measured"
        )
    if side == "edge" and scenario.precision.arithmetic != "fp32":
        raise scenario.mistake("precision", "arithmetic", "an edge is measured in 'fp32'")
    if side not in ("edge", "cloud"):
        raise ConfigError(f"--side {side}: unknown; use edge or cloud")
    require_count("--repeats", repeats, 1, 10_000)
    require_count("--threads", threads, 1, MAX_WORKERS)
    torch.set_num_threads(threads)
    how = Measuring(
        optimizer=program.optimizer,
        batch_size=scenario.train.batch_size,
        num_repeats=repeats,
        device=resolve_device(program.device, "measuring: device"),
    )
    if side == "cloud":
        return {
            "schema": 1,
            "kind": _CLOUD_KIND,
            "model": scenario.model.name,
            "batch_size": scenario.train.batch_size,
            "fingerprint": program.fingerprint(),
            "cloud_s": list(measure_cloud(program.split, how)),
        }
    cloud_s = None
    if cloud is not None:
        cloud_s = _cloud_seconds(cloud, program.fingerprint(), scenario.train.batch_size)
    costs = measure_costs(
        program.split,
        how,
        cloud_s=cloud_s,
        bits=[bits for bits in BITS if bits < 32],
        feedback=cast(Form, scenario.split.error_feedback),
    )
    return to_document(replace(costs, model=scenario.model.name))


def measured_costs(path: Path, expected: SplitCosts) -> SplitCosts:
    """Return the costs of a file; `ConfigError` unless its cuts and batch size are those of `expected`."""
    costs = from_document(read_measured(path, _COMMAND))
    ours, theirs = (
        f"batches of {each.batch_size} and cuts after {', '.join(cut.name for cut in each.cuts)}"
        for each in (expected, costs)
    )
    if ours != theirs:
        raise ConfigError(f"costs {path}: are of {theirs}; the scenario has {ours}; measure again")
    return replace(
        costs,
        gradient_bits=expected.gradient_bits,
        edge_budget_bytes=expected.edge_budget_bytes,
    )


def print_measured(console: Console, document: Mapping[str, Any]) -> None:
    """Print the measured costs."""
    if document["kind"] == _CLOUD_KIND:
        console.print(
            "cloud, by cut: "
            + ", ".join(human_seconds(seconds) for seconds in document["cloud_s"]),
            highlight=False,
            soft_wrap=True,
        )
        return
    table = Table(
        "cut after",
        "forward",
        "backward, update",
        "cloud",
        "features of a batch",
        header_style="bold",
    )
    for cut in document["cuts"]:
        table.add_row(
            cut["name"],
            human_seconds(cut["edge_forward_s"]),
            human_seconds(cut["edge_backward_s"]),
            human_seconds(cut["cloud_s"]),
            human_bytes(4.0 * cut["feature_elements"]),
        )
    console.print(table)
    console.print(
        f"a whole step at the edge: {human_seconds(document['edge_only_s'])}", highlight=False
    )


def _cloud_seconds(path: Path, fingerprint: str, batch_size: int) -> list[float]:
    document = read_measured(path, f"{_COMMAND} --side cloud")
    if document.get("kind") != _CLOUD_KIND:
        raise ConfigError(f"--cloud {path}: is not what `{_COMMAND} --side cloud` writes")
    if (document["fingerprint"], document["batch_size"]) != (fingerprint, batch_size):
        raise ConfigError(
            f"--cloud {path}: is of another model or batch size ({document['model']}, "
            f"{document['batch_size']}); measure the same scenario there"
        )
    return [float(seconds) for seconds in document["cloud_s"]]
