"""Observes the strategies that a ServerApp starts, including those that override `start`."""

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any, TypeAlias

from flwr.serverapp.strategy import Strategy

AroundStart: TypeAlias = Callable[[Strategy, inspect.BoundArguments, Callable[[], object]], object]
"""Called with a strategy, the arguments of its `start`, and a function that starts it; returns the result."""


@contextmanager
def around_starts(around: AroundStart) -> Iterator[None]:
    """Call `around` in place of each `start` in the context, except for a `start` that another one calls.

    `around` may change the arguments, which are those of the class's own `start`.
    """
    depth = 0

    def wrapped(original: Callable[..., Any]) -> Callable[..., Any]:
        signature = inspect.signature(original)

        @wraps(original)
        def start(*args: Any, **named_args: Any) -> Any:
            nonlocal depth
            if depth:
                return original(*args, **named_args)
            bound = signature.bind(*args, **named_args)
            bound.apply_defaults()
            depth += 1
            try:
                return around(bound.args[0], bound, lambda: original(*bound.args, **bound.kwargs))
            finally:
                depth -= 1

        return start

    # Flower gives a strategy's Result only to the app, so `start` itself has to be replaced.
    # An abstract `start` is never called.
    base: Any = Strategy
    originals: dict[type[Strategy], Any] = {
        each: each.__dict__["start"] for each in _with_own_start(base)
    }
    hook = Strategy.__dict__.get("__init_subclass__")

    def on_subclass(cls: Any, /, **named_args: Any) -> None:
        """Wrap the `start` of a class that the app defines while it runs."""
        super(Strategy, cls).__init_subclass__(**named_args)
        if "start" in cls.__dict__:
            originals[cls] = cls.__dict__["start"]
            cls.start = wrapped(cls.__dict__["start"])

    for each, original in originals.items():
        each.start = wrapped(original)  # type: ignore[method-assign]
    base.__init_subclass__ = classmethod(on_subclass)
    try:
        yield
    finally:
        for each, original in originals.items():
            each.start = original  # type: ignore[method-assign]
        if hook is None:
            del base.__init_subclass__
        else:
            base.__init_subclass__ = hook


def _with_own_start(cls: type[Strategy]) -> set[type[Strategy]]:
    """Return the class and its subclasses that define a `start`."""
    found = {cls} if "start" in cls.__dict__ else set()
    return found.union(*map(_with_own_start, cls.__subclasses__()))
