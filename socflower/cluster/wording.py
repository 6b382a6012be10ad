"""Counts as sentences have them."""


def counted(number: int, noun: str, plural: str = "") -> str:
    """Return a number and what it counts: "1 group", "2 groups", "1 batch", "2 batches" (its plural is given)."""
    return f"{number} {noun if number == 1 else plural or f'{noun}s'}"
