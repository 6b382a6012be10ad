"""`socflower profile`: measures this device, cell by cell, and writes a device profile."""

import os
import platform
import re
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

import psutil
import torch

from socflower import _int8
from socflower.cluster import device, device_names
from socflower.cluster.device_catalog import (
    DEVICE_FIGURES,
    NAME_PATTERN,
    DeviceFile,
    LinkTable,
    device_table,
    figure,
    read_device_file,
    toml_text,
)
from socflower.engines.names import MAX_WORKERS, num_cores, require_count
from socflower.errors import ConfigError
from socflower.model_graph.torch_device import AUTO, resolve_device
from socflower.profiling.cells import (
    CellStore,
    Conditions,
    build_module,
    conditions,
    measure_cell,
    processor_name,
    update_bytes_per_s,
    write_file,
)
from socflower.profiling.link_probe import LinkFigures, parse_peer, probe
from socflower.profiling.power_meter import PowerMeter, find_power_meter, mean_watts
from socflower.toml_file import read_table
from socflower.wire.folders import FolderLock

SCHEMA = 2
DEFAULT_MODELS = ("vgg11",)
DEFAULT_BATCH_SIZES = (1, 8, 64)
# Samples of a batch; no supported device holds more.
_MAX_SAMPLES = 100_000
_MAX_REPEATS = 10_000
_IDLE_S = 2.0
# Of figures in the profile; runs do not agree on more digits.
_DIGITS = 5
_MEASURED, _ASSUMED = "measured: ", "assumption: "

OnCell = Callable[[str, int, int], None]
"""Called with the next cell's name, the number of finished cells and the number of all cells."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ProfileRequest:
    """The measurements of `socflower profile`, validated before the first of them."""

    models: tuple[str, ...] = DEFAULT_MODELS
    data: str = "cifar10"
    batch_sizes: tuple[int, ...] = DEFAULT_BATCH_SIZES
    num_threads: int = 1
    kernel: str = ""
    repeats: int = 5
    # Of the device; "" is the host's name.
    name: str = ""
    # The catalogue's device for figures that are not measured; "": by the architecture.
    like: str = ""
    # HOST:PORT of a machine that runs `socflower profile --serve PORT`.
    peer: str = ""
    # The device of torch that is measured beside the CPU, or "none".
    accelerator: str = "auto"

    def __post_init__(self) -> None:
        for option, values, most in (
            ("--batch-size", self.batch_sizes, _MAX_SAMPLES),
            ("--threads", (self.num_threads,), MAX_WORKERS),
            ("--repeats", (self.repeats,), _MAX_REPEATS),
        ):
            for value in values:
                require_count(option, value, 1, most)
        if self.name:
            require_own_name(self.name)
        if self.like:
            device(self.like)
        if self.peer:
            parse_peer(self.peer)
        self.accelerator_device()
        for model in self.models:
            build_module(model, self.data)

    def accelerator_device(self) -> torch.device | None:
        """Return the device that is measured beside the CPU, or None; raises `ConfigError` if it does not exist."""
        if self.accelerator == "none":
            return None
        found = resolve_device(self.accelerator, "--accelerator")
        if found.type == "cpu" and self.accelerator != AUTO:
            raise ConfigError("--accelerator cpu: the CPU is measured anyway; use none, or auto")
        return None if found.type == "cpu" else found


def require_own_name(name: str) -> None:
    """Raise `ConfigError` for an invalid name of a user's device."""
    if not NAME_PATTERN.fullmatch(name):
        raise ConfigError(f"--name {name}: use letters, digits, - and _")
    if name in device_names():
        raise ConfigError(f"--name {name}: is in the catalogue; use another one, as in my-{name}")


def profile_device(
    request: ProfileRequest,
    out: Path | None = None,
    *,
    on_cell: OnCell = lambda text, done, total: None,
    root: Path = Path("/"),
) -> dict[str, Any]:
    """Measure missing cells, write the profile to `out`, and return the document of `socflower profile`.

    Each finished cell is written to `out` + ".part.json". Power meters are searched for below `root`.
    """
    if out is None:
        return _profile(request, None, on_cell, root)
    # Raises before the lock file is created.
    existing_profile(out, request.name or host_name())
    with FolderLock(out.with_name(f".{out.name}.lock"), f"--out {out}"):
        return _profile(request, out, on_cell, root)


def _profile(
    request: ProfileRequest,
    out: Path | None,
    on_cell: OnCell,
    root: Path,
) -> dict[str, Any]:
    name = request.name or host_name()
    before = None if out is None else existing_profile(out, name)
    accelerator = request.accelerator_device()
    at = conditions(
        kernel=request.kernel,
        num_threads=request.num_threads,
        repeats=request.repeats,
        accelerator=accelerator,
    )
    store = CellStore(None if out is None else cell_file(out), at)
    # The link first, so that a missing peer is reported at once and not after minutes.
    link = None if not request.peer else _link_table(probe(*parse_peer(request.peer)))
    meter = find_power_meter(root)
    wanted, num_missing = _measure_cells(request, store, at, meter, accelerator, on_cell)
    table = _device_table(
        store.cells_by_model(),
        at,
        _host_figures(store, at, meter, accelerator),
        like=request.like or similar_device(),
        meter=meter,
        usable_cores=num_cores(),
    )
    if before is not None:
        table = _with_edits(before["device"][name], table)
        link = link or before.get("link")
    document = {"schema": 1, "device": {name: table}}
    if link:
        document["link"] = link
    read_table(DeviceFile, document, "profile")
    if out is not None:
        write_file(out, toml_text(document, comment=_comment(at, out)))
    cells = [store.find(*key) for key in wanted]
    num_kept = len(wanted) - num_missing
    return {
        "schema": SCHEMA,
        "name": name,
        "machine": _machine(meter, at.accelerator),
        "cells": [cell for cell in cells if cell is not None],
        "link": link,
        "device": {name: table},
        "notes": _notes(request, store, num_kept=num_kept, num_cells=len(wanted), table=table),
    }


def _measure_cells(
    request: ProfileRequest,
    store: CellStore,
    at: Conditions,
    meter: PowerMeter | None,
    accelerator: torch.device | None,
    on_cell: OnCell,
) -> tuple[list[tuple[str, str, int]], int]:
    """Measure missing cells; return the keys of all wanted cells and the number of cells that were missing."""
    wanted = [
        (model, request.data, batch)
        for model in dict.fromkeys(request.models)
        for batch in sorted(set(request.batch_sizes))
    ]
    missing = [key for key in wanted if store.find(*key) is None]
    for done, (model, data, batch) in enumerate(missing):
        on_cell(f"{model}, batch {batch}", done, len(missing))
        store.add(measure_cell(model, data, batch, at, meter, accelerator))
    on_cell("", len(missing), len(missing))
    return wanted, len(missing)


def _host_figures(
    store: CellStore,
    at: Conditions,
    meter: PowerMeter | None,
    accelerator: torch.device | None,
) -> dict[str, float | None]:
    """Return the figures of the whole machine; missing ones are measured."""
    device_ = accelerator or torch.device("cpu")
    figures: dict[str, float | None] = {
        "memory_bytes_per_s": store.host_figure(
            "memory_bytes_per_s", lambda: update_bytes_per_s(at.num_threads, device_)
        ),
        "idle_w": None,
    }
    if meter is not None:
        figures["idle_w"] = store.host_figure(
            "idle_w", lambda: mean_watts(meter, lambda: time.sleep(_IDLE_S))
        )
    return figures


def published_device(name: str, new_name: str = "") -> dict[str, Any]:
    """Return the document of `socflower profile --device`: a device of the catalogue, with its sources."""
    if new_name:
        require_own_name(new_name)
    own = new_name or name
    return {
        "schema": SCHEMA,
        "name": own,
        "machine": None,
        "cells": [],
        "link": None,
        "device": {own: device_table(name)},
        "notes": [],
    }


def published_toml(document: Mapping[str, Any], source: str) -> str:
    """Return the profile file of a `published_device` document; `source` is the catalogue's name."""
    comment = (
        f"The device {source} of socflower's catalogue, as a template. Change figures, and state the origin of\n"
        'yours as their source. A cluster names this file with `device = "FILE.toml"`.'
    )
    if document["name"] == source:
        comment += f"\nGive it a name of its own: a cluster does not take a second {source}."
    return toml_text({"schema": 1, "device": document["device"]}, comment=comment)


def write_published(text: str, out: Path, name: str) -> None:
    """Write a template; raises `ConfigError` if the file exists and is not a profile of that device."""
    existing_profile(out, name)
    write_file(out, text)


def existing_profile(out: Path, name: str) -> dict[str, Any] | None:
    """Return the document of the existing profile at `out`, or None.

    Raises `ConfigError` for a file that must not be replaced, or cannot be written.
    """
    if out.suffix != ".toml":
        raise ConfigError(f"--out {out}: must end in .toml, to differ from a device's name")
    if not os.access(out.parent, os.W_OK):
        raise ConfigError(f"--out {out}: the folder {out.parent} is missing or cannot be written")
    if not out.exists():
        return None
    try:
        profile = read_device_file(out)
    except ConfigError as error:
        raise ConfigError(
            f"--out {out}: exists and is no device profile ({error}); name another file"
        ) from None
    if list(profile["device"]) != [name]:
        raise ConfigError(f"--out {out}: holds {[*profile['device']]}, not {name}; set --name")
    return profile


def cell_file(out: Path) -> Path:
    """Return the file of a profile's finished cells."""
    return out.with_name(f"{out.name}.part.json")


def host_name() -> str:
    """Return a device name made from the host's name, distinct from the catalogue's names."""
    host = platform.node().partition(".")[0].lower()
    name = re.sub(r"[^a-z0-9_]+", "-", host).strip("-") or "this-machine"
    return f"my-{name}" if name in device_names() else name


def similar_device() -> str:
    """Return the catalogue's device that is most similar to this machine, by architecture alone."""
    is_x86 = platform.machine().lower() in ("x86_64", "amd64", "i386", "i686")
    return "x86-core" if is_x86 else "raspberry-pi-4b"


def _device_table(
    models: Mapping[str, Sequence[Mapping[str, Any]]],
    at: Conditions,
    figures: Mapping[str, float | None],
    *,
    like: str,
    meter: PowerMeter | None,
    usable_cores: int,
) -> dict[str, Any]:
    """Return the `[device.NAME]` table: measured figures of the cells, and those of `like` for the rest."""
    lent, lent_device, today = device_table(like), device(like), date.today().isoformat()
    table = {key: _assumed(lent[key], like) for key in DEVICE_FIGURES}
    table["memory_bytes"] = _measured(psutil.virtual_memory().total, "memory of the system")
    if figures["memory_bytes_per_s"]:
        where = f" on {at.accelerator}" if at.accelerator else f", {_threads(at.num_threads)}"
        source = f"SGD with momentum of torch {at.torch}{where}, {today}"
        table["memory_bytes_per_s"] = _measured(figures["memory_bytes_per_s"], source)
    if figures["idle_w"] and meter is not None:
        table["idle_w"] = _measured(figures["idle_w"], f"{meter.source}, {today}")
    processors, default = lent["processor"], lent_device.default_processor
    of_int8 = lent_device.int8_processor or default
    sides = [
        ("cpu", "fp32", f"torch {at.torch}", processors[default]),
        ("cpu-int8", "int8", at.kernel, processors[of_int8]),
    ]
    if at.accelerator:
        # First, since torch trains on it by default.
        on_gpu = processors.get("gpu", processors[default])
        sides.insert(0, ("gpu", "gpu", f"torch {at.torch} on {at.accelerator}", on_gpu))
    table["processor"] = {
        name: _processor_table(models, side, what, like_it["active_w"], like, meter)
        for name, side, what, like_it in sides
    }
    # FP32 and int8 can run at the same time only if there are cores for the threads of both.
    if 2 * at.num_threads > usable_cores:
        table["processor"]["cpu-int8"]["shares"] = "cpu"
    return table


def _threads(number: int) -> str:
    return f"{number} thread{'s' if number > 1 else ''}"


def _processor_table(
    models: Mapping[str, Sequence[Mapping[str, Any]]],
    side: str,
    what: str,
    lent_w: Mapping[str, Any],
    like: str,
    meter: PowerMeter | None,
) -> dict[str, Any]:
    """Return the table of a processor, measured as the `side` "fp32", "int8" or "gpu" of the cells."""
    tables: dict[str, dict[str, Any]] = {}
    largest = [cells[-1] for cells in models.values()]
    for (name, cells), last in zip(models.items(), largest, strict=True):
        batch, step_s = last["batch_size"], last[f"{side}_step_s"]
        measured = f"{_threads(last['num_threads'])}, {last['measured_on']}"
        source = f"{what}, {measured}; {last['data']}, batch {batch}"
        tables[name] = {
            **_measured(last["training_flops"] * batch / step_s, source),
            "batch": [cell["batch_size"] for cell in cells],
            "step_s": [_rounded(cell[f"{side}_step_s"]) for cell in cells],
        }
        if side != "gpu":
            tables[name]["layer"] = _layer_tables(cells, side)
    rate = statistics.geometric_mean(table["value"] for table in tables.values())
    day = max(cell["measured_on"] for cell in largest)
    watts = [cell[f"{side}_w"] for cell in largest if cell[f"{side}_w"] is not None]
    if watts and meter is not None:
        active_w = _measured(statistics.fmean(watts), f"{meter.source}, {day}")
    else:
        active_w = figure(lent_w["value"], f"assumption: as {like}; this machine exposes no power")
    return {
        "flops_per_s": _measured(rate, f"{what}, {day}; the geometric mean of {', '.join(tables)}"),
        "active_w": active_w,
        "number_format": "int8" if side == "int8" else "fp32",
        "model": tables,
    }


def _layer_tables(cells: Sequence[Mapping[str, Any]], side: str) -> list[dict[str, Any]]:
    """Return a table for every operator that the side can run, in order of execution."""
    tables = []
    for index, operator in enumerate(cells[-1]["operators"]):
        seconds = [cell["operators"][index][f"{side}_s"] for cell in cells]
        if all(value is not None for value in seconds):
            tables.append(
                {
                    "name": operator["name"],
                    "kind": operator["kind"],
                    "batch": [cell["batch_size"] for cell in cells],
                    "seconds": list(map(_rounded, seconds)),
                }
            )
    return tables


def _link_table(link: LinkFigures) -> dict[str, Any]:
    source = f"TCP to {link.peer}, {date.today().isoformat()}"
    out, into = link.upload_bytes_per_s / 1e6, link.download_bytes_per_s / 1e6
    of_rate = f"{source}; the slower of {out:.4g} MB/s out and {into:.4g} MB/s in"
    of_message = f"{source}; half the round trip of 4 KB, less its bytes"
    table = {
        "peer": link.peer,
        "bytes_per_s": _measured(link.bytes_per_s, of_rate),
        "round_trip_s": _measured(link.round_trip_s, source),
        "message_s": _measured(link.message_s, of_message),
    }
    read_table(LinkTable, table, "profile [link]")
    return table


def _assumed(entry: Mapping[str, Any], like: str) -> dict[str, Any]:
    source = str(entry["source"]).removeprefix(_ASSUMED)
    return figure(entry["value"], f"assumption: as {like}; {source}")


def _with_edits(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, Any]:
    """Return the new table with the user's edits of the old one: added processors, and figures with other sources.

    The rates of a measured processor are not kept, since they belong to its timings.
    """
    merged = dict(after)
    for key, old in before.items():
        if key == "processor":
            own = {
                name: _with_edits(table, after[key].get(name, table)) for name, table in old.items()
            }
            merged[key] = {**after[key], **own}
        elif isinstance(old, Mapping) and key != "flops_per_s" and _is_edited(old):
            merged[key] = old
    return merged


def _is_edited(entry: Mapping[str, Any]) -> bool:
    return not str(entry.get("source", _MEASURED)).startswith((_MEASURED, _ASSUMED))


def _machine(meter: PowerMeter | None, accelerator: str) -> dict[str, Any]:
    return {
        "host": platform.node(),
        "architecture": platform.machine(),
        "processor": processor_name(),
        "usable_cores": num_cores(),
        "memory_bytes": psutil.virtual_memory().total,
        "torch": torch.__version__,
        "accelerator": accelerator or None,
        "kernels_available": _int8.available_kernels(),
        "power": None if meter is None else meter.source,
    }


def _notes(
    request: ProfileRequest,
    store: CellStore,
    *,
    num_kept: int,
    num_cells: int,
    table: Mapping[str, Any],
) -> list[str]:
    notes = []
    if store.dropped:
        changes = "; ".join(store.dropped)
        notes.append(
            f"earlier cells were measured under other settings ({changes}) and are left out"
        )
    if num_kept:
        notes.append(
            f"{num_kept} of {num_cells} cells were measured before; delete {store.path} to measure them "
            "again"
        )
    watts = [processor["active_w"] for processor in table["processor"].values()]
    if any(str(entry["source"]).startswith(_ASSUMED) for entry in watts):
        like = request.like or similar_device()
        notes.append(f"this machine exposes no power: watts are those of {like} (--like)")
    return notes


def _comment(at: Conditions, out: Path) -> str:
    return (
        f"Measured by `socflower profile` on {at.processor}. A cluster file beside it names it with\n"
        f'`device = "{out.name}"`. Figures may be edited. The next measurement keeps added processors, and\n'
        'figures whose source begins neither with "measured: " nor with "assumption: "; it replaces measured\n'
        "rates."
    )


def _rounded(value: float) -> float:
    return float(f"{value:.{_DIGITS}g}")


def _measured(value: float, source: str) -> dict[str, Any]:
    return figure(_rounded(value), _MEASURED + source)
