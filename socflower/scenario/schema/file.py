"""Scenario files: reading, overriding single keys, and the resolved document in results."""

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from socflower.cluster import Cluster
from socflower.cluster.cluster_file import (
    ClusterFile,
    cluster_document,
    inline_devices,
    make_cluster,
)
from socflower.errors import ConfigError, InfeasiblePlan
from socflower.quantities import counted
from socflower.scenario.expectations import require_known_claims
from socflower.scenario.schema.links import (
    inline_recorded_link,
    inline_recorded_load,
    resolve_file_paths,
)
from socflower.scenario.schema.placement import placement_file, with_placement
from socflower.scenario.schema.scenario_file import Scenario, ScenarioFile
from socflower.toml_file import parse_value, read_table, read_toml
from socflower.user_code import own_sources


def load_scenario(path: Path, overrides: Sequence[str] = ()) -> Scenario:
    """Return the scenario of a TOML file with `table.key=value` overrides applied; `ConfigError` in one line."""
    document = read_toml(path, "scenario")
    _resolve_cluster(document, path)
    resolve_file_paths(document, path.parent)
    for override in overrides:
        apply_override(document, override)
    # An override may have named another cluster file.
    _resolve_cluster(document, path)
    inline_recorded_link(document, path)
    inline_recorded_load(document, path)
    # Paths in overrides are relative to the working directory.
    resolve_file_paths(document, Path())
    text = path.read_text("utf-8-sig")
    placement = placement_file(document, path.parent)
    scenario = parse_scenario(
        document, name=path.stem, question=_leading_comment(text), where=str(path)
    )
    if placement is not None:
        scenario = with_placement(scenario, placement)
    if not scenario.factories:
        return scenario
    folder = path.parent.resolve()
    return scenario.replaced(
        folder=str(folder), code=_digest(own_sources(folder, scenario.factories))
    )


def _digest(files: Mapping[str, Path]) -> str:
    """Return one digest of files' paths and contents, so that no result of other code is taken for this one's."""
    digest = hashlib.sha256()
    for name, file in files.items():
        digest.update(f"{name}\0{hashlib.sha256(file.read_bytes()).hexdigest()}\n".encode())
    return digest.hexdigest()


def _resolve_cluster(document: dict[str, Any], path: Path) -> None:
    """Replace names of cluster files and device profiles by their tables, so that the document is self-contained."""
    cluster = document.get("cluster")
    if isinstance(cluster, str):
        file = path.parent / cluster
        tables = cluster_document(file)
        make_cluster(read_table(ClusterFile, tables, str(file)), str(file))
        for key in ("cluster", "board", "site"):
            document.pop(key, None)
            if key in tables:
                document[key] = tables[key]
        devices, own = tables.get("device", {}), document.get("device", {})
        if isinstance(own, Mapping):
            twice = [name for name in devices if name in own and own[name] != devices[name]]
            if twice:
                raise ConfigError(
                    f"{path}: [device.{twice[0]}] is another device than that of {file}; rename one"
                )
            document["device"] = {**own, **devices}
    inline_devices(document, path.parent, str(path))


def parse_scenario(
    document: Mapping[str, Any], *, name: str, question: str, where: str
) -> Scenario:
    """Return the scenario of a parsed document."""
    file = read_table(ScenarioFile, document, where)
    require_known_claims(file.expect, where, of_plan=file.kind.is_pipeline)
    return Scenario(**dict(file), name=name, question=question)


def scenario_cluster(scenario: Scenario) -> Cluster:
    """Return the cluster a scenario describes."""
    return make_cluster(scenario, scenario.name)


def num_participants(scenario: Scenario, cluster: Cluster) -> int:
    """Return how many SoCs take part; `InfeasiblePlan` if the cluster has fewer."""
    num_socs = scenario.strategy.socs or cluster.num_socs
    if num_socs > cluster.num_socs:
        why = f"but the cluster has {counted(cluster.num_socs, 'SoC')}; lower socs or add boards"
        raise InfeasiblePlan(f"{scenario.name} [strategy] socs = {num_socs}, {why}")
    return num_socs


def num_nodes(scenario: Scenario, cluster: Cluster) -> int:
    """Return how many nodes a run needs: one for each participant, or with spare SoCs for each SoC of the cluster."""
    if scenario.strategy.use_spares:
        return cluster.num_socs
    return num_participants(scenario, cluster)


def to_document(scenario: Scenario) -> dict[str, Any]:
    """Return the scenario's document with all defaults; only the tables of the cluster stay as written."""
    document = scenario.model_dump(
        mode="json",
        by_alias=True,
        exclude_none=True,
        exclude={"cluster", "boards", "site", "devices"},
    )
    written = scenario.model_dump(
        mode="json",
        by_alias=True,
        exclude_unset=True,
        include={"cluster", "boards", "site", "devices"},
    )
    return {
        **document,
        "cluster": written.get("cluster", {}),
        "board": written.get("board", []),
        **{key: written[key] for key in ("site", "device") if written.get(key)},
    }


def from_document(document: Mapping[str, Any]) -> Scenario:
    """Return the scenario of a resolved document."""
    own = ("name", "question", "folder", "code")
    tables = {key: value for key, value in document.items() if key not in own}
    scenario = parse_scenario(
        tables, name=document["name"], question=document["question"], where=document["name"]
    )
    return scenario.replaced(**{key: document[key] for key in own if key in document})


def apply_override(document: dict[str, Any], override: str) -> None:
    """Set one key, as in `--set train.epochs=2`; the value is TOML, or a string if it is not valid TOML."""
    key, separator, value = override.partition("=")
    if not separator or not key:
        raise ConfigError(f"--set {override}: write table.key=value, as in --set train.epochs=2")
    *tables, last = key.strip().split(".")
    target: Any = document
    for table in tables:
        target = target.setdefault(table, {})
        if not isinstance(target, dict):
            raise ConfigError(f"--set {override}: {table!r} is not a table of the scenario")
    target[last] = parse_value(value)


def _leading_comment(text: str) -> str:
    lines = []
    for line in text.splitlines():
        if not line.startswith("#"):
            break
        lines.append(line.lstrip("#").strip())
    return " ".join(lines).strip()
