"""Our virtual time is SimGrid's where both mean the same; benchmarks/simgrid.py has the cases."""

import shutil
from pathlib import Path

import pytest

from benchmarks import simgrid
from socflower.errors import ConfigError


@pytest.mark.slow
def test_virtual_time_is_that_of_simgrid() -> None:
    try:
        rows = simgrid.run()
    except ConfigError as error:
        pytest.skip(str(error))
    assert [row.case for row in rows if not row.ok] == []


def test_a_missing_compiler_is_said_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    with (
        pytest.raises(ConfigError, match=r"apt-get install g\+\+ libsimgrid-dev$"),
        simgrid.simgrid(),
    ):
        pass


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
def test_a_missing_simgrid_is_said_in_one_line(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    source = tmp_path / "replay.cpp"
    source.write_text("#include <simgrid/missing.hpp>\n")
    monkeypatch.setattr(simgrid, "SOURCE", source)
    with (
        pytest.raises(
            ConfigError, match=r"SimGrid is missing; on Debian: apt-get install libsimgrid-dev$"
        ),
        simgrid.simgrid(),
    ):
        pass
