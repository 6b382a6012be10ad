"""Messages cut into parts of bounded size, and put together again within a limit."""

from collections.abc import Iterable, Sequence

LARGEST_PART_BYTES = 1 << 20
"""Of a message, in one part: large parts cost least per byte, but keep what else uses the connection waiting."""


def body_num_bytes(pieces: Iterable[bytes | memoryview]) -> int:
    """Return the total bytes of a body in pieces."""
    return sum(memoryview(piece).nbytes for piece in pieces)


def parts_of(pieces: Sequence[bytes | memoryview], part_bytes: int) -> Iterable[bytes]:
    """Yield a body in parts of `part_bytes`, the last one shorter; one empty part for an empty body."""
    pending: list[memoryview] = []
    pending_bytes, anything = 0, False
    for piece in pieces:
        rest = memoryview(piece).cast("B")
        while rest.nbytes:
            head = rest[:part_bytes - pending_bytes]
            rest = rest[head.nbytes:]
            pending.append(head)
            pending_bytes += head.nbytes
            if pending_bytes == part_bytes:
                anything = True
                yield b"".join(pending)
                pending, pending_bytes = [], 0
    if pending or not anything:
        yield b"".join(pending)
