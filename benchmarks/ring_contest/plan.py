"""What the members of a contest are told, and what they measure: plain values that travel as JSON."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """One way to train: plain torch, or our exchange in one of its arrangements."""

    name: str
    transport: str  # "ddp", "gloo", "grpc", or "none" for a member on its own
    num_buckets: int = 1
    compression: str = "none"
    tls: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Contest:
    """Entries that train the same model from the same weights on the same batches, and take turns at it."""

    model: str
    samples: int  # of a member's part of the batch
    entries: tuple[Entry, ...]
    rounds: int
    steps: int  # of each entry in a round
    interface: str  # that leads to the other members

    @classmethod
    def from_document(cls, document: dict[str, object]) -> "Contest":
        """Return what `dataclasses.asdict` has taken apart."""
        entries = document["entries"]
        assert isinstance(entries, list)
        return cls(**{**document, "entries": tuple(Entry(**entry) for entry in entries)})  # type: ignore[arg-type]


@dataclass(frozen=True, kw_only=True, slots=True)
class Times:
    """What a member measured of one entry, a value for each round, for one step."""

    step_s: tuple[float, ...]  # until the last member was done
    cpu_s: tuple[float, ...]  # of this process, all its threads
    forward_s: tuple[float, ...]  # only of a member on its own
    backward_s: tuple[float, ...]
    sent_bytes: tuple[int, ...]  # that left through the interface, all headers included
    difference: float  # from DDP's weights after the first step, the largest; NaN without DDP
    same_on_all: bool  # whether all members had the same weights, bit for bit, at the end
