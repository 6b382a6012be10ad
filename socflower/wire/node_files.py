"""The files by which a node's clients and the command that started the node, `socflower node`, know of each other."""

import json
import os
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from socflower.wire.saved_state import write_atomically

NODE_FOLDER = "SOCFLOWER_NODE_FOLDER"
"""Environment variable with the folder of both files."""
RESIDENT = "SOCFLOWER_RESIDENT"
"""Environment variable of a client's process that stays for further messages."""


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeRecord:
    """What the clients of a node have done since it was started."""

    messages: int = 0
    # Messages whose client raised or answered with an error.
    failed: int = 0
    # Seconds of work on messages that are answered.
    busy_s: float = 0.0
    # Flower's id of the newest message's run, its round, and its kind: train, query or evaluate.
    run: str = ""
    server_round: int = 0
    kind: str = ""
    # The Unix time at which the newest message came.
    began_at_s: float = 0.0
    # The same if it is not answered yet, and the process that works on it; None: no message.
    working_since_s: float | None = None
    pid: int = 0
    answered_at_s: float | None = None
    loss: float | None = None
    temperature_c: float | None = None


def _folder() -> Path | None:
    named = os.environ.get(NODE_FOLDER)
    return Path(named) if named else None


def drain_file(folder: Path | None = None) -> Path | None:
    """Return the file that exists while the node takes no more work; None without `socflower node`."""
    found = folder or _folder()
    return None if found is None else found / "drain"


def read_record(folder: Path | None = None) -> NodeRecord | None:
    """Return the record, a new one before the first message; None without `socflower node`."""
    found = folder or _folder()
    if found is None:
        return None
    with suppress(FileNotFoundError, ValueError, TypeError):
        return NodeRecord(**json.loads((found / "record.json").read_text("utf-8")))
    return NodeRecord()


def write_record(record: NodeRecord) -> None:
    """Write the record; a full disk loses it, and not the training."""
    folder = _folder()
    if folder is not None:
        with suppress(OSError):
            write_atomically(folder / "record.json", json.dumps(asdict(record)))
