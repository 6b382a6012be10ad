"""300 damaged scenario files: `socflower run` refuses each in one line with status 2, or would begin to train."""

import json
import math
import random
import shutil
import time
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import typer

from socflower.field_rules import keys_of, table_of
from socflower.scenario import runner
from socflower.scenario.schema.scenario_file import ScenarioFile
from tests.command_line import Socflower

SCENARIOS = Path(__file__).parents[3] / "scenarios"
FILES = sorted(
    path.relative_to(SCENARIOS)
    for folder in ("", "full", "clusters")
    for path in (SCENARIOS / folder).glob("*.toml")
)
NUM_CASES = 60
LONGEST_S = 5.0

WRONG = (
    None,
    "",
    "five",
    "5",
    "\n",
    "ä\U0001f525",
    True,
    False,
    0,
    -1,
    1,
    2**31,
    10**18,
    -(10**18),
    10**400,
    0.0,
    -0.5,
    1.5,
    1e-300,
    1e300,
    math.nan,
    math.inf,
    -math.inf,
    [],
    [1],
    ["a", 2],
    [[1, 2]],
    [[math.nan, 1]],
    [{}],
    list(range(-3, 20_000)),
    [[1.0, -1.0]] * 2_000,
    {},
    {"value": 1},
    {"a": {"b": {"c": [1]}}},
)


def inline(value: Any) -> str:
    """Return a value as TOML in one line."""
    if isinstance(value, dict):
        return (
            "{"
            + ", ".join(f"{json.dumps(key)} = {inline(entry)}" for key, entry in value.items())
            + "}"
        )
    if isinstance(value, list):
        return "[" + ", ".join(map(inline, value)) + "]"
    if isinstance(value, float):
        return (
            "nan"
            if math.isnan(value)
            else ("inf" if value > 0 else "-inf")
            if math.isinf(value)
            else repr(value)
        )
    return json.dumps(value) if not isinstance(value, bool) else str(value).lower()


def tables_in(document: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the document and all tables below it that hold anything."""
    found = [document]
    for value in document.values():
        for entry in value if isinstance(value, list) else [value]:
            if isinstance(entry, dict) and entry:
                found.extend(tables_in(entry))
    return found


def with_wrong_value(document: dict[str, Any], rng: random.Random) -> None:
    table = rng.choice(tables_in(document))
    value = rng.choice(WRONG)
    key = rng.choice(list(table))
    if value is None:
        del table[key]
    else:
        table[key] = value


def with_any_key(document: dict[str, Any], rng: random.Random) -> None:
    """Give a key of the schema, whether the file has it or not, a value that is none of its kind."""
    name, entry = rng.choice([(name, entry) for name, entry in keys_of(ScenarioFile).items()])
    table, shape = table_of(entry.annotation)
    if table is None or shape == "dict":
        document[name] = rng.choice(WRONG[1:])
        return
    key = rng.choice(list(keys_of(table)))
    owner = document.setdefault(name, [{}] if shape else {})
    if isinstance(owner, list) and owner:
        owner = owner[0]
    if isinstance(owner, dict):
        owner[key] = rng.choice(WRONG[1:])


def with_misspelled_key(document: dict[str, Any], rng: random.Random) -> None:
    table = rng.choice(tables_in(document))
    key = rng.choice(list(table))
    at = rng.randrange(len(key))
    table[
        rng.choice(
            (
                key[:at] + key[at + 1 :],
                key[:at] + "x" + key[at:],
                key.upper(),
                key[::-1],
                f"{key} ",
                "",
            )
        )
    ] = table.pop(key)


def with_other_shape(document: dict[str, Any], rng: random.Random) -> None:
    key = rng.choice(list(document))
    value = document[key]
    document[key] = rng.choice(
        ([value], {"x": value}, {key: value}, [[value]], str(value)[:50], len(str(value)))
    )


def with_moved_table(document: dict[str, Any], rng: random.Random) -> None:
    key = rng.choice(list(document))
    rng.choice(tables_in(document))[key] = json.loads(json.dumps(document[key]))


CHANGES: tuple[Callable[[dict[str, Any], random.Random], None], ...] = (
    with_wrong_value,
    with_wrong_value,
    with_any_key,
    with_any_key,
    with_misspelled_key,
    with_other_shape,
    with_moved_table,
)


def changed_text(text: str, rng: random.Random) -> bytes:
    """Return bytes that are mostly no TOML any more."""
    lines = text.splitlines(keepends=True)
    at = rng.randrange(len(lines))
    raw = text.encode()
    cut = rng.randrange(len(raw))
    return rng.choice(
        (
            raw[:cut],
            "".join([*lines[:at], lines[at], *lines[at:]]).encode(),
            b"\xef\xbb\xbf" + raw,
            raw[:cut] + b"\xff\xfe" + raw[cut:],
            rng.randbytes(2000),
            raw[:cut] + b"\0" + raw[cut:],
            text.encode("utf-16"),
            raw.replace(b"=", b"", 1),
            raw + b"\nx = " + b"[" * 5000 + b"]" * 5000,
            raw + b"\nx = " + b"9" * 10_000,
            b"x = " + b"{a = " * 300 + b"1" + b"}" * 300 + b"\n" + raw,
            raw.replace(b"\n", b"\r"),
            b"",
            raw + raw,
            raw.replace(b'"', b"'''", 3),
        )
    )


def case(number: int) -> tuple[Path, bytes]:
    """Return a file's name and its content with one to three changes, the same for a number in every run."""
    rng = random.Random(number)
    name = FILES[number % len(FILES)]
    text = (SCENARIOS / name).read_text("utf-8")
    if number % 4 == 3:
        return name, changed_text(text, rng)
    document = tomllib.loads(text)
    for _ in range(rng.randint(1, 3)):
        rng.choice(CHANGES)(document, rng)
    return name, "".join(
        f"{json.dumps(key)} = {inline(value)}\n" for key, value in document.items()
    ).encode()


def test_damaged_files_are_refused_in_one_line_or_begin_to_train(
    socflower: Socflower,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    begun: list[object] = []

    def begin(*arguments: object, **_: object) -> None:
        begun.append(arguments)
        raise typer.Exit(0)

    monkeypatch.setattr(runner, "run_to_folder", begin)
    shutil.copytree(SCENARIOS, tmp_path / "all")
    for name in (
        FILES
    ):  # as they ship; afterwards packages and data sets are loaded, which is no file's time
        if name.parts[0] != "full":
            assert socflower("run", tmp_path / "all" / name).status == 0, name
    begun.clear()
    refused, slowest_s = [], 0.0
    for number in range(NUM_CASES):
        name, content = case(number)
        path = (tmp_path / "all" / name).with_stem(f"case{number}")
        path.write_bytes(content)
        before, before_s = len(begun), time.process_time()
        ran = socflower("run", path)
        slowest_s = max(slowest_s, time.process_time() - before_s)
        path.unlink()
        if ran.status == 0:
            assert len(begun) == before + 1
        else:
            assert ran.status == 2, (number, name, ran)
            assert (
                ran.err.startswith("error: ") and ran.err.count("\n") == 1 and len(ran.err) < 2000
            ), (number, ran.err)
            assert "Traceback" not in ran.err and ran.out == "", (number, name)
            refused.append(ran.err)
    print(f"{len(refused)} refused, {len(begun)} accepted, the slowest in {slowest_s:.2f} s")
    assert len(refused) >= NUM_CASES // 2 and begun
    assert slowest_s < LONGEST_S
