"""The batches in flight between front and back half: bounded staleness by credits (F23)."""

from socflower.errors import ConfigError


class ReplayWindow:
    """Tracks the history queue: the batches whose forward pass is done and whose gradient is not applied yet.

    The forward pass of batch t is allowed while t − t′ ≤ K, where t′ is the oldest batch in flight: so at most K + 1
    are in flight, and with K = 0 forward and backward passes alternate, as in plain split learning. Batches are never
    discarded, as the paper does where t − t′ > K; the front half waits instead. Hence, whenever gradients arrive, a
    gradient is applied with a staleness (newest batch forward − its own) of at most the K that held at the forward pass
    of that newest batch.

    Batches go forward with consecutive numbers, the first with any, and gradients are applied in the same order: so
    two numbers are the whole state, and the gradient of one batch cannot be applied to the activation of another.

    Not safe between threads: one loop owns it.
    """

    def __init__(self, limit: int) -> None:
        self._limit = _checked(limit)
        self._oldest: int | None = None  # the next to be closed; None before the first went forward
        self._next = 0  # the next to go forward

    @property
    def limit(self) -> int:
        """K: how many batches may go forward after one whose gradient has not been applied."""
        return self._limit

    @property
    def in_flight(self) -> range:
        """The batches in flight, oldest first."""
        return range(self._next if self._oldest is None else self._oldest, self._next)

    @property
    def drained(self) -> bool:
        """Whether no batch is in flight: only then may the cut move (F27)."""
        return not self.in_flight

    @property
    def oldest(self) -> int | None:
        """The batch whose gradient comes next; None if none is in flight."""
        return self.in_flight[0] if self.in_flight else None

    @property
    def newest(self) -> int | None:
        """The batch that went forward last, be its gradient applied or not; None before the first."""
        return None if self._oldest is None else self._next - 1

    def may_forward(self) -> bool:
        """Whether the window allows the next forward pass."""
        return len(self.in_flight) <= self._limit

    def forward(self, batch: int) -> None:
        """Note that a batch has gone forward.

        Raises `ConfigError` for a batch out of turn, and if the window is full: ask `may_forward` first.
        """
        if self._oldest is None:
            if batch < 0:
                raise ConfigError(f"replay window: batch {batch} cannot be the first; batches count from 0")
            expected = batch
        else:
            expected = self._next
        if batch != expected:
            raise ConfigError(f"replay window: batch {batch} went forward where {expected} is next; batches go forward "
                              "one after the other, each once")
        if not self.may_forward():
            raise ConfigError(f"replay window: batch {batch} must wait until batch {self.oldest} has its gradient "
                              f"(K = {self._limit})")
        if self._oldest is None:
            self._oldest = batch
        self._next = batch + 1

    def close(self, batch: int) -> int:
        """Note that a batch's gradient is being applied, and return its staleness, newest − batch.

        Raises `ConfigError` unless it is the oldest that is out: applied elsewhere it would corrupt the training.
        """
        staleness = self.staleness_of(batch)
        if batch != self.oldest:
            raise ConfigError(f"replay window: the gradient of batch {batch} came where that of batch {self.oldest} is "
                              "next; gradients are applied in the order in which their batches went forward")
        self._oldest = batch + 1
        return staleness

    def staleness_of(self, batch: int) -> int:
        """Return the number of forward passes after a batch in flight; `ConfigError` if it is not in flight."""
        if batch not in self.in_flight:
            out = f"batches {self.oldest} to {self.newest} are" if self.in_flight else "none is"
            raise ConfigError(f"replay window: a gradient for batch {batch} has no activation to be applied to; {out} "
                              "out")
        return self.in_flight[-1] - batch

    def resize(self, limit: int) -> None:
        """Set another K. With a smaller one nothing goes forward until as many batches are closed as that takes."""
        self._limit = _checked(limit)


def _checked(limit: int) -> int:
    if limit < 0:
        raise ConfigError(f"replay window: K = {limit} must be 0 (plain split learning) or more")
    return limit
