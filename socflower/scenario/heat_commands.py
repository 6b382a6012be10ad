"""`socflower heat` and `socflower fan`: a machine's sensors, and the fans of a rack."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

_out = Console()

Json = Annotated[bool, typer.Option("--json", help="Print one JSON document instead of text.")]


def heat(
    watch: Annotated[float | None, typer.Option(help="Go on with a line every so many seconds, until Ctrl-C.")] = None,
    record: Annotated[Path | None, typer.Option(help="Write the readings to this new file, .csv or .jsonl.")] = None,
    as_json: Json = False,
) -> None:
    """Show this machine's heat sensors and what they say."""
    from socflower.scenario.heat_watch import show_heat

    show_heat(_out, watch_s=watch, record_to=record, as_json=as_json)
