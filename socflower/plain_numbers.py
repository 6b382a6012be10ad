"""Numbers among arguments as Python's, whichever library made them."""

import functools
import inspect
import operator
import sys
from collections.abc import Callable, Iterable
from typing import Any, TypeVar, cast, get_args, get_origin

T = TypeVar("T")


def plain_numbers(made: T) -> T:
    """Decorate a function, or a class for its construction, so that it gets NumPy's numbers as Python's.

    JSON, TOML and Flower's records refuse a number of NumPy, 32 bits of a count overflow, and sums with a `np.float32`
    have seven digits. It is converted in each argument whose annotation has `int` or `float`, alone or in a tuple,
    list, dict or array. What is exported needs this if it takes numbers.
    """
    target: Callable[..., Any] = (
        cast(Any, made).__init__ if isinstance(made, type) else cast(Any, made)
    )

    # At the first call, when every name of the annotations is defined.
    @functools.cache
    def numeric() -> tuple[frozenset[str], frozenset[int]]:
        parameters = inspect.signature(target, eval_str=True).parameters.values()
        places = {
            place: each.name
            for place, each in enumerate(parameters)
            if _has_number(each.annotation)
        }
        return frozenset(places.values()), frozenset(places)

    @functools.wraps(target)
    def call(*args: Any, **kwargs: Any) -> Any:
        names, places = numeric()
        return target(
            *[plain(value) if place in places else value for place, value in enumerate(args)],
            **{name: plain(value) if name in names else value for name, value in kwargs.items()},
        )

    if not isinstance(made, type):
        return cast(T, call)
    cast(Any, made).__init__ = call
    return cast(T, made)


def plain(value: Any) -> Any:
    """Return numbers and arrays of NumPy as Python's, also in tuples, lists and dicts; everything else as it is."""
    kind = type(value)
    if kind in (float, int, str):
        return value
    if kind is dict:
        keys, parts = plain([*value]), plain([*value.values()])
        return (
            value
            if _same(keys, value) and _same(parts, value.values())
            else dict(zip(keys, parts, strict=True))
        )
    if kind in (tuple, list):
        parts = [plain(part) for part in value]
        return value if _same(parts, value) else kind(parts)
    # While nothing has imported it, there is no such number.
    numpy = sys.modules.get("numpy")
    if numpy is None or not isinstance(value, numpy.generic | numpy.ndarray):
        return value
    return float(value) if isinstance(value, numpy.floating) else value.tolist()


def _same(parts: Iterable[Any], others: Iterable[Any]) -> bool:
    return all(map(operator.is_, parts, others))


def _has_number(annotation: Any) -> bool:
    """Whether a value of this type is a number or has some; what a callable takes or returns does not count."""
    if annotation in (int, float):
        return True
    if get_origin(annotation) in (Callable, type):
        return False
    return any(map(_has_number, get_args(annotation)))
