"""`socflower fetch`: results and model of a run on a remote SuperLink, from its log."""

from pathlib import Path
from typing import Annotated

import typer

from socflower.cli.options import Json
from socflower.cli.run import Out, SaveModel, Superlink, SuperlinkCa, print_result
from socflower.cli.terminal import (
    OUT,
    exit_on_failed_claims,
    print_json,
    print_notice,
    run_progress,
)


def fetch(
    run: Annotated[
        int, typer.Argument(help="The run's id, as `flwr list` shows it.", show_default=False)
    ],
    superlink: Superlink = "",
    superlink_ca: SuperlinkCa = None,
    out: Out = None,
    save_model: SaveModel = None,
    as_json: Json = False,
) -> None:
    """Write the results of a run whose command has ended, as after a lost connection; one that goes on is followed."""
    from socflower.engines.deployment.options import DeploymentOptions
    from socflower.engines.deployment.remote_superlink import scenario_of_run
    from socflower.errors import ConfigError
    from socflower.scenario.prepared_run import prepare
    from socflower.scenario.runner import run_to_folder
    from socflower.scenario.schema.file import from_document
    from socflower.wire.folders import temporary_folder

    if not superlink:
        raise ConfigError("fetch: name the SuperLink of the run with --superlink NAME or HOST:PORT")
    deployment = DeploymentOptions(superlink=superlink, superlink_ca=superlink_ca, run_id=run)
    with temporary_folder() as folder:
        scenario = from_document(scenario_of_run(deployment, folder))
    target = out or Path("out") / scenario.name
    with run_progress(as_json, prints_rounds=True) as bar:
        result = run_to_folder(
            prepare(scenario, "deployment", trains_here=False),
            target,
            "deployment",
            on_round=bar(scenario.strategy.name),
            on_notice=print_notice,
            deployment=deployment,
            save_model=save_model,
        )
    if as_json:
        print_json(result)
    else:
        print_result(OUT, scenario, result, target)
    exit_on_failed_claims(result["expectations"])
