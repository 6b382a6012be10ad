"""A model is captured while another one trains in another thread; neither affects the other."""

import threading
import time

import torch

from socflower.model_graph.cut_points import capture_split, whole_front
from socflower.model_graph.graph import CaptureLock
from tests.edgecloud.runtime.split_training import adam, chain, chain_split, halves, one_batch


def test_training_goes_on_as_if_nothing_had_been_while_other_models_are_built_and_captured() -> (
    None
):
    def train() -> list[float]:
        front, back = halves(chain_split(dropout=0.3), 2, adam)
        return [one_batch(front, back, batch) for batch in range(12)]

    expected = train()
    ended, errors = threading.Event(), list[Exception]()

    def capture() -> None:
        while not ended.wait(0.01):
            try:
                capture_split(chain(1), (6,)).copy()
                # It restores the global generator, from which the other thread's dropout draws.
                whole_front(chain(2), (6,))
            except Exception as error:
                errors.append(error)

    capturers = [threading.Thread(target=capture, daemon=True) for _ in range(2)]
    for capturer in capturers:
        capturer.start()
    try:
        found = train()
    finally:
        ended.set()
        for capturer in capturers:
            capturer.join(30)
    assert errors == [] and found == expected
    assert torch.nn.Module.__call__.__name__ == "_wrapped_call_impl"


def test_a_capture_is_alone_and_forward_passes_are_not() -> None:
    capture_lock, inside, most, together = CaptureLock(), [0, 0], [0, 0], []
    lock = threading.Lock()

    def visit(kind: int) -> None:
        for _ in range(30):
            with capture_lock.exclusive() if kind else capture_lock.shared():
                with lock:
                    inside[kind] += 1
                    most[kind] = max(most[kind], inside[kind])
                    together.append(bool(inside[0] and inside[1]))
                time.sleep(0.001)
                with lock:
                    inside[kind] -= 1

    visitors = [
        threading.Thread(target=visit, args=(kind,), daemon=True) for kind in (0, 0, 0, 1, 1)
    ]
    for visitor in visitors:
        visitor.start()
    for visitor in visitors:
        visitor.join(30)
        assert not visitor.is_alive()
    assert not any(together) and most[1] == 1 and most[0] > 1
