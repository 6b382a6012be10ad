"""Documents through a log: whole or not at all, whatever else is in the log and however often it is read."""

import math
import random
import string
from pathlib import Path
from typing import Any

import pytest

from socflower.engines.app_files import AppFiles
from socflower.engines.deployment import outcome_lines, remote_superlink
from socflower.engines.deployment.attempts import RunHistory
from socflower.engines.deployment.options import DeployedApp, DeploymentOptions
from socflower.engines.deployment.outcome_lines import (
    LineReader,
    ReceivedFile,
    file_documents,
    to_lines,
)
from socflower.engines.run_folder import RunFolder
from socflower.errors import TrainingFailed
from tests.one_line import refused

EMPTY = AppFiles(server_app="", client_app="")


def large_document() -> dict[str, Any]:
    rng = random.Random(5)
    return {
        "text": "".join(rng.choices(string.printable + "äβ漢", k=30_000)),
        "numbers": [0.1, None, 2**60],
    }


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
        found = read([line[:position] + other + line[position + 1 :]])
        changed += 1
        # The last characters may have bits that stand for nothing.
        assert found in ([], [("progress", {"round": 1, "accuracy": 0.25})])
        if position < len(line) - 4:
            assert found == []
    assert changed > 40


def test_a_file_is_whole_once_all_its_parts_have_come_in_any_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(outcome_lines, "_PART_BYTES", 1000)
    sent, received = tmp_path / "sent", ReceivedFile(tmp_path / "received")
    sent.write_bytes(random.Random(2).randbytes(3_500))
    parts = list(file_documents(sent))
    random.Random(3).shuffle(parts)
    hostile = [
        {},
        {"size": math.inf, "start": 0, "content": ""},
        {"size": 2**40, "start": 0, "content": ""},
        {**parts[0], "size": 4_000},
        {**parts[0], "start": 1},
        {**parts[0], "start": -1000},
        {**parts[0], "content": "!"},
        {**parts[0], "content": ""},
    ]
    assert len(parts) == 4
    for part in parts:
        assert not received.is_whole
        for document in (part, *hostile, part):
            received.add(document)
    assert received.is_whole and (tmp_path / "received").read_bytes() == sent.read_bytes()


def test_the_file_of_an_earlier_attempt_is_removed(tmp_path: Path) -> None:
    (tmp_path / "model").write_text("half")
    assert not ReceivedFile(tmp_path / "model").is_whole and not (tmp_path / "model").exists()


class EndedRun:
    """Flower's commands for a SuperLink whose run has ended, with these lines in its log."""

    def __init__(self, lines: list[str]) -> None:
        self.run_id, self.path, self._lines = 7, Path("/dev/null"), lines

    def __call__(self, *arguments: Any) -> "EndedRun":
        return self

    submit = __call__
    close = stop = ended = lambda self, *arguments: True

    def new_lines(self) -> list[str]:
        return self._lines


@pytest.mark.parametrize("wants_model", [True, False])
@pytest.mark.parametrize("num_parts", [3, 4])
def test_a_model_is_handed_over_whole_or_not_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_parts: int, wants_model: bool
) -> None:
    monkeypatch.setattr(outcome_lines, "_PART_BYTES", 1000)
    sent, folder = tmp_path / "sent", RunFolder(tmp_path / "run")
    sent.write_bytes(random.Random(2).randbytes(3_500))
    folder.path.mkdir()
    lines = [
        line for part in list(file_documents(sent))[:num_parts] for line in to_lines("model", part)
    ]
    run = EndedRun([*lines, *to_lines("outcome", {"final_accuracy": 1.0})])
    monkeypatch.setattr(remote_superlink, "FlwrClient", run)
    app = DeployedApp(document={}, local_files=EMPTY, bundle_files=EMPTY, node_configs=())

    def received() -> Any:
        return remote_superlink.run_on_remote_superlink(
            app,
            folder,
            RunHistory(folder),
            DeploymentOptions(superlink="127.0.0.1:1"),
            lambda line: None,
            wants_model=wants_model,
        )

    if wants_model and num_parts < 4:
        refused(received, "missing", error=TrainingFailed)
        return
    assert received() == ({"final_accuracy": 1.0}, None)
    assert folder.model.exists() == wants_model
    if wants_model:
        assert folder.model.read_bytes() == sent.read_bytes()
