"""`socflower plan`: a plan without training."""

import math
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from socflower.cli.options import (
    AppCluster,
    AppFlops,
    Deadline,
    Fusion,
    Json,
    Set,
    mistakes_name_file,
    refuse_unread,
    require_cluster,
    scenario_argument,
    unread_by_plan,
)
from socflower.cli.process import prints_to_stderr
from socflower.cli.terminal import OUT, print_json, print_text
from socflower.errors import ConfigError
from socflower.hierarchy.exchange.models import COMPRESSING, NONE, STAR
from socflower.quantities import (
    counted,
    human_bytes,
    human_joules,
    human_ratio,
    human_seconds,
    percent,
)

# Importing the planners takes long, so only the command does.
if TYPE_CHECKING:
    from socflower.cluster import Cluster
    from socflower.scenario.schema.scenario_file import Scenario

# The most boards and groups that are printed.
_MOST_BOARDS, _MOST_GROUPS = 60, 40
_JOULES_PER_KWH = 3.6e6


_Scenario = Annotated[
    Path,
    scenario_argument(
        "A scenario file, the name of a shipped scenario, a cluster file, "
        "or the folder of a Flower app."
    ),
]
_Groups = Annotated[int | None, typer.Option(help="Number of groups, in place of the file's.")]
_Out = Annotated[
    Path | None,
    typer.Option(
        help="For a pipeline: write the plan, a trace and a page with one "
        "update over time into this folder."
    ),
]
_Start = Annotated[
    str | None, typer.Option(help="HH:MM at which --deadline's window opens; default now.")
]
_PricePerKwh = Annotated[
    float | None,
    typer.Option(help="What a kilowatt-hour costs, in your currency: adds a price to the choices."),
]


def plan(
    context: typer.Context,
    scenario: _Scenario,
    groups: _Groups = None,
    fusion: Fusion = None,
    set_: Set = None,
    cluster: AppCluster = None,
    training_flops: AppFlops = None,
    out: _Out = None,
    deadline: Deadline = None,
    start: _Start = None,
    price_per_kwh: _PricePerKwh = None,
    as_json: Json = False,
) -> None:
    """Show the groups on their boards, every number of groups and method with its predicted cost, and the words."""
    from socflower.scenario.schema.file import load_scenario

    if price_per_kwh is not None and not 0 <= price_per_kwh < math.inf:
        raise ConfigError(f"--price-per-kwh {price_per_kwh}: must be 0 or more, and finite")
    overrides = set_ or []
    if scenario.is_dir():
        refuse_unread(context, unread_by_plan(None))
        _plan_app_folder(scenario, cluster, overrides, training_flops, as_json)
        return
    loaded = load_scenario(scenario, overrides)
    refuse_unread(context, unread_by_plan(loaded))
    # After the checks, so that a mistake is told of the option and not of a key of the file.
    given = {"groups": groups, "fusion": fusion}
    options = [f"strategy.{key}={value}" for key, value in given.items() if value is not None]
    if options:
        loaded = load_scenario(scenario, [*overrides, *options])
    if loaded.kind.is_pipeline:
        from socflower.cli.pipeline_plan import plan_pipeline_scenario

        plan_pipeline_scenario(loaded, scenario, out, as_json)
        return
    with mistakes_name_file(loaded.name, scenario):
        fits = _plan_cluster(loaded, as_json, price_per_kwh, _window(deadline, start))
    if not fits:
        raise typer.Exit(1)


def _window(deadline: str | None, start: str | None) -> tuple[datetime, datetime] | None:
    """Return when the window of `--start` and `--deadline` opens and closes."""
    from socflower.engines.ending import next_time

    if deadline is None:
        if start is not None:
            raise ConfigError(
                f"--start {start}: belongs to a --deadline; give one, or leave it out"
            )
        return None
    begins = datetime.now() if start is None else next_time("--start", start, datetime.now())
    return begins, next_time("--deadline", deadline, begins)


def _plan_cluster(
    scenario: "Scenario",
    as_json: bool,
    price_per_kwh: float | None,
    window: tuple[datetime, datetime] | None,
) -> bool:
    """Print the plan of a scenario with groups or with a cloud, and return whether its window is long enough."""
    from socflower.scenario.choices import with_choices
    from socflower.scenario.heat import predicted_heat
    from socflower.scenario.planning import plan_scenario
    from socflower.scenario.schema.file import scenario_cluster
    from socflower.scenario.split_planning import plan_split
    from socflower.scenario.window import planned_window, window_lines

    with prints_to_stderr():
        cluster = scenario_cluster(scenario)
        if scenario.kind.uses_cloud:
            planned = plan_split(scenario)
        else:
            planned = with_choices(scenario, cluster, plan_scenario(scenario))
        document = {**planned, "heat": predicted_heat(scenario, cluster)}
        if price_per_kwh is not None:
            for row in document["choices"]:
                row["price"] = row["training_energy_j"] / _JOULES_PER_KWH * price_per_kwh
        if window is not None:
            document["window"] = planned_window(scenario, cluster, *window)
    if as_json:
        print_json(document)
    elif scenario.kind.uses_cloud:
        print_split_plan(OUT, document)
    else:
        print_plan(OUT, cluster, document)
    if window is None:
        return True
    if not as_json:
        for line in window_lines(document["window"], scenario.train.epochs):
            print_text(line, OUT, "bold" if document["window"]["fits"] else "bold yellow")
    return bool(document["window"]["fits"])


def _plan_app_folder(
    folder: Path,
    cluster_file: Path | None,
    overrides: Sequence[str],
    training_flops: float | None,
    as_json: bool,
) -> None:
    known_cluster = require_cluster(cluster_file, folder)
    from socflower.scenario.app_planning import plan_app_folder

    with prints_to_stderr():
        cluster, document = plan_app_folder(folder, known_cluster, overrides, training_flops)
    if as_json:
        print_json(document)
    else:
        print_plan(OUT, cluster, document)


_WORDS = (
    "a slot is one SoC with a link of its own; a board is slots behind one shared uplink. A standalone machine, such "
    "as a Raspberry Pi on the switch of its shelf, is a slot, and the shelf a board",
    "a group computes each batch together and has one leader (*), which exchanges models with other leaders at a "
    "synchronisation; an idle slot (.) takes no part",
    "contention: how many other groups at most share an uplink with a split group; groups of one communication group "
    "share none, and so send at once",
    "an epoch is one pass over the data; N groups take N times fewer steps in it, of N batches, and learn less; < "
    "marks this plan",
    "J are of the SoCs with their network interfaces, without fans; memory is of the SoC that needs most",
)
"""What the words of a plan mean, for those who have not read the guide."""


def print_plan(
    console: Console,
    cluster: "Cluster",
    document: Mapping[str, Any],
) -> None:
    """Print the boards with each slot's group, then the predictions, the choices and the words."""
    console.print(_boards(cluster, document["groups"]))
    if len(cluster.boards) > _MOST_BOARDS:
        hidden = counted(len(cluster.boards) - _MOST_BOARDS, "board")
        print_text(f"and {hidden} more; --json has all", console)
    split = [group["id"] for group in document["groups"] if group["split"]]
    turns = ", ".join(map(_listed, document["communication_groups"]))
    where = f" on {counted(len(cluster.servers), 'server')}" if cluster.servers else ""
    print_text(
        f"{counted(len(document['groups']), 'group')}{where}, split over boards: {_listed(split)}, contention "
        f"{document['contention']}, communication groups: {turns}",
        console,
    )
    print_text(document["work"], console)
    if document["predicted"] is not None:
        for line in _predicted_lines(document):
            print_text(line, console)
    if choices := document.get("choices"):
        console.print(_choices(choices))
        for name, why in document["choices_refused"].items():
            print_text(f"not {name}: {why}", console, "dim")
    if document["verdict"] is not None:
        pays = document["predicted"]["epoch_s"] < document["one_soc"]["epoch_s"]
        print_text(document["verdict"], console, "bold" if pays else "bold yellow")
    _print_heat_and_notes(console, document)
    for words in _WORDS:
        print_text(words, console, "dim")


def _choices(rows: Sequence[Mapping[str, Any]]) -> Table:
    """Return a row for each choice, the planned one with a mark, and the price of its training if rows have one."""
    heads = ("groups", "SoCs", "epoch", "J of it", "training", "J of it", "memory", "over\none SoC")
    is_priced = "price" in rows[0]
    table = Table(
        "method",
        *heads,
        *["price"] * is_priced,
        box=None,
        padding=(0, 1, 0, 0),
        header_style="bold",
    )
    for row in rows:
        cells = [
            f"{row['strategy']}{' <' if row['is_planned'] else ''}",
            "" if row["groups"] is None else str(row["groups"]),
            str(row["num_socs"]),
            human_seconds(row["epoch_s"]),
            human_joules(row["epoch_energy_j"]).partition(" (")[0],
            human_seconds(row["training_s"]),
            human_joules(row["training_energy_j"]).partition(" (")[0],
            human_bytes(row["memory_bytes"]),
            human_ratio(row["speedup"]),
        ]
        if is_priced:
            cells.append(f"{row['price']:.2f}" if row["price"] >= 0.01 else "< 0.01")
        table.add_row(*cells, style="bold" if row["is_planned"] else None)
    return table


def _boards(cluster: "Cluster", groups: Sequence[Mapping[str, Any]]) -> Table:
    """Return the group of each slot, by board."""
    group_of = {soc: group for group in groups for soc in group["members"]}
    table = Table("board", "SoCs by slot (group, * leader, . idle)", header_style="bold")
    for board in range(min(len(cluster.boards), _MOST_BOARDS)):
        cells = ""
        for soc in cluster.socs_of(board):
            if soc in group_of:
                group = group_of[soc]
                cells += f"{group['id']:>3}{'*' if soc == group['leader'] else ' '}"
            else:
                cells += "  . "
        table.add_row(str(board), cells)
    return table


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


def _print_heat_and_notes(console: Console, document: Mapping[str, Any]) -> None:
    if heat := document.get("heat"):
        hottest = "" if heat["peak_c"] is None else f", at most {heat['peak_c']:.1f} °C"
        print_text(
            f"with heat and users the training takes {human_seconds(heat['virtual_s'])} and "
            f"{human_joules(heat['energy_j'])}, {human_joules(heat['cooling_j'])} of them for fans; "
            f"{percent(heat['slowdown'])} slower than without{hottest}",
            console,
        )
    for warning in document.get("warnings", ()):
        print_text(f"warning: {warning}", console, "bold yellow")
    for note in document["notes"]:
        print_text(f"note: {note}", console, "dim")


def _listed(groups: Sequence[int]) -> str:
    """Return the ids of groups, or their number if there are many."""
    if not groups:
        return "none"
    return str(list(groups)) if len(groups) <= _MOST_GROUPS else str(len(groups))


def _leaders(document: Mapping[str, Any]) -> str:
    """Return how leaders exchange models, and the time of the other ways (F8)."""
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
    """Return the price of messages, and the time of a step and a synchronisation with the other price (F8a)."""
    (other,) = (fusion for fusion in predicted["fusions"] if fusion != predicted["fusion"])
    step, sync = (human_seconds(predicted["fusions"][other][key]) for key in ("step_s", "sync_s"))
    return f"messages {predicted['fusion']}; {other} a step {step}, a synchronisation {sync}"


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
        console.print(_cuts(number, edge))
        if edge["gains"]:
            print_text(_gains_text(edge["gains"]), console)
    predicted = document["predicted"]
    print_text(
        f"predicted: {human_seconds(predicted['batch_s'])} a batch, {human_seconds(predicted['epoch_s'])} an "
        f"epoch, {human_joules(predicted['epoch_energy_j'])} of the edges",
        console,
    )
    _print_heat_and_notes(console, document)


def _cuts(number: int, edge: Mapping[str, Any]) -> Table:
    """Return the time of a batch at each cut of an edge's model, and without the cloud."""
    link, chosen = edge["link"], edge["deployment"]
    up, down = (link[f"{way}_bytes_per_s"] * 8e-6 for way in ("up", "down"))
    table = Table(
        "cut after",
        *("sends", "edge", "up", "cloud", "down", "a batch", "memory"),
        header_style="bold",
        # Eight columns fit into 80 characters.
        padding=0,
        title=f"edge {number}: {edge['device']}, {up:.1f} Mbit/s up, {down:.1f} down; {chosen['text']}",
        title_justify="left",
    )
    for row in edge["cuts"]:
        mark = " *" if row["name"] == chosen["cut_name"] else ""
        phases = [row[key] for key in ("edge_s", "up_s", "cloud_s", "down_s", "batch_s")]
        features, memory = (human_bytes(row[f"{key}_bytes"]) for key in ("feature", "edge_memory"))
        table.add_row(f"{row['name']}{mark}", features, *map(human_seconds, phases), memory)
    alone = human_seconds(edge["edge_only_s"])
    mark = " *" if chosen["cut"] is None else ""
    table.add_row(f"edge alone{mark}", "", alone, "", "", "", alone, "")
    return table


_TECHNIQUES = {"window": "K", "features": "bits up", "gradients": "bits down"}


def _gains_text(gains: Mapping[str, Any]) -> str:
    """Return a sentence on what each technique adds to JointDNN with its best cut or none."""
    parts = [
        f"{_TECHNIQUES[each['name']]} {each['alone']:.2f} times alone, {each['last']:.2f} behind the others"
        for each in gains["techniques"]
    ]
    ratio = gains["joint_dnn_epoch_s"] / gains["epoch_s"]
    return f"over JointDNN in 32 bits {ratio:.2f} times as fast: {'; '.join(parts)}"
