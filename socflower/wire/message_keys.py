"""Keys and encodings of the records that strategies and clients exchange in Flower messages, without Flower."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Annotated, Any, ClassVar, Self, TypeVar

from pydantic import Field

from socflower import __version__
from socflower.errors import ConfigError
from socflower.field_rules import OneOf, checked

_Values = TypeVar("_Values")
_EMPTY: tuple[Any, ...] = ((), "", b"")
# A resident client gets its message within the 3 s in which Flower's nodes ask for one, and then opens its port.
_REACH_S = 10.0

MESSAGE_VERSION = 1
"""The version of the records in this module and in `split_message_keys`; a change of their keys raises it."""

ARRAYS = "arrays"
CONFIG = "config"
METRICS = "metrics"
GROUP = "group"
"""The record of a TRAIN message for a whole group; without it a client trains alone."""

NUM_EXAMPLES = "num-examples"
SERVER_ROUND = "server-round"
PARTITION_ID = "partition-id"
NUM_PARTITIONS = "num-partitions"
INTERNAL = "socflower-"
"""Prefix of the keys between our strategies and clients; an app's own metrics have other keys."""

PRICED = "socflower-priced"
"""Present in a message whose virtual time the strategy accounts for, so that the grid does not."""

TRAIN_LOSS = "train-loss"
"""The metric for the mean loss of the training that a reply reports."""

GROUP_ID = "socflower-group"
"""The metric that marks a reply as the work of that group, not only of the client's own node."""

EVENTS = "socflower-events"
"""The record of a reply with the errors that the client recovered from, one line each."""

UNTRAINED = "socflower-untrained"
"""The record of a group's reply that names its arrays without gradients, such as BatchNorm's statistics.

An outer strategy steps on all others. Without the record, only integer arrays have no gradients.
"""

HANDED = "socflower-optimizer"
"""The record with the optimiser that groups of another plan continue with: of a reply to a task that hands it over, and
of the next round's messages. There it is empty if each member has it, from its own ring."""

STREAM = "socflower-stream"
"""The record of a TRAIN message for a group that sends and gets fragments of its model; see `StreamTask`."""

SAMPLES = "socflower-samples"
"""The record of a TRAIN message for a group with the samples of its interval; see `SentSamples`. Without it nodes have
the data."""

TRAINED_ON = "socflower-trained-on"
"""The record of a reply with the devices that trained; see `DeviceReport`."""

ALPHA, ALPHA_STEPS = "socflower-alpha", "socflower-alpha-steps"
"""The metrics of a mixed-precision client whose NPUs train models of their own: each confidence and its steps (F9)."""

COPY_SIMILARITY = "socflower-copy-similarity"
"""The same metric in place of `ALPHA` if int8 models are copies of the FP32 model that were rounded for one step."""

INT8_WIRE, WIRES = "int8", ("float32", "int8")
"""How models travel in federated averaging, and what that may be."""

SCALES = "socflower-scales"
"""The record with the scale of each tensor of `ARRAYS` that is in int8, by name (`codecs.int8_weights`).

A client that gets one sends one."""

CPU_SHARE = "cpu-share"
"""The metric for the share of its samples that its CPUs computed (F11)."""

FROZEN_SHA256 = "frozen-sha256"
"""In train and evaluate configs: the digest of the server's frozen parameters, which nodes load themselves."""

EVALUATED = "socflower-evaluated"
"""In the evaluate config of a group's node: its own partition of the data, and the number of partitions."""

WARM_UP = "socflower-warm-up"
"""Present in messages of rounds that are trained in several numbers of groups, to choose one of them."""

RESUMED = "socflower-resumed"
"""In a group's first message after a resume: its client reads the group's state after the last round from its file.

True if the file must exist. False if that round dropped the group's reply, for instance because its client died."""

TRAINING = "socflower-training"
"""In train configs: the id of the training, equal after a resume; nodes store states of several trainings apart."""

LOST_STATE = "has no trainer state"
"""Part of the error text of a client without that state."""

DEPARTURES = "socflower-departures"
"""The record with which a scenario's event makes SoCs leave within an interval: the part of it that passed, by SoC."""

QUERY_ACTION = "socflower"
"""The action of QUERY messages that ask a node for its status, or for its group's model."""

ASK = "socflower-ask"
ASK_STATUS, ASK_MODEL = "status", "model"
ASKED_SOC = "socflower-soc"
"""The SoC that a status query is for; it may differ from the partition id of its node."""

STATUS = "socflower-status"
"""The record of the answer to either question."""

TRANSPORTS = ("auto", "gloo", "grpc")
"""The transports of a ring's gradients; "auto" is the one that the nodes are configured for."""

GRPC_WITH_TLS = "grpc+tls"
"""The transport of nodes with certificates; they cannot form a ring with nodes without."""

RING = "ring"
"""The record of a TRAIN message for one member of a group, in a ring of real machines."""

PIPELINE = "socflower-pipeline"
"""The record of a TRAIN message for a group that trains one model as a pipeline; see `PipelineTask`."""

OUTCOME = "socflower-outcome"
"""The record of a ring member's reply with the ring's end; see `RingOutcome`."""

NOTES = "socflower-notes"
"""The record of a group's reply with the grid's observations of the round; see `RoundNotes`."""

HEAT = "socflower-heat"
"""The record of a reply with its device's heat and throttling; see `HeatReport`."""


def encode(values: Any) -> dict[str, Any]:
    """Return a dataclass as a Flower record's scalars and lists.

    Empty lists and texts are left out if empty is their default: Flower's mod for the sizes of messages fails on them.
    """
    record: dict[str, Any] = {}
    for key, value in asdict(values).items():
        if value in _EMPTY and key in _empty_by_default(values):
            continue
        record[key.replace("_", "-")] = list(value) if isinstance(value, tuple) else value
    return record


def decode(kind: type[_Values], record: Mapping[str, Any], name: str) -> _Values:
    """Return the dataclass of a record that `encode` made; `ConfigError` names missing and unknown keys."""
    values: dict[str, Any] = {}
    for key, value in record.items():
        values[key.replace("-", "_")] = tuple(value) if isinstance(value, list) else value
    known = {entry.name for entry in fields(kind)}  # type: ignore[arg-type]
    missing = known - values.keys() - _empty_by_default(kind)
    unknown = values.keys() - known
    if missing or unknown:
        raise ConfigError(
            f"{name} record: missing {sorted(missing)}, unknown {sorted(unknown)}; here are messages of version "
            f"{MESSAGE_VERSION}, of socflower {__version__}; install the same on server and nodes"
        )
    try:
        return kind(**values)
    except ConfigError as error:
        text = str(error).removeprefix(f"{kind.__name__}: ")
        raise ConfigError(f"{name} record: {text}") from None


class Record:
    """Base of dataclasses that travel as records of Flower messages; `RECORD` names them in errors."""

    __slots__ = ()
    RECORD: ClassVar[str]

    def encode(self) -> dict[str, Any]:
        """Return the values as a Flower record's scalars and lists."""
        return encode(self)

    @classmethod
    def decode(cls, record: Mapping[str, Any]) -> Self:
        """Return the dataclass of a record; `ConfigError` names missing and unknown keys."""
        return decode(cls, record, cls.RECORD)


def _empty_by_default(kind: Any) -> set[str]:
    return {entry.name for entry in fields(kind) if entry.default in _EMPTY}


@checked
class GroupTask(Record):
    """The work of one group between two synchronisations; each member derives its part from it alone."""

    RECORD = "group"

    group_id: int
    num_groups: int
    # SoCs in ring order, with the leader.
    members: tuple[int, ...]
    # The SoC that gets the model and replies with it (F8).
    leader: int
    # The part of the data of each member.
    partitions: tuple[int, ...]
    # One partition for each SoC that takes part, over all groups.
    num_partitions: int
    # The members' shares of a batch are proportional to their capacities (F4).
    capacities: tuple[float, ...]
    # Counted from the start of training.
    first_step: int
    num_steps: int
    steps_per_epoch: int
    total_steps: int
    # Samples of the whole group.
    batch_size: int
    # Whether data are redistributed among the groups.
    reshuffle: bool
    # The epoch at whose start data were last redistributed.
    deal_epoch: int
    seed: int
    # The size of the whole data set, as given to the strategy.
    num_samples: int
    # The NPU's part of each member's throughput (F10); empty if clients measure it, or have no use for it.
    npu_ratios: tuple[float, ...] = ()
    # The proximal term of FedProx, if the groups are its clients.
    proximal_mu: float = 0.0
    # Parts of the gradient, each of which is exchanged as soon as the backward pass has completed it (F7).
    num_buckets: int = 1
    # Of gradients: the `spec` of a coding.
    compression: str = "none"
    # With whom members exchange gradients: in a "ring", or with the first of them as a "server".
    exchange: str = "ring"
    # Whether groups of another plan continue with this one's optimiser.
    hands_over: bool = False
    # If above 0, its only member passes so often over its own data, in batches of `batch_size`, with a new optimiser.
    local_epochs: int = 0
    # Of a late group: steps that the others have done since its last interval; its optimiser continues after them.
    missed_steps: int = 0

    def check(self) -> None:
        """Raise `ConfigError` unless every member has its values and the leader is a member."""
        num_members, num_ratios = len(self.members), len(self.npu_ratios)
        if self.local_epochs and (num_members != 1 or self.reshuffle):
            raise ConfigError(
                f"group {self.group_id}: local epochs are for one SoC with data of its own, not for "
                f"{num_members}, or data that are dealt again"
            )
        if num_ratios not in (0, num_members):
            raise ConfigError(
                f"group {self.group_id}: {num_members} members and {num_ratios} NPU ratios; need one "
                "for every member"
            )
        is_complete = num_members == len(self.capacities) == len(self.partitions)
        if not is_complete or self.leader not in self.members:
            raise ConfigError(
                f"group {self.group_id}: needs a leader among its members, and {num_members} "
                "capacities and partitions"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class SentSamples:
    """Labelled images that the hub sends, with the constants that normalise them."""

    # Their numbers in the whole data set, ascending, and their classes: int64, little-endian.
    rows: bytes
    labels: bytes
    # The pixels, of shape (n, *shape), as "uint8" or "float32".
    inputs: bytes
    shape: tuple[int, ...]
    pixels: str
    # By channel.
    mean: tuple[float, ...]
    std: tuple[float, ...]
    num_classes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class StreamTask:
    """A round in which a fragment of a group's model is synchronised."""

    # The tensors that the reply has.
    names: tuple[str, ...]
    # Whether the message has the whole model, not the fragment that was synchronised last.
    is_whole: bool
    # After how many steps that fragment is mixed in, and what part of the own weights stays.
    delay_steps: int
    mixing: float


@checked
class RingTask:
    """One member's place in its group's ring for one interval; all but `participant` is equal for all members.

    A participant is a number of `GroupTask.partitions`, which means the same in all groups of a training.
    """

    # This member.
    participant: int
    # The participant that has the model, and replies with it.
    leader: int
    # host:port of the members' ring ports, in the order of the group's members.
    addresses: tuple[str, ...]
    # Hexadecimal and secret, for all rings of this interval only.
    token: str
    # "gloo", "grpc" or "grpc+tls".
    transport: str
    # A member without a heartbeat for this long counts as hung.
    heartbeat_s: float
    # A member that does not connect within this time counts as absent.
    rendezvous_s: float
    # Groups that take turns with this one (F6): those before it in a step, and those after it.
    groups_before: tuple[int, ...] = ()
    groups_after: tuple[int, ...] = ()
    # The members of all those groups, each as "group participant address".
    neighbours: tuple[str, ...] = ()
    # How much longer than the others the member that answers may be silent.
    leader_grace_s: float = 30.0
    # Whether a member that raises is left out instead of ending the training.
    tolerate_errors: bool = False
    # Whether a member that is preempted ends the group's interval, so that all its members are free.
    ends_with_member: bool = False
    # Every so many steps shares follow measured capacities, if data are dealt; 0: never.
    rebalance_steps: Annotated[int, Field(ge=0)] = 0
    # If leaders form a ring or a tree (F8): the members that may answer for each group, its leader first, each as
    # "group participant address".
    leaders: tuple[str, ...] = ()
    # If they form a tree, the place of each group's leader: "group board server".
    leader_places: tuple[str, ...] = ()
    # The compression of the leaders' exchange: "none", "fp16", "int8" or "int4".
    leader_compression: str = "none"
    # Digest of the error feedback of that compression, which the group's members keep.
    feedback_sha256: str = ""
    # Digest of the model that members have kept, if it is not sent again.
    model_sha256: str = ""
    # For the grid: how many groups end the exchange, and seconds after that in which others count; 0 groups: all.
    quorum: Annotated[int, Field(ge=0)] = 0
    quorum_grace_s: Annotated[float, Field(ge=0)] = 0.0
    # Whether the clients of all members are resident.
    resident: bool = False

    @property
    def reach_s(self) -> float:
        """After how many seconds a member that nobody could reach counts as absent."""
        prompt_s = max(_REACH_S, 2.0 * self.heartbeat_s)
        return min(prompt_s, self.rendezvous_s) if self.resident else self.rendezvous_s


@dataclass(frozen=True, kw_only=True, slots=True)
class PipelineTask:
    """How a group trains one model as a pipeline."""

    # JSON, see `from_json` of `pipeline/plan.py`.
    plan: str
    # How the model is cut into the plan's layers.
    cuts: str
    # The digest of `PipelineModel.sha256`.
    layers_sha256: str
    # The shape that the plan was made for; empty if it is unknown.
    sample_shape: tuple[int, ...] = ()
    sample_type: str = "float32"
    # The width of activations that cross a cut.
    bits: int = 32
    gradient_bits: int = 32
    # Error feedback for fewer bits: "none", "diagonal" or "rank-one".
    feedback: str = "none"
    # The memory of each of the plan's devices; empty: unbounded.
    budget_bytes: tuple[float, ...] = ()
    # Stages on one device are backed up after so many updates; 0: once an interval.
    backup_steps: int = 0
    # Devices whose stages compute in int8.
    int8_socs: tuple[int, ...] = ()
    # JSON, see `from_json` of `pipeline/problem.py`: what a plan after a loss is made from; empty: the plan alone.
    problem: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeStatus:
    """A node's report of its status; nodes of other versions are told by it."""

    # host:port of its ring port; empty if it has none, as in simulation.
    ring: str = ""
    # -1 if its node config names no board.
    board: int = -1
    slot: int = -1
    # The transports that it allows, best first.
    transports: tuple[str, ...] = ()
    # Whether a user's workload occupies the device.
    preempted: bool = False
    # The version of the protocol of rings; 0 without a ring.
    protocol: int = 0
    # Of the records in Flower's messages; 0: older than the first that has a number.
    messages: int = MESSAGE_VERSION
    # Whether its client's process stays between messages, and so opens its port as soon as a message comes.
    resident: bool = False

    @classmethod
    def decode(cls, record: Mapping[str, Any]) -> Self:
        """Return the status of a record, also of another version: missing and unknown keys say nothing."""
        names = {entry.name.replace("_", "-") for entry in fields(cls)}
        known = {key: value for key, value in record.items() if key in names}
        return decode(cls, {**encode(cls()), "messages": 0, **known}, "status")


COMPLETED, NO_MODEL, LEFT_OUT = "completed", "no-model", "left-out"
PREEMPTED, TERMINATED = "preempted", "terminated"


@checked
class RingOutcome:
    """How the ring ended for one member."""

    # PREEMPTED: it left for a user; TERMINATED: another member of its group did, which ended the interval; NO_MODEL: no
    # member had the model; LEFT_OUT: it came too late.
    outcome: Annotated[str, OneOf((COMPLETED, PREEMPTED, TERMINATED, NO_MODEL, LEFT_OUT))]
    # SoCs in the ring at its end.
    members: tuple[int, ...]
    # Steps that this member has applied.
    num_steps: int
    # Whether it replies for its group.
    answers: bool
    # The duration of each re-forming, from detection to training.
    recoveries_s: tuple[float, ...] = ()
    # SoCs that left for a user.
    preempted: tuple[int, ...] = ()
    # Losses of members, one line each.
    log: tuple[str, ...] = ()
    # Changes of a pipeline, one line each.
    notes: tuple[str, ...] = ()
    # Gradients that were left out of steps, one line each.
    dropped: tuple[str, ...] = ()
    # Samples per second of each of `members`, without the time that it waited; 0: unknown.
    rates: tuple[float, ...] = ()
    # After a ring of leaders: the groups whose models are in the mean. The first group's answer brings the mean.
    met: tuple[int, ...] = ()
    # The number of samples that those groups trained on.
    met_samples: Annotated[float, Field(ge=0)] = 0.0
    # Digest of the mean, which this member has kept.
    holds: str = ""
    # Digest of the error feedback of the group's changes, which it has kept as well.
    feedback_sha256: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceReport:
    """The devices on which the work of a reply was trained."""

    # Names such as "cpu" and "cuda:0 (Orin)": one for each of `socs`, or one for a client alone.
    devices: tuple[str, ...]
    # The SoCs of a group.
    socs: tuple[int, ...] = ()
    # "int8" or "mixed"; empty: FP32.
    arithmetic: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class RoundNotes:
    """The grid's observations of groups between a round's messages and its replies."""

    # The kind, the group and the text of each event.
    kinds: tuple[str, ...] = ()
    groups: tuple[int, ...] = ()
    texts: tuple[str, ...] = ()
    # SoCs that left their rings, or were dropped by them.
    away: tuple[int, ...] = ()
    # Those of them that left for a user.
    preempted: tuple[int, ...] = ()
    # Groups whose model came from another member than their leader.
    leaders_replaced: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        kinds, groups, texts = len(self.kinds), len(self.groups), len(self.texts)
        if not kinds == groups == texts:
            raise ConfigError(f"has {kinds} kinds, {groups} groups and {texts} texts of events")

    def __add__(self, other: "RoundNotes") -> "RoundNotes":
        """Return the notes of both."""
        names = [entry.name for entry in fields(self)]
        return RoundNotes(**{name: getattr(self, name) + getattr(other, name) for name in names})


_Fraction = Annotated[float, Field(ge=0, le=1)]


@checked
class HeatReport(Record):
    """A device's state while it handled a message. Unknown values are None, and have no key in the record."""

    RECORD = "heat"

    # The temperature at the end.
    temperature_c: float | None = None
    peak_c: float | None = None
    # Mean clock while it worked, divided by the highest clock.
    clock_factor: _Fraction | None = None
    # How long the device reported throttling by heat or power.
    throttled_s: float | None = None
    # Mean share of its power that training used.
    share: Annotated[float, Field(gt=0, le=1)] = 1.0
    # Charge at the end.
    battery_fraction: _Fraction | None = None
    # Part of the processors that other programs used at the end.
    user_load: _Fraction | None = None
    # How long the message waited before its work started.
    paused_s: float = 0.0
    # Whether the device requests re-balancing of shares.
    triggered: bool = False
    # Sensor errors, one line each.
    notes: tuple[str, ...] = ()

    def encode(self) -> dict[str, Any]:
        """Return the known values as a Flower record's scalars and lists."""
        return {key: value for key, value in encode(self).items() if value is not None}

    @classmethod
    def decode(cls, record: Mapping[str, Any]) -> Self:
        """Return the report of a record; `ConfigError` for an invalid key or value."""
        optional = [entry.name for entry in fields(cls) if entry.default is None]
        unknown = {name.replace("_", "-"): None for name in optional}
        return decode(cls, {**unknown, **record}, "heat")
