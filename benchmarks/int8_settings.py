"""The settings in which the int8 benchmarks compare, each in a process of its own.

Torch and its libraries choose their instructions when they are loaded, so a setting is a set of environment variables
for a new interpreter. On a machine with AVX2, our AVX2 kernels are compared with a torch that is limited to AVX2; on a
machine with more, our best kernels are also compared with an unlimited torch. Everything runs on one thread.

As a program, `python -m benchmarks.int8_settings MODULE:FUNCTION ARGUMENTS` calls a function with JSON arguments and
prints its result as the last line; `in_setting` reads it.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from benchmarks.harness import Row
from socflower import _int8

_ONE_THREAD = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
_AVX2_ONLY = {
    # Torch's own kernels and the code that torch.compile generates.
    "ATEN_CPU_CAPABILITY": "avx2",
    # The compiler that torch.compile uses.
    "TORCHINDUCTOR_CPP_MARCH": "x86-64-v3",
    "ONEDNN_MAX_CPU_ISA": "AVX2",
    "MKL_ENABLE_INSTRUCTIONS": "AVX2",
    "FBGEMM_ENABLE_INSTRUCTIONS": "AVX2",
}
_ROOT = Path(__file__).resolve().parents[1]


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """One of our kernel paths, and whether the peers are limited to AVX2."""

    kernel: str
    avx2_only: bool

    def environment(self) -> dict[str, str]:
        """Return the variables of a process in this setting, without limits that the caller's own process has."""
        inherited = {name: value for name, value in os.environ.items() if name not in _AVX2_ONLY}
        return {**inherited, **_ONE_THREAD, **(_AVX2_ONLY if self.avx2_only else {})}


def settings() -> list[Setting]:
    """Return the settings of this machine: AVX2 against AVX2, and best against unrestricted."""
    kernels = _int8.available_kernels()
    with_avx2 = [Setting(kernel="avx2", avx2_only=True)] if "avx2" in kernels else []
    return with_avx2 + (
        [Setting(kernel=kernels[-1], avx2_only=False)] if kernels[-1] != "avx2" else []
    )


def in_setting(setting: Setting, function: str, **arguments: object) -> Any:
    """Call "module:function" with `arguments` in a new interpreter; arguments and result travel as JSON."""
    with tempfile.TemporaryDirectory() as compiled:
        ran = subprocess.run(
            [sys.executable, "-m", "benchmarks.int8_settings", function, json.dumps(arguments)],
            cwd=_ROOT, env={**setting.environment(), "TORCHINDUCTOR_CACHE_DIR": compiled},
            stdout=subprocess.PIPE, text=True, check=False,
        )  # fmt: skip
    if ran.returncode != 0:
        raise RuntimeError(
            f"{function} with {arguments} ended with status {ran.returncode}; its messages are above"
        )
    return json.loads(ran.stdout.splitlines()[-1])


def rows_of(setting: Setting, function: str, **arguments: object) -> list[Row]:
    """Return the rows that "module:function" measures in `setting` with the setting's kernel path."""
    return [Row(**row) for row in in_setting(setting, function, kernel=setting.kernel, **arguments)]


def describe_peers() -> dict[str, object]:
    """Return the peers of each kernel path: limits, threads, memory layout and build of torch."""
    return {
        setting.kernel: in_setting(
            setting, "benchmarks.int8_settings:describe_torch", avx2_only=setting.avx2_only
        )
        for setting in settings()
    }


def describe_torch(avx2_only: bool) -> dict[str, object]:
    """Return the build and the settings of this process's torch."""
    import torch

    one_thread(torch)
    compiler = shutil.which(os.environ.get("CXX", "g++"))
    version = (
        subprocess.run([compiler, "--version"], capture_output=True, text=True, check=True)
        if compiler
        else None
    )
    return {
        "environment": {
            name: os.environ[name] for name in (*_ONE_THREAD, *(_AVX2_ONLY if avx2_only else ()))
        },
        "num_threads": torch.get_num_threads(),
        "memory_layout": "channels last (NHWC) for images, weights and gradients",
        "capability": torch.backends.cpu.get_cpu_capability(),
        "quantised_engines": torch.backends.quantized.supported_engines,
        "quantised_range": "activations 0..127 (7 bits, FBGEMM's reduce_range), weights -127..127, per tensor",
        "compiler": version.stdout.splitlines()[0] if version else None,
        "build": torch.__config__.show().splitlines(),
    }


def one_thread(torch: Any) -> None:
    """Limit torch to one thread; whether the variables alone do so depends on its build."""
    torch.set_num_threads(1)
    assert torch.get_num_threads() == 1


def _main(arguments: Sequence[str]) -> None:
    module, _, name = arguments[0].partition(":")
    result = getattr(import_module(module), name)(**json.loads(arguments[1]))
    # The last line that a library printed may lack its end.
    print()
    print(json.dumps(result, default=asdict))


if __name__ == "__main__":
    _main(sys.argv[1:])
