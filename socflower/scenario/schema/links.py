"""Files that a scenario names; and the links of its edges: generated, constant, in segments, or recorded in one."""

from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

from socflower.edgecloud.links.bandwidth_profile import (
    BandwidthProfile,
    constant,
    read_csv,
    segments,
)
from socflower.edgecloud.links.profile_generator import add_jitter, generate_bandwidth_profile
from socflower.errors import ConfigError
from socflower.scenario.schema.scenario_file import Scenario
from socflower.thermal.model.background_load import read_hours

GENERATED_S = 3600.0
"""Length of a generated bandwidth profile before it repeats, and of the jitter on a link in segments."""


def inline_recorded_link(document: dict[str, Any], path: Path) -> None:
    """Replace the name of a recorded link's file by its segments, so that the document is self-contained."""
    table = document.get("edgecloud")
    if not isinstance(table, Mapping) or not str(table.get("link", "")).endswith(".csv"):
        return
    if table.get("segments"):
        raise ConfigError(f"{path} [edgecloud]: link names a file; leave segments out")
    trace = read_csv(path.parent / str(table["link"]))
    times_s = (*trace.up.times_s, trace.up.end_s)
    document["edgecloud"] = {
        **table,
        "link": Path(str(table["link"])).stem,
        "repeats": True,
        "segments": [
            [end_s - begin_s, up, down]
            for (begin_s, end_s), up, down in zip(
                pairwise(times_s), trace.up.bytes_per_s, trace.down.bytes_per_s, strict=True
            )
        ],
    }


def inline_recorded_load(document: dict[str, Any], path: Path) -> None:
    """Replace the name of a recorded load's file by its hours, so that the document is self-contained."""
    table = document.get("background_load")
    if not isinstance(table, Mapping) or not str(table.get("games", "")).endswith(".csv"):
        return
    hours = read_hours(path.parent / str(table["games"]))
    document["background_load"] = {**table, "games": list(hours)}


def resolve_file_paths(document: dict[str, Any], folder: Path) -> None:
    """Make the paths in `[model]`, `[edgecloud]` and `[pipeline]`, which are relative to `folder`, absolute."""
    for name, key in (("model", "pretrained"), ("edgecloud", "costs")):
        table = document.get(name)
        if isinstance(table, Mapping) and table.get(key):
            document[name] = {**table, key: str((folder / str(table[key])).resolve())}
    table = document.get("pipeline")
    if isinstance(table, Mapping) and isinstance(table.get("profiles"), list):
        document["pipeline"] = {
            **table,
            "profiles": [
                str((folder / name).resolve()) if isinstance(name, str) and name.strip() else name
                for name in table["profiles"]
            ],
        }


def edge_links(scenario: Scenario, num_edges: int) -> tuple[BandwidthProfile, ...]:
    """Return each edge's link; random links depend on the seed and differ by edge.

    Raises `ConfigError` for an unknown kind.
    """
    names = scenario.split.link_names
    if isinstance(scenario.split.link, str):
        names *= num_edges
    elif len(names) != num_edges:
        why = f"{len(names)} for {num_edges} edges; name one for each"
        raise scenario.mistake("edgecloud", "link", why)
    return tuple(_link(scenario, name, edge) for edge, name in enumerate(names))


def _link(scenario: Scenario, name: str, edge: int) -> BandwidthProfile:
    settings = scenario.split
    seed = scenario.seed + edge

    def with_jitter(link: BandwidthProfile) -> BandwidthProfile:
        return add_jitter(link, settings.jitter, seed, duration_s=GENERATED_S)

    if settings.segments:
        return with_jitter(
            segments(settings.segments, latency_s=settings.latency_s, repeats=settings.repeats)
        )
    if name == "constant":
        # `EdgeCloudConfig` refuses a constant link without its rates.
        assert settings.bytes_per_s is not None
        return with_jitter(constant(*settings.bytes_per_s, settings.latency_s))
    return generate_bandwidth_profile(name, seed, GENERATED_S)
