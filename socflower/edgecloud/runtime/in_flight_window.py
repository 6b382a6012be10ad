"""The batches in flight between front and back half: bounded staleness by credits (F23)."""

from socflower.errors import ConfigError, require_range


class ReplayWindow:
    """Tracks the history queue: the batches whose forward pass is done and whose gradient is not applied yet.

    The forward pass of batch t is allowed while t − t′ ≤ K, where t′ is the oldest batch in flight (F23): so at most
    K + 1 are in flight, and with K = 0 forward and backward passes alternate, as in plain split learning. The paper
    discards batches with t − t′ > K; here the front half waits instead. Hence, whenever gradients arrive, a gradient is
    applied with a staleness (newest batch forward − its own) of at most the K that held at the forward pass of that
    newest batch.

    Batches go forward with consecutive numbers, the first with any, and gradients are applied in the same order, so the
    gradient of one batch cannot be applied to the activation of another.

    Not safe between threads: one loop owns it.
    """

    def __init__(self, limit: int) -> None:
        self.resize(limit)
        # Oldest first.
        self.in_flight = range(0)
        # The next to go forward; None before the first.
        self._next: int | None = None

    def resize(self, limit: int) -> None:
        """Set K: how many batches may go forward after one whose gradient has not been applied.

        After a decrease nothing goes forward until at most K batches are in flight.
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
        in_turn = batch >= 0 and self._next in (None, batch)
        if not in_turn or not self.may_forward():
            raise ConfigError(
                f"replay window: batch {batch} cannot go forward; {self._next or 0} is next, and "
                f"{list(self.in_flight)} are in flight (K = {self.limit})"
            )
        self._next = batch + 1
        first = batch if self.oldest is None else self.oldest
        self.in_flight = range(first, self._next)

    def close(self, batch: int) -> int:
        """Note that a batch's gradient is being applied, and return its staleness, newest − batch.

        Raises `ConfigError` unless it is the oldest in flight: applied to another activation it would corrupt the
        training.
        """
        if batch != self.oldest:
            raise ConfigError(
                f"replay window: a gradient for batch {batch} cannot be next; {list(self.in_flight)} are in flight"
            )
        staleness = self.in_flight[-1] - batch
        self.in_flight = self.in_flight[1:]
        return staleness
