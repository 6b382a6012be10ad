"""`socflower profile`: a profile that clusters read, cells that are measured once, and templates of the catalogue."""

import json
import tomllib
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from socflower.cluster import device, device_names, load_cluster
from socflower.cluster.device import Device
from socflower.cluster.device_catalog import DeviceFile, figure, read_device_file, toml_text
from socflower.model_graph.layer_profile import profile_module
from socflower.profiling import cells as profile_cells
from socflower.profiling import device_profile
from socflower.profiling.cells import CellStore, Conditions, build_module, measure_cell
from socflower.profiling.device_profile import (
    ProfileRequest,
    cell_file,
    host_name,
    profile_device,
    published_device,
    published_toml,
)
from socflower.profiling.link_probe import ProbeServer, probe
from socflower.scenario.schema.file import (
    from_document,
    load_scenario,
    scenario_cluster,
    to_document,
)
from socflower.toml_file import read_table
from tests.command_line import Socflower
from tests.fake_device import MODULE, fake_device  # noqa: F401 - a fixture
from tests.one_line import refused


def device_in(path: Path, name: str) -> Device:
    return read_table(DeviceFile, read_device_file(path), "file").device[name].device(name)


SMALL = ProfileRequest(
    models=("lenet5",), data="digits", batch_sizes=(2, 8), repeats=1, name="mine", kernel="portable"
)
MODEL = "--model lenet5 --data digits"
SIZES = "--batch-size 2 --batch-size 8"
OPTIONS = f"{MODEL} {SIZES} --repeats 1 --name mine --kernel portable".split()


@pytest.fixture
def socflower(socflower: Socflower) -> Socflower:
    """`socflower profile`."""
    return lambda *arguments: socflower("profile", *arguments)


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "mine.toml"


@pytest.fixture(scope="module")
def cell() -> dict[str, Any]:
    """One real cell; the tests below change its key and figures."""
    at = profile_cells.conditions(kernel="portable", num_threads=1, repeats=1)
    return measure_cell("lenet5", "digits", 2, at, None)


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch, cell: dict[str, Any]) -> list[tuple[str, int]]:
    """What was measured, in order; the measuring itself is made up."""
    keys: list[tuple[str, int]] = []

    def measure(
        model: str, data: str, batch: int, at: Conditions, meter: object, accelerator: None
    ) -> dict[str, Any]:
        keys.append((model, batch))
        key = {"model": model, "data": data, "batch_size": batch, "num_threads": at.num_threads}
        steps = {"fp32_step_s": 0.1 * batch, "int8_step_s": 0.05 * batch}
        rates = {"fp32_samples_per_s": 10.0, "int8_samples_per_s": 20.0}
        return {**cell, **key, **steps, **rates}

    monkeypatch.setattr(device_profile, "measure_cell", measure)
    monkeypatch.setattr(device_profile, "update_bytes_per_s", lambda num_threads, device: 1e10)
    return keys


# ------------------------------------------------------------------------------------------- one real profile
def test_a_real_profile_is_read_by_planners(
    socflower: Socflower, tmp_path: Path, out: Path
) -> None:
    ran = socflower(*OPTIONS, "--out", "mine.toml", "--json")
    assert (ran.status, ran.err) == (0, "")
    document = json.loads(ran.out)
    assert (document["schema"], document["name"], document["link"]) == (2, "mine", None)
    assert document["machine"]["usable_cores"] >= 1
    assert "portable" in document["machine"]["kernels_available"]
    costs = profile_module(*build_module("lenet5", "digits"), "lenet5")
    cells = document["cells"]
    for entry, batch in zip(cells, (2, 8), strict=True):
        assert (entry["model"], entry["kernel"]) == ("lenet5", "portable")
        assert entry["batch_size"] == batch
        assert entry["fp32_samples_per_s"] == pytest.approx(batch / entry["fp32_step_s"])
        assert min(entry["int8_step_s"], entry["step_s"]) > 0
        assert entry["operators"] and entry["placement"]
        assert entry["memory_bytes"] == costs.training_memory_bytes(batch)
    assert tomllib.loads(out.read_text("utf-8"))["device"] == document["device"]
    (tmp_path / "rack.toml").write_text('[cluster]\ndevice = "mine.toml"\n')
    soc = load_cluster(tmp_path / "rack.toml").device_of(0)
    assert list(soc.processors) == ["cpu", "cpu-int8"]
    for processor in soc.processors.values():
        timings = processor.timings["lenet5"]
        assert timings.batches == (2, 8)
        measured_s = [entry[f"{processor.number_format}_step_s"] for entry in cells]
        assert timings.step_s == pytest.approx(measured_s, rel=1e-4)
        rate = cells[-1]["training_flops"] * 8 / timings.step_s[-1]
        assert processor.rate("lenet5") == pytest.approx(rate, rel=1e-3)
        names = [operator["name"] for operator in cells[0]["operators"]]
        assert [layer.name for layer in processor.layer_timings["lenet5"]] == names
    left = sorted(path.name for path in tmp_path.iterdir())
    assert left == ["mine.toml", "mine.toml.part.json", "rack.toml"]


def test_the_text_has_the_operators_a_line_per_cell_and_what_to_know(
    socflower: Socflower,
    measured: list[tuple[str, int]],
) -> None:
    ran = socflower(*OPTIONS, "--like", "jetson-nano")
    assert ran.status == 0
    # Operators are those of the largest batch.
    assert "convolution" in ran.out and "batch 8, int8 kernels portable" in ran.out
    assert "batch 2, int8 kernels" not in ran.out
    (line,) = (line for line in ran.out.splitlines() if line.startswith("lenet5, batch 2: "))
    for figures in ("FP32 200 ms", "10 samples/s", "int8 100 ms", "20 samples/s", "2.00×"):
        assert figures in line
    assert ran.out.count("jetson-nano") <= 1


# ------------------------------------------------------------------------------------------------- resuming
def test_only_what_is_missing_is_measured(measured: list[tuple[str, int]], out: Path) -> None:
    first = profile_device(SMALL, out)
    again = profile_device(SMALL, out)
    assert measured == [("lenet5", 2), ("lenet5", 8)]
    assert again["cells"] == first["cells"] and again["device"] == first["device"]
    assert any("2 of 2 cells" in note for note in again["notes"])
    profile_device(replace(SMALL, batch_sizes=(4,)), out)
    assert measured[2:] == [("lenet5", 4)]
    timings = device_in(out, "mine").processor("cpu").timings["lenet5"]
    assert timings.batches == (2, 4, 8)


def test_an_interrupt_loses_one_cell_and_leaves_no_profile(
    socflower: Socflower,
    measured: list[tuple[str, int]],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    measure = device_profile.measure_cell

    def interrupted(model: str, data: str, batch: int, *rest: Any) -> dict[str, Any]:
        if batch == 8:
            raise KeyboardInterrupt
        return measure(model, data, batch, *rest)

    monkeypatch.setattr(device_profile, "measure_cell", interrupted)
    ran = socflower(*OPTIONS, "--out", "mine.toml")
    assert ran.status == 130
    assert "mine.toml.part.json" in ran.err
    assert [path.name for path in tmp_path.iterdir()] == ["mine.toml.part.json"]
    monkeypatch.setattr(device_profile, "measure_cell", measure)
    assert socflower(*OPTIONS, "--out", "mine.toml").status == 0
    assert measured == [("lenet5", 2), ("lenet5", 8)]


@pytest.mark.parametrize("key", ["num_threads", "repeats"])
def test_cells_under_other_settings_are_measured_anew_and_that_is_said(
    measured: list[tuple[str, int]], out: Path, key: str
) -> None:
    profile_device(SMALL, out)
    document = profile_device(replace(SMALL, batch_sizes=(2,), **{key: 2}), out)
    assert measured[2:] == [("lenet5", 2)]
    assert f"{key} 1, now 2" in document["notes"][0]
    assert device_in(out, "mine").processor("cpu").timings["lenet5"].batches == (2,)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{}",
        "[]",
        '{"schema": 2, "conditions": {}, "host": {}, "cells": []}',
        '{"schema": 1, "conditions": [], "host": {}, "cells": []}',
        '{"schema": 1, "conditions": {}, "host": [], "cells": []}',
        '{"schema": 1, "conditions": {}, "host": {}, "cells": [{}]}',
    ],
)
def test_a_damaged_cell_file_is_named(out: Path, text: str) -> None:
    cell_file(out).write_text(text)
    refused(lambda: profile_device(SMALL, out), cell_file(out))
    assert not out.exists()


def test_of_a_model_on_two_data_sets_the_last_one_counts(cell: dict[str, Any]) -> None:
    store = CellStore(None, profile_cells.conditions(kernel="portable", num_threads=1, repeats=1))
    for data, batch in (("mnist", 4), ("digits", 8), ("digits", 2)):
        store.add({**cell, "data": data, "batch_size": batch})
    kept = [(entry["data"], entry["batch_size"]) for entry in store.cells_by_model()["lenet5"]]
    assert kept == [("digits", 2), ("digits", 8)]


# -------------------------------------------------------------------------------------------- what is in it
@pytest.mark.parametrize(("cores", "shares"), [(1, "cpu"), (2, None)])
def test_two_sides_share_silicon_where_there_are_no_cores_for_both(
    measured: list[tuple[str, int]],
    monkeypatch: pytest.MonkeyPatch,
    cores: int,
    shares: str | None,
) -> None:
    monkeypatch.setattr(device_profile, "num_cores", lambda: cores)
    processors = profile_device(SMALL)["device"]["mine"]["processor"]
    assert processors["cpu-int8"].get("shares") == shares


def test_watts_are_measured_where_the_machine_exposes_them_and_lent_where_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = replace(SMALL, batch_sizes=(1,), kernel="")
    assert profile_device(one, root=tmp_path)["machine"]["power"] is None
    rail = tmp_path / "sys/class/hwmon/hwmon0"
    rail.mkdir(parents=True)
    files = {"name": "ina3221", "power1_input": "6500000", "power1_label": "VDD_IN"}
    for name, content in files.items():
        (rail / name).write_text(content)
    monkeypatch.setattr(profile_cells, "_WATTS_S", 0.01)
    monkeypatch.setattr(device_profile, "_IDLE_S", 0.01)
    document = profile_device(one, root=tmp_path)
    table = document["device"]["mine"]
    processors = table["processor"].values()
    for entry in (table["idle_w"], *(processor["active_w"] for processor in processors)):
        assert entry["value"] == 6.5
        assert entry["source"].startswith("measured: hwmon ina3221, VDD_IN, ")
    assert document["cells"][0]["fp32_w"] == pytest.approx(6.5)
    assert document["notes"] == []


def test_every_figure_says_where_it_is_from(
    measured: list[tuple[str, int]], tmp_path: Path
) -> None:
    request = replace(SMALL, like="jetson-nano")
    table = profile_device(request, root=tmp_path)["device"]["mine"]
    processors = table["processor"]
    assumed = {"network_w": (table["network_w"], 0.5), "cpu": (processors["cpu"]["active_w"], 10.0)}
    for entry, value in assumed.values():
        assert entry["value"] == value
        assert entry["source"].startswith("assumption: as jetson-nano; ")
    for entry in (table["memory_bytes"], processors["cpu-int8"]["model"]["lenet5"]):
        assert entry["source"].startswith("measured: ")


@pytest.mark.usefixtures("fake_device")
def test_an_accelerator_is_measured_beside_the_cpu_and_trains_by_default(out: Path) -> None:
    settled, asked = MODULE.num_synchronisations, replace(SMALL, batch_sizes=(2,))
    document = profile_device(asked, out)
    (entry,) = document["cells"]
    assert document["machine"]["accelerator"] == entry["accelerator"] == "fake:0"
    # Three steps at least, and the updates.
    assert MODULE.num_synchronisations >= settled + 3 + 5
    mine = device_in(out, "mine")
    assert list(mine.processors) == ["gpu", "cpu", "cpu-int8"] and mine.default_processor == "gpu"
    (step_s,) = mine.processor("gpu").timings["lenet5"].step_s
    assert step_s == pytest.approx(entry["gpu_step_s"], rel=1e-4)
    table = document["device"]["mine"]
    for found in (table["memory_bytes_per_s"], table["processor"]["gpu"]["flops_per_s"]):
        assert found["source"].startswith("measured: ") and "on fake:0" in found["source"]
    without = profile_device(replace(asked, accelerator="none"), out)
    assert "accelerator fake:0, now none" in without["notes"][0]
    assert without["machine"]["accelerator"] is None and "accelerator" not in without["cells"][0]


def test_a_link_is_measured_and_stays_in_the_profile(
    measured: list[tuple[str, int]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, out: Path
) -> None:
    monkeypatch.setattr(device_profile, "probe", partial(probe, stream_s=0.01))
    with ProbeServer(0, "127.0.0.1") as server:
        peer = f"127.0.0.1:{server.port}"
        link = profile_device(replace(SMALL, batch_sizes=(2,), peer=peer), out)["link"]
    assert link["bytes_per_s"]["source"].startswith(f"measured: TCP to {peer}, ")
    assert profile_device(SMALL, out)["link"] == link
    (tmp_path / "rack.toml").write_text('[cluster]\ndevice = "mine.toml"\n')
    cluster = load_cluster(tmp_path / "rack.toml")
    assert cluster.boards[0].soc_bytes_per_s == link["bytes_per_s"]["value"]
    assert cluster.message_s == link["message_s"]["value"]


def test_what_people_wrote_stays_and_what_was_measured_or_assumed_does_not(
    measured: list[tuple[str, int]], out: Path
) -> None:
    profile_device(SMALL, out)
    document = tomllib.loads(out.read_text("utf-8"))
    table = document["device"]["mine"]
    table["idle_w"] = figure(1.25, "wall meter")
    table["network_w"] = figure(9.0, "measured: once")
    processors = table["processor"]
    processors["cpu"] |= {"active_w": figure(7.5, "wall meter"), "flops_per_s": figure(1.0, "mine")}
    added = {"flops_per_s": figure(1e12, "data sheet"), "active_w": figure(4.0, "data sheet")}
    processors["npu"] = {**added, "number_format": "int8"}
    out.write_text(toml_text(document))
    again = profile_device(SMALL, out)["device"]["mine"]
    assert again["idle_w"] == table["idle_w"] and again["network_w"]["value"] != 9.0
    cpu = again["processor"]["cpu"]
    assert cpu["active_w"] == processors["cpu"]["active_w"] and cpu["flops_per_s"]["value"] > 1.0
    assert again["processor"]["npu"] == processors["npu"]
    soc = device_in(out, "mine")
    assert (soc.default_processor, soc.accelerator) == ("cpu", "npu")


# ------------------------------------------------------------------------------------------------- templates
@pytest.mark.parametrize("name", device_names())
def test_a_published_device_is_printed_as_the_profile_it_is(
    socflower: Socflower, name: str, tmp_path: Path
) -> None:
    ran = socflower("--device", name)
    assert (ran.status, ran.err) == (0, "")
    (tmp_path / "printed.toml").write_text(ran.out, "utf-8")
    assert socflower("--device", name, "--out", "written.toml").status == 0
    for file in ("printed.toml", "written.toml"):
        assert device_in(tmp_path / file, name) == device(name)
    assert list(json.loads(socflower("--device", name, "--json").out)["device"]) == [name]


def test_a_template_under_a_name_of_its_own_is_ready_for_a_cluster(
    socflower: Socflower, tmp_path: Path
) -> None:
    ran = socflower("--device", "jetson-nx", "--name", "my-board", "--out", "my-board.toml")
    assert ran.status == 0
    (tmp_path / "rack.toml").write_text('[cluster]\ndevice = "my-board.toml"\n')
    soc = load_cluster(tmp_path / "rack.toml").device_of(0)
    assert soc.name == "my-board" and soc.processors == device("jetson-nx").processors


# ------------------------------------------------------------------------------------------------- mistakes
@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (f"{MODEL} --batch-size 0", "batch"),
        (f"{MODEL} --threads 0", "threads"),
        (f"{MODEL} --repeats -1", "repeats"),
        (f"{MODEL} --model lenet6", "'lenet5'"),
        (f"{MODEL} --data digit", "digit"),
        (f"{MODEL} --kernel abacus", "abacus"),
        (f"{MODEL} --like abacus", "'abacus'"),
        (f"{MODEL} --name a.b", "a.b"),
        (f"{MODEL} --name jetson-nx", "my-jetson-nx"),
        (f"{MODEL} --peer there", "HOST:PORT"),
        (f"{MODEL} --out mine.json", ".toml"),
        (f"{MODEL} --out no/mine.toml", "folder no"),
        ("--device abacus", "'abacus'"),
        ("--device jetson-nx --peer a:1", "--peer"),
        ("--serve 5000 --peer a:1", "--peer"),
        ("--serve 99999", "65535"),
        ("--serve 5000 --json", "--json"),
        (f"{MODEL} --accelerator cuda", "cuda"),
        (f"{MODEL} --accelerator cpu", "none"),
    ],
)
def test_a_mistake_is_one_line_and_writes_nothing(
    socflower: Socflower, tmp_path: Path, arguments: str, named: str
) -> None:
    ran = socflower(*arguments.split())
    assert (ran.status, ran.out, ran.err.count("\n")) == (2, "", 1)
    assert ran.err.startswith("error: ") and named in ran.err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("text", ["[cluster]\n", "x = [", 'device = "jetson-nx"', None])
def test_a_file_of_another_kind_or_device_is_not_replaced(out: Path, text: str | None) -> None:
    out.write_text(
        published_toml(published_device("jetson-nx"), "jetson-nx") if text is None else text
    )
    before = out.read_text()
    refused(
        lambda: profile_device(SMALL, out), f"--out {out}", *(["jetson-nx"] if not text else [])
    )
    assert out.read_text() == before


@pytest.mark.parametrize(
    ("host", "name"),
    [
        ("Pi.local", "pi"),
        ("my host!", "my-host"),
        ("", "this-machine"),
        ("Jetson-NX", "my-jetson-nx"),
    ],
)
def test_a_host_name_becomes_the_name_of_a_device(
    monkeypatch: pytest.MonkeyPatch, host: str, name: str
) -> None:
    monkeypatch.setattr("platform.node", lambda: host)
    assert host_name() == name


# ------------------------------------------------------------------------------------------------- scenarios
@pytest.fixture
def board(tmp_path: Path) -> Path:
    text = published_toml(published_device("jetson-nano", "board"), "jetson-nano")
    (tmp_path / "board.toml").write_text(text, "utf-8")
    return tmp_path / "board.toml"


@pytest.mark.parametrize(
    "text",
    ['cluster = "clusters/rack.toml"\n', '[cluster]\ndevice = "board.toml"\nboards = [2]\n'],
)
def test_a_scenario_carries_the_devices_it_names(board: Path, tmp_path: Path, text: str) -> None:
    rack = tmp_path / "clusters/rack.toml"
    rack.parent.mkdir()
    rack.write_text('[cluster]\ndevice = "../board.toml"\nboards = [2]\n')
    case = tmp_path / "case.toml"
    case.write_text(text)
    loaded = load_scenario(case)
    document, cluster = to_document(loaded), scenario_cluster(loaded)
    assert list(document["device"]) == ["board"]
    assert document["cluster"] == {"device": "board", "boards": [2]}
    board.unlink()
    again = from_document(json.loads(json.dumps(document)))
    assert again == loaded and scenario_cluster(again) == cluster


def test_a_device_may_be_named_and_changed_on_the_command_line(board: Path, tmp_path: Path) -> None:
    case = tmp_path / "case.toml"
    case.write_text("[cluster]\nboards = [1]\n")
    named = scenario_cluster(load_scenario(case, ["cluster.device=board.toml"])).device_of(0)
    assert named.name == "board"
    case.write_text('[cluster]\ndevice = "board.toml"\n')
    changed = scenario_cluster(load_scenario(case, ["device.board.idle_w.value=1.5"])).device_of(0)
    assert (changed.name, changed.idle_w) == ("board", 1.5)


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ('[cluster]\ndevice = "none.toml"\n', "none.toml"),
        ('cluster = "rack.toml"\n[device.board]\nidle_w = 3\n', "[device.board]"),
        ("[cluster]\n'[device]' = 3\n", "[device]"),
    ],
)
def test_a_device_that_a_scenario_cannot_have_is_one_line(
    board: Path, tmp_path: Path, text: str, named: str
) -> None:
    (tmp_path / "rack.toml").write_text('[cluster]\ndevice = "board.toml"\n')
    case = tmp_path / "case.toml"
    case.write_text(text)
    refused(lambda: scenario_cluster(load_scenario(case)), named)
