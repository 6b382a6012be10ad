"""When a run ends before its last round; apart from the run's folder, since planning loads no Flower."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Ending:
    """When a run ends before its last round: once its quality reaches a target, or its time or epochs a limit."""

    # "accuracy" or "loss".
    quality: str
    target: float
    # None: no limit.
    most_virtual_s: float | None = None
    most_epochs: float | None = None
