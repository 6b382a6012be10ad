"""Numbers of NumPy among arguments, converted to Python's."""

import functools
import inspect
import operator
import sys
from collections.abc import Callable, Iterable
from typing import Any, TypeVar, cast, get_args, get_origin

T = TypeVar("T")


def plain_numbers(made: T) -> T:
    """Decorate a function, or a class for its construction, so that it gets NumPy's numbers as Python's.

    JSON, TOML and Flower's records refuse NumPy's numbers, counts of 32 bits overflow, and sums with a `np.float32`
    have seven digits. Numbers are converted in each argument whose annotation has `int` or `float`, alone or in a
    tuple, list, dict or array. Every export that takes numbers needs this decorator.
    """
    target: Callable[..., Any] = (
        cast(Any, made).__init__ if isinstance(made, type) else cast(Any, made)
    )

    # It runs at the first call, when every name of the annotations is defined.
    @functools.cache
    def numeric() -> tuple[frozenset[str], frozenset[int]]:
        names, places = set(), set()
        parameters = inspect.signature(target, eval_str=True).parameters.values()
        for place, each in enumerate(parameters):
            if _has_number(each.annotation):
                names.add(each.name)
                places.add(place)
        return frozenset(names), frozenset(places)

    @functools.wraps(target)
    def call(*args: Any, **kwargs: Any) -> Any:
        names, places = numeric()
        own = [plain(value) if place in places else value for place, value in enumerate(args)]
        for name in names & kwargs.keys():
            kwargs[name] = plain(kwargs[name])
        return target(*own, **kwargs)

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
        if _same(keys, value) and _same(parts, value.values()):
            return value
        return dict(zip(keys, parts, strict=True))
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
    """Whether a value of this type is or contains a number; arguments and results of a callable do not count."""
    if annotation in (int, float):
        return True
    if get_origin(annotation) in (Callable, type):
        return False
    return any(map(_has_number, get_args(annotation)))
