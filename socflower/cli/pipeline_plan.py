"""`socflower plan` of a pipeline: stages, devices, shares and memory, its time, and the time of other plans."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from socflower.cli.options import mistakes_name_file
from socflower.cli.process import prints_to_stderr
from socflower.cli.terminal import (
    ERR,
    OUT,
    exit_on_failed_claims,
    print_claims,
    print_json,
    print_text,
    step_progress,
)
from socflower.quantities import counted, human_bytes, human_joules, human_seconds

# Importing the planners takes long, so only the command does.
if TYPE_CHECKING:
    from socflower.scenario.schema.scenario_file import Scenario


# Closed forms that differ by less than this factor are shown as one.
_SAME = 1.005


def plan_pipeline_scenario(
    scenario: "Scenario", path: Path, out: Path | None, as_json: bool
) -> None:
    """Plan a scenario, print the plan, write it to `out`, and exit with 1 if a claim does not hold."""
    from socflower.scenario.pipeline_planning import plan_of_pipeline, write_plan

    with (
        mistakes_name_file(scenario.name, path),
        prints_to_stderr(),
        step_progress(ERR, disable=as_json) as bar,
    ):
        task = bar.add_task("reading the model", total=None)
        document, planned = plan_of_pipeline(
            scenario,
            on_step=lambda text, done, total: bar.update(
                task, description=text, completed=done, total=total
            ),
        )
        if out is not None:
            write_plan(scenario, document, planned, out)
    if as_json:
        print_json(document)
    else:
        print_pipeline_plan(OUT, document)
    exit_on_failed_claims(document["expectations"])


def print_pipeline_plan(console: Console, document: Mapping[str, Any]) -> None:
    """Print a plan's stages, prediction and peers."""
    print_text(document["work"], console)
    pipelines, predicted = document["pipelines"], document["predicted"]
    if len(pipelines) > 1:
        sizes = [each["micro_batch_size"] * each["num_micro_batches"] for each in pipelines]
        print_text(
            f"{counted(len(pipelines), 'pipeline')} side by side, {counted(sum(sizes), 'sample')} an update: "
            f"{_micro_batches(pipelines)}",
            console,
        )
    for number, pipeline in enumerate(pipelines):
        title = f"pipeline {number}: " if len(pipelines) > 1 else ""
        console.print(_stages(pipeline, f"{title}{_micro_batches([pipeline])}"))
    print_text(
        f"an update {human_seconds(predicted['step_s'])} ({_closed_form(predicted)}), "
        f"{predicted['samples_per_s']:.1f} samples/s, {human_joules(predicted['energy_j'])}, "
        f"{human_bytes(document['communication_bytes'])} sent",
        console,
    )
    epoch = human_seconds(predicted["epoch_s"])
    print_text(f"an epoch {epoch} and {human_joules(predicted['epoch_energy_j'])}", console)
    for row in document["peers"]:
        has_plan = row["step_s"] is not None
        text = f"{human_seconds(row['step_s'])} an update" if has_plan else "no plan"
        misfit = "" if row["fits"] else f", does not fit: {row['why_not']}"
        mark = "" if row["interval"] == 1 else f", models averaged every {row['interval']} updates"
        print_text(f"{row['name']}: {text}{mark}{misfit}", console, "dim")
    print_text(document["verdict"], console, "bold")
    for note in document["notes"]:
        print_text(f"note: {note}", console, "dim")
    print_claims(console, document["expectations"])


def _stages(pipeline: Mapping[str, Any], title: str) -> Table:
    """Return the devices of a pipeline's stages, with each one's share and memory."""
    heads = ("layers", "K", "device", "SoC", "share", "memory", "of")
    table = Table(*heads, header_style="bold", title=title, title_justify="left")
    for stage in pipeline["stages"]:
        named = (f"{stage['first_layer']} … {stage['last_layer']}", str(stage["in_flight"]))
        for member in stage["devices"]:
            table.add_row(
                *named,
                member["device"],
                str(member["soc"]),
                str(member["share"]),
                human_bytes(member["memory_bytes"]),
                human_bytes(member["budget_bytes"]),
            )
            named = ("", "")
    return table


def _micro_batches(pipelines: Sequence[Mapping[str, Any]]) -> str:
    """Return the micro-batches of an update, as "32 micro-batches of 3 + 5 samples" for pipelines side by side."""
    sizes = [pipeline["micro_batch_size"] for pipeline in pipelines]
    number = counted(pipelines[0]["num_micro_batches"], "micro-batch", "micro-batches")
    if len(sizes) == 1:
        return f"{number} of {counted(sizes[0], 'sample')}"
    return f"{number} of {' + '.join(map(str, sizes))} = {counted(sum(sizes), 'sample')}"


def _closed_form(predicted: Mapping[str, float]) -> str:
    """Return the time by the closed form, twice if sending in both directions at once makes a difference."""
    formula_s, duplex_s = predicted["formula_s"], predicted["duplex_s"]
    if formula_s <= _SAME * duplex_s:
        return f"closed form {human_seconds(formula_s)}"
    return (
        f"closed form {human_seconds(formula_s)} with the directions of a link one after the other, as in the "
        f"paper, {human_seconds(duplex_s)} with both at once, as simulated"
    )
