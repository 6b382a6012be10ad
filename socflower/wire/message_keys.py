"""Keys and encodings of the records that strategies and clients exchange in Flower messages, without Flower."""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, TypeVar

from socflower.errors import ConfigError, require_range
from socflower.plain_numbers import plain_numbers

_Values = TypeVar("_Values")
_EMPTY: tuple[Any, ...] = ((), "", b"")

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
"""What keys between our strategies and clients begin with, which are no metrics of an app."""

PRICED = "socflower-priced"
"""Present in a message whose virtual time the strategy accounts for, so that the grid does not."""

TRAIN_LOSS = "train-loss"
"""The metric for the mean loss of the training behind a reply."""

GROUP_ID = "socflower-group"
"""The metric that marks a reply as the work of that group, not only of the client's own node."""

EVENTS = "socflower-events"
"""The record of a reply with the errors that the client recovered from, one line each."""

UNTRAINED = "socflower-untrained"
"""The record of a group's reply that names the arrays that are no trainable parameters, such as BatchNorm's statistics.

An outer strategy steps on the others; a reply without the record has none but integers.
"""

TRAINED_ON = "socflower-trained-on"
"""The record of a reply with the devices that trained; see `DeviceReport`."""

ALPHA, ALPHA_STEPS = "socflower-alpha", "socflower-alpha-steps"
"""The metrics of a mixed-precision client: each confidence and its number of steps (F9)."""

CPU_SHARE = "cpu-share"
"""The metric for the share of its samples that its CPUs computed (F11)."""

FROZEN_SHA256 = "frozen-sha256"
"""In train and evaluate configs: the digest of the server's frozen parameters, which every node has of its own."""

EVALUATED = "socflower-evaluated"
"""In the evaluate config of a node of groups: the partition of the data that is its own, and the number of them."""

WARM_UP = "socflower-warm-up"
"""Present in messages of the epochs that only serve to choose the number of groups."""

RESUMED = "socflower-resumed"
"""In a group's first message after a resume: its client reads the group's state of the round before from its file.

True if the state must exist; False where that round dropped the group's reply, as when its client died."""

TRAINING = "socflower-training"
"""In train configs: the training's own id, kept over resumes, if nodes keep states of several trainings in a folder."""

LOST_STATE = "has no trainer state"
"""Part of the error text of a client without that state."""


DEPARTURES = "socflower-departures"
"""The record by which a scenario's event makes SoCs leave within an interval: after which part of it, by SoC."""

QUERY_ACTION = "socflower"
"""The action of QUERY messages that ask a node for its status, or for its group's model."""

ASK = "socflower-ask"
ASK_STATUS, ASK_MODEL = "status", "model"
ASKED_SOC = "socflower-soc"
"""The SoC that a status query is for; its node may have another number as its partition."""

STATUS = "socflower-status"
"""The record of the answer to both."""

TRANSPORTS = ("auto", "gloo", "grpc")
"""The transports of a ring's gradients; "auto" is what the nodes are configured for."""

GRPC_WITH_TLS = "grpc+tls"
"""The transport of nodes with certificates; they cannot form a ring with nodes without."""

COMPRESSIONS = ("none", "fp16", "int8", "int8-stochastic", "dgc")
"""The compressions that a ring may use instead of float32 gradients."""

RING = "ring"
"""The record of a TRAIN message for one member of a group, in a ring of real machines."""

PIPELINE = "socflower-pipeline"
"""The record of a TRAIN message for a group that trains one model as a pipeline; see `PipelineTask`."""

OUTCOME = "socflower-outcome"
"""The record of a ring member's reply with the outcome of the ring; see `RingOutcome`."""

NOTES = "socflower-notes"
"""The record of a group's reply with what the grid saw of the round; see `RoundNotes`."""

HEAT = "socflower-heat"
"""The record of a reply with its device's heat and throttling; see `HeatReport`."""


def encode(values: Any) -> dict[str, Any]:
    """Return a dataclass as a Flower record's scalars and lists.

    Lists and texts that are empty by default are left out: Flower cannot count the bytes of empty ones, which its mod
    for the sizes of messages does.
    """
    return {
        key.replace("_", "-"): list(value) if isinstance(value, tuple) else value
        for key, value in asdict(values).items()
        if value not in _EMPTY or key not in _empty_by_default(values)
    }


def decode(kind: type[_Values], record: Mapping[str, Any], name: str) -> _Values:
    """Return the dataclass of a record that `encode` made; `ConfigError` names missing and unknown keys."""
    values: dict[str, Any] = {
        key.replace("-", "_"): tuple(value) if isinstance(value, list) else value
        for key, value in record.items()
    }
    known = {entry.name for entry in fields(kind)}  # type: ignore[arg-type]
    missing, unknown = known - values.keys() - _empty_by_default(kind), values.keys() - known
    if missing or unknown:
        raise ConfigError(
            f"{name} record: missing {sorted(missing)}, unknown {sorted(unknown)}; server and client "
            "run different versions of socflower"
        )
    return kind(**values)


def _empty_by_default(kind: Any) -> set[str]:
    return {entry.name for entry in fields(kind) if entry.default in _EMPTY}


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupTask:
    """One group's work between two synchronisations; each member derives its part from it alone."""

    group_id: int
    num_groups: int
    # SoCs, leader among them, in ring order.
    members: tuple[int, ...]
    # The SoC that gets the model and replies with it (F8).
    leader: int
    # Of the data, one for each member.
    partitions: tuple[int, ...]
    # One for each SoC that takes part, over all groups.
    num_partitions: int
    # Of the members; their shares of a batch are proportional (F4).
    capacities: tuple[float, ...]
    # Counted from the start of training.
    first_step: int
    num_steps: int
    steps_per_epoch: int
    total_steps: int
    # Of the group.
    batch_size: int
    # Whether data are redistributed among groups, or stay where they are.
    reshuffle: bool
    # The epoch at whose start data were last redistributed, if at all.
    deal_epoch: int
    seed: int
    # Of the whole data set, as given to the strategy.
    num_samples: int
    # Of the members' throughputs (F10); none where clients measure, or need none.
    npu_ratios: tuple[float, ...] = ()
    # Of FedProx, whose clients the groups are.
    proximal_mu: float = 0.0

    def __post_init__(self) -> None:
        if self.npu_ratios and len(self.npu_ratios) != len(self.members):
            raise ConfigError(
                f"group {self.group_id}: {len(self.members)} members and {len(self.npu_ratios)} NPU "
                "ratios; need one for every member, or none"
            )
        if self.leader not in self.members:
            raise ConfigError(
                f"group {self.group_id}: its leader, SoC {self.leader}, is not one of its members"
            )
        if not len(self.members) == len(self.capacities) == len(self.partitions) > 0:
            raise ConfigError(
                f"group {self.group_id}: {len(self.members)} members, {len(self.capacities)} capacities "
                f"and {len(self.partitions)} partitions; need one of each for every member"
            )

    def encode(self) -> dict[str, Any]:
        """Return the task as a Flower record's scalars and lists."""
        return encode(self)

    @classmethod
    def decode(cls, record: Mapping[str, Any]) -> "GroupTask":
        """Return the task of a record; `ConfigError` names missing and unknown keys."""
        return decode(cls, record, "group")


@dataclass(frozen=True, kw_only=True, slots=True)
class RingTask:
    """One member's place in its group's ring for one interval; all but `participant` is equal for all members.

    Participants are the numbers in `GroupTask.partitions`, which mean the same in all groups of a training.
    """

    # This member.
    participant: int
    # The participant that has the model, and replies with it.
    leader: int
    # Host:port of the members' ring ports, in the order of the group's members.
    addresses: tuple[str, ...]
    # Hexadecimal, secret, of all rings of this interval only.
    token: str
    # "gloo", "grpc" or "grpc+tls".
    transport: str
    # Parts of the gradient whose exchange overlaps with the backward pass (F7).
    num_buckets: int
    # "none", "fp16", "int8" or "dgc".
    compression: str
    # A member without a heartbeat for so long counts as hung.
    heartbeat_s: float
    # And one that does not connect for so long at the start, as absent.
    rendezvous_s: float
    # Groups that take turns with this one (F6): those before it in a step, those after it, and where to tell them.
    groups_before: tuple[int, ...] = ()
    groups_after: tuple[int, ...] = ()
    # Of all those groups' members: "group participant address".
    neighbours: tuple[str, ...] = ()
    # How much longer than the others the member that answers may be silent.
    leader_grace_s: float = 30.0
    # Whether a member that raises is left out instead of ending the training.
    tolerate_errors: bool = False
    # Shares follow measured capacities every so many steps, if data are dealt; 0: never.
    rebalance_steps: int = 0
    # Of leaders in a ring or a tree (F8), those that may answer for each group, its leader first, each as a line of
    # "group participant address".
    leaders: tuple[str, ...] = ()
    # And of a tree, where each group's leader is: "group board server".
    leader_places: tuple[str, ...] = ()
    # Of that exchange: "none", "fp16" or "int8".
    leader_compression: str = "none"
    # Of what that compression has still to send of the group, which its members keep.
    feedback_sha256: str = ""
    # Of the model that members have kept, where it is not sent again.
    model_sha256: str = ""

    def __post_init__(self) -> None:
        require_range(
            "ring",
            least=0,
            advice="or 0 for shares that stay",
            rebalance_steps=self.rebalance_steps,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class PipelineTask:
    """How a group trains one model as a pipeline."""

    # As JSON, see `from_json` of `pipeline/plan.py`.
    plan: str
    # How the model is cut into the plan's layers.
    cuts: str
    # Of `PipelineModel.sha256`.
    layers_sha256: str
    # That was planned with; (): unknown.
    sample_shape: tuple[int, ...] = ()
    # Of activations that cross a cut.
    bits: int = 32
    gradient_bits: int = 32
    # Of what fewer bits lose: "diagonal" or "rank-one".
    feedback: str = "none"
    # Of each of the plan's devices; none: unbounded.
    budget_bytes: tuple[float, ...] = ()
    # Updates after which stages on one device are backed up; 0: once an interval.
    backup_steps: int = 0
    # Devices whose stages compute in int8.
    int8_socs: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeStatus:
    """A node's report of its status."""

    # Host:port of its ring port; empty where it has none, as in simulation.
    ring: str = ""
    # Its board; -1 if not in its node config.
    board: int = -1
    slot: int = -1
    # That it allows, best first.
    transports: tuple[str, ...] = ()
    # A user's workload occupies the device.
    preempted: bool = False


COMPLETED, PREEMPTED, NO_MODEL, LEFT_OUT = "completed", "preempted", "no-model", "left-out"


@dataclass(frozen=True, kw_only=True, slots=True)
class RingOutcome:
    """How the ring ended for one member."""

    # COMPLETED; PREEMPTED: left for a user; NO_MODEL: no member had the model; LEFT_OUT: too late.
    outcome: str
    # SoCs in the ring at the end.
    members: tuple[int, ...]
    # That this member has applied.
    num_steps: int
    # Whether it replies for its group.
    answers: bool
    # Duration of each re-forming, from detection to training.
    recoveries_s: tuple[float, ...] = ()
    # SoCs that left for a user.
    preempted: tuple[int, ...] = ()
    # Losses of the ring, one line each.
    log: tuple[str, ...] = ()
    # What a pipeline has changed, one line each.
    notes: tuple[str, ...] = ()
    # Gradients that were left out of steps, one line each.
    dropped: tuple[str, ...] = ()
    # Samples per second of each of `members`, while it waited for nobody; 0: unknown.
    rates: tuple[float, ...] = ()
    # After a ring of leaders, the groups whose models are in the mean, which the first one's answer brings, and:
    met: tuple[int, ...] = ()
    # That those groups trained on.
    met_samples: float = 0.0
    # The digest of the mean, which this member has kept.
    holds: str = ""
    # Of what compression has still to send of the group's changes, which it has kept as well.
    feedback_sha256: str = ""

    def __post_init__(self) -> None:
        if self.outcome not in (COMPLETED, PREEMPTED, NO_MODEL, LEFT_OUT):
            raise ConfigError(f"outcome record: outcome = {self.outcome!r} is unknown")
        for kind, keys in (
            (int, ("members", "preempted", "met")),
            (int | float, ("recoveries_s", "rates")),
            (str, ("log", "notes", "dropped")),
        ):
            for key in keys:
                values = getattr(self, key)
                if not isinstance(values, tuple) or not all(
                    isinstance(value, kind) for value in values
                ):
                    raise ConfigError(
                        f"outcome record: {key.replace('_', '-')} = {values!r} is of the wrong type"
                    )
        if not isinstance(self.feedback_sha256, str):
            raise ConfigError(
                f"outcome record: feedback-sha256 = {self.feedback_sha256!r} is of the wrong type"
            )
        if not isinstance(self.met_samples, int | float) or not 0.0 <= self.met_samples < math.inf:
            raise ConfigError(
                f"outcome record: met-samples = {self.met_samples!r} must be a number, 0 or more"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceReport:
    """The devices on which the work of a reply was trained."""

    # Such as "cpu" and "cuda:0 (Orin)", one for each of `socs`, or one for a client alone.
    devices: tuple[str, ...]
    # Of a group.
    socs: tuple[int, ...] = ()
    # "int8" or "mixed"; empty: FP32.
    arithmetic: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class RoundNotes:
    """What the grid saw of groups between a round's messages and its replies."""

    # Of events, with their groups and texts.
    kinds: tuple[str, ...] = ()
    groups: tuple[int, ...] = ()
    texts: tuple[str, ...] = ()
    # SoCs that left their rings, or were dropped by them.
    away: tuple[int, ...] = ()
    # Groups whose model came from another member than their leader.
    leaders_replaced: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if not len(self.kinds) == len(self.groups) == len(self.texts):
            raise ConfigError(
                f"notes record: {len(self.kinds)} kinds, {len(self.groups)} groups and {len(self.texts)} "
                "texts of events; need one of each for every event"
            )

    def __add__(self, other: "RoundNotes") -> "RoundNotes":
        """Return the notes of both."""
        return RoundNotes(
            **{
                entry.name: getattr(self, entry.name) + getattr(other, entry.name)
                for entry in fields(self)
            }
        )


@plain_numbers
@dataclass(frozen=True, kw_only=True, slots=True)
class HeatReport:
    """A device's state while it handled a message. Unknown values are None, and have no key in the record."""

    # At the end.
    temperature_c: float | None = None
    peak_c: float | None = None
    # Mean of present clock over the highest while it worked, 0 to 1.
    clock_factor: float | None = None
    # For how long the device reported throttling by heat or power.
    throttled_s: float | None = None
    # Mean share of its power used for training, above 0.
    share: float = 1.0
    # Charge, 0 to 1, at the end.
    battery_fraction: float | None = None
    # Part of the processors that others used at the end, 0 to 1.
    user_load: float | None = None
    # For how long the message waited before its work started.
    paused_s: float = 0.0
    # Whether the device requests re-balancing of shares.
    triggered: bool = False
    # Sensor errors, one line each.
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        require_range("heat record", above=0.0, most=1.0, share=self.share)
        for key in ("clock_factor", "battery_fraction", "user_load"):
            value = getattr(self, key)
            if value is not None and not 0.0 <= value <= 1.0:
                raise ConfigError(
                    f"heat record: {key.replace('_', '-')} = {value} must lie between 0 and 1"
                )

    def encode(self) -> dict[str, Any]:
        """Return the report as a Flower record's scalars and lists."""
        return {key: value for key, value in encode(self).items() if value is not None}

    @classmethod
    def decode(cls, record: Mapping[str, Any]) -> "HeatReport":
        """Return the report of a record; `ConfigError` for an invalid key or value."""
        unsaid = {
            entry.name.replace("_", "-"): None for entry in fields(cls) if entry.default is None
        }
        return decode(cls, {**unsaid, **record}, "heat")
