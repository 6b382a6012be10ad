"""The tables of a scenario file: keys, defaults, limits, descriptions; docs/reference/scenarios.md is made of them."""

import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Self, TypeAlias

from pydantic import Field

from socflower.errors import ConfigError
from socflower.field_rules import OneOf, Positive, unknown_key
from socflower.hierarchy.exchange.models import NONE
from socflower.hierarchy.group_count import GROUP_RULES
from socflower.hierarchy.group_preemption import PREEMPTIONS, SOCS
from socflower.hierarchy.quorum import (
    GraceSeconds,
    Quorum,
    QuorumFraction,
)
from socflower.hierarchy.sync_intervals import DECAY, DOUBLING_EPOCHS, MOST_INTERVALS
from socflower.precision import ALGORITHMS, MERGES, MIXING_RULES
from socflower.report.quality import ACCURACY, LOSS, Quality, quality_of
from socflower.scenario.schema.key_rules import is_set, require_reader, shown
from socflower.scenario.schema.outer import OuterConfig
from socflower.strategies.presets import (
    CLUSTER_STRATEGIES,
    STRATEGIES,
    GroupStrategy,
    StrategyKind,
)
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
READ_BY_PIPELINES = (
    "name",
    "socs",
    "sync_interval_epochs",
    "rebalance",
    "rebalance_steps",
    "tolerate_client_errors",
)
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

COUNTED = "it needs a number of groups, and groups is 'auto'; give it"

OF_LEADERS = ("leaders", "leader_compression")
"""Keys of `[strategy]` that only several groups read."""

_INSIDE_GROUPS = ("exchange", "compression")
INSIDE_GROUPS_OR_FIRST = ("overlap_buckets", "uplink_turns")
"""Keys that only groups of several SoCs read, and the first epochs of post-local SGD, which are of one."""

OF_QUORUM = ("quorum", "grace_s")
"""Keys that they read even if the strategy has their number."""

Round = Annotated[int, Field(gt=0, le=MOST_INTERVALS)]


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
            "integer update), `niti-relative` (steps that follow from the weights), `octo` (the same steps, values "
            "beyond 95 % saturate), `adaptive-fixed-point` (FP32 master weights, powers of two as scales), "
            "`adaptive-int16` (the same, gradients int16 where int8 is too coarse), `wageubn` (the same with "
            "masters of 24 bits between -1 and 1 and gradients of weights in int8) or `mls-format` (`real-scales`, "
            "numbers with 1 mantissa and 2 exponent bits, groups of numbers with scales of their own)"
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

    @property
    def has_int8_weights(self) -> bool:
        """Whether training updates int8 weights, without a learning rate and momentum of theirs."""
        return self.arithmetic == "int8" and ALGORITHMS[self.algorithm].weight == "int8"

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
            "SoCFlow+. One group always stays; in rings of real machines it begins its interval again"
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
        if self.kind.is_pipeline:
            # A pipeline reads none of this; `ScenarioFile` refuses it.
            return
        require_reader(self, "sync_interval_epochs", {"doubling_epochs": (DECAY,)})
        self.exchanges()
        _ = self.waits_for
        interval, outer = shown(self, "server_interval"), self.outer_step
        counted = outer is not None and outer.counts_groups
        for broken, key, why in (
            (
                outer and not takes_outer(self.name),
                "outer",
                f"name = {self.name!r} has one group; leave it out",
            ),
            (counted and self.groups == "auto", f"outer.name = {outer and outer.name!r}", COUNTED),
            (
                self.server_interval > 1 and self.kind.waits_for_all,
                interval,
                f"name = {self.name!r} does not read it; leave it out",
            ),
            (self.server_interval > 1 and self.groups == "auto", interval, COUNTED),
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
        kind, keys = STRATEGIES[name], unread_keys(name)
        if kind.is_pipeline:
            unread_by_grids = kind.unread_keys & {"sync_interval_epochs"}
            keys = set(StrategyConfig.model_fields) - set(READ_BY_PIPELINES) | unread_by_grids
        elif not several_groups(name):
            keys.add("outer")
        keys |= {key for key in _INSIDE_GROUPS if getattr(kind, key, None) is not None}
        if kind.is_alone:
            # They have as many groups, and an outer step of their own.
            keys |= {"groups", "outer", "group_rule", *_INSIDE_GROUPS}
            if not kind.is_synchronous_first:
                keys |= {*INSIDE_GROUPS_OR_FIRST}
        if name == self.name:
            keys = unread_keys(name) & UNREAD_BY_SOME
        if changes.get("sync_interval_epochs", self.sync_interval_epochs) != DECAY:
            keys.add("doubling_epochs")
        left_out = {key: StrategyConfig.model_fields[key].default for key in keys}
        return self.replaced(**{"name": name, **left_out, **changes})

    @property
    def kind(self) -> StrategyKind:
        """What the strategy is."""
        return STRATEGIES[self.name]

    def num_groups(self, cluster_socs: int) -> int | str:
        """Return how many groups train on a cluster of so many SoCs, or "auto"; without groups each SoC is one."""
        kind, num_socs = self.kind, self.socs or cluster_socs
        return kind.groups(self.groups, num_socs) if isinstance(kind, GroupStrategy) else num_socs

    @property
    def waits_for(self) -> Quorum:
        """When a synchronisation of groups ends."""
        return Quorum(fraction=self.quorum, grace_s=self.grace_s)

    @property
    def fragments(self) -> Streaming | None:
        """How a model is synchronised in fragments; None if it is synchronised as a whole."""
        return (self.streaming or Streaming()) if self.kind.is_streaming else None

    @property
    def round_epochs(self) -> float:
        """The epochs of a round without groups: `sync_interval_epochs`, by default 1."""
        asked = self.sync_interval_epochs
        return 1.0 if isinstance(asked, str) else asked

    def exchanges(self) -> ExchangeSettings:
        """Return how groups exchange, as keys and strategy decide; `ConfigError` if they differ."""
        asked = ExchangeSettings(
            uplink_turns=self.uplink_turns,
            overlap_buckets=self.overlap_buckets,
            exchange=self.exchange,
            compression=self.compression,
            leaders=self.leaders,
            leader_compression=self.leader_compression,
            fusion=self.fusion,
        )
        return self.kind.exchanged(asked)

    @property
    def outer_step(self) -> OuterConfig | None:
        """`outer`, or the outer step that the strategy has without it; None if it averages."""
        own = self.kind.outer
        return self.outer or (OuterConfig(name=own) if own else None)


def several_groups(strategy: str) -> bool:
    """Return whether a strategy has several groups. These exchange models, and may have an outer strategy."""
    kind = STRATEGIES[strategy]
    return isinstance(kind, GroupStrategy) and kind.num_groups is None


def may_have_late_groups(strategy: str) -> bool:
    """Return whether a strategy has groups, not one only, whose rounds need not wait for all."""
    kind = STRATEGIES[strategy]
    return isinstance(kind, GroupStrategy) and kind.num_groups != 1 and not kind.waits_for_all


UNREAD_BY_SOME = frozenset(("doubling_epochs", "preemption", "dispatch", "use_spares"))


def unread_keys(strategy: str) -> set[str]:
    """Return the keys of `[strategy]` that a strategy does not read; of one with a cloud or stages, some of them."""
    kind = STRATEGIES[strategy]
    keys = {*(kind.unread_keys & UNREAD_BY_SOME)}
    if not several_groups(strategy):
        keys |= {"group_rule", *OF_LEADERS}
    if not exchanges_gradients(strategy):
        keys |= {*_INSIDE_GROUPS}
    if not may_have_late_groups(strategy):
        keys |= {*OF_QUORUM}
    if not kind.is_synchronous_first:
        keys.add("post_local_epochs")
    if not kind.is_streaming:
        keys.add("streaming")
    return keys


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
        ge=0,
        le=1,
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
