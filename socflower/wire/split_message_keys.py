"""Keys and records that strategy and edges of a split training exchange in Flower messages, without Flower."""

from dataclasses import dataclass
from typing import Annotated, Final

from socflower.errors import ConfigError
from socflower.field_rules import OneOf, checked
from socflower.wire.message_keys import Record

SPLIT = "split"
"""The record of a TRAIN message for the edge's part of a split training."""

SPLIT_REPORT = "socflower-split"
"""The record of a reply with measurements of a real link; see `SplitReport`."""

OWN: Final = "own"
TURNS: Final = "turns"
JOINED: Final = "joined"
CLOUD_MODES = (OWN, TURNS, JOINED)
"""Each edge has its own cloud half; or one cloud half takes their batches in turn; or it joins their features."""

EDGE_ALONE = -1
"""In a record: the cut of an edge that has the whole model."""


@checked
class SplitTask(Record):
    """The work of one message: a span of batches, for one party or, in one process, for all of them."""

    RECORD = SPLIT

    # The parties of this task.
    parties: tuple[int, ...]
    # The parties of the whole training.
    num_parties: int
    mode: Annotated[str, OneOf(CLOUD_MODES)]
    # Whether the front half is in the cloud.
    reverse: bool
    # Counted from the start of training.
    first_batch: int
    # The batches of each party in this message.
    num_batches: int
    total_batches: int
    batches_per_epoch: int
    seed: int
    # The cut of each party at the beginning; EDGE_ALONE for none.
    cuts: tuple[int, ...]
    bits: tuple[int, ...]
    # The replay window K of each party at the beginning.
    windows: tuple[int, ...]
    gradient_bits: int
    # The order of all actions (edgecloud.plan.timeline_actions); empty on a real link.
    actions: bytes = b""
    # host:port of the cloud; empty if both halves train in the client's process.
    address: str = ""
    # The cloud's session.
    run: str = ""
    # The batch that the session counts as its first.
    session_first: int = 0
    # Hexadecimal, of that session.
    token: str = ""
    # The fingerprint of the server's split model.
    fingerprint: str = ""
    # Digest of the server's frozen parameters, which are not sent.
    frozen_sha256: str = ""
    # Of a training that is one of several trials: its name. Halves are kept by it, so that any trial can go on.
    trial: str = ""

    def check(self) -> None:
        """Raise `ConfigError` for parties without their values and for batches beyond the training."""
        parties, cuts = len(self.parties), len(self.cuts)
        if not parties == cuts == len(self.bits) == len(self.windows) > 0:
            raise ConfigError(
                f"{parties} parties, {cuts} cuts; need one of each for every party, and its bits and "
                "window"
            )
        end = self.first_batch + self.num_batches
        if not 0 <= self.first_batch < end <= self.total_batches:
            raise ConfigError(
                f"batches {self.first_batch} to {end} of {self.total_batches} do not exist"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class SplitReport(Record):
    """The edge's measurements of a span of batches on a real link."""

    RECORD = SPLIT_REPORT

    # The cut and the width at the end.
    cut: int
    bits: int
    duration_s: float
    # The part of it on the edge's processor.
    compute_s: float
    up_bytes: int
    down_bytes: int
    # The number of gradients by staleness: the index is t - t'.
    staleness: tuple[int, ...]
    reconnects: int = 0
    # Re-cuts and lost links, one line each.
    events: tuple[str, ...] = ()
