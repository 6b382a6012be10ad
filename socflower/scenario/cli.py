"""The command line. Every command prints for people and takes --json for programs."""

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from socflower import __version__
from socflower.cluster.cluster_file import MOST_SOCS
from socflower.errors import ConfigError, SocflowerError, TrainingFailed
from socflower.scenario import cloud_commands, heat_commands, terminal
from socflower.scenario.ending import interrupted_by_signals
from socflower.scenario.foreign_prints import prints_on_stderr
from socflower.scenario.options import (
    MOST_WORKERS,
    PlainCommand,
    refuse_all_but,
    refuse_unread,
    require_count,
    require_engine,
    require_local_engine,
    unread_by_compare,
    unread_by_run,
)

app = typer.Typer(
    name="socflower", no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None,
    suggest_commands=False,  # click does it already
    help="Train neural networks with Flower on virtual clusters of small machines.",
)
command = partial(app.command, cls=PlainCommand)
_out = Console()
_err = Console(stderr=True)

ScenarioPath = Annotated[Path, typer.Argument(help="A scenario file (TOML).", show_default=False)]
Set = Annotated[list[str] | None, typer.Option("--set", help="Override one key: table.key=value. Repeatable.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document instead of text.")]
Engine = Annotated[str, typer.Option(help="local (no Ray, virtual time), simulation (Flower's own, Ray) or deployment "
                                          "(SuperLink and SuperNodes, real time).")]
Workers = Annotated[int | None, typer.Option(help="Worker processes of the local engine; 0 runs all in this one. "
                                                  "Default: one a core.")]


def main() -> None:
    """Run the command line: exit status 0 if what was asked holds, 1 if a claim or training fails, 2 for a mistake."""
    with interrupted_by_signals():
        _main()


def _main() -> None:
    # A narrow or dumb terminal must not break the one line of an error.
    try:
        app()
    except SocflowerError as error:
        # What the user typed may hold line breaks, and stands in the text.
        line = " ".join(str(error).split())
        _err.print(f"[bold red]error:[/] {terminal.escape(line)}", soft_wrap=True, highlight=False)
        sys.exit(1 if isinstance(error, TrainingFailed) else 2)
    except KeyboardInterrupt:
        _err.print("interrupted; nothing was written")
        sys.exit(130)


@command()
def run(
    context: typer.Context,
    scenario: Annotated[Path, typer.Argument(help="A scenario file (TOML), or the folder of a Flower app.",
                                             show_default=False)],
    engine: Engine = "local",
    out: Annotated[Path | None, typer.Option(help="Folder for result.json, trace.json and report.html; default "
                                                  "out/<scenario>.")] = None,
    set_: Set = None,
    workers: Workers = None,
    cluster: Annotated[Path | None, typer.Option(help="For an app folder: the cluster file it runs on.")] = None,
    nodes: Annotated[int | None, typer.Option(help="For an app folder: how many SoCs take part; default all.")] = None,
    training_flops: Annotated[float | None, typer.Option(help="For an app folder: operations of one training "
                                                              "example, to price its clients' work.")] = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="Start anew where a run was interrupted; without it, the run "
                                                        "goes on.")] = False,
    superlink: Annotated[str, typer.Option(help="For --engine deployment: submit to this SuperLink, HOST:PORT or a "
                                                "name in your Flower configuration; default: start one here.")] = "",
    superlink_ca: Annotated[Path | None, typer.Option(help="Certificate authority of --superlink HOST:PORT.")] = None,
    restarts: Annotated[int, typer.Option(help="For --engine deployment: how often a run whose ServerApp or SuperLink "
                                               "died goes on by itself.")] = 3,
    checkpoint_folder: Annotated[str, typer.Option(help="With --superlink: folder on its machine for checkpoints; "
                                                        "default none.")] = "",
    warm: Annotated[bool, typer.Option("--warm", help="For --engine deployment: fork clients from processes that have "
                                                      "torch loaded; uses Flower's internals.")] = False,
    save_model: Annotated[Path | None, typer.Option(help="File for the trained model, FILE.npz: arrays by the names "
                                                         "of the state dict.")] = None,
    as_json: Json = False,
) -> None:
    """Run a scenario, write result, trace and report, and check its claims."""
    is_app = scenario.is_dir()
    if is_app:
        require_local_engine(engine, scenario)
    require_engine(engine)
    refuse_unread(context, unread_by_run(of_app_folder=is_app, engine=engine, elsewhere=bool(superlink),
                                         keeps_checkpoints=bool(checkpoint_folder)))
    require_count("--workers", workers, 0, MOST_WORKERS)
    require_count("--nodes", nodes, 1, MOST_SOCS)
    if is_app:
        _run_app_folder(scenario, cluster, out, nodes, training_flops, set_ or [], workers, as_json)
        return
    _require_model_file(save_model, out)
    from socflower.scenario import runner
    from socflower.scenario.deployment_options import Deployment
    from socflower.scenario.scenario_file import load_scenario

    deployment = Deployment(superlink=superlink, superlink_ca=superlink_ca, restarts=restarts,
                            checkpoint_folder=checkpoint_folder, fresh=fresh, warm=warm)
    loaded = load_scenario(scenario, set_ or ())
    runner.check_feasible(loaded, engine, trains_here=not superlink)
    target = out or Path("out") / loaded.name
    try:
        with _progress(as_json) as bar:
            # Checkpoints of a run on a SuperLink of others are there, not here.
            result = runner.run_to_folder(
                loaded, target, engine, num_workers=workers, on_round=bar(loaded.strategy.name),
                resumable=not superlink, fresh=fresh, say=_say, deployment=deployment, save_model=save_model)
    except KeyboardInterrupt:
        kept = runner.checkpoint_folder(target)
        _say(f"interrupted; {runner.kept_line(kept) if kept.rounds() else 'nothing was written'}")
        raise typer.Exit(130) from None
    if as_json:
        _print_json(result)
    else:
        terminal.print_result(_out, loaded, result, target)
    _exit_by(result["expectations"])


@command()
def compare(
    context: typer.Context,
    scenario: ScenarioPath,
    strategies: Annotated[str | None, typer.Option(help="Comma-separated; default the scenario's [compare].")] = None,
    engine: Engine = "local",
    out: Annotated[Path | None, typer.Option(help="Folder; a comparison that was cut short goes on there.")] = None,
    set_: Set = None,
    workers: Workers = None,
    as_json: Json = False,
) -> None:
    """Run the same work under several strategies and put them side by side."""
    require_engine(engine)
    refuse_unread(context, unread_by_compare(engine))
    require_count("--workers", workers, 0, MOST_WORKERS)
    from socflower.scenario.comparison import compare as run_comparison
    from socflower.scenario.scenario_file import load_scenario

    loaded = load_scenario(scenario, set_ or ())
    names = [name.strip() for name in strategies.split(",")] if strategies else list(loaded.compare.strategies)
    target = out or Path("out") / f"{loaded.name}-compare"
    with _progress(as_json) as bar:
        document = run_comparison(loaded, names, target, engine=engine, num_workers=workers, on_start=bar)
    if as_json:
        _print_json(document)
    else:
        terminal.print_comparison(_out, loaded, document, target)
    _exit_by(document["expectations"])


@command()
def plan(
    scenario: Annotated[Path, typer.Argument(help="A scenario file, or a cluster file.", show_default=False)],
    groups: Annotated[int | None, typer.Option(help="Number of groups, in place of the file's.")] = None,
    set_: Set = None,
    as_json: Json = False,
) -> None:
    """Show the groups on their boards, their communication groups, and predicted time, energy and memory."""
    from socflower.scenario.heat import predicted_heat
    from socflower.scenario.planning import plan_scenario
    from socflower.scenario.scenario_file import load_scenario, scenario_cluster

    overrides = [*(set_ or ()), *([f"strategy.groups={groups}"] if groups is not None else ())]
    loaded = load_scenario(scenario, overrides)
    if groups is not None and loaded.strategy.name != "socflow":
        raise ConfigError(f"--groups {groups}: is for strategy.name = 'socflow', and {scenario} has "
                          f"{loaded.strategy.name!r}, which forms no groups; leave it out")
    if loaded.is_split:
        _plan_split(loaded, as_json)
        return
    cluster = scenario_cluster(loaded)
    with prints_on_stderr():
        document = {**plan_scenario(loaded), "heat": predicted_heat(loaded, cluster)}
    if as_json:
        _print_json(document)
    else:
        terminal.print_plan(_out, cluster, document)


@command()
def bench(
    context: typer.Context,
    name: Annotated[str | None, typer.Argument(help="Which benchmark; without one, the list.")] = None,
    quick: Annotated[bool, typer.Option(help="Smaller cases, fewer repeats.")] = False,
    as_json: Json = False,
) -> None:
    """Run a benchmark: ours against a named peer, in the same run, answers checked."""
    from socflower.scenario.benchmarking import benchmark_names, run_benchmark

    if name is None:
        refuse_all_but(context, "as_json", because="without a name, bench only lists what there is")
        if as_json:
            _print_json({"schema": 1, "benchmarks": benchmark_names()})
        else:
            _out.print("\n".join(benchmark_names()))
        return
    with prints_on_stderr():
        document = run_benchmark(name, quick=quick)
    if as_json:
        _print_json(document)
    else:
        terminal.print_benchmark(_out, document)
    if not all(row["ok"] for row in document["rows"]):
        raise typer.Exit(1)


@command()
def profile(
    context: typer.Context,
    model: Annotated[list[str] | None, typer.Option(help="Model that is timed; repeatable. Default vgg11.")] = None,
    data: Annotated[str, typer.Option(help="Data set whose image shape is used; it need not be there.")] = "cifar10",
    batch_size: Annotated[list[int] | None, typer.Option(help="Images per step; repeatable. Default 1, 8 and "
                                                              "64.")] = None,
    threads: Annotated[int, typer.Option(help="Threads of both sides.")] = 1,
    kernel: Annotated[str, typer.Option(help="Int8 kernel path; default the best, or SOCFLOWER_KERNEL.")] = "",
    repeats: Annotated[int, typer.Option(help="Runs per step and operator, of which the median counts.")] = 5,
    name: Annotated[str, typer.Option(help="Name of the device; default the host's.")] = "",
    like: Annotated[str, typer.Option(help="Device of the catalogue that lends what is not measured; default by "
                                           "architecture: x86-core or raspberry-pi-4b.")] = "",
    out: Annotated[Path | None, typer.Option(help="File for the device profile, FILE.toml. What is there already is "
                                                  "not measured again.")] = None,
    peer: Annotated[str, typer.Option(help="HOST:PORT of a machine that runs --serve: measure the link to it.")] = "",
    serve: Annotated[int | None, typer.Option(help="Answer link probes on this port until interrupted, and measure "
                                                   "nothing.")] = None,
    device: Annotated[str | None, typer.Option(help="Print a device of the catalogue instead, as a template.")] = None,
    as_json: Json = False,
) -> None:
    """Measure this device: steps and operators in int8 and FP32, power, a link; write a profile that planners read."""
    refuse_unread(context, {})
    if serve is not None:
        refuse_all_but(context, "serve", because="--serve only answers")
        require_count("--serve", serve, 0, 65535)
        from socflower.scenario.link_probe import serve as serve_probes

        try:
            serve_probes(serve, lambda port: _out.print(f"answering link probes on port {port}; end with Ctrl-C"))
        except KeyboardInterrupt:
            raise typer.Exit from None
        return

    from socflower.scenario import device_profile as profiling

    if device is not None:
        refuse_all_but(context, "device", "name", "out", "as_json",
                       because="--device prints a device of the catalogue")
        document = profiling.published_device(device, name)
        text = profiling.published_toml(document, device)
        if out is not None:
            profiling.write_published(text, out, document["name"])
        if as_json:
            _print_json(document)
        elif out is None:
            sys.stdout.write(text)  # not through rich, which would wrap it
        else:
            _out.print(f"profile: {terminal.escape(str(out))}", soft_wrap=True, highlight=False)
        return
    request = profiling.ProfileRequest(
        models=tuple(model or profiling.DEFAULT_MODELS), data=data,
        batch_sizes=tuple(batch_size or profiling.DEFAULT_BATCH_SIZES), num_threads=threads, kernel=kernel,
        repeats=repeats, name=name, like=like, peer=peer)
    with prints_on_stderr(), terminal.profile_progress(_err, disable=as_json) as bar:
        task = bar.add_task("profile", total=None)
        try:
            document = profiling.profile_device(request, out, on_cell=lambda text, done, total: bar.update(
                task, description=text, completed=done, total=total))
        except KeyboardInterrupt:
            bar.stop()
            kept = "" if out is None else (f"; finished cells are kept in {profiling.cell_file(out)}: the same command "
                                           "goes on")
            _err.print(f"interrupted{terminal.escape(kept)}", soft_wrap=True, highlight=False)
            raise typer.Exit(130) from None
    if as_json:
        _print_json(document)
    else:
        terminal.print_profile(_out, document)
        if out is not None:
            _out.print(f"profile: {terminal.escape(str(out))}", soft_wrap=True, highlight=False)


@command()
def doctor(as_json: Json = False) -> None:
    """Say what this machine has, and what to do about what is missing."""
    from socflower.scenario.diagnosis import diagnose

    findings = diagnose()
    if as_json:
        _print_json({"schema": 1, "findings": findings})
    else:
        terminal.print_findings(_out, findings)
    if any(finding["status"] == "broken" for finding in findings):
        raise typer.Exit(1)


command()(heat_commands.heat)
command()(heat_commands.fan)
app.add_typer(cloud_commands.cloud, name="cloud")


@command()
def certificates(
    hosts: Annotated[list[str], typer.Argument(help="DNS names or IP addresses, as the hosts' peers dial them.",
                                               show_default=False)],
    out: Annotated[Path, typer.Option(help="Folder of the authority and of all hosts' files; hosts are added to one "
                                           "that is there.", show_default=False)],
    valid_days: Annotated[int, typer.Option(help="How long the hosts' certificates are valid.")] = 825,
    renew: Annotated[bool, typer.Option("--renew", help="Replace keys and certificates that the hosts have "
                                                        "already.")] = False,
    as_json: Json = False,
) -> None:
    """Write a private certificate authority, and for each host a certificate and a key, for rings with mutual TLS."""
    from socflower.scenario.certificates import write_certificates

    written = write_certificates(out, hosts, valid_days=valid_days, renew=renew).values()
    if as_json:
        _print_json({"schema": 1, "folder": str(out.absolute()), "hosts": [
            {"host": one.host, "status": one.status, "ca": str(one.ca), "certificate": str(one.certificate),
             "key": str(one.key), "not_after": one.not_after.isoformat(), "node_config": one.node_config}
            for one in written]})
        return
    for one in written:
        line = f"{one.host} ({one.status}, until {one.not_after:%Y-%m-%d}): {one.node_config}"
        _out.print(terminal.escape(line), soft_wrap=True, highlight=False)
    _out.print(terminal.escape(f"Copy its three files to each host, and keep {out.absolute() / 'ca.key'} off all of "
                               "them: it signs new hosts."), soft_wrap=True, highlight=False)


def _require_model_file(save_model: Path | None, out: Path | None) -> None:
    """Refuse a file for the model that nothing could be written to at the end of a long training."""
    if save_model is None:
        return
    folder = save_model.parent
    if save_model.suffix != ".npz" or not (folder.is_dir() or (out is not None and folder.resolve() == out.resolve())):
        raise ConfigError(f"--save-model {save_model}: name a file FILE.npz in a folder that exists")


def _run_app_folder(
    folder: Path, cluster: Path | None, out: Path | None, nodes: int | None, training_flops: float | None,
    overrides: list[str], workers: int | None, as_json: bool,
) -> None:
    from socflower.scenario.app_folder import run_app_folder

    if cluster is None:
        raise ConfigError(f"{folder} is the folder of a Flower app: name the cluster it runs on with --cluster FILE")
    target = out or Path("out") / folder.resolve().name
    if target.resolve() == folder.resolve():
        raise ConfigError(f"--out {target}: is the app's own folder; name another one")
    with prints_on_stderr():
        result = run_app_folder(folder, cluster, target, num_nodes=nodes, training_flops=training_flops,
                                overrides=tuple(overrides), num_workers=workers)
    if as_json:
        _print_json(result)
    else:
        terminal.print_app_result(_out, result, target)


def _plan_split(scenario: Any, as_json: bool) -> None:
    from socflower.scenario.split_planning import plan_split, print_split_plan

    with prints_on_stderr():
        document = plan_split(scenario)
    if as_json:
        _print_json(document)
    else:
        print_split_plan(_out, document)


def _show_version(wanted: bool) -> None:
    if wanted:
        _out.print(f"socflower {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[bool, typer.Option("--version", callback=_show_version, is_eager=True,
                                          help="Print the version.")] = False,
) -> None:
    """Options of all commands."""


@contextmanager
def _progress(as_json: bool) -> Iterator[terminal.StartBar]:
    with prints_on_stderr(), terminal.progress(_err, disable=as_json) as bar:
        yield bar


def _say(line: str) -> None:
    _err.print(terminal.escape(line), soft_wrap=True, highlight=False)


def _print_json(document: dict[str, Any]) -> None:
    # Not through rich, which would wrap and colour it.
    sys.stdout.write(json.dumps(document, indent=1) + "\n")


def _exit_by(expectations: list[dict[str, Any]]) -> None:
    if any(claim["holds"] is False for claim in expectations):
        raise typer.Exit(1)
