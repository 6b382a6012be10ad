"""Every scenario's claims hold whatever the seed, and the seed reaches all that is random in its world."""

import json
import tomllib
from pathlib import Path
from typing import Any

import pytest

from socflower.scenario.schema.config import STRATEGIES
from tests.command_line import Socflower
from tests.sampled_cells import sampled
from tests.test_scenarios import NEED_PROCESSES, SMALL, document_of, in_a_process

PER_RUN_S = 1200.0

FIXED_TIME = {
    **dict.fromkeys(
        (
            "baselines_on_slow_links",
            "broken_reply",
            "compressed_gradients",
            "compressed_leaders",
            "data_stays",
            "dead_client",
            "deployment_digits",
            "digits_demo",
            "idle_slots",
            "int8_digits",
            "int8_on_the_wire",
            "late_group",
            "measured_board",
            "mixed_digits",
            "mixed_shelf",
            "pipeline_in_8_bits",
            "pipeline_in_int8",
            "pipeline_of_pis",
            "pipeline_preempted",
            "preempted_soc",
            "ring_of_leaders",
            "server_momentum",
            "split_int8_edge",
            "split_shared_uplink",
            "two_dimensions",
            "two_servers",
        ),
        "devices and links are as the file says, and every seed trains as many batches; faults strike by plan",
    ),
    **dict.fromkeys(
        (
            "failed_fan",
            "fewest_joules",
            "hot_ambient",
            "hot_board",
            "int8_heat_and_users",
            "mixed_heat_and_users",
            "pipeline_on_a_hot_board",
            "predictive_fan",
            "throttling_onset",
        ),
        "all SoCs sit equally well (no spread), and what happens to rack and room is written down",
    ),
}
"""Why a scenario takes the same virtual time whatever the seed. In all others heat, users or links are random."""
BY_CHOICE = {
    "auto_groups": "time follows the number of groups, which the seed's accuracies choose",
    "split_calibrated": "time follows K and bits, which the seed's losses choose",
}


def other_seeds(scenario: Path) -> list[int]:
    """Return two seeds that are not the file's own, with which `test_scenarios` runs it."""
    return [
        seed for seed in (1, 2, 3) if seed != tomllib.loads(scenario.read_text("utf-8"))["seed"]
    ][:2]


def run(
    scenario: Path, seed: int, out: Path, socflower: Socflower, *options: str
) -> dict[str, Any]:
    """Return what the command says of the scenario: a comparison where its claims are about other strategies too."""
    text = scenario.read_text()
    claims = text.rpartition("[expect]")[2]
    others = [
        name for name in STRATEGIES if any(f"{link}_{name} " in claims for link in ("over", "to"))
    ]
    command = "run"
    if others:
        own = text.partition("[strategy]")[2].split('name = "', 1)[1].partition('"')[0]
        command = f"compare --strategies {','.join([own, *others])}"
    words = [*command.split(), str(scenario), "--set", f"seed={seed}", "--out", str(out), "--json"]
    if scenario.stem in NEED_PROCESSES or "deployment" in options:
        ran = in_a_process(*words, *options, timeout_s=PER_RUN_S)
    else:
        ran = socflower(" ".join(words), *options, "--workers", "0")
    failed = [claim for claim in _claims(ran.out) if not claim["holds"]]
    assert ran.status == 0, f"seed {seed}: {failed}\n{ran.err[-2000:]}"
    document = document_of(ran)
    assert document["expectations"] and all(claim["holds"] for claim in document["expectations"])
    return {**document, **document["rows"][0]} if others else document


def _claims(said: str) -> list[dict[str, Any]]:
    return list(json.loads(said)["expectations"]) if said.startswith("{") else []


@pytest.mark.slow
@pytest.mark.timeout(4 * PER_RUN_S)
@pytest.mark.parametrize("scenario", sampled(SMALL), ids=lambda path: path.stem)
def test_claims_hold_for_every_seed_and_seeds_differ(
    scenario: Path, tmp_path: Path, socflower: Socflower
) -> None:
    seeds = other_seeds(scenario)
    results = [run(scenario, seed, tmp_path / str(seed), socflower) for seed in seeds]
    assert [result["seed"] for result in results] == seeds
    assert len({result["weights_sha256"] for result in results}) == len(seeds)
    times_s = {result["virtual_s"] for result in results}
    if scenario.stem in BY_CHOICE:
        assert len(times_s) == len({json.dumps(result["plan"]["groups"]) for result in results})
    else:
        assert len(times_s) == (1 if scenario.stem in FIXED_TIME else len(seeds))


@pytest.mark.slow
@pytest.mark.timeout(4 * PER_RUN_S)
def test_claims_of_a_deployment_hold_for_every_seed(tmp_path: Path, socflower: Socflower) -> None:
    scenario = next(path for path in SMALL if path.stem == "deployment_digits")
    results = [
        run(scenario, seed, tmp_path / str(seed), socflower, "--engine", "deployment")
        for seed in other_seeds(scenario)
    ]
    assert all(result["engine"] == "deployment" for result in results)
    assert len({result["weights_sha256"] for result in results}) == len(results)


def test_every_exception_is_a_scenario() -> None:
    assert {*FIXED_TIME, *BY_CHOICE} <= {path.stem for path in SMALL}
