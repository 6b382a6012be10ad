"""Bodies of bytes cut into parts of bounded size, and put together again within a limit."""

from collections.abc import Iterable, Iterator, Sequence

from socflower.wire.arrays import MalformedBytes

LARGEST_PART_BYTES = 1 << 20
"""Of a body, in one part. Larger parts cost less per byte, but block the connection for other messages."""

LARGEST_FRAME_BYTES = LARGEST_PART_BYTES + (256 << 10)
"""A part with its message's head, which has the least and the largest value of each sample."""

LARGEST_BODY_BYTES = 4 << 30
"""The limit if no smaller one is set."""


def body_num_bytes(pieces: Iterable[bytes | memoryview]) -> int:
    """Return the total bytes of a body in pieces."""
    return sum(memoryview(piece).nbytes for piece in pieces)


def parts_of(pieces: Sequence[bytes | memoryview], part_bytes: int) -> Iterator[bytes]:
    """Yield a body in parts of `part_bytes`, the last one shorter; one empty part for an empty body."""
    pending: list[memoryview] = []
    pending_bytes, anything = 0, False
    for piece in pieces:
        rest = memoryview(piece).cast("B")
        while rest.nbytes:
            head = rest[: part_bytes - pending_bytes]
            rest = rest[head.nbytes :]
            pending.append(head)
            pending_bytes += head.nbytes
            if pending_bytes == part_bytes:
                anything = True
                yield b"".join(pending)
                pending, pending_bytes = [], 0
    if pending or not anything:
        yield b"".join(pending)


def check_size(num_bytes: int, what: str, most_bytes: int = LARGEST_BODY_BYTES) -> None:
    """Raise `MalformedBytes` if the announced size of `what` is too large; call it before any allocation."""
    if not 0 <= num_bytes <= most_bytes:
        raise MalformedBytes(f"{what} of {num_bytes} bytes, where {most_bytes} are the limit")


class Assembly:
    """A body of `num_bytes`, put together from its parts in order; memory grows only with what has arrived.

    `what` names it in errors. Raises `MalformedBytes` if it is larger than `most_bytes`.
    """

    def __init__(self, num_bytes: int, what: str, *, most_bytes: int = LARGEST_BODY_BYTES) -> None:
        check_size(num_bytes, what, most_bytes)
        self.num_bytes, self._what = num_bytes, what
        self._body = bytearray()

    @property
    def missing_bytes(self) -> int:
        """How many bytes have not arrived yet."""
        return self.num_bytes - len(self._body)

    def add(self, part: bytes | memoryview) -> None:
        """Take the next part; `MalformedBytes` for an empty one, and for more bytes than are missing."""
        if len(part) > self.missing_bytes or (self.num_bytes and not len(part)):
            raise MalformedBytes(
                f"{self._what} in parts that do not make up its {self.num_bytes} bytes"
            )
        self._body += part

    def whole(self) -> memoryview:
        """Return the complete body, read-only; `MalformedBytes` if it is not complete."""
        if self.missing_bytes:
            raise MalformedBytes(
                f"{self._what} that broke off after {len(self._body)} of {self.num_bytes} bytes"
            )
        return memoryview(self._body).toreadonly()
