"""JSON files of measured costs, which a user names: every mistake is one line with the file."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from socflower.errors import ConfigError
from socflower.wire.saved_state import write_atomically


def read_measured(path: Path, written_by: str) -> dict[str, Any]:
    """Return a file's document; `ConfigError` names the command `written_by` if the file has no document."""
    try:
        document = json.loads(path.read_text("utf-8-sig"))
    except OSError as error:
        raise ConfigError(
            f"{path}: cannot be read ({error.strerror}); name a file of `{written_by}`"
        ) from None
    except ValueError as error:
        raise ConfigError(f"{path}: cannot be read as JSON ({error}); measure again") from None
    if not isinstance(document, dict):
        raise ConfigError(f"{path}: is no JSON object; measure again")
    return document


def write_measured(path: Path, document: Mapping[str, Any]) -> None:
    """Write a document; `ConfigError` if the file cannot be written."""
    try:
        write_atomically(path, json.dumps(document, indent=1) + "\n")
    except OSError as error:
        raise ConfigError(
            f"--out {path}: cannot be written ({error.strerror}); name another file"
        ) from None
