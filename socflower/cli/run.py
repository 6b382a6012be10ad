"""`socflower run`: a scenario, or the folder of a Flower app."""

import os
from collections.abc import Iterator, Mapping
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer
from rich.console import Console
from rich.table import Table

from socflower.cli.options import (
    AppClaims,
    AppCluster,
    AppFlops,
    AppNodes,
    Deadline,
    Engine,
    FreshProcesses,
    Json,
    Log,
    LogFormat,
    Metrics,
    Set,
    Workers,
    mistakes_name_file,
    refuse_all_but,
    refuse_unread,
    require_cluster,
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
    use_log_format,
)
from socflower.engines.names import MAX_WORKERS, require_count, require_engine
from socflower.errors import ConfigError
from socflower.quantities import human_bytes, human_joules, human_seconds, percent, plain_number
from socflower.report.quality import quality_of

# Importing pydantic and the planners takes long, so only the command that needs them does.
if TYPE_CHECKING:
    from socflower.engines.deployment.options import DeploymentOptions
    from socflower.engines.ending import Ending
    from socflower.engines.run_log import RoundLogging
    from socflower.scenario.prepared_run import PreparedRun
    from socflower.scenario.schema.scenario_file import Scenario


_Scenario = Annotated[
    Path,
    scenario_argument(
        "A scenario file (TOML), the name of a shipped scenario, a folder of scenarios, or that of a Flower app."
    ),
]
Out = Annotated[
    Path | None,
    typer.Option(
        help="Folder for result.json, trace.json and report.html; default out/<scenario>."
    ),
]
_Seeds = Annotated[
    str | None,
    typer.Option(
        help="Comma-separated: check all claims under each, those about other strategies too."
    ),
]
_Fresh = Annotated[
    bool, typer.Option("--fresh", help="Start over; by default an interrupted run is resumed.")
]
Superlink = Annotated[
    str,
    typer.Option(
        help="For --engine deployment: submit to this SuperLink, HOST:PORT or a "
        "name in your Flower configuration; default: start one here."
    ),
]
SuperlinkCa = Annotated[
    Path | None, typer.Option(help="Certificate authority of --superlink HOST:PORT.")
]
_Restarts = Annotated[
    int,
    typer.Option(
        help="For --engine deployment: how often a run is restarted after the "
        "death of its ServerApp or SuperLink."
    ),
]
_CheckpointFolder = Annotated[
    str,
    typer.Option(help="With --superlink: folder on its machine for checkpoints; default none."),
]
SaveModel = Annotated[
    Path | None,
    typer.Option(
        help="File for the trained model: .npz or .safetensors (arrays by the names of the state "
        "dict), or .onnx."
    ),
]


def run(
    context: typer.Context,
    scenario: _Scenario,
    engine: Engine = "local",
    out: Out = None,
    set_: Set = None,
    workers: Workers = None,
    seeds: _Seeds = None,
    cluster: AppCluster = None,
    expect: AppClaims = None,
    nodes: AppNodes = None,
    training_flops: AppFlops = None,
    deadline: Deadline = None,
    fresh: _Fresh = False,
    superlink: Superlink = "",
    superlink_ca: SuperlinkCa = None,
    restarts: _Restarts = 3,
    checkpoint_folder: _CheckpointFolder = "",
    fresh_processes: FreshProcesses = False,
    save_model: SaveModel = None,
    log: Log = "",
    metrics: Metrics = "",
    log_format: LogFormat = "text",
    as_json: Json = False,
) -> None:
    """Run a scenario, write result, trace and report, and check its claims."""
    from socflower.engines.deployment.options import DeploymentOptions

    is_app = scenario.is_dir()
    may_be_suite = seeds is not None or (is_app and cluster is None)
    if may_be_suite and _ran_as_suite(context, scenario, seeds, out, set_, workers, as_json):
        return
    _check_options(context, scenario, engine, superlink, checkpoint_folder)
    use_log_format(log_format)
    deployment = DeploymentOptions(
        superlink=superlink,
        superlink_ca=superlink_ca,
        restarts=restarts,
        checkpoint_folder=checkpoint_folder,
        fresh=fresh,
        resident=not fresh_processes,
    )
    shared: dict[str, Any] = {"num_workers": workers, "fresh": fresh, "deployment": deployment}
    shared["logging"] = round_logging(log, metrics)
    if is_app:
        settings: dict[str, Any] = {
            "engine": engine,
            "num_nodes": nodes,
            "training_flops": training_flops,
            "overrides": tuple(set_ or ()),
            "claims": tuple(expect or ()),
        }
        claims = _run_app_folder(scenario, cluster, out, settings, as_json, **shared)
    else:
        _require_model_file(save_model, out)
        ending = None if deadline is None else _ending_at(deadline)
        claims = _run_scenario(scenario, set_, engine, out, as_json, save_model, ending, **shared)
    exit_on_failed_claims(claims)


def _ran_as_suite(
    context: typer.Context,
    scenario: Path,
    seeds: str | None,
    out: Path | None,
    overrides: list[str] | None,
    workers: int | None,
    as_json: bool,
) -> bool:
    """Run a folder of scenarios, or one scenario under several seeds; return whether it is one of these."""
    from socflower.cli.suite import run_files, suite_files

    files = suite_files(scenario, seeds)
    if not files:
        return False
    read = ("scenario", "seeds", "out", "set_", "workers", "as_json")
    refuse_all_but(context, *read, because=f"{scenario} runs as a suite")
    require_count("--workers", workers, 1, MAX_WORKERS)
    run_files(
        files,
        out or Path("out") / scenario.resolve().stem,
        seeds=seeds,
        overrides=overrides or (),
        workers=workers,
        as_json=as_json,
    )
    return True


def _check_options(
    context: typer.Context, scenario: Path, engine: str, superlink: str, checkpoint_folder: str
) -> None:
    """Refuse options that this run does not read, and values that cannot be."""
    from socflower.cluster.cluster_file import MOST_SOCS

    if context.params["cluster"] is not None and not scenario.exists():
        raise ConfigError(f"{scenario}: no such folder; name that of a Flower app's pyproject.toml")
    require_engine(engine)
    is_app = scenario.is_dir()
    if is_app and superlink:
        raise ConfigError(
            f"--superlink {superlink}: is for scenarios; submit an app by `flwr run app NAME`, where NAME "
            "is a SuperLink of your Flower configuration"
        )
    unread = unread_by_run(
        of_app_folder=is_app,
        engine=engine,
        is_remote=bool(superlink),
        keeps_checkpoints=bool(checkpoint_folder),
    )
    refuse_unread(context, unread)
    require_count("--workers", context.params["workers"], 0, MAX_WORKERS)
    require_count("--nodes", context.params["nodes"], 1, MOST_SOCS)


def _run_scenario(
    path: Path,
    overrides: list[str] | None,
    engine: str,
    out: Path | None,
    as_json: bool,
    save_model: Path | None,
    ending: "Ending | None",
    *,
    deployment: "DeploymentOptions",
    fresh: bool,
    **settings: Any,
) -> list[dict[str, Any]]:
    """Run a scenario, print its result and return its claims."""
    from socflower.scenario.schema.file import load_scenario

    is_remote = bool(deployment.superlink)
    loaded = load_scenario(path, overrides or ())
    target = out or Path("out") / loaded.name
    if ending is not None:
        # A run that the deadline ends also writes its model, to be used before it is resumed.
        save_model = save_model or target / "model.npz"
    # Mistakes are found before the folder of --out is created.
    with mistakes_name_file(loaded.name, path):
        prepared = _prepared(loaded, engine, save_model, trains_here=not is_remote)
    # Importing Flower takes long, so mistakes are found first.
    from socflower.scenario import runner
    from socflower.scenario.jobs import kept_line, remotely_kept_line

    try:
        with (
            mistakes_name_file(loaded.name, path),
            run_progress(as_json, prints_rounds=True) as bar,
        ):
            result = runner.run_to_folder(
                prepared,
                target,
                engine,
                on_round=bar(loaded.strategy.name),
                # Checkpoints of a run on a remote SuperLink are on its machine.
                resumable=not is_remote,
                fresh=fresh,
                on_notice=print_notice,
                deployment=deployment,
                save_model=save_model,
                ending=ending,
                **settings,
            )
    except KeyboardInterrupt:
        checkpoints = runner.checkpoint_folder(target)
        _exit_interrupted(
            remotely_kept_line(deployment) if is_remote else kept_line(checkpoints, fresh=fresh)
        )
    if not as_json:
        print_result(OUT, loaded, result, target)
        if result["ended_after"] is not None:
            kept = kept_line(runner.checkpoint_folder(target), fresh=fresh)
            print_text(f"ended at the deadline with {save_model}; {kept}", OUT, "yellow")
    return _claims(result, as_json)


def _claims(result: Mapping[str, Any], as_json: bool) -> list[dict[str, Any]]:
    """Return a result's claims; print it if it is wanted as JSON."""
    if as_json:
        print_json(result)
    claims: list[dict[str, Any]] = result["expectations"]
    return claims


def _prepared(
    scenario: "Scenario", engine: str, save_model: Path | None, *, trains_here: bool
) -> "PreparedRun":
    """Return a scenario's run; `ConfigError` also for a file that its model cannot be written to."""
    from socflower.scenario.prepared_run import prepare

    prepared = prepare(scenario, engine, trains_here=trains_here)
    if save_model is not None:
        from socflower.scenario.model_export import require_exportable, require_format

        require_format(save_model)
        require_exportable(scenario, save_model)
    return prepared


def _ending_at(deadline: str) -> "Ending":
    """Return the ending at a time of the day; `ConfigError` if not even its results could be written until then."""
    from socflower.engines.ending import Ending, next_time

    now = datetime.now()
    ending = Ending(deadline_s=next_time("--deadline", deadline, now).timestamp())
    if ending.leaves_no_round(now.timestamp(), 0.0):
        raise ConfigError(f"--deadline {deadline}: is in seconds; name a later one")
    return ending


def _exit_interrupted(kept: str) -> NoReturn:
    """Say what an interrupted run has kept, and exit with the status of Ctrl-C."""
    print_notice(f"interrupted; {kept or 'nothing was written'}")
    raise typer.Exit(130) from None


def _require_model_file(save_model: Path | None, out: Path | None) -> None:
    """Raise `ConfigError` now for a model file that could not be written at the end of a long training."""
    if save_model is None:
        return
    folder = save_model.parent
    exists = folder.is_dir()
    is_made = out is not None and folder.resolve() == out.resolve()
    if not (exists or is_made):
        raise ConfigError(f"--save-model {save_model}: name a file in a folder that exists")
    if exists and not os.access(folder, os.W_OK):
        raise ConfigError(f"--save-model {save_model}: {folder} cannot be written to; name another")


def _run_app_folder(
    folder: Path,
    cluster: Path | None,
    out: Path | None,
    settings: Mapping[str, Any],
    as_json: bool,
    *,
    num_workers: int | None,
    deployment: "DeploymentOptions",
    fresh: bool,
    logging: "RoundLogging",
) -> list[dict[str, Any]]:
    """Run an app folder, print its result and return its claims."""
    cluster_file = require_cluster(cluster, folder)
    target = out or Path("out") / folder.resolve().name
    if target.resolve() == folder.resolve():
        raise ConfigError(f"--out {target}: is the app's own folder; name another one")
    from socflower.scenario import app_folder
    from socflower.scenario.jobs import kept_line

    run = app_folder.AppRun(
        folder=folder,
        cluster_file=cluster_file,
        num_workers=num_workers,
        **settings,
        deployment=replace(deployment, fresh=False),
    )
    try:
        with prints_to_stderr():
            result = app_folder.run_app_folder(
                run, target, fresh=fresh, on_notice=print_notice, logging=logging
            )
    except KeyboardInterrupt:
        _exit_interrupted(kept_line(app_folder.run_record(target), fresh=fresh))
    if not as_json:
        print_app_result(OUT, result, target)
    return _claims(result, as_json)


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
    print_text(_files_line(out), console)


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
            values = [f"{name} {plain_number(value)}" for name, value in newest[source].items()]
            print_line(f"round {newest['round']}, {of}: {', '.join(values)}", console)
    console.print(_cost_line(result))
    for reason, keys in _unknown(result).items():
        print_line(f"not known: {', '.join(keys)}: {reason}", console)
    for note in result["notes"]:
        print_line(f"note: {note}", console)
    print_claims(console, result["expectations"])
    print_line(_files_line(out), console)


def _files_line(out: Path) -> str:
    trace = out / "trace.json"
    return f"report: {out / 'report.html'}   trace (open in ui.perfetto.dev): {trace}"


def _cost_line(result: Mapping[str, Any]) -> str:
    """Return the time, energy and traffic of an app's run, and the real time that it took here."""
    wall = f"wall clock here {human_seconds(result['wall_s'])}"
    if result["bytes"] is None:
        return wall
    sent = {tier.replace("_", " "): value for tier, value in result["bytes"].items() if value}
    traffic = ", ".join(f"{human_bytes(value)} {tier}" for tier, value in sent.items())
    kind = "predicted" if "predicted_s" in result else "virtual"
    time = f"{kind} time {human_seconds(result[f'{kind}_s'])}"
    return f"{time}, energy {human_joules(result['energy_j'])}, {traffic or 'no bytes'}; {wall}"


def _unknown(result: Mapping[str, Any]) -> dict[str, list[str]]:
    """Return the quantities that are not known, by reason; one of accuracy and loss is enough to judge a run by."""
    judged = result[quality_of([result]).final_key] is not None
    by_reason: dict[str, list[str]] = {}
    for key, reason in result["unknown"].items():
        if not (judged and key.startswith("final_")):
            by_reason.setdefault(reason, []).append(key)
    return by_reason
