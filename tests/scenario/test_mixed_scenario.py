"""Mixed precision from a scenario file to its result: equal weights everywhere, and no more speed than F11 allows."""

import copy
import json
import math
import re
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from socflower.precision.cpu_share import cpu_share
from socflower.scenario.arithmetic import trainer, training_data
from socflower.scenario.costs import num_training_samples
from socflower.scenario.planning import plan_scenario
from socflower.scenario.runner import run_scenario
from socflower.scenario.schema.config import PrecisionConfig, TrainConfig
from socflower.scenario.schema.file import from_document, load_scenario, to_document
from socflower.scenario.schema.scenario_file import Scenario
from socflower.workloads.sources import load_data
from tests.command_line import Socflower
from tests.few_digits import few_digits
from tests.one_line import last_key, refused
from tests.scenario.small_runs import LENET_BYTES, small

HELD_OUT = 400
"""Of the 1,000 digits that `run` trains on: alpha is measured on many, so that training has few steps."""


def mixed(
    rule: str = "paper",
    *,
    arithmetic: str = "mixed",
    held_out: int = HELD_OUT,
    merge: str = "gradients",
    **changes: Any,
) -> Scenario:
    precision = PrecisionConfig(arithmetic=arithmetic, rule=rule, merge=merge, held_out=held_out)
    return small(**{"batch_size": 128, **changes}).replaced(precision=precision)


def run(scenario: Scenario) -> dict[str, Any]:
    """Run in this process, on a few of the digits."""
    with few_digits():
        return run_scenario(scenario, num_workers=0)


@cache
def _run(rule: str, arithmetic: str) -> dict[str, Any]:
    return run(mixed(rule, arithmetic=arithmetic))


def result(rule: str = "paper", *, arithmetic: str = "mixed") -> dict[str, Any]:
    """Return the result of `mixed(rule)`, run in this process, trained once."""
    return copy.deepcopy(_run(rule, arithmetic))


# ------------------------------------------------------------------------------------------------- weights
def test_the_rule_fp32_is_the_arithmetic_fp32_on_the_same_samples() -> None:
    by_rule, plain = result("fp32"), result(arithmetic="fp32")
    for key in ("weights_sha256", "final_accuracy", "virtual_s", "energy_j", "bytes"):
        assert by_rule[key] == plain[key]
    assert result()["weights_sha256"] != plain["weights_sha256"]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_local_and_simulation_give_equal_weights() -> None:
    pytest.importorskip("ray", reason="the engine simulation needs socflower[simulation]")
    # Processes of the simulation have all of the digits.
    scenario = mixed(held_out=3400)
    simulated, here = run_scenario(scenario, "simulation"), run_scenario(scenario, num_workers=0)
    for key in ("weights_sha256", "virtual_s", "energy_j", "final_accuracy"):
        assert simulated[key] == here[key]


# ------------------------------------------------------------------------------------------------- results
def test_rounds_carry_alpha_and_the_share_that_follows_from_it() -> None:
    """F11: the NPU of the catalogue is so fast that under the paper's rule alpha alone decides."""
    first, *rounds = result()["rounds"]
    assert "copy_similarity" not in first and "cpu_share" not in first
    for entry in rounds:
        assert 0.9 < entry["copy_similarity"] <= 1.0
        assert entry["events"] == []
        # Of each member's 50 samples of a batch a whole number, and no less than alpha asks for.
        gamma = cpu_share("paper", entry["copy_similarity"], 0.8)
        assert gamma == pytest.approx(math.exp(-entry["copy_similarity"]))
        assert gamma <= entry["cpu_share"] <= gamma + 1 / 50


def test_rounds_without_an_npu_say_so() -> None:
    assert [entry.get("cpu_share") for entry in result("fp32")["rounds"]] == [None, 1.0, 1.0]
    assert not any("copy_similarity" in entry for entry in result("fp32")["rounds"])
    assert not any("cpu_share" in entry for entry in result(arithmetic="fp32")["rounds"])
    assert not any("NPU" in note and "ran on this CPU" in note for note in result("fp32")["notes"])


def test_the_result_says_what_stood_in_for_the_npu_and_what_the_rule_can_gain() -> None:
    notes = result()["notes"]
    assert any("CPU int8" in note and "snapdragon-865's npu" in note for note in notes)
    assert any("Rule 'paper'" in note and "no less than 1/2.72" in note for note in notes)
    assert result()["kernels"]["int8"].startswith("CPU int8, ")


def test_the_papers_rule_computes_at_most_e_times_as_fast() -> None:
    """F11."""
    seconds = {
        rule: result(rule)["breakdown"]["soc_seconds"]["compute"] for rule in ("fp32", "paper")
    }
    assert seconds["fp32"] / math.e <= seconds["paper"] < seconds["fp32"]
    assert result()["virtual_s"] < result("fp32")["virtual_s"]


def test_a_device_without_npu_trains_in_fp32_or_is_refused() -> None:
    slow = {"boards": (2, 2), "device": "raspberry-pi-4b"}
    ran = run(mixed().replaced(cluster=slow))
    assert ran["weights_sha256"] == result("fp32")["weights_sha256"]
    assert {entry["cpu_share"] for entry in ran["rounds"][1:]} == {1.0}
    half = mixed("half").replaced(cluster=slow)
    refused(lambda: plan_scenario(half), "raspberry-pi-4b", "'half'")


# ------------------------------------------------------------------------------------------- int8 models apart
def test_alpha_falls_by_more_than_a_tenth_if_the_npus_train_int8_models_of_their_own() -> None:
    """Fig. 15 of SoCFlow+; the first alpha is that of fresh copies. Shares follow from each, in every group."""
    ran = run(mixed(merge="weights", batch_size=32))
    first, *rounds = ran["rounds"]
    assert "alpha" not in first
    alphas = [entry["alpha"] for entry in rounds]
    assert alphas[0] > 0.99 and max(alphas) - min(alphas) > 0.1
    assert not any("copy_similarity" in entry or entry["events"] for entry in rounds)
    for entry in rounds:
        assert math.exp(-entry["alpha"]) - 0.02 <= entry["cpu_share"] < 1.0
    assert ran["weights_sha256"] != result()["weights_sha256"]


@pytest.mark.parametrize(
    "changes",
    [
        {"compression": "int8", "rebalance": "both"},
        pytest.param({"compression": "dgc"}, marks=pytest.mark.slow),
        pytest.param({"exchange": "server"}, marks=pytest.mark.slow),
        pytest.param({"leader_compression": "int8"}, marks=pytest.mark.slow),
        pytest.param({"overlap_buckets": 2}, marks=pytest.mark.slow),
        pytest.param({"name": "ring", "groups": "auto"}, marks=pytest.mark.slow),
    ],
)
def test_own_models_are_merged_with_any_exchange_of_gradients_and_models(
    changes: dict[str, Any],
) -> None:
    """The FP32 model's gradients and the merged models travel as they do without an NPU."""
    ran = run(mixed(merge="weights", **changes))
    assert all("alpha" in entry and not entry["events"] for entry in ran["rounds"][1:])
    assert ran["weights_sha256"] != result()["weights_sha256"]


def test_a_synchronisation_sums_the_merged_weights_in_each_group() -> None:
    """Two intervals, in which two groups of two SoCs each send a model more than with gradients that are merged."""
    ran = run(mixed(merge="weights"))
    more = sum(ran["bytes"].values()) - sum(result()["bytes"].values())
    assert more == pytest.approx(2 * 4 * LENET_BYTES, rel=1e-3)


# --------------------------------------------------------------------------------------------- held-out data
def pictures(inputs: np.ndarray) -> Counter[bytes]:
    return Counter(picture.tobytes() for picture in inputs)


@pytest.mark.parametrize("num_held_out", [1, 128, 1333, 3999])
def test_samples_are_either_trained_on_or_held_out(num_held_out: int) -> None:
    scenario, everything = mixed(held_out=num_held_out), load_data("digits").train
    kept = training_data(scenario)
    held_out = trainer(scenario).held_out
    assert (
        len(kept)
        == num_training_samples(scenario, len(everything))
        == len(everything) - num_held_out
    )
    assert len(held_out) == num_held_out
    both = pictures(kept.batch(np.arange(len(kept)))[0].numpy()) + pictures(held_out.numpy())
    assert both == pictures(everything.batch(np.arange(len(everything)))[0].numpy())


def test_held_out_samples_are_of_every_class() -> None:
    everything, kept = load_data("digits").train, training_data(mixed(held_out=128))
    left = np.bincount(everything.labels.numpy()) - np.bincount(kept.labels.numpy())
    assert left.sum() == 128 and left.min() > 0


def test_by_default_mixed_holds_some_out_and_the_others_do_not() -> None:
    assert [PrecisionConfig(arithmetic=kind).held_out for kind in ("fp32", "int8", "mixed")] == [
        0,
        0,
        128,
    ]


# -------------------------------------------------------------------------------------------------- mistakes
@pytest.mark.parametrize("arithmetic", ["fp32", "mixed"])
@pytest.mark.parametrize("num_held_out", [4000, 5000])
def test_a_held_out_set_that_leaves_nothing_is_refused_with_both_numbers(
    num_held_out: int, arithmetic: str
) -> None:
    scenario = mixed(held_out=num_held_out, arithmetic=arithmetic)
    for use in (lambda: run_scenario(scenario, num_workers=0), lambda: plan_scenario(scenario)):
        refused(use, f"held_out = {num_held_out}", "digits", "4000")


@pytest.mark.parametrize(
    "text",
    [
        "arithmetic = 'fp16'",
        "arithmetic = 'mixed'\nrule = 'best'",
        "arithmetic = 'mixed'\nheld_out = 0",
        "held_out = -1",
        "arithmetic = 'mixed'\nheld_out = 0.1",
        "arithmetic = 'int8'\nalgorithm = 'niti'\n[train]\nmomentum = 0.9",
        "[train]\noptimizer = 'adam'\nmomentum = 0.9",
        "rule = 'half'",
        "arithmetic = 'int8'\nrule = 'half'",
        "arithmetic = 'mixed'\ngradient_bits = [2, 1, 0]",
        "arithmetic = 'mixed'\nmerge = 'logits'",
        "fp32_operators = ['9']",
        "arithmetic = 'int8'\nfp32_operators = [9]",
        "merge = 'weights'",
        "arithmetic = 'int8'\nmerge = 'weights'",
        "arithmetic = 'int8'\ngradient_bits = [2, 1]",
        "arithmetic = 'int8'\ngradient_bits = [8, 1, 0]",
        "arithmetic = 'mixed'\nalgorithm = 'adaptive-fixed-point'",
        "adaptive_rescaling = false",
        "unsupported = 'refuse'",
        "arithmetic = 'int8'\nunsupported = 'drop'",
        "arithmetic = 'int8'\nalgorithm = 'adaptive-fixed-point'\ngradient_bits = [2, 1, 0]",
    ],
)
def test_what_cannot_be_is_refused_in_one_line(text: str, tmp_path: Path) -> None:
    (tmp_path / "case.toml").write_text(f"[precision]\n{text}\n")
    refused(lambda: load_scenario(tmp_path / "case.toml"), last_key(text))


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("arithmetic = 'mixed'\nheldout = 3", "did you mean 'held_out'?"),
        ("arithmetic = 'int8'\nalgorithm = 'niti'\n[train]\nweight_decay = 0.1", "weight_decay"),
        ("arithmetic = 'int8'\n[train]\nreduction = 'always'", "reduction"),
        ("arithmetic = 'int8'\n[train]\noptimizer = 'adam'", "optimizer = 'adam'"),
        ("arithmetic = 'mixed'\n[train]\noptimizer = 'muon'", "optimizer = 'muon'"),
        ("arithmetic = 'int8'\n[strategy]\nname = 'diloco'", "optimizer = 'adamw'"),
        ("arithmetic = 'mixed'\n[strategy]\nname = 'muloco'", "optimizer = 'muon'"),
        (
            "arithmetic = 'mixed'\nmerge = 'weights'\n[strategy]\nname = 'split-replay'\n[edgecloud]",
            "merge = 'weights'",
        ),
        (
            "arithmetic = 'mixed'\nmerge = 'weights'\n[strategy]\nname = 'fedavg'",
            "keep no alpha",
        ),
        ("[train]\noptimizer = 'muon'\n[strategy]\nname = 'hybrid-pipeline'", "use 'adamw'"),
    ],
)
def test_what_the_arithmetic_does_not_know_is_named(text: str, named: str, tmp_path: Path) -> None:
    (tmp_path / "case.toml").write_text(f"[precision]\n{text}\n")
    refused(lambda: load_scenario(tmp_path / "case.toml"), named)


def test_mixed_trains_with_weight_decay_and_passes_of_every_member() -> None:
    """Unlike int8 alone: the optimiser is the CPU's (F12)."""
    changed = mixed().replaced(train=TrainConfig(weight_decay=0.01, reduction="always"))
    made = trainer(changed)
    assert made.fp32.reduction == "always"
    assert from_document(to_document(changed)) == changed


# ------------------------------------------------------------------------------------------------------ plan
@pytest.mark.few_cells(2)
@pytest.mark.parametrize(
    ("rule", "bound"),
    [
        ("paper", "no less than 1/2.72"),
        ("half", "no less than 1/2.00"),
        ("normalised", "no bound"),
        ("fp32", "everything to the CPU"),
    ],
)
def test_a_plan_says_at_which_alpha_it_holds_and_what_the_rule_can_gain(
    rule: str, bound: str, tmp_path: Path, socflower: Socflower
) -> None:
    (tmp_path / "case.toml").write_text(
        f"[precision]\narithmetic = 'mixed'\nrule = '{rule}'\n[strategy]\ngroups = 2\n"
    )
    printed = " ".join(socflower("plan case.toml").out.split())
    assert f"Rule '{rule}'" in printed and bound in printed
    assert ("planned at alpha = 1" in printed) == (rule in ("paper", "normalised"))


def test_a_plan_of_mixed_precision_is_faster_by_no_more_than_the_rule_allows() -> None:
    steps = {
        rule: plan_scenario(mixed(rule, groups=4))["predicted"]["step_s"]
        for rule in ("fp32", "paper", "int8")
    }
    assert steps["fp32"] / math.e < steps["paper"] < steps["fp32"]
    assert steps["int8"] < steps["paper"]


def test_momentum_is_what_the_update_has_where_nothing_is_said() -> None:
    def momentum(**tables: Any) -> float:
        return small().replaced(train=TrainConfig(**tables.pop("train", {})), **tables).momentum

    niti, masters = (
        PrecisionConfig(arithmetic="int8", algorithm="niti"),
        PrecisionConfig(arithmetic="int8"),
    )
    assert momentum() == momentum(precision=masters) == 0.9
    assert momentum(precision=niti) == momentum(train={"optimizer": "adam"}) == 0.0
    assert (
        momentum(precision=niti, train={"momentum": 0.0})
        == momentum(train={"momentum": 0.0})
        == 0.0
    )
    assert momentum(precision=masters, train={"momentum": 0.5}) == 0.5


ODD_NET = """
from torch import nn

def odd_net():
    return nn.Sequential(nn.Conv2d(1, 4, 5, stride=4), nn.Tanhshrink(), nn.Flatten(), nn.Linear(4 * 6**2, 10))
"""


@pytest.mark.parametrize("arithmetic", ["int8", "mixed"])
def test_a_model_that_int8_lacks_an_operator_for_is_refused_before_round_1_and_the_advice_trains_it(
    arithmetic: str,
    tmp_path: Path,
) -> None:
    (tmp_path / f"odd_{arithmetic}.py").write_text(ODD_NET)
    path = tmp_path / "case.toml"

    def run(key: str) -> list[Any]:
        path.write_text(
            f"[model]\nname = 'odd-net'\nfactory = 'odd_{arithmetic}:odd_net'\n[train]\nepochs = 1\n"
            f"[strategy]\nname = 'sgd'\n[precision]\narithmetic = '{arithmetic}'\n{key}\n"
        )
        rounds: list[Any] = []
        run_scenario(load_scenario(path), num_workers=0, on_round=rounds.append)
        return rounds

    line = refused(lambda: run("unsupported = 'refuse'"), "'odd-net'", "Tanhshrink")
    advised = re.findall(r"set \[precision\] (unsupported = 'fp32')", line)
    assert run(advised[0])


# ------------------------------------------------------------------------------------------------- placement
def profile_of(*cells: dict[str, Any]) -> str:
    return json.dumps({"cells": cells})


def cell(batch_size: int, *on_cpu: str, data: str = "digits") -> dict[str, Any]:
    names = ("0", "2", "3", "5", "7", "9", "11")
    operators = [{"name": name, "side": "fp32" if name in on_cpu else "int8"} for name in names]
    return {"model": "lenet5", "data": data, "batch_size": batch_size, "operators": operators}


@pytest.mark.parametrize("arithmetic", ["int8", pytest.param("mixed", marks=pytest.mark.slow)])
def test_training_follows_the_placement_of_a_profile(arithmetic: str, tmp_path: Path) -> None:
    """Of the cell with the nearest batch size; what ran in FP32 is in the notes, and weights follow from it."""
    cells = cell(1, "3"), cell(64, "9", "11"), cell(128, "2", data="mnist")
    (tmp_path / "here.json").write_text(profile_of(*cells))
    (tmp_path / "case.toml").write_text(
        f"[precision]\narithmetic = '{arithmetic}'\nfp32_operators = 'here.json'\n[train]\nbatch_size = 60\n"
    )
    placed = load_scenario(tmp_path / "case.toml")
    assert placed.precision.fp32_operators == ("9", "11")
    assert from_document(to_document(placed)) == placed
    small_run = mixed(arithmetic=arithmetic, held_out=HELD_OUT)
    named = small_run.replaced(
        precision=PrecisionConfig(
            arithmetic=arithmetic, held_out=HELD_OUT, fp32_operators=placed.precision.fp32_operators
        )
    )
    ran = run(named)
    assert any("9 (Linear), 11 (Linear)" in note for note in ran["notes"])
    assert ran["weights_sha256"] != run(small_run)["weights_sha256"]


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (None, "cannot be read"),
        ("[1]", "JSON object"),
        (profile_of(), "no placement of lenet5 on digits"),
        (profile_of(cell(8, data="mnist")), "--out FILE"),
        (json.dumps({"cells": [{"model": "lenet5", "data": "digits"}]}), "no placement"),
        (json.dumps({"cells": 3}), "no placement"),
    ],
)
def test_a_profile_without_the_placement_is_named(
    content: str | None, says: str, tmp_path: Path
) -> None:
    if content is not None:
        (tmp_path / "here.json").write_text(content)
    (tmp_path / "case.toml").write_text(
        "[precision]\narithmetic = 'int8'\nfp32_operators = 'here.json'\n"
    )
    refused(lambda: load_scenario(tmp_path / "case.toml"), "here.json", says)


def test_an_operator_that_the_model_lacks_is_refused_before_anything_starts() -> None:
    case = mixed().replaced(
        precision=PrecisionConfig(arithmetic="int8", fp32_operators=("softmax",))
    )
    refused(lambda: run_scenario(case, num_workers=0), "softmax")
