"""Measured seconds of layers in place of estimates: what is written is what is planned with, and nothing else is."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from socflower.errors import ConfigError
from socflower.pipeline.problem import PipelineProblem
from socflower.scenario.layer_profiles import MeasuredLayers, measured_profile, write_profile
from socflower.scenario.pipeline_planning import pipeline_problem, plan_of_pipeline
from socflower.scenario.schema.config import Scenario
from socflower.scenario.schema.file import load_scenario
from tests.command_line import Socflower

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
    ("change", "complaint"),
    [
        (
            lambda found: found.update(model="vgg11"),
            r"nano\.json: model = 'vgg11', and case plans 'lenet5'; measure again",
        ),
        (
            lambda found: found.update(cuts="blocks"),
            r"nano\.json: cuts = 'blocks', and case plans 'layers'",
        ),
        (
            lambda found: found.update(sample=[3, 32, 32]),
            r"nano\.json: sample = \[3, 32, 32\], and case plans \[1, 28, 28",
        ),
        (
            lambda found: found.update(device="jetson-nx"),
            r"nano\.json: device = 'jetson-nx': is no device of the cluster of case, which has jetson-nano, jetson-tx2",
        ),
        (
            lambda found: found["layer"].pop(),
            r"nano\.json: layer: '.*' is missing, of the \d+ layers of lenet5",
        ),
        (
            lambda found: found["layer"].reverse(),
            r"nano\.json: layer: it has \d+ layers in another order",
        ),
        (set_layer("forward_s", [1.0, 2.0]), r"nano\.json.*forward_s has 2 seconds for 3 batches"),
        (set_layer("forward_s", [1.0, math.nan, 2.0]), r"nano\.json.*forward_s"),
        (set_layer("backward_s", [1.0, -1.0, 2.0]), r"nano\.json.*backward_s"),
        (set_layer("watts", 1.0), r"nano\.json.*watts"),
        (
            lambda found: found.update(batches=[1, 8, 2]),
            r"nano\.json: batches = \[1, 8, 2\]: must rise",
        ),
        (lambda found: found.update(kind="split-costs"), r"nano\.json.*kind"),
        (lambda found: found.pop("layer"), r"nano\.json.*layer"),
    ],
)
def test_a_profile_that_does_not_fit_is_refused_in_one_line_with_file_and_key(
    tmp_path: Path,
    change: Callable[[dict[str, Any]], object],
    complaint: str,
) -> None:
    written(tmp_path, change)
    with pytest.raises(ConfigError, match=complaint) as caught:
        pipeline_problem(case(tmp_path))
    assert "\n" not in str(caught.value)


def test_files_that_are_none_and_two_of_one_device_are_refused(
    tmp_path: Path, socflower: Socflower
) -> None:
    with pytest.raises(ConfigError, match=r"nano\.json: cannot be read \(No such file"):
        pipeline_problem(case(tmp_path))
    (tmp_path / "nano.json").write_text("{")
    with pytest.raises(ConfigError, match=r"nano\.json: is no JSON"):
        pipeline_problem(case(tmp_path))
    copy = written(tmp_path).rename(tmp_path / "copy.json")
    written(tmp_path)
    with pytest.raises(
        ConfigError, match=r"nano\.json: device = 'jetson-nano' is measured in two profiles"
    ):
        pipeline_problem(
            case(tmp_path, f"pipeline.profiles=['{copy}', '{tmp_path / 'nano.json'}']")
        )
    written(tmp_path, set_layer("forward_s", [1.0, math.nan, 2.0]))
    planned = socflower("plan", "case.toml")
    assert (
        planned.status == 2
        and len(planned.err.strip().splitlines()) == 1
        and "nano.json" in planned.err
    )


def test_the_command_writes_a_profile_and_names_what_it_lacks(
    tmp_path: Path, socflower: Socflower
) -> None:
    (tmp_path / "case.toml").write_text(BASE.replace('profiles = ["nano.json"]', ""))
    for arguments, complaint in (
        ((), "--layers needs --name"),
        (("--name", "jetson-nano"), "--layers needs --out"),
        (("--name", "nano", "--json"), "--name nano: is no device of the cluster"),
        (("--name", "jetson-nano", "--json", "--data", "mnist"), "leave out --data"),
    ):
        ran = socflower("profile", "--layers", "case.toml", *arguments)
        assert ran.status == 2 and complaint in ran.err and len(ran.err.strip().splitlines()) == 1
    made = socflower(
        "profile",
        "--layers",
        "case.toml",
        "--name",
        "jetson-nano",
        "--out",
        "nano.json",
        "--batch-size",
        "2",
        "--repeats",
        "1",
        "--accelerator",
        "none",
    )
    assert made.status == 0 and "batch 2:" in made.out and "nano.json" in made.out
    assert json.loads((tmp_path / "nano.json").read_text())["batches"] == [2]
    (tmp_path / "ring.toml").write_text("[strategy]\nname = 'ring'\n")
    other = socflower("profile", "--layers", "ring.toml", "--name", "snapdragon-865", "--json")
    assert other.status == 2 and "layers are measured for 'hybrid-pipeline'" in other.err


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
    with pytest.raises(
        ConfigError, match=rf"one of snapdragon-865 in {arithmetic}, in which none of them computes"
    ):
        phones(tmp_path, arithmetic, f"pipeline.int8_socs={[0, 1] if arithmetic == 'fp32' else []}")


def test_layers_are_measured_in_int8_by_the_command(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    socflower: Socflower,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "case.toml").write_text(BASE)
    options = (
        "profile",
        "--layers",
        "case.toml",
        "--name",
        "jetson-nano",
        "--batch-size",
        "1",
        "--repeats",
        "1",
    )
    ran = socflower(*options, "--int8", "--json")
    assert ran.status == 0, ran.err
    assert json.loads(ran.out)["arithmetic"] == "int8"
    for wrong, said in (
        ((*options, "--int8", "--accelerator", "cuda", "--json"), "int8 kernels run on the CPU"),
        (("profile", "--int8"), "--int8 is for --layers"),
    ):
        ran = socflower(*wrong)
        assert ran.status == 2 and said in ran.err and len(ran.err.strip().splitlines()) == 1
