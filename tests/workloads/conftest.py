"""Where the workload tests find published data, and a cache of their own."""

import os
from pathlib import Path

import pytest

# Before the tests of sources unset it.
_NAMED = os.environ.get("SOCFLOWER_DATA")


@pytest.fixture
def published_folder() -> Path:
    """Folder of Parquet data sets: SOCFLOWER_DATA, else shared/data beside the repository."""
    folder = Path(_NAMED) if _NAMED else Path(__file__).resolve().parents[3] / "shared" / "data"
    if (
        not (folder / "mnist" / "train.parquet").is_file()
        or not (folder / "cifar10" / "train.parquet").is_file()
    ):
        pytest.skip(
            f"no mnist/ and cifar10/ Parquet files in {folder}; SOCFLOWER_DATA names another folder"
        )
    return folder


@pytest.fixture(scope="session")
def session_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Cache of all test processes, so that the bundled digits are parsed once per session."""
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "workloads-cache"
    folder.mkdir(exist_ok=True)
    return folder


@pytest.fixture
def shared_cache(session_cache: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SOCFLOWER_CACHE", str(session_cache))
    return session_cache


@pytest.fixture
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "cache"
    monkeypatch.setenv("SOCFLOWER_CACHE", str(folder))
    return folder
