"""`socflower new`: a Flower app to begin with."""

import shlex
from pathlib import Path
from typing import Annotated

import typer

from socflower.cli.options import Json
from socflower.cli.terminal import print_json, print_line
from socflower.quantities import counted


def new(
    folder: Annotated[
        Path, typer.Argument(help="A new folder, whose name is the app's.", show_default=False)
    ],
    template: Annotated[str, typer.Option(help="image or text.")] = "image",
    as_json: Json = False,
) -> None:
    """Write a Flower app that trains in groups, which Flower can build and publish."""
    from socflower.scenario.app_template import app_names, missing_package, write_app

    project, _ = app_names(folder)
    files = write_app(folder, template)
    run = f"socflower run {shlex.quote(str(folder))} --cluster {shlex.quote(str(folder / 'cluster.toml'))}"
    notes = []
    if line := missing_package(folder):
        notes.append(line)
    if folder.resolve().name != project:
        notes.append(
            "`flwr build` and `flwr app publish` take no underscore in a folder's name: rename it to "
            f"{project} before these"
        )
    if as_json:
        print_json(
            {
                "schema": 1,
                "folder": str(folder),
                "template": template,
                "files": [str(file) for file in files],
                "run": run,
                "notes": notes,
            }
        )
        return
    print_line(
        f"{folder}: {counted(len(files), 'file')}; the model and its data are in task.py. Run it:"
    )
    print_line(f"  {run}")
    for note in notes:
        print_line(f"note: {note}")
