"""`socflower doctor`: checks of this machine's installation, with remedies for what is missing."""

from collections.abc import Mapping, Sequence
from typing import Any

import typer
from rich.console import Console
from rich.markup import escape

from socflower.cli.options import Json
from socflower.cli.terminal import OUT, print_json, print_line


def doctor(as_json: Json = False) -> None:
    """Check what this machine has, and print remedies for what is missing."""
    # This imports torch and Flower, which takes long.
    from socflower.cli.diagnosis import diagnose

    findings = diagnose()
    if as_json:
        print_json({"schema": 1, "findings": findings})
    else:
        print_findings(OUT, findings)
    if any(finding["status"] == "broken" for finding in findings):
        raise typer.Exit(1)


def print_findings(console: Console, findings: Sequence[Mapping[str, Any]]) -> None:
    """Print the findings of `doctor`."""
    colours = {"ok": "green", "missing": "yellow", "broken": "red"}
    for finding in findings:
        console.print(
            f"[{colours[finding['status']]}]{finding['status']:8}[/]{finding['name']:24}"
            f"{escape(finding['detail'])}",
            soft_wrap=True,
            highlight=False,
        )
        if finding["remedy"]:
            print_line(f"{'':32}-> {finding['remedy']}", console)
