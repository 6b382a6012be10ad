"""Sealed files: what was written comes back, any damage is noticed, and a kill leaves the old file or the new one."""

import os
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from socflower.wire.saved_state import DamagedFile, read_sealed, remove_partial, write_sealed

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=10)


@given(header=st.dictionaries(st.text(), JSON), payload=st.lists(st.binary()))
def test_what_was_written_comes_back(header: dict[str, Any], payload: list[bytes]) -> None:
    with TemporaryDirectory() as folder:
        path = Path(folder) / "file"
        write_sealed(path, header, payload)
        assert read_sealed(path) == (header, b"".join(payload))
        assert os.listdir(folder) == ["file"]


def test_every_changed_bit_of_every_byte_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "file"
    write_sealed(path, {"a": 1.5}, [b"payload\n\n"])
    whole = path.read_bytes()
    for index in range(len(whole)):
        for bit in range(8):
            damaged = bytearray(whole)
            damaged[index] ^= 1 << bit
            path.write_bytes(damaged)
            with pytest.raises(DamagedFile, match="file"):
                read_sealed(path)


def test_every_torn_or_longer_file_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "file"
    write_sealed(path, {"a": 1.5}, [b"payload\n\n"])
    whole = path.read_bytes()
    for other in (*(whole[:length] for length in range(len(whole))), whole + b"\0", whole + b"\n", whole + whole):
        path.write_bytes(other)
        with pytest.raises(DamagedFile):
            read_sealed(path)
    path.unlink()
    with pytest.raises(DamagedFile, match="cannot be read"):
        read_sealed(path)


@pytest.mark.parametrize("step", ["fsync", "replace"])
def test_a_writer_that_fails_leaves_the_old_file(step: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "file"
    write_sealed(path, {"old": True})

    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, step, fail)
    with pytest.raises(OSError, match="No space"):
        write_sealed(path, {"old": False}, [bytes(1000)])
    assert read_sealed(path)[0] == {"old": True}
    assert os.listdir(tmp_path) == ["file"]


def test_what_a_killed_writer_left_is_removed_and_nothing_else(tmp_path: Path) -> None:
    write_sealed(tmp_path / "file", {})
    (tmp_path / ".file.123.part").write_bytes(b"socflower-sea")
    (tmp_path / ".mine").write_text("mine")
    remove_partial(tmp_path)
    assert sorted(os.listdir(tmp_path)) == [".mine", "file"]
