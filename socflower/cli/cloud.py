"""`socflower cloud`: host the cloud's halves of split trainings, and show their status."""

import json
from pathlib import Path
from typing import Annotated

import typer

from socflower.cli.options import Json, LogFormat, Metrics, PlainCommand, refuse_unread
from socflower.cli.process import prints_to_stderr
from socflower.cli.terminal import OUT, print_json, print_notice, use_log_format

cloud = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode=None,
    suggest_commands=False,
    help="The cloud's side of split training.",
)

Token = Annotated[
    Path, typer.Option(help="File with the operator's token, which the ServerApp presents too.")
]
Insecure = Annotated[
    bool, typer.Option("--insecure", help="Plain text beyond private addresses too.")
]
SetOfScenario = Annotated[
    list[str] | None, typer.Option("--set", help="Override one key of the scenario.")
]
Tls = Annotated[Path | None, typer.Option(help="PEM file.")]
SessionFolder = Annotated[
    Path | None,
    typer.Option(
        help="Folder for sessions and their checkpoints, from which a restarted cloud resumes."
    ),
]
EdgeAuthority = Annotated[
    Path | None,
    typer.Option(
        help="PEM file of the authority whose certificates edges must show; default: none need."
    ),
]


@cloud.command(cls=PlainCommand)
def serve(
    context: typer.Context,
    program: Annotated[
        str,
        typer.Argument(
            help="A split scenario (TOML, or JSON as a result has it), or "
            "module:name of a SplitProgram.",
            show_default=False,
        ),
    ],
    listen: Annotated[
        str, typer.Option(help="HOST:PORT to listen on; port 0 asks for a free one.")
    ] = "127.0.0.1:28400",
    token_file: Token = Path("cloud-token"),
    folder: SessionFolder = None,
    certificate: Tls = None,
    key: Tls = None,
    ca: EdgeAuthority = None,
    insecure: Insecure = False,
    threads: Annotated[int, typer.Option(help="Torch threads; 0: one a core.")] = 0,
    set_: SetOfScenario = None,
    metrics: Metrics = "",
    log_format: LogFormat = "text",
    as_json: Annotated[bool, typer.Option("--json", help="Print the address as JSON.")] = False,
) -> None:
    """Host the cloud's halves of a program's runs, until Ctrl-C. A missing token file is created."""
    plain = {"insecure": "is for plain text, and --certificate was given"}
    refuse_unread(context, plain if certificate else {})
    use_log_format(log_format)
    from socflower.scenario.app.split_cloud import read_or_create_token, serve_until_signal
    from socflower.wire.secure_channel import Tls

    token, is_new = read_or_create_token(token_file)
    if is_new:
        print_notice(f"made {token_file}: give it to the ServerApp's machine, and to nobody else")
    with prints_to_stderr() as own:

        def on_ready(address: str) -> None:
            document = json.dumps({"address": address})
            own.write(f"{document if as_json else f'listening on {address}; Ctrl-C ends'}\n")
            own.flush()

        serve_until_signal(
            program,
            set_ or [],
            listen=listen,
            token=token,
            tls=Tls(ca, certificate, key) if certificate or key or ca else None,
            insecure=insecure,
            folder=folder,
            num_threads=threads,
            metrics=metrics,
            on_ready=on_ready,
            on_notice=print_notice,
        )


@cloud.command(cls=PlainCommand)
def measure(
    context: typer.Context,
    scenario: Annotated[Path, typer.Argument(help="A split scenario (TOML).", show_default=False)],
    side: Annotated[str, typer.Option(help="What this device is: edge or cloud.")] = "edge",
    cloud_seconds: Annotated[
        Path | None, typer.Option("--cloud", help="What --side cloud wrote on the cloud's machine.")
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(help="File for the result, FILE.json; [edgecloud] costs names the edge's."),
    ] = None,
    repeats: Annotated[
        int, typer.Option(help="Runs of each half, of which the median counts.")
    ] = 5,
    threads: Annotated[int, typer.Option(help="Torch threads.")] = 1,
    set_: SetOfScenario = None,
    as_json: Json = False,
) -> None:
    """Measure what the scenario's model costs this device at every cut."""
    of_edges = {"cloud_seconds": "is for --side edge, which reads what the cloud took"}
    refuse_unread(context, of_edges if side == "cloud" else {})
    from socflower.scenario.measured_file import write_measured
    from socflower.scenario.schema.file import load_scenario
    from socflower.scenario.split_measuring import measure_split, print_measured
    from socflower.scenario.split_setting import SplitSetting

    loaded = load_scenario(scenario, set_ or ())
    with prints_to_stderr():
        document = measure_split(
            loaded,
            SplitSetting(loaded).workload.program,
            side=side,
            cloud=cloud_seconds,
            repeats=repeats,
            threads=threads,
        )
    if out is not None:
        write_measured(out, document)
    if as_json:
        print_json(document)
    else:
        print_measured(OUT, document)


@cloud.command(cls=PlainCommand)
def status(
    context: typer.Context,
    address: Annotated[str, typer.Argument(help="HOST:PORT of the cloud.", show_default=False)],
    token_file: Token = Path("cloud-token"),
    ca: Annotated[
        Path | None, typer.Option(help="PEM file of the authority that signed its certificate.")
    ] = None,
    certificate: Annotated[
        Path | None, typer.Option(help="PEM file to show to a cloud that was started with --ca.")
    ] = None,
    key: Annotated[Path | None, typer.Option(help="PEM file of the key of --certificate.")] = None,
    insecure: Insecure = False,
    as_json: Json = False,
) -> None:
    """Show the sessions of a cloud: their progress, connected edges and last error."""
    plain = {"insecure": "is for plain text, and PEM files were given"}
    refuse_unread(context, plain if ca or certificate else {})
    from socflower.scenario.app.split_cloud import cloud_status, status_table
    from socflower.wire.secure_channel import Tls

    tls = Tls(ca, certificate, key) if ca or certificate or key else None
    sessions = cloud_status(address, token_file, tls, insecure=insecure)
    if as_json:
        print_json({"schema": 1, "sessions": sessions})
    else:
        OUT.print(status_table(sessions))
