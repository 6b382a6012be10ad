"""A run says what its time and energy are those of, where that is not what trained."""

import json
from pathlib import Path
from typing import Any

import pytest
from flwr.app import ConfigRecord, Message, MetricRecord, RecordDict

from socflower.cluster import device_names
from socflower.cluster.device_catalog import device
from socflower.engines.names import ENGINES
from socflower.engines.trained_devices import TrainedDevices
from socflower.flower_adapter import begin_run
from socflower.report.report import render_report
from socflower.scenario.priced_processors import gpu_notes, priced_line, priced_processors
from socflower.scenario.runner import run_scenario
from socflower.scenario.schema.config import PrecisionConfig
from socflower.wire.message_keys import TRAINED_ON
from tests.command_line import Socflower
from tests.scenario.small_runs import small

pytestmark = pytest.mark.usefixtures("on_few_digits")


def on(name: str, arithmetic: str = "fp32") -> Any:
    return small().replaced(
        cluster={"boards": (2, 2), "device": name}, precision=PrecisionConfig(arithmetic=arithmetic)
    )


@pytest.mark.parametrize("name", device_names())
@pytest.mark.parametrize("arithmetic", ["fp32", "int8", "mixed"])
def test_each_device_of_the_catalogue_is_said_to_be_priced_as_it_is(
    name: str, arithmetic: str
) -> None:
    known = device(name)
    (entry,) = priced_processors(on(name, arithmetic))
    assert (entry["device"], entry["trained"]) == (name, "cpu")
    assert entry["priced"][0] == (
        known.int8_processor or known.default_processor
        if arithmetic == "int8"
        else known.default_processor
    )
    assert entry["priced"][1:] == (
        [known.accelerator] if arithmetic == "mixed" and known.accelerator else []
    )
    says = [note for engine in (*ENGINES, None) for note in gpu_notes([entry], engine)]
    if entry["priced"][0].startswith("gpu"):
        assert len(says) == 4 and all(f"{name}'s gpu" in note for note in says)
    else:
        assert says == []


def test_a_run_of_jetsons_says_so_wherever_it_is_read(socflower: Socflower, tmp_path: Path) -> None:
    (tmp_path / "case.toml").write_text(
        "[cluster]\nboards = [2]\ndevice = 'jetson-nano'\n[train]\nepochs = 1\nbatch_size = 512\n"
        "[strategy]\ngroups = 1\n"
    )
    ran = socflower("run case.toml --workers 0")
    assert ran.status == 0 and "jetson-nano's gpu; trained on the CPU" in " ".join(ran.out.split())
    result = json.loads((tmp_path / "out" / "case" / "result.json").read_text())
    assert result["processors"] == [{"device": "jetson-nano", "priced": ["gpu"], "trained": "cpu"}]
    assert result["trained_on"] == {"cpu": [0, 1]}
    note = (
        "GPU: CPU FP32. All clients trained on this machine's CPU, as their trainers' device says, or for lack of "
        "an accelerator; virtual time and energy are those of jetson-nano's gpu."
    )
    assert note in result["notes"]
    assert "GPU: CPU FP32" in (tmp_path / "out" / "case" / "report.html").read_text("utf-8")
    planned = socflower("plan case.toml --json")
    assert json.loads(planned.out)["notes"][-1].startswith(
        "priced as jetson-nano's gpu; a run trains on CPUs"
    )


def test_a_cloud_is_a_device_too(socflower: Socflower, tmp_path: Path) -> None:
    (tmp_path / "split.toml").write_text(
        "[cluster]\nboards = [1]\n[strategy]\nname = 'split-replay'\n[edgecloud]\nlink = 'wifi'\n"
    )
    notes = json.loads(socflower("plan split.toml --json").out)["notes"]
    assert any("priced as gpu-v100's gpu" in note for note in notes)


def test_a_deployment_says_whose_prediction_it_is() -> None:
    (note,) = gpu_notes(priced_processors(on("jetson-nx")), "deployment")
    assert (
        "trained on the nodes' CPUs" in note
        and "predicted time and energy are those of jetson-nx's gpu" in note
    )


def test_only_clients_that_trained_on_a_cpu_are_named_where_others_used_the_priced_gpu() -> None:
    priced = priced_processors(on("jetson-nano"), {"cuda:0 (Orin)": [0, 2], "cpu": [1, 3]})
    assert priced == [
        {
            "device": "jetson-nano",
            "priced": ["gpu"],
            "trained": "cpu and cuda:0 (Orin)",
            "socs_on_cpu": [1, 3],
        }
    ]
    (note,) = gpu_notes(priced, "deployment")
    assert note.startswith("GPU: CPU FP32. SoCs 1, 3 trained on the nodes' CPUs")
    for trained in ("cuda:0 (Orin)", "unknown"):
        priced = priced_processors(on("jetson-nano"), {trained: range(4)})
        assert (
            priced[0]["trained"] == trained
            and not gpu_notes(priced, "deployment")
            and priced_line(priced) is None
        )


def test_clients_that_do_not_say_where_they_trained_are_unknown() -> None:
    class Replies:
        def get_node_ids(self) -> list[int]:
            return [30, 20]

        def send_and_receive(
            self, messages: list[Message], *, timeout: float | None = None
        ) -> list[Message]:
            return messages

    begin_run(1)
    replies = []
    for node, record in ((20, None), (30, {"devices": ["cpu"]}), (30, {"device": "cpu"})):
        content = RecordDict({"metrics": MetricRecord({"num-examples": 3})})
        if record is not None:
            content[TRAINED_ON] = ConfigRecord(record)
        replies.append(Message(content, reply_to=Message(RecordDict(), node, "train")))
    grid = TrainedDevices(Replies())  # type: ignore[arg-type]
    grid.send_and_receive(replies[:2])
    assert grid.document() == {"cpu": [1], "unknown": [0]}
    grid.send_and_receive(replies[2:])
    assert grid.document() == {"unknown": [0, 1]}


def test_a_run_on_cpus_says_nothing_of_gpus() -> None:
    result = run_scenario(small(), num_workers=0)
    assert result["processors"] == [
        {"device": "snapdragon-865", "priced": ["cpu"], "trained": "cpu"}
    ]
    assert not any("GPU" in note for note in result["notes"])
    assert "gpu" not in render_report([result], title="x").lower()
