"""What the command line shows people: progress bars and tables. Nothing here computes."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeAlias

from rich.console import Console
from rich.markup import escape
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Column, Table

from socflower.cluster import Cluster
from socflower.cluster.wording import counted
from socflower.hierarchy.turn_taking import ASKED, NO_SHARED_UPLINK
from socflower.scenario.config import Scenario
from socflower.scenario.format import human_bytes, human_joules, human_ratio, human_seconds, percent
from socflower.scenario.priced_processors import priced_line

OnRound: TypeAlias = Callable[[dict[str, Any]], None]
StartBar: TypeAlias = Callable[[str], OnRound]

_NARROW, _MEDIUM_TIMES, _MEDIUM = 64, 72, 104
"""Columns of a terminal below which a bar says less: the accuracy alone, no virtual time, no energy."""

__all__ = ["StartBar", "escape", "print_app_result", "print_benchmark", "print_comparison", "print_findings",
           "print_plan", "print_profile", "print_result", "profile_progress", "progress", "progress_state"]


@contextmanager
def progress(console: Console, *, disable: bool) -> Iterator[StartBar]:
    """Yield a function that starts a bar for a strategy and returns what to call after each of its rounds."""
    # Only the bar gives way where a terminal is narrow: half a time is none.
    columns = (TextColumn("{task.description:10}"), BarColumn(bar_width=None), TextColumn("{task.fields[state]}"),
               TimeElapsedColumn(table_column=Column(no_wrap=True)),
               TimeRemainingColumn(table_column=Column(no_wrap=True)))
    bar = Progress(*columns, console=console, disable=disable, expand=True)
    begun = False

    def add(strategy: str) -> TaskID:
        nonlocal begun
        if not begun:
            bar.start()
            begun = True
        return bar.add_task(strategy, total=None, state="starting")

    try:

        def start(strategy: str) -> OnRound:
            # What is no terminal gets the last state of all, and nothing before an error.
            task = add(strategy) if console.is_interactive else None

            def on_round(entry: dict[str, Any]) -> None:
                nonlocal task
                task = add(strategy) if task is None else task
                bar.update(task, total=entry["num_rounds"], completed=entry["round"],
                           state=progress_state(entry, console.width))
                for event in entry["events"]:
                    console.print(f"[yellow]{strategy}, round {entry['round']}:[/] {escape(event['text'])}",
                                  soft_wrap=True, highlight=False)

            return on_round

        yield start
    finally:
        if begun:
            bar.stop()


def progress_state(entry: Mapping[str, Any], width: int) -> str:
    """Return what a bar says of a round beside its times, as much as fits a terminal that is `width` columns wide."""
    accuracy = percent(entry["accuracy"])
    # In a deployment time is real, and the bar shows it.
    virtual_s = None if "wall_s" in entry else human_seconds(entry["virtual_s"])
    if width < _NARROW:
        return accuracy
    if virtual_s is None or width < _MEDIUM:
        return f"accuracy {accuracy}" + ("" if virtual_s is None or width < _MEDIUM_TIMES else f"  {virtual_s}")
    return f"accuracy {accuracy}  {virtual_s} virtual  {human_joules(entry['energy_j'])}"


def profile_progress(console: Console, *, disable: bool) -> Progress:
    """Return the bar of `profile`: what is measured, how far it is, and since when."""
    return Progress(TextColumn("{task.description}"), BarColumn(bar_width=None),
                    MofNCompleteColumn(table_column=Column(no_wrap=True)),
                    TimeElapsedColumn(table_column=Column(no_wrap=True)), console=console,
                    disable=disable or not console.is_interactive, expand=True, transient=True)


def print_result(console: Console, scenario: Scenario, result: Mapping[str, Any], out: Path) -> None:
    """Show one run: the question, what came of it, the claims."""
    _print_question(console, scenario)
    table = Table("", f"{result['strategy']} on {result['engine']}", show_header=True, header_style="bold")
    table.add_row("accuracy", percent(result["final_accuracy"]))
    deployed = result["virtual_s"] is None
    if deployed:
        table.add_row("wall clock here", human_seconds(result["wall_s"]))
        table.add_row("time, predicted", human_seconds(result["predicted_s"]))
        table.add_row("restarts", str(len(result["restarts"])))
        if result.get("superlink_isolated") is not None:
            table.add_row("SuperLink open to", "this run only" if result["superlink_isolated"] else "all users here")
    else:
        table.add_row("virtual time", human_seconds(result["virtual_s"]))
    table.add_row("energy, predicted" if deployed else "energy", human_joules(result["energy_j"]))
    for tier, num_bytes in result["bytes"].items():
        table.add_row(f"bytes {tier.replace('_', ' ')}", human_bytes(num_bytes))
    for activity, seconds in result["breakdown"]["soc_seconds"].items():
        table.add_row(f"SoC time: {activity}", _share(seconds, result["breakdown"]["soc_seconds"]))
    if heat := result.get("heat"):
        for name, value in _heat_rows(heat):
            table.add_row(name, value)
    if not deployed:
        table.add_row("wall clock here", human_seconds(result["wall_s"]))
    table.add_row("weights", result["weights_sha256"][:16])
    if priced := priced_line(result["processors"]):
        table.add_row("time and energy of", priced)
    console.print(table)
    _print_claims(console, result["expectations"])
    console.print(f"report: {escape(str(out / 'report.html'))}   trace (open in ui.perfetto.dev): "
                  f"{escape(str(out / 'trace.json'))}", soft_wrap=True, highlight=False)


def _heat_rows(heat: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield what a table says of heat and users; of users alone there are no temperatures and no fans."""
    if heat["slowdown"] is not None:
        yield "slower than cold and alone", percent(heat["slowdown"])
    if heat["peak_c"] is not None:
        yield "hottest SoC", f"{heat['peak_c']:.1f} °C"
        yield "energy of fans", human_joules(heat["cooling_j"])


def print_app_result(console: Console, result: Mapping[str, Any], out: Path) -> None:
    """Show what a foreign app would have cost on the cluster, and which messages came to nothing."""
    for event in result["events"]:
        console.print(f"[yellow]{escape(event['text'])}[/]", soft_wrap=True, highlight=False)
    traffic = ", ".join(f"{human_bytes(value)} {tier.replace('_', ' ')}" for tier, value in result["bytes"].items())
    console.print(f"virtual time {human_seconds(result['virtual_s'])}, energy {human_joules(result['energy_j'])}, "
                  f"{traffic or 'no bytes'}; wall clock here {human_seconds(result['wall_s'])}")
    for note in result["notes"]:
        console.print(f"note: {escape(note)}", soft_wrap=True, highlight=False)
    console.print(f"result and trace: {escape(str(out))}", soft_wrap=True, highlight=False)


def print_comparison(console: Console, scenario: Scenario, document: Mapping[str, Any], out: Path) -> None:
    """Show strategies side by side."""
    _print_question(console, scenario)
    # Eight columns of at most nine characters: they fit a terminal of 80.
    table = Table("strategy", "accuracy", f"to {percent(document['target_accuracy'])}", "in all", "energy", "boards",
                  "hub", "here", header_style="bold", padding=(0, 1), collapse_padding=True, pad_edge=False)
    for row in document["rows"]:
        inside = row["bytes"]["intra_board"] + row["bytes"]["inter_board"]
        reached = row["time_to_accuracy_s"]
        table.add_row(row["strategy"], percent(row["final_accuracy"]),
                      "never" if reached is None else human_seconds(reached), human_seconds(row["virtual_s"]),
                      human_joules(row["energy_j"]).partition(" (")[0], human_bytes(inside),
                      human_bytes(row["bytes"]["hub"]), human_seconds(row["wall_s"]))
    console.print(table)
    deployed = any(row["virtual_s"] is None for row in document["rows"])
    console.print(("wall clock to the target accuracy and here; energy and bytes as predicted" if deployed else
                   "virtual time to the target accuracy and in all, energy and bytes of the cluster; wall clock here"),
                  style="dim", soft_wrap=True)
    _print_claims(console, document["expectations"])
    console.print(f"report: {escape(str(out / 'report.html'))}", soft_wrap=True, highlight=False)


def print_plan(console: Console, cluster: Cluster, document: Mapping[str, Any]) -> None:
    """Draw the boards with each slot's group, then the predictions."""
    group_of = {soc: group for group in document["groups"] for soc in group["members"]}
    table = Table("board", "SoCs by slot (group, * leader, . idle)", header_style="bold")
    for board in range(len(cluster.boards)):
        cells = []
        for soc in cluster.socs_of(board):
            group = group_of.get(soc)
            cells.append("  . " if group is None else f"{group['id']:>3}{'*' if soc == group['leader'] else ' '}")
        table.add_row(str(board), "".join(cells))
    console.print(table)
    split = [group["id"] for group in document["groups"] if group["split"]]
    console.print(f"{counted(len(document['groups']), 'group')}, split over boards: {split or 'none'}, contention "
                  f"{document['contention']}, communication groups: {document['communication_groups']}")
    predicted = document["predicted"]
    console.print(document["work"], soft_wrap=True, highlight=False)
    lines = (
        _step_line(document),
        f"a synchronisation {human_seconds(predicted['sync_s'])}, {predicted['syncs_per_epoch']:.3g} an epoch",
        f"an epoch {human_seconds(predicted['epoch_s'])} and {human_joules(predicted['epoch_energy_j'])}, "
        f"{percent(predicted['compute_fraction'])} of the SoCs' time computing",
        f"memory of a SoC {human_bytes(predicted['memory_bytes'])}",
    )
    for line in lines:
        console.print(line, soft_wrap=True, highlight=False)
    if heat := document.get("heat"):
        hottest = "" if heat["peak_c"] is None else f", at most {heat['peak_c']:.1f} °C"
        console.print(f"with heat and users the training takes {human_seconds(heat['virtual_s'])} and "
                      f"{human_joules(heat['energy_j'])}, {human_joules(heat['cooling_j'])} of them for fans; "
                      f"{percent(heat['slowdown'])} slower than without{hottest}", soft_wrap=True, highlight=False)
    for note in document["notes"]:
        console.print(f"note: {note}")


def _step_line(document: Mapping[str, Any]) -> str:
    """Return what a step takes, whether groups take turns in it, and what the other choice would take (F7)."""
    predicted = document["predicted"]
    in_turn, freely = (human_seconds(predicted[key]) for key in ("step_in_turn_s", "step_free_running_s"))
    if document["sequenced_by"] == NO_SHARED_UPLINK:
        return f"a step {freely}; no two groups share an uplink"
    why = " (strategy.sequenced says so)" if document["sequenced_by"] == ASKED else ""
    if document["sequenced"]:
        return f"a step {in_turn}, groups taking turns{why}; running freely {freely}"
    return f"a step {freely}, groups running freely{why}; taking turns {in_turn}"


def print_benchmark(console: Console, document: Mapping[str, Any]) -> None:
    """Show a benchmark's rows, a line each: cases are sentences, which a table would break."""
    console.print(", ".join(f"{key} {value}" for key, value in document["machine"].items()), style="dim")
    for row in document["rows"]:
        limit = "" if row["limit"] is None else f", limit {row['limit']:.4g}"
        console.print(f"{escape(row['case'])}: [bold]{row['ours']:.4g} {row['unit']}[/] against "
                      f"{row['peer_value']:.4g} ({escape(row['peer'])}), ratio {row['ratio']:.3g}{limit}"
                      f"{'' if row['ok'] else '  [bold red]WRONG ANSWER[/]'}", soft_wrap=True, highlight=False)


def print_profile(console: Console, document: Mapping[str, Any]) -> None:
    """Show each model's operators at its largest batch, then a line per cell, the link, and what to know of it."""
    cells = document["cells"]
    largest = {cell["model"]: cell for cell in sorted(cells, key=lambda cell: int(cell["batch_size"]))}
    for model in dict.fromkeys(cell["model"] for cell in cells):
        cell = largest[model]
        title = f"{model}, batch {cell['batch_size']}, int8 kernels {cell['kernel']}"
        table = Table("operator", "kind", "int8 ms", "FP32 ms", "runs in", "images at a time", title=title)
        for entry in cell["operators"]:
            int8 = "none" if entry["int8_s"] is None else f"{1e3 * entry['int8_s']:.3f}"
            table.add_row(escape(entry["name"]), entry["kind"], int8, f"{1e3 * entry['fp32_s']:.3f}", entry["side"],
                          str(entry["batch_block"] or "all"))
        console.print(table)
        console.print(f"placement: {escape(cell['placement'])}", highlight=False)
        console.print(f"sum of the operators: {1e3 * cell['step_s']:.2f} ms, all in FP32 "
                      f"{1e3 * cell['fp32_operators_s']:.2f} ms; a switch of sides up to "
                      f"{1e3 * max(cell['switches_s'], default=0.0):.3f} ms", highlight=False)
    for cell in cells:
        sides = []
        for label, side in (("FP32", "fp32"), ("int8", "int8")):
            watts = "" if cell[f"{side}_w"] is None else f", {cell[f'{side}_w']:.3g} W"
            sides.append(f"{label} {human_seconds(cell[f'{side}_step_s'])} "
                         f"({cell[f'{side}_samples_per_s']:.4g} samples/s{watts})")
        console.print(f"{cell['model']}, batch {cell['batch_size']}: a step in {', '.join(sides)}, ratio "
                      f"{human_ratio(cell['fp32_step_s'] / cell['int8_step_s'])}", soft_wrap=True, highlight=False)
    link = document["link"]
    if link is not None:
        console.print(f"link to {escape(link['peer'])}: {human_bytes(link['bytes_per_s']['value'])}/s, round trip "
                      f"{human_seconds(link['round_trip_s']['value'])}, a message "
                      f"{human_seconds(link['message_s']['value'])}", soft_wrap=True, highlight=False)
    for note in document["notes"]:
        console.print(f"note: {escape(note)}", soft_wrap=True, highlight=False)


def print_findings(console: Console, findings: Sequence[Mapping[str, Any]]) -> None:
    """Show what `doctor` found."""
    colours = {"ok": "green", "missing": "yellow", "broken": "red"}
    for finding in findings:
        console.print(f"[{colours[finding['status']]}]{finding['status']:8}[/]{finding['name']:24}"
                      f"{escape(finding['detail'])}", soft_wrap=True, highlight=False)
        if finding["remedy"]:
            console.print(f"{'':32}-> {escape(finding['remedy'])}", soft_wrap=True, highlight=False)


def _print_question(console: Console, scenario: Scenario) -> None:
    if scenario.question:
        console.print(f"[italic]{escape(scenario.question)}[/]")


def _print_claims(console: Console, expectations: Sequence[Mapping[str, Any]]) -> None:
    words = {True: "[green]holds[/]", False: "[bold red]FAILS[/]", None: "[dim]open: its other strategy did not run[/]"}
    for claim in expectations:
        observed = "" if claim["observed"] is None else f", observed {claim['observed']:.6g}"
        console.print(f"{words[claim['holds']]}  {claim['name']} = {claim['expected']:g}{observed}")


def _share(part: float, whole: Mapping[str, float]) -> str:
    total = sum(whole.values())
    return percent(part / total) if total else "-"

