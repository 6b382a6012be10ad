"""What has gone through a channel."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Transfer:
    """A message that has crossed the link, as its sender saw it."""

    sent: bool  # by this end; otherwise by the other
    num_bytes: int  # with framing
    seconds: float  # from its first byte, or from when the link was free of the one before, until all was known there
    at_s: float  # when this end knew, on the channel's clock


@dataclass(slots=True)
class Traffic:
    """What has gone through a channel, all streams together."""

    sent_bytes: int = 0  # frames, those sent again too
    received_bytes: int = 0
    streams: int = 0
    peak_inbox_bytes: int = 0
    peak_kept_bytes: int = 0
    peak_kept_messages: int = 0
