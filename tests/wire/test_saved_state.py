"""Saved state: what was written comes back, any damage is noticed, and a kill leaves the old file or the new one."""

import os
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from socflower.errors import ConfigError
from socflower.wire.saved_state import (
    DamagedFile,
    StateKind,
    StateStore,
    atomic_file,
    read_sealed,
    remove_partial,
    seal,
    unseal,
    write_atomically,
)
from tests.one_line import one_line, refused

KIND = StateKind(name="thing", schema=3, remedy="throw it away")
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=10,
)


def store(folder: Path, **options: Any) -> StateStore:
    return StateStore(
        folder, KIND, **{"prefix": "thing-", "suffix": ".saved", "keep": 2, **options}
    )


# ---------------------------------------------------------------------------------------------- entries
@settings(max_examples=20)
@given(
    state=st.dictionaries(st.text(), JSON),
    payload=st.lists(st.binary()),
    owner=st.text(),
    number=st.integers(0),
)
def test_what_was_sealed_comes_back(
    state: dict[str, Any], payload: list[bytes], owner: str, number: int
) -> None:
    content = b"".join(seal(KIND, state, payload, owner=owner, number=number))
    assert unseal(KIND, content, "it", owner=owner, number=number) == (state, b"".join(payload))


def test_every_changed_bit_every_cut_and_every_addition_is_noticed() -> None:
    whole = b"".join(seal(KIND, {"a": 1.5}, [b"payload\n\n"]))
    flipped = (
        whole[:index] + bytes([whole[index] ^ 1 << bit]) + whole[index + 1 :]
        for index in range(len(whole))
        for bit in range(8)
    )
    for other in (
        *flipped,
        *(whole[:length] for length in range(len(whole))),
        whole + b"\0",
        whole + b"\n",
        whole + whole,
        b"\n" + whole,
    ):
        with pytest.raises(DamagedFile, match=r"^it is damaged .*; throw it away$"):
            unseal(KIND, other, "it")


@pytest.mark.parametrize(
    ("name", "schema", "named"),
    [
        ("other", 3, ("other", "thing")),
        ("thing", 2, ("older", 2, 3)),
        ("thing", 4, ("newer", 4, 3)),
    ],
)
def test_an_entry_of_another_kind_or_schema_is_refused(
    name: str, schema: int, named: tuple[object, ...]
) -> None:
    content = b"".join(seal(StateKind(name=name, schema=schema, remedy=""), {}))
    with pytest.raises(ConfigError) as caught:
        unseal(KIND, content, "it")
    assert not isinstance(caught.value, DamagedFile)
    one_line(str(caught.value), "it", *named)


# ---------------------------------------------------------------------------------------------- atomic files
@pytest.mark.parametrize("step", ["fsync", "replace"])
def test_a_writer_that_fails_leaves_the_old_file(
    step: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "file"
    write_atomically(path, "old")

    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, step, fail)
    with pytest.raises(OSError, match="No space"):
        write_atomically(path, [b"new", b"er"])
    assert path.read_text() == "old" and os.listdir(tmp_path) == ["file"]


def test_a_file_is_at_no_time_more_readable_than_asked(tmp_path: Path) -> None:
    path = tmp_path / "key"
    with atomic_file(path, mode=0o600) as stream:
        (partial,) = tmp_path.iterdir()
        assert partial.stat().st_mode & 0o777 == 0o600
        stream.write(b"secret")
    assert path.stat().st_mode & 0o777 == 0o600 and path.read_bytes() == b"secret"


def test_what_a_killed_writer_left_is_removed_and_nothing_else(tmp_path: Path) -> None:
    writer = subprocess.Popen(
        [sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE
    )
    (tmp_path / f".file.{writer.pid}-1.part").write_bytes(b"socflower-sea")
    (tmp_path / f".file.{os.getpid()}-1.part").write_bytes(b"of an earlier process of this id")
    (tmp_path / ".mine").write_text("mine")
    (tmp_path / ".download.part").write_text("of another program")
    with atomic_file(tmp_path / "file") as stream:
        remove_partial(tmp_path)
        stream.write(b"x")
    assert sorted(os.listdir(tmp_path)) == [
        ".download.part",
        f".file.{writer.pid}-1.part",
        ".mine",
        "file",
    ]
    writer.communicate()
    remove_partial(tmp_path)
    assert sorted(os.listdir(tmp_path)) == [".download.part", ".mine", "file"]


# ---------------------------------------------------------------------------------------------- stores
@settings(max_examples=8)
@given(attempts=st.lists(st.integers(1, 8), min_size=1, max_size=4), keep=st.integers(1, 3))
def test_the_last_up_to_the_one_written_are_kept(attempts: list[int], keep: int) -> None:
    """Whatever attempts there were before: going back removes nothing that is needed."""
    with TemporaryDirectory() as folder:
        kept = store(Path(folder), keep=keep)
        for last in attempts:
            for number in range(1, last + 1):
                kept.write(number, {"number": number})
            up_to = [number for number in kept.numbers() if number <= last]
            assert up_to == list(range(last, max(0, last - keep), -1))
            assert kept.newest(lambda number: kept.read(number)[0]) == {
                "number": max(kept.numbers())
            }
        kept.remove(after=1)
        assert set(kept.numbers()) <= {1}


def test_a_damaged_entry_is_told_and_the_one_before_is_used(tmp_path: Path) -> None:
    kept, said = store(tmp_path), list[str]()
    assert kept.newest(kept.read) is None
    for number in (1, 2):
        kept.write(number, {}, [b"%d" % number])
    kept.path(2).write_bytes(b"")
    found = kept.newest(kept.read, said.append)
    assert found is not None and bytes(found[1]) == b"1"
    (line,) = said
    one_line(line, kept.path(2), "damaged", "thing-000001.saved")
    kept.path(1).unlink()
    kept.path(1).mkdir()
    refused(lambda: kept.newest(kept.read), "000002", "000001.saved", "Is a dir")


def test_an_entry_of_another_owner_and_one_under_another_name_are_refused(tmp_path: Path) -> None:
    mine = store(tmp_path, owner="mine")
    mine.write(1, {})
    refused(lambda: store(tmp_path, owner="yours").read(1), "mine", "yours")
    os.rename(mine.path(1), mine.path(2))
    refused(lambda: mine.read(2), "number 1", error=DamagedFile)


def test_files_of_another_form_of_name_are_refused_until_all_are_removed(tmp_path: Path) -> None:
    kept = store(tmp_path)
    kept.write(1, {})
    (tmp_path / "thing-of-yesterday.saved").write_text("old")
    (tmp_path / "mine.saved").write_text("mine")
    refused(kept.numbers, "thing-of-yesterday.saved", "throw it away")
    kept.remove()
    assert os.listdir(tmp_path) == ["mine.saved"]


def test_who_keeps_a_store_open_keeps_others_from_writing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("socflower.wire.saved_state._WRITE_WAIT_S", 0.0)
    folder = tmp_path / "new"
    first, second = store(folder), store(folder)
    first.open("the first")
    first.open("the first")
    first.write(1, {})
    refused(lambda: second.write(2, {}), folder, os.getpid())
    assert second.read(1)[0] == {} and second.numbers() == [1]
    store(folder, prefix="other-").write(1, {})
    first.close()
    second.write(2, {})
    names = {"other-000001.saved", "thing-000001.saved", "thing-000002.saved"}
    assert set(os.listdir(folder)) == names


@pytest.mark.parametrize("name", ["file", "file/below"])
def test_what_cannot_be_a_folder_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / "file").touch()
    kept = store(tmp_path / name)
    refused(lambda: kept.write(1, {}), "cannot be written", name)
    refused(kept.numbers, "cannot be read", name)
    # A missing file is damage.
    refused(lambda: read_sealed(tmp_path / "none", KIND), "No such file", error=DamagedFile)
