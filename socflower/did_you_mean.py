"""The known name that a misspelt one probably means, for all errors about unknown keys, options and names."""

from collections.abc import Collection
from difflib import get_close_matches


def closest(name: str, known: Collection[str], *, similarity: float = 0.6) -> str:
    """Return the known name that is most like `name`; empty if none has this similarity (0 to 1)."""
    return next(iter(get_close_matches(name, known, n=1, cutoff=similarity)), "")


def did_you_mean(
    name: str, known: Collection[str], otherwise: str = "", *, similarity: float = 0.6
) -> str:
    """Return the question "did you mean 'x'?" about the closest known name, or `otherwise` if none is close."""
    meant = closest(name, known, similarity=similarity)
    return f"did you mean {meant!r}?" if meant else otherwise
