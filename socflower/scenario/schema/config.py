"""The tables of a scenario file: keys, defaults, limits, descriptions; docs/reference/scenarios.md is made of them."""

import re
from collections.abc import Collection
from dataclasses import replace
from typing import Annotated, Any, Self

from pydantic import Field

from socflower.cluster.cluster_file import MOST_SOCS, ClusterFile
from socflower.field_rules import OneOf, keys_of
from socflower.hierarchy.collectives import FUSIONS
from socflower.hierarchy.delayed_sync import MOST_INTERVALS
from socflower.hierarchy.leader_topology import COMPRESSIONS, NONE, compression_fault
from socflower.peers.ring.settings import RingSettings
from socflower.precision import ALGORITHMS, MIXING_RULES
from socflower.scenario.schema.outer import OuterConfig
from socflower.scenario.schema.pipeline import LANGUAGE_MODELS, PIPELINE_STRATEGY, PipelineConfig
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
    family_of,
)
from socflower.scenario.schema.thermal import BackgroundLoadConfig, ThermalConfig
from socflower.toml_file import Table

ARITHMETICS = ("fp32", "int8", "mixed")
_READ_BY_PIPELINES = (
    "name",
    "socs",
    "sync_interval_epochs",
    "rebalance",
    "rebalance_steps",
    "tolerate_client_errors",
)
_READ_BY_SPLITS = ("name", "socs", "tolerate_client_errors")
REBALANCE = ("off", "shares", "groups", "both")
FAULT_KINDS = ("raise", "nan", "hang", "die", "preempt")

_FACTORY = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*")
_DEVICE = re.compile(r"[a-z]+(:\d+)?")
_HELD_OUT = 128
_READERS = {
    "rule": ("mixed",),
    "algorithm": ("int8",),
    "gradient_bits": ("int8",),
    "adaptive_rescaling": ("int8",),
    "unsupported": ("int8", "mixed"),
}
"""The arithmetics that read a key of `[precision]`, for keys that not all of them read."""

_OF_LEADERS = ("leaders", "leader_compression")
"""Keys of `[strategy]` that only several groups read."""

# Limits far above any real training, which keep planning and training bounded.
_MAX_EPOCHS = 1_000_000
_MAX_SAMPLES = 1_000_000  # of a batch

_ALPHA = 0.5

Epochs = Annotated[int, Field(gt=0, le=_MAX_EPOCHS)]
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
            raise ValueError(f'factory = {self.factory!r}: write "package.module:function"')
        if self.arguments and not self.factory:
            raise ValueError(
                f"arguments = {self.arguments} are those of a factory, and none is named; add factory = "
                '"package.module:function"'
            )


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
            "`lenet5`, `vgg11`, `resnet18`, `mobilenet-v1`, or small relatives for 32×32 images: `vgg-small` (six "
            "convolutions, 0.31 M parameters), `vgg-mini` (three, 69 thousand), `vgg-tiny` (63 thousand) and `resnet8` "
            "(BatchNorm and residuals, 78 thousand), or `resnet50`, `mobilenet-v2`, "
            "`efficientnet-b1`. With [a pipeline]"
            "(#pipeline) also `bert-small` and `gpt-small`, with [a cloud](#edgecloud) `click-model` and "
            "`digit-generator`. Default: `lenet5`, or the `factory`"
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
            "`digits` (4,000 training and 1,000 test images of MNIST, embedded); `mnist`, "
            "`cifar10`: from the folder named "
            "by `SOCFLOWER_DATA` (`mnist/train.parquet`, `mnist/test.parquet`, …), else from the Hugging Face hub with "
            "`socflower[hub]`; with `click-model` `clicks`, 60,000 generated samples in the "
            "shape of MovieLens. Default: "
            "`digits`, or the `factory`"
        ),
    )
    partition: Annotated[str, OneOf(("iid", "dirichlet"))] = Field(
        "iid", description=("how data are spread over SoCs; `dirichlet` is label skew")
    )
    alpha: float = Field(
        _ALPHA, gt=0, description="of the Dirichlet distribution; smaller is more uneven"
    )

    def check(self) -> None:
        """Refuse an unevenness of even parts."""
        super().check()
        if self.alpha != _ALPHA and self.partition != "dirichlet":
            raise ValueError(
                f"alpha = {self.alpha} is for partition = 'dirichlet', and it is {self.partition!r}; "
                "leave it out"
            )


class TrainConfig(Table):
    """`[train]`"""

    epochs: Epochs = Field(10, description="passes over the data")
    batch_size: int = Field(
        64,
        gt=0,
        le=_MAX_SAMPLES,
        description=(
            "of a group for `socflow`, of all SoCs together for `ring` and `sgd`, of one client "
            "for `fedavg`, of each edge "
            "with a cloud"
        ),
    )
    learning_rate: float = Field(0.01, gt=0, description="of the optimiser")
    optimizer: Annotated[str, OneOf(("sgd", "adam"))] = Field(
        "sgd", description="int8 training knows `sgd` only"
    )
    momentum: float | None = Field(
        None,
        ge=0,
        lt=1,
        description=(
            "of SGD; refused with `adam` and `niti`, which have none; default: 0.9, and 0 with `niti`"
        ),
    )
    weight_decay: float = Field(0.0, ge=0, description="of SGD")
    schedule: Annotated[str, OneOf(("cosine", "constant"))] = Field(
        "cosine", description=("of the learning rate; `cosine` is zero at the end")
    )
    device: str = Field(
        "cpu",
        description=(
            "torch device of clients and evaluation: `cpu`, `cuda`, `cuda:1`, `mps`, or `auto`: each machine's "
            "accelerator, else its CPU; weights depend on it"
        ),
    )
    local_epochs: Epochs = Field(
        1, description="epochs of a `fedavg` client in a round; `epochs` must be a multiple"
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
        """Refuse names of no device, momentum without SGD, and local epochs that do not divide the epochs."""
        if not _DEVICE.fullmatch(self.device):
            raise ValueError(f"device = {self.device!r}: write auto, cpu, cuda, cuda:1 or mps")
        if self.momentum and self.optimizer != "sgd":
            raise ValueError(
                f"momentum = {self.momentum} is for sgd, and optimizer = {self.optimizer!r}; leave it out"
            )
        if self.epochs % self.local_epochs:
            raise ValueError(
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
    held_out: int = Field(
        default_factory=lambda table: _HELD_OUT if table.get("arithmetic") == "mixed" else 0,
        ge=0,
        description=(
            "training samples set aside, on which mixed training measures alpha; with `fp32` and `int8` for a "
            "comparison on equal samples; default: 128 with `mixed`, else 0"
        ),
    )
    algorithm: Annotated[str, OneOf(tuple(ALGORITHMS))] = Field(
        "niti",
        description=(
            "of int8 training: `niti` (int8 weights, integer update) or `adaptive-fixed-point` (FP32 master weights)"
        ),
    )
    gradient_bits: tuple[Annotated[int, Field(ge=0, le=7)], ...] = Field(
        (5, 4, 3),
        description=(
            "three numbers, of `niti`, from the beginning, from half and from three quarters of training; fewer are "
            "smaller steps"
        ),
    )
    adaptive_rescaling: bool = Field(
        True,
        description=(
            "of int8 training: look for the exponents of int8 tensors now and then; false: in every batch"
        ),
    )
    unsupported: Annotated[str, OneOf(("refuse", "fp32"))] = Field(
        "refuse",
        description=(
            "of int8 and mixed training, what becomes of operators that int8 lacks: `refuse` "
            "the model before round 1, or "
            "run them in `fp32`"
        ),
    )

    def check(self) -> None:
        """Refuse keys that the arithmetic does not read, unless they have their defaults."""
        if self.arithmetic == "mixed" and not self.held_out:
            raise ValueError(
                f"held_out = {self.held_out} must be 1 or more with arithmetic = 'mixed'"
            )
        if len(self.gradient_bits) != 3:
            raise ValueError(f"gradient_bits = {list(self.gradient_bits)}: need three numbers")
        for key, readers in _READERS.items():
            value = getattr(self, key)
            if value != keys_of(PrecisionConfig)[key].default and self.arithmetic not in readers:
                shown = list(value) if isinstance(value, tuple) else value
                raise ValueError(
                    f"{key} = {shown!r} is for arithmetic = {' or '.join(map(repr, readers))}, and it is "
                    f"{self.arithmetic!r}; leave it out"
                )
        if self.gradient_bits != (5, 4, 3) and self.algorithm != "niti":
            raise ValueError(
                f"gradient_bits = {list(self.gradient_bits)} is for algorithm = 'niti', and it is "
                f"{self.algorithm!r}; leave it out"
            )


class StrategyConfig(Table):
    """`[strategy]`"""

    name: Annotated[str, OneOf(STRATEGIES)] = Field(
        "socflow",
        description=(
            "".join(f"`{name}`: {kind.about}; " for name, kind in STRATEGIES.items() if kind.about)
            + "the others train with [a cloud](#edgecloud)"
        ),
    )
    groups: Annotated[int, Field(gt=0, le=MOST_SOCS)] | Annotated[str, OneOf(("auto",))] = Field(
        "auto",
        description=(
            'number of groups of `socflow`; "auto" [tries them out](concepts/planning.md#how-many-groups)'
        ),
    )
    socs: int | None = Field(
        None, gt=0, le=MOST_SOCS, description="how many slots take part; default: all"
    )
    sync_interval_epochs: (
        Annotated[float, Field(gt=0, le=_MAX_EPOCHS)] | Annotated[str, OneOf(("decay",))]
    ) = Field(
        "decay",
        description=(
            'epochs between synchronisations; "decay" is 0.25, doubled every 10 epochs, up to 2; '
            "`ring` and `sgd` ignore it"
        ),
    )
    server_interval: int = Field(
        1,
        gt=0,
        le=_MAX_EPOCHS,
        description=(
            "every how many synchronisations all servers of a [site](#server) take part, and "
            "not only the groups of each; "
            "`ring` and `sgd` ignore it"
        ),
    )
    reshuffle: bool = Field(
        True,
        description=(
            "deal all data anew to the groups at a synchronisation that ends an epoch; false "
            "where data must stay: each "
            "SoC trains on its own, in an order of its own"
        ),
    )
    uplink_turns: bool | Annotated[str, OneOf(("auto",))] = Field(
        "auto",
        description=(
            'groups that share an uplink exchange in turn; "auto" takes, for each new plan, the way that is '
            "[predicted to be faster](concepts/planning.md#who-exchanges-when)"
        ),
    )
    overlap_buckets: int = Field(
        1,
        gt=0,
        le=1000,
        description=(
            "parts of the backward pass whose gradients are exchanged while the next part is "
            "computed; 1 means no overlap"
        ),
    )
    leaders: Annotated[str, OneOf(("auto", "ring", "star", "tree"))] = Field(
        "auto",
        description=(
            "how the leaders of groups [exchange "
            "models](concepts/planning.md#when-groups-synchronise): over the hub, in a "
            'ring, or by board and server; "auto" takes, for each new plan, the way that is predicted to be quickest'
        ),
    )
    leader_compression: Annotated[str, OneOf(COMPRESSIONS)] = Field(
        "none",
        description=(
            'leaders in a ring or tree ("auto" leaves out the star) exchange their models\' changes in halves, or in '
            "eight bits with error feedback"
        ),
    )
    fusion: Annotated[str, OneOf(FUSIONS)] = Field(
        "buckets",
        description=(
            "what costs a [message](concepts/virtual-time.md#messages) in virtual time: each of the "
            "`overlap_buckets`, as rings of real machines send them, or each tensor, as in SoCFlow+"
        ),
    )
    tolerate_client_errors: bool = Field(
        False,
        description=(
            "leave out a group whose client raises, instead of ending the run, or of a ring of "
            "real machines the member; "
            "`fedavg` always does"
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
        le=_MAX_EPOCHS,
        description=(
            "with `shares` and `both`, after how many steps the members of a group look at "
            "their speeds; 0: only between "
            "rounds"
        ),
    )
    outer: OuterConfig | None = Field(
        None,
        description=(
            "table of Flower's strategy that [makes the next model](guides/groups.md#outer-strategies) of the groups' "
            "models: its class in small letters and its arguments"
        ),
    )

    def check(self) -> None:
        """Refuse an outer strategy without groups, or without their number where it is needed."""
        if STRATEGIES[self.name].is_pipeline:
            return  # it reads none of this, which `ScenarioFile` refuses
        if fault := compression_fault(self.leaders, self.leader_compression):
            raise ValueError(fault)
        if self.server_interval > 1:
            said = f"server_interval = {self.server_interval}"
            if self.groups == "auto":
                raise ValueError(f'{said} needs a number of groups, and groups is "auto"; give it')
            if self.leader_compression != NONE:
                raise ValueError(
                    f"{said}, and leader_compression = {self.leader_compression!r} compresses changes "
                    "since a model that all groups have had; leave one of the two out"
                )
            if self.outer is not None:
                raise ValueError(
                    f"{said}, and outer makes one model of all groups' at every synchronisation; leave "
                    "one of the two out"
                )
        if self.outer is None:
            return
        if not several_groups(self.name):
            raise ValueError(
                f"outer is for strategies with several groups, and name is {self.name!r}; leave it out"
            )
        if self.outer.counts_groups and self.groups == "auto":
            raise ValueError(
                f"outer.name = {self.outer.name!r} needs a number of groups, and groups is "
                '"auto"; give it'
            )

    def under(self, name: str, **changes: Any) -> Self:
        """Return the table under another strategy, without what only several groups read if it has one."""
        left_out = (
            {}
            if several_groups(name)
            else {key: StrategyConfig.model_fields[key].default for key in ("outer", *_OF_LEADERS)}
        )
        return self.replaced(**{"name": name, **left_out, **changes})


def several_groups(strategy: str) -> bool:
    """Return whether a strategy has several groups, which exchange models, and of which an outer strategy makes one."""
    kind = STRATEGIES[strategy]
    return isinstance(kind, GroupStrategy) and kind.num_groups is None


class OwnTraining(Table):
    """`[compare.train.NAME]`: what a strategy has in place of the scenario's values, where others suit it better."""

    epochs: Epochs | None = Field(None, description="passes over the data")
    batch_size: int | None = Field(None, gt=0, le=_MAX_SAMPLES, description="as in [train]")
    learning_rate: float | None = Field(None, gt=0, description="of the optimiser")
    sync_interval_epochs: float | None = Field(
        None,
        gt=0,
        le=_MAX_EPOCHS,
        description=(
            "as in [strategy]; with `ring` and `sgd`, at most 1, how often they are evaluated"
        ),
    )


def _of_train(own: OwnTraining) -> dict[str, float]:
    return own.model_dump(exclude_none=True, exclude={"sync_interval_epochs"})


class PredictedEpoch(Table):
    """`[[compare.predict]]`: an epoch that is predicted on the same cluster and groups, and not trained."""

    model: str = Field(description="as `name` of [model]")
    data: str = Field("cifar10", description="as `name` of [data]")
    batch_size: int = Field(64, gt=0, le=_MAX_SAMPLES, description="as in [train]")
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
    train: dict[str, OwnTraining] = Field({})
    predict: tuple[PredictedEpoch, ...] = Field(())

    def check(self) -> None:
        """Refuse settings of a strategy that is none, and two targets."""
        if self.target_accuracy is not None and self.target_loss is not None:
            raise ValueError(
                f"target_accuracy = {self.target_accuracy} and target_loss = {self.target_loss}: "
                "runs are timed to one target; remove one"
            )
        for name in self.train:
            if name not in STRATEGIES:
                raise ValueError(
                    f"train.{name}: there is no such strategy; use one of {', '.join(STRATEGIES)}"
                )


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
        if self.kind != "preempt" and (self.rounds, self.at) != (1, 0.5):
            raise ValueError(
                f'kind = {self.kind!r} takes no rounds and no at; they are for "preempt"'
            )


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
    thermal: ThermalConfig | None = None  # None: no heat simulation
    background_load: BackgroundLoadConfig | None = Field(
        None,
    )  # None: nobody else
    edgecloud: EdgeCloudConfig | None = None  # None: no cloud
    pipeline: PipelineConfig | None = None  # None: no pipeline, or the defaults of one
    expect: dict[str, int | float] = Field({})

    def check(self) -> None:
        """Refuse tables that do not go together."""
        ClusterFile.check(self)
        self._check_pipeline()
        self._check_leaders()
        num_servers = max(1, sum(server.count for server in self.servers))
        if self.strategy.server_interval > 1 and not 1 < num_servers <= int(self.strategy.groups):
            raise ValueError(
                f"[strategy] server_interval = {self.strategy.server_interval} is for several [[server]] "
                f"with a group each; there are {num_servers}, and {self.strategy.groups} groups"
            )
        if self.is_split:
            self._check_split_arithmetic()
        if self.train.optimizer != "sgd" and self.precision.arithmetic != "fp32":
            raise ValueError(
                f"[train] optimizer = {self.train.optimizer!r} is for arithmetic = 'fp32'; int8 training "
                "supports sgd only"
            )
        if self.precision.arithmetic != "fp32" and self.train.device not in ("auto", "cpu"):
            raise ValueError(
                f"[train] device = {self.train.device!r} is for arithmetic = 'fp32'; the integer kernels "
                f"of {self.precision.arithmetic!r} run on the CPU"
            )
        if self.precision.arithmetic == "int8" and (
            self.train.weight_decay or self.train.reduction != "auto"
        ):
            raise ValueError(
                "[precision] arithmetic = 'int8' does not support [train] weight_decay and reduction; "
                "leave them out"
            )
        if self.precision.arithmetic == "mixed" and self.train.reduction == "ring":
            raise ValueError(
                "[train] reduction = 'ring' sums gradients as a ring does, which the int8 gradients of "
                "[precision] arithmetic = 'mixed' do not take part in; use 'always'"
            )
        if self.train.momentum and self._trains_by_niti and not self.is_split:
            raise ValueError(
                f"[train] momentum = {self.train.momentum}: the integer update of [precision] algorithm "
                "= 'niti' has none; leave it out, or use algorithm = 'adaptive-fixed-point'"
            )
        if (
            self.strategy.outer
            and self.strategy.outer.name == "fedprox"
            and self.precision.arithmetic == "int8"
        ):
            raise ValueError(
                "[strategy.outer] name = 'fedprox': the integer update of [precision] arithmetic = "
                "'int8' has no proximal term; use arithmetic = 'fp32' or 'mixed'"
            )
        family = family_of(self.strategy.name)
        if (self.is_split or self.is_pipeline) and self.compare.strategies == CLUSTER_STRATEGIES:
            # The default strategies do not fit this scenario: replace them by those of its family.
            fitting = (
                (PIPELINE_STRATEGY, *CLUSTER_STRATEGIES[1:])
                if self.is_pipeline
                else tuple(name for name in family if name != "splitfed")
            )
            object.__setattr__(self, "compare", self.compare.replaced(strategies=fitting))
        misfits = [name for name in self.compare.strategies if name not in family]
        if misfits:
            raise ValueError(
                f"[compare] strategies: {misfits[0]!r} cannot run the workload of "
                f"{self.strategy.name!r}; use some of {', '.join(family)}"
            )
        if self.compare.predict and self.is_split:
            raise ValueError(
                f"[[compare.predict]] is for strategies {', '.join(CLUSTER_STRATEGIES)}; [strategy] name "
                f"is {self.strategy.name!r}"
            )
        for name, own in self.compare.train.items():
            self.train.replaced(**_of_train(own))  # refuses what does not fit [train]
            if name in self.compare.strategies:
                continue
            raise ValueError(
                f"[compare.train.{name}]: strategies = {list(self.compare.strategies)} does not run "
                f"{name!r}; add it there, or remove the table"
            )
        if self.edgecloud is not None and not self.is_split:
            raise ValueError(
                f"[edgecloud] is for strategies {', '.join(SPLIT_STRATEGIES)}; [strategy] name is "
                f"{self.strategy.name!r}, which trains without a cloud; leave it out"
            )
        if self.leaders != "star" and (what := self.hub_needs_models):
            raise ValueError(
                f"[strategy] leaders = {self.leaders!r} gives the hub the mean of the groups' models, and "
                f"{what} needs each of them; use 'star'"
            )
        if self.strategy.leader_compression != NONE and (what := self.hub_needs_models):
            raise ValueError(
                f"[strategy] leader_compression = {self.strategy.leader_compression!r} is for leaders in "
                f"a ring or a tree, which give the hub their mean, and {what} needs each group's model; "
                "leave the compression out"
            )
        if self.is_split:
            self._check_split()

    def _check_leaders(self) -> None:
        """Refuse what only the leaders of several groups read, unless it has its default."""
        if several_groups(self.strategy.name) and self.strategy.groups != 1:
            return
        for key in _OF_LEADERS:
            value = getattr(self.strategy, key)
            if value != StrategyConfig.model_fields[key].default:
                why = (
                    "groups is 1"
                    if several_groups(self.strategy.name)
                    else f"name is {self.strategy.name!r}"
                )
                raise ValueError(
                    f"[strategy] {key} = {value!r} is for leaders of several groups, and {why}; leave it "
                    "out"
                )

    def _check_pipeline(self) -> None:
        """Refuse `[pipeline]` for other strategies, and what a pipeline does not read."""
        name = f"[strategy] name = {self.strategy.name!r}"
        if not self.is_pipeline:
            if self.pipeline is not None:
                raise ValueError(
                    f"[pipeline] is for name = {PIPELINE_STRATEGY!r}, and {name}; leave it out"
                )
            return
        table = self.pipeline or PipelineConfig()
        if self.edgecloud is not None:
            raise ValueError(f"[edgecloud]: {name} trains without a cloud; leave it out")
        if self.precision.arithmetic != "fp32":
            raise ValueError(
                f"[precision] arithmetic = {self.precision.arithmetic!r}: {name} trains in fp32; leave it "
                "out"
            )
        self._refuse_unread(name, _READ_BY_PIPELINES, "makes stages")
        if self.ring.compression != "none":
            raise ValueError(
                f"[ring] compression = {self.ring.compression!r}: {name} sums gradients of replicated "
                "stages in float32; leave it out, or use [pipeline] activation_bits"
            )
        if table.sample and self.data != DataConfig():
            raise ValueError(
                f"[data]: [pipeline] sample = {list(table.sample)} describes what there is instead; leave "
                "one of the two out"
            )
        if table.sample and table.num_samples < self.train.batch_size:
            raise ValueError(
                f"[pipeline] num_samples = {table.num_samples} is less than [train] batch_size = "
                f"{self.train.batch_size}; there would be no update in an epoch"
            )
        wrong = [size for size in table.micro_batch_sizes if self.train.batch_size % size]
        if wrong:
            raise ValueError(
                f"[pipeline] micro_batch_sizes: {wrong[0]} does not divide [train] batch_size = "
                f"{self.train.batch_size}"
            )
        if self.model.name in LANGUAGE_MODELS and len(table.sample) != 1:
            raise ValueError(
                f"[pipeline] sample = {list(table.sample)} does not go with [model] name = "
                f"{self.model.name!r}; {' and '.join(LANGUAGE_MODELS)} take [tokens]"
            )

    def _refuse_unread(self, name: str, read: Collection[str], instead: str) -> None:
        """Refuse what a strategy without groups does not read, unless it has its default."""
        unread = [
            key
            for key, field in StrategyConfig.model_fields.items()
            if key not in read and getattr(self.strategy, key) != field.default
        ]
        if unread:
            raise ValueError(
                f"[strategy] {unread[0]} is for groups, and {name} {instead}; leave it out"
            )
        for key in ("local_epochs", "reduction"):
            if getattr(self.train, key) != TrainConfig.model_fields[key].default:
                raise ValueError(
                    f"[train] {key} = {getattr(self.train, key)!r}: {name} does not read it; leave it out"
                )

    def _check_split(self) -> None:
        name = f"[strategy] name = {self.strategy.name!r}"
        if self.train.epochs / self.split.round_epochs > MOST_INTERVALS:
            raise ValueError(
                f"[edgecloud] round_epochs = {self.split.round_epochs} with [train] epochs = "
                f"{self.train.epochs} make more than {MOST_INTERVALS} rounds; train fewer epochs, or "
                "raise round_epochs"
            )
        self._refuse_unread(name, _READ_BY_SPLITS, "has edges")
        others = [event.kind for event in self.events if event.kind != "preempt"]
        if others:
            raise ValueError(
                f"[[event]] kind = {others[0]!r}: {name} knows 'preempt' only; outages of a link are in "
                "[edgecloud] segments"
            )

    def _check_split_arithmetic(self) -> None:
        arithmetic, name = self.precision.arithmetic, f"[strategy] name = {self.strategy.name!r}"
        if self.precision.held_out and arithmetic != "mixed":
            raise ValueError(
                f"[precision] held_out = {self.precision.held_out}: {name} trains on all samples; leave "
                "it out"
            )
        if arithmetic == "fp32":
            return
        if self.model.name in (CLICK_MODEL, GENERATOR):
            raise ValueError(
                f"[precision] arithmetic = {arithmetic!r}: the integer kernels train classifiers of "
                f"images, and [model] name is {self.model.name!r}; leave [precision] out"
            )
        if self.split.frozen:
            raise ValueError(
                f"[edgecloud] frozen = {self.split.frozen!r}: frozen layers stay in evaluation mode, and "
                f"[precision] arithmetic = {arithmetic!r} normalises by the batch; leave out one"
            )
        if self.split.costs:
            raise ValueError(
                f"[edgecloud] costs = {self.split.costs!r} were measured in FP32; with [precision] "
                f"arithmetic = {arithmetic!r} leave them out"
            )

    def under(self, strategy: str) -> Self:
        """Return the scenario under another strategy, with that strategy's own values of `[compare]`."""
        own = self.compare.train.get(strategy, OwnTraining())
        interval = own.sync_interval_epochs or self.strategy.sync_interval_epochs
        pipeline = self.pipeline if STRATEGIES[strategy].is_pipeline else None
        rings = (
            self.ring
            if isinstance(STRATEGIES[strategy], GroupStrategy)
            else replace(self.ring, compression=NONE)
        )
        return self.replaced(
            strategy=self.strategy.under(strategy, sync_interval_epochs=interval),
            ring=rings,
            pipeline=pipeline,
            train=self.train.replaced(**_of_train(own)),
        )

    @property
    def _trains_by_niti(self) -> bool:
        return self.precision.arithmetic == "int8" and self.precision.algorithm == "niti"

    @property
    def momentum(self) -> float:
        """The momentum of `[train]`, by default 0.9; 0 if the update has none."""
        if self.train.momentum is not None:
            return self.train.momentum
        # In a split training momentum is that of the cloud's half, which trains in FP32.
        without = self._trains_by_niti and not self.is_split
        return 0.0 if without or self.train.optimizer != "sgd" else 0.9

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
    def leaders(self) -> str:
        """`[strategy] leaders`; the star for "auto" where the hub needs the groups' models."""
        return (
            "star"
            if self.strategy.leaders == "auto" and self.hub_needs_models
            else self.strategy.leaders
        )

    @property
    def hub_needs_models(self) -> str:
        """What needs each group's model at the hub, as a key of the file; empty if nothing does."""
        outer = self.strategy.outer
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
    folder: str | None = (
        None  # of the file, from which its factories are imported; None without factories
    )
    code: str | None = None  # SHA-256 of the factories' modules in it

    @property
    def factories(self) -> tuple[str, ...]:
        """The user's functions that it names."""
        return tuple(each.factory for each in (self.model, self.data) if each.factory)
