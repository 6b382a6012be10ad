"""`socflower node`: a SuperNode that can be watched, and restarted without losing an interval."""

from typing import Annotated

import typer

from socflower.cli.options import FreshProcesses, LogFormat, Metrics, refuse_unread
from socflower.cli.terminal import use_log_format


def node(
    context: typer.Context,
    command: Annotated[
        list[str],
        typer.Argument(help="-- flower-supernode and its options.", show_default=False),
    ],
    metrics: Metrics = "",
    drain: Annotated[
        float,
        typer.Option(help="Seconds that an interval may still take after SIGTERM."),
    ] = 3600.0,
    fresh_processes: FreshProcesses = False,
    log_format: LogFormat = "text",
) -> None:
    """Run a SuperNode. SIGTERM drains it: it ends after its interval; a second one ends it at once."""
    refuse_unread(context, {})
    use_log_format(log_format)
    from socflower.engines.deployment.node import run_node

    status = run_node(command, metrics=metrics, drain_s=drain, resident=not fresh_processes)
    if status:
        raise typer.Exit(status)
