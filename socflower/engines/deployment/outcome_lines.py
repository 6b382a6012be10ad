"""Documents as lines of a log: how a run on a remote SuperLink reports progress and outcome.

A ServerApp on another machine can only return its log. Other code writes to that log too, each request returns it
from the beginning, and its end may be missing. A document is therefore compressed and cut into numbered lines,

    socflower:outcome 3f2a…9c 2/5 eJzNVU1v2zAM…

each with the first 16 digits of the SHA-256 of the whole compressed document. Other lines are ignored. A file is sent
as one document for each of its parts.
"""

import base64
import hashlib
import json
import re
import sys
import threading
import time
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

ALIVE = "alive"
"""The kind of document by which a ServerApp shows every `ALIVE_INTERVAL_S` that it runs; its content is the time."""
ALIVE_INTERVAL_S = 2.0
SCENARIO = "scenario"
"""The kind of document with the run's scenario."""
READY = "ready"
"""The kind of document, without content, of a ServerApp that has loaded everything and may have to wait to train."""

_LINE = re.compile(r"socflower:([a-z]+) ([0-9a-f]{16}) (\d{1,6})/(\d{1,6}) ([A-Za-z0-9+/=]*)")
# The characters of a line, far below the line limit of any log.
_PIECE = 3000
# The limit of a document: the log is untrusted, and a few kB may decompress to any size.
_MAX_BYTES = 256 * 2**20


def to_lines(kind: str, document: Any) -> Iterator[str]:
    """Yield the lines, without line ends, that carry a JSON document; `kind` is a lower-case word."""
    packed = zlib.compress(json.dumps(document, separators=(",", ":")).encode(), 6)
    text = base64.b64encode(packed).decode()
    digest = hashlib.sha256(packed).hexdigest()[:16]
    pieces = [text[start : start + _PIECE] for start in range(0, len(text), _PIECE)]
    for index, piece in enumerate(pieces, start=1):
        yield f"socflower:{kind} {digest} {index}/{len(pieces)} {piece}"


def print_line(line: str) -> None:
    """Write a line to the log."""
    # One call, so that no other thread writes between a line and its line end.
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def show_life() -> None:
    """Log from now on that this process runs: Flower tells of its death only after minutes."""

    def show() -> None:
        while True:
            for line in to_lines(ALIVE, time.time()):
                print_line(line)
            time.sleep(ALIVE_INTERVAL_S)

    threading.Thread(target=show, name="signs-of-life", daemon=True).start()


# The limit of a file: all of it stays in the SuperLink's database.
MAX_FILE_BYTES = 256 * 2**20
_PART_BYTES = 4 * 2**20


def file_documents(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the documents that carry a file, for `ReceivedFile`."""
    num_bytes = path.stat().st_size
    with path.open("rb") as stream:
        for start in range(0, num_bytes, _PART_BYTES):
            yield {
                "size": num_bytes,
                "start": start,
                "content": base64.b64encode(stream.read(_PART_BYTES)).decode(),
            }


class ReceivedFile:
    """A file in `path`, made of its documents in any order; they come from a log, so their contents are untrusted."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._num_bytes = 0
        # The beginnings of parts; None before the first part.
        self._missing: set[int] | None = None
        # An earlier attempt may have left a file.
        path.unlink(missing_ok=True)

    @property
    def is_whole(self) -> bool:
        """Whether every part has been received."""
        return self._missing is not None and not self._missing

    def add(self, document: Mapping[str, Any]) -> None:
        """Write one part; a document that cannot be a part of the file is ignored."""
        try:
            num_bytes, start = int(document["size"]), int(document["start"])
            content = base64.b64decode(document["content"], validate=True)
        except (KeyError, TypeError, ValueError, OverflowError):
            return
        if self._missing is None and 0 < num_bytes <= MAX_FILE_BYTES:
            self._num_bytes, self._missing = num_bytes, set(range(0, num_bytes, _PART_BYTES))
            self._path.touch()
        if (
            self._missing is None
            or num_bytes != self._num_bytes
            or start not in self._missing
            or len(content) != min(_PART_BYTES, num_bytes - start)
        ):
            return
        with self._path.open("r+b") as stream:
            stream.seek(start)
            stream.write(content)
        self._missing.discard(start)


class LineReader:
    """Reassembles documents from the lines of a log, each document once, however often the log is read."""

    def __init__(self) -> None:
        self._pieces: dict[tuple[str, str], dict[int, str]] = {}
        self._done: set[tuple[str, str]] = set()

    def feed(self, line: str) -> Iterator[tuple[str, Any]]:
        """Yield kind and document if this line completes one; an incomplete document is never yielded."""
        for kind, digest, index, count, piece in _LINE.findall(line):
            key = (kind, digest)
            if key in self._done:
                continue
            pieces = self._pieces.setdefault(key, {})
            pieces[int(index)] = piece
            if len(pieces) < int(count):
                continue
            del self._pieces[key]
            document = _unpack("".join(pieces[number] for number in sorted(pieces)), digest)
            if document is not None:
                self._done.add(key)
                yield kind, document


def _unpack(text: str, digest: str) -> Any | None:
    """Return the document, or None if the bytes do not match the digest."""
    try:
        packed = base64.b64decode(text, validate=True)
    except ValueError:
        return None
    if hashlib.sha256(packed).hexdigest()[:16] != digest:
        return None
    unpacking = zlib.decompressobj()
    try:
        content = unpacking.decompress(packed, _MAX_BYTES)
        return None if unpacking.unconsumed_tail else json.loads(content)
    except (ValueError, zlib.error):
        return None
