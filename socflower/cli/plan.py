"""`socflower plan`: a plan without training."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from socflower.cli.options import (
    Fusion,
    Json,
    Set,
    mistakes_name_file,
    refuse_fusion_of_split,
    scenario_argument,
)
from socflower.cli.process import prints_to_stderr
from socflower.cli.terminal import OUT, print_json, print_text
from socflower.errors import ConfigError
from socflower.hierarchy.leader_topology import COMPRESSING, NONE, STAR
from socflower.quantities import counted, human_bytes, human_joules, human_seconds, percent

if TYPE_CHECKING:  # the planners are loaded by the command
    from socflower.cluster import Cluster

_MOST_BOARDS, _MOST_GROUPS = 60, 40  # that are printed


def plan(
    scenario: Annotated[
        Path,
        scenario_argument(
            "A scenario file, the name of a shipped scenario, a cluster file, "
            "or the folder of a Flower app."
        ),
    ],
    groups: Annotated[
        int | None, typer.Option(help="Number of groups, in place of the file's.")
    ] = None,
    fusion: Fusion = None,
    set_: Set = None,
    cluster: Annotated[
        Path | None, typer.Option(help="For an app folder: the cluster file it runs on.")
    ] = None,
    training_flops: Annotated[
        float | None,
        typer.Option(
            help="For an app folder: operations of one training "
            "example, where its strategy has no profile."
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            help="For a pipeline: write the plan, a trace and a page with one "
            "update over time into this folder."
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Show the groups on their boards, their communication groups, and predicted time, energy and memory."""
    from socflower.scenario.heat import predicted_heat
    from socflower.scenario.planning import plan_scenario
    from socflower.scenario.schema.file import load_scenario, scenario_cluster
    from socflower.scenario.schema.strategies import group_strategy

    if scenario.is_dir():
        _refuse_out(out, scenario)
        if fusion is not None:
            raise ConfigError(
                f"--fusion {fusion}: is for scenarios; the ServerApp of {scenario} sets "
                "ExchangeSettings(fusion=…): use --set with the key of its run config"
            )
        _plan_app_folder(scenario, cluster, groups, set_ or (), training_flops, as_json)
        return
    for option, value in (("--cluster", cluster), ("--training-flops", training_flops)):
        if value is not None:
            raise ConfigError(
                f"{option} {value}: is for the folder of a Flower app; a scenario has its own [cluster] "
                "and model"
            )
    loaded = load_scenario(scenario, set_ or ())
    if groups is not None and not (
        loaded.has_groups and group_strategy(loaded.strategy.name).num_groups is None
    ):
        raise ConfigError(
            f"--groups {groups}: is for strategy.name = 'socflow', and {scenario} has "
            f"{loaded.strategy.name!r}, which takes no number of groups; leave it out"
        )
    refuse_fusion_of_split(loaded, fusion)
    # After the checks, so that a mistake is told of the option and not of a key of the file.
    if options := [
        f"strategy.{key}={value}"
        for key, value in (("groups", groups), ("fusion", fusion))
        if value is not None
    ]:
        loaded = load_scenario(scenario, [*(set_ or ()), *options])
    if loaded.is_pipeline:
        from socflower.cli.pipeline_plan import plan_pipeline_scenario

        plan_pipeline_scenario(loaded, scenario, out, as_json)
        return
    _refuse_out(out, scenario)
    if loaded.is_split:
        with mistakes_name_file(loaded.name, scenario):
            _plan_split(loaded, as_json)
        return
    with mistakes_name_file(loaded.name, scenario), prints_to_stderr():
        planned = scenario_cluster(loaded)
        document = {**plan_scenario(loaded), "heat": predicted_heat(loaded, planned)}
    if as_json:
        print_json(document)
    else:
        print_plan(OUT, planned, document)


def _refuse_out(out: Path | None, scenario: Path) -> None:
    if out is not None:
        raise ConfigError(
            f"--out {out}: is for strategy.name = 'hybrid-pipeline', and {scenario} has another; "
            "--json prints its plan, and `socflower run` writes a report"
        )


def _plan_app_folder(
    folder: Path,
    cluster_file: Path | None,
    groups: int | None,
    overrides: Sequence[str],
    training_flops: float | None,
    as_json: bool,
) -> None:
    from socflower.scenario.app_planning import plan_app_folder

    if groups is not None:
        raise ConfigError(
            f"--groups {groups}: is for scenarios; the ServerApp of {folder} sets its groups: use --set "
            "with the key of its run config"
        )
    if cluster_file is None:
        raise ConfigError(
            f"{folder} is the folder of a Flower app: name the cluster it runs on with --cluster FILE"
        )
    with prints_to_stderr():
        cluster, document = plan_app_folder(folder, cluster_file, overrides, training_flops)
    if as_json:
        print_json(document)
    else:
        print_plan(OUT, cluster, document)


def _plan_split(scenario: Any, as_json: bool) -> None:
    from socflower.scenario.heat import predicted_heat
    from socflower.scenario.planning import plan_split
    from socflower.scenario.schema.file import scenario_cluster

    with prints_to_stderr():
        document = {
            **plan_split(scenario),
            "heat": predicted_heat(scenario, scenario_cluster(scenario)),
        }
    if as_json:
        print_json(document)
    else:
        print_split_plan(OUT, document)


def print_plan(console: Console, cluster: "Cluster", document: Mapping[str, Any]) -> None:
    """Print the boards with each slot's group, then the predictions."""
    group_of = {soc: group for group in document["groups"] for soc in group["members"]}
    table = Table("board", "SoCs by slot (group, * leader, . idle)", header_style="bold")
    for board in range(min(len(cluster.boards), _MOST_BOARDS)):
        cells = []
        for soc in cluster.socs_of(board):
            group = group_of.get(soc)
            cells.append(
                "  . "
                if group is None
                else f"{group['id']:>3}{'*' if soc == group['leader'] else ' '}"
            )
        table.add_row(str(board), "".join(cells))
    console.print(table)
    if len(cluster.boards) > _MOST_BOARDS:
        print_text(
            f"and {counted(len(cluster.boards) - _MOST_BOARDS, 'board')} more; --json has all",
            console,
        )
    split = [group["id"] for group in document["groups"] if group["split"]]
    turns = document["communication_groups"]
    where = f" on {counted(len(cluster.servers), 'server')}" if cluster.servers else ""
    print_text(
        f"{counted(len(document['groups']), 'group')}{where}, split over boards: {_listed(split)}, contention "
        f"{document['contention']}, communication groups: {', '.join(map(_listed, turns))}",
        console,
    )
    print_text(document["work"], console)
    for line in () if document["predicted"] is None else _predicted_lines(document):
        print_text(line, console)
    if document["verdict"] is not None:
        pays = document["predicted"]["epoch_s"] < document["one_soc"]["epoch_s"]
        print_text(document["verdict"], console, "bold" if pays else "bold yellow")
    _print_heat(console, document.get("heat"))
    for note in document["notes"]:
        print_text(f"note: {note}", console, "dim")


def _predicted_lines(document: Mapping[str, Any]) -> tuple[str, ...]:
    predicted = document["predicted"]
    return (
        _step_line(document),
        f"a synchronisation {human_seconds(predicted['sync_s'])}{_in_servers(predicted)}{_leaders(document)}, "
        f"{predicted['syncs_per_epoch']:.3g} an epoch",
        _fusion_line(predicted),
        f"an epoch {human_seconds(predicted['epoch_s'])} and {human_joules(predicted['epoch_energy_j'])}, "
        f"{percent(predicted['compute_fraction'])} of the SoCs' time computing",
        f"memory of a SoC {human_bytes(predicted['memory_bytes'])}{_frozen_text(document['model'])}",
    )


def _print_heat(console: Console, heat: Mapping[str, Any] | None) -> None:
    if not heat:
        return
    hottest = "" if heat["peak_c"] is None else f", at most {heat['peak_c']:.1f} °C"
    print_text(
        f"with heat and users the training takes {human_seconds(heat['virtual_s'])} and "
        f"{human_joules(heat['energy_j'])}, {human_joules(heat['cooling_j'])} of them for fans; "
        f"{percent(heat['slowdown'])} slower than without{hottest}",
        console,
    )


def _listed(groups: Sequence[int]) -> str:
    """Return the ids of groups, or their number where these are many."""
    return (
        str(list(groups))
        if 0 < len(groups) <= _MOST_GROUPS
        else str(len(groups))
        if groups
        else "none"
    )


def _leaders(document: Mapping[str, Any]) -> str:
    """Return how leaders exchange models, and what the other ways would take (F8)."""
    seconds = document["predicted"]["leaders_s"]
    compression = document["leader_compression"]
    others = [
        f"as a {kind} {human_seconds(value)}"
        for kind, value in seconds.items()
        if kind != document["leaders"] and (compression == NONE or kind in COMPRESSING)
    ]
    if not others:
        return ""
    how = "" if compression == NONE else f" in {compression}"
    left_out = "" if compression == NONE else f"; a {STAR} cannot be compressed"
    return f" with leaders as a {document['leaders']}{how} ({', '.join(others)}{left_out})"


def _fusion_line(predicted: Mapping[str, Any]) -> str:
    """Return what costs a message, and what step and synchronisation take with the alternative (F8a)."""
    ((other, times),) = (
        (fusion, times)
        for fusion, times in predicted["fusions"].items()
        if fusion != predicted["fusion"]
    )
    return (
        f"messages {predicted['fusion']}; {other} a step {human_seconds(times['step_s'])}, a synchronisation "
        f"{human_seconds(times['sync_s'])}"
    )


def _in_servers(predicted: Mapping[str, float]) -> str:
    return (
        f" (inside servers {human_seconds(predicted['server_sync_s'])})"
        if predicted["server_sync_s"]
        else ""
    )


def _frozen_text(model: Mapping[str, float]) -> str:
    """Return what part of the weights trains and travels; "" where all do."""
    if model["trained_bytes"] == model["weight_bytes"]:
        return ""
    return (
        f"; of {human_bytes(model['weight_bytes'])} of weights {human_bytes(model['trained_bytes'])} train and are "
        "exchanged"
    )


def _step_line(document: Mapping[str, Any]) -> str:
    """Return the time of a step, whether groups take turns in it, and the time of the alternative (F7)."""
    from socflower.hierarchy.uplink_turns import ASKED, NO_SHARED_UPLINK

    predicted = document["predicted"]
    in_turn, freely = (
        human_seconds(predicted[key]) for key in ("step_with_turns_s", "step_without_turns_s")
    )
    if document["uplink_turns_by"] == NO_SHARED_UPLINK:
        return f"a step {freely}; no two groups share an uplink"
    why = " (set by strategy.uplink_turns)" if document["uplink_turns_by"] == ASKED else ""
    if document["uplink_turns"]:
        return f"a step {in_turn}, groups taking turns{why}; running freely {freely}"
    return f"a step {freely}, groups running freely{why}; taking turns {in_turn}"


def print_split_plan(console: Console, document: Mapping[str, Any]) -> None:
    """Print a split plan as tables."""
    print_text(document["work"], console)
    for number, edge in enumerate(document["edges"]):
        link = edge["link"]
        table = Table(
            "cut after",
            "edge",
            "up",
            "cloud",
            "down",
            "a batch",
            "edge memory",
            header_style="bold",
            title=f"edge {number}: {edge['device']}, {link['up_bytes_per_s'] * 8e-6:.1f} Mbit/s up, "
            f"{link['down_bytes_per_s'] * 8e-6:.1f} down; {edge['deployment']['text']}",
            title_justify="left",
        )
        for row in edge["cuts"]:
            mark = " *" if row["name"] == edge["deployment"]["cut_name"] else ""
            table.add_row(
                f"{row['name']}{mark}",
                *(
                    human_seconds(row[key])
                    for key in ("edge_s", "up_s", "cloud_s", "down_s", "batch_s")
                ),
                human_bytes(row["edge_memory_bytes"]),
            )
        table.add_row(
            "edge alone" + ("" if edge["deployment"]["cut"] is not None else " *"),
            human_seconds(edge["edge_only_s"]),
            "",
            "",
            "",
            human_seconds(edge["edge_only_s"]),
            "",
        )
        console.print(table)
    predicted = document["predicted"]
    print_text(
        f"predicted: {human_seconds(predicted['batch_s'])} a batch, {human_seconds(predicted['epoch_s'])} an "
        f"epoch, {human_joules(predicted['epoch_energy_j'])} of the edges",
        console,
    )
    _print_heat(console, document.get("heat"))
    for note in document["notes"]:
        print_text(f"note: {note}", console, "dim")
