"""What strategies and clients say to each other inside Flower messages: keys and encodings, without Flower."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, TypeVar

from socflower.errors import ConfigError

_Values = TypeVar("_Values")
_EMPTY: tuple[Any, ...] = ((), "")

ARRAYS = "arrays"
CONFIG = "config"
METRICS = "metrics"
GROUP = "group"
"""The record that makes a TRAIN message a whole group's work; without it a client trains alone."""

NUM_EXAMPLES = "num-examples"
SERVER_ROUND = "server-round"
PARTITION_ID = "partition-id"
NUM_PARTITIONS = "num-partitions"
PRICED = "socflower-priced"
"""Present in a message whose virtual time its strategy accounts for, so that the grid must not."""

GROUP_ID = "socflower-group"
"""The metric by which a client says that it did the work of that group, and not only of its own node."""

EVENTS = "socflower-events"
"""The record of a reply that tells, a line each, what went wrong at the client and was made good."""

ALPHA, ALPHA_STEPS = "socflower-alpha", "socflower-alpha-steps"
"""The metrics by which a mixed-precision client says which confidence held for how many steps (F9)."""

CPU_SHARE = "cpu-share"
"""And by which it says what part of its samples its CPUs had (F11)."""

WARM_UP = "socflower-warm-up"
"""Present in messages of the epochs that only help to choose the number of groups."""

RESUMED = "socflower-resumed"
"""In a group's first message after a resume: its client reads the group's state of the round before from its file.

True if it must have one; False where that round dropped the group's reply, which may mean that its client died."""

LOST_STATE = "has no trainer state"
"""In the text of the error of a client that has not."""


DEPARTURES = "socflower-departures"
"""The record by which a scenario's event makes SoCs leave within an interval: after which part of it, by SoC."""

QUERY_ACTION = "socflower"
"""The action of QUERY messages by which a strategy asks a node for its status, or for its group's model."""

ASK = "socflower-ask"
ASK_STATUS, ASK_MODEL = "status", "model"
STATUS = "socflower-status"
"""The record of the answer to either."""

TRANSPORTS = ("auto", "gloo", "grpc")
"""What carries a ring's gradients; "auto" is what the nodes are configured for."""

GRPC_WITH_TLS = "grpc+tls"
"""What nodes with certificates offer: they and those without cannot form a ring."""

COMPRESSIONS = ("none", "fp16", "int8", "int8-stochastic", "dgc")
"""What a ring may send instead of gradients in float32."""

RING = "ring"
"""The record that makes a TRAIN message one member's part of a group's work, in a ring of real machines."""

OUTCOME = "socflower-outcome"
"""The record of a ring member's reply that says how the ring ended for it; see `RingOutcome`."""

HEAT = "socflower-heat"
"""The record of a reply that says how hot its device was and what it did about it; see `HeatReport`."""


def encode(values: Any) -> dict[str, Any]:
    """Return a dataclass as a Flower record's scalars and lists.

    Lists and texts that are empty by default are left out: Flower cannot count the bytes of empty ones, which its mod
    for the sizes of messages does.
    """
    return {key.replace("_", "-"): list(value) if isinstance(value, tuple) else value
            for key, value in asdict(values).items() if value not in _EMPTY or key not in _empty_by_default(values)}


def decode(kind: type[_Values], record: Mapping[str, Any], name: str) -> _Values:
    """Return the dataclass of a record that `encode` made; `ConfigError` names what is missing or too much."""
    values: dict[str, Any] = {key.replace("-", "_"): tuple(value) if isinstance(value, list) else value
                              for key, value in record.items()}
    known = {entry.name for entry in fields(kind)}  # type: ignore[arg-type]
    missing, unknown = known - values.keys() - _empty_by_default(kind), values.keys() - known
    if missing or unknown:
        raise ConfigError(f"{name} record: missing {sorted(missing)}, unknown {sorted(unknown)}; server and client "
                          "run different versions of socflower")
    return kind(**values)


def _empty_by_default(kind: Any) -> set[str]:
    return {entry.name for entry in fields(kind) if entry.default in _EMPTY}


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupTask:
    """What one group does between two synchronisations; every member can compute its part from it alone."""

    group_id: int
    num_groups: int
    members: tuple[int, ...]  # SoCs, leader among them, in ring order
    partitions: tuple[int, ...]  # of the data, one for each member
    num_partitions: int  # one for each SoC that takes part, over all groups
    capacities: tuple[float, ...]  # of the members; their shares of a batch are proportional (F4)
    first_step: int  # counted from the start of training
    num_steps: int
    steps_per_epoch: int
    total_steps: int
    batch_size: int  # of the group
    reshuffle: bool  # all data are dealt to the groups now and then, or each stays where it is
    deal_epoch: int  # the epoch at whose start the data were dealt last, if they are dealt
    seed: int
    num_samples: int  # of the whole data set, as the strategy was told
    npu_ratios: tuple[float, ...] = ()  # of the members' throughputs (F10); none where clients measure, or need none

    def __post_init__(self) -> None:
        if self.npu_ratios and len(self.npu_ratios) != len(self.members):
            raise ConfigError(f"group {self.group_id}: {len(self.members)} members and {len(self.npu_ratios)} NPU "
                              "ratios; need one for every member, or none")
        if not len(self.members) == len(self.capacities) == len(self.partitions) > 0:
            raise ConfigError(f"group {self.group_id}: {len(self.members)} members, {len(self.capacities)} capacities "
                              f"and {len(self.partitions)} partitions; need one of each for every member")

    def encode(self) -> dict[str, Any]:
        """Return the task as a Flower record's scalars and lists."""
        return encode(self)

    @classmethod
    def decode(cls, record: Mapping[str, Any]) -> "GroupTask":
        """Return the task of a record; `ConfigError` names what is missing or too much."""
        return decode(cls, record, "group")


@dataclass(frozen=True, kw_only=True, slots=True)
class RingTask:
    """One member's place in its group's ring for one interval; all but `participant` is equal for all members.

    Participants are the numbers in `GroupTask.partitions`, which mean the same in all groups of a training.
    """

    participant: int  # this member
    leader: int  # the participant that has the model, and answers with it
    addresses: tuple[str, ...]  # host:port of the members' ring ports, in the order of the group's members
    token: str  # hexadecimal, secret, of all rings of this interval only
    transport: str  # "gloo", "grpc" or "grpc+tls"
    num_buckets: int  # parts of the gradient whose exchange overlaps with the backward pass (F7)
    compression: str  # "none", "fp16", "int8" or "dgc"
    heartbeat_s: float  # after so long without a sign of life a member is taken for hung
    rendezvous_s: float  # and after so long for absent at the beginning
    # Groups that take turns with this one (F6): those before it in a step, those after it, and where to tell them.
    groups_before: tuple[int, ...] = ()
    groups_after: tuple[int, ...] = ()
    neighbours: tuple[str, ...] = ()  # of all those groups' members: "group participant address"
    rebalance_steps: int = 0  # shares follow measured capacities every so many steps, if data are dealt; 0: never

    def __post_init__(self) -> None:
        if self.rebalance_steps < 0:
            raise ConfigError(f"ring: rebalance_steps = {self.rebalance_steps} must be a number of steps, or 0 for "
                              "shares that stay")


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeStatus:
    """What a node says of itself."""

    ring: str = ""  # host:port of its ring port; empty where it has none, as in simulation
    board: int = -1  # where it sits; -1 where its node config does not say
    slot: int = -1
    transports: tuple[str, ...] = ()  # that it allows, best first
    preempted: bool = False  # a user's workload has the device


COMPLETED, PREEMPTED, NO_MODEL, LEFT_OUT = "completed", "preempted", "no-model", "left-out"


@dataclass(frozen=True, kw_only=True, slots=True)
class RingOutcome:
    """How the ring ended for one member."""

    outcome: str  # COMPLETED; PREEMPTED: it left on a user's wish; NO_MODEL: no one had the model; LEFT_OUT: too late
    members: tuple[int, ...]  # SoCs in the ring at the end
    num_steps: int  # that this member has applied
    answers: bool  # whether it is the one that answers for its group
    recoveries_s: tuple[float, ...] = ()  # how long each re-forming took, from noticing to training again
    preempted: tuple[int, ...] = ()  # SoCs that left on a user's wish
    log: tuple[str, ...] = ()  # what happened to the ring, a line each
    rates: tuple[float, ...] = ()  # samples per second of each of `members`, while it waited for nobody; 0: unknown


@dataclass(frozen=True, kw_only=True, slots=True)
class HeatReport:
    """How a device was while it answered a message. What it does not say is None, and has no key in the record."""

    temperature_c: float | None = None  # at the end
    peak_c: float | None = None
    clock_factor: float | None = None  # mean of present clock over the highest while it worked, 0 to 1
    throttled_s: float | None = None  # for how long the device said that heat or power held its clocks down
    share: float = 1.0  # mean of the part of its power that it gave to training, above 0
    battery_fraction: float | None = None  # charge, 0 to 1, at the end
    user_load: float | None = None  # part of the processors that others used at the end, 0 to 1
    paused_s: float = 0.0  # for how long the message was held before its work began
    triggered: bool = False  # whether the device asks for shares to be balanced anew
    notes: tuple[str, ...] = ()  # what is wrong with sensors, a line each

    def __post_init__(self) -> None:
        if not 0.0 < self.share <= 1.0:
            raise ConfigError(f"heat record: share = {self.share} must lie above 0 and not above 1")
        for key in ("clock_factor", "battery_fraction", "user_load"):
            value = getattr(self, key)
            if value is not None and not 0.0 <= value <= 1.0:
                raise ConfigError(f"heat record: {key.replace('_', '-')} = {value} must lie between 0 and 1")

    def encode(self) -> dict[str, Any]:
        """Return the report as a Flower record's scalars and lists."""
        return {key: value for key, value in encode(self).items() if value is not None}

    @classmethod
    def decode(cls, record: Mapping[str, Any]) -> "HeatReport":
        """Return the report of a record; `ConfigError` for a key or a value that cannot be."""
        unsaid = {entry.name.replace("_", "-"): None for entry in fields(cls) if entry.default is None}
        return decode(cls, {**unsaid, **record}, "heat")
