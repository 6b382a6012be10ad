"""`socflower run`: a scenario, or the folder of a Flower app."""

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from socflower.cli.options import (
    Engine,
    Json,
    Log,
    Set,
    Workers,
    mistakes_name_file,
    refuse_unread,
    round_logging,
    scenario_argument,
    unread_by_run,
)
from socflower.cli.process import prints_to_stderr
from socflower.cli.terminal import (
    OUT,
    exit_on_failed_claims,
    print_claims,
    print_json,
    print_line,
    print_notice,
    print_question,
    print_text,
    run_progress,
    share_of,
)
from socflower.engines.names import MAX_WORKERS, require_count, require_engine
from socflower.errors import ConfigError
from socflower.quantities import human_bytes, human_joules, human_seconds, percent, plain_number
from socflower.report.quality import quality_of

if TYPE_CHECKING:  # pydantic and the planners are loaded by the command that needs them
    from socflower.engines.run_log import RoundLogging
    from socflower.scenario.schema.config import Scenario


def run(
    context: typer.Context,
    scenario: Annotated[
        Path,
        scenario_argument(
            "A scenario file (TOML), the name of a shipped scenario, or the folder of a Flower app."
        ),
    ],
    engine: Engine = "local",
    out: Annotated[
        Path | None,
        typer.Option(
            help="Folder for result.json, trace.json and report.html; default out/<scenario>."
        ),
    ] = None,
    set_: Set = None,
    workers: Workers = None,
    cluster: Annotated[
        Path | None, typer.Option(help="For an app folder: the cluster file it runs on.")
    ] = None,
    expect: Annotated[
        list[str] | None,
        typer.Option(help="For an app folder: a claim, 'accuracy>=0.9'. Repeatable."),
    ] = None,
    nodes: Annotated[
        int | None, typer.Option(help="For an app folder: how many SoCs take part; default all.")
    ] = None,
    training_flops: Annotated[
        float | None,
        typer.Option(
            help="For an app folder: operations of one training "
            "example, to price its clients' work."
        ),
    ] = None,
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Start anew; by default an interrupted run is resumed.")
    ] = False,
    superlink: Annotated[
        str,
        typer.Option(
            help="For --engine deployment: submit to this SuperLink, HOST:PORT or a "
            "name in your Flower configuration; default: start one here."
        ),
    ] = "",
    superlink_ca: Annotated[
        Path | None, typer.Option(help="Certificate authority of --superlink HOST:PORT.")
    ] = None,
    restarts: Annotated[
        int,
        typer.Option(
            help="For --engine deployment: how often a run is restarted after the "
            "death of its ServerApp or SuperLink."
        ),
    ] = 3,
    checkpoint_folder: Annotated[
        str,
        typer.Option(help="With --superlink: folder on its machine for checkpoints; default none."),
    ] = "",
    warm: Annotated[
        bool,
        typer.Option(
            "--warm",
            help="For --engine deployment: fork clients from processes that have "
            "torch loaded; uses Flower's internals.",
        ),
    ] = False,
    save_model: Annotated[
        Path | None,
        typer.Option(
            help="File for the trained model, FILE.npz: arrays by the names of the state dict."
        ),
    ] = None,
    log: Log = "",
    as_json: Json = False,
) -> None:
    """Run a scenario, write result, trace and report, and check its claims."""
    is_app = scenario.is_dir()
    if cluster is not None and not scenario.exists():
        raise ConfigError(
            f"{scenario}: no such folder; name the folder of a Flower app, with its pyproject.toml"
        )
    require_engine(engine)
    if is_app and superlink:
        raise ConfigError(
            f"--superlink {superlink}: is for scenarios; Flower itself runs {scenario} there: "
            f"flwr run {scenario} NAME --stream, where NAME is a SuperLink of your Flower configuration"
        )
    refuse_unread(
        context,
        unread_by_run(
            of_app_folder=is_app,
            engine=engine,
            is_remote=bool(superlink),
            keeps_checkpoints=bool(checkpoint_folder),
        ),
    )
    require_count("--workers", workers, 0, MAX_WORKERS)
    from socflower.cluster.cluster_file import MOST_SOCS

    require_count("--nodes", nodes, 1, MOST_SOCS)
    if is_app:
        claims = _run_app_folder(
            scenario,
            cluster,
            out,
            as_json,
            {
                "engine": engine,
                "num_nodes": nodes,
                "training_flops": training_flops,
                "overrides": tuple(set_ or ()),
                "num_workers": workers,
                "claims": tuple(expect or ()),
            },
            restarts,
            warm,
            fresh,
            round_logging(log),
        )
        exit_on_failed_claims(claims)
        return
    _require_model_file(save_model, out)
    from socflower.engines.deployment.options import DeploymentOptions
    from socflower.scenario import runner
    from socflower.scenario.prepared_run import prepare
    from socflower.scenario.schema.file import load_scenario

    deployment = DeploymentOptions(
        superlink=superlink,
        superlink_ca=superlink_ca,
        restarts=restarts,
        checkpoint_folder=checkpoint_folder,
        fresh=fresh,
        warm=warm,
    )
    loaded = load_scenario(scenario, set_ or ())
    with mistakes_name_file(loaded.name, scenario):
        prepared = prepare(loaded, engine, trains_here=not superlink)
    target, logging = out or Path("out") / loaded.name, round_logging(log)
    try:
        with mistakes_name_file(loaded.name, scenario), run_progress(as_json) as bar:
            # Checkpoints of a run on a remote SuperLink are on its machine.
            result = runner.run_to_folder(
                prepared,
                target,
                engine,
                num_workers=workers,
                on_round=bar(loaded.strategy.name),
                resumable=not superlink,
                fresh=fresh,
                on_notice=print_notice,
                deployment=deployment,
                save_model=save_model,
                logging=logging,
            )
    except KeyboardInterrupt:
        kept = (
            runner.remotely_kept_line(deployment)
            if superlink
            else runner.kept_line(runner.checkpoint_folder(target), fresh=fresh)
        )
        print_notice(f"interrupted; {kept or 'nothing was written'}")
        raise typer.Exit(130) from None
    if as_json:
        print_json(result)
    else:
        print_result(OUT, loaded, result, target)
    exit_on_failed_claims(result["expectations"])


def _require_model_file(save_model: Path | None, out: Path | None) -> None:
    """Raise `ConfigError` now for a model file that could not be written at the end of a long training."""
    if save_model is None:
        return
    folder = save_model.parent
    if save_model.suffix != ".npz" or not (
        folder.is_dir() or (out is not None and folder.resolve() == out.resolve())
    ):
        raise ConfigError(
            f"--save-model {save_model}: name a file FILE.npz in a folder that exists"
        )
    if folder.is_dir() and not os.access(folder, os.W_OK):
        raise ConfigError(
            f"--save-model {save_model}: the folder {folder} cannot be written to; name another one"
        )


def _run_app_folder(
    folder: Path,
    cluster: Path | None,
    out: Path | None,
    as_json: bool,
    settings: Mapping[str, Any],
    restarts: int,
    warm: bool,
    fresh: bool,
    logging: "RoundLogging",
) -> list[dict[str, Any]]:
    """Run an app folder, print its result and return its claims."""
    from socflower.engines.deployment.options import DeploymentOptions
    from socflower.scenario import app_folder
    from socflower.scenario.runner import kept_line

    if cluster is None:
        raise ConfigError(
            f"{folder} is the folder of a Flower app: name the cluster it runs on with --cluster FILE"
        )
    target = out or Path("out") / folder.resolve().name
    if target.resolve() == folder.resolve():
        raise ConfigError(f"--out {target}: is the app's own folder; name another one")
    run = app_folder.AppRun(
        folder=folder,
        cluster_file=cluster,
        **settings,
        deployment=DeploymentOptions(restarts=restarts, warm=warm),
    )
    try:
        with prints_to_stderr():
            result = app_folder.run_app_folder(
                run, target, fresh=fresh, on_notice=print_notice, logging=logging
            )
    except KeyboardInterrupt:
        print_notice(
            f"interrupted; {kept_line(app_folder.run_record(target), fresh=fresh) or 'nothing was written'}"
        )
        raise typer.Exit(130) from None
    if as_json:
        print_json(result)
    else:
        print_app_result(OUT, result, target)
    claims: list[dict[str, Any]] = result["expectations"]
    return claims


def print_result(
    console: Console, scenario: "Scenario", result: Mapping[str, Any], out: Path
) -> None:
    """Print one run: the question, the results, the claims."""
    from socflower.scenario.priced_processors import priced_line

    print_question(console, scenario)
    table = Table(
        "", f"{result['strategy']} on {result['engine']}", show_header=True, header_style="bold"
    )
    quality = quality_of([result])
    table.add_row(quality.name, quality.shown(result[quality.final_key]))
    deployed = result["virtual_s"] is None
    if deployed:
        table.add_row("time, measured", human_seconds(result["wall_s"]))
        table.add_row("time, predicted", human_seconds(result["predicted_s"]))
        table.add_row("restarts", str(len(result["restarts"])))
        if result.get("superlink_isolated") is not None:
            table.add_row(
                "SuperLink open to",
                "this run only" if result["superlink_isolated"] else "all users here",
            )
    else:
        table.add_row("virtual time", human_seconds(result["virtual_s"]))
    table.add_row("energy, predicted" if deployed else "energy", human_joules(result["energy_j"]))
    for tier, num_bytes in result["bytes"].items():
        table.add_row(f"bytes {tier.replace('_', ' ')}", human_bytes(num_bytes))
    for activity, seconds in result["breakdown"]["soc_seconds"].items():
        table.add_row(
            f"SoC time: {activity}", share_of(seconds, result["breakdown"]["soc_seconds"])
        )
    if heat := result.get("heat"):
        for name, value in _heat_rows(heat):
            table.add_row(name, value)
    if not deployed:
        table.add_row("wall clock here", human_seconds(result["wall_s"]))
    table.add_row("weights", result["weights_sha256"][:16])
    if priced := priced_line(result["processors"]):
        table.add_row("time and energy of", priced)
    console.print(table)
    print_claims(console, result["expectations"])
    print_text(
        f"report: {out / 'report.html'}   trace (open in ui.perfetto.dev): {out / 'trace.json'}",
        console,
    )


def _heat_rows(heat: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield a table's rows on heat and users; with users alone there are no temperatures and no fans."""
    if heat["slowdown"] is not None:
        yield "slower than cold and alone", percent(heat["slowdown"])
    if heat["peak_c"] is not None:
        yield "hottest SoC", f"{heat['peak_c']:.1f} °C"
        yield "energy of fans", human_joules(heat["cooling_j"])


def print_app_result(console: Console, result: Mapping[str, Any], out: Path) -> None:
    """Print the metrics of a Flower app, its cost on the cluster, and its failed messages."""
    for event in result["events"]:
        print_line(event["text"], console, "yellow")
    for source, of in (
        ("server", "server"),
        ("evaluate", "clients' evaluation"),
        ("train", "clients' training"),
    ):
        newest = next((entry for entry in reversed(result["rounds"]) if entry.get(source)), None)
        if newest:
            print_line(
                f"round {newest['round']}, {of}: "
                + ", ".join(
                    f"{name} {plain_number(value)}" for name, value in newest[source].items()
                ),
                console,
            )
    wall = f"wall clock here {human_seconds(result['wall_s'])}"
    if result["bytes"] is None:
        console.print(wall)
    else:
        traffic = ", ".join(
            f"{human_bytes(value)} {tier.replace('_', ' ')}"
            for tier, value in result["bytes"].items()
            if value
        )
        time = (
            f"predicted time {human_seconds(result['predicted_s'])}"
            if "predicted_s" in result
            else f"virtual time {human_seconds(result['virtual_s'])}"
        )
        console.print(
            f"{time}, energy {human_joules(result['energy_j'])}, {traffic or 'no bytes'}; {wall}"
        )
    quality = quality_of([result])
    # One of accuracy and loss is enough to judge a run by.
    unknown = {
        key: reason
        for key, reason in result["unknown"].items()
        if not key.startswith("final_") or result[quality.final_key] is None
    }
    for reason in dict.fromkeys(unknown.values()):
        keys = [key for key, value in unknown.items() if value == reason]
        print_line(f"not known: {', '.join(keys)}: {reason}", console)
    for note in result["notes"]:
        print_line(f"note: {note}", console)
    print_claims(console, result["expectations"])
    print_line(
        f"report: {out / 'report.html'}   trace (open in ui.perfetto.dev): {out / 'trace.json'}",
        console,
    )
