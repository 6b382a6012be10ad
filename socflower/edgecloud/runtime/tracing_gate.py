"""Keeps tracing and computing apart: torch.fx changes `nn.Module` for the whole process while it follows a model.

A forward pass of another thread would then run into the tracer, as in a cloud where a session is opened while another
one trains. So passes share the gate, and whoever traces has it alone.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from threading import Condition


class TracingGate:
    """Many may be within who compute, or one who traces; who waits to trace goes before those who come later."""

    def __init__(self) -> None:
        self._changed = Condition()
        self._num_computing = 0
        self._num_wanting = 0
        self._tracing = False

    @contextmanager
    def computing(self) -> Iterator[None]:
        """Be within with others who compute. Not to be entered twice by one thread."""
        with self._changed:
            self._changed.wait_for(lambda: not self._tracing and not self._num_wanting)
            self._num_computing += 1
        try:
            yield
        finally:
            with self._changed:
                self._num_computing -= 1
                self._changed.notify_all()

    @contextmanager
    def tracing(self) -> Iterator[None]:
        """Be within alone. Not to be entered twice by one thread."""
        with self._changed:
            self._num_wanting += 1
            try:
                self._changed.wait_for(lambda: not self._tracing and not self._num_computing)
                self._tracing = True
            finally:
                self._num_wanting -= 1
                self._changed.notify_all()
        try:
            yield
        finally:
            with self._changed:
                self._tracing = False
                self._changed.notify_all()


GATE = TracingGate()
"""The process's, as what is changed is the process's."""
