"""The ring settings of a node, from `flower-supernode --node-config`."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

from socflower.errors import ConfigError
from socflower.peers.transports.port import PROTOCOL_VERSION
from socflower.wire.message_keys import GRPC_WITH_TLS, NodeStatus
from socflower.wire.secure_channel import Tls

NodeConfig: TypeAlias = Mapping[str, str | int | float | bool]

_TLS_KEYS = ("ring-ca", "ring-certificate", "ring-key")
_KEYS_BESIDE_RING = (*_TLS_KEYS, "ring-bind", "ring-trusted", "ring-transport")


@dataclass(frozen=True, kw_only=True, slots=True)
class RingNode:
    """A machine's ring port and place in the cluster.

    Keys: `ring` (host:port that peers connect to), `ring-bind` (host:port to listen on, if another), `ring-ca`,
    `ring-certificate`, `ring-key` (PEM files; all three or none), `ring-trusted` (true: unencrypted rings on public
    addresses too), `ring-transport` (gloo or grpc, to allow only one), `board`, `slot`.
    """

    address: str
    listen: str
    tls: Tls | None
    trusted: bool
    board: int
    slot: int
    transports: tuple[str, ...]

    @property
    def status(self) -> NodeStatus:
        """The status that this node reports to a strategy."""
        return NodeStatus(
            ring=self.address,
            board=self.board,
            slot=self.slot,
            transports=self.transports,
            protocol=PROTOCOL_VERSION,
        )


def ring_node(node_config: NodeConfig) -> RingNode | None:
    """Return the ring settings of a node config, or None without `ring`. Raises `ConfigError` if incomplete."""
    address = node_config.get("ring")
    given = [key for key in _TLS_KEYS if node_config.get(key)]
    if not address:
        alone = [key for key in _KEYS_BESIDE_RING if node_config.get(key)]
        if alone:
            raise ConfigError(
                f'node config: {alone[0]} without ring; add ring="host:port", the address of this '
                "machine's ring port"
            )
        return None
    missing = [key for key in _TLS_KEYS if key not in given]
    if given and missing:
        raise ConfigError(
            f"node config: {given[0]} without {missing[0]}; a ring with TLS needs all three"
        )
    transport = node_config.get("ring-transport")
    if transport not in (None, "gloo", "grpc"):
        raise ConfigError(
            f"node config: ring-transport = {transport!r} is unknown; use gloo or grpc"
        )
    tls = Tls.from_keys(node_config, "ring")
    over_grpc = GRPC_WITH_TLS if tls else "grpc"
    if transport is not None:
        transports: tuple[str, ...] = ("gloo" if transport == "gloo" else over_grpc,)
    else:
        # Certificates ask for encryption, which gloo does not have.
        transports = (over_grpc,) if tls else ("gloo", over_grpc)
    board, slot = board_and_slot(node_config)
    return RingNode(
        address=str(address),
        listen=str(node_config.get("ring-bind") or address),
        tls=tls,
        trusted=switch(node_config, "ring-trusted"),
        board=board,
        slot=slot,
        transports=transports,
    )


def switch(node_config: NodeConfig, key: str) -> bool:
    """Return a key that is true or false, false without it.

    In quotes, "false" would count as true, so texts raise `ConfigError`.
    """
    value = node_config.get(key, False)
    if not isinstance(value, bool):
        raise ConfigError(f"node config: {key} = {value!r} must be true or false, without quotes")
    return value


def board_and_slot(node_config: NodeConfig) -> tuple[int, int]:
    """Return board and slot of a node, -1 without. Raises `ConfigError` for one without the other."""
    board, slot = _index(node_config, "board"), _index(node_config, "slot")
    if (board < 0) != (slot < 0):
        known, missing = ("slot", "board") if board < 0 else ("board", "slot")
        raise ConfigError(
            f"node config: {known} without {missing}; a place in the cluster needs both"
        )
    return board, slot


def _index(node_config: NodeConfig, key: str) -> int:
    value = node_config.get(key, -1)
    if isinstance(value, bool) or not isinstance(value, int) or value < -1:
        raise ConfigError(f"node config: {key} = {value!r} must be a whole number, 0 or more")
    return value
