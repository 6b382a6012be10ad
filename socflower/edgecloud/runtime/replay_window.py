"""The batches in flight between front and back half: bounded staleness by credits (F23)."""

from socflower.errors import ConfigError, require_range


class ReplayWindow:
    """Tracks the history queue: the batches whose forward pass is done and whose gradient is not applied yet.

    The forward pass of batch t is allowed while t − t′ ≤ K, where t′ is the oldest batch in flight: so at most K + 1
    are in flight, and with K = 0 forward and backward passes alternate, as in plain split learning. Batches are never
    discarded, as the paper does where t − t′ > K; the front half waits instead. Hence, whenever gradients arrive, a
    gradient is applied with a staleness (newest batch forward − its own) of at most the K that held at the forward pass
    of that newest batch.

    Batches go forward with consecutive numbers, the first with any, and gradients are applied in the same order, so the
    gradient of one batch cannot be applied to the activation of another.

    Not safe between threads: one loop owns it.
    """

    def __init__(self, limit: int) -> None:
        self.resize(limit)
        self.in_flight = range(0)  # oldest first
        self._next: int | None = None  # the next to go forward; None before the first

    def resize(self, limit: int) -> None:
        """Set K: how many batches may go forward after one whose gradient has not been applied.

        With a smaller one nothing goes forward until as many batches are closed as that takes.
        """
        require_range("replay window", least=0, K=limit)
        self.limit = limit

    @property
    def drained(self) -> bool:
        """Whether no batch is in flight: only then may the cut move (F27)."""
        return not self.in_flight

    @property
    def oldest(self) -> int | None:
        """The batch whose gradient comes next; None if none is in flight."""
        return self.in_flight[0] if self.in_flight else None

    def may_forward(self) -> bool:
        """Whether the window allows the next forward pass."""
        return len(self.in_flight) <= self.limit

    def forward(self, batch: int) -> None:
        """Note that a batch has gone forward.

        Raises `ConfigError` for a batch out of turn, and if the window is full: ask `may_forward` first.
        """
        if batch < 0:
            raise ConfigError(
                f"replay window: batch {batch} cannot be the first; batches count from 0"
            )
        if self._next is not None and batch != self._next:
            raise ConfigError(
                f"replay window: batch {batch} went forward where {self._next} is next; batches go "
                "forward one after the other, each once"
            )
        if not self.may_forward():
            raise ConfigError(
                f"replay window: batch {batch} must wait until batch {self.oldest} has its gradient "
                f"(K = {self.limit})"
            )
        self._next = batch + 1
        self.in_flight = range(self.in_flight[0] if self.in_flight else batch, self._next)

    def close(self, batch: int) -> int:
        """Note that a batch's gradient is being applied, and return its staleness, newest − batch.

        Raises `ConfigError` unless it is the oldest that is out: applied elsewhere it would corrupt the training.
        """
        if batch not in self.in_flight:
            out = (
                f"batches {self.in_flight[0]} to {self.in_flight[-1]} are"
                if self.in_flight
                else "none is"
            )
            raise ConfigError(
                f"replay window: a gradient for batch {batch} has no activation to be applied to; {out} "
                "out"
            )
        if batch != self.oldest:
            raise ConfigError(
                f"replay window: the gradient of batch {batch} came where that of batch {self.oldest} is "
                "next; gradients are applied in the order in which their batches went forward"
            )
        staleness = self.in_flight[-1] - batch
        self.in_flight = self.in_flight[1:]
        return staleness
