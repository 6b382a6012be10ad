"""`socflower validate`: predictions against short trainings on a rack."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from socflower.cli.options import Json, Set, refuse_unread
from socflower.cli.terminal import (
    OUT,
    print_json,
    print_line,
    print_notice,
    print_text,
    run_progress,
)
from socflower.quantities import human_seconds, significant

REPORT = "validation.json"


def validate(
    context: typer.Context,
    rack: Annotated[Path, typer.Argument(help="The cluster file of the rack.", show_default=False)],
    superlink: Annotated[
        str,
        typer.Option(
            help="The rack's SuperLink, HOST:PORT or a name in your Flower configuration; default: SuperNodes here."
        ),
    ] = "",
    superlink_ca: Annotated[
        Path | None, typer.Option(help="Certificate authority of --superlink HOST:PORT.")
    ] = None,
    out: Annotated[
        Path, typer.Option(help="Folder for validation.json and the results of the trainings.")
    ] = Path("out/validation"),
    set_: Set = None,
    as_json: Json = False,
) -> None:
    """Train shortly on a rack, and put the measured times beside the predicted ones, in a report to send in."""
    refuse_unread(context, {})
    from socflower.engines.deployment.options import DeploymentOptions

    deployment = DeploymentOptions(superlink=superlink, superlink_ca=superlink_ca)
    from socflower.scenario.rack_validation import rack_trainings, validate_rack

    trainings = rack_trainings(rack, set_ or (), superlink=superlink)
    started: list[str] = []
    try:
        with run_progress(as_json, prints_rounds=True) as bar:

            def on_training(name: str) -> Any:
                started.append(name)
                return bar(name)

            document = validate_rack(trainings, out, deployment, print_notice, on_training)
    except KeyboardInterrupt:
        print_notice(
            f"interrupted in {started[-1] if started else 'the start'}; no report was written"
        )
        raise typer.Exit(130) from None
    from socflower.wire.saved_state import write_atomically

    write_atomically(out / REPORT, json.dumps(document, indent=1) + "\n")
    if as_json:
        print_json(document)
    else:
        print_validation(OUT, document, out / REPORT, is_here=not superlink)


def print_validation(
    console: Console, document: Mapping[str, Any], report: Path, *, is_here: bool
) -> None:
    """Print a row for each training, what the columns mean, and what to do with the report."""
    heads = (
        "",
        "an epoch:\npredicted",
        "\nmeasured",
        "\nratio",
        "a round besides:\npredicted",
        "\nmeasured",
    )
    table = Table(*heads, box=None)
    for row in document["trainings"]:
        epoch, besides = row["epoch"], row["round"]
        ratio = "-" if epoch["ratio"] is None else significant(epoch["ratio"])
        table.add_row(
            row["about"],
            *(human_seconds(epoch[key]) for key in ("predicted_s", "measured_s")),
            ratio,
            *(human_seconds(max(0.0, besides[key])) for key in ("predicted_s", "measured_s")),
        )
    console.print(table)
    print_text(
        "ratio: measured over predicted. A round besides its epochs: synchronisation, and measured also Flower's "
        "messages and the evaluation, which are not predicted.",
        console,
    )
    noisy = [row for row in document["trainings"] if row["epoch"]["spread"] > 0.05]
    for row in noisy:
        print_text(
            f"{row['about']}: rounds differ by {row['epoch']['spread']:.0%} of the longest; repeat it when nothing "
            "else runs, or with a larger model by --set model.name",
            console,
            "yellow",
        )
    if is_here:
        print_text(
            "all SoCs were processes of this machine, which share its cores: a test of the installation, not of a rack",
            console,
            "yellow",
        )
    print_line(f"report to send in: {report}", console)
