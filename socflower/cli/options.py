"""The options that a command reads; an option that would have no effect is refused."""

import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer
from typer.core import TyperArgument, TyperCommand

from socflower.errors import ConfigError, InfeasiblePlan

# Importing flwr takes long, so only commands that run something do.
if TYPE_CHECKING:
    from socflower.engines.run_log import RoundLogging
    from socflower.scenario.schema.scenario_file import Scenario


def _shipped_or_file(given: Path | Sequence[Path]) -> Path | list[Path]:
    from socflower.scenario.shipped import find_scenario

    return (
        find_scenario(given) if isinstance(given, Path) else [find_scenario(path) for path in given]
    )


def scenario_argument(help: str) -> Any:
    """Return an argument that is a file or the name of a shipped scenario; the command gets its path."""
    return typer.Argument(help=help, show_default=False, callback=_shipped_or_file)


Set = Annotated[
    list[str] | None, typer.Option("--set", help="Override one key: table.key=value. Repeatable.")
]
Fusion = Annotated[
    str | None,
    typer.Option(help="What costs a message: per-tensor or buckets; as strategy.fusion."),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document instead of text.")]
Engine = Annotated[
    str,
    typer.Option(
        help="local (no Ray, virtual time), simulation (Flower's own, Ray) or deployment "
        "(SuperLink and SuperNodes, real time)."
    ),
]
Workers = Annotated[
    int | None,
    typer.Option(
        help="Worker processes of the local engine; 0 runs all in this one. Default: one per core."
    ),
]

Deadline = Annotated[
    str | None,
    typer.Option(help="HH:MM, the next one by this machine's clock, at which all must be done."),
]

Log = Annotated[
    str,
    typer.Option(
        help="Follow the rounds in --out: some of tensorboard, csv, jsonl, mlflow, wandb, comma-separated."
    ),
]

Metrics = Annotated[
    str,
    typer.Option(
        help="HOST:PORT of this machine for /metrics (Prometheus), /healthz, /readyz and /status."
    ),
]
LogFormat = Annotated[
    str,
    typer.Option(help="text, or json: each line about progress is a JSON document, on stderr."),
]

FreshProcesses = Annotated[
    bool,
    typer.Option(
        "--fresh-processes",
        help="SuperNodes start a Python process for each message, as Flower does, instead of one client "
        "that stays; also with a version of Flower that is not tested.",
    ),
]

AppCluster = Annotated[
    Path | None, typer.Option(help="For an app folder: the cluster file it runs on.")
]
AppClaims = Annotated[
    list[str] | None,
    typer.Option(help="For an app folder: a claim, 'accuracy>=0.9'. Repeatable."),
]
AppNodes = Annotated[
    int | None, typer.Option(help="For an app folder: how many SoCs take part; default all.")
]
AppFlops = Annotated[
    float | None,
    typer.Option(
        help="For an app folder: operations of one training example, to price its clients' work."
    ),
]

_DEPLOYMENT_OPTIONS = (
    "superlink",
    "superlink_ca",
    "restarts",
    "checkpoint_folder",
    "fresh_processes",
)
_APP_FOLDER_OPTIONS = ("cluster", "nodes", "training_flops", "expect")


class PlainCommand(TyperCommand):
    """A command whose help is plain text, also that of its arguments.

    Click 8.5 has a help text of arguments of its own, and sets the one that Typer has kept to None.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Make the command, and give its arguments the texts of their annotations."""
        super().__init__(*args, **kwargs)
        hints = (
            get_type_hints(inspect.unwrap(self.callback), include_extras=True)
            if self.callback
            else {}
        )
        for parameter in self.params:
            if isinstance(parameter, TyperArgument) and parameter.help is None:
                parameter.help = hints[parameter.name].__metadata__[0].help

    def format_arguments(self, ctx: Any, formatter: Any) -> None:
        """Write nothing: Typer writes arguments with the options."""

    def get_help(self, ctx: Any) -> str:
        """Return the help without the backslashes, which only rich would remove."""
        return super().get_help(ctx).replace("\\[", "[")


def round_logging(log: str, metrics: str = "") -> "RoundLogging":
    """Return what `--log` and `--metrics` ask for.

    Raises `ConfigError` for a logger that is unknown, named twice or not installed, and for an address that is public.
    """
    from socflower.cli.terminal import print_notice
    from socflower.engines.run_log import RoundLogging

    names = tuple(name.strip() for name in log.split(",")) if log else ()
    return RoundLogging(names, print_notice, metrics)


def require_cluster(cluster: Path | None, app: Path) -> Path:
    """Return the cluster file of an app folder; `ConfigError` if none is named."""
    if cluster is None:
        raise ConfigError(f"{app}: name the cluster that the app runs on with --cluster FILE")
    return cluster


@contextmanager
def mistakes_name_file(name: str, path: Path) -> Iterator[None]:
    """Let errors that begin with the name of the scenario in `path` begin with the path instead."""
    try:
        yield
    except (ConfigError, InfeasiblePlan) as error:
        text = str(error)
        if not text.startswith((f"{name} [", f"{name}: ")):
            raise
        kind = InfeasiblePlan if isinstance(error, InfeasiblePlan) else ConfigError
        raise kind(f"{path}{text[len(name) :]}") from error


def unread_by_run(
    *, of_app_folder: bool, engine: str, is_remote: bool, keeps_checkpoints: bool
) -> dict[str, str]:
    """Return the options that a run of this kind does not read, as a map from parameter to reason.

    `is_remote`: on a SuperLink that is not started here. `keeps_checkpoints`: in a named folder on its machine.
    """
    if of_app_folder:
        unread = {
            "save_model": "is for scenarios: an app of your own keeps its model itself",
            "deadline": "is for scenarios: only they end before their last round",
            **dict.fromkeys(
                ("superlink", "superlink_ca", "checkpoint_folder"),
                "is for scenarios, and this is the folder of a Flower app",
            ),
        }
        if engine != "local":
            unread["workers"] = f"is for --engine local only, and this is --engine {engine}"
            unread["fresh"] = (
                "is for --engine local only: elsewhere runs of app folders always start over"
            )
        if engine != "deployment":
            unread |= dict.fromkeys(
                ("restarts", "fresh_processes"),
                f"is for --engine deployment only, and this is --engine {engine}",
            )
        return unread
    unread = dict.fromkeys(
        _APP_FOLDER_OPTIONS,
        "is for the folder of a Flower app; a scenario has its own [cluster] and [strategy] socs",
    )
    if engine != "local":
        unread["workers"] = f"is for --engine local only, and this is --engine {engine}"
    if engine != "deployment":
        unread |= dict.fromkeys(
            _DEPLOYMENT_OPTIONS, f"is for --engine deployment only, and this is --engine {engine}"
        )
    elif is_remote:
        unread["deadline"] = "is for SuperLinks that are started here"
        unread["fresh_processes"] = (
            "is for SuperNodes that are started here (docs/guides/deployment.md)"
        )
        if not keeps_checkpoints:
            unread |= dict.fromkeys(
                ("fresh", "restarts"),
                "needs --checkpoint-folder with --superlink: a run there has no other checkpoints",
            )
    else:
        unread["superlink_ca"] = "belongs to a --superlink HOST:PORT"
        unread["checkpoint_folder"] = "is a folder on the machine of --superlink"
    return unread


def refuse_fusion_of_split(scenario: "Scenario", fusion: str | None) -> None:
    """Raise `ConfigError` for --fusion with a cloud: streams to a cloud have no messages to fuse."""
    if fusion is not None and scenario.kind.uses_cloud:
        name = scenario.strategy.name
        raise ConfigError(
            f"--fusion {fusion}: is not for {name!r}, which has a cloud; leave it out"
        )


def unread_by_compare(engine: str, *, of_app_folders: bool) -> dict[str, str]:
    """Return the options that `compare` does not read, as a map from parameter to reason."""
    unread = (
        {}
        if engine == "local"
        else {"workers": f"is for --engine local only, and this is --engine {engine}"}
    )
    if of_app_folders:
        return unread | dict.fromkeys(
            ("strategies", "seeds", "tune", "search", "until_target", "front", "fusion"),
            "is for scenarios, and these are "
            "folders of Flower apps; --vary compares values of their run config",
        )
    return unread | dict.fromkeys(
        (*_APP_FOLDER_OPTIONS, "vary"), "is for folders of Flower apps, and this is a scenario"
    )


def unread_by_plan(scenario: "Scenario | None") -> dict[str, str]:
    """Return the options that `plan` does not read, as a map from parameter to reason; None is an app's folder."""
    if scenario is None:
        return {
            **dict.fromkeys(
                ("groups", "fusion"),
                "is for scenarios; an app's ServerApp sets its own: use --set with the key of its run config",
            ),
            **dict.fromkeys(
                ("out", "deadline", "start", "price_per_kwh"),
                "is for scenarios, and this is the folder of a Flower app",
            ),
        }
    from socflower.scenario.schema.config import several_groups

    name = f"name = {scenario.strategy.name!r}"
    unread = dict.fromkeys(
        ("cluster", "training_flops"), "is for the folder of a Flower app, and this is a scenario"
    )
    if not several_groups(scenario.strategy.name):
        unread["groups"] = f"is for strategies with several groups, and {name}; leave it out"
    if scenario.kind.is_pipeline or scenario.kind.uses_cloud:
        unread |= dict.fromkeys(
            ("fusion", "deadline", "start", "price_per_kwh"),
            f"is for training in groups and FedAvg, and {name}; leave it out",
        )
    if not scenario.kind.is_pipeline:
        unread["out"] = (
            f"is for strategy.name = 'hybrid-pipeline', and {name}; --json prints its plan, and `socflower run` "
            "writes a report"
        )
    return unread


def unread_by_tune(*, of_app_folder: bool) -> dict[str, str]:
    """Return the options that `tune` does not read, as a map from parameter to reason."""
    if of_app_folder:
        why = "is for scenarios, and this is the folder of a Flower app; --vary names keys of its run config"
        return dict.fromkeys(("strategies", "arithmetics"), why)
    return {
        **dict.fromkeys(
            ("vary", "rounds_key", "cluster", "nodes", "training_flops"),
            "is for the folder of a Flower app, and this is a scenario",
        ),
        **dict.fromkeys(
            ("target_accuracy", "target_loss"),
            "is for the folder of a Flower app; a scenario has its own [compare]",
        ),
    }


def refuse_unread(context: typer.Context, unread: Mapping[str, str]) -> None:
    """Raise `ConfigError` for a given option that is in `unread`, and for an empty text.

    An option counts as given even if its value is the default.
    """
    for name, option in _given(context):
        if name in unread:
            raise ConfigError(f"{option} {unread[name]}")
        if context.params[name] == "":
            raise ConfigError(f"{option} is empty; leave it out, or give it a value")


def refuse_all_but(context: typer.Context, *read: str, because: str) -> None:
    """Raise `ConfigError` for every given option that is not in `read`."""
    others = [option for name, option in _given(context) if name not in read]
    if others:
        raise ConfigError(f"{because}: leave out {', '.join(others)}")


def _given(context: typer.Context) -> Iterator[tuple[str, str]]:
    """Yield each parameter given on the command line: its name, and its spelling there."""
    parameter: Any
    for parameter in context.command.params:
        source = context.get_parameter_source(parameter.name)
        if source is not None and source.name == "COMMANDLINE":
            is_option = parameter.param_type_name == "option"
            yield (
                parameter.name,
                max(parameter.opts, key=len) if is_option else f"argument {parameter.name}",
            )
