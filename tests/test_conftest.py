"""The Hypothesis profile of all tests, and which cells are slow: neither a slow machine nor luck decides."""

import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

FOLDER = Path(__file__).parents[1]


def test_no_property_has_a_deadline_and_slow_drawing_is_no_failure() -> None:
    here = settings(max_examples=5)  # as tests write it
    assert here.deadline is None and here.print_blob
    assert HealthCheck.too_slow in here.suppress_health_check


def slow_property(folder: Path) -> Path:
    """Write a test whose first example takes longer than Hypothesis's own deadline, and prints what it draws."""
    path = folder / "test_slow_property.py"
    path.write_text(
        "import time\n\n"
        "from hypothesis import given, settings\n"
        "from hypothesis import strategies as st\n\n\n"
        "@settings(max_examples=3)\n"
        "@given(number=st.integers(0, 2**60))\n"
        "def test_slow(number):\n"
        "    print('drew', number)\n"
        "    end = time.perf_counter() + 0.25\n"
        "    while time.perf_counter() < end:\n"
        "        pass\n"
    )
    return path


def drawn(path: Path, *options: str) -> list[str]:
    """Run the file with the tests' conftest in a process of its own; return what it drew."""
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-s",
            "-p",
            "no:cacheprovider",
            "-p",
            "tests.conftest",
            *options,
            str(path),
        ],
        cwd=FOLDER,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return [line for line in done.stdout.splitlines() if "drew" in line]


@pytest.mark.slow
def test_another_process_has_no_deadline_either_and_draws_the_same_unless_asked_to_explore(
    tmp_path: Path,
) -> None:
    path = slow_property(tmp_path)
    first = drawn(path)
    assert len(first) == 3 and drawn(path) == first
    explored = drawn(path, "--hypothesis-profile=exploring", "--hypothesis-seed=5")
    assert explored != first
    assert drawn(path, "--hypothesis-profile=exploring", "--hypothesis-seed=5") == explored


def test_a_few_cells_are_quick_and_a_run_of_one_cell_runs_it(tmp_path: Path) -> None:
    path = tmp_path / "test_cells.py"
    path.write_text(
        "import pytest\n\n\n"
        "@pytest.mark.few_cells(3)\n"
        "@pytest.mark.parametrize('cell', range(10))\n"
        "def test_cell(cell):\n"
        "    print('drew', cell)\n"
    )
    cells = {
        marked: {
            int(line.split()[-1].rstrip("."))
            for line in drawn(path, "-p", "no:randomly", "-m", marked)
        }
        for marked in ("not slow", "slow")
    }
    assert cells == {"not slow": {0, 3, 6}, "slow": {1, 2, 4, 5, 7, 8, 9}}
    assert len(drawn(Path(f"{path}::test_cell[5]"))) == 1
