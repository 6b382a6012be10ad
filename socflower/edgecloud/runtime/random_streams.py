"""Random numbers of a batch's forward pass that depend on seed, batch and layer only, wherever the model is cut.

Plain torch draws all masks of a pass from one stream, so that those behind the cut would depend on how many were drawn
before it, on another machine. Here every layer that draws begins a stream of its own. Nothing need be kept for a replay
(F22), and a pass that both halves share draws what it draws in one place.
"""

import hashlib
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from socflower.cluster.torch_random import forked_generator

_active = threading.local()


def layer_seed(seed: int, batch: int, layer: int) -> int:
    """Return the seed of a layer's stream for a batch, in 0 .. 2^63 - 1; layers are numbered by the traced graph."""
    digest = hashlib.blake2b(f"{seed}/{batch}/{layer}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


@contextmanager
def random_streams(seed: int, batch: int, device: torch.device | None = None) -> Iterator[None]:
    """Draw from the streams of a batch within; afterwards the global random state is what it was before.

    Halves in other threads wait, so that none draws of ours.
    """
    with forked_generator(cuda=[device] if device is not None and device.type == "cuda" else []):
        before = getattr(_active, "key", None)
        _active.key = (seed, batch)
        try:
            start_stream(0)  # for modules that were not traced
            yield
        finally:
            _active.key = before


def start_stream(layer: int) -> None:
    """Begin the stream of a layer; outside `random_streams` torch's own state goes on."""
    key: tuple[int, int] | None = getattr(_active, "key", None)
    if key is not None:
        torch.manual_seed(layer_seed(key[0], key[1], layer))
