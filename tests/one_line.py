"""What a refused call says: one line that names what is wrong."""

import tomllib
from collections.abc import Callable

import pytest

from socflower.errors import ConfigError


def refused(
    call: Callable[[], object], *named: object, error: type[Exception] = ConfigError
) -> str:
    """Require that `call` raises `error` with one line that has each of `named`; return the line."""
    with pytest.raises(error) as caught:
        call()
    return one_line(str(caught.value), *named)


def one_line(text: str, *named: object) -> str:
    """Require that a text is one line with each of `named`; return it."""
    assert text and "\n" not in text
    assert not [each for each in named if str(each) not in text], text
    return text


def last_key(toml: str) -> str:
    """Return the key and value of a text's last line as a refusal has them: "epochs = 0"."""
    ((key, value),) = tomllib.loads(toml.splitlines()[-1]).items()
    return f"{key} = {value!r}"
