"""The links of a scenario's edges: generated, constant, in segments, or recorded in a file."""

from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

from socflower.edgecloud.links.bandwidth_profile import BandwidthProfile, constant, segments
from socflower.edgecloud.links.profile_files import read_csv
from socflower.edgecloud.links.profile_generator import add_jitter, generate_bandwidth_profile
from socflower.errors import ConfigError
from socflower.scenario.schema.config import Scenario

GENERATED_S = 3600.0
"""How long a generated trace is before it begins again, and for how long a link in segments scatters."""


def inline_recorded_link(document: dict[str, Any], path: Path) -> None:
    """Put a recorded trace where its file is named: the resolved document stands alone, and travels to other machines.
    """
    table = document.get("edgecloud")
    if not isinstance(table, Mapping) or not str(table.get("link", "")).endswith(".csv"):
        return
    if table.get("segments") or table.get("links"):
        raise ConfigError(f"{path} [edgecloud]: link names a file, and segments or links say something else; keep one "
                          "of them")
    trace = read_csv(path.parent / str(table["link"]))
    times_s = (*trace.up.times_s, trace.up.end_s)
    document["edgecloud"] = {
        **table, "link": Path(str(table["link"])).stem, "repeats": True,
        "segments": [[end_s - begin_s, up, down] for (begin_s, end_s), up, down in
                     zip(pairwise(times_s), trace.up.bytes_per_s, trace.down.bytes_per_s, strict=True)]}


def name_files_from_anywhere(document: dict[str, Any], folder: Path) -> None:
    """Let files that `[edgecloud]` names by their place in `folder` be found from any other."""
    table = document.get("edgecloud")
    if isinstance(table, Mapping):
        named = {key: str((folder / str(table[key])).resolve()) for key in ("costs", "pretrained") if table.get(key)}
        document["edgecloud"] = {**table, **named}


def edge_links(scenario: Scenario, num_edges: int) -> tuple[BandwidthProfile, ...]:
    """Return each edge's link; what is random in them follows the seed, and differs by the edge.

    Raises ConfigError for a kind that is unknown.
    """
    settings = scenario.split
    if settings.links and len(settings.links) != num_edges:
        raise ConfigError(f"{scenario.name} [edgecloud] links: {len(settings.links)} for {num_edges} edges; name one "
                          "for each")
    names = settings.links or (settings.link,) * num_edges
    return tuple(_link(scenario, name, edge) for edge, name in enumerate(names))


def _link(scenario: Scenario, name: str, edge: int) -> BandwidthProfile:
    settings = scenario.split
    seed = (scenario.seed if settings.trace_seed is None else settings.trace_seed) + edge

    def scattered(link: BandwidthProfile) -> BandwidthProfile:
        return add_jitter(link, settings.jitter, seed, duration_s=GENERATED_S)

    if settings.segments and not settings.links:
        return scattered(segments(settings.segments, latency_s=settings.latency_s, repeats=settings.repeats))
    if name == "constant":
        if settings.up_bytes_per_s is None or settings.down_bytes_per_s is None:
            raise ConfigError(f"{scenario.name} [edgecloud] links: \"constant\" needs up_bytes_per_s and "
                              "down_bytes_per_s")
        return scattered(constant(settings.up_bytes_per_s, settings.down_bytes_per_s, settings.latency_s))
    return generate_bandwidth_profile(name, seed, GENERATED_S)
