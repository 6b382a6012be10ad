"""Documents as lines of a log: how a run on a far SuperLink says what came of it.

All that comes back from a ServerApp on another machine is its log, which others write to as well, which begins anew
when it is asked for again, and which may lack an end. A document is therefore packed and cut into numbered lines,

    socflower:outcome 3f2a…9c 2/5 eJzNVU1v2zAM…

each with the SHA-256 (its first 16 digits) of the packed whole. Other lines are left alone.
"""

import base64
import hashlib
import json
import re
import zlib
from collections.abc import Iterator
from typing import Any

_LINE = re.compile(r"socflower:([a-z]+) ([0-9a-f]{16}) (\d{1,6})/(\d{1,6}) ([A-Za-z0-9+/=]*)")
_PIECE = 3000  # characters of a line; far below what any log cuts
_MOST_BYTES = 256 * 2**20  # of one document: a log is somebody else's, and a few kB unpack to anything


def to_lines(kind: str, document: Any) -> Iterator[str]:
    """Yield the lines, without their ends, that carry a JSON document; `kind` is a word in small letters."""
    packed = zlib.compress(json.dumps(document, separators=(",", ":")).encode(), 6)
    text = base64.b64encode(packed).decode()
    digest = hashlib.sha256(packed).hexdigest()[:16]
    pieces = [text[start:start + _PIECE] for start in range(0, len(text), _PIECE)]
    for index, piece in enumerate(pieces, start=1):
        yield f"socflower:{kind} {digest} {index}/{len(pieces)} {piece}"


class LineReader:
    """Puts documents together from the lines of a log, each document once, however often the log is read."""

    def __init__(self) -> None:
        self._pieces: dict[tuple[str, str], dict[int, str]] = {}
        self._done: set[tuple[str, str]] = set()

    def feed(self, line: str) -> Iterator[tuple[str, Any]]:
        """Yield kind and document of what this line completes; a document that is not whole is never yielded."""
        for kind, digest, index, count, piece in _LINE.findall(line):
            key = (kind, digest)
            if key in self._done:
                continue
            pieces = self._pieces.setdefault(key, {})
            pieces[int(index)] = piece
            if len(pieces) < int(count):
                continue
            del self._pieces[key]
            document = _unpacked("".join(pieces[number] for number in sorted(pieces)), digest)
            if document is not None:
                self._done.add(key)
                yield kind, document


def _unpacked(text: str, digest: str) -> Any | None:
    """Return the document, or None if these are not the bytes that the digest is of."""
    try:
        packed = base64.b64decode(text, validate=True)
    except ValueError:
        return None
    if hashlib.sha256(packed).hexdigest()[:16] != digest:
        return None
    unpacking = zlib.decompressobj()
    try:
        content = unpacking.decompress(packed, _MOST_BYTES)
        return None if unpacking.unconsumed_tail else json.loads(content)
    except (ValueError, zlib.error):
        return None
