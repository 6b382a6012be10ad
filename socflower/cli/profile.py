"""`socflower profile`: measure this device, and write a profile that planners read."""

import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from socflower.cli.options import Json, mistakes_name_file, refuse_all_but, refuse_unread
from socflower.cli.process import prints_to_stderr
from socflower.cli.terminal import (
    ERR,
    OUT,
    print_json,
    print_line,
    print_notice,
    print_text,
    step_progress,
)
from socflower.engines.names import require_count
from socflower.errors import ConfigError
from socflower.quantities import counted, human_bytes, human_ratio, human_seconds

_READ_WITH_LAYERS = (
    *("layers", "name", "out", "batch_size", "repeats", "threads"),
    *("accelerator", "int8", "as_json"),
)


_Model = Annotated[
    list[str] | None, typer.Option(help="Model that is timed; repeatable. Default vgg11.")
]
_Data = Annotated[str, typer.Option(help="Data set whose image shape is used; not loaded.")]
_BatchSize = Annotated[
    list[int] | None, typer.Option(help="Images per step; repeatable. Default 1, 8 and 64.")
]
_Threads = Annotated[int, typer.Option(help="Threads of both sides.")]
_Kernel = Annotated[
    str, typer.Option(help="Int8 kernel path; default the best, or SOCFLOWER_KERNEL.")
]
_Repeats = Annotated[
    int, typer.Option(help="Runs per step and operator, of which the median counts.")
]
_Name = Annotated[str, typer.Option(help="Name of the device; default the host's.")]
_Like = Annotated[
    str,
    typer.Option(
        help="Device of the catalogue for what is not measured; default by "
        "architecture: x86-core or raspberry-pi-4b."
    ),
]
_Out = Annotated[
    Path | None,
    typer.Option(
        help="File for the device profile, FILE.toml. What is there already is not measured again."
    ),
]
_Accelerator = Annotated[
    str,
    typer.Option(
        help="Device of torch to measure beside the CPU: auto, cuda, cuda:1, mps; or none."
    ),
]
_Peer = Annotated[
    str, typer.Option(help="HOST:PORT of a machine that runs --serve: measure the link to it.")
]
_Serve = Annotated[
    int | None,
    typer.Option(help="Answer link probes on this port until interrupted, and measure nothing."),
]
_Device = Annotated[
    str | None, typer.Option(help="Print a device of the catalogue instead, as a template.")
]
_Layers = Annotated[
    Path | None,
    typer.Option(
        help="Measure the layers of a pipeline's SCENARIO instead, for its "
        "[pipeline] profiles; --name is its device."
    ),
]
_Int8 = Annotated[bool, typer.Option("--int8", help="With --layers: in int8, for int8_socs.")]


def profile(
    context: typer.Context,
    model: _Model = None,
    data: _Data = "cifar10",
    batch_size: _BatchSize = None,
    threads: _Threads = 1,
    kernel: _Kernel = "",
    repeats: _Repeats = 5,
    name: _Name = "",
    like: _Like = "",
    out: _Out = None,
    accelerator: _Accelerator = "auto",
    peer: _Peer = "",
    serve: _Serve = None,
    device: _Device = None,
    layers: _Layers = None,
    int8: _Int8 = False,
    as_json: Json = False,
) -> None:
    """Measure this device: steps and operators in int8 and FP32, power, a link; write a profile that planners read."""
    refuse_unread(context, {})
    if serve is not None:
        refuse_all_but(context, "serve", because="--serve only answers")
        _serve_probes(serve)
        return
    if device is not None:
        read = ("device", "name", "out", "as_json")
        refuse_all_but(context, *read, because="--device prints a device of the catalogue")
        _print_published(device, name, out, as_json)
        return
    if layers is not None:
        refuse_all_but(context, *_READ_WITH_LAYERS, because="--layers measures a pipeline's layers")
        settings = {
            "repeats": repeats,
            "threads": threads,
            "accelerator": "none" if int8 and accelerator == "auto" else accelerator,
            "arithmetic": "int8" if int8 else "fp32",
        }
        _profile_layers(layers, name, out, batch_size, settings, as_json)
        return
    if int8:
        raise ConfigError("--int8 is for --layers; without it both sides are measured")
    settings = {
        "data": data,
        "num_threads": threads,
        "kernel": kernel,
        "repeats": repeats,
        "name": name,
        "like": like,
        "peer": peer,
        "accelerator": accelerator,
    }
    document = _profile_here(model, batch_size, settings, out, show_progress=not as_json)
    if as_json:
        print_json(document)
        return
    print_profile(OUT, document)
    if out is not None:
        print_line(f"profile: {out}")


def _serve_probes(port: int) -> None:
    """Answer link probes until Ctrl-C."""
    from socflower.profiling.link_probe import serve

    require_count("--serve", port, 0, 65535)
    with suppress(KeyboardInterrupt):
        serve(
            port, lambda port: OUT.print(f"answering link probes on port {port}; end with Ctrl-C")
        )


def _print_published(device: str, name: str, out: Path | None, as_json: bool) -> None:
    """Write or print a device of the catalogue."""
    from socflower.profiling import device_profile as profiling

    document = profiling.published_device(device, name)
    text = profiling.published_toml(document, device)
    if out is not None:
        profiling.write_published(text, out, document["name"])
    if as_json:
        print_json(document)
    elif out is None:
        # Rich would wrap the text.
        sys.stdout.write(text)
    else:
        print_line(f"profile: {out}")


def _profile_here(
    models: list[str] | None,
    batch_sizes: list[int] | None,
    settings: Mapping[str, Any],
    out: Path | None,
    *,
    show_progress: bool,
) -> dict[str, Any]:
    """Measure this machine, write the profile to `out`, and return it."""
    from socflower.profiling import device_profile as profiling

    request = profiling.ProfileRequest(
        models=tuple(models or profiling.DEFAULT_MODELS),
        batch_sizes=tuple(batch_sizes or profiling.DEFAULT_BATCH_SIZES),
        **settings,
    )
    with prints_to_stderr(), step_progress(ERR, disable=not show_progress) as bar:
        task = bar.add_task("profile", total=None)

        def on_cell(text: str, done: int, total: int) -> None:
            bar.update(task, description=text, completed=done, total=total)

        try:
            return profiling.profile_device(request, out, on_cell=on_cell)
        # The bar would otherwise overwrite the notice.
        except KeyboardInterrupt:
            bar.stop()
            cells = None if out is None else profiling.cell_file(out)
            kept = f"; finished cells are kept in {cells}: the same command resumes"
            print_notice("interrupted" + (kept if cells else ""))
            raise typer.Exit(130) from None


def _profile_layers(
    scenario: Path,
    name: str,
    out: Path | None,
    batches: list[int] | None,
    settings: Mapping[str, Any],
    as_json: bool,
) -> None:
    """Measure the layers of a pipeline scenario, and write or print them."""
    from socflower.pipeline.profiler.measuring import DEFAULT_BATCHES
    from socflower.scenario.layer_measuring import measured_profile
    from socflower.scenario.layer_profiles import write_profile
    from socflower.scenario.schema.file import load_scenario
    from socflower.scenario.shipped import find_scenario

    scenario = find_scenario(scenario)
    loaded = load_scenario(scenario)
    if not name:
        raise ConfigError("--layers needs --name, this machine's device in the scenario's cluster")
    if out is None and not as_json:
        raise ConfigError("--layers needs --out FILE.json, or --json")
    with mistakes_name_file(loaded.name, scenario), prints_to_stderr():
        found = measured_profile(loaded, name, batches=batches or DEFAULT_BATCHES, **settings)
    if out is not None:
        write_profile(out, found)
    if as_json:
        print_json(found.model_dump(mode="json", by_alias=True))
        return
    for index, batch in enumerate(found.batches):
        forward_s = sum(layer.forward_s[index] for layer in found.layers)
        backward_s = sum(layer.backward_s[index] for layer in found.layers)
        print_line(
            f"batch {batch}: {counted(len(found.layers), 'layer')} forward "
            f"{human_seconds(forward_s)}, backward {human_seconds(backward_s)}"
        )
    print_line(f"profile: {out}")


def print_profile(console: Console, document: Mapping[str, Any]) -> None:
    """Print each model's operators at its largest batch, then a line per cell, the link, and the notes."""
    cells = document["cells"]
    by_batch = sorted(cells, key=lambda cell: int(cell["batch_size"]))
    largest = {cell["model"]: cell for cell in by_batch}
    for model in dict.fromkeys(cell["model"] for cell in cells):
        _print_operators(console, largest[model])
    for cell in cells:
        print_line(_cell_line(cell), console)
    link = document["link"]
    if link is not None:
        rate, round_trip_s, message_s = (
            link[key]["value"] for key in ("bytes_per_s", "round_trip_s", "message_s")
        )
        print_line(
            f"link to {link['peer']}: {human_bytes(rate)}/s, round trip "
            f"{human_seconds(round_trip_s)}, a message {human_seconds(message_s)}",
            console,
        )
    for note in document["notes"]:
        print_line(f"note: {note}", console)


def _print_operators(console: Console, cell: Mapping[str, Any]) -> None:
    """Print a cell's operators with the time of both sides, and the side on which the plan runs it."""
    title = f"{cell['model']}, batch {cell['batch_size']}, int8 kernels {cell['kernel']}"
    heads = ("operator", "kind", "int8 ms", "FP32 ms", "runs in", "images at a time")
    table = Table(*heads, title=title)
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
    print_text(f"placement: {cell['placement']}", console)
    switch_s = max(cell["switches_s"], default=0.0)
    print_text(
        f"sum of the operators: {1e3 * cell['step_s']:.2f} ms, all in FP32 "
        f"{1e3 * cell['fp32_operators_s']:.2f} ms; a switch of sides up to {1e3 * switch_s:.3f} ms",
        console,
    )


def _cell_line(cell: Mapping[str, Any]) -> str:
    """Return the line on a model at a batch size: a step, throughput and power of each side."""
    labels = {"fp32": "FP32", "int8": "int8"}
    if "accelerator" in cell:
        labels["gpu"] = f"FP32 on {cell['accelerator']}"
    sides = []
    for side, label in labels.items():
        step_s, rate, watts = (cell[f"{side}_{key}"] for key in ("step_s", "samples_per_s", "w"))
        power = "" if watts is None else f", {watts:.3g} W"
        sides.append(f"{label} {human_seconds(step_s)} ({rate:.4g} samples/s{power})")
    ratio = human_ratio(cell["fp32_step_s"] / cell["int8_step_s"])
    return (
        f"{cell['model']}, batch {cell['batch_size']}: a step in {', '.join(sides)}, ratio {ratio}, "
        f"memory {human_bytes(cell['memory_bytes'])} in FP32"
    )
