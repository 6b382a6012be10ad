"""What strategies and clients say to each other inside Flower messages: keys and encodings, without Flower."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from socflower.errors import ConfigError

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
"""Present in a group's first message after a resume: its client must have the group's state of the round before."""

LOST_STATE = "has no trainer state"
"""In the text of the error of a client that has not."""


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
        return {key.replace("_", "-"): list(value) if isinstance(value, tuple) else value
                for key, value in asdict(self).items()}

    @classmethod
    def decode(cls, record: Mapping[str, Any]) -> "GroupTask":
        """Return the task of a record; `ConfigError` names what is missing or too much."""
        values: dict[str, Any] = {key.replace("-", "_"): tuple(value) if isinstance(value, list) else value
                  for key, value in record.items()}
        missing = cls.__dataclass_fields__.keys() - values.keys()
        unknown = values.keys() - cls.__dataclass_fields__.keys()
        if missing or unknown:
            raise ConfigError(f"group record: missing {sorted(missing)}, unknown {sorted(unknown)}; "
                              "server and client run different versions of socflower")
        return cls(**values)
