"""Opening a generation of a ring by the name of what carries its bytes."""

from collections.abc import Sequence

from socflower.clients.collective import Collective
from socflower.clients.gloo_ring import GlooRing
from socflower.clients.grpc_ring import GrpcRing
from socflower.clients.in_process_ring import in_process_rings
from socflower.clients.ring_port import RingPort
from socflower.errors import ConfigError

TRANSPORTS = ("gloo", "grpc")


def open_ring(transport: str, port: RingPort, ranks: Sequence[int], generation: int, heartbeat_s: float) -> Collective:
    """Return this member's end of generation `generation` among `ranks` of the port's addresses, in ring order.

    "gloo" is for a trusted network, "grpc" for any. A member that is alone needs neither. Generations are numbered
    upwards; the one before has to be closed. `heartbeat_s` is how long a member may be out of reach while the ring
    opens. Raises `ConfigError` for other names, and for gloo on an address that is not private.
    """
    if transport not in TRANSPORTS:
        raise ConfigError(f'ring transport "{transport}" is unknown; give one of {", ".join(TRANSPORTS)}')
    if len(ranks) == 1:
        return in_process_rings(1)[0]
    ring = GlooRing if transport == "gloo" else GrpcRing
    return ring(port, ranks, generation, heartbeat_s)
