"""What a ServerApp starts: strategies of Flower's message API, also those that have a `start` of their own."""

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any, TypeAlias

from flwr.serverapp.strategy import Strategy

AroundStart: TypeAlias = Callable[[Strategy, inspect.BoundArguments, Callable[[], object]], object]
"""Gets a strategy, the arguments of its `start`, and what starts it; returns what `start` returns."""


@contextmanager
def around_starts(around: AroundStart) -> Iterator[None]:
    """Call `around` in place of each `start` in the context; a `start` that another one calls is part of that one.

    `around` may change the arguments. A class whose `start` has other parameters than `Strategy.start` has those.
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

    # Flower tells nobody but the app of a strategy's Result.
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
    """Return the class and its subclasses, as far as they define a `start`."""
    found = {cls} if "start" in cls.__dict__ else set()
    return found.union(*map(_with_own_start, cls.__subclasses__()))
