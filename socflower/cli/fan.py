"""`socflower fan`: set the fans of a rack by the temperatures of its SoCs."""

from pathlib import Path
from typing import Annotated

import typer

from socflower.cli.options import Json, refuse_unread
from socflower.cli.terminal import print_notice


def fan(
    context: typer.Context,
    config: Annotated[
        Path,
        typer.Argument(help="Fan configuration (TOML); docs/guides/heat.md.", show_default=False),
    ],
    once: Annotated[
        bool, typer.Option("--once", help="Read once, set the fans, print, and give them back.")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Set nothing.")] = False,
    restore: Annotated[
        bool,
        typer.Option(
            "--restore", help="Only give the fans back, as after a daemon that was killed."
        ),
    ] = False,
    calibrate: Annotated[
        bool,
        typer.Option(
            "--calibrate",
            help="Only measure the fans' speeds by duty, and print the keys for them.",
        ),
    ] = False,
    as_json: Json = False,
) -> None:
    """Set the fans of a rack by the temperatures of its SoCs, until a signal; then give them back."""
    if restore:
        refuse_unread(
            context,
            dict.fromkeys(
                ("dry_run", "as_json"), "is for looks at the fans, and --restore takes none"
            ),
        )
    if calibrate:
        refuse_unread(
            context, {"as_json": "is for looks at the fans, and --calibrate prints keys of [fan]"}
        )
    from socflower.thermal.fans.daemon import run_fan

    if not run_fan(
        config,
        once=once,
        dry_run=dry_run,
        restore=restore,
        calibrate_fans=calibrate,
        as_json=as_json,
        say=print_notice,
    ):
        raise typer.Exit(1)
