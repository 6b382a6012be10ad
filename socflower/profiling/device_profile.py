"""`socflower profile`: measure this device, cell by cell, and write a device profile."""

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
_MAX_SAMPLES = 100_000  # of a batch; more than any supported device holds
_MAX_REPEATS = 10_000
_IDLE_S = 2.0
_DIGITS = 5  # of figures in the profile; runs do not agree on more
_MEASURED, _ASSUMED = "measured: ", "assumption: "

OnCell = Callable[[str, int, int], None]
"""Gets the next cell, the number of finished cells and their total number."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ProfileRequest:
    """The measurements that `socflower profile` makes, validated before the first of them."""

    models: tuple[str, ...] = DEFAULT_MODELS
    data: str = "cifar10"
    batch_sizes: tuple[int, ...] = DEFAULT_BATCH_SIZES
    num_threads: int = 1
    kernel: str = ""
    repeats: int = 5
    name: str = ""  # of the device; "" is the host's
    like: str = ""  # device of the catalogue for what is not measured; "": by the architecture
    peer: str = ""  # HOST:PORT of a machine that runs `socflower profile --serve PORT`
    accelerator: str = "auto"  # device of torch that is measured beside the CPU, or "none"

    def __post_init__(self) -> None:
        if min(*self.batch_sizes, self.num_threads, self.repeats) < 1:
            raise ConfigError(
                f"profile: batch sizes, threads and repeats must be 1 or more, got "
                f"{list(self.batch_sizes)}, {self.num_threads}, {self.repeats}"
            )
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
        """Return the device that is measured beside the CPU; `ConfigError` if this machine does not have it."""
        if self.accelerator == "none":
            return None
        found = resolve_device(self.accelerator, "--accelerator")
        if found.type == "cpu" and self.accelerator != AUTO:
            raise ConfigError(
                f"--accelerator {self.accelerator}: the CPU is measured anyway; use none, or auto"
            )
        return None if found.type == "cpu" else found


def require_own_name(name: str) -> None:
    """Raise `ConfigError` for an invalid name of a user's device."""
    if not NAME_PATTERN.fullmatch(name):
        raise ConfigError(f"--name {name}: must be made of letters, digits, - and _")
    if name in device_names():
        raise ConfigError(
            f"--name {name}: is a name of the catalogue; give yours another one, as in my-{name}"
        )


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
    existing_profile(out, request.name or host_name())  # raises before the lock file is created
    with FolderLock(out.with_name(f".{out.name}.lock"), f"--out {out}"):
        return _profile(request, out, on_cell, root)


def _profile(
    request: ProfileRequest, out: Path | None, on_cell: OnCell, root: Path
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
    link = probe(*parse_peer(request.peer)) if request.peer else None
    meter = find_power_meter(root)
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
    figures = {
        "memory_bytes_per_s": store.host_figure(
            "memory_bytes_per_s",
            lambda: update_bytes_per_s(at.num_threads, accelerator or torch.device("cpu")),
        ),
        "idle_w": None
        if meter is None
        else store.host_figure("idle_w", lambda: mean_watts(meter, lambda: time.sleep(_IDLE_S))),
    }
    table = _device_table(
        store.cells_by_model(),
        at,
        figures,
        like=request.like or similar_device(),
        meter=meter,
        usable_cores=num_cores(),
    )
    link_table = None if link is None else _link_table(link)
    if before is not None:
        table = _with_edits(before["device"][name], table)
        link_table = link_table or before.get("link")
    document = {
        "schema": 1,
        "device": {name: table},
        **({"link": link_table} if link_table else {}),
    }
    read_table(DeviceFile, document, "profile")
    if out is not None:
        write_file(out, toml_text(document, comment=_comment(at, out)))
    cells = [cell for cell in (store.find(*key) for key in wanted) if cell is not None]
    return {
        "schema": SCHEMA,
        "name": name,
        "machine": _machine(meter, at.accelerator),
        "cells": cells,
        "link": link_table,
        "device": {name: table},
        "notes": _notes(
            request, store, num_kept=len(wanted) - len(missing), num_cells=len(wanted), table=table
        ),
    }


def published_device(name: str, new_name: str = "") -> dict[str, Any]:
    """Return the document of `socflower profile --device`: a device of the catalogue, with its sources."""
    table = device_table(name)
    if new_name:
        require_own_name(new_name)
    return {
        "schema": SCHEMA,
        "name": new_name or name,
        "machine": None,
        "cells": [],
        "link": None,
        "device": {new_name or name: table},
        "notes": [],
    }


def published_toml(document: Mapping[str, Any], source: str) -> str:
    """Return the profile file of a `published_device` document; `source` is the catalogue's name."""
    comment = (
        f"The device {source} of socflower's catalogue, as a template. Change figures and give the origin of\n"
        'yours in their sources; a cluster names this file with `device = "FILE.toml"`.'
    )
    if document["name"] == source:
        comment += f"\nGive it a name of its own: a cluster does not take a second {source}."
    return toml_text({"schema": 1, "device": document["device"]}, comment=comment)


def write_published(text: str, out: Path, name: str) -> None:
    """Write a template; `ConfigError` if the file exists and is not a profile of that device."""
    existing_profile(out, name)
    write_file(out, text)


def existing_profile(out: Path, name: str) -> dict[str, Any] | None:
    """Return the document of the existing profile at `out`, or None; `ConfigError` if it must not be replaced."""
    if out.suffix != ".toml":
        raise ConfigError(
            f"--out {out}: must end in .toml, by which clusters distinguish a file from a name"
        )
    if not out.parent.is_dir():
        raise ConfigError(f"--out {out}: there is no folder {out.parent}; make it first")
    if not os.access(out.parent, os.W_OK):
        raise ConfigError(f"--out {out}: the folder {out.parent} cannot be written to")
    if not out.exists():
        return None
    try:
        profile = read_device_file(out)
    except ConfigError as error:
        raise ConfigError(
            f"--out {out}: is there and no device profile ({error}); name another file"
        ) from None
    if list(profile["device"]) != [name]:
        raise ConfigError(
            f"--out {out}: holds {', '.join(profile['device'])}, not {name}; set --name, or name another "
            "file"
        )
    return profile


def cell_file(out: Path) -> Path:
    """Return the file of a profile's finished cells."""
    return out.with_name(f"{out.name}.part.json")


def host_name() -> str:
    """Return a device name made from the host's name, distinct from the catalogue's names."""
    name = (
        re.sub(r"[^a-z0-9_]+", "-", platform.node().partition(".")[0].lower()).strip("-")
        or "this-machine"
    )
    return f"my-{name}" if name in device_names() else name


def similar_device() -> str:
    """Return the catalogue's device that is most similar to this machine, by architecture alone."""
    return (
        "x86-core"
        if platform.machine().lower() in ("x86_64", "amd64", "i386", "i686")
        else "raspberry-pi-4b"
    )


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
    lent, lent_device = device_table(like), device(like)
    threads = (
        f"{at.num_threads} thread{'s' if at.num_threads > 1 else ''}, {date.today().isoformat()}"
    )
    table = {key: _assumed(lent[key], like) for key in DEVICE_FIGURES}
    table["memory_bytes"] = _measured(psutil.virtual_memory().total, "memory of the system")
    if figures["memory_bytes_per_s"]:
        table["memory_bytes_per_s"] = _measured(
            figures["memory_bytes_per_s"],
            f"SGD with momentum of torch {at.torch} on {at.accelerator}, {date.today().isoformat()}"
            if at.accelerator
            else f"SGD with momentum of torch {at.torch}, {threads}",
        )
    if figures["idle_w"] and meter is not None:
        table["idle_w"] = _measured(
            figures["idle_w"], f"{meter.source}, {date.today().isoformat()}"
        )
    # First, since torch trains on it unless it is told otherwise.
    gpu = (
        {}
        if not at.accelerator
        else {
            "gpu": _processor_table(
                models,
                "gpu",
                f"torch {at.torch} on {at.accelerator}",
                lent["processor"].get("gpu", lent["processor"][lent_device.default_processor])[
                    "active_w"
                ],
                like,
                meter,
            )
        }
    )
    table["processor"] = {
        **gpu,
        "cpu": _processor_table(
            models,
            "fp32",
            f"torch {at.torch}",
            lent["processor"][lent_device.default_processor]["active_w"],
            like,
            meter,
        ),
        "cpu-int8": _processor_table(
            models,
            "int8",
            at.kernel,
            lent["processor"][lent_device.int8_processor or lent_device.default_processor][
                "active_w"
            ],
            like,
            meter,
        ),
    }
    # FP32 and int8 can run at the same time only if there are cores for the threads of both.
    if 2 * at.num_threads > usable_cores:
        table["processor"]["cpu-int8"]["shares"] = "cpu"
    return table


def _processor_table(
    models: Mapping[str, Sequence[Mapping[str, Any]]],
    side: str,
    what: str,
    lent_w: Mapping[str, Any],
    like: str,
    meter: PowerMeter | None,
) -> dict[str, Any]:
    tables: dict[str, dict[str, Any]] = {}
    largest = {name: cells[-1] for name, cells in models.items()}
    for name, cells in models.items():
        last = largest[name]
        threads = f"{last['num_threads']} thread{'s' if last['num_threads'] > 1 else ''}"
        tables[name] = {
            **_measured(
                last["training_flops"] * last["batch_size"] / last[f"{side}_step_s"],
                f"{what}, {threads}, {last['measured_on']}; {last['data']}, batch {last['batch_size']}",
            ),
            "batch": [cell["batch_size"] for cell in cells],
            "step_s": [_rounded(cell[f"{side}_step_s"]) for cell in cells],
            **({} if side == "gpu" else {"layer": _layer_tables(cells, side)}),
        }
    rate = statistics.geometric_mean(table["value"] for table in tables.values())
    day = max(cell["measured_on"] for cell in largest.values())
    watts = [cell[f"{side}_w"] for cell in largest.values() if cell[f"{side}_w"] is not None]
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
    table = {
        "peer": link.peer,
        "bytes_per_s": _measured(
            link.bytes_per_s,
            f"{source}; the slower of {link.upload_bytes_per_s / 1e6:.4g} MB/s out and "
            f"{link.download_bytes_per_s / 1e6:.4g} MB/s in",
        ),
        "round_trip_s": _measured(link.round_trip_s, source),
        "message_s": _measured(
            link.message_s, f"{source}; half the round trip of 4 KB, less its bytes"
        ),
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
            merged[key] = {
                **after[key],
                **{
                    name: _with_edits(table, after[key].get(name, table))
                    for name, table in old.items()
                },
            }
        elif (
            isinstance(old, Mapping)
            and key != "flops_per_s"
            and not str(old.get("source", _MEASURED)).startswith((_MEASURED, _ASSUMED))
        ):
            merged[key] = old
    return merged


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
        notes.append(
            f"earlier cells were measured under other settings ({'; '.join(store.dropped)}) and are left out"
        )
    if num_kept:
        notes.append(
            f"{num_kept} of {num_cells} cells were measured before; delete {store.path} to measure them anew"
        )
    if any(
        str(processor["active_w"]["source"]).startswith(_ASSUMED)
        for processor in table["processor"].values()
    ):
        notes.append(
            f"this machine exposes no power: watts are those of {request.like or similar_device()} (--like)"
        )
    return notes


def _comment(at: Conditions, out: Path) -> str:
    return (
        f"Measured by `socflower profile` on {at.processor}. A cluster file beside it names it with\n"
        f'`device = "{out.name}"`. Figures may be edited: one whose source begins neither with "measured: "\n'
        'nor with "assumption: " stays when the device is measured again, and so does an added processor;\n'
        "measured rates do not."
    )


def _rounded(value: float) -> float:
    return float(f"{value:.{_DIGITS}g}")


def _measured(value: float, source: str) -> dict[str, Any]:
    return figure(_rounded(value), _MEASURED + source)
