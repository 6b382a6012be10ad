"""All members of a plan in one process and one thread: each runs until it waits for another."""

from collections import deque
from collections.abc import Mapping
from typing import Any, TypeVar

from socflower.pipeline.runtime.member import Expect, Receive, Reduce, Script, Send
from socflower.training.sum_order import sum_in_ring_order

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
        """Return the next message of a lane; None without one."""
        box = self._boxes.get((source, target, lane))
        return box.popleft() if box else None


def run_together(scripts: Mapping[int, Script[_Result]], mail: Mail) -> dict[int, _Result]:
    """Run the members' scripts to their ends and return their results, by SoC."""
    results: dict[int, _Result] = {}
    waiting: dict[int, Receive | Reduce] = {}

    def advance(soc: int, answer: Any) -> None:
        """Run a script until it waits for what is not there."""
        script = scripts[soc]
        waiting.pop(soc, None)
        try:
            request = script.send(answer)
            while not isinstance(request, Reduce):
                if isinstance(request, Expect):
                    request = script.send(None)
                    continue
                body = mail.take(request.source, soc, request.lane)
                if body is None:
                    break
                if request.num_bytes not in (None, len(body)):
                    raise AssertionError(
                        f"SoC {request.source} sent {len(body)} bytes of {request.lane} where "
                        f"{request.num_bytes} belong"
                    )
                request = script.send(body)
            waiting[soc] = request
        except StopIteration as end:
            results[soc] = end.value

    for soc in scripts:
        advance(soc, None)
    while waiting:
        progressed = False
        for soc, request in list(waiting.items()):
            if waiting.get(soc) is not request:
                continue  # it was in a sum that was done meanwhile
            if isinstance(request, Receive):
                body = mail.take(request.source, soc, request.lane)
                if body is not None:
                    progressed = True
                    advance(soc, body)
            elif all(
                isinstance(other := waiting.get(member), Reduce)
                and other.devices == request.devices
                for member in request.devices
            ):
                progressed = True
                _sum(request.devices, waiting)
                for member in request.devices:
                    advance(member, None)
        if not progressed:
            raise AssertionError(f"the pipeline stands still: {waiting}")
    return results


def _sum(devices: tuple[int, ...], waiting: Mapping[int, Receive | Reduce]) -> None:
    requests = [request for soc in devices if isinstance(request := waiting[soc], Reduce)]
    buffers = [request.buffer.numpy() for request in requests]
    total = sum_in_ring_order(buffers)
    for buffer in buffers:
        buffer[:] = total
