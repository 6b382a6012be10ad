"""SoCFlow, SoCFlow+, edge-cloud and Mandheling beside ours: tables and figures, and the states that the lists give."""

import json
import re
from importlib import import_module
from pathlib import Path
from statistics import mean

import pytest

from socflower.paper.comparison import (
    command_of,
    compare_item,
    read_paper,
    stored_results,
    stored_row,
    verdict,
)
from socflower.paper.socflow_plus import items
from socflower.paper.socflow_plus.predictions import (
    NO_STRATEGY,
    OURS,
    RING,
    WORKLOADS,
    Epoch,
    as_run,
    at_best,
)
from socflower.strategies.presets import STRATEGIES
from tests.command_line import Socflower, is_mistake

PAPERS = ("socflow", "socflow-plus", "edge-cloud", "mandheling")
# Of SoCFlow, the epochs of all methods and workloads, and the temperatures of hours; of edge-cloud and Mandheling all
# networks, and trainings.
SLOW = {
    "socflow": {"gpus", "group-size"},
    "socflow-plus": {*(f"figure-{number}" for number in (8, 9, 10, 11, 12, 14)), "table-2"},
    "edge-cloud": {f"figure-{number}" for number in (3, 4, 6, 17, 19, 22, 23)} | {"table-3"},
    "mandheling": {"figure-4", "figure-11"},
}
CASES = [(name, item.id) for name in PAPERS for item in read_paper(name).items if item.cells]
SLOW_CASES = [case for case in CASES if case[1] in SLOW[case[0]]]


@pytest.mark.parametrize("name", PAPERS)
def test_every_item_has_a_place_and_what_is_compared_is_computed(name: str) -> None:
    paper = read_paper(name)
    compute = import_module(f"socflower.paper.{name.replace('-', '_')}.items").COMPUTE
    assert {item.id for item in paper.items if item.cells} == set(compute)
    for item in paper.items:
        assert item.place and item.state != "compared"
        assert all(command_of(file).startswith(("socflower ", "python ")) for file in item.stored)


@pytest.mark.parametrize(("name", "num_figures"), [("socflow-plus", 15), ("edge-cloud", 23)])
def test_every_table_and_figure_of_an_article_is_listed(name: str, num_figures: int) -> None:
    numbers = {re.sub(r"[a-z]$", "", item.id) for item in read_paper(name).items}
    assert numbers >= {f"figure-{number}" for number in range(1, num_figures + 1)}
    assert numbers >= {f"table-{number}" for number in range(1, 5)}


@pytest.mark.few_cells(12)
@pytest.mark.parametrize(("name", "item_id"), [case for case in CASES if case not in SLOW_CASES])
def test_the_listed_state_is_that_of_the_rows(name: str, item_id: str) -> None:
    paper = read_paper(name)
    item = paper.item(item_id)
    assert verdict(compare_item(paper, item)) == item.state


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("name", "item_id"), SLOW_CASES)
def test_the_listed_state_is_that_of_long_computations(name: str, item_id: str) -> None:
    test_the_listed_state_is_that_of_the_rows(name, item_id)


@pytest.mark.slow
def test_methods_are_those_of_the_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is not a strategy has a text for a number, and each at its best is no slower than as run."""
    monkeypatch.setattr(items, "WORKLOADS", {"LeNet": WORKLOADS["LeNet"]})
    monkeypatch.setattr(items, "PEERS", (RING, "no-method"))
    found = items.figure_8()
    assert found["least over no-method"] == found["most over no-method"] == NO_STRATEGY
    ring, ours = as_run("LeNet", RING), as_run("LeNet", OURS, arithmetic="mixed")
    assert isinstance(ring, Epoch) and isinstance(ours, Epoch)
    assert (
        found[f"least over {RING}"]
        == found[f"most over {RING}"]
        == ring.duration_s / ours.duration_s
    )
    best = at_best("LeNet", RING, "per-tensor")
    assert isinstance(best, Epoch) and best.duration_s < ring.duration_s
    assert {peer for peer in items.PEERS if peer in STRATEGIES} == {RING}


def test_trained_cells_are_those_of_the_stored_seeds() -> None:
    """Rows are means of seconds and cells means of ratios, of the same seeds."""
    peers = stored_results(items.TRAININGS)["peers"]
    found = items.trained_scalability()
    for size in items.SIZES:
        row = stored_row(items.TRAININGS, f"{size} SoCs", "s")
        for name, shown in ((OURS, row["ours"]), (RING, row["peer_value"])):
            seconds = peers[f"scalability/{size}/{name}"]["seconds"]
            assert len(seconds) == 3 and shown == pytest.approx(mean(seconds))
            assert found[f"trained, {size} SoCs: seconds of {name}"] == shown
        label = f"trained, {size} SoCs: seconds"
        assert found[f"{label}, least"] <= found[label] <= found[f"{label}, most"]


def test_mapping_and_turns_changed_time_alone_in_the_stored_ablation() -> None:
    arms = {name: items.trained_arm(f"ablation/{name}") for name in items.TECHNIQUES}
    assert arms["groups"]["weights"] == arms["mapping"]["weights"] == arms["turns"]["weights"]
    assert items.trained_ablation()["trained weights with mapping and turns"] == "equal"
    assert all(all(arm["reached"]) for arm in arms.values())


def test_the_command_shows_parts_states_and_reasons(socflower: Socflower) -> None:
    listed = socflower("paper", "socflow-plus", "--list", "--json")
    states = {item["id"]: (item["state"], item["note"]) for item in json.loads(listed.out)["items"]}
    assert {state for state, _ in states.values()} == {
        "reproduced",
        "differs",
        "calibration",
        "not comparable",
    }
    assert all(note for state, note in states.values() if state in ("differs", "not comparable"))
    assert "not comparable" in socflower("paper", "socflow", "--list").out
    stated = socflower("paper", "socflow-plus", "--figure", "13").out
    assert "not comparable" in stated and "note:" in stated
    parts = json.loads(socflower("paper", "socflow-plus", "--figure", "2", "--json").out)["items"]
    assert [part["id"] for part in parts] == [f"figure-2{letter}" for letter in "abcd"]
    assert "docs/results/" in socflower("paper", "socflow-plus", "--item", "figure-2c").out
    is_mistake(socflower("paper", "socflow", "--figure", "8"), "figure-8", "end-to-end")


def test_the_numbers_that_both_have_are_drawn(socflower: Socflower, tmp_path: Path) -> None:
    drawn = tmp_path / "ratios.svg"
    assert socflower("paper", "socflow-plus", "--item", "figure-2d", "--plot", drawn).status == 0
    cells = read_paper("socflow-plus").item("figure-2d").cells
    assert all(cell.key in drawn.read_text("utf-8") for cell in cells)
    for command in (("--item", "theorems"), ("--list",)):
        is_mistake(socflower("paper", "socflow-plus", *command, "--plot", drawn), "--plot")
    nowhere = tmp_path / "missing" / "ratios.svg"
    is_mistake(socflower("paper", "socflow-plus", "--figure", "8", "--plot", nowhere), nowhere)
