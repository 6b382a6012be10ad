"""Measured seconds of layers in place of estimates: what is written is what is planned with, and nothing else is."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from socflower.pipeline.problem import PipelineProblem
from socflower.scenario.layer_measuring import measured_profile
from socflower.scenario.layer_profiles import MeasuredLayers, write_profile
from socflower.scenario.pipeline_planning import pipeline_problem, plan_of_pipeline
from socflower.scenario.schema.file import load_scenario
from socflower.scenario.schema.scenario_file import Scenario
from tests.command_line import Socflower, is_mistake
from tests.one_line import refused

BASE = """
[[board]]
device = "jetson-nano"
count = 2
[[board]]
device = "jetson-tx2"
[model]
name = "lenet5"
[train]
batch_size = 64
[strategy]
name = "hybrid-pipeline"
[pipeline]
micro_batch_sizes = [8]
profiles = ["nano.json"]
"""
BATCHES = (1, 2, 8)


def case(folder: Path, *overrides: str) -> Scenario:
    (folder / "case.toml").write_text(BASE)
    return load_scenario(folder / "case.toml", overrides)


def names(folder: Path) -> list[str]:
    problem, _ = pipeline_problem(case(folder, "pipeline.profiles=[]"))
    return [layer.name for layer in problem.model.layers]


def document(folder: Path) -> dict[str, Any]:
    """Return a profile whose seconds are neither linear in the batch nor alike, so that no estimate is equal."""
    return {
        "schema": 1,
        "kind": "layer-seconds",
        "device": "jetson-nano",
        "model": "lenet5",
        "cuts": "layers",
        "sample": [1, 28, 28],
        "batches": list(BATCHES),
        "layer": [
            {
                "name": name,
                "forward_s": [0.5 + row, 0.75 + row, 4.0 + row],
                "backward_s": [1.5 + row, 1.75 + row, 9.0 + row],
            }
            for row, name in enumerate(names(folder))
        ],
    }


def written(folder: Path, change: Callable[[dict[str, Any]], object] = lambda found: None) -> Path:
    found = document(folder)
    change(found)
    (folder / "nano.json").write_text(json.dumps(found))
    return folder / "nano.json"


def test_measured_seconds_are_planned_with_at_every_batch_and_other_devices_are_estimated(
    tmp_path: Path,
) -> None:
    profile = json.loads(written(tmp_path).read_text())
    problem, _ = pipeline_problem(case(tmp_path))
    nano, tx2 = problem.devices[0].seconds, problem.devices[2].seconds
    assert problem.devices[1].seconds is nano
    assert (nano.estimated, tx2.estimated) == (False, True)
    for row, entry in enumerate(profile["layer"]):
        for column, batch in enumerate(BATCHES):
            assert nano.forward(row, row, batch) == pytest.approx(entry["forward_s"][column])
            assert nano.backward(row, row, batch) == pytest.approx(entry["backward_s"][column])
    # Not in proportion to the batch: twice the samples take 1.5 times as long in the first layer.
    assert nano.forward(0, 0, 2) == pytest.approx(1.5 * nano.forward(0, 0, 1))
    notes = plan_of_pipeline(case(tmp_path))[0]["notes"]
    assert (
        "the seconds of layers on jetson-tx2 are estimated from the devices' rates, not measured"
        in notes
    )
    assert "the seconds of layers on jetson-nano are those measured in [pipeline] profiles" in notes


def test_what_is_measured_here_reads_back(tmp_path: Path) -> None:
    found = measured_profile(
        case(tmp_path, "pipeline.profiles=[]"), "jetson-nano", batches=(1, 4), repeats=1
    )
    write_profile(tmp_path / "nano.json", found)
    assert [layer.name for layer in found.layers] == names(tmp_path) and found.sample == (1, 28, 28)
    problem: PipelineProblem = pipeline_problem(case(tmp_path))[0]
    seconds = problem.devices[0].seconds
    assert seconds.batches == (1, 4)
    assert np.array_equal(seconds.forward_s, [layer.forward_s for layer in found.layers])
    assert (
        MeasuredLayers.model_validate_json((tmp_path / "nano.json").read_text(), by_alias=True)
        == found
    )


def set_layer(key: str, value: object) -> Callable[[dict[str, Any]], object]:
    return lambda found: found["layer"][1].update({key: value})


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda found: found.update(model="vgg11"), "model = 'vgg11'"),
        (lambda found: found.update(cuts="blocks"), "cuts = 'blocks'"),
        (lambda found: found.update(sample=[3, 32, 32]), "sample = [3, 32, 32]"),
        (lambda found: found.update(device="jetson-nx"), "jetson-nano, jetson-tx2"),
        (lambda found: found["layer"].pop(), "layers of lenet5"),
        (lambda found: found["layer"].reverse(), "layer"),
        (set_layer("forward_s", [1.0, 2.0]), "forward_s has 2 seconds for 3 batches"),
        (set_layer("forward_s", [1.0, math.nan, 2.0]), "forward_s"),
        (set_layer("backward_s", [1.0, -1.0, 2.0]), "backward_s"),
        (set_layer("watts", 1.0), "watts"),
        (lambda found: found.update(batches=[1, 8, 2]), "batches = [1, 8, 2]"),
        (lambda found: found.update(kind="split-costs"), "kind"),
        (lambda found: found.pop("layer"), "layer"),
    ],
)
def test_a_profile_that_does_not_fit_is_refused_in_one_line_with_file_and_key(
    tmp_path: Path, change: Callable[[dict[str, Any]], object], named: str
) -> None:
    written(tmp_path, change)
    refused(lambda: pipeline_problem(case(tmp_path)), "nano.json", named)


def test_files_that_are_none_and_two_of_one_device_are_refused(
    tmp_path: Path, socflower: Socflower
) -> None:
    refused(lambda: pipeline_problem(case(tmp_path)), "nano.json", "No such file")
    (tmp_path / "nano.json").write_text("{")
    refused(lambda: pipeline_problem(case(tmp_path)), "nano.json", "JSON")
    copy = written(tmp_path).rename(tmp_path / "copy.json")
    both = case(tmp_path, f"pipeline.profiles=['{copy}', '{written(tmp_path)}']")
    refused(lambda: pipeline_problem(both), "nano.json", "device = 'jetson-nano'")
    written(tmp_path, set_layer("forward_s", [1.0, math.nan, 2.0]))
    is_mistake(socflower("plan case.toml"), "nano.json")


def test_the_command_writes_a_profile_and_names_what_it_lacks(
    tmp_path: Path, socflower: Socflower
) -> None:
    (tmp_path / "case.toml").write_text(BASE.replace('profiles = ["nano.json"]', ""))
    layers = "profile --layers case.toml"
    for options, named in (
        ("", "--name"),
        ("--name jetson-nano", "--out"),
        ("--name nano --json", "--name nano"),
        ("--name jetson-nano --json --data mnist", "--data"),
    ):
        is_mistake(socflower(f"{layers} {options}"), named)
    quick = "--batch-size 2 --repeats 1 --accelerator none"
    made = socflower(f"{layers} --name jetson-nano --out nano.json {quick}")
    assert made.status == 0 and "batch 2:" in made.out and "nano.json" in made.out
    assert json.loads((tmp_path / "nano.json").read_text())["batches"] == [2]
    (tmp_path / "ring.toml").write_text("[strategy]\nname = 'ring'\n")
    other = socflower("profile --layers ring.toml --name snapdragon-865 --json")
    is_mistake(other, "'hybrid-pipeline'")


def phones(folder: Path, arithmetic: str, *overrides: str) -> PipelineProblem:
    """Return the problem of two phones, of which SoC 0 computes in int8, with a profile in `arithmetic`."""
    names = written(
        folder, lambda found: found.update(device="snapdragon-865", arithmetic=arithmetic)
    )
    text = BASE.replace("jetson-nano", "snapdragon-865").replace(
        '[[board]]\ndevice = "jetson-tx2"\n', ""
    )
    (folder / "case.toml").write_text(text.replace("nano.json", str(names)) + "int8_socs = [0]\n")
    return pipeline_problem(load_scenario(folder / "case.toml", overrides))[0]


@pytest.mark.parametrize("arithmetic", ["fp32", "int8"])
def test_a_profile_is_of_the_devices_that_compute_in_its_arithmetic(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    arithmetic: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    problem = phones(tmp_path, arithmetic)
    assert [device.seconds.estimated for device in problem.devices] == [
        arithmetic == "fp32",
        arithmetic == "int8",
    ]
    others = [0, 1] if arithmetic == "fp32" else []
    override = f"pipeline.int8_socs={others}"
    refused(lambda: phones(tmp_path, arithmetic, override), "snapdragon-865", arithmetic)


def test_layers_are_measured_in_int8_by_the_command(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    socflower: Socflower,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "case.toml").write_text(BASE)
    measure = "profile --layers case.toml --name jetson-nano --batch-size 1 --repeats 1 --json"
    ran = socflower(f"{measure} --int8")
    assert ran.status == 0, ran.err
    assert json.loads(ran.out)["arithmetic"] == "int8"
    is_mistake(socflower(f"{measure} --int8 --accelerator cuda"), "int8")
    is_mistake(socflower("profile --int8"), "--int8", "--layers")
