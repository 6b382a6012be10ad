"""`[edgecloud]` of a scenario: the cloud, the link to it, and how a model is trained over both."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from socflower.cluster.toml_file import Pairs
from socflower.edgecloud.plan.cuts import BITS
from socflower.errors import ConfigError

SPLIT_STRATEGIES = ("split-replay", "pipelined", "joint-dnn", "split", "splitfed", "edge-only")
"""Strategies that train with a cloud; all except the first are baselines."""

FEEDBACK = ("none", "diagonal", "rank-one")
CLOUD_MODELS = ("own", "shared")
_MAX_BATCHES = 10_000  # in flight at the same time


@dataclass(frozen=True, kw_only=True, slots=True)
class EdgeCloudConfig:
    """`[edgecloud]`; each SoC of the cluster is an edge with its own link."""

    RENAMED: ClassVar[Mapping[str, str]] = {"halves": "cloud_model"}

    cloud_device: str = "gpu-v100"
    link: str = "wifi"  # a kind of generated bandwidth profile, "constant", or the file of a recorded one
    links: tuple[str, ...] = ()  # one per edge, if they differ
    up_bytes_per_s: float | None = None  # for "constant"
    down_bytes_per_s: float | None = None
    latency_s: float = 0.005  # one way; for "constant"
    segments: tuple[tuple[float, float, float], ...] = ()  # [seconds, up and down bytes/s] instead of a link by name
    repeats: bool = False  # repeat the segments; otherwise the last one continues
    jitter: float = 0.0  # standard deviation of the rates of "constant" and `segments`, relative to their mean
    trace_seed: int | None = None  # for generated links and jitter; default: the scenario's seed
    cut: int | str = "auto"  # index of the cut, or name of the front half's last layer
    adapt: bool = True  # move the cut as the link changes; for split-replay
    allow_edge_only: bool = False
    window: Pairs = ((0.0, 5.0),)  # [fraction of training done, K from then on]
    bits: tuple[int, ...] = (8,)  # feature widths to choose from
    gradient_bits: int = 32
    error_feedback: str = "diagonal"
    delta: bool = False  # send the change of a sample's features since they were last sent
    cloud_model: str = "own"  # "own": one per edge, averaged; "shared": one that trains on their batches in turn
    round_epochs: float = 1.0  # epochs between two averagings and evaluations
    frozen: str = ""  # name of the last frozen layer
    costs: str = ""  # .json file of measured costs, for all edges; default: the catalogue's
    pretrained: str = ""  # .npz file of initial weights
    classes: tuple[int, ...] = ()  # train and test on these only

    def __post_init__(self) -> None:
        _check_bits("bits", self.bits)
        _check_bits("gradient_bits", (self.gradient_bits,))
        for key, known in (("error_feedback", FEEDBACK), ("cloud_model", CLOUD_MODELS)):
            if getattr(self, key) not in known:
                raise ConfigError(f"[edgecloud] {key} = {getattr(self, key)!r} is unknown; use one of "
                                  f"{', '.join(known)}")
        for key in ("up_bytes_per_s", "down_bytes_per_s"):
            value = getattr(self, key)
            if (value is None) == ("constant" in (self.link, *self.links) and not self.segments):
                raise ConfigError(f"[edgecloud] {key} = {value}: link = \"constant\" needs it, and no other link "
                                  "takes it")
            if value is not None and not 0 < value < math.inf:
                raise ConfigError(f"[edgecloud] {key} = {value} must be above 0 and finite")
        if not 0 <= self.latency_s < math.inf:
            raise ConfigError(f"[edgecloud] latency_s = {self.latency_s} must be 0 or more and finite")
        if not 0 <= self.jitter < math.inf:
            raise ConfigError(f"[edgecloud] jitter = {self.jitter} must be 0 or more and finite")
        if self.jitter and not self.segments and "constant" not in (self.link, *self.links):
            raise ConfigError(f"[edgecloud] jitter = {self.jitter} is of segments and of link = \"constant\"; "
                              "generated links scatter by themselves")
        if self.trace_seed is not None and self.trace_seed < 0:
            raise ConfigError(f"[edgecloud] trace_seed = {self.trace_seed} must be 0 or more")
        if not 0 < self.round_epochs < math.inf:
            raise ConfigError(f"[edgecloud] round_epochs = {self.round_epochs} must be above 0 and finite")
        if self.trace_seed is not None and not 0 <= self.trace_seed < 2**32:
            raise ConfigError(f"[edgecloud] trace_seed = {self.trace_seed} must lie between 0 and {2**32 - 1}")
        if isinstance(self.cut, str) and not self.cut:
            raise ConfigError("[edgecloud] cut is empty; write \"auto\", a number or the name of a layer")
        parts = [part for part, _ in self.window]
        if not parts or parts[0] != 0.0 or parts != sorted(set(parts)) or parts[-1] >= 1.0:
            raise ConfigError(f"[edgecloud] window = {[list(pair) for pair in self.window]}: need pairs [part of "
                              "training, K] whose parts rise from 0.0 and stay below 1.0")
        if any(not 0 <= limit <= _MAX_BATCHES or limit != int(limit) for _, limit in self.window):
            raise ConfigError(f"[edgecloud] window = {[list(pair) for pair in self.window]}: each K must be a whole "
                              f"number, 0 to {_MAX_BATCHES}")


def _check_bits(key: str, values: tuple[int, ...]) -> None:
    if not values or any(bits not in BITS for bits in values):
        raise ConfigError(f"[edgecloud] {key} = {list(values)} must be some of {', '.join(map(str, BITS))}")
