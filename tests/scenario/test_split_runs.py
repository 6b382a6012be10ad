"""Split training through the whole path: scenario file, Flower messages, both halves, result and report."""

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from socflower.cluster.device_catalog import device
from socflower.edgecloud.links.bandwidth_profile import LinkRates
from socflower.edgecloud.plan.cost_model import training_s
from socflower.edgecloud.plan.cuts import SplitCosts, SplitPlan
from socflower.edgecloud.plan.device_costs import edge_energy_j, split_costs
from socflower.edgecloud.plan.party import Party
from socflower.edgecloud.plan.phases import phases
from socflower.edgecloud.plan.split_pipeline import Timeline, simulate_split
from socflower.edgecloud.split_program import cut_shapes
from socflower.model_graph.layer_profile import profile_module
from socflower.scenario.comparison import compare
from socflower.scenario.heat import predicted_heat
from socflower.scenario.runner import run_scenario, run_to_folder
from socflower.scenario.schema.file import from_document, scenario_cluster, to_document
from socflower.scenario.schema.scenario_file import Scenario
from socflower.scenario.split_setting import SplitSetting
from socflower.sim import EventClock
from tests.command_line import Socflower, is_mistake
from tests.one_line import refused
from tests.scenario.small_runs import without_drawing
from tests.scenario.test_resume import assert_ends_as, resume, stop_after

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.usefixtures("on_few_digits")
RATES = LinkRates(up_bytes_per_s=4e6, down_bytes_per_s=8e6, latency_s=0.004)
CONSTANT = {
    "link": "constant",
    "bytes_per_s": [RATES.up_bytes_per_s, RATES.down_bytes_per_s],
    "latency_s": RATES.latency_s,
}
NOT_CONSTANT = {"bytes_per_s": None, "latency_s": 0.005}
EXACT = {**CONSTANT, "bits": [32], "cut": "4", "adapt": False}
MOVING = {
    "link": "wifi",
    "bytes_per_s": None,
    "latency_s": 0.0,
    "bits": [32],
    "segments": [[0.1, 1e6, 1e6], [9.0, 5e9, 5e9]],
    "window": [[0.0, 2]],
}


def split(
    name: str = "split-replay",
    *,
    edges: int = 1,
    train: Mapping[str, Any] | None = None,
    model: str = "lenet5",
    images: str = "digits",
    seed: int = 1,
    device: str = "raspberry-pi-4b",
    precision: Mapping[str, Any] | None = None,
    event: Sequence[Mapping[str, Any]] = (),
    round_epochs: float = 1.0,
    **edgecloud: Any,
) -> Scenario:
    """Return a scenario of LeNet on two of a few digits, 7 batches an epoch."""
    table = {**CONSTANT, **({} if images == "clicks" else {"classes": [0, 1]}), **edgecloud}
    return from_document(
        {
            "seed": seed,
            "name": "split",
            "question": "Does it run?",
            "model": {"name": model},
            "data": {"name": images},
            "cluster": {"boards": 1, "socs_per_board": edges, "device": device},
            "strategy": {"name": name, "sync_interval_epochs": round_epochs},
            "train": {"epochs": 2, "batch_size": 32, "learning_rate": 0.02, **(train or {})},
            "precision": precision or {},
            "event": [{"kind": "preempt", **each} for each in event],
            "edgecloud": {key: value for key, value in table.items() if value is not None},
        }
    )


def ran(scenario: Scenario) -> dict[str, Any]:
    return run_scenario(scenario, num_workers=0)


@cache
def ran_with_window(window: int) -> dict[str, Any]:
    return ran(split(**EXACT, window=[[0.0, window]]))


# ---------------------------------------------------------------------------------------------------- weights
@pytest.mark.slow
def test_equal_seeds_give_equal_weights_and_equal_times() -> None:
    again = ran(split(**EXACT, window=[[0.0, 3]]))
    for key in ("weights_sha256", "virtual_s", "energy_j", "split"):
        assert again[key] == ran_with_window(3)[key]
    other = ran(split(**EXACT, window=[[0.0, 3]], seed=2))
    assert other["weights_sha256"] != again["weights_sha256"]


def test_weights_depend_on_how_stale_gradients_may_be() -> None:
    results = [ran_with_window(window) for window in (0, 1, 2)]
    assert len({result["weights_sha256"] for result in results}) == 3
    assert [result["split"]["max_staleness"] for result in results] == [0, 1, 2]


@pytest.mark.parametrize("cut", [0, "8"])
def test_without_staleness_and_compression_the_weights_are_those_of_the_edge_alone(
    cut: int | str,
) -> None:
    """F23, bit for bit through Flower's messages; plain split learning and JointDNN are such trainings too."""
    alone = ran(split("edge-only"))
    assert (
        ran(split(**{**EXACT, "cut": cut}, window=[[0.0, 0]]))["weights_sha256"]
        == alone["weights_sha256"]
    )
    assert (
        ran(split("split", cut=cut, codec_for="ours"))["weights_sha256"] == alone["weights_sha256"]
    )
    assert alone["bytes"]["wan"] == 0 and alone["split"]["start"] == "edge alone"


def test_a_cut_that_moves_changes_no_weights_where_nothing_is_stale_or_compressed() -> None:
    """After a tenth of a second the link is so fast that all but one layer leave the edge."""
    moved = ran(split(**{**MOVING, "window": [[0.0, 0]]}))
    assert moved["split"]["num_moves"] >= 1
    assert moved["weights_sha256"] == ran(split("edge-only"))["weights_sha256"]


# --------------------------------------------------------------------------------------------- time and bytes
def test_virtual_time_is_that_of_the_formulas() -> None:
    """F26 over a link that never changes; a round ends with nothing under way, so each of both begins anew."""
    setting = SplitSetting(split())
    costs, rounds, batches = setting.costs[0], 2, setting.workload.batches_per_epoch
    assert ran(split("edge-only"))["virtual_s"] == pytest.approx(
        rounds * batches * costs.edge_only_s
    )
    cut = [each.name for each in costs.cuts].index("4")
    for window in (0, 1, 3):
        at_once = phases(costs, SplitPlan(cut=cut, bits=32, window=window), RATES)
        longest_s = rounds * training_s(at_once, batches, window)
        shortest_s = rounds * ((batches - 1) * at_once.longest_s + at_once.total_s)
        observed_s = ran_with_window(window)["virtual_s"]
        if window == 0:
            assert observed_s == pytest.approx(longest_s)
        assert shortest_s * (1 - 1e-9) <= observed_s <= longest_s * (1 + 1e-9)


def test_bytes_over_the_wan_are_features_labels_and_gradients() -> None:
    setting = SplitSetting(split())
    costs, batches = setting.costs[0], setting.total_batches
    cut = [each.name for each in costs.cuts].index("4")
    assert ran_with_window(1)["bytes"]["wan"] == pytest.approx(
        batches * (costs.feature_bytes(cut, 32) + costs.gradient_bytes(cut))
    )
    frozen = ran(split(**EXACT, frozen="4"))
    assert frozen["bytes"]["wan"] == pytest.approx(
        batches * (costs.feature_bytes(cut, 32) + costs.header_bytes)
    )
    assert frozen["split"]["max_staleness"] == 0


def test_a_window_by_phase_is_kept_to_in_each_round() -> None:
    result = ran(split(window=[[0.0, 1], [0.5, 3]], bits=[32], cut="4"))
    _, first, second = result["rounds"]
    assert first["mean_staleness"] <= 1 and second["mean_staleness"] <= 3
    assert result["split"]["max_staleness"] == 3


@pytest.mark.slow
def test_staleness_is_told_by_edge() -> None:
    """A fast party waits for the slow one, so its gradients come back as late as they may."""
    link = {"bytes_per_s": [1e9, 1e9], "latency_s": 0.0001}
    training = {"epochs": 1, "batch_size": 4096, "optimizer": "adam"}
    settings = {"gradient_bits": 8, "link": ["one-hop", "constant"], "window": [[0.0, 4]]}
    document = to_document(
        split(model="click-model", images="clicks", train=training, **link, **settings)
    )
    devices = ("jetson-tx2", "raspberry-pi-4b")
    document["cluster"] = {}
    document["board"] = [{"device": device, "socs": 1} for device in devices]
    result = ran(from_document(document))
    fast, slow = result["split"]["mean_staleness_by_edge"]
    assert result["split"]["mode"] == "joined" and 3 < fast <= 4 and slow < 2
    assert result["split"]["staleness_spread"] == pytest.approx(fast - slow)


# --------------------------------------------------------------------------------------------- an edge in integers
INT8 = {"arithmetic": "int8", "algorithm": "adaptive-fixed-point"}


def edge_costs(setting: SplitSetting, batch_size: int, **edge: Any) -> SplitCosts:
    """Return what the cost model says of LeNet between a phone and the cloud."""
    program = setting.workload.program
    profile = profile_module(program.model(), (1, 28, 28), "lenet5")
    cuts = cut_shapes(program.split, profile)  # type: ignore[attr-defined]
    phone, cloud = device("snapdragon-865"), device("gpu-v100")
    return split_costs(profile, cuts, phone, cloud, batch_size, **edge)


def simulated(setting: SplitSetting, party: Party) -> Timeline:
    """Return a simulation of both epochs."""
    clock = EventClock(setting.cluster)
    return simulate_split([party], 14, clock=clock, cluster=setting.cluster)


def test_an_int8_edge_is_priced_on_its_int8_processor_and_the_cloud_in_fp32() -> None:
    """Against the cost model for each processor, and the watts of the NPU in the joules of the run."""
    scenario = split(device="snapdragon-865", precision=INT8, cut=1, adapt=False)
    setting = SplitSetting(scenario)
    (party,) = setting.parties()
    costs = edge_costs(setting, 32, edge_processor="npu", edge_value_bytes=1.0)
    assert party.costs == costs and costs.edge_processor == "npu"
    for ours, in_fp32 in zip(costs.cuts, edge_costs(setting, 32).cuts, strict=True):
        assert ours.cloud_s == in_fp32.cloud_s
        assert ours.edge_forward_s < in_fp32.edge_forward_s
        assert ours.edge_memory_bytes < in_fp32.edge_memory_bytes
    result = ran(scenario)
    past = simulated(setting, party)
    least, most = (
        edge_energy_j(
            device("snapdragon-865"),
            compute_s=past.parties[0].compute_s,
            network_s=network_s,
            duration_s=past.duration_s,
            processor="npu",
        )
        for network_s in (0.0, past.duration_s)
    )
    assert least < past.usage.total_energy_j < most
    assert [each["priced"] for each in result["processors"]] == [["npu"], ["gpu"]]
    assert "int8" in result["kernels"] and "snapdragon-865's npu" in " ".join(result["notes"])


def test_a_mixed_edge_is_priced_as_both_processors_at_once() -> None:
    """Each pass as long as the longer part's, priced by itself; the joules have both processors' watts."""
    mixed = {"arithmetic": "mixed", "held_out": 20}
    setting = SplitSetting(split(device="snapdragon-865", precision=mixed, cut=1, adapt=False))
    (party,) = setting.parties()
    cpu = edge_costs(setting, 12)  # 12 of 32, at least e^-1 of them
    npu = edge_costs(setting, 20, edge_processor="npu")
    for both, one, other in zip(party.costs.cuts, cpu.cuts, npu.cuts, strict=True):
        assert both.edge_forward_s == pytest.approx(max(one.edge_forward_s, other.edge_forward_s))
        assert both.edge_backward_s >= max(one.edge_backward_s, other.edge_backward_s)
    assert party.costs.edge_processor == "cpu" and party.costs.edge_beside[0][0] == "npu"
    assert setting.workload.num_samples() == [len(setting.workload.samples(0))]
    past = simulated(setting, party)
    without = simulated(setting, replace(party, costs=replace(party.costs, edge_beside=())))
    edge = device("snapdragon-865")
    extra_w = edge.processor("npu").active_w - edge.idle_w
    assert past.duration_s == without.duration_s
    assert past.usage.total_energy_j - without.usage.total_energy_j == pytest.approx(
        extra_w * past.parties[0].compute_s * party.costs.edge_beside[0][1]
    )


# --------------------------------------------------------------------------------------------------- preemption
@pytest.mark.slow
def test_the_others_train_without_an_edge_that_its_user_has(tmp_path: Path) -> None:
    """The mean over both edges is that of the models of each alone, which a preemption of the other leaves."""
    trained, times = [], []
    for events in ([{"soc": 1, "round": 1, "at": 0.0}], [{"soc": 0, "round": 1, "at": 0.0}], []):
        scenario = split(edges=2, round_epochs=2.0, event=events)
        out = tmp_path / str(len(times))
        result = run_to_folder(scenario, out, num_workers=0, save_model=out.with_suffix(".npz"))
        with np.load(out.with_suffix(".npz")) as model:
            trained.append(
                {name: model[name].astype(np.float64) for name in model.files if model[name].ndim}
            )
        times.append((result["virtual_s"], result["energy_j"]))
    one, other, both = trained
    samples = SplitSetting(split(edges=2)).workload.num_samples()
    for name, mean in both.items():
        expected = (samples[0] * one[name] + samples[1] * other[name]) / sum(samples)
        assert np.allclose(mean, expected, atol=1e-6), name
    assert times[2][0] == pytest.approx(max(times[0][0], times[1][0]))
    assert times[2][1] == pytest.approx(
        times[0][1] + times[1][1], rel=0.05
    )  # one waits for the other at the end


@pytest.mark.slow
def test_an_edge_leaves_within_a_round_and_is_back_with_the_others_model() -> None:
    result = ran(
        split(edges=2, train={"epochs": 4}, event=[{"soc": 1, "round": 2, "rounds": 2, "at": 0.5}])
    )
    _, first, second, third, fourth = (entry["events"] for entry in result["rounds"])
    (left,), (back,) = second, fourth
    assert (first, left["kind"], third, back["kind"]) == ([], "preempted", [], "returned")
    assert left["text"] == "edge 1: preempted by its user after 2 of 4 batches"
    assert sum(result["split"]["staleness"].values()) == 4 * 4 + 4 + 2 + 4


# ----------------------------------------------------------------------------------------------------- resuming
CASES = {
    "moving cut": split(**MOVING, round_epochs=0.5),
    "adam, frozen": split(frozen="1", train={"optimizer": "adam", "learning_rate": 0.002}),
    "averaged halves": split(edges=2, round_epochs=1.0),
    "shared half": split(edges=2, cloud_model="shared"),
    "reverse": split(model="digit-generator", classes=[1]),
    "edge alone": split("edge-only"),
    "int8": split(**MOVING, round_epochs=0.5, precision=INT8),
    "mixed": split(
        device="snapdragon-865",
        cut=1,
        adapt=False,
        precision={"arithmetic": "mixed", "rule": "normalised", "held_out": 20},
    ),
    "averaged int8": split(
        edges=2, precision={"arithmetic": "int8"}, event=[{"soc": 1, "round": 1}]
    ),
}
SLOW = ("adam, frozen", "moving cut", "averaged halves", "edge alone", "averaged int8", "mixed")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] if name in SLOW else []) for name in CASES]
)
def test_a_resumed_run_ends_as_one_that_was_never_interrupted(name: str, tmp_path: Path) -> None:
    """Weights, virtual time, moves, staleness, trace: everything but the wall clock."""
    scenario, out = CASES[name], tmp_path / "out"
    reference = without_drawing(scenario, tmp_path / "reference")
    stop_after(scenario, out, 1)
    assert resume(scenario, out)["resumed_from"] == [1]
    ours = assert_ends_as(tmp_path / "reference", out)
    assert ours["split"] == reference["split"] and ours["virtual_s"] == reference["virtual_s"]


@pytest.mark.slow
def test_heat_and_users_slow_edges_down_and_a_killed_run_goes_on_alike(tmp_path: Path) -> None:
    """A board without air; the rack's temperatures and its games are part of a checkpoint."""
    cold = split(**EXACT, window=[[0.0, 3]], edges=2)
    slow = tomllib.loads((ROOT / "scenarios" / "clusters" / "slow_soc.toml").read_text("utf-8"))
    document = {**to_document(cold), "device": slow["device"]}
    document["cluster"] = {"boards": 1, "socs_per_board": 2, "device": "slow-soc"}
    cool = from_document(document)
    blocked = {"hot_boards": {0: 0.01}, "ambient_c": 33.0}
    document["thermal"] = {"fan": "fixed", "rpm": 3250, **blocked}
    users = {"games": "tidal", "low": 0.5, "high": 0.6, "mean_session_s": 300}
    hot = from_document({**document, "background_load": users})
    without_drawing(hot, tmp_path / "whole")
    stop_after(hot, tmp_path / "cut", 1)
    assert resume(hot, tmp_path / "cut")["resumed_from"] == [1]
    result = assert_ends_as(tmp_path / "whole", tmp_path / "cut")
    unthrottled = ran(cool)
    slowdown = result["virtual_s"] / unthrottled["virtual_s"] - 1
    assert result["heat"]["slowdown"] == pytest.approx(slowdown)
    assert result["heat"]["slowdown"] > 0.2
    assert result["heat"]["peak_c"] > 35.0
    assert result["heat"]["cooling_j"] > 0.0
    with_users_alone = ran(from_document({**to_document(hot), "thermal": None}))
    assert 0.1 < with_users_alone["heat"]["slowdown"] < result["heat"]["slowdown"]
    predicted = predicted_heat(hot, scenario_cluster(hot))
    assert predicted is not None
    assert predicted["virtual_s"] == pytest.approx(result["virtual_s"])


# ----------------------------------------------------------------------------------------------- kinds of work
def test_one_cloud_half_for_all_edges_does_as_many_steps_as_they_have_batches() -> None:
    shared = ran(split(edges=2, cloud_model="shared"))
    own = ran(split(edges=2))
    assert (shared["split"]["mode"], own["split"]["mode"]) == ("turns", "own")
    assert shared["weights_sha256"] != own["weights_sha256"]
    assert sum(shared["split"]["staleness"].values()) == sum(own["split"]["staleness"].values())


def test_a_generator_has_a_loss_and_no_accuracy() -> None:
    result = ran(split(model="digit-generator", train={"epochs": 1}, classes=[1]))
    assert result["final_accuracy"] is None
    assert 0 < result["rounds"][-1]["loss"] < result["rounds"][0]["loss"]


def test_a_generator_can_be_trained_by_the_edge_alone_too() -> None:
    """Which then has both codes and images; without staleness and compression a split changes no weights."""
    settings: dict[str, Any] = {"model": "digit-generator", "train": {"epochs": 1}, "classes": [1]}
    alone = ran(split("edge-only", **settings))
    assert (
        ran(split("split", codec_for="ours", **settings))["weights_sha256"]
        == alone["weights_sha256"]
    )


@pytest.mark.slow
def test_what_has_no_accuracy_is_compared_without_a_target(tmp_path: Path) -> None:
    scenario = split(model="digit-generator", train={"epochs": 1}, classes=[1])
    document = compare(scenario, ["split-replay", "split"], tmp_path, num_workers=0)
    assert document["target_accuracy"] is None
    assert [row["time_to_accuracy_s"] for row in document["rows"]] == [None, None]
    assert "Edge and cloud" in (tmp_path / "report.html").read_text()


def test_the_report_has_a_section_on_edge_and_cloud(tmp_path: Path) -> None:
    run_to_folder(split(**MOVING), tmp_path, num_workers=0)
    page = (tmp_path / "report.html").read_text()
    assert "Edge and cloud" in page and "Mean staleness" in page and "Moves of the cut" in page


def test_pretrained_weights_of_other_classes_are_taken_but_for_the_head(tmp_path: Path) -> None:
    before = tmp_path / "before.npz"
    without_drawing(split(classes=[1, 2, 3]), tmp_path / "before", save_model=before)
    random = split(frozen="8", train={"epochs": 1})
    taught = random.replaced(model=random.model.replaced(pretrained=str(before)))
    taught, random = ran(taught), ran(random)
    assert taught["rounds"][1]["loss"] < random["rounds"][1]["loss"]


# ----------------------------------------------------------------------------------------------------- bad input
@pytest.mark.few_cells(4)
@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"cut": "conv9"}, "1, 2, 4, 5, 8, 10"),
        ({"cut": 9}, "cut = 9: cuts are 0 to 5"),
        ({"frozen": "conv9"}, "conv9"),
        ({"classes": [3, 11]}, "class 11"),
        ({"link": ["wifi", "5g"], **NOT_CONSTANT}, "2 for 1 edges"),
        ({"link": "wfi", **NOT_CONSTANT}, "did you mean 'wifi'"),
        ({"model": "click-model"}, "'clicks'"),
        ({"model": "click-model", "images": "clicks", "frozen": "1"}, "classes and frozen"),
        ({"model": "click-model", "images": "clicks"}, "1 SoCs"),
        (
            {"model": "click-model", "images": "clicks", "edges": 2, "name": "edge-only"},
            "edge-only",
        ),
        ({"model": "digit-generator", "edges": 2}, "2 SoCs"),
        ({"event": [{"soc": 0, "round": 1}]}, "[background_load]"),
        ({"edges": 2, "cloud_model": "shared", "event": [{"soc": 0, "round": 1}]}, "every edge"),
        ({"edges": 2, "event": [{"soc": 2, "round": 1}]}, "soc = 2, round = 1"),
        ({"edges": 2, "event": [{"soc": 1, "round": 3}]}, "soc = 1, round = 3"),
        (
            {
                "edges": 2,
                "event": [{"soc": 0, "round": 1, "rounds": 2}, {"soc": 1, "round": 2, "at": 0.0}],
            },
            "round 2",
        ),
    ],
)
def test_what_does_not_go_together_is_said_in_one_line(options: dict[str, Any], named: str) -> None:
    name = options.pop("name", "split-replay")
    refused(lambda: ran(split(name, **options)), named)


def test_the_command_line_says_it_and_exits_with_2(socflower: Socflower, tmp_path: Path) -> None:
    text = "[strategy]\nname = 'split-replay'\nsocs = 1\n[edgecloud]\ncut = 9\n"
    (tmp_path / "split.toml").write_text(text)
    is_mistake(socflower("run split.toml --out out"), "cuts are 0 to 5")
    assert not (tmp_path / "out").exists()


# ----------------------------------------------------------------------------------------------------- groups
def test_batches_in_groups_wait_for_each_other() -> None:
    grouped = split(**EXACT, window=[[0.0, 3]], grouped=True)
    result = ran(grouped)
    sliding = ran_with_window(3)
    assert result["virtual_s"] > sliding["virtual_s"]
    assert result["weights_sha256"] != sliding["weights_sha256"]
    # Of 7 batches in an epoch 4 are in a whole group; the mean over a sliding window is larger.
    means = [each["mean_staleness"] for each in result["rounds"][1:]]
    assert max(means) < min(each["mean_staleness"] for each in sliding["rounds"][1:]) <= 3
    assert ran(split(**EXACT, window=[[0.0, 1]], grouped=True))["split"]["max_staleness"] == 1


def test_a_cut_moves_between_batches_in_groups() -> None:
    result = ran(split(**{**MOVING, "grouped": True}))
    assert result["split"]["num_moves"] >= 1 and result["split"]["max_staleness"] <= 2


def test_groups_of_one_batch_are_refused() -> None:
    refused(lambda: split(window=[[0.0, 0]], grouped=True), "grouped", "K = 0")
    # A calibration may choose a K above 0.
    assert split(window="auto", loss_budget=0.1, grouped=True).split.grouped
