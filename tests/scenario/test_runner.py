"""A run from scenario to result: what the document promises, what training must obey, what is left behind."""

import json
import logging
import re
import tempfile
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from socflower.errors import ConfigError, InfeasiblePlan, SocflowerError
from socflower.scenario import jobs
from socflower.scenario.prepared_run import prepare
from socflower.scenario.runner import run_scenario, run_to_folder
from socflower.scenario.schema.config import EventConfig, ModelConfig
from socflower.scenario.schema.file import from_document
from socflower.scenario.schema.scenario_file import Scenario
from socflower.wire.folders import new_folder
from tests.one_line import refused
from tests.scenario.small_runs import LENET_BYTES, small, small_result

pytestmark = pytest.mark.usefixtures("on_few_digits")
STRATEGIES = ("socflow", "ring", "fedavg", "sgd")
TIERS = {"intra_board", "inter_board", "hub", "wan"}


@pytest.fixture
def temporary_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A place of its own for temporary folders, so that a test sees what stays in it (not with worker processes)."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    monkeypatch.setenv(
        "TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "torch")
    )  # which torch makes when it is first used
    return folder


# ---------------------------------------------------------------------------------------------- the document
@pytest.mark.parametrize("name", STRATEGIES)
def test_the_result_has_every_promised_key_with_its_type(name: str) -> None:
    result = json.loads(json.dumps(small_result(name), allow_nan=False))
    for kind, keys in (
        (dict, "scenario kernels transports bytes breakdown"),
        (str, "engine strategy weights_sha256"),
        (list, "rounds expectations"),
        (float, "final_accuracy virtual_s wall_s energy_j"),
        (int, "schema seed"),
    ):
        for key in keys.split():
            assert isinstance(result[key], kind), key
    assert (result["schema"], result["engine"], result["seed"]) == (1, "local", 1)
    assert result["strategy"] == name
    assert from_document(result["scenario"]) == small(name)
    assert re.fullmatch(r"[0-9a-f]{64}", result["weights_sha256"])
    assert set(result["bytes"]) == TIERS
    for entry in result["rounds"]:
        assert {"energy_j", "bytes", "events"} <= set(entry)
        for key in ("round", "epoch", "accuracy", "loss", "virtual_s"):
            assert isinstance(entry[key], int | float)
        assert set(entry["bytes"]) == TIERS
        assert entry["events"] == []


@pytest.mark.slow
def test_turns_are_taken_where_they_are_faster_and_the_result_says_so() -> None:
    """Two groups of three on boards of two share an uplink: weights are equal, and the faster way is chosen."""
    ways = {
        asked: small_result(boards=(2, 2, 2), uplink_turns=asked) for asked in ("auto", True, False)
    }
    assert len({result["weights_sha256"] for result in ways.values()}) == 1
    assert ways["auto"]["virtual_s"] == min(ways[True]["virtual_s"], ways[False]["virtual_s"])
    assert ways[True]["virtual_s"] != ways[False]["virtual_s"]
    for asked, result in ways.items():
        taken, plan = result["virtual_s"] == ways[True]["virtual_s"], result["plan"]
        assert plan["uplink_turns"] == taken
        assert plan["uplink_turns_by"] == ("predicted" if asked == "auto" else "asked")
        assert {entry["uplink_turns"] for entry in result["rounds"][1:]} == {taken}
    assert small_result()["plan"]["uplink_turns_by"] == "no-shared-uplink"


@pytest.mark.parametrize("name", STRATEGIES)
def test_rounds_are_numbered_and_what_they_cost_accumulates(name: str) -> None:
    result = small_result(name)
    rounds = result["rounds"]
    assert [entry["round"] for entry in rounds] == list(range(len(rounds)))
    assert rounds[0]["virtual_s"] == rounds[0]["energy_j"] == rounds[0]["epoch"] == 0
    assert rounds[-1]["epoch"] == 1.0
    for before, after in pairwise(rounds):
        assert before["epoch"] < after["epoch"]
        assert before["virtual_s"] < after["virtual_s"]
        assert before["energy_j"] < after["energy_j"]
        assert all(before["bytes"][tier] <= after["bytes"][tier] for tier in TIERS)
    for key in ("virtual_s", "energy_j", "bytes"):
        assert rounds[-1][key] == result[key]
    assert rounds[-1]["accuracy"] == result["final_accuracy"] > rounds[0]["accuracy"]


@pytest.mark.parametrize("name", STRATEGIES)
def test_the_breakdown_sums_to_the_energy_and_to_every_socs_time(name: str) -> None:
    result = small_result(name)
    assert sum(result["breakdown"]["energy_j"].values()) == pytest.approx(result["energy_j"])
    num_socs = 1 if name == "sgd" else 4
    assert sum(result["breakdown"]["soc_seconds"].values()) == pytest.approx(
        num_socs * result["virtual_s"]
    )


def test_bytes_on_the_hub_of_a_star_are_an_upload_and_a_download_of_each_leader_at_each_synchronisation() -> (
    None
):
    """F8: N of them, never M."""
    result = small_result("socflow", leaders="star")
    num_synchronisations, num_groups = len(result["rounds"]) - 1, 2
    assert num_synchronisations == 2
    assert result["bytes"]["hub"] == 2 * num_groups * num_synchronisations * LENET_BYTES
    every_soc_a_group = small_result("socflow", groups=4, leaders="star")
    assert every_soc_a_group["bytes"]["hub"] == 2 * 4 * 2 * LENET_BYTES
    assert every_soc_a_group["bytes"]["intra_board"] == 0.0


def test_bytes_on_the_hub_of_a_ring_of_leaders_are_a_model_at_each_synchronisation() -> None:
    """F8: one up and none down, and it is what "auto" takes here."""
    result = small_result("socflow")
    assert result["plan"]["leaders"] == "ring" and result["plan"]["leaders_by"] == "predicted"
    assert result["bytes"]["hub"] == 2 * LENET_BYTES


@pytest.mark.parametrize("name", ["ring", "sgd"])
def test_one_group_never_uses_the_hub(name: str) -> None:
    result = small_result(name)
    assert result["bytes"]["hub"] == 0.0
    assert (result["bytes"]["inter_board"] > 0.0) == (name == "ring")


def test_fedavg_moves_every_model_through_the_hub() -> None:
    hub_bytes = small_result("fedavg")["bytes"]["hub"]
    # A message's arrays carry a header each, less than a hundredth of the model.
    assert 2 * 4 * LENET_BYTES <= hub_bytes < 1.01 * 2 * 4 * LENET_BYTES


def test_claims_are_in_the_result_with_what_was_observed() -> None:
    claims = {"min_accuracy": 0.5, "max_groups": 1, "min_speedup_over_ring": 2.0}
    result = run_scenario(small().replaced(expect=claims), num_workers=0)
    holds = {claim["name"]: claim["holds"] for claim in result["expectations"]}
    assert holds == {"min_accuracy": True, "max_groups": False, "min_speedup_over_ring": None}
    assert result["expectations"][0]["observed"] == result["final_accuracy"]


def test_each_round_is_told_while_it_runs() -> None:
    told: list[dict[str, Any]] = []
    result = run_scenario(small(), num_workers=0, on_round=told.append)
    assert [{**entry, "num_rounds": 2} for entry in result["rounds"]] == told


# ------------------------------------------------------------------------------------------------- weights
@pytest.mark.few_cells(2)
@pytest.mark.parametrize("name", STRATEGIES)
def test_equal_seeds_give_equal_weights_and_others_do_not(name: str) -> None:
    """FedAvg too, although Flower draws its nodes from the global random generator."""
    first, again = small_result(name), run_scenario(small(name), num_workers=0)
    for key in ("weights_sha256", "final_accuracy", "virtual_s", "energy_j", "bytes"):
        assert again[key] == first[key]
    assert small_result(name, seed=2)["weights_sha256"] != first["weights_sha256"]


def test_a_ring_over_all_socs_is_sgd_on_one() -> None:
    """F4, exactly: LeNet has no layer that depends on the batch."""
    ring, alone = small_result("ring"), small_result("sgd")
    assert ring["weights_sha256"] == alone["weights_sha256"]
    assert ring["final_accuracy"] == alone["final_accuracy"]


def test_one_group_of_all_socs_is_the_ring() -> None:
    one_group = small_result("socflow", groups=1, interval=1.0)
    assert one_group["weights_sha256"] == small_result("ring")["weights_sha256"]
    assert one_group["virtual_s"] == small_result("ring")["virtual_s"]


OFTEN = {"epochs": 2, "batch_size": 8, "interval": 0.0625}


def test_groups_auto_is_the_run_of_the_chosen_number_with_the_cost_of_the_others() -> None:
    """Each number trains the first rounds of its own run, momentum included, and the chosen one goes on from there."""
    result = small_result("socflow", groups="auto", **OFTEN)
    warm_up = result["warm_up"]
    number, num_rounds = warm_up["num_groups"], warm_up["num_rounds"]
    alone = small_result("socflow", groups=number, **OFTEN)
    assert len(warm_up["accuracy"]) >= 2 and number == len(result["plan"]["groups"])
    assert result["weights_sha256"] == alone["weights_sha256"]
    for ours, theirs in zip(result["rounds"], alone["rounds"], strict=True):
        assert [ours[key] for key in ("epoch", "accuracy", "loss")] == [
            theirs[key] for key in ("epoch", "accuracy", "loss")
        ]
    # The search costs time and energy like all other training.
    others_s = sum(warm_up["seconds"].values()) - warm_up["seconds"][str(number)]
    assert result["virtual_s"] == pytest.approx(alone["virtual_s"] + others_s)
    assert result["energy_j"] > alone["energy_j"] and alone["warm_up"] is None
    assert warm_up["virtual_s"] == pytest.approx(sum(warm_up["seconds"].values()))
    assert 0.0 < warm_up["virtual_s"] <= 0.25 * alone["virtual_s"] * (1 + 1e-9)
    assert warm_up["accuracy"][str(number)] == result["rounds"][num_rounds]["accuracy"]


def test_a_run_too_short_for_a_comparison_takes_one_group_a_board() -> None:
    result = small_result("socflow", groups="auto")
    assert (result["warm_up"]["num_groups"], result["warm_up"]["accuracy"]) == (2, {})
    assert result["weights_sha256"] == small_result("socflow")["weights_sha256"]


@pytest.mark.slow
def test_the_paper_s_rule_trains_an_epoch_with_each_number() -> None:
    result = small_result("socflow", groups="auto", group_rule="paper", epochs=2)
    warm_up = result["warm_up"]
    assert [*warm_up["accuracy"]] == ["1", "2", "4"][: len(warm_up["accuracy"])]
    assert result["rounds"][warm_up["num_rounds"]]["epoch"] == 1.0


# -------------------------------------------------------------------------------------------------- folders
def everything_in(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*")}


def test_a_run_writes_result_trace_and_report_and_nothing_else(
    tmp_path: Path, temporary_folder: Path
) -> None:
    out = tmp_path / "deep" / "out"
    level = logging.getLogger("flwr").level
    result = run_to_folder(small(), out, num_workers=0)
    assert logging.getLogger("flwr").level == level
    assert everything_in(tmp_path / "deep") == {
        "out",
        "out/result.json",
        "out/trace.json",
        "out/report.html",
    }
    assert not everything_in(temporary_folder)
    assert json.loads((out / "result.json").read_text()) == result
    trace = json.loads((out / "trace.json").read_text())
    spans = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    assert spans and all(event["dur"] >= 0 for event in spans)
    end_us = max(event["ts"] + event["dur"] for event in spans)
    assert end_us <= result["virtual_s"] * 1e6 * (1 + 1e-9)
    page = (out / "report.html").read_text("utf-8")
    assert "Groups on boards" in page and "No strategy of this report forms groups" not in page


def fail_training(monkeypatch: pytest.MonkeyPatch) -> Scenario:
    return small(events=(EventConfig(kind="raise", soc=0, round=2),))


def fail_report(monkeypatch: pytest.MonkeyPatch) -> Scenario:
    def refuse(*_: object, **__: object) -> None:
        raise ConfigError("no report today")

    monkeypatch.setattr(jobs, "run_job", lambda job, *_, trace_to, **__: {"a": 1})
    monkeypatch.setattr(jobs, "write_report", refuse)
    return small()


@pytest.mark.parametrize("fail", [fail_training, fail_report])
def test_a_failure_leaves_everything_as_it_was(
    fail: Callable[[pytest.MonkeyPatch], Scenario],
    tmp_path: Path,
    temporary_folder: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    scenario, here = fail(monkeypatch), tmp_path / "here"
    old = here / "old"
    old.mkdir(parents=True)
    (old / "result.json").write_text("of yesterday")
    for out in (old, here / "new" / "deep"):
        with pytest.raises(SocflowerError):
            run_to_folder(scenario, out, num_workers=0)
    assert everything_in(here) == {"old", "old/result.json"}
    assert (old / "result.json").read_text() == "of yesterday"
    assert not everything_in(temporary_folder)


def test_a_new_result_replaces_the_old_one_and_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "trace.json").mkdir()
    (tmp_path / "notes.txt").write_text("mine")
    with new_folder(tmp_path) as fresh:
        (fresh / "trace.json").write_text("new")
    assert (tmp_path / "trace.json").read_text() == "new"
    assert (tmp_path / "notes.txt").read_text() == "mine"


@pytest.mark.parametrize("out", ["file", "file/below", "file/further/below"])
def test_an_out_that_cannot_be_a_folder_is_refused_before_training(
    out: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setattr(jobs, "run_job", lambda *_, **__: pytest.fail("trained for nothing"))
    refused(lambda: run_to_folder(small(), tmp_path / out), "--out")
    assert (tmp_path / "file").read_text() == "in the way"


# ------------------------------------------------------------------------------------------------ feasibility
@pytest.mark.parametrize(
    ("scenario", "named"),
    [
        (small(groups=5), "groups = 5, but only 4 SoCs"),
        (small(groups=3, socs=2), "groups = 3, but only 2 SoCs"),
        (small(socs=9), "socs = 9, but the cluster has 4 SoCs"),
    ],
)
def test_what_cannot_run_is_refused_with_both_numbers(scenario: Scenario, named: str) -> None:
    refused(lambda: prepare(scenario, "local"), named, error=InfeasiblePlan)


def test_what_nobody_knows_is_refused_before_it_runs() -> None:
    refused(lambda: prepare(small(), "cloud"), "--engine cloud", "local, simulation")
    unknown = small().replaced(model=ModelConfig(name="lenet"))
    refused(lambda: prepare(unknown, "local"), "name = 'lenet'")


def test_an_event_may_strike_any_slot_of_the_cluster_when_some_are_idle() -> None:
    prepare(small(socs=2, groups=1, events=(EventConfig(kind="nan", soc=3, round=1),)), "local")
