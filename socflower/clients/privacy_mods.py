"""Adapts Flower's mods that clip updates or add noise (differential privacy) to clients that train as groups.

These mods expect a TRAIN message with one config record, and a reply with one model; groups use more records.
"""

import copy

import numpy as np
from flwr.app import Context, Message, MessageType, RecordDict
from flwr.clientapp.mod import LocalDpMod, adaptiveclipping_mod, fixedclipping_mod
from flwr.clientapp.typing import ClientAppCallable, Mod

from socflower.errors import ConfigError
from socflower.wire.message_keys import DEPARTURES, GROUP, RING, SAMPLES
from socflower.wire.split_message_keys import SPLIT

_HIDDEN = (GROUP, SPLIT, DEPARTURES, SAMPLES)
"""Records of a message besides its model and the user's config."""


def adapt_mod(mod: Mod) -> Mod:
    """Return a mod that works with groups: from Flower's clipping mods our records are hidden; others are unchanged.

    What is clipped is the update that the client sends, which is that of the whole group.
    """
    clips = isinstance(mod, LocalDpMod) or mod in (fixedclipping_mod, adaptiveclipping_mod)
    return _ClippingAdapter(mod) if clips else mod


def _name_of(mod: Mod) -> str:
    return getattr(mod, "__name__", type(mod).__name__)


class _ClippingAdapter:
    """Gives a mod only the model and config of TRAIN messages; other messages bypass it, since they have no update."""

    def __init__(self, mod: Mod) -> None:
        self._mod = mod

    def __call__(self, message: Message, context: Context, call_next: ClientAppCallable) -> Message:
        if message.metadata.message_type.partition(".")[0] != MessageType.TRAIN:
            return call_next(message, context)
        if RING in message.content.config_records:
            raise ConfigError(
                f"{_name_of(self._mod)}: a member of a ring sends its gradients to the others, and has "
                "no update of its own to clip; take it off the mods, and clip at the server"
            )
        for record in message.content.array_records.values():
            for name, array in record.items():
                if np.issubdtype(np.dtype(array.dtype), np.integer):
                    raise ConfigError(
                        f"{_name_of(self._mod)}: the model has {name!r}, an integer, which cannot be "
                        "clipped; use GroupNorm in place of BatchNorm"
                    )
        replies: list[Message] = []

        def answer(_: Message, context: Context) -> Message:
            replies.append(call_next(message, context))
            return replies[0]

        # A copy, since on some engines nodes share the content object.
        shown = copy.copy(message)
        shown.content = RecordDict(
            {name: record for name, record in message.content.items() if name not in _HIDDEN}
        )
        reply = self._mod(shown, context, answer)
        # If all SoCs of a group were preempted, there is no model to clip.
        left = replies and replies[0].has_content() and not replies[0].content.array_records
        return replies[0] if left else reply
