"""The tasks and the measurements of a contest's members: plain values that travel as JSON."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """One way to train: plain torch, or our exchange in one of its arrangements."""

    name: str
    # "ddp", "gloo", "grpc", or "none" for a member on its own.
    transport: str
    num_buckets: int = 1
    compression: str = "none"
    tls: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Contest:
    """Entries that train the same model from the same weights on the same batches, and take turns."""

    model: str
    # Of a member's part of the batch.
    samples: int
    entries: tuple[Entry, ...]
    rounds: int
    # Of each entry in a round.
    steps: int
    # The network interface to the other members.
    interface: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Times:
    """A member's measurements of one entry: values per step, one for each round."""

    # Until the last member had finished.
    step_s: tuple[float, ...]
    # Of all threads of this process.
    cpu_s: tuple[float, ...]
    # Passes are measured only for a member on its own.
    forward_s: tuple[float, ...]
    backward_s: tuple[float, ...]
    # Through the interface, with all headers.
    sent_bytes: tuple[int, ...]
    # The largest difference from DDP's weights after the first step; NaN without DDP.
    difference: float
    # Whether the weights of all members had the same bits at the end.
    same_on_all: bool
