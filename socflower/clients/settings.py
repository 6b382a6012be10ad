"""Settings that nobody at a client reads, in its messages and in its node config: refused by name, never passed over.

A key that is misspelled, or that belongs to another client or strategy, would else change nothing and say nothing.
"""

import difflib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from flwr.app import ConfigRecord, Context, Message
from flwr.clientapp.mod import adaptiveclipping_mod, fixedclipping_mod
from flwr.clientapp.typing import Mod

from socflower.clients.heat_mod import node_heat_mod
from socflower.clients.node_config import place_of, ring_node
from socflower.errors import ConfigError
from socflower.thermal.limits import HeatLimits
from socflower.wire.message_keys import (
    ARRAYS,
    CONFIG,
    DEPARTURES,
    GROUP,
    NUM_PARTITIONS,
    PARTITION_ID,
    PRICED,
    RESUMED,
    RING,
    SERVER_ROUND,
    WARM_UP,
)
from socflower.wire.split_message_keys import SPLIT

ALONE_KEYS = ("batch-size", "local-epochs", "num-rounds", "seed")
"""What a client that trains alone reads of a message's config."""

_OF_STRATEGIES = frozenset({SERVER_ROUND, PRICED, RESUMED, WARM_UP})
"""Keys that Flower's and our strategies put into configs themselves."""

_CLIPPING_NORM = "clipping_norm"
_KEYS_OF_MODS: Mapping[Any, tuple[str, ...]] = {
    fixedclipping_mod: (_CLIPPING_NORM,), adaptiveclipping_mod: (_CLIPPING_NORM,), node_heat_mod: ("heat",)}

_MEANT = {
    "proximal-mu": "the trainers have no proximal term, so that FedProx would be FedAvg: use FedAvg",
    _CLIPPING_NORM: "what clips is a mod: give fixedclipping_mod or adaptiveclipping_mod of flwr.clientapp.mod",
    "lr": "the learning rate is the trainer's, as in FP32Trainer(optimizer=sgd(0.01))",
    "learning-rate": "the learning rate is the trainer's, as in FP32Trainer(optimizer=sgd(0.01))",
}
"""What to do instead, for keys that are often met."""

_NODE_KEYS = (
    PARTITION_ID, NUM_PARTITIONS, "board", "slot", "ring", "ring-bind", "ring-ca", "ring-certificate", "ring-key",
    "ring-trusted", "ring-transport", "preempt-file", "preempt-port", "preempt-bind", "preempt-signal", "cloud-ca",
    "cloud-certificate", "cloud-key", "cloud-insecure", "cloud-folder", "state-folder", "heat",
    *(f"heat-{entry.name.replace('_', '-')}" for entry in fields(HeatLimits)))
"""All keys of a node config that something here reads; others are the app's own, unless they come close to one."""

_OWN_PREFIXES = ("ring-", "cloud-", "preempt-", "heat-")
_CLOSE = 0.85  # of `difflib`, from which on a key counts as a misspelled one


@dataclass(frozen=True, kw_only=True, slots=True)
class ReadSettings:
    """What a ClientApp reads. `maker` is the function that made it; `extra_keys` are what the user's own code reads."""

    maker: str
    mods: Sequence[Mod] = ()
    extra_keys: Sequence[str] = ()
    declared: frozenset[str] = field(init=False)  # `extra_keys`, and what known mods read

    def __post_init__(self) -> None:
        if isinstance(self.extra_keys, str) or not all(isinstance(key, str) for key in self.extra_keys):
            raise ConfigError(f"{self.maker}: extra_keys = {self.extra_keys!r} must be a list of names, such as "
                              "['clipping_norm']")
        of_mods = (key for mod in self.mods for key in _keys_of(mod))
        object.__setattr__(self, "declared", frozenset({*self.extra_keys, *of_mods}))

    def check_training(self, message: Message) -> None:
        """Raise `ConfigError` for a setting of a TRAIN message that nobody reads."""
        records = message.content.config_records
        if SPLIT in records:
            self._check(message, "train config", (ARRAYS, CONFIG, SPLIT), (),
                        "a split training's settings are arguments of SplitReplay and of its program")
        elif GROUP in records:
            self._check(message, "train config", (ARRAYS, CONFIG, GROUP, RING, DEPARTURES), (),
                        "a group's batch size, epochs and seed are arguments of its strategy")
        else:
            self._check(message, "train config", (ARRAYS, CONFIG), ALONE_KEYS,
                        f"this client reads {', '.join(ALONE_KEYS)}")

    def check_evaluation(self, message: Message) -> None:
        """Raise `ConfigError` for a setting of an EVALUATE message, of which nothing is read."""
        self._check(message, "evaluate config", (ARRAYS, CONFIG), (), "this client reads none when it evaluates")

    def check_node(self, context: Context) -> None:
        """Raise `ConfigError` for a key of the node config that is one of ours misspelled, or lacks what belongs to it.
        """
        config = context.node_config
        ring_node(config)
        place_of(config)
        for key in config:
            plain = key.lower().replace("_", "-")
            if key in _NODE_KEYS or key in self.declared:
                continue
            close = difflib.get_close_matches(plain, _NODE_KEYS, n=1, cutoff=_CLOSE)
            if close or plain.startswith(_OWN_PREFIXES):
                known = close or [name for name in _NODE_KEYS if name.startswith(plain.partition("-")[0])]
                raise ConfigError(f"node {context.node_id}: its node config has {key}, which nobody reads; did you "
                                  f"mean {' or '.join(known)}? If it is your app's own key, declare it: "
                                  f"{self.maker}(…, extra_keys=[{key!r}])")
        if config.get("heat") is True and "heat" not in self.declared:
            raise ConfigError(f"node {context.node_id}: its node config has heat=true, but this app would not mind the "
                              f"heat; give {self.maker} mods=[node_heat_mod] of socflower.clients.heat_mod, or, if "
                              "another mod does, extra_keys=['heat']")

    def _check(self, message: Message, what: str, records: Collection[str], keys: Sequence[str], known: str) -> None:
        for name in message.content:
            if name not in records and name not in self.declared:
                raise ConfigError(self._unread(
                    f"message: nobody reads its record {name!r}", name,
                    f"this client reads {', '.join(records)}; leave arrayrecord_key and configrecord_key of the "
                    "strategy as they are"))
        config = message.content.config_records.get(CONFIG, ConfigRecord())
        for key in config:
            if key not in keys and key not in _OF_STRATEGIES and key not in self.declared:
                raise ConfigError(self._unread(f"{what}: nobody reads {key!r}{_hint(key, keys)}", key,
                                               "; ".join(filter(None, (_MEANT.get(key), known)))))

    def _unread(self, text: str, key: str, known: str) -> str:
        return f"{text}; {known}; if a mod of yours reads it, declare it: {self.maker}(…, extra_keys=[{key!r}])"


def _keys_of(mod: Mod) -> Iterable[str]:
    known: Callable[..., Any] = mod
    return _KEYS_OF_MODS.get(known, ()) if getattr(known, "__hash__", None) else ()


def _hint(key: str, keys: Sequence[str]) -> str:
    close = difflib.get_close_matches(key.lower().replace("_", "-"), keys, n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""
