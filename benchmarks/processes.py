"""Modules of a benchmark that run as processes of their own and answer lines of input with lines of output."""

import os
import subprocess
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
ONE_THREAD = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}


class LineProcess:
    """A module as a process with one thread; `prefix` is a command that starts it in another namespace.

    A process that does not answer within `timeout_s` is killed.
    """

    def __init__(
        self,
        module: str,
        *arguments: str,
        prefix: Sequence[str] = (),
        timeout_s: float = 900.0,
        stderr: int | None = None,
    ) -> None:
        self._module, self._timeout_s = module, timeout_s
        self._process = subprocess.Popen(
            [*prefix, sys.executable, "-m", module, *arguments],
            cwd=REPOSITORY,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
            env={**os.environ, **ONE_THREAD},
        )
        self.pid = self._process.pid

    def ask(self, line: str) -> str:
        """Write a line and return the answer. Raises `RuntimeError` if the process ends instead."""
        self.write(line)
        return self.read()

    def write(self, line: str) -> None:
        """Write a line of input."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{line}\n")
        self._process.stdin.flush()

    def read(self) -> str:
        """Return the next line of output. Raises `RuntimeError` if the process ends instead."""
        assert self._process.stdout is not None
        overdue = threading.Timer(self._timeout_s, self._process.kill)
        overdue.start()
        try:
            if line := self._process.stdout.readline():
                return line
        finally:
            overdue.cancel()
        raise RuntimeError(f"{self._module} ended with {self._process.wait()}")

    def kill(self) -> None:
        """Kill the process; its pipes stay open for a thread that reads."""
        self._process.kill()

    def end(self) -> None:
        """Kill the process and close its pipes."""
        self._process.kill()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout):
            assert stream is not None
            with suppress(BrokenPipeError):
                stream.close()
