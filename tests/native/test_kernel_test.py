"""The C++ tests of the kernels (native/tests/): every path of this machine against the reference."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from socflower import _int8

ROOT = Path(__file__).parents[2]
BUILD = ROOT / "build" / "kernel_test"  # kept, so that only the first run takes long
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]


@pytest.fixture(scope="module")
def kernel_test():
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    cmake = shutil.which("cmake", path=path)
    if cmake is None:
        pytest.skip("there is no cmake to build native/tests with")
    options = ["-DSOCFLOWER_PYTHON=OFF", "-DSOCFLOWER_KERNEL_TEST=ON"]
    for command in (
        [cmake, "-S", str(ROOT / "native"), "-B", str(BUILD), *options],
        [cmake, "--build", str(BUILD), "--target", "kernel_test", "--parallel", "2"],
    ):
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, env={**os.environ, "PATH": path}
        )
        assert done.returncode == 0, done.stdout + done.stderr
    return BUILD / "kernel_test"


@pytest.mark.parametrize("kernel", _int8.available_kernels())
def test_a_path_equals_the_reference(kernel_test, kernel):
    done = subprocess.run([kernel_test, kernel], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    assert "checks" in done.stdout


def test_a_path_that_is_not_compiled_in_is_an_error(kernel_test):
    done = subprocess.run([kernel_test, "abacus"], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "no path named abacus" in done.stdout
