"""A ring whose gradients stay on the members' GPUs: NCCL sums them, and gloo carries everything else.

Not executed on a GPU yet: tests put another group in NCCL's place.
"""

import os
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from socflower.rings.collective import Poll, no_poll
from socflower.rings.transports.gloo import GROUP_TIMEOUT, GlooRing, Operation
from socflower.rings.transports.port import RingPort

_POLL_INTERVAL_S = 0.001  # of a sum that takes milliseconds
# Otherwise NCCL's watchdogs end the process where a member is lost, and the ring could not be formed again.
_NO_WATCHDOGS = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0", "TORCH_NCCL_ENABLE_MONITORING": "0"}


def gpu_identity(device: torch.device) -> str:
    """Return a text that no other GPU has, for a device with which a member can take part; empty for others."""
    if device.type != "cuda" or not dist.is_available() or not dist.is_nccl_available():
        return ""
    return str(torch.cuda.get_device_properties(device).uuid)


def nccl_group(store: Any, rank: int, size: int) -> Any:
    """Return a process group of NCCL, whose members are yet to connect."""
    for key, value in _NO_WATCHDOGS.items():
        os.environ.setdefault(key, value)
    kind: Any = dist.ProcessGroupNCCL  # type: ignore[attr-defined, unused-ignore]
    options = kind.Options()
    options._timeout = GROUP_TIMEOUT
    options.config.blocking = False  # so that it can be aborted while members connect
    return kind(store, rank, size, options)


class NcclRing(GlooRing):
    """One generation of a ring among members that train on a GPU each, with the arguments of `GlooRing`.

    Buffers on `device` are summed there. NCCL encrypts nothing either, and finds ports and network interfaces itself
    (`NCCL_SOCKET_IFNAME`). A member that dies is detected by the callers' polls; `close` then aborts.
    """

    def __init__(
        self, port: RingPort, ranks: Sequence[int], generation: int, heartbeat_s: float, device: torch.device,
        make_group: Callable[[Any, int, int], Any] = nccl_group,
    ) -> None:
        self.device, self._make_group = device, make_group
        self._on_device: Any = None
        super().__init__(port, ranks, generation, heartbeat_s)
        self.transport, self.reduces_on = "nccl", device.type

    def all_reduce(self, buffer: Tensor) -> Operation[None]:
        """Begin to sum a buffer over all members, in place, where it is: on `device`, or on the CPU."""
        if buffer.device.type != self.device.type:
            return super().all_reduce(buffer)
        if buffer.device.type == "cuda":
            # The sum may begin in another thread, whose stream knows nothing of what is computing the buffer.
            torch.cuda.current_stream(buffer.device).synchronize()
        return self._begin(lambda _: (self._on_device.allreduce([buffer]), lambda: None), DeviceOperation)

    def _connect(self) -> None:
        """Build the group, and let its members connect, which NCCL does at the first sum."""
        made = self._make_group(dist.PrefixStore("nccl", self._store), self.rank, self.size)
        with self._lock:
            self._on_device = made
        work = made.allreduce([torch.zeros(1, device=self.device)])
        while not work.is_completed():
            if self._failure is not None:
                raise RuntimeError(self._failure)
            time.sleep(_POLL_INTERVAL_S)

    def _shut_down_group(self) -> None:
        with self._lock:
            group, self._on_device = self._on_device, None
        if group is not None:
            group.abort()
        super()._shut_down_group()


class DeviceOperation(Operation[None]):
    """An operation of NCCL. Its own wait would only let the device wait, or end the process after a time-out."""

    def wait(self, poll: Poll = no_poll) -> None:
        """Return when it is done; raise `PeerLost`, or what `poll` raises."""
        self._await_begin(poll)
        while self._failure is None and not self._work.is_completed():
            poll()
            time.sleep(_POLL_INTERVAL_S)
        failure = None if self._failure is not None else self._work.exception()
        if failure is not None:
            self.fail(f"a member is gone ({str(failure).splitlines()[0]})")
        self._require_success()
