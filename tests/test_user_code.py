"""Scripts that processes would run again."""

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from tests.one_line import one_line

GUARD = """
    from socflower.user_code import require_main_guard

    def train():
        require_main_guard("two processes start", "start none")
        print("trained")
"""


def script(folder: Path, call: str) -> Path:
    path = folder / "script.py"
    path.write_text(textwrap.dedent(GUARD) + call + "\n")
    return path


@pytest.mark.parametrize(
    ("call", "line"),
    [
        ("train()", 7),
        ("for _ in range(1):\n    train()", 8),
        ('if __name__ == "__main__":\n    train()', None),
        ('if __name__ == "__main__":\n    pass\ntrain()', 9),
        ('try:\n    if "__main__" == __name__:\n        train()\nfinally:\n    pass', None),
    ],
)
def test_a_call_outside_of_the_guard_is_refused_with_its_line(
    call: str, line: int | None, tmp_path: Path
) -> None:
    ran = subprocess.run(
        [sys.executable, script(tmp_path, call)], capture_output=True, text=True, check=False
    )
    assert (ran.stdout == "trained\n") == (line is None), ran.stderr
    if line is not None:
        named = (f"script.py, line {line}", "two processes start", "__main__", "start none")
        one_line(ran.stderr.splitlines()[-1], "ConfigError", *named)


def test_a_program_without_a_file_or_of_an_imported_module_needs_no_guard(tmp_path: Path) -> None:
    script(tmp_path, "train()")
    for command in (["-c", textwrap.dedent(GUARD) + "train()\n"], ["-c", "import script"]):
        ran = subprocess.run(
            [sys.executable, *command], capture_output=True, text=True, check=False, cwd=tmp_path
        )
        assert ran.stdout == "trained\n", ran.stderr
