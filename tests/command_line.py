"""The command line as a fixture."""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest


class Ran(NamedTuple):
    status: int
    out: str
    err: str


Socflower = Callable[..., Ran]


@pytest.fixture
def socflower(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> Iterator[Socflower]:
    """The command, without a new interpreter, in a folder of its own."""
    from socflower.cli import main as cli  # here: most tests start no command
    from socflower.user_code import forgotten_modules

    monkeypatch.chdir(tmp_path)

    def run(*arguments: object) -> Ran:
        monkeypatch.setattr(sys, "argv", ["socflower", *map(str, arguments)])
        capsys.readouterr()
        try:
            cli.main()
            status = 0
        except SystemExit as end:
            status = int(end.code or 0)
        captured = capsys.readouterr()
        return Ran(status, captured.out, captured.err)

    with forgotten_modules(tmp_path):
        yield run
