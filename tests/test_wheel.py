"""A wheel in an empty folder: what it and the sdist hold, and the first commands of somebody who has nothing else."""

import json
import os
import subprocess
import sys
import sysconfig
import tarfile
import time
import venv
import zipfile
from collections.abc import Iterable
from pathlib import Path

import pytest

import socflower

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]
ROOT = Path(__file__).parents[1]
CACHES = (
    "__pycache__",
    ".pyc",
    ".mypy_cache",
    ".ruff_cache",
    ".pytest_cache",
    ".hypothesis",
    ".venv",
    ".git/",
    "/out/",
    "/build/",
)
DATA = (".parquet", ".npz", ".npy", ".pt", ".safetensors", ".onnx")


def assert_clean(names: Iterable[str]) -> None:
    assert [
        name for name in names if any(part in name for part in CACHES) or name.endswith(DATA)
    ] == []


def pip(*words: object, timeout_s: float) -> None:
    command = [sys.executable, "-m", "pip", *map(str, words)]
    subprocess.run(command, check=True, capture_output=True, timeout=timeout_s)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    options = "wheel --quiet --no-build-isolation --no-deps"
    build = ["-w", folder, "-C", f"build-dir={folder / 'build'}", ROOT]
    pip(*options.split(), *build, timeout_s=900.0)
    return next(folder.glob("*.whl"))


@pytest.fixture(scope="module")
def scripts(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The programs of an environment with the wheel, which takes all other packages from the one of the tests."""
    folder = tmp_path_factory.mktemp("venv")
    venv.create(folder, with_pip=False)
    pip(
        "--python",
        folder / "bin" / "python",
        *["install", "--quiet", "--no-deps"],
        wheel,
        timeout_s=300.0,
    )
    packages = next(folder.glob("lib/python*/site-packages"))
    # Paths of a .pth file come last, and those of other .pth files there are not read: nor that of the checkout.
    (packages / "others.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return folder / "bin"


def test_the_wheel_has_scenarios_templates_and_results_and_no_caches_or_data(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    assert_clean(names)
    shipped = {
        name.removeprefix("socflower/_shipped/")
        for name in names
        if name.startswith("socflower/_shipped/")
    }
    tracked = subprocess.run(
        ["git", "ls-files", "scenarios", "templates", "docs/results"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split()
    assert shipped == set(tracked)
    assert {name.partition("/")[0] for name in names} == {
        "socflower",
        f"socflower-{socflower.__version__}.dist-info",
    }
    assert wheel.stat().st_size < 3e6


def test_the_sdist_has_what_a_build_needs_and_no_caches_or_data(tmp_path: Path) -> None:
    subprocess.run(
        [
            sys.executable,
            "-c",
            "import sys; from scikit_build_core.build import build_sdist; build_sdist(sys.argv[1])",
            tmp_path,
        ],
        cwd=ROOT,
        check=True,
        capture_output=True,
        timeout=300.0,
    )
    with tarfile.open(next(tmp_path.glob("*.tar.gz"))) as archive:
        names = [name.partition("/")[2] for name in archive.getnames()]
    assert_clean(names)
    assert {
        "LICENSE",
        "README.md",
        "pyproject.toml",
        "native/CMakeLists.txt",
        "scenarios/digits_demo.toml",
        "templates/text/my_app/task.py",
        "socflower/__init__.py",
    } <= set(names)
    assert next(tmp_path.glob("*.tar.gz")).stat().st_size < 6e6


def test_the_first_commands_in_an_empty_folder(scripts: Path, tmp_path: Path) -> None:
    environment = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("PYTHON", "SOCFLOWER", "VIRTUAL_ENV"))
    }
    environment |= {"PATH": f"{scripts}{os.pathsep}{os.environ['PATH']}", "COLUMNS": "80"}

    def socflower(command: str) -> str:
        started_s = time.perf_counter()
        ran = subprocess.run(
            [scripts / "socflower", *command.split()],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            timeout=900.0,
            check=False,
        )
        print(f"{time.perf_counter() - started_s:6.1f} s  socflower {command}")
        assert ran.returncode == 0, ran.stdout[-1000:] + ran.stderr[-2000:]
        return ran.stdout

    listed = json.loads(socflower("scenarios --json"))["scenarios"]
    assert len(listed) > 25
    assert all(Path(entry["path"]).is_relative_to(scripts.parent) for entry in listed)
    socflower("new my_app")
    socflower("run my_app --cluster my_app/cluster.toml")
    assert json.loads((tmp_path / "out" / "my_app" / "result.json").read_text())["virtual_s"] > 0
    socflower("plan measured_board")  # its cluster file lies beside it
    socflower("run broken_reply --log csv,jsonl")
    assert len((tmp_path / "out" / "broken_reply" / "metrics.csv").read_text().splitlines()) > 2
    settings = "model.name=lenet5 train.epochs=2 compare.train={} compare.predict=[] expect={}"
    overrides = [f"--set {each}" for each in settings.split()]
    socflower(f"compare digits_demo --strategies socflow,sgd {' '.join(overrides)}")
    report = (tmp_path / "out" / "digits_demo-compare" / "report.html").read_text("utf-8")
    assert "<svg" in report and "socflow" in report and "sgd" in report
    assert 'src="http' not in report
    assert not list(tmp_path.glob("scenarios"))
