"""All members of a plan in one process and one thread: each runs until it waits for another."""

from collections import deque
from collections.abc import Mapping
from typing import Any, TypeVar

from socflower.pipeline.runtime.messages import Receive, Reduce, Script, Send
from socflower.training.exchange.buckets import sum_in_ring_order

_Result = TypeVar("_Result")


class Mail:
    """Messages between members of one process."""

    def __init__(self) -> None:
        self._boxes: dict[tuple[int, int, str], deque[bytearray]] = {}

    def sender(self, source: int) -> Send:
        """Return the function with which a member sends."""

        def send(target: int, lane: str, body: bytearray) -> None:
            self._boxes.setdefault((source, target, lane), deque()).append(body)

        return send

    def take(self, source: int, target: int, lane: str) -> bytearray | None:
        """Return the next message of a lane, or None."""
        box = self._boxes.get((source, target, lane))
        return box.popleft() if box else None


def run_together(scripts: Mapping[int, Script[_Result]], mail: Mail) -> dict[int, _Result]:
    """Run the members' scripts to their ends and return their results, by SoC."""
    results: dict[int, _Result] = {}
    waiting: dict[int, Receive | Reduce] = {}

    def advance(soc: int, answer: Any) -> None:
        """Run a script until it waits for a message that is not there, or for a sum."""
        waiting.pop(soc, None)
        try:
            request = scripts[soc].send(answer)
            while not isinstance(request, Reduce):
                body = None
                if isinstance(request, Receive):
                    body = _taken(mail, request, soc)
                    if body is None:
                        break
                request = scripts[soc].send(body)
            waiting[soc] = request
        except StopIteration as end:
            results[soc] = end.value

    for soc in scripts:
        advance(soc, None)
    while waiting:
        progressed = False
        for soc, request in list(waiting.items()):
            if waiting.get(soc) is not request:
                # Another device's turn has already computed the sum that this one waited for.
                continue
            if isinstance(request, Receive):
                body = _taken(mail, request, soc)
                if body is not None:
                    progressed = True
                    advance(soc, body)
            elif _sum(request.devices, waiting):
                progressed = True
                for member in request.devices:
                    advance(member, None)
        assert progressed, f"the members wait for each other: {waiting}"
    return results


def _taken(mail: Mail, request: Receive, soc: int) -> bytearray | None:
    body = mail.take(request.source, soc, request.lane)
    assert body is None or request.num_bytes in (None, len(body)), (request, len(body))
    return body


def _sum(devices: tuple[int, ...], waiting: Mapping[int, Receive | Reduce]) -> bool:
    """Sum the buffers of devices in place; return False if one of them does not wait for this sum yet."""
    buffers = []
    for soc in devices:
        request = waiting.get(soc)
        if not isinstance(request, Reduce) or request.devices != devices:
            return False
        buffers.append(request.buffer.numpy())
    total = sum_in_ring_order(buffers)
    for buffer in buffers:
        buffer[:] = total
    return True
