"""Refuses unknown settings in a client's messages and node config.

A key that is misspelled, or that belongs to another client or strategy, would otherwise be ignored silently.
"""

import hashlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from flwr.app import ConfigRecord, Context, Message
from flwr.clientapp.mod import adaptiveclipping_mod, fixedclipping_mod
from flwr.clientapp.typing import Mod

from socflower.clients.heat_mod import node_heat_mod
from socflower.clients.node_config import board_and_slot, ring_node
from socflower.did_you_mean import closest, did_you_mean
from socflower.errors import ConfigError
from socflower.thermal.limits import HeatLimits
from socflower.wire.message_keys import (
    ARRAYS,
    CONFIG,
    DEPARTURES,
    EVALUATED,
    FROZEN_SHA256,
    GROUP,
    HANDED,
    NUM_PARTITIONS,
    PARTITION_ID,
    PIPELINE,
    PRICED,
    RESUMED,
    RING,
    SAMPLES,
    SCALES,
    SERVER_ROUND,
    STREAM,
    TRAINING,
    WARM_UP,
)
from socflower.wire.split_message_keys import SPLIT

STANDALONE_KEYS = ("batch-size", "local-epochs", "num-rounds", "proximal-mu", "seed")
"""Config keys that are read by a client that trains alone."""

_STRATEGY_KEYS = frozenset(
    {EVALUATED, FROZEN_SHA256, SERVER_ROUND, PRICED, RESUMED, TRAINING, WARM_UP}
)
"""Keys that Flower's and our strategies set in configs, and those that are read of every config."""

_CLIPPING_NORM = "clipping_norm"
_KEYS_OF_MODS: Mapping[Any, tuple[str, ...]] = {
    fixedclipping_mod: (_CLIPPING_NORM,),
    adaptiveclipping_mod: (_CLIPPING_NORM,),
    node_heat_mod: ("heat",),
}

_RATE_IS_THE_TRAINERS = (
    "the learning rate is the trainer's: give trainer=lambda context, config: "
    "FP32Trainer(optimizer=sgd(config['lr']))"
)
_REMEDIES = {
    "proximal-mu": "this key is for clients that train alone: for groups give SoCFlow(outer=FedProx(proximal_mu=...))",
    _CLIPPING_NORM: "what clips is a mod: give fixedclipping_mod or adaptiveclipping_mod of flwr.clientapp.mod",
    "lr": _RATE_IS_THE_TRAINERS,
    "learning-rate": _RATE_IS_THE_TRAINERS,
}
"""The remedies for keys that users often try."""

_NODE_KEYS = (
    PARTITION_ID,
    NUM_PARTITIONS,
    "board",
    "slot",
    "ring",
    "ring-bind",
    "ring-ca",
    "ring-certificate",
    "ring-key",
    "ring-trusted",
    "ring-transport",
    "preempt-file",
    "preempt-port",
    "preempt-bind",
    "preempt-signal",
    "cloud-ca",
    "cloud-certificate",
    "cloud-key",
    "cloud-insecure",
    "cloud-folder",
    "state-folder",
    "heat",
    *(f"heat-{entry.name.replace('_', '-')}" for entry in fields(HeatLimits)),
)
"""All node config keys that are read here; others belong to the app, unless they are similar to one of these."""

_OWN_PREFIXES = ("ring-", "cloud-", "preempt-", "heat-")
# The ratio of `difflib` from which a key counts as misspelled.
_MIN_SIMILARITY = 0.85


class MissingSetting(KeyError, ConfigError):
    """A setting that a trainer's function reads was not sent."""

    def __str__(self) -> str:
        return (
            f"the trainer's function reads {self.args[0]!r} of the train config, which was not sent; give it by "
            "the strategy's start(..., train_config=ConfigRecord({...}))"
        )


class MessageConfig(Mapping[str, Any]):
    """The train config of a message, for the function that makes the trainer; notes which keys it reads."""

    def __init__(self, message: Message) -> None:
        self._config = message.content.config_records.get(CONFIG, ConfigRecord())
        self.read: set[str] = set()

    def __getitem__(self, key: str) -> Any:
        if key not in self._config:
            raise MissingSetting(key)
        self.read.add(key)
        return self._config[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._config)

    def __len__(self) -> int:
        return len(self._config)

    def digest(self, declared: Collection[str]) -> str:
        """Return a digest of the trainer's settings, which are neither the strategy's nor `declared` by mods."""
        settings = sorted(
            (key, repr(self._config[key]))
            for key in self._config.keys() - _STRATEGY_KEYS - {*declared}
        )
        return hashlib.sha256(repr(settings).encode()).hexdigest() if settings else ""


@dataclass(frozen=True, kw_only=True, slots=True)
class ReadSettings:
    """The settings that a ClientApp reads. `maker` is the function that made it; `extra_keys` are read by user code."""

    maker: str
    mods: Sequence[Mod] = ()
    extra_keys: Sequence[str] = ()
    # The union of `extra_keys` and the keys of known mods.
    declared: frozenset[str] = field(init=False)

    def __post_init__(self) -> None:
        if isinstance(self.extra_keys, str) or not all(
            isinstance(key, str) for key in self.extra_keys
        ):
            raise ConfigError(
                f"{self.maker}: extra_keys = {self.extra_keys!r} must be a list of names, such as "
                "['clipping_norm']"
            )
        of_mods = (key for mod in self.mods for key in _keys_of(mod))
        object.__setattr__(self, "declared", frozenset({*self.extra_keys, *of_mods}))

    def check_training(self, message: Message, read: Collection[str] = ()) -> None:
        """Raise `ConfigError` for an unknown setting of a TRAIN message; the trainer's function has `read` some."""
        records = message.content.config_records
        allowed: tuple[str, ...] = (ARRAYS, CONFIG)
        keys: Collection[str] = read
        if SPLIT in records:
            allowed, keys = (*allowed, SPLIT), ()
            known = "a split training's settings are arguments of SplitReplay and of its program"
        elif GROUP in records:
            allowed = (*allowed, GROUP, RING, PIPELINE, DEPARTURES, HANDED, STREAM, SAMPLES, SCALES)
            known = "a group's batch size, epochs and seed are arguments of its strategy"
        else:
            allowed, keys = (*allowed, SCALES), (*STANDALONE_KEYS, *read)
            known = f"this client reads {', '.join(STANDALONE_KEYS)}"
        self._require_float32(records)
        self._check(message, "train config", allowed, keys, known)

    def _require_float32(self, records: Collection[str]) -> None:
        """Raise `ConfigError` for a model in int8 if a mod of Flower's or the user's may read it in float32."""
        own = "socflower."
        if SCALES in records and any(not mod.__module__.startswith(own) for mod in self.mods):
            raise ConfigError(
                f"{self.maker}: its mods read models in float32, and the server sends int8; leave out the mods, or "
                "wire = 'int8'"
            )

    def check_evaluation(self, message: Message) -> None:
        """Raise `ConfigError` for any setting of an EVALUATE message: none is read."""
        known = "this client reads none when it evaluates"
        self._check(message, "evaluate config", (ARRAYS, CONFIG), (), known)

    def check_node(self, context: Context) -> None:
        """Raise `ConfigError` for a misspelled key of the node config, or one without the keys that it requires."""
        config = context.node_config
        ring_node(config)
        board_and_slot(config)
        for key in config:
            plain = key.lower().replace("_", "-")
            if key in _NODE_KEYS or key in self.declared:
                continue
            meant = closest(plain, _NODE_KEYS, similarity=_MIN_SIMILARITY)
            if meant or plain.startswith(_OWN_PREFIXES):
                beginning = plain.partition("-")[0]
                known = (
                    [meant]
                    if meant
                    else [name for name in _NODE_KEYS if name.startswith(beginning)]
                )
                raise ConfigError(
                    f"node {context.node_id}: its node config has {key}, which is not used; did you "
                    f"mean {' or '.join(known)}? If it is your app's own key, declare it: "
                    f"{self.maker}(…, extra_keys=[{key!r}])"
                )
        if config.get("heat") is True and "heat" not in self.declared:
            raise ConfigError(
                f"node {context.node_id}: its node config has heat=true, but this app does not limit "
                f"heat; give {self.maker} mods=[node_heat_mod] of socflower.clients.heat_mod, or, if "
                "another mod does, extra_keys=['heat']"
            )

    def _check(
        self,
        message: Message,
        what: str,
        records: Collection[str],
        keys: Collection[str],
        known: str,
    ) -> None:
        for name in message.content:
            if name not in records and name not in self.declared:
                raise self._unused(
                    f"message: its record {name!r} is not used; this client reads {', '.join(records)}; "
                    "leave arrayrecord_key and configrecord_key of the strategy as they are",
                    name,
                )
        used = {*keys, *_STRATEGY_KEYS, *self.declared}
        for key in message.content.config_records.get(CONFIG, ConfigRecord()):
            if key not in used:
                remedy = f"{_REMEDIES[key]}; {known}" if key in _REMEDIES else known
                text = f"{what}: {key!r} is not used{_suggestion(key, keys)}; {remedy}"
                raise self._unused(text, key)

    def _unused(self, text: str, key: str) -> ConfigError:
        return ConfigError(
            f"{text}; if a mod of yours reads it, declare it: {self.maker}(…, extra_keys=[{key!r}])"
        )


def _keys_of(mod: Mod) -> Iterable[str]:
    known: Callable[..., Any] = mod
    return _KEYS_OF_MODS.get(known, ()) if getattr(known, "__hash__", None) else ()


def _suggestion(key: str, keys: Collection[str]) -> str:
    meant = did_you_mean(key.lower().replace("_", "-"), keys)
    return meant and f" ({meant})"
