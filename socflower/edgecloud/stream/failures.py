"""How a split training can end otherwise than with its last batch; each text is one line."""

from socflower.errors import SocflowerError


class SplitRefused(SocflowerError):
    """The other side does not want this, or what it says cannot be: trying again would not help."""


class SplitLost(SocflowerError):
    """The other side is gone, silent or out of reach for longer than was to be waited."""


class StartOver(Exception):
    """Not a failure: the other side has lost its place, or a party has, so all join anew and agree on a checkpoint."""


class FrameRefused(Exception):
    """A frame that no honest peer sends; the text says what is wrong with it. It ends that stream, nothing else."""
