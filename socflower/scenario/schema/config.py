"""The tables of a scenario file as validated values; unknown keys and impossible values are errors."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, ClassVar

from socflower.cluster.cluster_file import MOST_SOCS
from socflower.errors import ConfigError
from socflower.hierarchy.delayed_sync import MOST_INTERVALS
from socflower.precision import ALGORITHMS, MIXING_RULES
from socflower.scenario.schema.split import SPLIT_STRATEGIES, EdgeCloudConfig
from socflower.scenario.schema.thermal import BackgroundLoadConfig, ThermalConfig
from socflower.wire.message_keys import COMPRESSIONS, TRANSPORTS

CLUSTER_STRATEGIES = ("socflow", "ring", "fedavg", "sgd")
STRATEGIES = (*CLUSTER_STRATEGIES, *SPLIT_STRATEGIES)
ARITHMETICS = ("fp32", "int8", "mixed")
REBALANCE = ("off", "shares", "groups", "both")
FAULT_KINDS = ("raise", "nan", "hang", "die", "preempt")

_HELD_OUT = 128
# Limits far above any real training, which keep planning and training bounded.
_MAX_EPOCHS = 1_000_000
_MAX_SAMPLES = 1_000_000  # of a batch
_MAX_BUCKETS = 1_000
_MAX_S = 1e7  # 116 days
_GRADIENT_BITS = (5, 4, 3)


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelConfig:
    """`[model]`"""

    name: str = "lenet5"


@dataclass(frozen=True, kw_only=True, slots=True)
class DataConfig:
    """`[data]`"""

    name: str = "digits"
    partition: str = "iid"
    alpha: float = 0.5  # of a Dirichlet partition; smaller is more uneven

    def __post_init__(self) -> None:
        _one_of("[data] partition", self.partition, ("iid", "dirichlet"))
        _above_zero("[data] alpha", self.alpha)


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainConfig:
    """`[train]`; `batch_size` is a group's for socflow, the global one for ring and sgd, a client's for fedavg."""

    RENAMED: ClassVar[Mapping[str, str]] = {"member_passes": "reduction"}

    epochs: int = 10
    batch_size: int = 64
    learning_rate: float = 0.01
    optimizer: str = "sgd"
    momentum: float | None = None  # for sgd; see `Scenario.momentum`
    weight_decay: float = 0.0
    schedule: str = "cosine"
    local_epochs: int = 1  # of a fedavg client per round
    reduction: str = "auto"
    reply_timeout_s: float = 3600.0  # wall seconds after which a node that does not answer is dropped

    def __post_init__(self) -> None:
        _one_of("[train] optimizer", self.optimizer, ("sgd", "adam"))
        _one_of("[train] schedule", self.schedule, ("cosine", "constant"))
        _one_of("[train] reduction", self.reduction, ("auto", "always", "ring"))
        for key, most in (("epochs", _MAX_EPOCHS), ("batch_size", _MAX_SAMPLES), ("learning_rate", math.inf),
                          ("local_epochs", _MAX_EPOCHS), ("reply_timeout_s", _MAX_S)):
            _above_zero(f"[train] {key}", getattr(self, key), most)
        if not (0 <= (self.momentum or 0.0) < 1 and 0 <= self.weight_decay < math.inf):
            raise ConfigError(f"[train] momentum = {self.momentum} and weight_decay = {self.weight_decay}: need "
                              "0 <= momentum < 1 and weight_decay >= 0")
        if self.momentum and self.optimizer != "sgd":
            raise ConfigError(f"[train] momentum = {self.momentum} is for sgd, and optimizer = {self.optimizer!r}; "
                              "leave it out")
        if self.epochs % self.local_epochs:
            raise ConfigError(f"[train] epochs = {self.epochs} must be a multiple of local_epochs = "
                              f"{self.local_epochs}")


@dataclass(frozen=True, kw_only=True, slots=True)
class PrecisionConfig:
    """`[precision]`: the arithmetic of the clients' training."""

    arithmetic: str = "fp32"
    rule: str = "paper"  # for mixed: how a batch is split between CPU and NPU
    held_out: int | None = None  # training samples held out to measure alpha; default 128 for mixed, else 0
    algorithm: str = "niti"  # for int8
    gradient_bits: tuple[int, ...] = _GRADIENT_BITS  # for niti: from the start, half and three quarters of training
    adaptive_rescaling: bool = True
    unsupported: str = "refuse"  # how operators without int8 support are handled; "fp32" runs them in torch

    def __post_init__(self) -> None:
        _one_of("[precision] arithmetic", self.arithmetic, ARITHMETICS)
        _one_of("[precision] rule", self.rule, MIXING_RULES)
        if self.held_out is None:
            object.__setattr__(self, "held_out", _HELD_OUT if self.arithmetic == "mixed" else 0)
        if self.num_held_out < (1 if self.arithmetic == "mixed" else 0):
            raise ConfigError(f"[precision] held_out = {self.held_out} must be 1 or more with arithmetic = 'mixed', "
                              "0 or more otherwise")
        _one_of("[precision] algorithm", self.algorithm, tuple(ALGORITHMS))
        if len(self.gradient_bits) != 3 or not all(0 <= bits <= 7 for bits in self.gradient_bits):
            raise ConfigError(f"[precision] gradient_bits = {list(self.gradient_bits)}: need three numbers of 0 to 7")
        _one_of("[precision] unsupported", self.unsupported, ("refuse", "fp32"))
        self._refuse_unread()

    def _refuse_unread(self) -> None:
        readers = {"rule": ("mixed",), "algorithm": ("int8",), "gradient_bits": ("int8",),
                   "adaptive_rescaling": ("int8",), "unsupported": ("int8", "mixed")}
        for entry in fields(self):
            value = getattr(self, entry.name)
            if value == entry.default or self.arithmetic in readers.get(entry.name, ARITHMETICS):
                continue
            shown = list(value) if isinstance(value, tuple) else value
            raise ConfigError(f"[precision] {entry.name} = {shown!r} is for arithmetic = "
                              f"{' or '.join(map(repr, readers[entry.name]))}, and it is {self.arithmetic!r}; leave it "
                              "out")
        if self.gradient_bits != _GRADIENT_BITS and self.algorithm != "niti":
            raise ConfigError(f"[precision] gradient_bits = {list(self.gradient_bits)} is for algorithm = 'niti', and "
                              f"it is {self.algorithm!r}; leave it out")

    @property
    def num_held_out(self) -> int:
        """`held_out` with its default filled in."""
        assert self.held_out is not None
        return self.held_out


@dataclass(frozen=True, kw_only=True, slots=True)
class StrategyConfig:
    """`[strategy]`"""

    RENAMED: ClassVar[Mapping[str, str]] = {"sequenced": "serialize_uplinks"}

    name: str = "socflow"
    groups: int | str = "auto"
    socs: int | None = None  # number of participating SoCs; default all
    sync_interval_epochs: float | str = "decay"
    reshuffle: bool = True
    serialize_uplinks: bool | str = "auto"
    overlap_buckets: int = 1
    tolerate_client_errors: bool = False
    rebalance: str = "off"  # what is adapted to measured capacity
    rebalance_steps: int = 10  # steps between checks of the members' speeds; 0: only between rounds

    def __post_init__(self) -> None:
        _one_of("[strategy] name", self.name, STRATEGIES)
        _one_of("[strategy] rebalance", self.rebalance, REBALANCE)
        if not 0 <= self.rebalance_steps <= _MAX_EPOCHS:
            raise ConfigError(f"[strategy] rebalance_steps = {self.rebalance_steps} must not be negative, and at most "
                              f"{_MAX_EPOCHS}")
        _number_or("[strategy] groups", self.groups, "auto", "a whole number", MOST_SOCS)
        _number_or("[strategy] sync_interval_epochs", self.sync_interval_epochs, "decay", "a number of epochs",
                   _MAX_EPOCHS)
        if isinstance(self.serialize_uplinks, str) and self.serialize_uplinks != "auto":
            raise ConfigError(f"[strategy] serialize_uplinks = {self.serialize_uplinks!r} is unknown; use true, false "
                              "or 'auto'")
        if self.socs is not None:
            _above_zero("[strategy] socs", self.socs, MOST_SOCS)
        _above_zero("[strategy] overlap_buckets", self.overlap_buckets, _MAX_BUCKETS)


@dataclass(frozen=True, kw_only=True, slots=True)
class RingConfig:
    """`[ring]`: how groups exchange gradients on engine deployment; other engines run a group in one process."""

    transport: str = "auto"
    compression: str = "none"
    heartbeat_s: float = 5.0
    rendezvous_s: float = 90.0
    leader_grace_s: float = 30.0

    def __post_init__(self) -> None:
        _one_of("[ring] transport", self.transport, TRANSPORTS)
        _one_of("[ring] compression", self.compression, COMPRESSIONS)
        for key in ("heartbeat_s", "rendezvous_s", "leader_grace_s"):
            _above_zero(f"[ring] {key}", getattr(self, key), _MAX_S)


@dataclass(frozen=True, kw_only=True, slots=True)
class EventConfig:
    """`[[event]]`: a fault of a SoC's client in one round, or "preempt": its user takes the SoC for some rounds."""

    kind: str
    soc: int
    round: int
    rounds: int = 1  # for a preemption: number of rounds without the SoC, including the one in which it leaves
    at: float = 0.5  # for a preemption: fraction of that round's steps after which it leaves

    def __post_init__(self) -> None:
        _one_of("[[event]] kind", self.kind, FAULT_KINDS)
        _above_zero("[[event]] round", self.round, MOST_INTERVALS)
        _above_zero("[[event]] rounds", self.rounds, MOST_INTERVALS)
        if self.soc < 0:
            raise ConfigError(f"[[event]] soc = {self.soc} must be 0 or more")
        if not 0.0 <= self.at < 1.0:
            raise ConfigError(f"[[event]] at = {self.at} must be 0 or more and below 1")
        if self.kind != "preempt" and (self.rounds, self.at) != (1, 0.5):
            raise ConfigError(f"[[event]] kind = {self.kind!r} takes no rounds and no at; they are for \"preempt\"")


@dataclass(frozen=True, kw_only=True, slots=True)
class CompareConfig:
    """`[compare]`: the strategies that `socflower compare` runs, and the accuracy to which it times them."""

    strategies: tuple[str, ...] = CLUSTER_STRATEGIES
    target_accuracy: float | None = None

    def __post_init__(self) -> None:
        if not self.strategies:
            raise ConfigError("[compare] strategies is empty; name at least one of " + ", ".join(STRATEGIES))
        for name in self.strategies:
            _one_of("[compare] strategies", name, STRATEGIES)


@dataclass(frozen=True, kw_only=True, slots=True)
class Scenario:
    """A whole scenario. `cluster`, `boards` and `devices` remain tables, so that the document keeps them as written."""

    schema: int = 1
    seed: int = 1
    name: str = "scenario"
    question: str = ""
    cluster: Mapping[str, Any] = field(default_factory=dict)
    boards: tuple[Mapping[str, Any], ...] = ()
    devices: Mapping[str, Any] = field(default_factory=dict)  # [device.NAME] tables, in addition to the catalogue's
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    precision: PrecisionConfig = field(default_factory=PrecisionConfig)
    strategy: StrategyConfig = field(default_factory=StrategyConfig)
    ring: RingConfig = field(default_factory=RingConfig)
    compare: CompareConfig = field(default_factory=CompareConfig)
    events: tuple[EventConfig, ...] = ()
    thermal: ThermalConfig | None = None  # None: no heat simulation
    background_load: BackgroundLoadConfig | None = None  # None: no other users
    edgecloud: EdgeCloudConfig | None = None  # None: no cloud
    expect: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.schema != 1:
            raise ConfigError(f"schema = {self.schema} is not known to this version; write schema = 1")
        if self.train.optimizer != "sgd" and self.precision.arithmetic != "fp32":
            raise ConfigError(f"[train] optimizer = {self.train.optimizer!r} is for arithmetic = 'fp32'; int8 training "
                              "supports sgd only")
        if self.precision.arithmetic == "int8" and (self.train.weight_decay or self.train.reduction != "auto"):
            raise ConfigError("[precision] arithmetic = 'int8' does not support [train] weight_decay and reduction; "
                              "leave them out")
        if self.train.momentum and self._trains_by_niti:
            raise ConfigError(f"[train] momentum = {self.train.momentum}: the integer update of [precision] algorithm "
                              "= 'niti' has none; leave it out, or use algorithm = 'adaptive-fixed-point'")
        self._check_split()
        if not 0 <= self.seed < 2**32:
            raise ConfigError(f"seed = {self.seed} must lie between 0 and {2**32 - 1}")

    @property
    def _trains_by_niti(self) -> bool:
        return self.precision.arithmetic == "int8" and self.precision.algorithm == "niti"

    @property
    def momentum(self) -> float:
        """The momentum of `[train]`, by default 0.9; 0 if the update has none."""
        if self.train.momentum is not None:
            return self.train.momentum
        return 0.0 if self._trains_by_niti or self.train.optimizer != "sgd" else 0.9

    @property
    def is_split(self) -> bool:
        """Whether the strategy trains with a cloud."""
        return self.strategy.name in SPLIT_STRATEGIES

    @property
    def split(self) -> EdgeCloudConfig:
        """`[edgecloud]`, or its defaults if the scenario has no such table."""
        return self.edgecloud or EdgeCloudConfig()

    def _check_split(self) -> None:
        family = SPLIT_STRATEGIES if self.is_split else CLUSTER_STRATEGIES
        if self.compare.strategies == CLUSTER_STRATEGIES != family:
            # The default strategies do not fit this scenario: replace them by those of its family.
            object.__setattr__(self, "compare", replace(self.compare, strategies=tuple(
                name for name in family if name != "splitfed")))
        misfits = [name for name in self.compare.strategies if name not in family]
        if misfits:
            raise ConfigError(f"[compare] strategies: {misfits[0]!r} cannot run the workload of "
                              f"{self.strategy.name!r}; use some of {', '.join(family)}")
        if self.edgecloud is not None and not self.is_split:
            raise ConfigError(f"[edgecloud] is for strategies {', '.join(SPLIT_STRATEGIES)}; [strategy] name is "
                              f"{self.strategy.name!r}")
        if not self.is_split:
            return
        if self.train.epochs / self.split.round_epochs > MOST_INTERVALS:
            raise ConfigError(f"[edgecloud] round_epochs = {self.split.round_epochs} with [train] epochs = "
                              f"{self.train.epochs} make more than {MOST_INTERVALS} rounds; train fewer epochs, or "
                              "raise round_epochs")
        if self.precision.arithmetic != "fp32":
            raise ConfigError(f"[strategy] name = {self.strategy.name!r} trains in FP32; leave [precision] out")
        if self.thermal is not None or self.background_load is not None:
            raise ConfigError(f"[strategy] name = {self.strategy.name!r} does not support [thermal] and "
                              "[background_load]; leave them out")
        if self.events:
            raise ConfigError(f"[strategy] name = {self.strategy.name!r} does not support [[event]]; the outages of a "
                              "link are in [edgecloud] segments")


def _one_of(where: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        raise ConfigError(f"{where} = {value!r} is unknown; use one of {', '.join(known)}")


def _above_zero(where: str, value: float, most: float = math.inf) -> None:
    if not 0 < value < math.inf:
        raise ConfigError(f"{where} = {value} must be above 0 and finite")
    if value > most:
        raise ConfigError(f"{where} = {value} must be at most {most}")


def _number_or(where: str, value: float | str, word: str, number: str, most: float) -> None:
    """Raise `ConfigError` unless the value is above 0 or the given word."""
    if not isinstance(value, str):
        _above_zero(where, value, most)
    elif value != word:
        raise ConfigError(f'{where} = {value!r} must be {number} above 0, or "{word}"')
