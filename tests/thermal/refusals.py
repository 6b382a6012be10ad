"""Values that a type or a function refuses, key by key."""

from collections.abc import Callable
from functools import partial

from tests.one_line import refused


def refused_each(make: Callable[..., object], **bad: tuple[object, ...]) -> None:
    """Assert that `make` refuses each of the bad values of each key with one line that names both."""
    for key, values in bad.items():
        for value in values:
            text = refused(partial(make, **{key: value}), key)
            assert str(value) in text or f"{value:g}" in text, text
