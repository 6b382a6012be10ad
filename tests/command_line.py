"""The command line as a fixture."""

import functools
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
import typer.main

from tests.one_line import one_line

# Typer builds all commands for each call, which takes ten times as long as to read a mistake in their options.
built_once = functools.cache(typer.main.get_command)


class Ran(NamedTuple):
    status: int
    out: str
    err: str


Socflower = Callable[..., Ran]


def is_mistake(ran: Ran, *named: object, status: int = 2) -> None:
    """Require that a command ended with one line on standard error that has each of `named`, and nothing else."""
    assert (ran.status, ran.out) == (status, "")
    assert ran.err.startswith("error: ") and ran.err.endswith("\n")
    one_line(ran.err[:-1], *named)


@pytest.fixture
def socflower(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> Iterator[Socflower]:
    """The command, without a new interpreter, in a folder of its own: `socflower("run case.toml", "--out", out)`."""
    from socflower.cli import main as cli  # here: most tests start no command
    from socflower.user_code import forgotten_modules

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(typer.main, "get_command", built_once)

    def run(command: str, *arguments: object) -> Ran:
        monkeypatch.setattr(sys, "argv", ["socflower", *command.split(), *map(str, arguments)])
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
