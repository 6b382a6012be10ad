"""`socflower status` and `socflower watch`: what a run, a node or a cloud is doing now."""

import json
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any
from urllib.error import URLError
from urllib.request import urlopen

import typer
from rich.live import Live
from rich.table import Table

from socflower.cli.options import Json
from socflower.cli.terminal import OUT, print_json, print_line
from socflower.errors import ConfigError, TrainingFailed
from socflower.quantities import human_seconds, significant

_TIMEOUT_S = 5.0
_OVER = ("ended", "killed", "drained")

Place = Annotated[
    str,
    typer.Argument(
        help="The folder of a run, or HOST:PORT of a run, node or cloud with --metrics; default: the "
        "newest run below out.",
        show_default=False,
    ),
]


def status(place: Place = "", as_json: Json = False) -> None:
    """Show what a run, node or cloud is doing now: who is there, round, loss, heat, and what is waited for."""
    document = _read(place)
    if as_json:
        print_json(document)
    else:
        OUT.print(_table(document))


def watch(
    place: Place = "",
    every: Annotated[float, typer.Option(help="Seconds between two looks.")] = 1.0,
) -> None:
    """Follow `status` until the run ends; without a terminal, print a line whenever it changes."""
    if not 0.1 <= every <= 3600:
        raise ConfigError(f"--every {every:g}: must be from 0.1 to 3600 seconds")
    if OUT.is_terminal:
        with Live(console=OUT, auto_refresh=False) as live:
            for document in _documents(place, every):
                live.update(_table(document), refresh=True)
    else:
        last = ""
        for document in _documents(place, every):
            line = _line(document)
            if line != last:
                print_line(line)
            last = line
    if document["state"] == "killed":
        raise TrainingFailed(f"{document['run']}: its command was killed; the same command resumes")


def _documents(place: str, every_s: float) -> Iterator[dict[str, Any]]:
    """Yield the status until it is over."""
    while True:
        document = _read(place)
        yield document
        if document["state"] in _OVER:
            return
        time.sleep(every_s)


def _read(place: str) -> dict[str, Any]:
    """Return the status at a place; `ConfigError` if there is nothing."""
    folder = Path(place) if place else _newest_run()
    host, _, port = place.rpartition(":")
    if host and port.isdecimal() and not folder.exists():
        return _fetch(place)
    # Importing Flower takes long, and an address needs none of it.
    from socflower.engines.run_status import read_status

    document = read_status(folder)
    if document is None:
        raise ConfigError(
            f"{folder}: no run is there; name the folder of its --out, or HOST:PORT of its --metrics"
        )
    return document


def _newest_run() -> Path:
    files = [*Path("out").glob("*/status.json"), *Path("out").glob("*/result.json")]
    if not files:
        raise ConfigError(
            "out: no run is below this folder; name one, or HOST:PORT of its --metrics"
        )
    return max(files, key=lambda path: path.stat().st_mtime).parent


def _fetch(address: str) -> dict[str, Any]:
    try:
        with urlopen(f"http://{address}/status", timeout=_TIMEOUT_S) as answer:
            document = json.loads(answer.read())
    except (URLError, OSError) as error:
        raise ConfigError(
            f"{address}: does not answer ({error}); start the run, node or cloud with --metrics there"
        ) from None
    except ValueError:
        document = None
    if not isinstance(document, dict) or not {"kind", "state"} <= document.keys():
        raise ConfigError(f"{address}: is not a port of --metrics of socflower")
    return document


def _table(document: Mapping[str, Any]) -> Table:
    """Return a status as a table; lists of groups and sessions have a row each."""
    title = str(document.get("run") or document["kind"])
    table = Table("", title, show_header=True, header_style="bold")
    for name, value in _rows(document):
        table.add_row(name, value)
    return table


def _rows(document: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    yield "state", str(document["state"])
    yield "waiting for", str(document.get("waiting_for", "nothing"))
    if document.get("round") is not None:
        of = document.get("num_rounds")
        yield "rounds done", f"{document['round']}" + (f" of {of}" if of else "")
    for key in ("accuracy", "loss", "hottest_c"):
        if document.get(key) is not None:
            name, unit = ("hottest", " °C") if key == "hottest_c" else (key, "")
            yield name, f"{significant(document[key])}{unit}"
    if nodes := document.get("nodes"):
        yield "nodes", f"{nodes['connected']} connected, {nodes['needed']} needed"
    for group in document.get("groups", ()):
        behind = ", ".join(map(str, group["waiting_for"]))
        members = f"SoC {', '.join(map(str, group['members']))}, led by {group['leader']}"
        yield f"group {group['id']}", members + (f"; waiting for {behind}" if behind else "; done")
    for key in ("messages", "failed", "restarts", "last_message_s"):
        if document.get(key):
            value = document[key]
            is_time = key.endswith("_s")
            yield (
                key.removesuffix("_s").replace("_", " "),
                (f"{human_seconds(value)} ago" if is_time else str(value)),
            )
    for session in document.get("sessions", ()):
        yield f"run {session['run_id']}", f"{session['num_batches_done']} batches done"
    for line in document.get("notices", ()):
        yield "event", line


def _line(document: Mapping[str, Any]) -> str:
    """Return a status as one line, for a pipe."""
    shown = [
        f"{key} {significant(document[key])}"
        for key in ("accuracy", "loss", "hottest_c")
        if document.get(key) is not None
    ]
    of = f"/{document['num_rounds']}" if document.get("num_rounds") else ""
    rounds = [] if document.get("round") is None else [f"round {document['round']}{of}"]
    waiting = f"waiting for {document.get('waiting_for', 'nothing')}"
    return "  ".join([str(document["state"]), *rounds, *shown, waiting])
