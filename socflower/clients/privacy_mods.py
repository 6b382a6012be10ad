"""Flower's mods that clip or blur what a client sends (differential privacy), around clients that train as groups.

They take a TRAIN message with one config record, and one model that comes back; messages of groups have more records.
"""

import copy

from flwr.app import Context, Message, MessageType, RecordDict
from flwr.clientapp.mod import LocalDpMod, adaptiveclipping_mod, fixedclipping_mod
from flwr.clientapp.typing import ClientAppCallable, Mod

from socflower.errors import ConfigError
from socflower.wire.message_keys import DEPARTURES, GROUP, RING
from socflower.wire.split_message_keys import SPLIT

_OURS = (GROUP, SPLIT, DEPARTURES)
"""Records of a message beside its model and the user's config."""


def fitted(mod: Mod) -> Mod:
    """Return a mod as it fits around groups: Flower's that clip see less of a message, all others are left as they are.

    What they clip is the update that leaves the client, which is the whole group's.
    """
    return _Clipping(mod) if isinstance(mod, LocalDpMod) or mod in (fixedclipping_mod, adaptiveclipping_mod) else mod


class _Clipping:
    """Shows a mod model and config of a TRAIN message, and nothing of others, which have no update."""

    def __init__(self, mod: Mod) -> None:
        self._mod = mod

    def __call__(self, message: Message, context: Context, call_next: ClientAppCallable) -> Message:
        if message.metadata.message_type.partition(".")[0] != MessageType.TRAIN:
            return call_next(message, context)
        if RING in message.content.config_records:
            name = getattr(self._mod, "__name__", type(self._mod).__name__)
            raise ConfigError(f"{name}: a member of a ring sends its gradients to the others, and has no update of its "
                              "own to clip; take it off the mods, and clip at the server")
        replies: list[Message] = []

        def answer(_: Message, context: Context) -> Message:
            replies.append(call_next(message, context))
            return replies[0]

        # In a copy: on some engines one content goes to many nodes.
        shown = copy.copy(message)
        shown.content = RecordDict({name: record for name, record in message.content.items() if name not in _OURS})
        reply = self._mod(shown, context, answer)
        # All SoCs of a group may have left for their users' own work: there is no model, so nothing to clip.
        left = replies and replies[0].has_content() and not replies[0].content.array_records
        return replies[0] if left else reply
