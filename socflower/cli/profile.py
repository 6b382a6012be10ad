"""`socflower profile`: measure this device, and write a profile that planners read."""

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from socflower.cli.options import Json, mistakes_name_file, refuse_all_but, refuse_unread
from socflower.cli.process import prints_to_stderr
from socflower.cli.terminal import ERR, OUT, print_json, print_line, print_notice, step_progress
from socflower.engines.names import require_count
from socflower.errors import ConfigError
from socflower.quantities import counted, human_bytes, human_ratio, human_seconds


def profile(
    context: typer.Context,
    model: Annotated[
        list[str] | None, typer.Option(help="Model that is timed; repeatable. Default vgg11.")
    ] = None,
    data: Annotated[
        str, typer.Option(help="Data set whose image shape is used; not loaded.")
    ] = "cifar10",
    batch_size: Annotated[
        list[int] | None, typer.Option(help="Images per step; repeatable. Default 1, 8 and 64.")
    ] = None,
    threads: Annotated[int, typer.Option(help="Threads of both sides.")] = 1,
    kernel: Annotated[
        str, typer.Option(help="Int8 kernel path; default the best, or SOCFLOWER_KERNEL.")
    ] = "",
    repeats: Annotated[
        int, typer.Option(help="Runs per step and operator, of which the median counts.")
    ] = 5,
    name: Annotated[str, typer.Option(help="Name of the device; default the host's.")] = "",
    like: Annotated[
        str,
        typer.Option(
            help="Device of the catalogue for what is not measured; default by "
            "architecture: x86-core or raspberry-pi-4b."
        ),
    ] = "",
    out: Annotated[
        Path | None,
        typer.Option(
            help="File for the device profile, FILE.toml. What is there already is "
            "not measured again."
        ),
    ] = None,
    accelerator: Annotated[
        str,
        typer.Option(
            help="Device of torch to measure beside the CPU: auto, cuda, cuda:1, mps; or none."
        ),
    ] = "auto",
    peer: Annotated[
        str, typer.Option(help="HOST:PORT of a machine that runs --serve: measure the link to it.")
    ] = "",
    serve: Annotated[
        int | None,
        typer.Option(
            help="Answer link probes on this port until interrupted, and measure nothing."
        ),
    ] = None,
    device: Annotated[
        str | None, typer.Option(help="Print a device of the catalogue instead, as a template.")
    ] = None,
    layers: Annotated[
        Path | None,
        typer.Option(
            help="Measure the layers of a pipeline's SCENARIO instead, for its "
            "[pipeline] profiles; --name is its device."
        ),
    ] = None,
    int8: Annotated[
        bool, typer.Option("--int8", help="With --layers: in int8, for int8_socs.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Measure this device: steps and operators in int8 and FP32, power, a link; write a profile that planners read."""
    refuse_unread(context, {})
    if serve is not None:
        refuse_all_but(context, "serve", because="--serve only answers")
        require_count("--serve", serve, 0, 65535)
        from socflower.profiling.link_probe import serve as serve_probes

        try:
            serve_probes(
                serve,
                lambda port: OUT.print(f"answering link probes on port {port}; end with Ctrl-C"),
            )
        except KeyboardInterrupt:
            raise typer.Exit from None
        return

    from socflower.profiling import device_profile as profiling

    if device is not None:
        refuse_all_but(
            context,
            "device",
            "name",
            "out",
            "as_json",
            because="--device prints a device of the catalogue",
        )
        document = profiling.published_device(device, name)
        text = profiling.published_toml(document, device)
        if out is not None:
            profiling.write_published(text, out, document["name"])
        if as_json:
            print_json(document)
        elif out is None:
            sys.stdout.write(text)  # not through rich, which would wrap it
        else:
            print_line(f"profile: {out}")
        return
    if layers is not None:
        refuse_all_but(
            context,
            "layers",
            "name",
            "out",
            "batch_size",
            "repeats",
            "threads",
            "accelerator",
            "int8",
            "as_json",
            because="--layers measures a pipeline's layers",
        )
        _profile_layers(
            layers,
            name,
            out,
            batch_size,
            repeats,
            threads,
            "none" if int8 and accelerator == "auto" else accelerator,
            as_json,
            int8,
        )
        return
    if int8:
        raise ConfigError("--int8 is for --layers; without it both sides are measured")
    request = profiling.ProfileRequest(
        models=tuple(model or profiling.DEFAULT_MODELS),
        data=data,
        batch_sizes=tuple(batch_size or profiling.DEFAULT_BATCH_SIZES),
        num_threads=threads,
        kernel=kernel,
        repeats=repeats,
        name=name,
        like=like,
        peer=peer,
        accelerator=accelerator,
    )
    with prints_to_stderr(), step_progress(ERR, disable=as_json) as bar:
        task = bar.add_task("profile", total=None)
        try:
            document = profiling.profile_device(
                request,
                out,
                on_cell=lambda text, done, total: bar.update(
                    task, description=text, completed=done, total=total
                ),
            )
        except KeyboardInterrupt:
            bar.stop()
            kept = (
                ""
                if out is None
                else (
                    f"; finished cells are kept in {profiling.cell_file(out)}: the same command "
                    "resumes"
                )
            )
            print_notice(f"interrupted{kept}")
            raise typer.Exit(130) from None
    if as_json:
        print_json(document)
    else:
        print_profile(OUT, document)
        if out is not None:
            print_line(f"profile: {out}")


def _profile_layers(
    scenario: Path,
    name: str,
    out: Path | None,
    batches: list[int] | None,
    repeats: int,
    threads: int,
    accelerator: str,
    as_json: bool,
    int8: bool,
) -> None:
    """Measure the layers of a pipeline scenario, and write or print them."""
    from socflower.pipeline.profiler.measuring import DEFAULT_BATCHES
    from socflower.scenario.layer_profiles import measured_profile, write_profile
    from socflower.scenario.schema.file import load_scenario
    from socflower.scenario.shipped import find_scenario

    scenario = find_scenario(scenario)
    loaded = load_scenario(scenario)
    if not name:
        raise ConfigError(
            "--layers needs --name: the device of the scenario's cluster that this machine is"
        )
    if out is None and not as_json:
        raise ConfigError("--layers needs --out FILE.json, or --json")
    with mistakes_name_file(loaded.name, scenario), prints_to_stderr():
        found = measured_profile(
            loaded,
            name,
            batches=batches or DEFAULT_BATCHES,
            repeats=repeats,
            threads=threads,
            accelerator=accelerator,
            arithmetic="int8" if int8 else "fp32",
        )
    if out is not None:
        write_profile(out, found)
    if as_json:
        print_json(found.model_dump(mode="json", by_alias=True))
        return
    for index, batch in enumerate(found.batches):
        print_line(
            f"batch {batch}: {counted(len(found.layers), 'layer')} forward "
            f"{human_seconds(sum(layer.forward_s[index] for layer in found.layers))}, backward "
            f"{human_seconds(sum(layer.backward_s[index] for layer in found.layers))}"
        )
    print_line(f"profile: {out}")


def print_profile(console: Console, document: Mapping[str, Any]) -> None:
    """Print each model's operators at its largest batch, then a line per cell, the link, and the notes."""
    cells = document["cells"]
    largest = {
        cell["model"]: cell for cell in sorted(cells, key=lambda cell: int(cell["batch_size"]))
    }
    for model in dict.fromkeys(cell["model"] for cell in cells):
        cell = largest[model]
        title = f"{model}, batch {cell['batch_size']}, int8 kernels {cell['kernel']}"
        table = Table(
            "operator", "kind", "int8 ms", "FP32 ms", "runs in", "images at a time", title=title
        )
        for entry in cell["operators"]:
            int8 = "none" if entry["int8_s"] is None else f"{1e3 * entry['int8_s']:.3f}"
            table.add_row(
                escape(entry["name"]),
                entry["kind"],
                int8,
                f"{1e3 * entry['fp32_s']:.3f}",
                entry["side"],
                str(entry["batch_block"] or "all"),
            )
        console.print(table)
        console.print(f"placement: {escape(cell['placement'])}", highlight=False)
        console.print(
            f"sum of the operators: {1e3 * cell['step_s']:.2f} ms, all in FP32 "
            f"{1e3 * cell['fp32_operators_s']:.2f} ms; a switch of sides up to "
            f"{1e3 * max(cell['switches_s'], default=0.0):.3f} ms",
            highlight=False,
        )
    for cell in cells:
        sides = []
        accelerated = [(f"FP32 on {cell['accelerator']}", "gpu")] if "accelerator" in cell else []
        for label, side in (("FP32", "fp32"), ("int8", "int8"), *accelerated):
            watts = "" if cell[f"{side}_w"] is None else f", {cell[f'{side}_w']:.3g} W"
            sides.append(
                f"{label} {human_seconds(cell[f'{side}_step_s'])} "
                f"({cell[f'{side}_samples_per_s']:.4g} samples/s{watts})"
            )
        # A cell of an earlier version has no memory.
        memory = (
            f", memory {human_bytes(cell['memory_bytes'])} in FP32"
            if "memory_bytes" in cell
            else ""
        )
        print_line(
            f"{cell['model']}, batch {cell['batch_size']}: a step in {', '.join(sides)}, ratio "
            f"{human_ratio(cell['fp32_step_s'] / cell['int8_step_s'])}{memory}",
            console,
        )
    link = document["link"]
    if link is not None:
        print_line(
            f"link to {link['peer']}: {human_bytes(link['bytes_per_s']['value'])}/s, round trip "
            f"{human_seconds(link['round_trip_s']['value'])}, a message "
            f"{human_seconds(link['message_s']['value'])}",
            console,
        )
    for note in document["notes"]:
        print_line(f"note: {note}", console)
