"""The errors that end a split training before its last batch; each message is one line."""

from socflower.errors import SocflowerError


class SplitRefused(SocflowerError):
    """The other side refused, or sent something invalid: retrying would not help."""


class SplitLost(SocflowerError):
    """The other side was gone, silent or unreachable for longer than the timeout."""


class StartOver(Exception):
    """Not a failure: the other side or a party has lost its state, so all join again and agree on a checkpoint."""
