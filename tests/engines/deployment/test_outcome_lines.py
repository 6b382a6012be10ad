"""Documents through a log: whole or not at all, whatever else is in the log and however often it is read."""

import random
import string
from typing import Any

import pytest

from socflower.engines.deployment.outcome_lines import LineReader, to_lines


def large_document() -> dict[str, Any]:
    rng = random.Random(5)
    return {"text": "".join(rng.choices(string.printable + "äβ漢", k=30_000)), "numbers": [0.1, None, 2**60]}


def read(lines: list[str], reader: LineReader | None = None) -> list[tuple[str, Any]]:
    reader = reader or LineReader()
    return [found for line in lines for found in reader.feed(line)]


@pytest.mark.parametrize("document", [{}, [], {"a": [1, {"b": "ä\n\x1b[0m"}]}, large_document()])
def test_a_document_comes_out_as_it_went_in(document: Any) -> None:
    lines = list(to_lines("outcome", document))
    assert all(len(line) < 4000 and "\n" not in line and line.isascii() for line in lines)
    assert read(lines) == [("outcome", document)]


def test_lines_are_found_among_others_in_any_order() -> None:
    document = large_document()
    lines = [f"\x1b[92mINFO \x1b[0m: loss 0.5{line}\r" for line in to_lines("trace", document)]
    assert len(lines) > 3
    random.Random(1).shuffle(lines)
    assert read(["hello", *lines, "socflower:trace is a word"]) == [("trace", document)]


def test_a_log_that_begins_anew_tells_nothing_twice() -> None:
    progress = [{"round": number} for number in range(3)]
    lines = [line for entry in progress for line in to_lines("progress", entry)]
    reader = LineReader()
    assert read(lines[:2], reader) == [("progress", entry) for entry in progress[:2]]
    assert read(lines, reader) == [("progress", progress[2])]


def test_a_document_without_its_last_line_is_none() -> None:
    lines = list(to_lines("outcome", large_document()))
    assert read(lines[:-1]) == []
    reader = LineReader()
    assert read(lines[:2], reader) == []
    assert read(lines, reader) == [("outcome", large_document())]


def test_a_changed_line_makes_no_document() -> None:
    (line,) = to_lines("progress", {"round": 1, "accuracy": 0.25})
    start = line.rindex(" ") + 1
    changed = 0
    for position in range(start, len(line)):
        other = "A" if line[position] != "A" else "B"
        found = read([line[:position] + other + line[position + 1:]])
        changed += 1
        # The last characters may have bits that stand for nothing.
        assert found in ([], [("progress", {"round": 1, "accuracy": 0.25})])
        if position < len(line) - 4:
            assert found == []
    assert changed > 40
