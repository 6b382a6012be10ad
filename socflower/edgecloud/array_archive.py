"""Arrays and a few plain values as bytes and back, for what an end of a link keeps in its checkpoint."""

import io
import json
import zipfile
import zlib
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from socflower.errors import ConfigError

_HEADER = "header"


def to_bytes(kind: str, header: Mapping[str, Any], arrays: Mapping[str, NDArray[Any]]) -> bytes:
    """Return `header` (JSON) and `arrays` as bytes that only `from_bytes` of the same `kind` takes."""
    text = json.dumps({**header, "kind": kind}).encode()
    stream = io.BytesIO()
    members: dict[str, Any] = {f"array {key}": array for key, array in arrays.items()}
    members[_HEADER] = np.frombuffer(text, np.uint8)
    np.savez(stream, **members)
    return stream.getvalue()


def from_bytes(kind: str, saved: bytes) -> tuple[dict[str, Any], dict[str, NDArray[Any]]]:
    """Return header and arrays; `ConfigError` for what is damaged or of another kind. Never unpickles anything."""
    try:
        with np.load(io.BytesIO(saved), allow_pickle=False) as archive:
            header = json.loads(archive[_HEADER].tobytes())
            arrays = {key.removeprefix("array "): archive[key] for key in archive.files if key != _HEADER}
        found = header.pop("kind")
    except (ValueError, TypeError, AttributeError, KeyError, OSError, EOFError, NotImplementedError, RuntimeError,
            zipfile.BadZipFile, zlib.error) as error:
        raise ConfigError(f"saved {kind}: is damaged ({type(error).__name__}); go back to an earlier checkpoint, or "
                          "start anew") from None
    if found != kind:
        raise ConfigError(f"saved {kind}: is of {found}; restore what was saved by the same part")
    return header, arrays
