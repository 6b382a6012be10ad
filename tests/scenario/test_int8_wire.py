"""Int8 clients that send int8 weights: bytes on the hub, the price of a round, and what cannot be."""

from functools import cache
from pathlib import Path
from typing import Any

import pytest
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, RecordDict
from flwr.clientapp.mod import LocalDpMod

from socflower import FP32Trainer, make_client_app
from socflower.scenario.planning import planned_training
from socflower.scenario.predicted_training import predicted_training
from socflower.scenario.runner import run_scenario
from socflower.scenario.schema.config import PrecisionConfig
from socflower.scenario.schema.file import load_scenario, scenario_cluster
from socflower.scenario.schema.scenario_file import Scenario
from tests.one_line import last_key, refused
from tests.scenario.small_runs import LENET_BYTES, small

pytestmark = pytest.mark.usefixtures("on_few_digits")

NUM_BIASES = 6 + 16 + 120 + 84 + 10
NUM_SOCS, NUM_ROUNDS = 4, 2


def precision(wire: str, algorithm: str = "niti") -> PrecisionConfig:
    return PrecisionConfig(arithmetic="int8", algorithm=algorithm, wire=wire)


def fedavg(wire: str, algorithm: str = "niti") -> Scenario:
    return small("fedavg", groups="auto", epochs=NUM_ROUNDS).replaced(
        precision=precision(wire, algorithm), strategy={"name": "fedavg"}
    )


@cache
def in_groups(wire: str) -> dict[str, Any]:
    return run_scenario(small(leaders="star").replaced(precision=precision(wire)), num_workers=0)


@cache
def result(wire: str, algorithm: str = "niti") -> dict[str, Any]:
    return run_scenario(fedavg(wire, algorithm), num_workers=0)


@pytest.mark.slow
def test_weights_take_a_byte_each_both_ways() -> None:
    """Biases stay float32. Each of the ten arrays has a header of 128 bytes, as in float32."""
    weights = LENET_BYTES // 4 - NUM_BIASES
    headers = 10 * 128
    by_hand = 2 * NUM_SOCS * NUM_ROUNDS * (weights + 4 * NUM_BIASES + headers)
    assert result("int8")["bytes"]["hub"] == by_hand
    assert 3.5 < result("float32")["bytes"]["hub"] / by_hand < 4.0


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ["niti", "real-scales"])
def test_training_goes_on_as_with_float32(algorithm: str) -> None:
    ours, reference = result("int8", algorithm), result("float32", algorithm)
    assert ours["virtual_s"] < reference["virtual_s"]
    assert not any(entry["events"] for entry in ours["rounds"])
    assert abs(ours["final_accuracy"] - reference["final_accuracy"]) < 0.08
    assert ours["weights_sha256"] != reference["weights_sha256"]


def test_leaders_of_groups_send_a_byte_a_weight_both_ways() -> None:
    """The leader of one of the two groups is asked for its model, and gets the mean, after each of two intervals."""
    ours, reference = in_groups("int8"), in_groups("float32")
    weights = LENET_BYTES // 4 - NUM_BIASES
    ratio = LENET_BYTES / (weights + 4 * NUM_BIASES)
    assert reference["bytes"]["hub"] / ours["bytes"]["hub"] == pytest.approx(ratio, rel=1e-6)
    assert ours["virtual_s"] < reference["virtual_s"]
    assert not any(entry["events"] for entry in ours["rounds"])
    assert abs(ours["final_accuracy"] - reference["final_accuracy"]) < 0.15
    assert ours["weights_sha256"] != reference["weights_sha256"]
    scenario = small(leaders="star").replaced(precision=precision("int8"))
    planned = planned_training(scenario, scenario_cluster(scenario))
    assert planned.duration_s == pytest.approx(ours["virtual_s"], rel=0.1)


@pytest.mark.slow
def test_a_run_is_repeatable_by_worker_processes() -> None:
    """They load all of the digits."""
    one, other = (run_scenario(fedavg("int8", "real-scales"), num_workers=1) for _ in range(2))
    assert one["weights_sha256"] == other["weights_sha256"]


def test_the_prediction_counts_the_same_bytes() -> None:
    planned = predicted_training(fedavg("int8"), scenario_cluster(fedavg("int8")))
    assert planned.duration_s == pytest.approx(result("int8")["virtual_s"], rel=0.1)


@pytest.mark.parametrize(
    "text",
    [
        "wire = 'int8'",
        "arithmetic = 'mixed'\nwire = 'int8'",
        "arithmetic = 'int8'\nwire = 'int4'",
        "arithmetic = 'int8'\nwire = 'int8'\n[strategy]\nname = 'ring'",
    ],
)
def test_what_does_not_send_int8_is_refused_in_one_line(text: str, tmp_path: Path) -> None:
    """The last one has one group, and nothing travels but gradients."""
    (tmp_path / "case.toml").write_text(f"[precision]\n{text}\n")
    key = "wire" if "ring" in text else last_key(text)
    refused(lambda: load_scenario(tmp_path / "case.toml"), key)


def test_mods_that_read_models_are_refused() -> None:
    """By each client, since the server does not know its mods."""
    app = make_client_app(
        lambda context: None,  # type: ignore[arg-type, return-value]
        lambda context, part, num_parts: None,  # type: ignore[arg-type, return-value]
        FP32Trainer(),
        mods=[LocalDpMod(1.0, 1.0, 1.0, 1e-5)],
    )
    content = RecordDict(
        {
            "arrays": ArrayRecord({}),
            "config": ConfigRecord({}),
            "socflower-scales": ConfigRecord({"w": 1.0}),
        }
    )
    context = Context(1, 2, {"partition-id": 0, "num-partitions": 1}, RecordDict(), {})
    refused(lambda: app(Message(content, 1, "train"), context), "mods", "int8")


@pytest.mark.parametrize(
    "strategy",
    [
        {"leaders": "ring"},
        {"quorum": 0.5, "leaders": "star"},
        {"leader_compression": "int8"},
    ],
)
def test_what_needs_more_than_the_star_is_refused_beside_int8(strategy: dict[str, Any]) -> None:
    """Two groups train by socflow."""

    def run() -> None:
        scenario = small(**strategy).replaced(precision=precision("int8"))
        run_scenario(scenario, num_workers=0)

    refused(run, next(iter(strategy)))
