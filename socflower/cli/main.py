"""The command line. Every command prints text for people and takes --json for programs."""

import sys
from typing import Annotated

import typer
from rich.markup import escape

from socflower import __version__
from socflower.cli.bench import bench
from socflower.cli.certificates import certificates
from socflower.cli.cloud import cloud
from socflower.cli.compare import compare
from socflower.cli.doctor import doctor
from socflower.cli.fan import fan
from socflower.cli.fetch import fetch
from socflower.cli.heat import heat
from socflower.cli.new import new
from socflower.cli.node import node
from socflower.cli.options import PlainCommand
from socflower.cli.paper import paper
from socflower.cli.plan import plan
from socflower.cli.process import interrupted_by_signals
from socflower.cli.profile import profile
from socflower.cli.run import run
from socflower.cli.scenarios import demo, scenarios
from socflower.cli.status import status, watch
from socflower.cli.terminal import ERR, OUT
from socflower.cli.tune import tune
from socflower.cli.validate import validate
from socflower.errors import SocflowerError, TrainingFailed

app = typer.Typer(
    name="socflower",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    # Click suggests commands already.
    suggest_commands=False,
    help="Train neural networks with Flower on virtual clusters of small machines.",
)
for _command in (
    new,
    run,
    fetch,
    compare,
    plan,
    tune,
    scenarios,
    demo,
    paper,
    bench,
    profile,
    validate,
    doctor,
    status,
    watch,
    node,
    heat,
    fan,
    certificates,
):
    app.command(cls=PlainCommand)(_command)
app.add_typer(cloud, name="cloud")


def main() -> None:
    """Run the command line; exit with 0 on success, 1 if a claim or a training fails, 2 for a user's mistake."""
    with interrupted_by_signals():
        _main()


def _main() -> None:
    # An error is one line on every terminal, also a narrow one.
    try:
        app()
    except SocflowerError as error:
        # The text quotes the user's input, which may contain line breaks.
        line = " ".join(str(error).split())
        ERR.print(f"[bold red]error:[/] {escape(line)}", soft_wrap=True, highlight=False)
        sys.exit(1 if isinstance(error, TrainingFailed) else 2)
    except KeyboardInterrupt:
        ERR.print("interrupted; nothing was written")
        sys.exit(130)


def _show_version(wanted: bool) -> None:
    if wanted:
        OUT.print(f"socflower {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version."),
    ] = False,
) -> None:
    """Options of all commands."""
