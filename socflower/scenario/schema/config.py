"""The tables of a scenario file: keys, defaults, limits, descriptions; docs/reference/scenarios.md is made of them."""

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Annotated, Any, Self, TypeAlias

from pydantic import Field

from socflower.cluster.cluster_file import ClusterFile
from socflower.errors import ConfigError, SocflowerError
from socflower.field_rules import OneOf, Positive, unknown_key
from socflower.hierarchy.delayed_sync import DECAY, DOUBLING_EPOCHS, MOST_INTERVALS
from socflower.hierarchy.exchange.gradients import exchange_fault, gradient_coding
from socflower.hierarchy.exchange.models import NONE, TREE, compression_fault
from socflower.hierarchy.group_count import GROUP_RULES
from socflower.hierarchy.group_preemption import GROUPS, PREEMPTIONS, SOCS
from socflower.hierarchy.quorum import (
    GraceSeconds,
    Quorum,
    QuorumFraction,
)
from socflower.hierarchy.spare_socs import spares_fault
from socflower.peers.ring.settings import RingSettings
from socflower.precision import ALGORITHMS, MERGES, MIXING_RULES
from socflower.report.quality import ACCURACY, LOSS, Quality, quality_of
from socflower.scenario.schema.key_rules import is_set, require_reader, shown
from socflower.scenario.schema.outer import OUTER_SGD, OuterConfig
from socflower.scenario.schema.pipeline import LANGUAGE_MODELS, PipelineConfig
from socflower.scenario.schema.split import (
    CLICK_MODEL,
    GENERATOR,
    SPLIT_STRATEGIES,
    EdgeCloudConfig,
)
from socflower.scenario.schema.strategies import (
    CLUSTER_STRATEGIES,
    STRATEGIES,
    GroupStrategy,
    Strategy,
    family_of,
    group_strategy,
)
from socflower.scenario.schema.thermal import BackgroundLoadConfig, ThermalConfig
from socflower.strategies.settings import (
    MOST_EPOCHS,
    BatchSize,
    Compression,
    Epochs,
    ExchangeSettings,
    Fusion,
    GradientExchangeKind,
    IntervalEpochs,
    LeaderCompression,
    Leaders,
    NumSocs,
    OverlapBuckets,
    Streaming,
    UplinkTurns,
)
from socflower.toml_file import Table
from socflower.wire.message_keys import WIRES

ARITHMETICS = ("fp32", "int8", "mixed")
OPTIMIZERS = ("sgd", "adam", "adamw", "rmsprop", "muon")
_READ_BY_PIPELINES = (
    "name",
    "socs",
    "sync_interval_epochs",
    "rebalance",
    "rebalance_steps",
    "tolerate_client_errors",
)
_READ_BY_SPLITS = ("name", "socs", "sync_interval_epochs", "tolerate_client_errors")
REBALANCE = ("off", "shares", "groups", "both")
FAULT_KINDS = ("raise", "nan", "hang", "die", "preempt")

_FACTORY = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*")
_DEVICE = re.compile(r"[a-z]+(:\d+)?")
_HELD_OUT = 128
_READERS = {
    "rule": ("mixed",),
    "merge": ("mixed",),
    "algorithm": ("int8",),
    "gradient_bits": ("int8", "mixed"),
    "adaptive_rescaling": ("int8",),
    "unsupported": ("int8", "mixed"),
    "fp32_operators": ("int8", "mixed"),
    "wire": ("int8",),
}
"""The arithmetics that read a key of `[precision]`, for keys that not all of them read."""

_INT8_WIRE = ("fedavg", "local-sgd", "socflow")
_NO_SERVER_INTERVAL = ("tree-fedavg", "streaming-diloco", "post-local-sgd")
_COUNTED = "it needs a number of groups, and groups is 'auto'; give it"

_OF_LEADERS = ("leaders", "leader_compression")
"""Keys of `[strategy]` that only several groups read."""

_INSIDE_GROUPS = ("exchange", "compression")
INSIDE_GROUPS_OR_FIRST = ("overlap_buckets", "uplink_turns")
"""Keys that only groups of several SoCs read, and the first epochs of post-local SGD, which are of one."""

_OF_QUORUM = ("quorum", "grace_s")
"""Keys that they read even if the strategy has their number."""

Round = Annotated[int, Field(gt=0, le=MOST_INTERVALS)]


Rule = tuple[object, str, str]
"""Whether a rule is broken, the key that breaks it, and the reason with the remedy."""


class Factory(Table):
    """A table of a scenario that may name a function of the user's."""

    factory: str = Field(
        "",
        description=(
            "`package.module:function` of your own; the scenario's folder is on the import path"
        ),
    )
    arguments: dict[str, Any] = Field({}, description="keyword arguments of `factory`")

    def check(self) -> None:
        """Refuse a factory that cannot be imported by its name, and arguments without a factory."""
        if self.factory and not _FACTORY.fullmatch(self.factory):
            raise ConfigError(f'factory = {self.factory!r}: write "package.module:function"')
        if self.arguments and not self.factory:
            raise ConfigError(f"arguments = {self.arguments} are for a factory; name one")


class ModelConfig(Factory):
    """`[model]`"""

    factory: str = Field(
        "",
        description=(
            "`package.module:function` that returns your own nn.Module; [how](#your-own-model-and-data)"
        ),
    )
    name: str = Field(
        default_factory=lambda table: table.get("factory") or "lenet5",
        description=(
            "`lenet5`, `vgg11`, `vgg16`, `vgg19`, `resnet18`, `resnet34`, `mobilenet-v1`, or small relatives for "
            "32×32 images: `vgg-small` (six convolutions, 0.31 M parameters), `vgg-mini` (three, 69 "
            "thousand), `vgg-tiny` (63 thousand) and `resnet8` (BatchNorm and residuals, 78 thousand), or `resnet50`, "
            "`mobilenet-v2`, `mobilenet-v3`, `efficientnet-b1`, `inception-v3`. With [a pipeline]"
            "(#pipeline) also `bert-small` and `gpt-small`, with [a cloud](#edgecloud) `click-model` and "
            "`digit-generator`. Default: `lenet5`, or the `factory`"
        ),
    )
    pretrained: str = Field(
        "",
        description=(
            "an `.npz` of weights to begin with, as `--save-model` writes it, beside this file; those of the last "
            "layer, whose classes differ, stay random"
        ),
    )


class DataConfig(Factory):
    """`[data]`"""

    factory: str = Field(
        "", description="`package.module:function` that returns your own training and test data"
    )
    name: str = Field(
        default_factory=lambda table: table.get("factory") or "digits",
        description=(
            "`digits` (4,000 training and 1,000 test images of MNIST, embedded); `mnist`, `fashion-mnist`, "
            "`cifar10`: from the folder named "
            "by `SOCFLOWER_DATA` (`mnist/train.parquet`, `mnist/test.parquet`, …; or the published idx files), else "
            "`fashion-mnist` from Debian's package `dataset-fashion-mnist`, else from the Hugging Face hub with "
            "`socflower[hub]`; with `click-model` `clicks`, 60,000 generated samples in the "
            "shape of MovieLens. Default: "
            "`digits`, or the `factory`"
        ),
    )
    partition: Annotated[str, OneOf(("iid", "dirichlet"))] = Field(
        "iid", description=("how data are spread over SoCs; `dirichlet` is label skew")
    )
    alpha: float = Field(
        0.5, gt=0, description="of the Dirichlet distribution; smaller is more uneven"
    )

    def check(self) -> None:
        """Refuse an unevenness of even parts."""
        super().check()
        require_reader(self, "partition", {"alpha": ("dirichlet",)})


class TrainConfig(Table):
    """`[train]`"""

    epochs: Epochs = Field(10, description="passes over the data")
    batch_size: BatchSize = Field(
        64,
        description=(
            "of a group for `socflow`, of all SoCs together for `ring` and `sgd`, of one client "
            "for `fedavg`, of each edge "
            "with a cloud"
        ),
    )
    learning_rate: float = Field(0.01, gt=0, description="of the optimiser")
    optimizer: Annotated[str, OneOf(OPTIMIZERS)] | None = Field(
        None,
        description=(
            "default: `sgd`, with `diloco` `adamw`, with `muloco` `muon`; int8 and mixed training know `sgd` only; "
            "`muon` is Muon for hidden layers, kernels as matrices, and AdamW for the first and the last layer, biases "
            "and norms"
        ),
    )
    momentum: float | None = Field(
        None,
        ge=0,
        lt=1,
        description=(
            "of SGD; refused with other optimisers and `niti`, which have none; default: 0.9, and 0 with `niti`"
        ),
    )
    weight_decay: float = Field(
        0.0, ge=0, description="of SGD, Adam and RMSprop in the gradient, else decoupled"
    )
    schedule: Annotated[str, OneOf(("cosine", "constant", "multi-step", "exponential"))] = Field(
        "cosine",
        description=(
            "of the learning rate; `cosine` is zero at the end, `multi-step` is multiplied by `decay_factor` at each "
            "of `milestones`, `exponential` after every epoch"
        ),
    )
    milestones: tuple[Annotated[int, Field(ge=1)], ...] = Field(
        (), description="epochs after which a `multi-step` rate falls"
    )
    decay_factor: float = Field(
        0.1, gt=0, le=1, description="of `multi-step` and `exponential` schedules"
    )
    device: str = Field(
        "cpu",
        description=(
            "torch device of clients and evaluation: `cpu`, `cuda`, `cuda:1`, `mps`, or `auto`: each machine's "
            "accelerator, else its CPU; weights depend on it"
        ),
    )
    local_epochs: Epochs = Field(
        1,
        description="epochs of a client of `fedavg` or `tree-fedavg` in a round; `epochs` must be a multiple",
    )
    reduction: Annotated[str, OneOf(("auto", "always", "ring"))] = Field(
        "auto",
        description=(
            "`auto`: members of a group have passes of their own only in models with BatchNorm; `always`: in all, as "
            "in a real ring; `ring`: their gradients are summed in its order too, to the bits of a "
            "[real one](guides/deployment.md#rings) over gRPC, or over gloo with groups of two"
        ),
    )
    reply_timeout_s: float = Field(
        3600.0,
        gt=0,
        le=1e7,
        description=("real seconds after which a client that does not answer is given up on"),
    )

    def check(self) -> None:
        """Refuse names of no device, momentum without SGD, a schedule that cannot be, and local epochs."""
        if not _DEVICE.fullmatch(self.device):
            raise ConfigError(f"device = {self.device!r}: write auto, cpu, cuda, cuda:1 or mps")
        if self.momentum and self.optimizer is not None:
            require_reader(self, "optimizer", {"momentum": ("sgd",)})
        require_reader(
            self,
            "schedule",
            {"milestones": ("multi-step",), "decay_factor": ("multi-step", "exponential")},
        )
        rises = list(self.milestones) == sorted(set(self.milestones))
        if self.schedule == "multi-step" and (
            not self.milestones or not rises or self.milestones[-1] >= self.epochs
        ):
            raise ConfigError(
                f"{shown(self, 'milestones')}: a multi-step schedule needs rising epochs below epochs = {self.epochs}"
            )
        if self.epochs % self.local_epochs:
            raise ConfigError(
                f"epochs = {self.epochs} must be a multiple of local_epochs = {self.local_epochs}"
            )


class PrecisionConfig(Table):
    """`[precision]`: the arithmetic of the clients' training."""

    arithmetic: Annotated[str, OneOf(ARITHMETICS)] = Field(
        "fp32",
        description=(
            "`fp32` is torch, `int8` socflower's integer kernels, `mixed` both for each batch"
        ),
    )
    rule: Annotated[str, OneOf(MIXING_RULES)] = Field(
        "paper",
        description=(
            "of mixed training, how a batch is split; [what they mean](guides/precision.md#cpu-and-npu-at-once)"
        ),
    )
    merge: Annotated[str, OneOf(MERGES)] = Field(
        "gradients",
        description=(
            "of mixed training: `gradients` of both processors in every step, or the `weights` of FP32 and of an int8 "
            "model of each NPU's own at every synchronisation (Eq. 5); then alpha falls"
        ),
    )
    held_out: int = Field(
        default_factory=lambda table: _HELD_OUT if table.get("arithmetic") == "mixed" else 0,
        ge=0,
        description=(
            "training samples set aside, on which mixed training measures alpha; with `fp32` and `int8` for a "
            "comparison on equal samples; default: 128 with `mixed`, else 0"
        ),
    )
    algorithm: Annotated[str, OneOf(tuple(ALGORITHMS))] = Field(
        "real-scales",
        description=(
            "of int8 training: `real-scales` (FP32 master weights, FP32's learning rates), `niti` (int8 weights, "
            "integer update), `adaptive-fixed-point` (FP32 master weights, powers of two as scales) or `wageubn` (the "
            "same with masters of 24 bits between -1 and 1 and gradients of weights in int8)"
        ),
    )
    gradient_bits: tuple[Annotated[int, Field(ge=0, le=7)], ...] = Field(
        (5, 4, 3),
        description=(
            "three numbers, of `niti` and of `merge` `weights`, from the beginning, from half and from three quarters "
            "of training; fewer are smaller steps"
        ),
    )
    adaptive_rescaling: bool = Field(
        True,
        description=(
            "of int8 training: look for the exponents of int8 tensors now and then; false: in every batch"
        ),
    )
    unsupported: Annotated[str, OneOf(("refuse", "fp32"))] = Field(
        "fp32",
        description=(
            "of int8 and mixed training, what becomes of operators that int8 lacks: run them in "
            "`fp32`, or `refuse` the model before round 1"
        ),
    )
    wire: Annotated[str, OneOf(WIRES)] = Field(
        "float32",
        description=(
            "of int8 training with `fedavg`, `local-sgd` and `socflow`, how models travel to the hub and back: "
            "`float32`, or `int8`: int8 weights with a scale for each tensor; what that leaves out of the mean is "
            "added to the next one"
        ),
    )
    fp32_operators: tuple[Annotated[str, Field(pattern=r"\S")], ...] = Field(
        (),
        description=(
            "of int8 and mixed training, operators of the int8 model that run in FP32; in a file also the name of one "
            "by `socflower profile --out` (`FILE.part.json`) or `--json`: those that its placement has in FP32"
        ),
    )

    def check(self) -> None:
        """Refuse keys that the arithmetic does not read, unless they have their defaults."""
        if self.arithmetic == "mixed" and not self.held_out:
            raise ConfigError("held_out = 0 must be 1 or more with arithmetic = 'mixed'")
        if len(self.gradient_bits) != 3:
            raise ConfigError(f"{shown(self, 'gradient_bits')}: need three numbers")
        require_reader(self, "arithmetic", _READERS)
        if self.arithmetic == "mixed":
            require_reader(self, "merge", {"gradient_bits": ("weights",)})
        else:
            require_reader(self, "algorithm", {"gradient_bits": ("niti",)})

    def under(self, arithmetic: str) -> "PrecisionConfig":
        """Return the table with another arithmetic, without the keys that only the present one reads."""
        if arithmetic == self.arithmetic:
            return self
        kept = {
            key: getattr(self, key)
            for key in PrecisionConfig.model_fields
            if key not in ("arithmetic", "held_out", "gradient_bits")
            and is_set(self, key)
            and arithmetic in _READERS.get(key, ARITHMETICS)
        }
        own_default = _HELD_OUT if self.arithmetic == "mixed" else 0
        # Mixed training measures alpha on held-out samples, so it cannot have none.
        if self.held_out not in (0, own_default):
            kept["held_out"] = self.held_out
        return PrecisionConfig(arithmetic=arithmetic, **kept)


class StrategyConfig(Table):
    """`[strategy]`"""

    name: Annotated[str, OneOf(STRATEGIES)] = Field(
        "socflow",
        description=(
            "".join(f"`{name}`: {kind.about}; " for name, kind in STRATEGIES.items() if kind.about)
            + "the others train with [a cloud](#edgecloud)"
        ),
    )
    groups: NumSocs | Annotated[str, OneOf(("auto",))] = Field(
        "auto",
        description=(
            'number of groups; "auto" [tries them out](concepts/planning.md#how-many-groups); of `2d`, '
            'where "auto" is that of the least predicted time; with `local-sgd`, `diloco` and their like "auto" is one '
            "for each SoC"
        ),
    )
    group_rule: Annotated[str, OneOf(GROUP_RULES)] = Field(
        "time",
        description=(
            'of groups = "auto": `time` takes the number whose accuracy is best after equal time, `paper` the last '
            "before the accuracy of the first epoch is below 0.15"
        ),
    )
    socs: NumSocs | None = Field(None, description="how many slots take part; default: all")
    sync_interval_epochs: IntervalEpochs = Field(
        "decay",
        description=(
            'epochs between synchronisations; "decay" is 0.25, doubled every `doubling_epochs`, up to 2; '
            "`ring`, `sgd` and `tree-fedavg` ignore it, `2d` refuses it; of training with a [cloud](#edgecloud) "
            "those between two averagings, evaluations and [checkpoints](#interrupted-runs), by default 1"
        ),
    )
    doubling_epochs: Epochs = Field(
        DOUBLING_EPOCHS,
        description='with "decay", after how many epochs the interval doubles; GN of SoCFlow+',
    )
    post_local_epochs: Epochs | None = Field(
        None,
        description="of `post-local-sgd`, its synchronous epochs; default: half of all, rounded down",
    )
    server_interval: Epochs = Field(
        1,
        description=(
            "every how many synchronisations all servers of a [site](#site) take part, and "
            "not only the groups of each; "
            "`ring` and `sgd` ignore it"
        ),
    )
    reshuffle: bool = Field(
        True,
        description=(
            "deal all data to the groups again at a synchronisation that ends an epoch; false "
            "where data must stay: each "
            "SoC trains on its own, in an order of its own"
        ),
    )
    dispatch: bool = Field(
        False,
        description=(
            "the hub sends each group the samples of its interval, and nodes load no data; false: every node holds all "
            "data. In rings of real machines each member is sent those of its group"
        ),
    )
    uplink_turns: UplinkTurns = Field(
        "auto",
        description=(
            'groups that share an uplink exchange in turn; "auto" takes, for each new plan, the way that is '
            "[predicted to be faster](concepts/planning.md#who-exchanges-when)"
        ),
    )
    overlap_buckets: OverlapBuckets = Field(
        1,
        description=(
            "parts of the backward pass whose gradients are exchanged while the next part is "
            "computed; 1 means no overlap"
        ),
    )
    exchange: GradientExchangeKind = Field(
        "ring",
        description=(
            "members of a group exchange gradients in a ring, or with the first of them as parameter server"
        ),
    )
    compression: Compression = Field(
        "none",
        description=(
            "what members of a group [exchange instead](guides/groups.md#fewer-bytes) of FP32 gradients, with "
            'its options: "powersgd rank=2"'
        ),
    )
    leaders: Leaders = Field(
        "auto",
        description=(
            "how the leaders of groups [exchange "
            "models](concepts/planning.md#when-groups-synchronise): over the hub, in a "
            'ring, or by board and server; "auto" takes, for each new plan, the way that is predicted to be quickest'
        ),
    )
    leader_compression: LeaderCompression = Field(
        "none",
        description=(
            'leaders in a ring or tree ("auto" leaves out the star) exchange their models\' changes in halves, or with '
            "error feedback in eight bits, or in a ring in four, which from 16 groups on takes more bytes than "
            "`none`"
        ),
    )
    fusion: Fusion = Field(
        "buckets",
        description=(
            "what costs a [message](concepts/virtual-time.md#messages) in virtual time: each of the "
            "`overlap_buckets`, as rings of real machines send them, or each tensor, as in SoCFlow+"
        ),
    )
    quorum: QuorumFraction = Field(
        1.0,
        description=(
            "part of the groups whose answers [end a synchronisation](guides/groups.md#late-groups); the others are "
            "late: they continue, and count when they arrive, or lose their work after ten synchronisations"
        ),
    )
    grace_s: GraceSeconds = Field(
        0.0,
        description=(
            "seconds after the quorum in which other groups still count; real ones on real machines"
        ),
    )
    preemption: Annotated[str, OneOf(PREEMPTIONS)] = Field(
        SOCS,
        description=(
            "what ends if a user takes a SoC: its own work (`socs`), so that its group continues without it; or that "
            "of its group (`groups`), whose interval is lost and whose SoCs rest until none of them is taken, as in "
            "SoCFlow+. One group always stays. In rings of real machines the group ends at the next synchronisation"
        ),
    )
    use_spares: bool = Field(
        False,
        description=(
            "SoCs of the cluster beyond `socs` stand in at synchronisations for those that are away and, with "
            "`rebalance`, for slower ones"
        ),
    )
    tolerate_client_errors: bool = Field(
        False,
        description=(
            "leave out a group whose client raises, instead of ending the run, or of a ring of "
            "real machines the member"
        ),
    )
    rebalance: Annotated[str, OneOf(REBALANCE)] = Field(
        "off",
        description=(
            "what [follows the speeds](guides/heat.md#re-balancing-in-socflow) of SoCs: `shares` of a group's batch, "
            "`groups` (SoCs of a board change groups between rounds; shares follow) or `both`"
        ),
    )
    rebalance_steps: int = Field(
        10,
        ge=0,
        le=MOST_EPOCHS,
        description=(
            "with `shares` and `both`, after how many steps the members of a group look at "
            "their speeds; 0: only between "
            "rounds"
        ),
    )
    streaming: Streaming | None = Field(
        None, description="table of `streaming-diloco`: the fragments of a model, and their delay"
    )
    outer: OuterConfig | None = Field(
        None,
        description=(
            "table of the strategy that [makes the next model](guides/groups.md#outer-strategies) of the groups' "
            "models: its class in small letters and its arguments"
        ),
    )

    def check(self) -> None:
        """Refuse an outer strategy for one group, and keys that need the number of groups without it."""
        if STRATEGIES[self.name].is_pipeline:
            # A pipeline reads none of this; `ScenarioFile` refuses it.
            return
        require_reader(self, "sync_interval_epochs", {"doubling_epochs": (DECAY,)})
        ExchangeSettings(
            exchange=self.exchange,
            compression=self.compression,
            leaders=self.leaders,
            leader_compression=self.leader_compression,
        )
        Quorum(fraction=self.quorum, grace_s=self.grace_s)
        interval, outer = shown(self, "server_interval"), self.outer_step
        counted = outer is not None and outer.counts_groups
        for broken, key, why in (
            (
                outer and not takes_outer(self.name),
                "outer",
                f"name = {self.name!r} has one group; leave it out",
            ),
            (counted and self.groups == "auto", f"outer.name = {outer and outer.name!r}", _COUNTED),
            (
                self.server_interval > 1 and self.name in _NO_SERVER_INTERVAL,
                interval,
                f"name = {self.name!r} does not read it; leave it out",
            ),
            (self.server_interval > 1 and self.groups == "auto", interval, _COUNTED),
            (
                self.server_interval > 1 and self.leader_compression != NONE,
                interval,
                f"{shown(self, 'leader_compression')} needs all groups at every synchronisation; leave one out",
            ),
            (
                self.server_interval > 1 and outer,
                interval,
                "outer needs all groups at every synchronisation; leave one out",
            ),
            (
                self.quorum < 1 and self.server_interval > 1,
                interval,
                "quorum needs all groups' leaders at the hub; leave one out",
            ),
        ):
            if broken:
                raise ConfigError(f"{key}: {why}")

    def under(self, name: str, **changes: Any) -> Self:
        """Return the table under another strategy, without the keys that only groups, or several groups, read."""
        keys: Collection[str] = ()
        if STRATEGIES[name].is_pipeline:
            unread_by_grids = STRATEGIES[name].unread_keys & {"sync_interval_epochs"}
            keys = set(StrategyConfig.model_fields) - set(_READ_BY_PIPELINES) | unread_by_grids
        elif not several_groups(name):
            keys = ("outer", "group_rule", *_OF_LEADERS)
        kind = STRATEGIES[name] if exchanges_gradients(name) else None
        for key in ("exchange", "compression"):
            if not isinstance(kind, GroupStrategy) or getattr(kind, key) is not None:
                keys = {*keys, key}
        if STRATEGIES[name].is_alone:
            # They have as many groups, and an outer step of their own.
            keys = {*keys, "groups", "outer", "group_rule", *_INSIDE_GROUPS}
            if not STRATEGIES[name].is_synchronous_first:
                keys = {*keys, *INSIDE_GROUPS_OR_FIRST}
        for key, is_read in (
            ("post_local_epochs", STRATEGIES[name].is_synchronous_first),
            ("streaming", STRATEGIES[name].is_streaming),
        ):
            if not is_read:
                keys = {*keys, key}
        if not may_have_late_groups(name):
            keys = {*keys, *_OF_QUORUM}
        if name == self.name:
            keys = ()
        interval = changes.get("sync_interval_epochs", self.sync_interval_epochs)
        unread = STRATEGIES[name].unread_keys
        if interval != DECAY or "doubling_epochs" in unread:
            keys = {*keys, "doubling_epochs"}
        keys = {*keys, *unread.intersection(("preemption", "dispatch", "use_spares"))}
        left_out = {key: StrategyConfig.model_fields[key].default for key in keys}
        return self.replaced(**{"name": name, **left_out, **changes})

    @property
    def outer_step(self) -> OuterConfig | None:
        """`outer`, or the outer step that the strategy has without it; None if it averages."""
        own = STRATEGIES[self.name].outer
        return self.outer or (OuterConfig(name=own) if own else None)


def several_groups(strategy: str) -> bool:
    """Return whether a strategy has several groups. These exchange models, and may have an outer strategy."""
    kind = STRATEGIES[strategy]
    return isinstance(kind, GroupStrategy) and kind.num_groups is None


def may_have_late_groups(strategy: str) -> bool:
    """Return whether a strategy has groups, not one only, whose rounds need not wait for all."""
    kind = STRATEGIES[strategy]
    waits = kind.is_synchronous_first or kind.is_streaming or kind.has_local_epochs
    return isinstance(kind, GroupStrategy) and kind.num_groups != 1 and not waits


def takes_outer(strategy: str) -> bool:
    """Return whether a Flower strategy may make the next model of the models that a strategy's replies bring."""
    return several_groups(strategy) or strategy == "fedavg"


def exchanges_gradients(strategy: str) -> bool:
    """Return whether a strategy has groups of several members, which exchange gradients."""
    kind = STRATEGIES[strategy]
    return isinstance(kind, GroupStrategy) and kind.num_socs != 1


OwnSettings: TypeAlias = dict[str, Any]
"""`[compare.train.NAME]`: a strategy's own values for keys of [train] and [strategy]."""


def own_settings_by_table(
    values: Mapping[str, Any], at: str = "[compare.train]"
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the values of keys of [train], and of [strategy]; `ConfigError` for a key that neither has."""
    of_train = {key: value for key, value in values.items() if key in TrainConfig.model_fields}
    others = {key: value for key, value in values.items() if key not in of_train}
    known = [*TrainConfig.model_fields, *StrategyConfig.model_fields]
    # Another strategy would be another row of the comparison.
    known.remove("name")
    for key, value in others.items():
        if key not in known:
            raise ConfigError(unknown_key(key, value, known, at))
    return of_train, others


class PredictedEpoch(Table):
    """`[[compare.predict]]`: an epoch that is predicted on the same cluster and groups, and not trained."""

    model: str = Field(description="as `name` of [model]")
    data: str = Field("cifar10", description="as `name` of [data]")
    batch_size: BatchSize = Field(64, description="as in [train]")
    arithmetic: Annotated[str, OneOf(ARITHMETICS)] = Field("fp32", description="as in [precision]")


class CompareConfig(Table):
    """`[compare]`: what `socflower compare` runs."""

    strategies: tuple[Annotated[str, OneOf(STRATEGIES)], ...] = Field(
        CLUSTER_STRATEGIES,
        min_length=1,
        description=(
            "what runs; `--strategies a,b` overrides it; with a cloud the default is all of those but `splitfed`"
        ),
    )
    target_accuracy: float | None = Field(
        None,
        description=(
            "accuracy that all are timed to; default: one point below the lowest final accuracy"
        ),
    )
    target_loss: float | None = Field(
        None,
        description=(
            "the same for the loss on the test data, by which models are judged then, as are those without accuracy; "
            "default: 1 % above the highest final loss"
        ),
    )
    train: dict[str, OwnSettings] = Field(
        {},
        description=(
            "tables `[compare.train.NAME]`, a strategy's own values for keys of [train] and [strategy], such as `socs`"
        ),
    )
    epochs_to_target: dict[str, Positive] = Field(
        {},
        description=(
            "`NAME = EPOCHS`: what strategies with these settings needed to the target in earlier trainings, by which "
            "`--front` predicts their time and energy to it"
        ),
    )
    predict: tuple[PredictedEpoch, ...] = Field(())

    def target_of(self, results: Sequence[Mapping[str, Any]]) -> tuple[Quality, float | None]:
        """Return the metric that results are judged by, and its target, if the table has one."""
        if self.target_loss is not None or quality_of(results) is LOSS:
            return LOSS, self.target_loss
        return ACCURACY, self.target_accuracy

    def check(self) -> None:
        """Refuse settings of an unknown strategy, and two targets."""
        if self.target_accuracy is not None and self.target_loss is not None:
            raise ConfigError("target_accuracy and target_loss are both given; keep one")
        for key in ("train", "epochs_to_target"):
            for name in getattr(self, key):
                if name not in STRATEGIES:
                    raise ConfigError(
                        f"{key}.{name}: there is no such strategy; use one of {', '.join(STRATEGIES)}"
                    )
        if self.epochs_to_target and self.target_accuracy is self.target_loss is None:
            raise ConfigError("epochs_to_target: to which? give target_accuracy or target_loss")


NEED_WORKERS = ("hang", "die")
"""Faults that would end this process if the client ran in it."""


class EventConfig(Table):
    """`[[event]]`: a fault of a SoC's client in one round, or "preempt": its user takes the SoC for some rounds."""

    kind: Annotated[str, OneOf(FAULT_KINDS)] = Field(
        description=(
            "`nan` answers NaN, with `die` the process exits, with `preempt` it leaves for its user's work; "
            "`hang` (give it a short `reply_timeout_s`) and `die` need worker processes"
        )
    )
    soc: int = Field(
        ge=0,
        description=(
            "whose client; a group in one process suffers what any of its members does, in a ring each suffers its own"
        ),
    )
    round: Round = Field(
        description='in which round, from 1; not in the warm-up of `groups = "auto"`'
    )
    rounds: Round = Field(
        1, description="of `preempt`: for how many rounds its user has it, that one included"
    )
    at: float = Field(
        0.5,
        ge=0,
        lt=1,
        description="of `preempt`: after which part of that round's steps it leaves",
    )

    def check(self) -> None:
        """Refuse what only a preemption has for other kinds."""
        require_reader(self, "kind", {"rounds": ("preempt",), "at": ("preempt",)})


class ScenarioFile(ClusterFile):
    """A scenario file; the tables of its cluster are those of a cluster file."""

    seed: int = Field(
        1,
        ge=0,
        le=2**32 - 1,
        description=(
            "of the initial weights, the partition, the order of the data, and links to a cloud"
        ),
    )
    model: ModelConfig = ModelConfig()
    data: DataConfig = DataConfig()
    train: TrainConfig = TrainConfig()
    precision: PrecisionConfig = PrecisionConfig()
    strategy: StrategyConfig = StrategyConfig()
    ring: RingSettings = RingSettings()
    compare: CompareConfig = CompareConfig()
    events: tuple[EventConfig, ...] = Field((), alias="event")
    # Without this table there is no heat.
    thermal: ThermalConfig | None = None
    # Without this table there are no other users.
    background_load: BackgroundLoadConfig | None = None
    # Without this table there is no cloud.
    edgecloud: EdgeCloudConfig | None = None
    # Without this table a pipeline has its defaults.
    pipeline: PipelineConfig | None = None
    expect: dict[str, int | float] = Field({})

    def check(self) -> None:
        """Refuse tables that do not go together."""
        ClusterFile.check(self)
        self._compare_what_fits()
        for rules in (
            self._rules_of_groups,
            self._rules_of_clouds,
            self._rules_of_arithmetic,
            self._rules_of_pipelines,
            self._rules_of_comparisons,
        ):
            for broken, key, why in rules():
                if broken:
                    raise ConfigError(f"{key}: {why}")
        for name, own in self.compare.train.items():
            self._require_own(name, own)

    def _compare_what_fits(self) -> None:
        """Replace the strategies that are compared by default with those of this scenario's family."""
        if self.compare.strategies != CLUSTER_STRATEGIES or not (self.is_split or self.is_pipeline):
            return
        fitting: tuple[str, ...] = (self.strategy.name, *CLUSTER_STRATEGIES[1:])
        if self.is_split:
            fitting = tuple(name for name in self._family if name != "splitfed")
        # The table is frozen; this is the only default that depends on another table.
        object.__setattr__(self, "compare", self.compare.replaced(strategies=fitting))

    def _rules_of_groups(self) -> Iterator[Rule]:
        """Yield what several groups, their leaders and their servers need."""
        strategy, groups = self.strategy, self.strategy.groups
        num_servers = self.site.servers if self.site else 1
        if strategy.server_interval > 1:
            yield (
                not 1 < num_servers <= int(groups),
                self._at("strategy", "server_interval"),
                f"it is for [site] servers with a group each; there are {num_servers}, and {groups} "
                "groups",
            )
        if not several_groups(strategy.name) or groups == 1:
            name = "groups is 1" if several_groups(strategy.name) else f"name is {strategy.name!r}"
            for key in _OF_LEADERS:
                why = f"it is for leaders of several groups, and {name}; leave it out"
                yield is_set(strategy, key), self._at("strategy", key), why
        yield from self._rules_of_preemption()
        yield from self._rules_of_dispatch()
        if strategy.use_spares:
            # Whether there are spare ones is known with the cluster.
            fault = spares_fault(1, reshuffle=strategy.reshuffle, preemption=strategy.preemption)
            yield fault, self._at("strategy", "use_spares"), fault
        first = self._kind.is_synchronous_first
        yield (
            strategy.post_local_epochs is not None and not first,
            self._at("strategy", "post_local_epochs"),
            f"{self._name} does not read it; leave it out",
        )
        yield (
            first and not 1 <= self.synchronous_epochs < self.train.epochs,
            self._at("strategy", "post_local_epochs"),
            f"of {self._at('train', 'epochs')}; leave at least one before and one after the switch",
        )
        for key in ("compression", "server_interval"):
            why = f"{self._name} has groups of two plans; leave it out"
            yield first and is_set(strategy, key), self._at("strategy", key), why
        yield from self._rules_of_streaming()
        for key, fitting in (("groups", "auto"), ("leaders", "tree")):
            why = f"{self._name} trains on each SoC alone and sums in a tree; leave it out"
            has_own = is_set(strategy, key) and getattr(strategy, key) != fitting
            yield self._kind.has_local_epochs and has_own, self._at("strategy", key), why
        yield from self._rules_of_late_groups()
        chosen = several_groups(strategy.name) and groups == "auto" and not self._kind.is_alone
        yield (
            is_set(strategy, "group_rule") and not chosen,
            self._at("strategy", "group_rule"),
            f"it is for groups = 'auto', and {self._at('strategy', 'groups')} and {self._name}; leave it out",
        )
        yield from self._rules_of_exchanges()
        yield (
            is_set(self.train, "local_epochs") and "local_epochs" in self._kind.unread_keys,
            self._at("train", "local_epochs"),
            f"{self._name} does not read it; leave it out, or give it in [compare.train.fedavg]",
        )
        yield from self._rules_of_leaders()

    def _rules_of_late_groups(self) -> Iterator[Rule]:
        """Yield what a round that does not wait for all groups needs."""
        strategy = self.strategy
        late_groups, quorum = may_have_late_groups(strategy.name), self._at("strategy", "quorum")
        for key in _OF_QUORUM:
            why = f"it is for strategies of several groups, and {self._name}; leave it out"
            yield is_set(strategy, key) and not late_groups, self._at("strategy", key), why
        kind = STRATEGIES[strategy.name]
        if strategy.quorum < 1 and isinstance(kind, GroupStrategy):
            counted = kind.groups(strategy.groups, 0)
            yield counted == "auto", quorum, _COUNTED
            if counted not in ("auto", 0):
                self.quorum.require_some_late(int(counted))
            arithmetic = self._at("precision", "arithmetic")
            why = (
                f"{arithmetic}, and changes of late groups' models are added in FP32; leave it out"
            )
            yield self.precision.arithmetic != "fp32", quorum, why

    def _rules_of_exchanges(self) -> Iterator[Rule]:
        """Yield what an exchange of gradients inside groups needs."""
        strategy = self.strategy
        compression, (exchange, coding) = (
            self._at("strategy", "compression"),
            self.gradient_exchange,
        )
        alone = not exchanges_gradients(strategy.name)
        for broken, key in (
            (is_set(strategy, "exchange") and (alone or exchange != strategy.exchange), "exchange"),
            (
                strategy.compression != NONE and (alone or coding != strategy.compression),
                "compression",
            ),
        ):
            why = f"{self._name} {'does not read' if alone else 'decides'} it; leave it out"
            yield broken, self._at("strategy", key), why
        fault = exchange_fault(exchange, gradient_coding(coding))
        yield fault, self._at("strategy", "compression"), fault
        yield (
            gradient_coding(coding).applies_momentum and self.optimizer != "sgd",
            compression if strategy.compression != NONE else self._name,
            f"it takes over SGD's momentum, and {self._at('train', 'optimizer')}; use another one",
        )

    def _rules_of_leaders(self) -> Iterator[Rule]:
        """Yield what an exchange of models between leaders needs."""
        strategy = self.strategy
        needs_models = self.hub_needs_models
        yield (
            needs_models and self.leaders != "star",
            self._at("strategy", "leaders"),
            f"{needs_models} needs each group's model, and not their mean; use 'star'",
        )
        compressed = self._at("strategy", "leader_compression")
        yield (
            needs_models and strategy.leader_compression != NONE,
            compressed,
            f"{needs_models} needs each group's model, and not their mean; leave it out",
        )
        fault = compression_fault(self.leaders, strategy.leader_compression)
        yield fault, compressed, f"{fault}; leave one out"

    def _rules_of_dispatch(self) -> Iterator[Rule]:
        """Yield what needs data at the nodes."""
        arithmetic = self._at("precision", "arithmetic")
        measures = f"{arithmetic} measures alpha on samples that nodes hold"
        for broken, why in (
            (not self.strategy.reshuffle, "reshuffle = False leaves data where they are"),
            (self.precision.arithmetic == "mixed", measures),
        ):
            is_broken = self.strategy.dispatch and broken
            yield is_broken, self._at("strategy", "dispatch"), f"{why}; leave one of the two out"

    def _rules_of_preemption(self) -> Iterator[Rule]:
        """Yield methods that do not read keys of some groups only, and what does not let whole groups end."""
        strategy, preemption = self.strategy, self._at("strategy", "preemption")
        for key in ("doubling_epochs", "preemption", "dispatch", "use_spares"):
            is_unread = is_set(strategy, key) and key in self._kind.unread_keys
            why = f"{self._name} does not read it; leave it out"
            yield is_unread, self._at("strategy", key), why
        yield (
            self._kind.is_grid and is_set(strategy, "sync_interval_epochs"),
            self._at("strategy", "sync_interval_epochs"),
            f"{self._name} sums gradients in each mini-batch, not later; leave it out, or use name = 'socflow'",
        )
        if strategy.preemption != GROUPS:
            return
        rebalance, quorum = self._at("strategy", "rebalance"), self._at("strategy", "quorum")
        for broken, why in (
            (strategy.groups == 1, "groups = 1, and one group always stays"),
            (strategy.rebalance in ("groups", "both"), f"{rebalance} moves SoCs between groups"),
            (strategy.quorum < 1, f"{quorum} keeps the work of groups that are late"),
        ):
            yield broken, preemption, f"{why}; leave one of the two out"

    def _rules_of_streaming(self) -> Iterator[Rule]:
        """Yield what fragments of a model do not allow."""
        strategy, said = self.strategy, f"{self._name} exchanges fragments of the model"
        if not self._kind.is_streaming:
            why = f"it is for name = 'streaming-diloco', and {self._name}; leave it out"
            yield strategy.streaming is not None, "[strategy.streaming]", why
            return
        interval = strategy.sync_interval_epochs
        outer, arithmetic = strategy.outer_step, self.precision.arithmetic
        for broken, key, why in (
            (isinstance(interval, str), "sync_interval_epochs", "give a number of epochs"),
            (strategy.groups != "auto", "groups", "each SoC is one; leave it out"),
            (strategy.server_interval > 1, "server_interval", "leave it out"),
        ):
            yield broken, self._at("strategy", key), f"{said}; {why}"
        yield (
            outer and outer.name not in OUTER_SGD,
            f"[strategy.outer] name = {outer and outer.name!r}",
            f"{said}; use one of {', '.join(OUTER_SGD)}",
        )
        yield arithmetic != "fp32", self._at("precision", "arithmetic"), f"{said}; use 'fp32'"

    def _rules_of_arithmetic(self) -> Iterator[Rule]:
        """Yield what training in integers does not know."""
        train, arithmetic = self.train, self.precision.arithmetic
        outer, said = self.strategy.outer_step, self._at("precision", "arithmetic")
        in_int8, in_integers = arithmetic == "int8", arithmetic != "fp32"
        for broken, key, instead in (
            (in_integers and self.optimizer != "sgd", "optimizer", "'sgd'"),
            (in_integers and train.device not in ("auto", "cpu"), "device", "'cpu'"),
            (self._trains_by_niti and train.weight_decay, "weight_decay", "0"),
            (in_int8 and train.reduction != "auto", "reduction", "'auto'"),
        ):
            yield broken, self._at("train", key), f"{said} does not know it; use {instead}"
        yield (
            self.optimizer == "muon" and (self.is_pipeline or self.is_split),
            self._at("train", "optimizer"),
            f"it needs the whole model, and {self._name} divides it; use 'adamw'",
        )
        yield (
            train.momentum and self.optimizer != "sgd",
            self._at("train", "momentum"),
            f"it is for 'sgd', and {self._name} trains by {self.optimizer!r}; leave it out, or give optimizer",
        )
        yield (
            self.strategy.name == "muloco" and self.optimizer != "muon",
            self._at("train", "optimizer"),
            f"{self._name} is 'diloco' with 'muon'; use name = 'diloco'",
        )
        yield (
            train.momentum and self._trains_by_niti and not self.is_split,
            self._at("train", "momentum"),
            f"{self._at('precision', 'algorithm')} has none; leave it out, or use 'real-scales'",
        )
        yield (
            arithmetic == "mixed" and self._kind.has_local_epochs,
            said,
            f"{self._name} prices whole epochs, and alpha is measured by steps; use 'fp32' or 'int8'",
        )
        yield (
            self.precision.wire != "float32" and self.strategy.name not in _INT8_WIRE,
            self._at("precision", "wire"),
            f"it is for {' and '.join(map(repr, _INT8_WIRE))}, and {self._name}; leave it out",
        )
        yield (
            self.precision.merge == "weights" and self.strategy.name == "fedavg",
            self._at("precision", "merge"),
            f"clients of {self._name} keep no alpha from round to round; use 'socflow' or 'ring'",
        )
        yield (
            in_int8 and outer and outer.name == "fedprox",
            "[strategy.outer] name = 'fedprox'",
            f"{said} has no proximal term; use 'fp32' or 'mixed'",
        )

    def _rules_of_pipelines(self) -> Iterator[Rule]:
        """Yield what a pipeline does not read, and what its samples and batches need."""
        if not self.is_pipeline:
            names = " and ".join(
                repr(name) for name, kind in STRATEGIES.items() if kind.is_pipeline
            )
            why = f"it is for name = {names}, and {self._name}; leave it out"
            yield self.pipeline is not None, "[pipeline]", why
            return
        table, batch_size = self.pipeline or PipelineConfig(), self.train.batch_size
        said = f"{self._name} does not read it; leave it out"
        yield self.precision.arithmetic != "fp32", self._at("precision", "arithmetic"), said
        grid = STRATEGIES[self.strategy.name].is_grid
        yield from self._unread((*_READ_BY_PIPELINES, "groups") if grid else _READ_BY_PIPELINES)
        sample = f"[pipeline] {shown(table, 'sample')}"
        yield (
            table.sample and self.data != DataConfig(),
            "[data]",
            f"{sample} describes what there is instead; leave one of the two out",
        )
        yield (
            table.sample and self.model.pretrained,
            self._at("model", "pretrained"),
            f"{sample} has nothing to train on; leave it out",
        )
        yield (
            table.sample and table.num_samples < batch_size,
            f"[pipeline] num_samples = {table.num_samples}",
            f"it is less than [train] batch_size = {batch_size}",
        )
        for size in table.micro_batch_sizes:
            why = f"{size} does not divide [train] batch_size = {batch_size}"
            yield batch_size % size, "[pipeline] micro_batch_sizes", why
        yield (
            self.model.name in LANGUAGE_MODELS and len(table.sample) != 1,
            sample,
            f"{' and '.join(LANGUAGE_MODELS)} take [tokens]",
        )

    def _unread(self, read: Collection[str]) -> Iterator[Rule]:
        """Yield the keys of [strategy] and [train] that a strategy without groups does not read; it reads `read`."""
        why = f"{self._name} does not read it; leave it out"
        for key in StrategyConfig.model_fields:
            yield key not in read and is_set(self.strategy, key), f"[strategy] {key}", why
        for key in ("local_epochs", "reduction"):
            yield is_set(self.train, key), self._at("train", key), why

    def _rules_of_clouds(self) -> Iterator[Rule]:
        """Yield what training with a cloud does not read, and cannot do in integers."""
        if not self.is_split:
            why = f"it is for {', '.join(SPLIT_STRATEGIES)}, and {self._name}; leave it out"
            yield self.edgecloud is not None, "[edgecloud]", why
            return
        split, arithmetic = self.split, self.precision.arithmetic
        yield (
            self.train.epochs / self.split_round_epochs > MOST_INTERVALS,
            self._at("strategy", "sync_interval_epochs"),
            f"there would be more than {MOST_INTERVALS} rounds; raise it",
        )
        yield from self._unread(_READ_BY_SPLITS)
        for event in self.events:
            why = f"{self._name} knows 'preempt' only; a link's outages are [edgecloud] segments"
            yield event.kind != "preempt", f"[[event]] kind = {event.kind!r}", why
        yield (
            self.precision.held_out and arithmetic != "mixed",
            self._at("precision", "held_out"),
            f"{self._name} trains on all samples; leave it out",
        )
        if arithmetic == "fp32":
            return
        for key, broken in (
            ("merge", self.precision.merge == "weights"),
            ("fp32_operators", bool(self.precision.fp32_operators)),
        ):
            why = f"the edge of {self._name} trains only a part of a model; leave it out"
            yield broken, self._at("precision", key), why
        said = self._at("precision", "arithmetic")
        why = f"{said} trains classifiers of images; leave [precision] out"
        yield self.model.name in (CLICK_MODEL, GENERATOR), self._at("model", "name"), why
        for key, reason in (
            ("frozen", "normalises by the batch, which frozen layers do not"),
            ("costs", "has other costs than those, which were measured in FP32"),
        ):
            why = f"{said} {reason}; leave one of the two out"
            yield is_set(split, key), self._at("edgecloud", key), why

    def _rules_of_comparisons(self) -> Iterator[Rule]:
        """Yield strategies that cannot run this workload, and settings of strategies that are not compared."""
        compared = self.compare.strategies
        for name in compared:
            why = f"{name!r} cannot run the workload of {self._name}; use some of {', '.join(self._family)}"
            yield name not in self._family, "[compare] strategies", why
        why = f"it is for {', '.join(CLUSTER_STRATEGIES)}, and {self._name}"
        yield self.compare.predict and self.is_split, "[[compare.predict]]", why
        for name in self.compare.train:
            why = (
                f"strategies = {list(compared)} does not run {name!r}; add it, or remove the table"
            )
            yield name not in compared, f"[compare.train.{name}]", why
        for name in self.compare.epochs_to_target:
            why = f"strategies = {list(compared)} does not run {name!r}; add it, or remove the key"
            yield name not in compared, f"[compare.epochs_to_target] {name}", why

    def _at(self, table: str, key: str) -> str:
        """Return a key with its place and value: "[train] epochs = 3"."""
        if (table, key) == ("train", "optimizer"):
            # Where it is left out, it is the strategy's.
            return f"[train] optimizer = {self.optimizer!r}"
        values = self.split if table == "edgecloud" else getattr(self, table)
        return f"[{table}] {shown(values, key)}"

    @property
    def _name(self) -> str:
        return self._at("strategy", "name")

    @property
    def _family(self) -> tuple[str, ...]:
        return family_of(self.strategy.name)

    def under(self, strategy: str, own: Mapping[str, Any] | None = None) -> Self:
        """Return the scenario under another strategy, with that strategy's own values of `[compare]`, or with `own`."""
        if own is None:
            own = self.compare.train.get(strategy, {})
        of_train, of_strategy = own_settings_by_table(own)
        if strategy != self.strategy.name and "local_epochs" in STRATEGIES[strategy].unread_keys:
            of_train = {"local_epochs": 1, **of_train}
        # Other strategies refuse the table of pipelines.
        pipeline = self.pipeline if STRATEGIES[strategy].is_pipeline else None
        if strategy != self.strategy.name and STRATEGIES[strategy].optimizer != "sgd":
            # It is published with this optimiser.
            of_train = {"optimizer": None, "momentum": None, **of_train}
        return self.replaced(
            strategy=self.strategy.under(strategy, **of_strategy),
            pipeline=pipeline,
            train=self.train.replaced(**of_train),
        )

    def in_arithmetic(self, arithmetic: str) -> Self:
        """Return the scenario with another arithmetic; without its momentum where integer updates have none."""
        precision = self.precision.under(arithmetic)
        without = precision.arithmetic == "int8" and precision.algorithm == "niti"
        momentum = None if without else self.train.momentum
        return self.replaced(precision=precision, train=self.train.replaced(momentum=momentum))

    def value_of(self, key: str) -> Any:
        """Return the value of a key of `[train]` or `[strategy]`."""
        return getattr(self.train if key in TrainConfig.model_fields else self.strategy, key)

    def _require_own(self, name: str, own: OwnSettings) -> None:
        """Raise `ConfigError` for own values of a strategy that do not fit, or that it does not read."""
        at, kind = f"[compare.train.{name}]", STRATEGIES[name]
        for key in kind.unread_keys:
            if key in own:
                raise ConfigError(
                    f"{at} {key} = {own[key]!r}: {name} does not read it; leave it out"
                )
        of_train, of_strategy = own_settings_by_table(own, at)
        try:
            self.train.replaced(**of_train)
            self.strategy.under(name, **of_strategy)
        except ConfigError as error:
            raise ConfigError(f"{at} {error}") from None

    @property
    def _trains_by_niti(self) -> bool:
        return self.precision.arithmetic == "int8" and self.precision.algorithm == "niti"

    @property
    def momentum(self) -> float:
        """The momentum of `[train]`, by default 0.9; 0 for updates without momentum."""
        if self.train.momentum is not None:
            return self.train.momentum
        # In a split training momentum is that of the cloud's half, which trains in FP32.
        without = self._trains_by_niti and not self.is_split
        return 0.0 if without or self.optimizer != "sgd" else 0.9

    @property
    def optimizer(self) -> str:
        """The optimiser of `[train]`, by default that of the strategy."""
        return self.train.optimizer or self._kind.optimizer

    @property
    def synchronous_epochs(self) -> int:
        """The epochs of one group of all SoCs before those of groups; 0 for strategies that begin with groups."""
        if not self._kind.is_synchronous_first:
            return 0
        return self.strategy.post_local_epochs or self.train.epochs // 2

    @property
    def is_split(self) -> bool:
        """Whether the strategy trains with a cloud."""
        return STRATEGIES[self.strategy.name].uses_cloud

    @property
    def is_pipeline(self) -> bool:
        """Whether the strategy is a pipeline."""
        return STRATEGIES[self.strategy.name].is_pipeline

    @property
    def has_groups(self) -> bool:
        """Whether the strategy trains with groups, and so has a plan."""
        return isinstance(STRATEGIES[self.strategy.name], GroupStrategy)

    @property
    def _kind(self) -> Strategy:
        return STRATEGIES[self.strategy.name]

    @property
    def interval_epochs(self) -> float | str:
        """Epochs between synchronisations of a strategy with groups."""
        if self._kind.has_local_epochs:
            return float(self.train.local_epochs)
        return group_strategy(self.strategy.name).sync_interval_epochs(
            self.strategy.sync_interval_epochs
        )

    @property
    def split_round_epochs(self) -> float:
        """Epochs of a round of training with a cloud: `sync_interval_epochs`, by default 1."""
        asked = self.strategy.sync_interval_epochs
        return 1.0 if isinstance(asked, str) else asked

    @property
    def is_streaming(self) -> bool:
        """Whether the strategy synchronises fragments of the model."""
        return self._kind.is_streaming

    @property
    def streaming(self) -> Streaming:
        """The fragments of the model, or the defaults."""
        return self.strategy.streaming or Streaming()

    @property
    def reshuffle(self) -> bool:
        """Whether data are dealt to groups again; not for strategies that train on what each SoC has."""
        return self.strategy.reshuffle and not self._kind.has_local_epochs

    @property
    def gradient_exchange(self) -> tuple[str, str]:
        """With whom members of a group exchange gradients, and in which coding, as strategy or file decide."""
        kind, asked = STRATEGIES[self.strategy.name], self.strategy
        if not isinstance(kind, GroupStrategy):
            return asked.exchange, asked.compression
        return kind.exchange_of(asked.exchange, asked.compression)

    @property
    def leaders(self) -> str:
        """`[strategy] leaders`; "auto" is the star if the hub needs the groups' models. `tree-fedavg` has a tree."""
        if self._kind.has_local_epochs:
            return TREE
        return (
            "star"
            if self.strategy.leaders == "auto"
            and (self.hub_needs_models or self.precision.wire != "float32")
            else self.strategy.leaders
        )

    @property
    def quorum(self) -> Quorum:
        """When a synchronisation of groups ends."""
        settings = self.strategy
        return Quorum(fraction=settings.quorum, grace_s=settings.grace_s)

    @property
    def hub_needs_models(self) -> str:
        """The key of the file that needs each group's model at the hub; empty if no key does."""
        outer, kind = self.strategy.outer_step, STRATEGIES[self.strategy.name]
        if isinstance(kind, GroupStrategy) and kind.needs_each_model:
            return self._name
        if self.strategy.quorum < 1:
            return self._at("strategy", "quorum")
        return (
            f"[strategy.outer] name = {outer.name!r}"
            if outer is not None and not outer.takes_mean
            else ""
        )

    @property
    def split(self) -> EdgeCloudConfig:
        """`[edgecloud]`, or its defaults if the scenario has no such table."""
        return self.edgecloud or EdgeCloudConfig()


class Scenario(ScenarioFile):
    """A whole scenario."""

    name: str = "scenario"
    question: str = ""
    # The file's folder, from which factories are imported; None without factories.
    folder: str | None = None
    # The SHA-256 of the factories' modules.
    code: str | None = None

    def mistake(
        self, table: str, key: str, why: str, kind: type[SocflowerError] = ConfigError
    ) -> SocflowerError:
        """Return the error about a key of this scenario: its place, its value, and why it cannot be."""
        return kind(f"{self.name} {self._at(table, key)}: {why}")

    @property
    def factories(self) -> tuple[str, ...]:
        """The user's functions that it names."""
        return tuple(each.factory for each in (self.model, self.data) if each.factory)

    @property
    def num_workers(self) -> int:
        """The fewest worker processes that its faults need: one for every client that hangs, and one for the others."""
        if not any(event.kind in NEED_WORKERS for event in self.events):
            return 0
        return 1 + max(1, len({event.soc for event in self.events if event.kind == "hang"}))
