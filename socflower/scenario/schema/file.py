"""Scenario files: reading, overriding single keys, and the resolved document in results."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from socflower.cluster import Cluster, parse_cluster
from socflower.cluster.cluster_file import cluster_tables, inline_devices
from socflower.cluster.toml_file import parse_table, parse_value, read_toml, reject_unknown_keys, require_tables
from socflower.errors import ConfigError
from socflower.scenario.expectations import require_known_claims
from socflower.scenario.schema.config import (
    CompareConfig,
    DataConfig,
    EventConfig,
    ModelConfig,
    PrecisionConfig,
    RingConfig,
    Scenario,
    StrategyConfig,
    TrainConfig,
)
from socflower.scenario.schema.links import inline_recorded_link, resolve_file_paths
from socflower.scenario.schema.split import EdgeCloudConfig
from socflower.scenario.schema.thermal import BackgroundLoadConfig, ThermalConfig

_KEYS = (
    "schema", "seed", "cluster", "board", "device", "model", "data", "train", "precision", "strategy", "ring",
    "compare", "event", "thermal", "background_load", "edgecloud", "expect",
)  # fmt: skip


def load_scenario(path: Path, overrides: Sequence[str] = ()) -> Scenario:
    """Return the scenario of a TOML file with `table.key=value` overrides applied; `ConfigError` in one line."""
    document = read_toml(path, "scenario")
    _resolve_cluster(document, path)
    resolve_file_paths(document, path.parent)
    for override in overrides:
        apply_override(document, override)
    _resolve_cluster(document, path)
    inline_recorded_link(document, path)
    resolve_file_paths(document, Path())  # paths in overrides are relative to the working directory
    text = path.read_text("utf-8")
    return parse_scenario(document, name=path.stem, question=_leading_comment(text), where=str(path))


def _resolve_cluster(document: dict[str, Any], path: Path) -> None:
    """Replace names of cluster files and device profiles by their tables, so that the document is self-contained."""
    cluster = document.get("cluster")
    if isinstance(cluster, str):
        file = path.parent / cluster
        tables, boards, devices = cluster_tables(file)
        parse_cluster(tables, boards, devices, where=str(file))
        document["cluster"], document["board"] = tables, boards
        own = document.get("device", {})
        if isinstance(own, Mapping):
            twice = [name for name in devices if name in own and own[name] != devices[name]]
            if twice:
                raise ConfigError(f"{path}: [device.{twice[0]}] is another device than the one of that name in {file}; "
                                  "rename one")
            document["device"] = {**own, **devices}
    if isinstance(document.get("cluster", {}), Mapping):
        tables, boards, devices = inline_devices(document.get("cluster", {}), document.get("board", ()),
                                                 document.get("device", {}), folder=path.parent, where=str(path))
        document.update({"cluster": tables, "board": boards, "device": devices})


def parse_scenario(document: Mapping[str, Any], *, name: str, question: str, where: str) -> Scenario:
    """Return the scenario of a parsed document."""
    reject_unknown_keys(document, _KEYS, where, {"users": "background_load"})
    for key in ("schema", "seed"):
        if isinstance(document.get(key, 1), bool) or not isinstance(document.get(key, 1), int):
            raise ConfigError(f"{where}: {key} = {document[key]!r} must be a whole number")
    boards = require_tables(document.get("board", []), "board", where)
    events = require_tables(document.get("event", []), "event", where)
    if not isinstance(document.get("cluster", {}), Mapping):
        raise ConfigError(f"{where}: cluster = {document['cluster']!r} must be a table or the path of a cluster file")
    devices = document.get("device", {})
    if not isinstance(devices, Mapping):
        raise ConfigError(f"{where}: device = {devices!r} must be tables [device.NAME]; the device of a cluster is a "
                          "key of [cluster]")
    expect = document.get("expect", {})
    require_known_claims(expect, where)

    def table(kind: type, key: str) -> Any:
        return parse_table(kind, document.get(key, {}), f"{where} [{key}]")

    return Scenario(
        schema=document.get("schema", 1), seed=document.get("seed", 1), name=name, question=question,
        cluster=document.get("cluster", {}), boards=tuple(boards), devices=devices,
        model=table(ModelConfig, "model"), data=table(DataConfig, "data"), train=table(TrainConfig, "train"),
        precision=table(PrecisionConfig, "precision"), strategy=table(StrategyConfig, "strategy"),
        ring=table(RingConfig, "ring"),
        compare=table(CompareConfig, "compare"), expect=expect,
        thermal=table(ThermalConfig, "thermal") if "thermal" in document else None,
        background_load=table(BackgroundLoadConfig, "background_load") if "background_load" in document else None,
        edgecloud=table(EdgeCloudConfig, "edgecloud") if "edgecloud" in document else None,
        events=tuple(parse_table(EventConfig, event, f"{where} [[event]] {index + 1}")
                     for index, event in enumerate(events)),
    )


def scenario_cluster(scenario: Scenario) -> Cluster:
    """Return the cluster a scenario describes."""
    return parse_cluster(scenario.cluster, scenario.boards, scenario.devices, where=scenario.name)


def to_document(scenario: Scenario) -> dict[str, Any]:
    """Return the scenario's document with all defaults, except those of the cluster, which stays as written."""
    document = {key: value for key, value in asdict(scenario).items() if key not in ("boards", "devices", "events")}
    document["cluster"] = dict(scenario.cluster)
    if scenario.devices:
        document["device"] = dict(scenario.devices)
    document["board"] = [dict(board) for board in scenario.boards]
    document["event"] = [asdict(event) for event in scenario.events]
    document["expect"] = dict(scenario.expect)
    document["compare"]["strategies"] = list(scenario.compare.strategies)
    document["precision"]["gradient_bits"] = list(scenario.precision.gradient_bits)
    for name in ("thermal", "background_load", "edgecloud"):
        table = document.pop(name)
        if table is not None:
            document[name] = {key: _lists(value) for key, value in table.items()}
    return {key: _without_none(value) for key, value in document.items()}


def from_document(document: Mapping[str, Any]) -> Scenario:
    """Return the scenario of a resolved document."""
    tables = {key: value for key, value in document.items() if key not in ("name", "question")}
    return parse_scenario(tables, name=document["name"], question=document["question"], where=document["name"])


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


def _lists(value: Any) -> Any:
    """Return tuples as lists, recursively, for TOML and JSON."""
    return [_lists(entry) for entry in value] if isinstance(value, tuple) else value


def _without_none(value: Any) -> Any:
    return {key: entry for key, entry in value.items() if entry is not None} if isinstance(value, dict) else value
