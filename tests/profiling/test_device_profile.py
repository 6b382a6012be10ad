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
from socflower.errors import ConfigError
from socflower.model_graph.layer_profile import profile_module
from socflower.profiling import cells as profile_cells
from socflower.profiling import device_profile
from socflower.profiling.cells import CellStore, Conditions, build_module, measure_cell
from socflower.profiling.device_profile import (
    ProfileRequest,
    cell_file,
    existing_profile,
    host_name,
    profile_device,
)
from socflower.profiling.link_probe import ProbeServer, probe
from socflower.scenario.schema.config import Scenario
from socflower.scenario.schema.file import (
    from_document,
    load_scenario,
    scenario_cluster,
    to_document,
)
from socflower.toml_file import read_table
from tests.command_line import Socflower
from tests.fake_device import MODULE, fake_device  # noqa: F401 - a fixture


def device_in(path: Path, name: str) -> Device:
    return read_table(DeviceFile, read_device_file(path), "file").device[name].device(name)


SMALL = ProfileRequest(
    models=("lenet5",), data="digits", batch_sizes=(2, 8), repeats=1, name="mine", kernel="portable"
)
OPTIONS = (
    "--model",
    "lenet5",
    "--data",
    "digits",
    "--batch-size",
    "2",
    "--batch-size",
    "8",
    "--repeats",
    "1",
    "--name",
    "mine",
    "--kernel",
    "portable",
)


@pytest.fixture
def socflower(socflower: Socflower) -> Socflower:
    """`socflower profile`."""
    return lambda *arguments: socflower("profile", *arguments)


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
        return {
            **cell,
            "model": model,
            "data": data,
            "batch_size": batch,
            "fp32_step_s": 0.1 * batch,
            "int8_step_s": 0.05 * batch,
            "fp32_samples_per_s": 10.0,
            "int8_samples_per_s": 20.0,
            "num_threads": at.num_threads,
        }

    monkeypatch.setattr(device_profile, "measure_cell", measure)
    monkeypatch.setattr(device_profile, "update_bytes_per_s", lambda num_threads, device: 1e10)
    return keys


# ------------------------------------------------------------------------------------------- one real profile
def test_a_real_profile_is_read_by_planners(socflower: Socflower, tmp_path: Path) -> None:
    ran = socflower(*OPTIONS, "--out", "mine.toml", "--json")
    assert (ran.status, ran.err) == (0, "")
    document = json.loads(ran.out)
    assert (document["schema"], document["name"], document["link"]) == (2, "mine", None)
    assert (
        document["machine"]["usable_cores"] >= 1
        and "portable" in document["machine"]["kernels_available"]
    )
    assert [
        (entry["model"], entry["batch_size"], entry["kernel"]) for entry in document["cells"]
    ] == [("lenet5", 2, "portable"), ("lenet5", 8, "portable")]
    for entry in document["cells"]:
        assert entry["fp32_samples_per_s"] == pytest.approx(
            entry["batch_size"] / entry["fp32_step_s"]
        )
        assert (
            entry["int8_step_s"] > 0
            and entry["operators"]
            and entry["placement"]
            and entry["step_s"] > 0
        )
    costs = profile_module(*build_module("lenet5", "digits"), "lenet5")
    assert [entry["memory_bytes"] for entry in document["cells"]] == [
        costs.training_memory_bytes(n) for n in (2, 8)
    ]
    (tmp_path / "rack.toml").write_text('[cluster]\ndevice = "mine.toml"\n')
    soc = load_cluster(tmp_path / "rack.toml").device_of(0)
    assert {
        "mine": tomllib.loads((tmp_path / "mine.toml").read_text("utf-8"))["device"]["mine"]
    } == document["device"]
    assert list(soc.processors) == ["cpu", "cpu-int8"]
    for processor in soc.processors.values():
        timings = processor.timings["lenet5"]
        assert timings.batches == (2, 8)
        assert timings.step_s == pytest.approx(
            [entry[f"{processor.number_format}_step_s"] for entry in document["cells"]], rel=1e-4
        )
        flops = document["cells"][-1]["training_flops"]
        assert processor.rate("lenet5") == pytest.approx(flops * 8 / timings.step_s[-1], rel=1e-3)
        layers = processor.layer_timings["lenet5"]
        assert [layer.name for layer in layers] == [
            operator["name"] for operator in document["cells"][0]["operators"]
        ]
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "mine.toml",
        "mine.toml.part.json",
        "rack.toml",
    ]


def test_the_text_has_the_operators_a_line_per_cell_and_what_to_know(
    socflower: Socflower,
    measured: list[tuple[str, int]],
) -> None:
    ran = socflower(*OPTIONS, "--like", "jetson-nano")
    assert ran.status == 0
    assert (
        "lenet5, batch 8, int8 kernels portable" in ran.out
        and "lenet5, batch 2, int8 kernels" not in ran.out
    )
    assert "convolution" in ran.out
    assert (
        "lenet5, batch 2: a step in FP32 200 ms (10 samples/s), int8 100 ms (20 samples/s), ratio 2.00×"
        in ran.out
    )
    assert ran.out.count("exposes no power: watts are those of jetson-nano") <= 1


# ------------------------------------------------------------------------------------------------- resuming
def test_only_what_is_missing_is_measured(measured: list[tuple[str, int]], tmp_path: Path) -> None:
    out = tmp_path / "mine.toml"
    first = profile_device(SMALL, out)
    assert measured == [("lenet5", 2), ("lenet5", 8)]
    again = profile_device(SMALL, out)
    assert len(measured) == 2
    assert again["cells"] == first["cells"] and again["device"] == first["device"]
    assert any("2 of 2 cells were measured before" in note for note in again["notes"])
    more = ProfileRequest(
        models=("lenet5",),
        data="digits",
        batch_sizes=(4,),
        repeats=1,
        name="mine",
        kernel="portable",
    )
    profile_device(more, out)
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
    assert "finished cells are kept in mine.toml.part.json: the same command resumes" in ran.err
    assert [path.name for path in tmp_path.iterdir()] == ["mine.toml.part.json"]
    monkeypatch.setattr(device_profile, "measure_cell", measure)
    assert socflower(*OPTIONS, "--out", "mine.toml").status == 0
    assert measured == [("lenet5", 2), ("lenet5", 8)]


@pytest.mark.parametrize("change", [{"num_threads": 2}, {"repeats": 2}])
def test_cells_under_other_settings_are_measured_anew_and_that_is_said(
    measured: list[tuple[str, int]],
    tmp_path: Path,
    change: dict[str, Any],
) -> None:
    out = tmp_path / "mine.toml"
    profile_device(SMALL, out)
    settings = {
        "models": ("lenet5",),
        "data": "digits",
        "batch_sizes": (2,),
        "repeats": 1,
        "name": "mine",
        "kernel": "portable",
        **change,
    }
    document = profile_device(ProfileRequest(**settings), out)
    assert measured[2:] == [("lenet5", 2)]
    key, value = next(iter(change.items()))
    assert (
        f"earlier cells were measured under other settings ({key} 1, now {value})"
        in document["notes"][0]
    )
    assert device_in(out, "mine").processor("cpu").timings["lenet5"].batches == (2,)


@pytest.mark.parametrize(
    "text", ["", "{}", "[]", '{"schema": 1, "conditions": {}, "host": {}, "cells": [{}]}']
)
def test_a_damaged_cell_file_is_named(tmp_path: Path, text: str) -> None:
    out = tmp_path / "mine.toml"
    cell_file(out).write_text(text)
    with pytest.raises(
        ConfigError, match="does not hold the finished cells of a profile; delete or move it"
    ):
        profile_device(SMALL, out)
    assert not out.exists()


def test_of_a_model_on_two_data_sets_the_last_one_counts(cell: dict[str, Any]) -> None:
    store = CellStore(None, profile_cells.conditions(kernel="portable", num_threads=1, repeats=1))
    for data, batch in (("mnist", 4), ("digits", 8), ("digits", 2)):
        store.add({**cell, "data": data, "batch_size": batch})
    assert [(entry["data"], entry["batch_size"]) for entry in store.cells_by_model()["lenet5"]] == [
        ("digits", 2),
        ("digits", 8),
    ]


# -------------------------------------------------------------------------------------------- what is in it
def test_two_sides_share_silicon_where_there_are_no_cores_for_both(
    measured: list[tuple[str, int]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for cores, shares in ((1, "cpu"), (2, None)):
        monkeypatch.setattr(device_profile, "num_cores", lambda cores=cores: cores)
        assert (
            profile_device(SMALL)["device"]["mine"]["processor"]["cpu-int8"].get("shares") == shares
        )


def test_watts_are_measured_where_the_machine_exposes_them_and_lent_where_not(
    tmp_path: Path,
) -> None:
    assert profile_device(SMALL, root=tmp_path)["machine"]["power"] is None
    rail = tmp_path / "sys/class/hwmon/hwmon0"
    rail.mkdir(parents=True)
    for name, content in (
        ("name", "ina3221"),
        ("power1_input", "6500000"),
        ("power1_label", "VDD_IN"),
    ):
        (rail / name).write_text(content)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(profile_cells, "_WATTS_S", 0.01)
        patch.setattr(device_profile, "_IDLE_S", 0.01)
        one = ProfileRequest(
            models=("lenet5",), data="digits", batch_sizes=(1,), repeats=1, name="mine"
        )
        document = profile_device(one, root=tmp_path)
    table = document["device"]["mine"]
    for entry in (
        table["idle_w"],
        table["processor"]["cpu"]["active_w"],
        table["processor"]["cpu-int8"]["active_w"],
    ):
        assert entry["value"] == 6.5 and entry["source"].startswith(
            "measured: hwmon ina3221, VDD_IN, "
        )
    assert document["cells"][0]["fp32_w"] == pytest.approx(6.5)
    assert document["notes"] == []


def test_every_figure_says_where_it_is_from(
    measured: list[tuple[str, int]], tmp_path: Path
) -> None:
    table = profile_device(
        ProfileRequest(models=("lenet5",), data="digits", name="mine", like="jetson-nano"),
        root=tmp_path,
    )["device"]["mine"]
    assert table["network_w"] == figure(0.5, "assumption: as jetson-nano; Gigabit PHY")
    assert table["processor"]["cpu"]["active_w"] == figure(
        10.0, "assumption: as jetson-nano; this machine exposes no power"
    )
    assert table["memory_bytes"]["source"].startswith("measured: ")
    assert table["processor"]["cpu-int8"]["model"]["lenet5"]["source"].startswith("measured: ")


@pytest.mark.usefixtures("fake_device")
def test_an_accelerator_is_measured_beside_the_cpu_and_trains_by_default(tmp_path: Path) -> None:
    settled, out = MODULE.num_synchronisations, tmp_path / "mine.toml"
    asked = replace(SMALL, batch_sizes=(2,))
    document = profile_device(asked, out)
    (entry,) = document["cells"]
    assert document["machine"]["accelerator"] == entry["accelerator"] == "fake:0"
    # Three steps at least, and the updates.
    assert MODULE.num_synchronisations >= settled + 3 + 5
    mine = device_in(out, "mine")
    assert list(mine.processors) == ["gpu", "cpu", "cpu-int8"] and mine.default_processor == "gpu"
    assert mine.processor("gpu").timings["lenet5"].step_s == pytest.approx(
        (entry["gpu_step_s"],), rel=1e-4
    )
    for figure_ in ("flops_per_s", "memory_bytes_per_s"):
        table = document["device"]["mine"]
        source = {**table, **table["processor"]["gpu"]}[figure_]["source"]
        assert source.startswith("measured: ") and "on fake:0" in source
    without = profile_device(replace(asked, accelerator="none"), out)
    assert "accelerator fake:0, now none" in without["notes"][0]
    assert without["machine"]["accelerator"] is None and "accelerator" not in without["cells"][0]


def test_a_link_is_measured_and_stays_in_the_profile(
    measured: list[tuple[str, int]],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    out = tmp_path / "mine.toml"
    monkeypatch.setattr(device_profile, "probe", partial(probe, stream_s=0.01))
    with ProbeServer(0, "127.0.0.1") as server:
        asked = ProfileRequest(
            models=("lenet5",),
            data="digits",
            batch_sizes=(2,),
            repeats=1,
            name="mine",
            kernel="portable",
            peer=f"127.0.0.1:{server.port}",
        )
        link = profile_device(asked, out)["link"]
    assert link["bytes_per_s"]["source"].startswith(f"measured: TCP to 127.0.0.1:{server.port}, ")
    assert profile_device(SMALL, out)["link"] == link
    (tmp_path / "rack.toml").write_text('[cluster]\ndevice = "mine.toml"\n')
    cluster = load_cluster(tmp_path / "rack.toml")
    assert cluster.boards[0].soc_bytes_per_s == link["bytes_per_s"]["value"]
    assert cluster.message_s == link["message_s"]["value"]


def test_what_people_wrote_stays_and_what_was_measured_or_assumed_does_not(
    measured: list[tuple[str, int]],
    tmp_path: Path,
) -> None:
    out = tmp_path / "mine.toml"
    profile_device(SMALL, out)
    document = tomllib.loads(out.read_text("utf-8"))
    table = document["device"]["mine"]
    table["idle_w"] = figure(1.25, "wall meter")
    table["network_w"] = figure(9.0, "measured: once")
    table["processor"]["cpu"]["active_w"] = figure(7.5, "wall meter")
    table["processor"]["cpu"]["flops_per_s"] = figure(1.0, "guessed")
    table["processor"]["npu"] = {
        "flops_per_s": figure(1e12, "data sheet"),
        "active_w": figure(4.0, "data sheet"),
        "number_format": "int8",
    }
    out.write_text(toml_text(document))
    again = profile_device(SMALL, out)["device"]["mine"]
    assert again["idle_w"] == figure(1.25, "wall meter")
    assert again["processor"]["cpu"]["active_w"] == figure(7.5, "wall meter")
    assert again["processor"]["npu"] == table["processor"]["npu"]
    assert (
        again["network_w"]["value"] != 9.0
        and again["processor"]["cpu"]["flops_per_s"]["value"] > 1.0
    )
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
    assert (
        socflower("--device", "jetson-nx", "--name", "my-board", "--out", "my-board.toml").status
        == 0
    )
    (tmp_path / "rack.toml").write_text('[cluster]\ndevice = "my-board.toml"\n')
    soc = load_cluster(tmp_path / "rack.toml").device_of(0)
    assert soc.name == "my-board" and soc.processors == device("jetson-nx").processors


# ------------------------------------------------------------------------------------------------- mistakes
@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--batch-size", 0), "batch sizes, threads and repeats must be 1 or more"),
        (("--threads", 0), "must be 1 or more"),
        (("--repeats", -1), "must be 1 or more"),
        (("--model", "lenet6"), "did you mean 'lenet5'"),
        (("--data", "digit"), "digit"),
        (("--kernel", "abacus"), "abacus"),
        (("--like", "abacus"), "device 'abacus' is unknown"),
        (("--name", "a b"), "letters, digits, - and _"),
        (("--name", "jetson-nx"), "is a name of the catalogue"),
        (("--peer", "there"), "write HOST:PORT"),
        (("--out", "mine.json"), "must end in .toml"),
        (("--out", "no/mine.toml"), "there is no folder no"),
        (("--device", "abacus"), "device 'abacus' is unknown"),
        (("--device", "jetson-nx", "--peer", "a:1"), "--peer"),
        (("--serve", 5000, "--peer", "a:1"), "leave out --peer"),
        (("--serve", 99999), "99999: must be from 0 to 65535"),
        (("--serve", 5000, "--json"), "leave out --json"),
        (("--accelerator", "cuda"), "--accelerator = 'cuda': torch"),
        (
            ("--accelerator", "cpu"),
            "--accelerator cpu: the CPU is measured anyway; use none, or auto",
        ),
    ],
)
def test_a_mistake_is_one_line_and_writes_nothing(
    socflower: Socflower,
    tmp_path: Path,
    arguments: tuple[object, ...],
    says: str,
) -> None:
    given = (
        () if arguments[0] in ("--device", "--serve") else ("--model", "lenet5", "--data", "digits")
    )
    ran = socflower(*given, *arguments)
    assert (ran.status, ran.out) == (2, "")
    assert ran.err.startswith("error: ") and ran.err.count("\n") == 1
    assert says in ran.err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[cluster]\n", "is there and no device profile"),
        ("x = [", "is there and no device profile"),
    ],
)
def test_a_file_of_another_kind_is_not_replaced(tmp_path: Path, text: str, says: str) -> None:
    out = tmp_path / "rack.toml"
    out.write_text(text)
    with pytest.raises(ConfigError, match=says):
        existing_profile(out, "mine")
    assert out.read_text() == text


def test_a_profile_of_another_device_is_not_replaced(socflower: Socflower, tmp_path: Path) -> None:
    assert socflower("--device", "jetson-nx", "--out", "board.toml").status == 0
    before = (tmp_path / "board.toml").read_text()
    ran = socflower(*OPTIONS, "--out", "board.toml")
    assert ran.status == 2 and "holds jetson-nx, not mine; set --name" in ran.err
    assert (tmp_path / "board.toml").read_text() == before


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
def board(tmp_path: Path, socflower: Socflower) -> Path:
    assert (
        socflower("--device", "jetson-nano", "--name", "board", "--out", "board.toml").status == 0
    )
    return tmp_path / "board.toml"


def again(scenario: Scenario) -> Scenario:
    return from_document(json.loads(json.dumps(to_document(scenario))))


def test_a_scenario_carries_the_devices_it_names(board: Path, tmp_path: Path) -> None:
    (tmp_path / "clusters").mkdir()
    (tmp_path / "clusters/rack.toml").write_text(
        '[cluster]\ndevice = "../board.toml"\nboards = [2]\n'
    )
    for text in (
        'cluster = "clusters/rack.toml"\n',
        '[cluster]\ndevice = "board.toml"\nboards = [2]\n',
    ):
        case = tmp_path / "case.toml"
        case.write_text(text)
        loaded = load_scenario(case)
        document = to_document(loaded)
        assert list(document["device"]) == ["board"] and document["cluster"] == {
            "device": "board",
            "boards": [2],
        }
        cluster = scenario_cluster(loaded)
        hidden = board.rename(tmp_path / "away")
        assert again(loaded) == loaded and scenario_cluster(again(loaded)) == cluster
        hidden.rename(board)


def test_a_device_may_be_named_and_changed_on_the_command_line(board: Path, tmp_path: Path) -> None:
    case = tmp_path / "case.toml"
    case.write_text("[cluster]\nboards = [1]\n")
    assert (
        scenario_cluster(load_scenario(case, ["cluster.device=board.toml"])).device_of(0).name
        == "board"
    )
    case.write_text('[cluster]\ndevice = "board.toml"\n')
    changed = scenario_cluster(load_scenario(case, ["device.board.idle_w.value=1.5"])).device_of(0)
    assert (changed.name, changed.idle_w) == ("board", 1.5)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('device = "board.toml"\n', "must be tables [device.NAME]"),
        ('[cluster]\ndevice = "none.toml"\n', "none.toml: cannot be read"),
        (
            'cluster = "rack.toml"\n[device.board]\nidle_w = 3\n',
            "[device.board] is another device than the one",
        ),
        ("[device.mine]\n", "[device.mine]: idle_w is missing"),
        ("[cluster]\n'[device]' = 3\n", "[device]"),
    ],
)
def test_a_device_that_a_scenario_cannot_have_is_one_line(
    board: Path, tmp_path: Path, text: str, says: str
) -> None:
    (tmp_path / "rack.toml").write_text('[cluster]\ndevice = "board.toml"\n')
    (tmp_path / "case.toml").write_text(text)
    with pytest.raises(ConfigError) as caught:
        scenario_cluster(load_scenario(tmp_path / "case.toml"))
    assert says in str(caught.value) and "\n" not in str(caught.value)
